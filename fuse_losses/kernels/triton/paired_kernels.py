"""Kernels over two distributions per row: one program per row, float32 inside. `paired` launches them.

A row is read once for the statistics of both sides, once for the sums over the vocabulary, and once for the gradients.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fuse_losses.kernels.triton.tile import load_logits

_LOWEST = tl.constexpr(-3.0e38)  # below all logits but -inf, and not -inf itself: differences with it are no NaN


class Row(NamedTuple):
    """One row of one side in a kernel."""

    ptr: Any
    col_stride: Any
    inner: Any
    outer: Any


@triton.jit
def _statistics_tile(row, cols, vocab, top, total, FORM: tl.constexpr, SQUASH: tl.constexpr, MASKED: tl.constexpr):
    """Add a tile to the running maximum and sum of exp(z - maximum) of every lane: no lane waits for another."""
    if FORM == "logits":
        z = load_logits(row.ptr, cols, vocab, row.col_stride, row.inner, row.outer, SQUASH, MASKED)
        e = tl.exp(-tl.abs(z - top))  # of the smaller of the two; the larger one's is 1
        total = tl.where(z > top, total * e + 1.0, total + e)
        top = tl.where(z > top, z, top)
    return top, total


@triton.jit
def _merged(top, total):
    """(maximum, sum(exp(z - maximum))) of the lanes' values; the maximum of a row of only -inf is 0."""
    row_top = tl.max(top, 0)
    return tl.where(row_top == _LOWEST, 0.0, row_top), tl.sum(total * tl.exp(top - row_top), 0)


