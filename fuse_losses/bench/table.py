"""A record as tables: for the terminal, and in Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from fuse_losses.bench.peers import OURS
from fuse_losses.bench.record import Record, Row


def _number(form: str, value: float | None) -> str:
    return "" if value is None else format(value, form)


def _peer(row: Row) -> str:
    """The peer with what has to be known of its numbers; without numbers it says why."""
    if row.timing is None:
        return f"{row.peer}: {row.status}"
    notes = ["nothing fused"] * (row.fused == 0) + ["overwrites its input"] * bool(row.overwrites)
    return ": ".join([row.peer, ", ".join(notes)]) if notes else row.peer


def _ms(row: Row) -> str:
    ms = row.timing.median if row.timing else None
    return _number(",.2f" if ms and ms >= 1 else ".3f", ms)


def _spread(row: Row) -> str:
    """From the 20th to the 80th percentile, relative to the median."""
    return f"{(row.timing.p80 - row.timing.p20) / row.timing.median:.0%}" if row.timing else ""


COLUMNS: dict[str, Callable[[Row], str]] = {
    "peer": _peer,
    "ms": _ms,
    "spread": _spread,
    "x floor": lambda row: _number(".2f", row.ratio),
    "graph x floor": lambda row: _number(".2f", row.replay_ratio),
    "unpinned ms": lambda row: _number(".3f", row.unpinned_ms),
    "peak MiB": lambda row: _number(",.0f", row.peak_mib),
    "loss": lambda row: _number(".4f", row.loss),
    "loss error": lambda row: _number(".1e", row.loss_error),
    "gradient error": lambda row: _number(".1e", row.gradient_error),
}


def sections(record: Record) -> dict[str, list[Row]]:
    """The rows of each case and phase, which are what may be compared with one another."""
    found: dict[str, list[Row]] = {}
    for row in record.rows:
        found.setdefault(f"{row.case}, {row.phase}", []).append(row)
    return found


def _grid(rows: list[Row]) -> list[tuple[str, ...]]:
    """The names of the columns and a line for each row. A column without any number is left out."""
    cells = {name: [cell(row) for row in rows] for name, cell in COLUMNS.items()}
    names = [name for name, column in cells.items() if any(column)]
    return [tuple(names), *zip(*(cells[name] for name in names), strict=True)]


def text_tables(record: Record) -> list[Table]:
    tables = []
    for section, rows in sections(record).items():
        names, *lines = _grid(rows)
        table = Table(title=f"{record.workload}: {section}", title_justify="left", title_style="bold")
        for name in names:
            table.add_column(name, justify="left" if name == "peer" else "right")
        for row, line in zip(rows, lines, strict=True):
            table.add_row(*line, style="green" if row.peer == OURS else None)
        tables.append(table)
    return tables


def markdown(record: Record) -> str:
    """A table for each section and, under them, where the numbers come from."""
    lines: list[str] = []
    for section, rows in sections(record).items():
        names, *cells = _grid(rows)
        lines += [f"**{section}**", "", f"| {' | '.join(names)} |", f"|---|{'---:|' * (len(names) - 1)}"]
        lines += [f"| {' | '.join(line)} |" for line in cells]
        lines.append("")
    origin = record.origin
    versions = ", ".join(f"{name} {found}" for name, found in origin.versions.items() if found)
    copy, matmul = record.roofs["copy_bytes_per_second"], record.roofs["matmul_bf16_flops_per_second"]
    roofs = f"measured roofs: copy {copy / 1e12:.2f} TB/s, bf16 matmul {matmul / 1e12:.0f} TFLOP/s"
    dirty = ", with uncommitted changes" if origin.dirty else ""
    lines.append(f"{origin.device}; {versions}; {roofs}; commit `{origin.commit[:12]}`{dirty}; {origin.date}.")
    return "\n".join(lines)
