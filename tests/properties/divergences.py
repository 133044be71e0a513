"""Divergences between two distributions over classes, each in the spellings that people use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Side:
    """A distribution [*rows, V]: spelled anew wherever it is read; `z` its logits, or what stands for them."""

    z: Tensor
    log_probs: Callable[[Tensor], Tensor]
    probs: Callable[[Tensor], Tensor]

    @property
    def lp(self) -> Tensor:
        return self.log_probs(self.z)

    @property
    def p(self) -> Tensor:
        return self.probs(self.z)


# student, teacher, k in [0, 1] -> what is summed over classes, [*rows, V]
Element = Callable[[Side, Side, float], Tensor]
Mixture = Callable[[Side, Side, float], Tensor]


def _products(s: Side, t: Side, k: float) -> Tensor:
    """DistiLLM's way: products in place, with infinite logits masked out."""
    infinite = torch.isinf(s.z) | torch.isinf(t.z)
    products = torch.masked_fill(t.p * t.lp, infinite, 0)
    products -= torch.masked_fill(t.p * s.lp, infinite, 0)
    return products


def _one_log_softmax(s: Side, t: Side, k: float) -> Tensor:
    lp = t.lp
    return lp.exp() * (lp - s.lp)


FORWARD: dict[str, Element] = {
    "kl_div of probs": lambda s, t, k: F.kl_div(s.lp, t.p, reduction="none"),
    "kl_div of log-probs": lambda s, t, k: F.kl_div(s.lp, t.lp, reduction="none", log_target=True),
    "kl_div, all by position": lambda s, t, k: F.kl_div(s.lp, t.lp, None, None, "none", True),
    "KLDivLoss": lambda s, t, k: torch.nn.KLDivLoss(reduction="none", log_target=True)(s.lp, t.lp),
    "KLDivLoss by keyword": lambda s, t, k: torch.nn.KLDivLoss(reduction="none")(input=s.lp, target=t.p),
    "by hand": lambda s, t, k: t.p * (t.lp - s.lp),
    "functions": lambda s, t, k: torch.mul(torch.exp(t.lp), torch.sub(t.lp, s.lp)),
    "one log_softmax": _one_log_softmax,
    "cross less entropy": lambda s, t, k: -(t.p * s.lp) + t.p * t.lp,
    "masked products, in place": _products,
}


def _swapped(element: Element) -> Element:
    return lambda s, t, k: element(t, s, k)


REVERSE = {name: _swapped(element) for name, element in FORWARD.items()}


# log(k p + (1 - k) q) for the teacher's p and the student's q
def _stacked(s: Side, t: Side, k: float) -> Tensor:
    b = torch.tensor(k, dtype=s.z.dtype)
    return torch.logsumexp(torch.stack([s.lp + torch.log1p(-b), t.lp + torch.log(b)]), dim=0)


def _stacked_last(s: Side, t: Side, k: float) -> Tensor:
    return torch.stack([s.lp + math.log(1 - k), t.lp + math.log(k)], -1).logsumexp(-1)


MIXTURES: dict[str, Mixture] = {
    "stack, logsumexp": _stacked,
    "stacked last": _stacked_last,
    "logaddexp": lambda s, t, k: torch.logaddexp(s.lp + math.log(1 - k), math.log(k) + t.lp),
    "lerp": lambda s, t, k: torch.log(torch.lerp(s.p, t.p.type_as(s.p), k)),
    "lerp of exps": lambda s, t, k: s.lp.exp().lerp(t.lp.exp().to(s.lp.dtype), k).log(),
    "sum of probs": lambda s, t, k: torch.log(k * t.p + (1 - k) * s.p),
}


def _jsd(mixture: Mixture, kl: Element) -> Element:
    def element(s: Side, t: Side, k: float) -> Tensor:
        if k == 0:
            return kl(s, t, k)
        if k == 1:
            return kl(t, s, k)
        mixed = mixture(s, t, k)
        middle = Side(mixed, lambda z: z, torch.exp)
        return k * kl(middle, t, k) + (1 - k) * kl(middle, s, k)

    return element


def _skewed(mixture: Mixture, kl: Element, of_student: bool) -> Element:
    """KL of one side to the mixture; at k = 0 and 1 the mixture is a side."""

    def element(s: Side, t: Side, k: float) -> Tensor:
        k = min(max(k, 0.02), 0.98)
        mixed = mixture(s, t, k)
        return kl(Side(mixed, lambda z: z, torch.exp), s if of_student else t, k)

    return element


