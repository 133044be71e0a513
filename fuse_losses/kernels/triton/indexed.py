"""Log-probability of one target per row, and its gradient, in Triton: one program per row, float32 inside.

The interface and its contract are those of `kernels.chunked.indexed`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuse_losses.kernels.squash import Squash
from fuse_losses.kernels.triton.launch import Launcher, num_warps
from fuse_losses.kernels.triton.squash import SQUASHES
from fuse_losses.kernels.triton.tile import block_size, load_logits, row_statistics

TEMPORARIES = False  # the functions make no tensor of [C, V]


@triton.jit
def _column(target_ptr, row, vocab, ignore_index, CHECKED: tl.constexpr):
    """The target of the row, -1 where it is `ignore_index`. Without another launch, and without a host sync, one out of
    bounds trips a device assert.
    """
    target = tl.load(target_ptr + row).to(tl.int64)
    kept = target != ignore_index
    if CHECKED:
        inside = (target >= 0) & (target < vocab)
        tl.device_assert(inside | (target == ignore_index), "a target is out of bounds: expected 0 <= target < vocab")
    return tl.where(kept, target, -1)


@triton.jit
def _picked_logit(row_ptr, column, vocab, col_stride, inner, outer, SQUASH: tl.constexpr):
    # an out-of-range column has tripped the assert, which may stop the device later: never read outside the row
    inside = (column >= 0) & (column < vocab)
    u = tl.load(row_ptr + column * col_stride, mask=inside, other=float("nan")).to(tl.float32)
    return SQUASH(u, inner, outer)


@triton.jit
def _gradient_tile(
    row_ptr, out_ptr, start, column, on_target, on_all, top, log_sum, vocab, col_stride, out_col_stride,
    inner, outer,
    SQUASH: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    cols = start + tl.arange(0, BLOCK)
    z = load_logits(row_ptr, cols, vocab, col_stride, inner, outer, SQUASH, MASKED)
    du = on_all * tl.exp((z - top) - log_sum) + tl.where(cols == column, on_target, 0.0)
    du = (du * SLOPE(z, inner, outer)).to(out_ptr.dtype.element_ty)
    offsets = cols.to(tl.int64) * out_col_stride
    if MASKED:
        tl.store(out_ptr + offsets, du, mask=cols < vocab)
    else:
        tl.store(out_ptr + offsets, du)


@triton.jit
def _gradient_row(
    row_ptr, out_ptr, column, on_target, on_all, top, log_sum, vocab, col_stride, out_col_stride, inner,
    outer,
    SQUASH: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    whole = vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        _gradient_tile(
            row_ptr, out_ptr, start, column, on_target, on_all, top, log_sum, vocab, col_stride,
            out_col_stride, inner, outer, SQUASH, SLOPE, BLOCK, False,
        )  # fmt: skip
    _gradient_tile(
        row_ptr, out_ptr, whole, column, on_target, on_all, top, log_sum, vocab, col_stride, out_col_stride,
        inner, outer, SQUASH, SLOPE, BLOCK, True,
    )  # fmt: skip


@triton.jit
def _zero_row(out_ptr, vocab, out_col_stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    whole = vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        tl.store(out_ptr + (start + cols).to(tl.int64) * out_col_stride, zero)
    cols += whole
    tl.store(out_ptr + cols.to(tl.int64) * out_col_stride, zero, mask=cols < vocab)


@triton.jit
def indexed_fwd_kernel(
    logits_ptr, target_ptr, log_prob_ptr, statistics_ptr,
    ignore_index, statistics_stride, vocab, row_stride, col_stride, inner, outer,
    SQUASH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * row_stride passes 2^31
    row_ptr = logits_ptr + row * row_stride
    column = _column(target_ptr, row, vocab, ignore_index, True)
    picked = _picked_logit(row_ptr, column, vocab, col_stride, inner, outer, SQUASH)
    top, log_sum = row_statistics(row_ptr, vocab, col_stride, inner, outer, SQUASH, BLOCK)
    tl.store(statistics_ptr + row, top)
    tl.store(statistics_ptr + statistics_stride + row, log_sum)
    tl.store(log_prob_ptr + row, tl.where(column < 0, 0.0, (picked - top) - log_sum))


@triton.jit
def indexed_bwd_kernel(
    logits_ptr, target_ptr, grad_log_prob_ptr, grad_lse_ptr, statistics_ptr, out_ptr,
    ignore_index, grad_log_prob_stride, grad_lse_stride, statistics_stride, vocab,
    row_stride, col_stride, out_row_stride, out_col_stride, inner, outer,
    SQUASH: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    out_row_ptr = out_ptr + row * out_row_stride
    column = _column(target_ptr, row, vocab, ignore_index, False)
    on_target = tl.zeros((), tl.float32)
    if grad_log_prob_ptr is not None:
        on_target = tl.where(column < 0, 0.0, tl.load(grad_log_prob_ptr + row * grad_log_prob_stride).to(tl.float32))
    on_all = -on_target
    if grad_lse_ptr is not None:
        on_all += tl.load(grad_lse_ptr + row * grad_lse_stride).to(tl.float32)
    if (on_target == 0.0) & (on_all == 0.0):
        _zero_row(out_row_ptr, vocab, out_col_stride, BLOCK)
    else:
        _gradient_row(
            logits_ptr + row * row_stride, out_row_ptr, column, on_target, on_all, tl.load(statistics_ptr + row),
            tl.load(statistics_ptr + statistics_stride + row), vocab, col_stride, out_col_stride, inner, outer,
            SQUASH, SLOPE, BLOCK,
        )  # fmt: skip


@triton.jit
def indexed_fwd_bwd_kernel(
    logits_ptr, target_ptr, weight_ptr, log_prob_ptr, out_ptr,
    ignore_index, vocab, row_stride, col_stride, out_row_stride, out_col_stride, inner, outer,
    SQUASH: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    out_row_ptr = out_ptr + row * out_row_stride
    column = _column(target_ptr, row, vocab, ignore_index, True)
    if column < 0:  # the row is never read
        tl.store(log_prob_ptr + row, 0.0)
        _zero_row(out_row_ptr, vocab, out_col_stride, BLOCK)
    else:
        weight = tl.load(weight_ptr + row)
        # before the gradient overwrites the row, which may be in place
        picked = _picked_logit(row_ptr, column, vocab, col_stride, inner, outer, SQUASH)
        top, log_sum = row_statistics(row_ptr, vocab, col_stride, inner, outer, SQUASH, BLOCK)
        tl.store(log_prob_ptr + row, (picked - top) - log_sum)
        tl.debug_barrier()  # every thread has read the picked logit and its statistics
        if weight == 0.0:
            _zero_row(out_row_ptr, vocab, out_col_stride, BLOCK)
        else:
            _gradient_row(
                row_ptr, out_row_ptr, column, -weight, weight, top, log_sum, vocab, col_stride,
                out_col_stride, inner, outer, SQUASH, SLOPE, BLOCK,
            )  # fmt: skip


def _constants(vocab: int, device: torch.device, squash: str) -> tuple[dict[str, Any], dict[str, Any]]:
    function, slope = SQUASHES[squash]
    block = block_size(vocab)
    # Triton leaves asserts out unless told otherwise, and would then guard every integer against overflow too
    options = {"num_warps": num_warps(block, device), "debug": True, "sanitize_overflow": False}
    return {"SQUASH": function, "SLOPE": slope, "BLOCK": block}, options


_fwd = Launcher(indexed_fwd_kernel, _constants)
_bwd = Launcher(indexed_bwd_kernel, _constants)
_fwd_bwd = Launcher(indexed_fwd_bwd_kernel, _constants)


def indexed_fwd(
    logits: Tensor, target: Tensor, ignore_index: int, squash: Squash, log_prob: Tensor, statistics: Tensor
) -> None:
    """Write `statistics` and `log_prob = z[target] - lse` (0 without one)."""
    _fwd(
        (logits, target.contiguous(), log_prob, statistics),
        (ignore_index, statistics.stride(0), logits.shape[1], *logits.stride(), squash.inner, squash.outer),
        (squash.name,),
    )


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
    strides = _stride(grad_log_prob), _stride(grad_lse), statistics.stride(0)
    _bwd(
        (logits, target.contiguous(), grad_log_prob, grad_lse, statistics, out),
        (ignore_index, *strides, logits.shape[1], *logits.stride(), *out.stride(), squash.inner, squash.outer),
        (squash.name,),
    )


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
    _fwd_bwd(
        (logits, target.contiguous(), weight, log_prob, out),
        (ignore_index, logits.shape[1], *logits.stride(), *out.stride(), squash.inner, squash.outer),
        (squash.name,),
    )


def _stride(values: Tensor | None) -> int:
    """How far per-row values are apart; those of an expanded gradient are one element."""
    return 0 if values is None else values.stride(0)
