"""Reverse Kullback-Leibler divergence, from the student to the teacher: the forward one with the sides exchanged."""

import torch.nn.functional as F

from fuse_losses.losses.divergence import Divergence, Interval
from fuse_losses.losses.kl import KL, log_mixture
from fuse_losses.losses.kl import phi as kl_phi
from fuse_losses.losses.kl import phi1 as kl_phi1
from fuse_losses.losses.kl import phi2 as kl_phi2
from fuse_losses.losses.kl import slope1 as kl_slope1
from fuse_losses.losses.kl import slope2 as kl_slope2


def phi(p, q, lp, lq, k):
    return kl_phi(q, p, lq, lp, k)


def phi1(p, q, lp, lq, k, centred=0.0):
    return kl_phi2(q, p, lq, lp, k, centred)


def phi2(p, q, lp, lq, k, centred=0.0):
    return kl_phi1(q, p, lq, lp, k, centred)


def slope1(p, q, lp, lq, k):
    return kl_slope2(q, p, lq, lp, k)


def slope2(p, q, lp, lq, k):
    return kl_slope1(q, p, lq, lp, k)


def scale(k):
    a1, a2 = KL.scale(k)
    return a2, a1


def centre(k):
    c1, c2 = KL.centre(k)
    return c2, c1


def reference(lp, lq, k):
    return F.kl_div(log_mixture(lq, lp, k), lp, reduction="none", log_target=True).sum(-1)


def of_log_probs(student, teacher, k):
    lp, lq = student.log_softmax(-1), teacher.log_softmax(-1)
    return F.kl_div(log_mixture(lq, lp, k), lp, reduction="none", log_target=True).sum(-1)


def written_out(student, teacher, k):
    lp, lq = student.log_softmax(-1), teacher.log_softmax(-1)
    return (student.softmax(-1) * (lp - log_mixture(lq, lp, k))).sum(-1)


REVERSE_KL = Divergence(
    name="reverse_kl",
    formula="sum_v p (log p - log((1-k) q + k p))",
    parameter="skew",
    default=0.0,
    valid=Interval(0.0, 1.0, "[)"),
    phi=phi,
    phi1=phi1,
    phi2=phi2,
    slope1=slope1,
    slope2=slope2,
    scale=scale,
    centre=centre,
    reference=reference,
    spellings={"log_probs": of_log_probs, "written_out": written_out},
)
