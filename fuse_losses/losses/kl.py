"""Forward Kullback-Leibler divergence, from the teacher to the student; skewed where the student is mixed first."""

import torch
import torch.nn.functional as F

from fuse_losses.losses import scalar as m
from fuse_losses.losses.divergence import Divergence, Interval
from fuse_losses.losses.mixture import minus, mixed, times


def gap(lp, lq, k):
    """log q - log m for the mixture m of the student with the teacher."""
    return minus(lq, lp) if k == 0 else mixed(lp, lq, k)[1]


def share(lp, lq, k):
    """p / m."""
    return 1.0 if k == 0 else m.exp(mixed(lp, lq, k)[0])


def teacher_slope(lp, lq, k, centred):
    over = gap(lp, lq, k)
    through_mixture = 0.0 if k == 0 else k * m.expm1(over)
    return (over - through_mixture) + (1 - k) * (1 - centred)


def phi(p, q, lp, lq, k):
    return times(q, gap(lp, lq, k))


def phi1(p, q, lp, lq, k, centred=0.0):
    return -(q * share(lp, lq, k))


def phi2(p, q, lp, lq, k, centred=0.0):
    return times(q, teacher_slope(lp, lq, k, centred))


def slope1(p, q, lp, lq, k):
    """-inf where only p is 0 and k is 0, as the loss is +inf there."""
    return -m.exp(gap(lp, lq, k))


def slope2(p, q, lp, lq, k):
    """0 where q is 0: such a class takes no part, as in `torch.xlogy`, where the true slope is -inf."""
    return m.where(q == 0.0, 0.0, teacher_slope(lp, lq, k, 0.0))


def scale(k):
    return 1 - k, 1.0


def centre(k):
    return 0.0, k - 1


def log_mixture(lp, lq, k):
    """log((1 - k) p + k q) as PyTorch users write it."""
    if k == 0:
        return lp
    weights = torch.tensor([1 - k, k], dtype=lp.dtype, device=lp.device).log()
    return torch.logaddexp(lp + weights[0], lq + weights[1])


def reference(lp, lq, k):
    return F.kl_div(log_mixture(lp, lq, k), lq, reduction="none", log_target=True).sum(-1)


def of_log_probs(student, teacher, k):
    lp, lq = student.log_softmax(-1), teacher.log_softmax(-1)
    return F.kl_div(log_mixture(lp, lq, k), lq, reduction="none", log_target=True).sum(-1)


def of_probs(student, teacher, k):
    p, q = student.softmax(-1), teacher.softmax(-1)
    return F.kl_div(((1 - k) * p + k * q).log(), q, reduction="none").sum(-1)


def written_out(student, teacher, k):
    lp, lq = student.log_softmax(-1), teacher.log_softmax(-1)
    return (lq.exp() * (lq - log_mixture(lp, lq, k))).sum(-1)


KL = Divergence(
    name="kl",
    formula="sum_v q (log q - log((1-k) p + k q))",
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
    spellings={"log_probs": of_log_probs, "probs": of_probs, "written_out": written_out},
)
