"""Log-probability of one target per row, and its gradient, in plain PyTorch.

The row-kernel interface, shared with `kernels.triton.indexed`. Every function works on one chunk: `logits` [C, V] raw
products of any float dtype and stride, `target` [C] int32 or int64. A row whose target is `ignore_index` has none: its
log-probability is 0 and has no gradient. Any other target outside of [0, V) raises IndexError on the CPU and trips a
device assert elsewhere, in the forward. Per-row values are [C] in float32 (float64 for float64 logits), contiguous but
for gradients, which may be expanded and of any float dtype. `statistics` [2, C], whose rows are contiguous, is
`row_max` and `log_sum = log(sum(exp(z - row_max)))`. Outputs are written to tensors that the caller gives.
`out` [C, V] receives the gradient with respect to the raw products and may be `logits` itself. A row without a
gradient gets exact zeros, whatever its logits are.
"""

import torch
from torch import Tensor

from fuse_losses.kernels.chunked.squash import slope, squash_into
from fuse_losses.kernels.squash import Squash

TEMPORARIES = True  # the functions make tensors of [C, V]
_MINUS_INF = float("-inf")


def indexed_fwd(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    squash: Squash,
    log_prob: Tensor,
    statistics: Tensor,
) -> None:
    """Write `statistics` and `log_prob = z[target] - lse` (0 without one)."""
    row_max, log_sum = statistics
    column = _checked_columns(target, ignore_index, logits.shape[1])
    z = squash_into(logits, squash, torch.empty(logits.shape, dtype=log_prob.dtype, device=logits.device))  # [C, V]
    picked = _pick(z, column)
    row_max.copy_(_finite_max(z))
    torch.sum(_exp_(z, row_max), 1, out=log_sum).log_()
    log_prob.copy_(_log_prob(picked, column, row_max, log_sum))


def indexed_bwd(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    grad_log_prob: Tensor | None,
    grad_lse: Tensor | None,
    statistics: Tensor,
    squash: Squash,
    out: Tensor,
) -> None:
    """Write to `out` the gradient that comes from those of log_prob and lse; the statistics are `indexed_fwd`'s."""
    row_max, log_sum = statistics
    column = _columns(target, ignore_index)
    on_target, on_all = _coefficients(column, grad_log_prob, grad_lse, row_max.dtype)
    z = squash_into(logits, squash, _work(out, on_all.dtype))  # [C, V]
    dz_du = slope(z, squash)
    _gradient_into(out, _exp_(z, row_max), on_all * log_sum.neg().exp(), column, on_target, on_all, dz_du)


def indexed_fwd_bwd(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    weight: Tensor,
    squash: Squash,
    log_prob: Tensor,
    out: Tensor,
) -> None:
    """Write `log_prob` and the gradient of `weight * -log_prob` in one visit."""
    column = _checked_columns(target, ignore_index, logits.shape[1])
    weight = torch.where(column < 0, 0.0, weight)
    z = squash_into(logits, squash, _work(out, log_prob.dtype))  # [C, V]
    picked = _pick(z, column)
    dz_du = slope(z, squash)
    row_max = _finite_max(z)
    total = _exp_(z, row_max).sum(1)
    log_prob.copy_(_log_prob(picked, column, row_max, total.log()))
    _gradient_into(out, z, weight / total, column, -weight, weight, dz_du)


def _columns(target: Tensor, ignore_index: int) -> Tensor:
    """int64 [C]: the target of each row, -1 where it is `ignore_index`."""
    return torch.where(target == ignore_index, -1, target).to(torch.int64)


def _checked_columns(target: Tensor, ignore_index: int, vocab: int) -> Tensor:
    """`_columns`, once every target is known to be in bounds; on a device, without a host sync."""
    column = _columns(target, ignore_index)
    wrong = (target != ignore_index) & ((target < 0) | (target >= vocab))
    if target.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"a target is out of bounds, expected 0 <= target < {vocab}")
    elif wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds. Expected 0 <= target < {vocab}.")
    return column


def _coefficients(
    column: Tensor, grad_log_prob: Tensor | None, grad_lse: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(on_target, on_all) [C] with dz = on_all * p + on_target * onehot(target); a row without a target takes nothing
    from its log-probability, whatever its gradient is.
    """
    if grad_log_prob is None:
        on_target = torch.zeros(column.shape, dtype=dtype, device=column.device)
    else:
        on_target = torch.where(column < 0, 0.0, grad_log_prob.to(dtype))
    return on_target, -on_target if grad_lse is None else grad_lse.to(dtype) - on_target


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
