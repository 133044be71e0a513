"""Weighted sum of the two Kullback-Leibler divergences (Jeffreys divergence at k = 0.5, up to its factor of 2)."""

import torch.nn.functional as F

from fuse_losses.losses import scalar as m
from fuse_losses.losses.divergence import Divergence, Interval
from fuse_losses.losses.mixture import minus, times


def phi(p, q, lp, lq, k):
    return times(k * p - (1 - k) * q, minus(lp, lq))


def phi1(p, q, lp, lq, k, centred=0.0):
    return k * times(p, minus(lp, lq) + (1 - centred)) + (1 - k) * (centred * p - q)


def phi2(p, q, lp, lq, k, centred=0.0):
    return (1 - k) * times(q, minus(lq, lp) + (1 - centred)) + k * (centred * q - p)


def slope1(p, q, lp, lq, k):
    """-inf where only p is 0, as the loss is +inf there."""
    d = minus(lp, lq)
    return k * (d + 1) - (1 - k) * m.exp(-d)


def slope2(p, q, lp, lq, k):
    """-inf where only q is 0, as the loss is +inf there."""
    d = minus(lq, lp)
    return (1 - k) * (d + 1) - k * m.exp(-d)


def scale(k):
    return 1.0, 1.0


def centre(k):
    return 1 - 2 * k, 2 * k - 1


def reference(lp, lq, k):
    forward = F.kl_div(lp, lq, reduction="none", log_target=True).sum(-1)
    return (1 - k) * forward + k * F.kl_div(lq, lp, reduction="none", log_target=True).sum(-1)


def of_log_probs(student, teacher, k):
    return reference(student.log_softmax(-1), teacher.log_softmax(-1), k)


def of_probs(student, teacher, k):
    p, q = student.softmax(-1), teacher.softmax(-1)
    forward = F.kl_div(p.log(), q, reduction="none").sum(-1)
    return (1 - k) * forward + k * F.kl_div(q.log(), p, reduction="none").sum(-1)


SYMMETRIC_KL = Divergence(
    name="symmetric_kl",
    formula="sum_v (1-k) q (log q - log p) + k p (log p - log q)",
    parameter="weight",
    default=0.5,
    valid=Interval(0.0, 1.0, "()"),
    phi=phi,
    phi1=phi1,
    phi2=phi2,
    slope1=slope1,
    slope2=slope2,
    scale=scale,
    centre=centre,
    reference=reference,
    spellings={"log_probs": of_log_probs, "probs": of_probs},
)