@triton.jit
def _statistics(
    p, q, vocab,
    P_FORM: tl.constexpr, P_SQUASH: tl.constexpr, Q_FORM: tl.constexpr, Q_SQUASH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row maximum and sum(exp(z - maximum)) of p, then of q; of no meaning for a side that is no logits."""
    cols = tl.arange(0, BLOCK)
    p_top = tl.full([BLOCK], _LOWEST, tl.float32)
    q_top = tl.full([BLOCK], _LOWEST, tl.float32)
    p_total = tl.zeros([BLOCK], tl.float32)
    q_total = tl.zeros([BLOCK], tl.float32)
    if P_FORM == "logits" or Q_FORM == "logits":
        whole = vocab // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            p_top, p_total = _statistics_tile(p, start + cols, vocab, p_top, p_total, P_FORM, P_SQUASH, False)
            q_top, q_total = _statistics_tile(q, start + cols, vocab, q_top, q_total, Q_FORM, Q_SQUASH, False)
        p_top, p_total = _statistics_tile(p, whole + cols, vocab, p_top, p_total, P_FORM, P_SQUASH, True)
        q_top, q_total = _statistics_tile(q, whole + cols, vocab, q_top, q_total, Q_FORM, Q_SQUASH, True)
    p_max, p_exp_sum = _merged(p_top, p_total)
    q_max, q_exp_sum = _merged(q_top, q_total)
    return p_max, p_exp_sum, q_max, q_exp_sum


@triton.jit
def _load(row, cols, vocab, top, mass, FORM: tl.constexpr, SQUASH: tl.constexpr, MASKED: tl.constexpr):
    """(probability, its logarithm, logit) of a tile; 0 and -inf beyond the row's end."""
    if FORM == "logits":
        z = load_logits(row.ptr, cols, vocab, row.col_stride, row.inner, row.outer, SQUASH, MASKED)
        below = z - top
        log_prob = below - tl.log(mass)
        prob = tl.exp(below) * (1.0 / mass)  # closer than exp(log_prob), which has the rounding of the logarithm
    else:
        ptrs = row.ptr + cols.to(tl.int64) * row.col_stride
        if MASKED:
            other = 0.0 if FORM == "probs" else float("-inf")
            value = tl.load(ptrs, mask=cols < vocab, other=other).to(tl.float32)
        else:
            value = tl.load(ptrs).to(tl.float32)
        z = value
        if FORM == "probs":
            prob = value
            log_prob = tl.log(value)
        else:
            log_prob = value
            prob = tl.exp(value)
    return prob, log_prob, z


@triton.jit
def _sums_tile(
    p, q, cols, vocab, p_top, p_exp_sum, q_top, q_exp_sum, d, p_sum, p_mass, q_sum, q_mass, K: tl.constexpr,
    P_FORM: tl.constexpr, P_SQUASH: tl.constexpr, Q_FORM: tl.constexpr, Q_SQUASH: tl.constexpr,
    PHI: tl.constexpr, PHI1: tl.constexpr, PHI2: tl.constexpr, P_SUM: tl.constexpr, Q_SUM: tl.constexpr,
    REUSE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add a tile to the per-lane sums of phi, the centred phi1 and p, the centred phi2 and q."""
    p_prob, lp, _ = _load(p, cols, vocab, p_top, p_exp_sum, P_FORM, P_SQUASH, MASKED)
    q_prob, lq, _ = _load(q, cols, vocab, q_top, q_exp_sum, Q_FORM, Q_SQUASH, MASKED)
    inside = cols < vocab if MASKED else True
    d += tl.where(inside, PHI(p_prob, q_prob, lp, lq, K), 0.0)
    if P_SUM:
        g = PHI1(p_prob, q_prob, lp, lq, K, 1.0)
        p_sum += tl.where(inside, g, 0.0)
        if REUSE:  # nobody reads this tile of q again: each thread leaves there what it has made of its own elements
            _store(q.ptr, cols, vocab, q.col_stride, g, MASKED)
        p_mass += p_prob
    if Q_SUM:
        q_sum += tl.where(inside, PHI2(p_prob, q_prob, lp, lq, K, 1.0), 0.0)
        q_mass += q_prob
    return d, p_sum, p_mass, q_sum, q_mass


@triton.jit
def _sums(
    p, q, vocab, p_top, p_exp_sum, q_top, q_exp_sum, K: tl.constexpr,
    P_FORM: tl.constexpr, P_SQUASH: tl.constexpr, Q_FORM: tl.constexpr, Q_SQUASH: tl.constexpr,
    PHI: tl.constexpr, PHI1: tl.constexpr, PHI2: tl.constexpr, P_SUM: tl.constexpr, Q_SUM: tl.constexpr,
    REUSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Over the row, sum(phi), sum(phi1) / sum(p) and sum(phi2) / sum(q), centred; only the first, unless asked for."""
    cols = tl.arange(0, BLOCK)
    d = tl.zeros([BLOCK], tl.float32)
    p_sum = tl.zeros([BLOCK], tl.float32)
    q_sum = tl.zeros([BLOCK], tl.float32)
    p_mass = tl.zeros([BLOCK], tl.float32)
    q_mass = tl.zeros([BLOCK], tl.float32)
    whole = vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        d, p_sum, p_mass, q_sum, q_mass = _sums_tile(
            p, q, start + cols, vocab, p_top, p_exp_sum, q_top, q_exp_sum, d, p_sum, p_mass, q_sum, q_mass, K,
            P_FORM, P_SQUASH, Q_FORM, Q_SQUASH, PHI, PHI1, PHI2, P_SUM, Q_SUM, REUSE, False,
        )  # fmt: skip
    d, p_sum, p_mass, q_sum, q_mass = _sums_tile(
        p, q, whole + cols, vocab, p_top, p_exp_sum, q_top, q_exp_sum, d, p_sum, p_mass, q_sum, q_mass, K,
        P_FORM, P_SQUASH, Q_FORM, Q_SQUASH, PHI, PHI1, PHI2, P_SUM, Q_SUM, REUSE, True,
    )  # fmt: skip
    p_mean = tl.sum(p_sum, 0) / tl.sum(p_mass, 0) if P_SUM else 0.0
    q_mean = tl.sum(q_sum, 0) / tl.sum(q_mass, 0) if Q_SUM else 0.0
    return tl.sum(d, 0), p_mean, q_mean


@triton.jit
def _store(out_ptr, cols, vocab, col_stride, value, MASKED: tl.constexpr):
    ptrs = out_ptr + cols.to(tl.int64) * col_stride
    if MASKED:
        tl.store(ptrs, value.to(out_ptr.dtype.element_ty), mask=cols < vocab)
    else:
        tl.store(ptrs, value.to(out_ptr.dtype.element_ty))


@triton.jit
def _gradient(
    p_prob, q_prob, lp, lq, own, z, mean, weight, row, K: tl.constexpr,
    FORM: tl.constexpr, DZ_DU: tl.constexpr, DERIVATIVE: tl.constexpr, BY_PROB: tl.constexpr,
):  # fmt: skip
    """`weight` times the gradient of one side, whose probabilities are `own`, with respect to its values."""
    if FORM == "logits":
        dz = DERIVATIVE(p_prob, q_prob, lp, lq, K, 1.0) - own * mean
        grad = weight * dz * DZ_DU(z, row.inner, row.outer)
    elif FORM == "log_probs":
        grad = weight * DERIVATIVE(p_prob, q_prob, lp, lq, K, 0.0)
    else:
        grad = weight * BY_PROB(p_prob, q_prob, lp, lq, K)
    return grad


@triton.jit
def _gradients_tile(
    p, q, p_out_ptr, p_out_stride, q_out_ptr, q_out_stride, cols, vocab, p_top, p_exp_sum, q_top, q_exp_sum,
    p_mean, q_mean, weight, K: tl.constexpr,
    P_FORM: tl.constexpr, P_SQUASH: tl.constexpr, P_DZ_DU: tl.constexpr,
    Q_FORM: tl.constexpr, Q_SQUASH: tl.constexpr, Q_DZ_DU: tl.constexpr,
    PHI1: tl.constexpr, SLOPE1: tl.constexpr, PHI2: tl.constexpr, SLOPE2: tl.constexpr,
    A1: tl.constexpr, A2: tl.constexpr,
    P_OUT: tl.constexpr, Q_OUT: tl.constexpr, SHARED: tl.constexpr, REUSE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    p_prob, lp, p_z = _load(p, cols, vocab, p_top, p_exp_sum, P_FORM, P_SQUASH, MASKED)
    q_prob, lq, q_z = _load(q, cols, vocab, q_top, q_exp_sum, "probs" if REUSE else Q_FORM, Q_SQUASH, MASKED)
    if SHARED:
        # a gradient that is narrower than the values it is written over reaches those of other threads, all of
        # which have now read this tile; tiles to come lie behind it
        tl.debug_barrier()
    if REUSE:
        g = q_prob  # q's memory holds the centred phi1, read as if it were a probability
        grad = weight * A1 * (g - p_prob * p_mean) * P_DZ_DU(p_z, p.inner, p.outer)
        _store(p_out_ptr, cols, vocab, p_out_stride, grad, MASKED)
    elif P_OUT:
        grad = _gradient(
            p_prob, q_prob, lp, lq, p_prob, p_z, p_mean, weight * A1, p, K, P_FORM, P_DZ_DU, PHI1, SLOPE1,
        )  # fmt: skip
        _store(p_out_ptr, cols, vocab, p_out_stride, grad, MASKED)
    if Q_OUT:
        grad = _gradient(
            p_prob, q_prob, lp, lq, q_prob, q_z, q_mean, weight * A2, q, K, Q_FORM, Q_DZ_DU, PHI2, SLOPE2,
        )  # fmt: skip
        _store(q_out_ptr, cols, vocab, q_out_stride, grad, MASKED)


@triton.jit
def _gradients(
    p, q, p_out_ptr, p_out_stride, q_out_ptr, q_out_stride, vocab, p_top, p_exp_sum, q_top, q_exp_sum,
    p_mean, q_mean, weight, K: tl.constexpr,
    P_FORM: tl.constexpr, P_SQUASH: tl.constexpr, P_DZ_DU: tl.constexpr,
    Q_FORM: tl.constexpr, Q_SQUASH: tl.constexpr, Q_DZ_DU: tl.constexpr,
    PHI1: tl.constexpr, SLOPE1: tl.constexpr, PHI2: tl.constexpr, SLOPE2: tl.constexpr,
    A1: tl.constexpr, A2: tl.constexpr,
    P_OUT: tl.constexpr, Q_OUT: tl.constexpr, SHARED: tl.constexpr, REUSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    whole = vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        _gradients_tile(
            p, q, p_out_ptr, p_out_stride, q_out_ptr, q_out_stride, start + cols, vocab, p_top, p_exp_sum,
            q_top, q_exp_sum, p_mean, q_mean, weight, K, P_FORM, P_SQUASH, P_DZ_DU, Q_FORM, Q_SQUASH, Q_DZ_DU,
            PHI1, SLOPE1, PHI2, SLOPE2, A1, A2, P_OUT, Q_OUT, SHARED, REUSE, False,
        )  # fmt: skip
    _gradients_tile(
        p, q, p_out_ptr, p_out_stride, q_out_ptr, q_out_stride, whole + cols, vocab, p_top, p_exp_sum,
        q_top, q_exp_sum, p_mean, q_mean, weight, K, P_FORM, P_SQUASH, P_DZ_DU, Q_FORM, Q_SQUASH, Q_DZ_DU,
        PHI1, SLOPE1, PHI2, SLOPE2, A1, A2, P_OUT, Q_OUT, SHARED, REUSE, True,
    )  # fmt: skip


@triton.jit
def _zero_rows(
    p_out_ptr, p_out_stride, q_out_ptr, q_out_stride, vocab,
    P_OUT: tl.constexpr, Q_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        if P_OUT:
            _store(p_out_ptr, start + cols, vocab, p_out_stride, zero, True)
        if Q_OUT:
            _store(q_out_ptr, start + cols, vocab, q_out_stride, zero, True)


@triton.jit
def paired_fwd_kernel(
    p_ptr, q_ptr, d_ptr, statistics_ptr, statistics_stride, vocab,
    p_row_stride, p_col_stride, p_inner, p_outer, q_row_stride, q_col_stride, q_inner, q_outer, K: tl.constexpr,
    P_FORM: tl.constexpr, P_SQUASH: tl.constexpr, Q_FORM: tl.constexpr, Q_SQUASH: tl.constexpr,
    PHI: tl.constexpr, PHI1: tl.constexpr, PHI2: tl.constexpr, P_SUM: tl.constexpr, Q_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * row_stride passes 2^31
    p = Row(p_ptr + row * p_row_stride, p_col_stride, p_inner, p_outer)
    q = Row(q_ptr + row * q_row_stride, q_col_stride, q_inner, q_outer)
    p_top, p_exp_sum, q_top, q_exp_sum = _statistics(p, q, vocab, P_FORM, P_SQUASH, Q_FORM, Q_SQUASH, BLOCK)
    d, p_mean, q_mean = _sums(
        p, q, vocab, p_top, p_exp_sum, q_top, q_exp_sum, K, P_FORM, P_SQUASH, Q_FORM, Q_SQUASH,
        PHI, PHI1, PHI2, P_SUM, Q_SUM, False, BLOCK,
    )  # fmt: skip
    tl.store(d_ptr + row, d)
    statistics_ptr += row
    tl.store(statistics_ptr, p_top)
    tl.store(statistics_ptr + statistics_stride, p_exp_sum)
    tl.store(statistics_ptr + 2 * statistics_stride, q_top)
    tl.store(statistics_ptr + 3 * statistics_stride, q_exp_sum)
    tl.store(statistics_ptr + 4 * statistics_stride, p_mean)
    tl.store(statistics_ptr + 5 * statistics_stride, q_mean)


@triton.jit
def paired_bwd_kernel(
    p_ptr, q_ptr, p_out_ptr, q_out_ptr, weight_ptr, statistics_ptr, weight_stride, statistics_stride, vocab,
    p_row_stride, p_col_stride, p_inner, p_outer, q_row_stride, q_col_stride, q_inner, q_outer,
    p_out_row_stride, p_out_col_stride, q_out_row_stride, q_out_col_stride, K: tl.constexpr,
    P_FORM: tl.constexpr, P_SQUASH: tl.constexpr, P_DZ_DU: tl.constexpr,
    Q_FORM: tl.constexpr, Q_SQUASH: tl.constexpr, Q_DZ_DU: tl.constexpr,
    PHI1: tl.constexpr, SLOPE1: tl.constexpr, PHI2: tl.constexpr, SLOPE2: tl.constexpr,
    A1: tl.constexpr, A2: tl.constexpr,
    P_OUT: tl.constexpr, Q_OUT: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p_out_ptr += row * p_out_row_stride
    q_out_ptr += row * q_out_row_stride
    weight = tl.load(weight_ptr + row * weight_stride).to(tl.float32)
    if weight == 0.0:
        _zero_rows(p_out_ptr, p_out_col_stride, q_out_ptr, q_out_col_stride, vocab, P_OUT, Q_OUT, BLOCK)
    else:
        p = Row(p_ptr + row * p_row_stride, p_col_stride, p_inner, p_outer)
        q = Row(q_ptr + row * q_row_stride, q_col_stride, q_inner, q_outer)
        of_row = statistics_ptr + row
        _gradients(
            p, q, p_out_ptr, p_out_col_stride, q_out_ptr, q_out_col_stride, vocab,
            tl.load(of_row), tl.load(of_row + statistics_stride), tl.load(of_row + 2 * statistics_stride),
            tl.load(of_row + 3 * statistics_stride), tl.load(of_row + 4 * statistics_stride),
            tl.load(of_row + 5 * statistics_stride), weight, K,
            P_FORM, P_SQUASH, P_DZ_DU, Q_FORM, Q_SQUASH, Q_DZ_DU, PHI1, SLOPE1, PHI2, SLOPE2, A1, A2,
            P_OUT, Q_OUT, SHARED, False, BLOCK,
        )  # fmt: skip


@triton.jit
def paired_fwd_bwd_kernel(
    p_ptr, q_ptr, p_out_ptr, q_out_ptr, weight_ptr, d_ptr, vocab,
    p_row_stride, p_col_stride, p_inner, p_outer, q_row_stride, q_col_stride, q_inner, q_outer,
    p_out_row_stride, p_out_col_stride, q_out_row_stride, q_out_col_stride, K: tl.constexpr,
    P_FORM: tl.constexpr, P_SQUASH: tl.constexpr, P_DZ_DU: tl.constexpr,
    Q_FORM: tl.constexpr, Q_SQUASH: tl.constexpr, Q_DZ_DU: tl.constexpr,
    PHI: tl.constexpr, PHI1: tl.constexpr, SLOPE1: tl.constexpr, PHI2: tl.constexpr, SLOPE2: tl.constexpr,
    A1: tl.constexpr, A2: tl.constexpr,
    P_OUT: tl.constexpr, Q_OUT: tl.constexpr, SHARED: tl.constexpr, REUSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p_out_ptr += row * p_out_row_stride
    q_out_ptr += row * q_out_row_stride
    weight = tl.load(weight_ptr + row)
    if weight == 0.0:  # the row is never read
        tl.store(d_ptr + row, 0.0)
        _zero_rows(p_out_ptr, p_out_col_stride, q_out_ptr, q_out_col_stride, vocab, P_OUT, Q_OUT, BLOCK)
    else:
        p = Row(p_ptr + row * p_row_stride, p_col_stride, p_inner, p_outer)
        q = Row(q_ptr + row * q_row_stride, q_col_stride, q_inner, q_outer)
        p_top, p_exp_sum, q_top, q_exp_sum = _statistics(p, q, vocab, P_FORM, P_SQUASH, Q_FORM, Q_SQUASH, BLOCK)
        d, p_mean, q_mean = _sums(
            p, q, vocab, p_top, p_exp_sum, q_top, q_exp_sum, K, P_FORM, P_SQUASH, Q_FORM, Q_SQUASH,
            PHI, PHI1, PHI2, P_OUT and P_FORM == "logits", Q_OUT and Q_FORM == "logits", REUSE, BLOCK,
        )  # fmt: skip
        tl.store(d_ptr + row, d)
        tl.debug_barrier()  # every thread has read the row
        _gradients(
            p, q, p_out_ptr, p_out_col_stride, q_out_ptr, q_out_col_stride, vocab,
            p_top, p_exp_sum, q_top, q_exp_sum, p_mean, q_mean, weight, K,
            P_FORM, P_SQUASH, P_DZ_DU, Q_FORM, Q_SQUASH, Q_DZ_DU, PHI1, SLOPE1, PHI2, SLOPE2, A1, A2,
            P_OUT, Q_OUT, SHARED, REUSE, BLOCK,
        )  # fmt: skip
