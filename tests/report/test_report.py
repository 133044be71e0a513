"""The report: text, JSON, session, counters, log, trace and file."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed

import fuse_losses
from fuse_losses import Decline, HeadReport, Report, last_report
from fuse_losses.report import report as reports

FUSED = HeadReport(
    "fused",
    "linear + cross entropy (mean)",
    "model.py:7: loss = f(x)",
    {"rows": 64, "chunk_rows": 32, "because": "it pays"},
    bytes_saved=3 * 2**20,
)
DECLINED = HeadReport(
    "declined",
    "linear [*, 37]",
    "model.py:7: loss = f(x)",
    decline=Decline("rows_mix", "they do", "model.py:6: z = g(x)"),
)


def loss(x, w, y):
    return F.cross_entropy(F.linear(x, w), y)


def args():
    return torch.randn(4, 6, requires_grad=True), torch.randn(37, 6), torch.randint(0, 37, (4,))


def compiled(**options):
    own = {f"fuse_losses.{name}": value for name, value in options.items()}
    return torch.compile(loss, backend="fuse_losses", options={"fuse_losses.min_vocab": 1, **own})


def test_as_text() -> None:
    assert (
        str(Report([FUSED, DECLINED], graphs=2))
        == textwrap.dedent(
            """\
        fuse_losses: 1 fused, 1 declined in 2 graphs
        fused    linear + cross entropy (mean)
                 model.py:7: loss = f(x)
                 rows: 64; chunk rows: 32; because: it pays; saves about 3.0 MiB
        declined linear [*, 37]
                 model.py:7: loss = f(x)
                 [rows_mix] they do
                 at model.py:6: z = g(x)
                 what to do: select or combine rows before the head, or after the loss
        with """
        )
        + reports.versions()
    )
    assert str(Report(graphs=1)) == f"fuse_losses: 0 fused, 0 declined in 1 graph\nwith {reports.versions()}"
    assert f"torch {torch.__version__}" in reports.versions() and "Python 3." in reports.versions()


def test_as_json() -> None:
    data = json.loads(json.dumps(Report([FUSED, DECLINED], graphs=2).to_dict()))
    assert data == {
        "graphs": 2,
        "heads": [
            {
                "outcome": "fused",
                "summary": "linear + cross entropy (mean)",
                "where": "model.py:7: loss = f(x)",
                "rows": 64,
                "chunk_rows": 32,
                "because": "it pays",
                "bytes_saved": 3 * 2**20,
            },
            {
                "outcome": "declined",
                "summary": "linear [*, 37]",
                "where": "model.py:7: loss = f(x)",
                "code": "rows_mix",
                "reason": "they do",
                "remedy": DECLINED.decline.remedy,
                "declined_at": "model.py:6: z = g(x)",
            },
        ],
    }


def test_extend() -> None:
    report = Report([FUSED], graphs=1)
    report.extend(Report([DECLINED], graphs=2))
    assert (report.fused, report.declined, report.graphs) == ([FUSED], [DECLINED], 3)


def test_the_session_ends_with_a_reset_of_dynamo() -> None:
    compiled()(*args())
    assert len(last_report().fused) == 1 and last_report().graphs == 1
    kept = last_report()
    torch._dynamo.reset()
    assert last_report() == Report()
    assert len(kept.fused) == 1  # what was read is not taken away


def test_counters_count_heads() -> None:
    compiled()(*args())
    assert torch._dynamo.utils.counters["fuse_losses"] == {"fused": 1}
    compiled(min_vocab=38)(*args())
    assert torch._dynamo.utils.counters["fuse_losses"]["fused"] == 1


def test_where_is_the_line_of_the_user() -> None:
    compiled()(*args())
    path, number, code = last_report().fused[0].where.split(":", 2)
    assert path == __file__
    assert int(number) == loss.__code__.co_firstlineno + 1
    assert code.strip() == "return F.cross_entropy(F.linear(x, w), y)"


def test_a_file_gets_a_line_per_graph(tmp_path: Path) -> None:
    file = tmp_path / "report.jsonl"
    compiled(report=str(file))(*args())
    torch._dynamo.reset()
    compiled(report=str(file))(*args())
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [line["heads"][0]["outcome"] for line in lines] == ["fused", "fused"]
    assert lines[0] == json.loads(json.dumps(fuse_losses.Report(last_report().fused, 1).to_dict()))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendCompilerFailed, match="no such folder") as caught:
        compiled(report=str(tmp_path / "no such folder" / "report.jsonl"))(*args())
    assert isinstance(caught.value.inner_exception, OSError)


def test_the_log_has_every_head(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fuse_losses"):
        compiled()(*args())
    assert [r.getMessage() for r in caplog.records if r.name == "fuse_losses"] == [str(last_report().fused[0])]


def test_a_graph_without_a_head_is_not_news(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(reports, "_session", Report())
    with caplog.at_level(logging.INFO, logger="fuse_losses"):
        reports.publish(Report(graphs=1), None)
    assert not caplog.records


PROGRAM = textwrap.dedent(
    """
    import torch, torch.nn.functional as F
    fn = torch.compile(lambda x, w, y: F.cross_entropy(F.linear(x, w), y), backend="fuse_losses",
                       options={"fuse_losses.min_vocab": 1})
    fn(torch.randn(4, 6, requires_grad=True), torch.randn(37, 6), torch.randint(0, 37, (4,)))
    """
)


def run(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_")}
    environment = {**inherited, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), **environment}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def test_torch_logs_shows_the_report(tmp_path: Path) -> None:
    done = run(tmp_path, TORCH_LOGS="+fuse_losses")
    assert "linear + cross entropy (mean)" in done.stderr
    assert "program.py" in done.stderr


def test_silent_unless_asked(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert "fuse_losses" not in done.stderr and not done.stdout


def test_the_trace_has_the_report(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    run(tmp_path, TORCH_TRACE=str(trace))
    (log,) = trace.iterdir()
    text = log.read_text("utf-8")
    assert '"name": "fuse_losses_report"' in text
    assert "linear + cross entropy (mean)" in text
