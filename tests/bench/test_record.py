"""A record survives its file, and its tables say what it holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fuse_losses.bench.measure import Timing
from fuse_losses.bench.record import Origin, Record, Row, here
from fuse_losses.bench.table import markdown, sections, text_tables

ORIGIN = Origin(
    device="a device",
    versions={"torch": "2.13.0", "liger-kernel": None},
    commit="0123456789abcdef",
    dirty=True,
    date="2026-01-01T00:00:00+00:00",
)
ROWS = (
    Row("T=1", "forward", "eager", timing=Timing(4.0, 3.0, 5.0, 10), peak_mib=2048.0, loss=9.5, floor_ms=2.0),
    Row("T=1", "forward", "liger", status="not installed", floor_ms=2.0),
    Row("T=2", "forward", "fuse_losses", timing=Timing(1.0, 1.0, 1.0, 10), peak_mib=1.0, loss=9.5, fused=1),
)
ROOFS = {"copy_bytes_per_second": 4.27e12, "matmul_bf16_flops_per_second": 700e12}
RECORD = Record("linear-ce", {"dtype": "bfloat16"}, ORIGIN, ROOFS, ROWS)


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    RECORD.save(tmp_path / "new" / "record.json")
    assert Record.load(tmp_path / "new" / "record.json") == RECORD


def test_the_ratio_is_time_over_the_floor() -> None:
    assert ROWS[0].ratio == 2.0
    assert ROWS[1].ratio is None
    assert ROWS[2].ratio is None


def test_only_rows_of_one_case_stand_together() -> None:
    apart = replace(RECORD, rows=(ROWS[0], ROWS[2], ROWS[1]))  # a peer after the other, as they are measured
    for record in (RECORD, apart):
        assert {title: len(rows) for title, rows in sections(record).items()} == {"T=1, forward": 2, "T=2, forward": 1}
        assert len(text_tables(record)) == 2


def test_markdown_holds_every_number_and_where_it_comes_from() -> None:
    text = markdown(RECORD)
    assert "| eager | 4.00 | 50% | 2.00 | 2,048 | 9.5000 |" in text
    assert "| liger: not installed |" in text
    assert "| fuse_losses | 1.00 |" in text
    unfused = replace(RECORD, rows=(replace(ROWS[2], fused=0),))
    assert "| fuse_losses: nothing fused | 1.00 |" in markdown(unfused)
    assert "torch 2.13.0" in text and "liger-kernel" not in text
    assert "`0123456789ab`, with uncommitted changes" in text
    assert "uncommitted" not in markdown(replace(RECORD, origin=replace(ORIGIN, dirty=False)))


def test_a_column_is_there_when_it_has_a_number() -> None:
    checked = replace(ROWS[0], replay_ms=3.0, loss_error=1e-7, gradient_error=2.5e-6, overwrites=True)
    text = markdown(replace(RECORD, rows=(checked, ROWS[1])))
    assert "| x floor | graph x floor | peak MiB | loss | loss error | gradient error |" in text
    assert "| eager: overwrites its input | 4.00 | 50% | 2.00 | 1.50 | 2,048 | 9.5000 | 1.0e-07 | 2.5e-06 |" in text
    assert "error" not in markdown(RECORD) and "graph x floor" not in markdown(RECORD)
    short = replace(RECORD, rows=(replace(ROWS[0], timing=Timing(0.0204, 0.0204, 0.0204, 10), floor_ms=None),))
    assert "| eager | 0.020 | 0% | 2,048 | 9.5000 |" in markdown(short)


def test_the_origin_names_this_machine() -> None:
    origin = here("cpu", commit="abc")
    assert origin.device and origin.commit == "abc" and not origin.dirty
    assert origin.versions["torch"] and origin.versions["fuse_losses"]