OF_MIXTURES = {name: FORWARD[name] for name in ("kl_div of log-probs", "kl_div of probs", "by hand", "functions")}
JSD = {f"{m}, {n}": _jsd(mixture, kl) for m, mixture in MIXTURES.items() for n, kl in OF_MIXTURES.items()}
SKEWED = {
    f"{side}, {m}, {n}": _skewed(mixture, kl, side == "student")
    for side in ("student", "teacher")
    for m, mixture in MIXTURES.items()
    for n, kl in OF_MIXTURES.items()
}
SKEWED["the mixture alone"] = lambda s, t, k: -(t.p * torch.log(0.9 * t.p + 0.1 * s.p))


def _symmetric(kl: Element) -> Element:
    return lambda s, t, k: k * kl(s, t, k) + (1 - k) * kl(t, s, k)


SYMMETRIC = {name: _symmetric(kl) for name, kl in FORWARD.items()}
SYMMETRIC["Jeffreys"] = lambda s, t, k: (t.p - s.p) * (t.lp - s.lp)


def _half_of_difference(s: Side, t: Side, k: float) -> Tensor:
    difference = t.p - s.p
    return difference.abs().mul_(0.5)


TOTAL_VARIATION: dict[str, Element] = {
    "abs": lambda s, t, k: 0.5 * (t.p - s.p).abs(),
    "torch.abs": lambda s, t, k: torch.abs(torch.sub(s.p, t.p)) / 2,
    "l1_loss": lambda s, t, k: F.l1_loss(s.p, t.p, reduction="none"),
    "L1Loss": lambda s, t, k: torch.nn.L1Loss(reduction="none")(s.p, t.p),
    "exps": lambda s, t, k: (s.lp.exp() - t.lp.exp()).abs(),
    "in place": _half_of_difference,
    "relu": lambda s, t, k: F.relu(t.p - s.p),
    "of products": lambda s, t, k: torch.where(t.p > s.p, t.p - s.p, s.p - t.p),
}
SOFT: dict[str, Element] = {
    "product": lambda s, t, k: -(t.p * s.lp),
    "functions": lambda s, t, k: torch.mul(t.p, s.lp).neg(),
    "masked": lambda s, t, k: -torch.masked_fill(t.p * s.lp, torch.isinf(s.z), 0),
    "exp": lambda s, t, k: -t.lp.exp() * s.lp,
    "where": lambda s, t, k: torch.where(t.p > 0, -t.p * s.lp, 0.0),
}
DIVERGENCES: dict[str, dict[str, Element]] = {
    "forward KL": FORWARD,
    "reverse KL": REVERSE,
    "skewed KL": SKEWED,
    "symmetric KL": SYMMETRIC,
    "JSD": JSD,
    "TVD": TOTAL_VARIATION,
    "soft cross entropy": SOFT,
}

# losses that reduce by themselves
Reduced = Callable[[Side, Side, float], Tensor]
REDUCED: dict[str, dict[str, Reduced]] = {
    "forward KL": {
        "batchmean": lambda s, t, k: F.kl_div(s.lp, t.p, reduction="batchmean"),
        "batchmean, log_target": lambda s, t, k: F.kl_div(s.lp, t.lp, reduction="batchmean", log_target=True),
        "mean": lambda s, t, k: F.kl_div(s.lp, t.p),
        "sum": lambda s, t, k: F.kl_div(s.lp, t.lp, reduction="sum", log_target=True),
        "module": lambda s, t, k: torch.nn.KLDivLoss(reduction="batchmean")(s.lp, t.p),
    },
    "reverse KL": {
        "batchmean": lambda s, t, k: F.kl_div(t.lp, s.p, reduction="batchmean"),
        "sum": lambda s, t, k: torch.nn.KLDivLoss(reduction="sum", log_target=True)(t.lp, s.lp),
    },
    "TVD": {
        "norm": lambda s, t, k: 0.5 * torch.norm(t.p - s.p, p=1, dim=-1),
        "method": lambda s, t, k: (t.p - s.p).norm(1, -1, keepdim=True),
        "linalg": lambda s, t, k: torch.linalg.vector_norm(s.p - t.p, ord=1, dim=-1),
        "l1_loss": lambda s, t, k: F.l1_loss(s.p, t.p),
        "l1_loss, sum": lambda s, t, k: F.l1_loss(s.p, t.p, reduction="sum"),
    },
    "soft cross entropy": {
        "cross_entropy": lambda s, t, k: F.cross_entropy(s.z.flatten(0, -2), t.p.flatten(0, -2)),
        "cross_entropy, sum": lambda s, t, k: F.cross_entropy(s.z.flatten(0, -2), t.p.flatten(0, -2), reduction="sum"),
        "CrossEntropyLoss": lambda s, t, k: torch.nn.CrossEntropyLoss(reduction="none")(
            s.z.flatten(0, -2), t.p.flatten(0, -2)
        ),
    },
}
