"""torch.func inside of the compiled function, and around the functions for eager code: one derivative, never two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fuse_losses.functional import cross_entropy, linear_cross_entropy, linear_log_probs
from tests.capture import Capture, operators
from tests.oracle import assert_as_eager

grad, grad_and_value = torch.func.grad, torch.func.grad_and_value
Y = torch.tensor([3, 40, -100, 0, 17, 40, 5])


def tensors(learned: bool = False) -> list[torch.Tensor]:
    return [t.requires_grad_(learned) for t in (torch.randn(7, 9), torch.randn(41, 9))]


def loss(x, w):
    return F.cross_entropy(F.linear(x, w), Y)


def squared(x, w):
    """Row weights are known in the backward only."""
    z = F.linear(x, w)
    return z.logsumexp(-1).square().mean() + F.cross_entropy(z, Y)


def entropy(x, w):
    z = F.linear(x, w)
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).square().mean()


def aux(x, w):
    return loss(x, w), {"rows": (Y >= 0).sum()}


def weighted(x, w):
    """The weights of the rows are differentiated too."""
    return (F.cross_entropy(F.linear(x, w), Y, reduction="none") * x.sum(-1)).sum()


def learned_outside(x, w):
    """A gradient that flows around the transform, not into it."""
    value = grad(loss)(x.detach(), w.detach())
    return (value * x).sum()


FUSED: dict[str, Callable[..., object]] = {
    "both": grad_and_value(loss, argnums=(0, 1)),
    "one": grad(loss, argnums=1),
    "aux": grad(aux, has_aux=True),
    "recomputed": grad(squared, argnums=(0, 1)),
    "rows": grad_and_value(entropy, argnums=(0, 1)),
    "weighted": grad(weighted, argnums=(0, 1)),
    "twice": lambda x, w: (grad(loss)(x, w), grad(loss, argnums=1)(x.tanh(), w)),
    "no grad": lambda x, w: torch.no_grad()(grad(loss, argnums=(0, 1)))(x, w),
    "a dict": lambda x, w: grad(lambda p: loss(p["x"], p["w"]))({"x": x, "w": w}),
}


@pytest.mark.parametrize("fn", FUSED.values(), ids=FUSED)
def test_one_derivative_is_fused(fn) -> None:
    capture = Capture(chunk_rows=3)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, tensors())
    assert not capture.codes
    assert len(capture.report.fused) == (2 if fn is FUSED["twice"] else 1)


def test_only_the_gradient_that_is_asked_for() -> None:
    capture = Capture()
    compiled = capture.compile(grad(loss, argnums=1))
    compiled(*tensors())
    assert operators(capture.after[0]) == []  # they are called from Python there
    assert any(n.name.startswith("linear_nll_sum") for n in capture.after[0].graph.nodes)


def test_a_gradient_may_flow_around_it() -> None:
    capture = Capture()
    assert_as_eager(capture.compile(learned_outside, fullgraph=True), learned_outside, tensors(learned=True))
    assert len(capture.report.fused) == 1 and not capture.codes


@pytest.mark.parametrize("fn", [FUSED["both"], FUSED["rows"]])
def test_through_inductor(fn) -> None:
    compiled = torch.compile(fn, backend="fuse_losses", options={"fuse_losses.min_vocab": 1})
    assert_as_eager(compiled, fn, tensors())


DECLINED: dict[str, tuple[Callable[..., object], bool]] = {
    "nested": (grad(lambda x, w: grad(loss)(x, w).square().sum()), False),
    "hessian": (torch.func.hessian(loss), False),
    "jacrev": (torch.func.jacrev(lambda x, w: F.cross_entropy(F.linear(x, w), Y, reduction="none")), False),
    "jvp": (lambda x, w: torch.func.jvp(lambda x: loss(x, w), (x,), (x,)), False),
    "vjp": (lambda x, w: torch.func.vjp(lambda x: loss(x, w), x)[1](torch.tensor(2.0)), False),
    "per sample": (torch.vmap(grad(lambda x, w: F.linear(x, w).logsumexp(-1)), (0, None)), False),
    "differentiated again": (grad(loss), True),
    "logits from outside": (lambda x, w: grad(lambda s, z: F.cross_entropy(z * s, Y))(x.sum(), F.linear(x, w)), False),
}


@pytest.mark.parametrize(("fn", "learned"), DECLINED.values(), ids=DECLINED)
def test_everything_else_is_left_alone(fn, learned: bool) -> None:
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, tensors(learned))
    assert set(capture.codes) == {"functorch"}
    assert not capture.report.fused


EAGER = {
    "mean": (lambda x, w: linear_cross_entropy(x, w, Y, chunk_rows=3), loss),
    "weighted": (
        lambda x, w: (linear_cross_entropy(x, w, Y, reduction="none") * x.sum(-1)).sum(),
        weighted,
    ),
    "given": (lambda x, w: cross_entropy(F.linear(x, w), Y), loss),
    "log-probs": (
        lambda x, w: linear_log_probs(x, w, Y.clamp(min=0)).square().sum(),
        lambda x, w: F.linear(x, w).log_softmax(-1).gather(-1, Y.clamp(min=0)[:, None]).square().sum(),
    ),
}


@pytest.mark.parametrize(("ours", "fn"), EAGER.values(), ids=EAGER)
def test_functions_for_eager_code(ours, fn) -> None:
    assert_as_eager(grad_and_value(ours, argnums=(0, 1)), grad_and_value(fn, argnums=(0, 1)), tensors())
    assert_as_eager(grad(ours, argnums=1), grad(fn, argnums=1), tensors())


def test_a_weight_made_of_what_is_learned_outside() -> None:
    """Inside, w * 2 needs no gradient at the level of the transform, and does at the level around it."""

    def value(of):
        return lambda x, w: grad_and_value(lambda x: of(x, w * 2))(x.detach())[1]

    assert_as_eager(value(EAGER["mean"][0]), value(loss), tensors(learned=True))


@pytest.mark.parametrize(("ours", "fn"), EAGER.values(), ids=EAGER)
def test_a_second_derivative_raises(ours, fn) -> None:
    x, w = tensors()
    with pytest.raises(RuntimeError, match="double backward"):
        grad(lambda x: grad(ours)(x, w).sum())(x)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="double backward"):
        grad(ours)(x, w).sum().backward()
