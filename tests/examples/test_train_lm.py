"""The demo, at toy sizes: it trains, fuses the head, agrees with eager and leaves its plot."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.examples.script import EXAMPLES, run_tiny

SCRIPT = EXAMPLES / "train_lm.py"


@pytest.mark.slow
def test_the_demo_holds(tmp_path: Path) -> None:
    run_tiny("train_lm.py", tmp_path, "--out", str(tmp_path / "memory.png"))
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


class Ran:
    """A run with the numbers that the verdict reads."""

    def __init__(self, demo: dict, losses: list[float], fused: int) -> None:
        self.run = demo["Run"](losses=losses, seconds=[1.0] * len(losses))
        self.run.memory = demo["MemoryTrace"]([(0.0, 0), (1.0, 2**20)], 2**20)
        self.run.report = type("Report", (), {"fused": [None] * fused})()


@pytest.mark.parametrize(
    ("losses", "fused", "holds", "says"),
    [
        ([10.0, 9.0], 1, True, "equal at every step"),
        ([10.0, 9.1], 1, False, "differ"),
        ([10.0, float("nan")], 1, False, "differ"),
        ([10.0, 9.0], 0, False, "No loss head was fused"),
    ],
)
def test_the_verdict(losses: list[float], fused: int, holds: bool, says: str) -> None:
    demo = runpy.run_path(str(SCRIPT))
    eager = Ran(demo, [10.0, 9.0], 0).run
    ours = Ran(demo, losses, fused).run
    runs = {"eager": eager, "inductor": eager, "fuse_losses": ours}
    verdict, sentence = demo["verdict"](runs, demo["choose_setup"](tiny=True))
    assert verdict is holds
    assert says in sentence
