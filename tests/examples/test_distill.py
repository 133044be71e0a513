"""Distillation, at toy sizes: both heads are fused, the losses are eager's, and the loss is Hinton's."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tests.examples.script import EXAMPLES, run_tiny


@pytest.mark.slow
def test_distillation_holds(tmp_path: Path) -> None:
    output = " ".join(run_tiny("distill.py", tmp_path).replace("fused    ", "fused: ").split())
    assert "fused: 2 linear + weighted sum of kl" in output
    assert "The teacher (hidden size 64)" in output and "the student (hidden size 32)" in output


def test_the_loss_is_hintons(monkeypatch: pytest.MonkeyPatch) -> None:
    """T^2 KL(teacher || student) at temperature T beside the cross entropy, means over the rows that count."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = runpy.run_path(str(EXAMPLES / "distill.py"))
    student, teacher = (torch.randn(2, 7, 11) for _ in range(2))
    labels = torch.randint(11, (2, 7))
    labels[0, 4:] = example["IGNORE"]

    t, weight = example["TEMPERATURE"], example["OF_TEACHER"]
    counts = labels[:, 1:] >= 0
    rows = [logits[:, :-1][counts].double() for logits in (student, teacher)]
    soft, expected = ((row / t).softmax(-1) for row in rows)
    divergence = (expected * (expected / soft).log()).sum(-1).mean()
    hard = -rows[0].softmax(-1).gather(1, labels[:, 1:][counts][:, None]).log().mean()
    right = weight * t**2 * divergence + (1 - weight) * hard
    assert example["distillation_loss"](student, teacher, labels).item() == pytest.approx(right.item(), rel=1e-5)
