"""Total variation distance."""

from fuse_losses.losses import scalar as m
from fuse_losses.losses.divergence import Divergence, Interval


def phi(p, q, lp, lq, k):
    return 0.5 * m.abs(p - q)


def phi1(p, q, lp, lq, k, centred=0.0):
    return p * slope1(p, q, lp, lq, k)


def phi2(p, q, lp, lq, k, centred=0.0):
    return q * slope2(p, q, lp, lq, k)


def slope1(p, q, lp, lq, k):
    """0 where p == q, as PyTorch's `abs` has it."""
    return m.where(p > q, 1.0, m.where(p < q, -1.0, 0.0 * p))


def slope2(p, q, lp, lq, k):
    return slope1(q, p, lq, lp, k)


def scale(k):
    return 0.5, 0.5


def centre(k):
    return 0.0, 0.0


def reference(lp, lq, k):
    return (lp.exp() - lq.exp()).abs().sum(-1) / 2


def halved(student, teacher, k):
    return 0.5 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)


def of_log_probs(student, teacher, k):
    return reference(student.log_softmax(-1), teacher.log_softmax(-1), k)


TVD = Divergence(
    name="tvd",
    formula="sum_v |p - q| / 2",
    parameter=None,
    default=0.0,
    valid=Interval(0.0, 0.0),
    phi=phi,
    phi1=phi1,
    phi2=phi2,
    slope1=slope1,
    slope2=slope2,
    scale=scale,
    centre=centre,
    reference=reference,
    spellings={"halved": halved, "log_probs": of_log_probs},
)
