"""The laws of the algebra, in its reference evaluator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuse_losses.head.algebra import Head, LogitMap, Logits, LogProb, LogSumExp, NllLoss, RowStep, Selected
from fuse_losses.head.reference import evaluate, logits, mapped, stepped

X, W, B = torch.randn(3, 4, 5), torch.randn(11, 5), torch.randn(11)
Z = X.double() @ W.double().t()
Y = torch.randint(0, 11, (3, 4))
STEPS = [st.floats(0.1, 4).map(lambda f: ("scale", f)), st.just(("scale", -1.0)), st.just(("squash", "tanh"))]


@given(st.lists(st.one_of(STEPS), max_size=5))
def test_a_map_is_the_composition_of_its_steps(steps: list[tuple]) -> None:
    u, map = torch.linspace(-3, 3, 13, dtype=torch.float64), LogitMap()
    value = u
    for kind, how in steps:
        after = map.scaled(how) if kind == "scale" else map.squashed(how)
        if after is None:
            assert map.squash != "identity"  # one squash is all that the form holds
            continue
        map, value = after, value * how if kind == "scale" else value.tanh()
    torch.testing.assert_close(mapped(map, u), value)


@pytest.mark.parametrize(
    ("map", "text"),
    [
        (LogitMap(), ""),
        (LogitMap(outer=0.5), "scale 0.5"),
        (LogitMap(inner=2.0, outer=0.5), ""),
        (LogitMap("tanh", 1 / 30, 30.0), "softcap 30"),
        (LogitMap("tanh", 1 / 30, 15.0), "softcap 15, scale 0.5"),
    ],
)
def test_maps_as_text(map: LogitMap, text: str) -> None:
    assert str(map) == text


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (RowStep("slice", (1, 1, None, 1)), Z[:, 1:]),
        (RowStep("slice", (0, -2, 2**63 - 1, 1)), Z[-2:]),
        (RowStep("select", (0, 2)), Z[2]),
        (RowStep("select", (1, -1)), Z[:, -1]),
        (RowStep("permute", (1, 0)), Z.transpose(0, 1)),
        (RowStep("reshape", (-1,)), Z.flatten(0, 1)),
        (RowStep("unsqueeze", (1,)), Z[:, None]),
        (RowStep("flip", ((0, 1),)), Z.flip(0, 1)),
        (RowStep("roll", ((2, -1), (0, 1))), Z.roll(2, 0).roll(-1, 1)),
        (RowStep("index", (torch.tensor([2, 0, 2]), None)), Z[[2, 0, 2]]),
        (RowStep("index", (torch.tensor([[0], [1]]), torch.tensor([0, 1]))), Z[:2, :2]),
    ],
)
def test_a_row_step_leaves_the_vocabulary_alone(step: RowStep, expected: torch.Tensor) -> None:
    assert torch.equal(stepped(step, Z), expected)
    # on the hidden states or on the logits: the same rows
    torch.testing.assert_close(stepped(step, X.double()) @ W.double().t(), expected)


def test_row_steps_follow_one_another() -> None:
    rows = RowStep("slice", (1, 1, None, 1)), RowStep("permute", (1, 0)), RowStep("reshape", (-1,))
    torch.testing.assert_close(logits(Logits(rows=rows), X, W), Z[:, 1:].transpose(0, 1).flatten(0, 1))


def test_biases_add_before_the_map() -> None:
    head = Logits(LogitMap("tanh", 0.5, 2.0), bias=B[None])
    torch.testing.assert_close(logits(head, X, W, B), 2 * torch.tanh(0.5 * (Z + 2 * B)))


def test_selected_less_logsumexp_is_the_log_prob() -> None:
    head = Logits(LogitMap(outer=0.3))
    difference = evaluate(Selected(head, Y), X, W) - evaluate(LogSumExp(head), X, W)
    torch.testing.assert_close(evaluate(LogProb(head, Y), X, W), difference)


def test_shifting_all_logits_changes_no_log_prob() -> None:
    shift = torch.full((11,), 7.0)
    torch.testing.assert_close(evaluate(LogProb(Logits(bias=shift), Y), X, W), evaluate(LogProb(Logits(), Y), X, W))


def test_probabilities_sum_to_one() -> None:
    total = sum(evaluate(LogProb(Logits(), torch.full_like(Y, v)), X, W).exp() for v in range(11))
    torch.testing.assert_close(total, torch.ones(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_a_loss_is_the_sum_of_its_rows(factor: float) -> None:
    target = Y.clone()
    target[0, :2] = 5  # a class that is ignored
    rows = evaluate(LogProb(Logits(), target, ignore_index=5, factor=factor), X, W)
    assert torch.equal(rows == 0, target == 5)
    total = evaluate(NllLoss(Logits(), target, 5, mean=False, factor=factor), X, W)
    mean = evaluate(NllLoss(Logits(), target, 5, mean=True, factor=factor), X, W)
    torch.testing.assert_close(total, -rows.sum())
    torch.testing.assert_close(mean, -rows.sum() / (target != 5).sum())


def test_a_loss_of_ignored_rows_alone() -> None:
    ignored = torch.full_like(Y, -100)
    assert evaluate(NllLoss(Logits(), ignored, -100, mean=True), X, W).isnan()
    assert evaluate(NllLoss(Logits(), ignored, -100, mean=False), X, W) == 0


def test_a_negative_target_counts_from_the_end_only_if_it_wraps() -> None:
    wrapped = evaluate(LogProb(Logits(), Y - 11, wraps=True), X, W)
    assert torch.equal(wrapped, evaluate(LogProb(Logits(), Y), X, W))
    assert torch.equal(evaluate(Selected(Logits(), Y - 11, wraps=True), X, W), evaluate(Selected(Logits(), Y), X, W))
    with pytest.raises(RuntimeError, match="out of bounds"):
        evaluate(LogProb(Logits(), Y - 11), X, W)


def test_the_gradient_of_a_log_prob_is_onehot_less_probabilities() -> None:
    bias = torch.zeros(11, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, 4, dtype=torch.float64)
    evaluate(LogProb(Logits(), Y, factor=0.5), X, W, bias).backward(upstream)
    onehot = torch.nn.functional.one_hot(Y, 11)
    torch.testing.assert_close(bias.grad, (0.5 * upstream[..., None] * (onehot - Z.softmax(-1))).sum((0, 1)))


def test_detached_logits_have_no_gradient() -> None:
    x = X.clone().requires_grad_()
    assert not evaluate(LogSumExp(Logits(detached=True)), x, W).requires_grad
    assert evaluate(LogSumExp(Logits()), x, W).requires_grad


@pytest.mark.parametrize(
    ("functionals", "summary"),
    [
        ([NllLoss(Logits(), Y, -100, mean=True)], "linear + cross entropy (mean)"),
        ([NllLoss(Logits(bias=B), Y, -100, mean=False)], "linear + cross entropy (sum) (bias)"),
        ([LogProb(Logits(), Y), LogProb(Logits(), Y + 0)], "linear + log-prob"),
        ([LogSumExp(Logits()), Selected(Logits(), Y)], "linear + logsumexp + selected logit"),
        ([LogProb(Logits(LogitMap("tanh", 0.5, 2.0), bias=B), Y)], "linear + log-prob (bias, softcap 2)"),
    ],
)
def test_summaries(functionals: list, summary: str) -> None:
    assert Head(tuple(functionals), vocab=11, hidden=(5,), rows=12, dtype="float32").summary == summary
