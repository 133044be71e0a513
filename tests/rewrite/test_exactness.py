"""Divergences of two heads where numbers are hard: equal sides, ties, classes that cannot be, large logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture import Capture
from tests.oracle import assert_close_to_oracle, run, run64

ROWS, HIDDEN, VOCAB = 13, 7, 53
Loss = Callable[[Tensor, Tensor], Tensor]  # a student's and a teacher's logits -> a value per row


def kl_of_log_probs(z: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(z.log_softmax(-1), t.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def kl_of_probs(z: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)


def kl_by_hand(z: Tensor, t: Tensor) -> Tensor:
    return (t.softmax(-1) * (t.log_softmax(-1) - z.log_softmax(-1))).sum(-1)


def kl_masked(z: Tensor, t: Tensor) -> Tensor:
    infinite = torch.isinf(z) | torch.isinf(t)
    p = t.softmax(-1)
    products = torch.masked_fill(p * t.log_softmax(-1), infinite, 0)
    products -= torch.masked_fill(p * z.log_softmax(-1), infinite, 0)
    return products.sum(-1)


def reverse_kl(z: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(t.log_softmax(-1), z.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def reverse_kl_by_hand(z: Tensor, t: Tensor) -> Tensor:
    return (z.softmax(-1) * (z.log_softmax(-1) - t.log_softmax(-1))).sum(-1)


def jsd(beta: float) -> Loss:
    def loss(z: Tensor, t: Tensor) -> Tensor:
        s, t = z.log_softmax(-1), t.log_softmax(-1)
        mixed = torch.logsumexp(torch.stack([s + math.log(1 - beta), t + math.log(beta)]), dim=0)
        left = F.kl_div(mixed, t, reduction="none", log_target=True)
        right = F.kl_div(mixed, s, reduction="none", log_target=True)
        return (beta * left + (1 - beta) * right).sum(-1)

    return loss


def jsd_of_probs(z: Tensor, t: Tensor) -> Tensor:
    p, q = t.softmax(-1), z.softmax(-1)
    mixed = torch.log(0.5 * (p + q))
    return 0.5 * (F.kl_div(mixed, p, reduction="none") + F.kl_div(mixed, q, reduction="none")).sum(-1)


def skewed_kl(z: Tensor, t: Tensor) -> Tensor:
    p = t.softmax(-1)
    return (p * (t.log_softmax(-1) - torch.log(0.1 * p + 0.9 * z.softmax(-1)))).sum(-1)


def variation(z: Tensor, t: Tensor) -> Tensor:
    return 0.5 * (z.softmax(-1) - t.softmax(-1)).abs().sum(-1)


def variation_by_l1(z: Tensor, t: Tensor) -> Tensor:
    return F.l1_loss(z.softmax(-1), t.softmax(-1), reduction="none").sum(-1)


def soft_targets(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t.softmax(-1), reduction="none")


def soft_targets_by_hand(z: Tensor, t: Tensor) -> Tensor:
    return -(t.softmax(-1) * z.log_softmax(-1)).sum(-1)


DIVERGENCES: dict[str, Loss] = {
    "KL, log-probs": kl_of_log_probs,
    "KL, probs": kl_of_probs,
    "KL, by hand": kl_by_hand,
    "KL, masked": kl_masked,
    "reverse KL": reverse_kl,
    "reverse KL, by hand": reverse_kl_by_hand,
    "JSD, 0.5": jsd(0.5),
    "JSD, 0.1": jsd(0.1),
    "JSD, probs": jsd_of_probs,
    "skewed KL": skewed_kl,
    "TVD": variation,
    "TVD, l1_loss": variation_by_l1,
}
LOSSES = {**DIVERGENCES, "soft targets": soft_targets, "soft targets, by hand": soft_targets_by_hand}


def losses(names: Iterable[str] = LOSSES, missing: Iterable[str] = ()) -> Any:
    """`missing`: where a mask of the vocabulary goes by rows, what was written is computed, NaN included."""
    mark = pytest.mark.xfail(strict=True, reason="eager's own NaN")
    params = [pytest.param(name, marks=[mark] if name in missing else []) for name in names]
    return pytest.mark.parametrize("name", params)


def tensors(dtype: torch.dtype = torch.float32, scale: float = 1.0, rows: int = ROWS) -> list[Tensor]:
    """x, w, xT, wT; the student's learn."""
    x, xT = scale * torch.randn(rows, HIDDEN), scale * torch.randn(rows, HIDDEN)
    w, wT = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    return [x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), xT.to(dtype), wT.to(dtype)]


def whole_tensors() -> list[Tensor]:
    """As `tensors`, of whole numbers: float32 logits up to 1e4 without rounding."""
    x, xT = (torch.randint(-40, 41, (ROWS, HIDDEN)).float() for _ in range(2))
    w, wT = (torch.randint(-40, 41, (VOCAB, HIDDEN)).float() for _ in range(2))
    return [x.requires_grad_(), w.requires_grad_(), xT, wT]


