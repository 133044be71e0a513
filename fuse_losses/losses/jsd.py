"""Generalised Jensen-Shannon divergence; its limits at beta 0 and 1, scaled, are the forward and reverse KL."""

import torch.nn.functional as F

from fuse_losses.losses import scalar as m
from fuse_losses.losses.divergence import Divergence, Interval
from fuse_losses.losses.kl import log_mixture
from fuse_losses.losses.mixture import mixed, times


def phi(p, q, lp, lq, k):
    over_p, over_q = mixed(lp, lq, k)
    return k * times(q, over_q) + (1 - k) * times(p, over_p)


def phi1(p, q, lp, lq, k, centred=0.0):
    return times(p, mixed(lp, lq, k)[0])


def phi2(p, q, lp, lq, k, centred=0.0):
    return times(q, mixed(lp, lq, k)[1])


def slope1(p, q, lp, lq, k):
    """0 where p is 0: such a class takes no part, as in `torch.xlogy`, where the true slope is -inf."""
    return m.where(p == 0.0, 0.0, mixed(lp, lq, k)[0])


def slope2(p, q, lp, lq, k):
    """0 where q is 0, likewise."""
    return m.where(q == 0.0, 0.0, mixed(lp, lq, k)[1])


def scale(k):
    return 1 - k, k


def centre(k):
    return 0.0, 0.0  # both derivatives vanish where p == q


def reference(lp, lq, k):
    lm = log_mixture(lp, lq, k)
    of_teacher = F.kl_div(lm, lq, reduction="none", log_target=True).sum(-1)
    return k * of_teacher + (1 - k) * F.kl_div(lm, lp, reduction="none", log_target=True).sum(-1)


def of_log_probs(student, teacher, k):
    return reference(student.log_softmax(-1), teacher.log_softmax(-1), k)


def of_probs(student, teacher, k):
    p, q = student.softmax(-1), teacher.softmax(-1)
    lm = ((1 - k) * p + k * q).log()
    return (k * F.kl_div(lm, q, reduction="none") + (1 - k) * F.kl_div(lm, p, reduction="none")).sum(-1)


JSD = Divergence(
    name="jsd",
    formula="sum_v k q (log q - log m) + (1-k) p (log p - log m), m = (1-k) p + k q",
    parameter="beta",
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
