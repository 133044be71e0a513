"""A record as tables: for the terminal, and in Markdown for the documentation."""

from __future__ import annotations

from itertools import groupby

from rich.table import Table

from fuse_losses.bench.peers import OURS
from fuse_losses.bench.record import Record, Row

HEADER = ("peer", "ms", "spread", "x floor", "peak MiB", "loss")


def cells(row: Row) -> tuple[str, ...]:
    """One row in the order of HEADER; a peer without numbers says why. The spread is from p20 to p80."""
    if row.timing is None:
        return (f"{row.peer}: {row.status}", "", "", "", "", "")
    return (
        row.peer if row.fused != 0 else f"{row.peer}: nothing fused",
        f"{row.timing.median:,.2f}",
        f"{(row.timing.p80 - row.timing.p20) / row.timing.median:.0%}",
        f"{row.ratio:.2f}" if row.ratio else "",
        f"{row.peak_mib:,.0f}",
        f"{row.loss:.4f}",
    )


def sections(record: Record) -> list[tuple[str, list[Row]]]:
    """The rows of each case and phase, which are what may be compared with one another."""
    return [(title, list(rows)) for title, rows in groupby(record.rows, lambda row: f"{row.case}, {row.phase}")]


def text_tables(record: Record) -> list[Table]:
    tables = []
    for section, rows in sections(record):
        table = Table(title=f"{record.workload}: {section}", title_justify="left", title_style="bold")
        for name in HEADER:
            table.add_column(name, justify="left" if name == "peer" else "right")
        for row in rows:
            table.add_row(*cells(row), style="green" if row.peer == OURS else None)
        tables.append(table)
    return tables


def markdown(record: Record) -> str:
    """A table for each section and, under them, where the numbers come from."""
    lines: list[str] = []
    for section, rows in sections(record):
        lines += [f"**{section}**", "", f"| {' | '.join(HEADER)} |", f"|---|{'---:|' * (len(HEADER) - 1)}"]
        lines += [f"| {' | '.join(cells(row))} |" for row in rows]
        lines.append("")
    origin = record.origin
    versions = ", ".join(f"{name} {found}" for name, found in origin.versions.items() if found)
    copy, matmul = record.roofs["copy_bytes_per_second"], record.roofs["matmul_bf16_flops_per_second"]
    roofs = f"measured roofs: copy {copy / 1e12:.2f} TB/s, bf16 matmul {matmul / 1e12:.0f} TFLOP/s"
    dirty = ", with uncommitted changes" if origin.dirty else ""
    lines.append(f"{origin.device}; {versions}; {roofs}; commit `{origin.commit[:12]}`{dirty}; {origin.date}.")
    return "\n".join(lines)