def heads(loss: Loss, student: Callable[[Tensor], Tensor] = lambda z: z, teacher: Any = None) -> Callable[..., Tensor]:
    teacher = teacher or student

    def fn(x, w, xT, wT):
        with torch.no_grad():
            t = teacher(F.linear(xT, wT))
        return loss(student(F.linear(x, w)), t)

    return fn


def assert_fused(capture: Capture) -> None:
    assert capture.report.fused and not capture.codes, str(capture.report)


def assert_fused_as_eager(fn: Callable[..., Any], args: list[Any]) -> None:
    capture = Capture(chunk_rows=4)
    eager = run(fn, args)
    assert_close_to_oracle(run(capture.compile(fn, fullgraph=True), args), eager, run64(fn, args, eager))
    assert_fused(capture)


@losses()
def test_float32(name: str) -> None:
    assert_fused_as_eager(heads(LOSSES[name]), tensors())


@losses()
def test_bfloat16_with_an_upcast(name: str) -> None:
    assert_fused_as_eager(heads(LOSSES[name], lambda z: z.float()), tensors(torch.bfloat16))


@losses()
def test_a_bfloat16_teacher_of_a_float32_student(name: str) -> None:
    x, w, xT, wT = tensors()
    assert_fused_as_eager(heads(LOSSES[name], teacher=lambda z: z.float()), [x, w, xT.bfloat16(), wT.bfloat16()])


@losses()
def test_a_high_temperature(name: str) -> None:
    assert_fused_as_eager(heads(LOSSES[name], lambda z: z / 10.0), tensors())


@losses(name for name in LOSSES if name not in ("JSD, probs", "skewed KL"))
def test_a_low_temperature(name: str) -> None:
    """Few classes are left of each row, and the rounding of their logits is luck: over many rows."""
    assert_fused_as_eager(heads(LOSSES[name], lambda z: z / 0.1), tensors(rows=200))


# what is read where the classes of both sides are impossible is not a number there, in eager too
# and the reverse KL's gradients are of the size of the rounding of its loss, 1e-10 times smaller than that
@losses(name for name in LOSSES if name not in ("JSD, probs", "skewed KL", "reverse KL"))
def test_large_logits(name: str) -> None:
    args = whole_tensors()
    assert F.linear(args[0], args[1]).abs().max() > 3e3
    assert_fused_as_eager(heads(LOSSES[name]), args)


@losses()
def test_both_learn(name: str) -> None:
    args = [a.detach().requires_grad_() for a in tensors()]
    assert_fused_as_eager(lambda x, w, xT, wT: LOSSES[name](F.linear(x, w), F.linear(xT, wT)), args)


# ------------------------------------------------------------------------------------------------------ equal sides


