"""Cross entropy of the student under the teacher's probabilities; skewed where the student is mixed first."""

import torch.nn.functional as F

from fuse_losses.losses import scalar as m
from fuse_losses.losses.divergence import Divergence, Interval
from fuse_losses.losses.kl import log_mixture
from fuse_losses.losses.kl import phi1 as kl_phi1
from fuse_losses.losses.kl import slope1 as kl_slope1
from fuse_losses.losses.mixture import mixed, times


def bits(lp, lq, k):
    """-log m for the mixture m of the student with the teacher, from the larger of the two."""
    if k == 0:
        result = -lp
    else:
        over_p, over_q = mixed(lp, lq, k)
        result = m.where(lp > lq, over_p - lp, over_q - lq)
    return result


def phi(p, q, lp, lq, k):
    return times(q, bits(lp, lq, k))


def phi1(p, q, lp, lq, k, centred=0.0):
    return kl_phi1(p, q, lp, lq, k, centred)


def phi2(p, q, lp, lq, k, centred=0.0):
    return times(q, slope2(p, q, lp, lq, k))


def slope1(p, q, lp, lq, k):
    return kl_slope1(p, q, lp, lq, k)


def slope2(p, q, lp, lq, k):
    """-log p also where q is 0, which is finite for a skew of 0."""
    return bits(lp, lq, k) - (0.0 if k == 0 else k * m.exp(mixed(lp, lq, k)[1]))


def scale(k):
    return 1 - k, 1.0


def centre(k):
    return 0.0, 0.0


def reference(lp, lq, k):
    return -(lq.exp() * log_mixture(lp, lq, k)).sum(-1)


def of_probs(student, teacher, k):
    if k == 0:
        flat = F.cross_entropy(student.flatten(0, -2), teacher.softmax(-1).flatten(0, -2), reduction="none")
        return flat.view(student.shape[:-1])
    mixture = (1 - k) * student.softmax(-1) + k * teacher.softmax(-1)
    return -(teacher.softmax(-1) * mixture.log()).sum(-1)


def written_out(student, teacher, k):
    lp, lq = student.log_softmax(-1), teacher.log_softmax(-1)
    return -(teacher.softmax(-1) * log_mixture(lp, lq, k)).sum(-1)


SOFT_CROSS_ENTROPY = Divergence(
    name="soft_cross_entropy",
    formula="sum_v -q log((1-k) p + k q)",
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
    spellings={"probs": of_probs, "written_out": written_out},
)
