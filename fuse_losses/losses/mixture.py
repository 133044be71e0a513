"""What pages share: differences and mixtures of log-probabilities that are accurate, finite and never NaN by accident.

Both executors run these functions, as they run a page's: no annotations, one `return`, `if` only on parameters.
"""

from fuse_losses.losses import scalar as m


def times(p, x):
    """`p * x`, 0 where p is 0 whatever x is."""
    return m.where(p == 0.0, 0.0, p * x)


def minus(a, b):
    """`a - b`, 0 where both are -inf."""
    return m.where(a == b, 0.0, a - b)


def mixed(lp, lq, w):
    """(lp - lm, lq - lm) for the mixture `lm = log((1 - w) p + w q)`; (0, 0) where both probabilities are 0.

    The larger probability is factored out: lm = max(lp, lq) + log1p(c * expm1(-|lq - lp|)), where c is the weight of
    the smaller one. Equal probabilities give exact zeros, and nothing overflows.
    """
    d = minus(lq, lp)
    far = m.abs(d)
    gap = m.expm1(-far)
    above = m.log1p(m.where(d > 0.0, (1 - w) * gap, w * gap))  # lm - max(lp, lq)
    from_larger = -above
    from_smaller = -above - far
    return m.where(d > 0.0, from_smaller, from_larger), m.where(d > 0.0, from_larger, from_smaller)
