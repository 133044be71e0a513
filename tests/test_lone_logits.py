"""A graph that ends in logits says that its loss is elsewhere, and only such a graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.capture import Capture

X, W = torch.randn(6, 4, requires_grad=True), torch.randn(48, 4, requires_grad=True)
LABELS = torch.randint(0, 48, (6,))


def codes(fn, *args, **options) -> list[str]:
    capture = Capture(**options)
    capture.compile(fn)(*args)
    return capture.codes


def test_logits_that_leave_alone() -> None:
    assert codes(F.linear, X, W) == ["loss_elsewhere"]
    assert codes(lambda x, w: (x @ w.t()).float() * 0.5, X, W) == ["loss_elsewhere"]


def test_a_graph_break_before_the_loss() -> None:
    def fn(x, w, y):
        z = F.linear(x, w)
        torch._dynamo.graph_break()
        return F.cross_entropy(z, y)

    capture = Capture()
    capture.compile(fn)(X, W, LABELS)
    assert capture.codes == ["loss_elsewhere"]
    assert "F.linear(x, w)" in capture.report.declined[0].where
    assert capture.summaries == ["logits + cross entropy (mean)"]


def test_what_is_no_head_or_has_its_loss() -> None:
    assert codes(F.linear, X, torch.randn(16, 4, requires_grad=True)) == []  # the width of a body's projection
    assert codes(F.linear, X, W, min_vocab=49) == []
    assert codes(lambda x, w: F.linear(x, w).relu() + x.sum(), X, W) == []
    assert codes(lambda x, w, y: (F.cross_entropy(F.linear(x, w), y), F.linear(x, w)), X, W, LABELS) == []
    with torch.no_grad():
        assert codes(F.linear, X, W) == []  # an evaluation needs no loss
