"""The pipeline never changes the graph it was given, and what fails in it goes no further."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from fuse_losses import FusionError, pipeline
from fuse_losses.rewrite.chunk_graph import ChunkGraph
from fuse_losses.rewrite.generic import GenericWriter
from fuse_losses.rewrite.slices import Slicer
from tests.capture import Capture, listing, operators
from tests.oracle import assert_as_eager


def loss(x, w, y):
    return F.cross_entropy(F.linear(x, w), y)


def two_heads(x, w, y):
    return loss(x, w, y) + loss(x.tanh(), w.flip(0), y)


def one_good_one_bad(x, w, y):
    bad = F.linear(x.tanh(), w).log_softmax(0)[0].sum()
    return loss(x, w, y) + bad


def args():
    return torch.randn(4, 6, requires_grad=True), torch.randn(37, 6, requires_grad=True), torch.randint(0, 37, (4,))


def by_rows(x, w, y):
    return F.cross_entropy(F.linear(x, w), y, label_smoothing=0.1)


def two_by_rows(x, w, y):
    return by_rows(x, w, y) + by_rows(x.tanh(), w.flip(0), y)


# (what holds it, its name): every stage of the road, in its order
STAGES = [
    (pipeline, "find_anchors"),
    (pipeline, "check_transforms"),
    (pipeline, "check_product"),
    (pipeline, "retrace"),
    (pipeline, "gradient_cuts"),
    (pipeline, "analyse"),
    (pipeline, "lift"),
    (pipeline, "find_regions"),
    (Slicer, "lifted"),
    (pipeline, "check_writes"),
    (pipeline, "choose"),
    (pipeline, "replace_exits"),
    (pipeline, "erase_unused"),
]
ROW_STAGES = [(Slicer, "by_rows"), (ChunkGraph, "emit"), (pipeline, "register_region"), (GenericWriter, "_run")]
CASES = [*((*s, two_heads) for s in STAGES), *((*s, two_by_rows) for s in ROW_STAGES)]
stages = pytest.mark.parametrize(("holder", "stage", "fn"), CASES, ids=[c[1] for c in CASES])


@stages
def test_a_stage_that_fails_leaves_the_graph_to_inductor(holder, stage: str, fn, monkeypatch, caplog) -> None:
    def fail(*args, **kwargs):
        raise ZeroDivisionError(f"in {stage}")

    monkeypatch.setattr(holder, stage, fail)
    capture = Capture()
    with caplog.at_level(logging.ERROR, logger="fuse_losses"):
        assert_as_eager(capture.compile(fn), fn, args())
    assert set(capture.codes) == {"failed"}
    assert f"ZeroDivisionError: in {stage}" in capture.report.declined[0].decline.reason
    assert not capture.report.fused and capture.after == capture.before
    assert f"in {stage}" in caplog.text  # with the traceback, for the bug report


@stages
def test_strict_raises_what_failed(holder, stage: str, fn, monkeypatch) -> None:
    def fail(*args, **kwargs):
        raise ZeroDivisionError(f"in {stage}")

    monkeypatch.setattr(holder, stage, fail)
    with pytest.raises(Exception, match=f"ZeroDivisionError: in {stage}"):
        Capture(strict=True).compile(fn)(*args())


@pytest.mark.parametrize("fn", [two_heads, two_by_rows], ids=lambda fn: fn.__name__)
def test_a_rewrite_that_fails_half_way_leaves_no_half(fn, monkeypatch) -> None:
    real, calls = pipeline.replace_exits, []

    def fail_the_second_time(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("late")
        real(*arguments)

    monkeypatch.setattr(pipeline, "replace_exits", fail_the_second_time)
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, args())
    assert len(calls) == 2
    assert not capture.report.fused and capture.after == capture.before
    assert operators(capture.after[0]) == []


def test_the_graph_that_was_given_is_not_changed() -> None:
    seen = []

    class Twice(Capture):
        def __call__(self, gm, example_inputs):
            seen.append(listing(gm))
            run = super().__call__(gm, example_inputs)
            seen.append(listing(gm))
            return run

    capture = Twice()
    capture.compile(loss)(*args())
    assert seen[0] == seen[1]
    assert capture.after[0] is not capture.before[0]


def test_the_copy_is_well_formed() -> None:
    capture = Capture()
    capture.compile(loss)(*args())
    before, after = capture.before[0], capture.after[0]
    after.graph.lint()
    assert [n.name for n in after.graph.find_nodes(op="placeholder")] == [
        n.name for n in before.graph.find_nodes(op="placeholder")
    ]
    assert after.meta == before.meta
    for node in after.graph.find_nodes(op="placeholder"):
        assert "example_value" in node.meta


def test_a_graph_without_a_loss_is_handed_on_as_it_is() -> None:
    capture = Capture()
    capture.compile(lambda x, w: F.linear(x, w).relu())(*args()[:2])
    assert capture.after[0] is capture.before[0]
    assert capture.codes == ["loss_elsewhere"] and capture.report.graphs == 1
    body = Capture(min_vocab=10_000)
    body.compile(lambda x, w: F.linear(x, w).relu())(*args()[:2])
    assert body.report.heads == []


def test_two_heads_in_one_graph() -> None:
    capture = Capture()
    assert_as_eager(capture.compile(two_heads), two_heads, args())
    assert len(capture.report.fused) == 2
    assert operators(capture.after[0]) == ["linear_nll_sum"] * 2


def test_a_declined_head_does_not_hold_up_its_neighbour() -> None:
    capture = Capture()
    assert_as_eager(capture.compile(one_good_one_bad), one_good_one_bad, args())
    assert (len(capture.report.fused), capture.codes) == (1, ["wrong_axis"])


def test_strict_raises_for_one_of_two() -> None:
    with pytest.raises(Exception, match="wrong_axis") as caught:
        Capture(strict=True).compile(one_good_one_bad)(*args())
    assert isinstance(caught.value.inner_exception, FusionError)


def test_the_same_graph_is_rewritten_to_the_same_text() -> None:
    """Compile caches are keyed on the graph."""
    texts = []
    for _ in range(2):
        torch._dynamo.reset()
        capture = Capture()
        capture.compile(two_heads)(*args())
        texts.append(listing(capture.after[0]))
    assert texts[0] == texts[1]


def test_no_guard_is_added_by_reading_symbolic_sizes() -> None:
    capture = Capture()
    compiled = capture.compile(lambda x, w, y: F.cross_entropy(F.linear(x, w).mT, y), dynamic=True)
    for rows in ((2, 5), (3, 7), (5, 2), (4, 37), (6, 6)):  # sizes that meet the hidden size and the vocabulary
        compiled(torch.randn(*rows, 6), torch.randn(37, 6), torch.randint(0, 37, rows))
    for vocab, hidden in ((38, 6), (40, 9), (9, 9)):
        compiled(torch.randn(3, 7, hidden), torch.randn(vocab, hidden), torch.randint(0, vocab, (3, 7)))
    assert len(capture.after) == 1
    assert len(capture.report.fused) == 1


def test_a_vmap_before_the_head_is_the_models_body() -> None:
    def fn(x, w, y):
        return F.cross_entropy(torch.vmap(lambda row: row.tanh() * row.sum())(x) @ w.t(), y)

    args = [torch.randn(10, 8, requires_grad=True), torch.randn(300, 8, requires_grad=True), torch.arange(10)]
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, args)
    assert len(capture.report.fused) == 1


def test_a_head_under_vmap_is_declined() -> None:
    def fn(x, w, y):
        return torch.vmap(lambda x, y: F.cross_entropy(x @ w.t(), y))(x, y)

    args = [torch.randn(2, 10, 8), torch.randn(300, 8), torch.arange(20).view(2, 10)]
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, args)
    assert capture.codes == ["functorch"]