@losses(DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_sides_have_no_loss_and_no_gradient(name: str, dtype: torch.dtype) -> None:
    x, w, _, _ = tensors(dtype)
    capture = Capture(chunk_rows=4)
    fn = heads(DIVERGENCES[name], lambda z: z.float())
    results = run(capture.compile(fn, fullgraph=True), [x, w, x.detach().clone(), w.detach().clone()])
    assert_fused(capture)
    for result in results:
        assert result is not None and not result.any(), result


@losses(DIVERGENCES)
def test_a_teacher_that_is_the_student(name: str) -> None:
    """One weight and one hidden state for both: the teacher's part is cut by no_grad alone."""

    def fn(x, w):
        with torch.no_grad():
            t = F.linear(x, w)
        return DIVERGENCES[name](F.linear(x, w), t)

    capture = Capture(chunk_rows=4)
    results = run(capture.compile(fn, fullgraph=True), tensors()[:2])
    assert_fused(capture)
    for result in results:
        assert result is not None and not result.any(), result


@losses(["TVD", "TVD, l1_loss"])
def test_rows_that_tie_get_no_gradient(name: str) -> None:
    """abs has none at 0: rows in which both sides are equal, among rows in which they are not."""
    x, w, xT, _ = tensors()
    wT, xT = w.detach().clone(), xT.clone()
    xT[::3] = x.detach()[::3]
    capture = Capture(chunk_rows=4)
    fn, args = heads(DIVERGENCES[name]), [x, w, xT, wT]
    eager = run(fn, args)
    results = run(capture.compile(fn, fullgraph=True), args)
    value, grad_x = results[:2]
    assert_fused(capture)
    assert_close_to_oracle(results, eager, run64(fn, args, eager))
    assert value is not None and not value[::3].any() and value[1::3].all()
    assert grad_x is not None and not grad_x[::3].any() and grad_x[1::3].any(-1).all()


@losses(["TVD", "TVD, l1_loss"])
def test_classes_that_tie(name: str) -> None:
    """Equal logits of some classes on both sides, and a bias that shifts all of a side."""
    x, w, _, _ = whole_tensors()
    with torch.no_grad():
        x /= 64
        w /= 64
        wT = w.detach().clone()
        wT[::2] = wT[::2].flip(0)
    assert_fused_as_eager(heads(DIVERGENCES[name], teacher=lambda z: z + 3), [x, w, x.detach().clone(), wT])


# --------------------------------------------------------------------------- classes that cannot be on either side


def possible(name: str, z: Tensor, t: Tensor) -> Tensor:
    """The loss with 0 log 0 = 0: what has no probability on its own side adds nothing."""
    s, t = z.log_softmax(-1), t.log_softmax(-1)
    q, p = s.exp(), t.exp()

    def product(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
        zero = weight == 0
        return weight * (left.masked_fill(zero, 0) - right.masked_fill(zero, 0))

    beta = {"JSD, 0.5": 0.5, "JSD, 0.1": 0.1, "JSD, probs": 0.5}.get(name)
    if name.startswith("TVD"):
        return (0.5 if name == "TVD" else 1.0) * (p - q).abs().sum(-1)
    if name.startswith("KL"):
        return product(p, t, s).sum(-1)
    if name.startswith("reverse"):
        return product(q, s, t).sum(-1)
    if name.startswith("soft"):
        return product(p, torch.zeros_like(s), s).sum(-1)
    skew = 0.1 if beta is None else beta
    mixed = torch.logaddexp(s + math.log(1 - skew), t + math.log(skew))
    if beta is None:
        return product(p, t, mixed).sum(-1)
    return (beta * product(p, t, mixed) + (1 - beta) * product(q, s, mixed)).sum(-1)


def assert_possible(fn: Callable[..., Tensor], args: list[Tensor], exact: Callable[..., Tensor]) -> None:
    """Fused and finite, measured against `exact`, which is without the NaN that eager's own spelling may have here."""
    capture = Capture(chunk_rows=4)
    ours = run(capture.compile(fn, fullgraph=True), args)
    assert_fused(capture)
    eager = run(exact, args)
    assert all(t is not None and t.isfinite().all() for t in eager)
    assert_close_to_oracle(ours, eager, run64(exact, args, eager))


# a product with the logarithm of nothing is not a number, unless the operator or a mask says so
OF_LOG_OF_NOTHING = ["KL, log-probs", "KL, by hand", "JSD, 0.5", "JSD, 0.1", "skewed KL"]


@losses(n for n in LOSSES if not n.startswith("reverse"))
def test_classes_that_the_teacher_excludes_add_nothing(name: str) -> None:
    """-inf in the teacher's logits, other classes in other rows."""
    x, w, _, _ = tensors()
    t = torch.randn(ROWS, VOCAB)
    t[:, 3] = -math.inf
    t[torch.arange(ROWS), torch.arange(ROWS) + 5] = -math.inf
    fn = lambda x, w, t: LOSSES[name](F.linear(x, w), t)  # noqa: E731
    assert_possible(fn, [x, w, t], lambda x, w, t: possible(name, F.linear(x, w), t))


BOTH_EXCLUDED = ["reverse KL", "reverse KL, by hand", "JSD, probs", "KL, probs", "soft targets, by hand"]


@losses((n for n in LOSSES if n != "soft targets"), missing=[*OF_LOG_OF_NOTHING, *BOTH_EXCLUDED])
def test_classes_that_both_exclude_add_nothing(name: str) -> None:
    """A padded vocabulary: the last classes are -inf on both sides."""
    padded = torch.arange(VOCAB) >= VOCAB - 5
    exclude = lambda z: z.masked_fill(padded, -math.inf)  # noqa: E731
    cut = lambda z: z[..., : VOCAB - 5]  # noqa: E731

    def exact(x, w, xT, wT):
        return possible(name, cut(F.linear(x, w)), cut(F.linear(xT, wT)))

    assert_possible(heads(LOSSES[name], exclude), tensors(), exact)


@losses()
def test_probabilities_that_underflow_are_no_nan(name: str) -> None:
    args = tensors(scale=100.0)
    z, t = F.linear(args[0], args[1]), F.linear(args[2], args[3])
    assert (z.softmax(-1) == 0).any() and (t.softmax(-1) == 0).any()
    capture = Capture(chunk_rows=4)
    results = run(capture.compile(heads(LOSSES[name]), fullgraph=True), args)
    assert_fused(capture)
    assert all(r is not None and r.isfinite().all() for r in results)


@losses()
def test_upstream_gradients_of_zero_and_of_large_numbers(name: str) -> None:
    """Rows that a mask leaves out have no gradient, whatever is in them."""

    def fn(x, w, xT, wT, scale):
        return heads(LOSSES[name])(x, w, xT, wT) * scale

    scale = torch.where(torch.arange(ROWS) % 3 == 0, 0.0, torch.logspace(-6, 6, ROWS))
    args = [*tensors(), scale]
    eager = run(fn, args)
    results = run(Capture(chunk_rows=4).compile(fn, fullgraph=True), args)
    assert_close_to_oracle(results, eager, run64(fn, args, eager))
    grad_x = results[1]
    assert grad_x is not None and not grad_x[::3].any()
