"""What looks like a divergence between a student and a teacher and is another function, or cannot be fused at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.properties.divergences import Side
from tests.properties.pairs import PairProgram

# student, teacher, weights of rows [*rows], weights of classes [V] -> outputs
Loss = Callable[[Side, Side, Tensor, Tensor], Any]


@dataclass(frozen=True)
class PairMiss:
    """fusable: fused or not, it must be right; else it is left alone, with a reason unless it is `silent`."""

    loss: Loss
    fusable: bool = True
    silent: bool = False


def kl(s: Side, t: Side) -> Tensor:
    return t.p * (t.lp - s.lp)


def _log_half(s: Side, t: Side) -> Tensor:
    return torch.log(0.5 * (s.p + t.p))


def _written_after(s: Side, t: Side, m: Tensor, c: Tensor) -> Tensor:
    p, q = t.p.detach() * 1.0, s.lp
    loss = F.kl_div(q, p, reduction="none").sum(-1)
    p.mul_(2)
    return loss.detach() + p.sum()


def _written_between(s: Side, t: Side, m: Tensor, c: Tensor) -> Tensor:
    p = t.p.detach() * 1.0
    entropy = torch.xlogy(p, p)
    p.mul_(0.5)
    return (entropy - p * s.lp).sum(-1)


def _two_mixtures(s: Side, t: Side, m: Tensor, c: Tensor) -> Tensor:
    """Not a Jensen-Shannon divergence: each side has its own mixture."""
    left = torch.log(0.3 * s.p + 0.7 * t.p)
    right = torch.log(0.6 * s.p + 0.4 * t.p)
    return 0.5 * (t.p * (t.lp - left) + s.p * (s.lp - right)).sum(-1)


MISSES: dict[str, PairMiss] = {
    # rows of the teacher are not the student's
    "teacher rows shifted by one": PairMiss(lambda s, t, m, c: (t.p.roll(1, 0) * (t.lp.roll(1, 0) - s.lp)).sum(-1)),
    "both shifted": PairMiss(lambda s, t, m, c: (t.p[1:] * (t.lp[1:] - s.lp[:-1])).sum(-1)),
    "teacher rows flipped": PairMiss(lambda s, t, m, c: F.kl_div(s.lp, t.p.flip(0), reduction="none").sum(-1)),
    "one teacher row for all": PairMiss(lambda s, t, m, c: F.kl_div(s.lp, t.p[:1].expand_as(s.z), reduction="sum")),
    "the rows' mean for a teacher": PairMiss(lambda s, t, m, c: -(t.p.mean(0, keepdim=True) * s.lp).sum(-1)),
    "probs of the next row, log-probs of this": PairMiss(lambda s, t, m, c: (t.p.roll(-1, 0) * (t.lp - s.lp)).sum(-1)),
    # classes of the teacher are not the student's
    "teacher classes rolled": PairMiss(lambda s, t, m, c: (t.p.roll(1, -1) * s.lp).sum(-1)),
    "teacher classes flipped": PairMiss(lambda s, t, m, c: (s.p - t.p.flip(-1)).abs().sum(-1)),
    "without the last class": PairMiss(lambda s, t, m, c: kl(s, t)[..., :-1].sum(-1)),
    "classes cut before the softmax": PairMiss(
        lambda s, t, m, c: (t.z[..., 3:].softmax(-1) * s.z[..., 3:].log_softmax(-1)).sum(-1)
    ),
    # over another axis
    "student's softmax over rows": PairMiss(
        lambda s, t, m, c: F.kl_div(s.z.log_softmax(0), t.p, reduction="sum"), fusable=False
    ),
    "teacher's softmax over rows": PairMiss(lambda s, t, m, c: F.kl_div(s.lp, t.z.softmax(0), reduction="sum")),
    "summed over rows": PairMiss(lambda s, t, m, c: kl(s, t).sum(0).square().sum(), fusable=False),
    "distance of summed probs": PairMiss(lambda s, t, m, c: (s.p.sum(0) - t.p.sum(0)).abs().sum(), fusable=False),
    "logsumexp of all in the mixture": PairMiss(
        lambda s, t, m, c: torch.stack([s.lp, t.lp]).logsumexp((0, -1)), fusable=True
    ),
    "mixture of neighbours": PairMiss(
        lambda s, t, m, c: (t.p * torch.stack([s.lp, s.lp.roll(1, 0)]).logsumexp(0)).sum(-1)
    ),
    # masks and weights that are not one per row
    "weighted by class": PairMiss(lambda s, t, m, c: (kl(s, t) * c).sum(-1)),
    "weighted by row and class": PairMiss(lambda s, t, m, c: (kl(s, t) * (m[..., None] * c).sin()).sum()),
    "masked by value": PairMiss(lambda s, t, m, c: torch.where(t.p > 0.05, kl(s, t), 0.0).sum(-1)),
    "temperature of a row": PairMiss(lambda s, t, m, c: F.kl_div((s.z / (1 + m[..., None])).log_softmax(-1), t.p)),
    "weight of a mixture per row": PairMiss(
        lambda s, t, m, c: (
            t.p * (t.lp - torch.log(torch.lerp(s.p.float(), t.p.float(), 0.2 + 0.5 * m[..., None])))
        ).sum(-1)
    ),
    "weight of a mixture per class": PairMiss(
        lambda s, t, m, c: (t.p * torch.log(torch.lerp(s.p.float(), t.p.float(), torch.sigmoid(c.float())))).sum(-1)
    ),
    # gradients that are cut
    "student's weight of reverse KL detached": PairMiss(lambda s, t, m, c: (s.p.detach() * (s.lp - t.lp)).sum(-1)),
    "student's log-probs of reverse KL detached": PairMiss(
        lambda s, t, m, c: (s.p * (s.lp.detach() - t.lp)).sum(-1) + 0 * s.lp.sum()
    ),
    "mixture detached": PairMiss(
        lambda s, t, m, c: (t.p * (t.lp - _log_half(s, t).detach()) + s.p * (s.lp - _log_half(s, t).detach())).sum(-1)
    ),
    "logsumexp detached": PairMiss(lambda s, t, m, c: (t.p * (s.z - s.z.logsumexp(-1, keepdim=True).detach())).sum(-1)),
    "student in the mixture detached": PairMiss(
        lambda s, t, m, c: (s.p * (s.lp - torch.log(0.5 * (s.p.detach() + t.p)))).sum(-1)
    ),
    "one of two reads detached": PairMiss(lambda s, t, m, c: (s.p.detach() - t.p).abs().sum(-1) + kl(s, t).sum(-1)),
    # arguments that are not what their names say
    "probs for log-probs": PairMiss(lambda s, t, m, c: F.kl_div(s.p, t.p, reduction="none").sum(-1)),
    "logits for log-probs": PairMiss(lambda s, t, m, c: (t.p * (t.lp - s.z)).sum(-1) + s.lp.mean()),
    "probs for a log_target": PairMiss(lambda s, t, m, c: F.kl_div(s.lp, t.p, reduction="sum", log_target=True)),
    "swapped in the log only": PairMiss(lambda s, t, m, c: (t.p * (s.lp - t.lp)).sum(-1)),
    "swapped in the weight only": PairMiss(lambda s, t, m, c: (s.p * (t.lp - s.lp)).sum(-1)),
    "negative": PairMiss(lambda s, t, m, c: -kl(s, t).sum(-1)),
    "softmax of log_softmax of softmax": PairMiss(lambda s, t, m, c: -(t.p * s.p.log_softmax(-1)).sum(-1)),
    "another temperature in the weight": PairMiss(lambda s, t, m, c: ((t.lp / 2).softmax(-1) * (t.lp - s.lp)).sum(-1)),
    # an epsilon, a clamp
    "epsilon in the log": PairMiss(lambda s, t, m, c: (t.p * (torch.log(t.p + 1e-8) - torch.log(s.p + 1e-8))).sum(-1)),
    "a large epsilon": PairMiss(lambda s, t, m, c: -(t.p * torch.log(s.p + 0.01)).sum(-1)),
    "epsilon in the ratio": PairMiss(lambda s, t, m, c: (t.p * torch.log(t.p / (s.p + 0.01))).sum(-1)),
    "log-probs clamped": PairMiss(lambda s, t, m, c: F.kl_div(s.lp.clamp(min=-3), t.p, reduction="sum")),
    "probs clamped": PairMiss(lambda s, t, m, c: (t.p * s.p.clamp_min(0.02).log()).sum(-1)),
    "element clamped": PairMiss(lambda s, t, m, c: kl(s, t).clamp(min=0).sum(-1)),
    "log ratio clamped": PairMiss(lambda s, t, m, c: (t.p * (t.lp - s.lp).clamp(-1, 1)).sum(-1)),
    "row value clamped": PairMiss(lambda s, t, m, c: kl(s, t).sum(-1).clamp(max=1.0)),
    # another norm, another power, something behind the sum
    "L2": PairMiss(lambda s, t, m, c: (s.p - t.p).square().sum(-1)),
    "mse_loss": PairMiss(lambda s, t, m, c: F.mse_loss(s.p, t.p, reduction="sum")),
    "norm, p=2": PairMiss(lambda s, t, m, c: torch.norm(s.p - t.p, dim=-1)),
    "largest difference": PairMiss(lambda s, t, m, c: (s.p - t.p).abs().amax(-1)),
    "smooth_l1_loss": PairMiss(lambda s, t, m, c: F.smooth_l1_loss(s.p, t.p, reduction="none", beta=0.02).sum(-1)),
    "signed difference": PairMiss(lambda s, t, m, c: ((s.p - t.p) * c).sum(-1)),
    "L1 of log-probs": PairMiss(lambda s, t, m, c: (s.lp - t.lp).abs().sum(-1)),
    "L1 of logits": PairMiss(lambda s, t, m, c: (s.z - t.z).abs().sum(-1) + s.lp.mean(-1)),
    "a square root behind the sum": PairMiss(
        lambda s, t, m, c: (0.5 * (s.p.sqrt() - t.p.sqrt()).square().sum(-1) + 1e-2).sqrt()
    ),
    "square root of JSD": PairMiss(
        lambda s, t, m, c: (
            0.5 * (t.p * (t.lp - _log_half(s, t)) + s.p * (s.lp - _log_half(s, t))).sum(-1) + 1e-2
        ).sqrt()
    ),
    "mixture without its half": PairMiss(lambda s, t, m, c: (t.p * (t.lp - torch.log(s.p + t.p))).sum(-1)),
    "mixture whose weights are not one": PairMiss(
        lambda s, t, m, c: (s.p * (s.lp - torch.logaddexp(s.lp - 1.0, t.lp - 0.3))).sum(-1)
    ),
    "two mixtures": PairMiss(_two_mixtures),
    "alpha divergence": PairMiss(lambda s, t, m, c: (t.p.pow(0.3) * s.p.pow(0.7)).sum(-1).log()),
    # products, which sum over classes and which do not
    "classes summed by einsum": PairMiss(
        lambda s, t, m, c: -torch.einsum("nv,nv->n", t.p.float().flatten(0, -2), s.lp.float().flatten(0, -2))
    ),
    # a product with a matrix that each row of the student is alone in
    "all rows with all rows": PairMiss(lambda s, t, m, c: t.p.float().flatten(0, -2) @ s.lp.float().flatten(0, -2).T),
    # the vocabulary leaves
    "log-probs returned": PairMiss(lambda s, t, m, c: (kl(s, t).sum(-1), s.lp), fusable=False),
    "probs returned": PairMiss(lambda s, t, m, c: ((s.p - t.p).abs().sum(-1), s.p), fusable=False),
    "elements returned": PairMiss(lambda s, t, m, c: kl(s, t), fusable=False),
    "mixture returned": PairMiss(lambda s, t, m, c: (kl(s, t).sum(), _log_half(s, t)), fusable=False),
    "log-probs compared with the rows before": PairMiss(
        lambda s, t, m, c: (kl(s, t).sum(-1), (s.lp - s.lp.roll(1, 0)).abs().sum(-1))
    ),
    "largest log-prob of each class": PairMiss(lambda s, t, m, c: (kl(s, t).sum(-1), s.lp.amax(0)), fusable=False),
    "logits returned": PairMiss(lambda s, t, m, c: (kl(s, t).sum(-1), s.z * 1.0)),
    # what is read is written to
    "teacher's probs written to afterwards": PairMiss(_written_after),
    "teacher's probs written to in between": PairMiss(_written_between),
    # every run is another one
    "dropout of the student's logits": PairMiss(
        lambda s, t, m, c: F.kl_div(F.dropout(s.z, 0.5, True).log_softmax(-1), t.p, reduction="sum"),
        fusable=False,
        silent=True,
    ),
    "noise on the student's logits": PairMiss(
        lambda s, t, m, c: F.kl_div((s.z + torch.randn_like(s.z)).log_softmax(-1), t.p, reduction="sum"), fusable=False
    ),
}


def near_miss(program: PairProgram, miss: PairMiss) -> Callable[..., Any]:
    """The program's student and teacher, and the other loss."""

    def fn(x, w, b, tx, tw, given, y, m) -> Any:
        s, t = program.sides(x, w, b, tx, tw, given)
        return miss.loss(s, t, m, b)

    return fn
