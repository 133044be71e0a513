"""A divergence between two distributions per row, and its gradients, in plain PyTorch.

The row-kernel interface, shared with `kernels.triton.paired`. Every function works on one chunk of two sides: student
p and teacher q, whose values [C, V] may have any float dtypes and strides, a `Divergence` and its parameter k. Per-row
values are contiguous [C] in float32 (float64 where a side is float64), but for the backward's `weight`, which may be
expanded and of any float dtype; `statistics` is [6, C]: row maximum and
`sum(exp(z - maximum))` of p, the same of q, and sum(phi1) / sum(p) and sum(phi2) / sum(q) over the row, centred,
for a side that is given as logits and is `needed`; it may be strided in its first dim.

`p_out` and `q_out` [C, V] receive the gradient with respect to a side's values, or are None. Each may share its memory
with that side's values, row by row, and may be narrower than they are. A row whose `weight` is 0 gets a gradient of
exact zeros, whatever it holds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fuse_losses.kernels.chunked.squash import slope, squash_into
from fuse_losses.kernels.side import Side
from fuse_losses.losses.divergence import Divergence

TEMPORARIES = True  # the functions make tensors of [C, V]
_MINUS_INF = float("-inf")


class _Read(NamedTuple):
    """A side in the dtype of the statistics [C, V], and dz/du."""

    prob: Tensor
    log_prob: Tensor
    slope: Tensor | float


def paired_fwd(
    p: Side, q: Side, divergence: Divergence, k: float, d: Tensor, statistics: Tensor, needed: tuple[bool, bool]
) -> None:
    """Write the divergence `d` and what a backward needs to `statistics`."""
    p_read, q_read = _first_read(p, statistics[0:2]), _first_read(q, statistics[2:4])
    row = _row(p_read, q_read, k)
    torch.sum(divergence.phi(*row), 1, out=d)
    for side, read, derivative, need, out in (
        (p, p_read, divergence.phi1, needed[0], statistics[4]),
        (q, q_read, divergence.phi2, needed[1], statistics[5]),
    ):
        if need and side.form == "logits":
            out.copy_(_mean(derivative(*row, 1.0), read))
        else:
            out.zero_()


def paired_bwd(
    p: Side,
    q: Side,
    divergence: Divergence,
    k: float,
    weight: Tensor,
    statistics: Tensor,
    p_out: Tensor | None,
    q_out: Tensor | None,
) -> None:
    """Write `weight` times the gradients of the divergence; the statistics are `paired_fwd`'s."""
    weight = weight.to(statistics.dtype)
    p_read, q_read = _read(p, statistics[0:2]), _read(q, statistics[2:4])
    means = statistics[4], statistics[5]
    _gradients_into((p_out, q_out), (p, q), (p_read, q_read), divergence, k, weight, means)


def paired_fwd_bwd(
    p: Side,
    q: Side,
    divergence: Divergence,
    k: float,
    weight: Tensor,
    d: Tensor,
    p_out: Tensor | None,
    q_out: Tensor | None,
) -> None:
    """Write the divergence `d` (0 where `weight` is 0) and `weight` times its gradients in one visit."""
    statistics = d.new_empty(4, d.shape[0])
    p_read, q_read = _first_read(p, statistics[0:2]), _first_read(q, statistics[2:4])
    torch.sum(divergence.phi(*_row(p_read, q_read, k)), 1, out=d)
    d.masked_fill_(weight == 0, 0.0)
    _gradients_into((p_out, q_out), (p, q), (p_read, q_read), divergence, k, weight, (None, None))


def _logits(side: Side, dtype: torch.dtype) -> Tensor:
    values = side.values
    return squash_into(values, side.squash, torch.empty(values.shape, dtype=dtype, device=values.device))


def _first_read(side: Side, rows: Tensor) -> _Read:
    """`_read`, when the row maximum and the sum of exponentials have been written to `rows`."""
    if side.form == "logits":
        z = _logits(side, rows.dtype)
        top = z.amax(1)
        rows[0] = top.masked_fill_(top == _MINUS_INF, 0.0)  # so that -inf - top stays -inf
        torch.sum(z.sub_(top.unsqueeze(1)).exp_(), 1, out=rows[1])
    else:
        rows.zero_()
    return _read(side, rows)


def _read(side: Side, rows: Tensor) -> _Read:
    if side.form == "logits":
        z = _logits(side, rows.dtype)
        dz_du = slope(z, side.squash)
        below, mass = z.sub_(rows[0].unsqueeze(1)), rows[1].unsqueeze(1)
        prob = below.exp().div_(mass)  # closer than the exponential of log_prob, which has the logarithm's rounding
        return _Read(prob, below.sub_(mass.log()), dz_du)
    values = side.values.to(rows.dtype)
    return _Read(values.exp(), values, 1.0) if side.form == "log_probs" else _Read(values, values.log(), 1.0)


def _row(p: _Read, q: _Read, k: float) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    return p.prob, q.prob, p.log_prob, q.log_prob, k


def _mean(derivative: Tensor, read: _Read) -> Tensor:
    return derivative.sum(1) / read.prob.sum(1)


def _gradients_into(outs, sides, reads, divergence: Divergence, k: float, weight: Tensor, means) -> None:
    """Write both sides' gradients; a mean over the row that is None is computed."""
    row = _row(reads[0], reads[1], k)
    grads = []
    for out, side, read, derivative, by_prob, mean, scale in zip(
        outs, sides, reads, (divergence.phi1, divergence.phi2), (divergence.slope1, divergence.slope2), means,
        divergence.scale(k), strict=True,
    ):  # fmt: skip
        if out is not None:
            gradient = _gradient(side, read, row, derivative, by_prob, mean)
            grads.append((out, gradient, (weight * scale).unsqueeze(1)))
    for out, grad, factor in grads:  # when both sides have been read
        out.copy_(torch.where(factor == 0, 0.0, grad * factor))


def _gradient(side: Side, read: _Read, row, derivative, by_prob, mean: Tensor | None) -> Tensor:
    """Gradient [C, V] of the divergence with respect to a side's values, less its scale."""
    if side.form == "probs":
        return by_prob(*row)
    if side.form == "log_probs":
        return derivative(*row)
    g = derivative(*row, 1.0)
    mean = _mean(g, read) if mean is None else mean
    return (g - read.prob * mean.unsqueeze(1)) * read.slope
