"""Losses that are compiled without their head: logits, log-probabilities or probabilities are the graph's inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture import Capture
from tests.oracle import assert_close_to_oracle, run, run64

S, B, V = 7, 3, 61
BF16 = torch.bfloat16


def tensors() -> dict[str, Tensor]:
    """All that a loss may name.

    zb [S, B, V] logits in bfloat16, z [S*B, V] in float32; y [S, B], y1 [S*B] labels; q, s a student's probabilities
    and log-probabilities [S*B, V], p, t a teacher's, which does not learn; m [S*B] a mask.
    """
    zb, z = 3 * torch.randn(S, B, V), 3 * torch.randn(S * B, V)
    y, m = torch.randint(0, V, (S, B)), (torch.rand(S * B) < 0.7).float()
    student, teacher = 2 * torch.randn(S * B, V), 2 * torch.randn(S * B, V)
    learned = {"zb": zb.to(BF16), "z": z, "q": student.softmax(-1), "s": student.log_softmax(-1)}
    plain = {"y": y, "y1": y.flatten(), "m": m, "p": teacher.softmax(-1), "t": teacher.log_softmax(-1)}
    return {name: value.requires_grad_() for name, value in learned.items()} | plain


# ------------------------------------------------------------------------------------------------------ cross entropy


def per_token(zb, y):
    """Megatron's layout: sequence first, a float32 loss for each token."""
    return F.cross_entropy(zb.float().view(-1, zb.size(-1)), y.view(-1), reduction="none").view(y.shape)


def per_token_classes_in_dim_1(zb, y):
    return F.cross_entropy(zb.float().mT, y, reduction="none")


def per_token_gathered(zb, y):
    return -zb.float().log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


def per_token_by_logsumexp(zb, y):
    z = zb.float()
    return torch.logsumexp(z, dim=-1) - z.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def per_token_of_bfloat16(zb, y):
    """Without an upcast the loss is bfloat16."""
    return F.cross_entropy(zb.flatten(0, 1), y.flatten(), reduction="none").view_as(y)


def mean(z, y1):
    return F.cross_entropy(z, y1)


def total_over_a_count(z, y1, m):
    return F.cross_entropy(z, y1, reduction="sum") / m.sum()


def masked_mean_per_token(zb, y, m):
    losses = F.cross_entropy(zb.float().view(-1, V), y.view(-1), reduction="none")
    return (losses * m).sum() / m.sum()


def nll(s, y1):
    return F.nll_loss(s.log_softmax(-1), y1)


CROSS_ENTROPY = [
    per_token,
    per_token_classes_in_dim_1,
    per_token_gathered,
    per_token_by_logsumexp,
    per_token_of_bfloat16,
    mean,
    total_over_a_count,
    masked_mean_per_token,
    nll,
]

# ------------------------------------------------------------------------------------------- total variation distance


def variation_batchmean(q, p):
    return 0.5 * (p - q).abs().sum() / q.size(0)


def variation_mean_of_rows(q, p):
    return 0.5 * torch.abs(q - p).sum(dim=-1).mean()


def variation_l1(q, p):
    return 0.5 * F.l1_loss(q, p, reduction="sum") / q.shape[0]


def variation_norm(q, p):
    return 0.5 * torch.norm(q - p, p=1, dim=-1)


def variation_masked(q, p, m):
    return ((0.5 * (q - p).abs()).sum(-1) * m).sum() / m.sum()


# -------------------------------------------------------------------- divergences of log-probabilities


def generalised_jsd(beta: float, temperature_squared: float = 1.0) -> Any:
    def fn(s, t):
        if beta == 0:
            return F.kl_div(s, t, reduction="batchmean", log_target=True)
        if beta == 1:
            return F.kl_div(t, s, reduction="batchmean", log_target=True)
        mixed = torch.logsumexp(torch.stack([s + math.log(1 - beta), t + math.log(beta)]), dim=0)
        left = F.kl_div(mixed, t, reduction="batchmean", log_target=True)
        return (beta * left + (1 - beta) * F.kl_div(mixed, s, reduction="batchmean", log_target=True)) * (
            temperature_squared
        )

    return fn


def jsd_of_probs(s, t):
    """The mixture of probabilities, as a kernel's reference has it."""
    q, p = s.exp(), t.exp()
    mixed = (0.5 * (q + p)).log()
    rows = 0.5 * (F.kl_div(mixed, t, reduction="none", log_target=True) + q * (s - mixed)).sum(-1)
    return rows.sum() / rows.numel()


def jsd_of_logaddexp(s, t, m):
    mixed = torch.logaddexp(s, t) - math.log(2)
    rows = 0.5 * (t.exp() * (t - mixed) + s.exp() * (s - mixed)).sum(-1)
    return (rows * m).sum() / m.sum()


def kl_batchmean(s, t):
    return F.kl_div(s, t, reduction="batchmean", log_target=True)


def kl_of_probs(s, p):
    return F.kl_div(s, p, reduction="batchmean")


