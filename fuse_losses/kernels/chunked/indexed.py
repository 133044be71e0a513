"""Log-probability of one target per row, and its gradient, in plain PyTorch.

The row-kernel interface, shared with `kernels.triton.indexed`. Every function works on one chunk: `logits`
[C, V] raw products of any float dtype and stride, `column` [C] int64, the target or a negative number for
"none"; per-row values are contiguous [C] in float32 (float64 for float64 logits). Outputs are written to
tensors that the caller gives. `out` [C, V] receives the gradient with respect to the raw products and may be
`logits` itself. A row whose coefficients are all zero gets a gradient of exact zeros, whatever its logits
are.
"""

import torch
from torch import Tensor

from fuse_losses.kernels.chunked.squash import slope, squash_into
from fuse_losses.kernels.squash import Squash

TEMPORARIES = True  # the functions make tensors of [C, V]
_MINUS_INF = float("-inf")


def indexed_fwd(
    logits: Tensor, column: Tensor, squash: Squash, log_prob: Tensor, row_max: Tensor, log_sum: Tensor
) -> None:
    """Write `row_max`, `log_sum = log(sum(exp(z - row_max)))` and `log_prob = z[column] - lse` (0 without a
    column).
    """
    z = squash_into(logits, squash, torch.empty(logits.shape, dtype=log_prob.dtype, device=logits.device))  # [C, V]
    picked = _pick(z, column)
    row_max.copy_(_finite_max(z))
    torch.sum(_exp_(z, row_max), 1, out=log_sum).log_()
    log_prob.copy_(_log_prob(picked, column, row_max, log_sum))


def indexed_bwd(
    logits: Tensor,
    column: Tensor,
    on_target: Tensor,
    on_all: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    squash: Squash,
    out: Tensor,
) -> None:
    """Write `(on_all * p + on_target * onehot(column)) * dz/du` to `out`; the statistics are `indexed_fwd`'s."""
    z = squash_into(logits, squash, _work(out, on_all.dtype))  # [C, V]
    dz_du = slope(z, squash)
    _gradient_into(out, _exp_(z, row_max), on_all * log_sum.neg().exp(), column, on_target, on_all, dz_du)


def indexed_fwd_bwd(
    logits: Tensor, column: Tensor, weight: Tensor, squash: Squash, log_prob: Tensor, out: Tensor
) -> None:
    """Write `log_prob` and the gradient of `weight * -log_prob` in one visit; `weight` is 0 where there is no
    column.
    """
    z = squash_into(logits, squash, _work(out, log_prob.dtype))  # [C, V]
    picked = _pick(z, column)
    dz_du = slope(z, squash)
    row_max = _finite_max(z)
    total = _exp_(z, row_max).sum(1)
    log_prob.copy_(_log_prob(picked, column, row_max, total.log()))
    _gradient_into(out, z, weight / total, column, -weight, weight, dz_du)


def _work(out: Tensor, dtype: torch.dtype) -> Tensor:
    """A [C, V] tensor of the statistics' dtype to compute in: `out` itself where it has that dtype."""
    return out if out.dtype == dtype else torch.empty(out.shape, dtype=dtype, device=out.device)


def _finite_max(z: Tensor) -> Tensor:
    """Row maximum [C]; 0 for a row of only -inf, so that -inf - max stays -inf."""
    top = z.amax(1)
    return top.masked_fill_(top == _MINUS_INF, 0.0)


def _exp_(z: Tensor, row_max: Tensor) -> Tensor:
    return z.sub_(row_max.unsqueeze(1)).exp_()


def _pick(z: Tensor, column: Tensor) -> Tensor:
    return z.gather(1, _in_range(column, z.shape[1])).squeeze(1)  # [C]


def _in_range(column: Tensor, vocab: int) -> Tensor:
    # the caller has checked targets; the clamp turns "none" into some column, and keeps a read in bounds on a
    # device whose check is asynchronous
    return column.clamp(0, vocab - 1).unsqueeze(1)  # [C, 1]


def _log_prob(picked: Tensor, column: Tensor, row_max: Tensor, log_sum: Tensor) -> Tensor:
    # (z_t - max) - log_sum: exact where the logits are large, unlike z_t - lse
    return torch.where(column < 0, 0.0, (picked - row_max) - log_sum)


def _gradient_into(
    out: Tensor,
    e: Tensor,
    per_e: Tensor,
    column: Tensor,
    on_target: Tensor,
    on_all: Tensor,
    dz_du: Tensor | float,
) -> None:
    """Finish a gradient from `e = exp(z - max)` (overwritten), where `per_e * e = on_all * p`."""
    if isinstance(dz_du, float):  # constant: fold it into the per-row coefficients
        per_e, on_target_u = per_e * dz_du, on_target * dz_du
    else:
        on_target_u = on_target
    du = e.mul_(per_e.unsqueeze(1))
    du.scatter_add_(1, _in_range(column, du.shape[1]), on_target_u.unsqueeze(1))  # one column per row: no collisions
    if not isinstance(dz_du, float):
        du.mul_(dz_du)
    dead = (on_target == 0) & (on_all == 0)
    du.masked_fill_(dead.unsqueeze(1), 0.0)
    if out is not du:
        out.copy_(du)
