"""`explain(fn)(*args)` tells what would be fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fuse_losses
from fuse_losses import OptionError, Report, explain, last_report


def loss(x, w, y):
    return F.cross_entropy(F.linear(x, w), y)


def args(vocab: int = 37):
    return torch.randn(4, 6, requires_grad=True), torch.randn(vocab, 6), torch.randint(0, vocab, (4,))


def test_a_fused_head_says_all_that_a_user_asks() -> None:
    report = explain(loss, min_vocab=1, chunk_rows=2)(*args())
    (head,) = report.fused
    assert head.summary == "linear + cross entropy (mean)"
    assert dict(head.details) | {"because": ""} == {
        "rows": 4,
        "hidden": 6,
        "vocab": 37,
        "dtype": "float32",
        "executor": "kernels",
        "chunk_rows": 2,
        "gradients": "forward",
        "because": "",
    }
    assert head.bytes_saved == (2 * 4 - 2) * 37 * 4
    assert "saves about" in str(report)


def test_returned_logits_are_said_to_be_kept() -> None:
    def fn(x, w, y):
        z = F.linear(x, w)
        return F.cross_entropy(z, y), z

    (head,) = explain(fn, min_vocab=1)(*args()).fused
    assert head.details["logits"] == "kept (they are returned)"


def test_the_defaults_are_the_backends() -> None:
    assert [h.outcome for h in explain(loss)(*args(vocab=4000)).heads] == ["fused"]
    assert [h.decline.code for h in explain(loss)(*args(vocab=3999)).heads] == ["small_vocab"]


def test_keyword_arguments_and_modules() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(6, 37)

        def forward(self, x, labels=None):
            return F.cross_entropy(self.head(x), labels)

    x, _, y = args()
    assert len(explain(Model(), min_vocab=1)(x, labels=y).fused) == 1


def test_graph_breaks_give_several_graphs() -> None:
    def fn(x, w, y):
        first = loss(x, w, y)
        torch._dynamo.graph_break()
        return first + loss(x * 2, w, y)

    report = explain(fn, min_vocab=1)(*args())
    assert (len(report.fused), report.graphs) == (2, 2)


def test_a_head_and_its_loss_in_two_graphs_are_not_one() -> None:
    def fn(x, w, y):
        z = F.linear(x, w)
        torch._dynamo.graph_break()
        return F.cross_entropy(z, y)

    (head,) = explain(fn, min_vocab=1)(*args()).fused
    assert head.summary == "logits + cross entropy (mean)"  # which exist: only what the loss makes of them is saved


def test_it_leaves_no_trace() -> None:
    explain(loss, min_vocab=1)(*args())
    assert last_report() == Report()
    assert torch._dynamo.utils.counters["fuse_losses"] == {}


def test_each_call_reads_anew() -> None:
    explained = explain(loss, min_vocab=1)
    assert len(explained(*args()).fused) == len(explained(*args()).fused) == 1


def test_a_wrong_option_is_an_error_at_once() -> None:
    with pytest.raises(OptionError, match=r"did you mean fuse_losses\.min_vocab"):
        explain(loss, min_vocb=1)


def test_an_error_of_the_function_is_its_own() -> None:
    def broken(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fuse_losses.explain(broken)(torch.ones(1))