def kl_per_row(s, t):
    return (t.exp() * (t - s)).sum(-1)


def reverse_kl(s, t, m):
    return ((s.exp() * (s - t)).sum(-1) * m).sum() / m.sum()


def kl_module(s, p):
    return torch.nn.KLDivLoss(reduction="sum")(s, p)


DIVERGENCES = {
    "TVD, batchmean": variation_batchmean,
    "TVD, mean of rows": variation_mean_of_rows,
    "TVD, l1_loss": variation_l1,
    "TVD, norm": variation_norm,
    "TVD, masked": variation_masked,
    "JSD, beta=0.5": generalised_jsd(0.5),
    "JSD, beta=0.1": generalised_jsd(0.1, 4.0),
    "JSD, beta=0.9": generalised_jsd(0.9),
    "JSD, beta=0": generalised_jsd(0),
    "JSD, beta=1": generalised_jsd(1),
    "JSD of probs": jsd_of_probs,
    "JSD by logaddexp": jsd_of_logaddexp,
    "KL, batchmean": kl_batchmean,
    "KL of probs": kl_of_probs,
    "KL per row": kl_per_row,
    "KLDivLoss": kl_module,
    "reverse KL": reverse_kl,
}


def arguments(fn: Any) -> list[Tensor]:
    named = tensors()
    return [named[name] for name in fn.__code__.co_varnames[: fn.__code__.co_argcount]]


def as_eager(fn: Any, args: list[Tensor], **how: Any) -> Capture:
    capture = Capture()
    eager = run(fn, args)
    ours = run(capture.compile(fn, fullgraph=True, **how), args)
    assert_close_to_oracle(ours, eager, run64(fn, args, eager))
    return capture


@pytest.mark.parametrize("fn", CROSS_ENTROPY, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_cross_entropy_of_given_logits(fn, dynamic: bool) -> None:
    capture = as_eager(fn, arguments(fn), dynamic=dynamic)
    assert capture.report.fused and not capture.codes, str(capture.report)
    assert capture.report.fused[0].details["gradients"] == "backward"
    assert capture.summaries[0].startswith("logits + ")


def swapped(zb, y):
    return F.cross_entropy(zb.float().permute(1, 2, 0), y.t(), reduction="none").t()


def shifted(zb, y):
    return F.cross_entropy(zb[:-1].float().flatten(0, 1), y[1:].flatten())


@pytest.mark.parametrize("fn", [swapped, shifted], ids=lambda fn: fn.__name__)
def test_rows_of_given_logits_that_are_moved_would_be_copied(fn) -> None:
    assert as_eager(fn, arguments(fn)).codes == ["logits_sliced"]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_of_given_distributions_are_right(name: str) -> None:
    """Fused or left alone."""
    as_eager(DIVERGENCES[name], arguments(DIVERGENCES[name]))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_of_given_distributions_are_fused(name: str) -> None:
    capture = Capture()
    capture.compile(DIVERGENCES[name], fullgraph=True)(*arguments(DIVERGENCES[name]))
    assert capture.report.fused and not capture.codes, str(capture.report)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_teacher_that_learns(name: str) -> None:
    """Both distributions get their gradient; right, fused or not."""
    args = [a.requires_grad_() if a.shape == (S * B, V) else a for a in arguments(DIVERGENCES[name])]
    as_eager(DIVERGENCES[name], args)


@pytest.mark.parametrize("name", ["TVD, batchmean", "JSD, beta=0.5", "KL, batchmean", "reverse KL"])
def test_equal_distributions(name: str) -> None:
    """Nothing is lost between two that are the same, and the error is eager's or less."""
    fn = DIVERGENCES[name]
    args = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments(fn)]
    args[1] = args[0].detach().clone()
    eager = run(fn, args)
    ours = run(Capture().compile(fn, fullgraph=True), args)
    assert_close_to_oracle(ours, eager, run64(fn, args, eager))


def test_what_only_looks_like_a_distribution_is_right() -> None:
    """Not normalised, negative and zero: a sum over elements is one whatever they are."""
    a, b = torch.randn(S * B, V, requires_grad=True), torch.randn(S * B, V)
    b[::2] = a.detach()[::2]
    for fn in (variation_batchmean, variation_norm, kl_batchmean, kl_per_row, jsd_of_logaddexp):
        torch._dynamo.reset()
        as_eager(fn, [a, b, torch.rand(S * B)] if fn is jsd_of_logaddexp else [a, b])


def test_probabilities_of_zero() -> None:
    """xlogy(0, 0) is 0: as eager has it, without NaN."""
    named = tensors()
    p = named["p"].clone()
    p[:, ::4] = 0
    for fn in (kl_of_probs, kl_module):
        torch._dynamo.reset()
        as_eager(fn, [named["s"], p])
    q = named["q"].detach().clone()
    q[:, ::8] = 0
    torch._dynamo.reset()
    as_eager(variation_batchmean, [q.requires_grad_(), p])
