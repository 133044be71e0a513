"""Inner operators for one target per row. They know nothing of autograd: which gradients to compute is an argument.

Per-row values are float32 (float64 for float64 inputs). Inside, an ambient autocast is switched off: the
dtypes of the arguments say all.
"""

import torch
from torch import Tensor

from fuse_losses.kernels.squash import Squash
from fuse_losses.ops.chunk_loop import Needs, Projection, cut, cut_those, forward_loop, gradient_loop, rows_per_chunk
from fuse_losses.ops.dispatch import indexed_kernels
from fuse_losses.ops.gemm import statistics_dtype
from fuse_losses.ops.inner import inner_operator, no_autocast


def per_row(like: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the log-probabilities [N] and statistics [2, N] of rows like these."""
    dtype = statistics_dtype(like.dtype)
    return like.new_empty(like.shape[0], dtype=dtype), like.new_empty(2, like.shape[0], dtype=dtype)


def row_gain(weight: Tensor) -> Tensor:
    """0-d power of two that puts the largest row weight at about 256.

    Gradients made in the forward do not know the loss scale yet: p * weight is mostly below float16's range,
    where eager's gradient, which carries the scale, is not.
    """
    top = weight.abs().amax() if weight.numel() else weight.new_ones(())
    usable = (top > 0) & top.isfinite()
    return torch.exp2(8.0 - torch.where(usable, top, 1.0).log2().ceil())


def saved_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes in which gradients wait for the upstream gradient: for x and weight, and for the bias."""
    return torch.float32 if dtype == torch.float16 else dtype, statistics_dtype(dtype)


@inner_operator()
def indexed_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    logits: Tensor | None,
    squash: str,
    inner: float,
    outer: float,
    ignore_index: int,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """log_prob [N] of the projected rows, and their statistics [2, N]: row_max and log_sum, which add up to lse."""
    chunk_rows = rows_per_chunk(x.shape[0], chunk_rows, weight.shape[0] * x.element_size())
    kernels, how = indexed_kernels(x), Squash(squash, inner, outer)
    log_prob, statistics = per_row(x)

    def visit(part: slice, u: Tensor) -> None:
        kernels.indexed_fwd(
            u, cut(target, part), ignore_index, how, cut(log_prob, part), cut(statistics, part, 1)
        )  # fmt: skip

    with no_autocast(x):
        forward_loop(Projection(x, weight, bias, logits), chunk_rows, visit)
    return log_prob, statistics


@indexed_fwd.register_fake
def _(x, weight, bias, target, logits, squash, inner, outer, ignore_index, chunk_rows):
    return per_row(x)


@inner_operator()
def indexed_fwd_grad(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_weight: Tensor | None,
    logits: Tensor | None,
    squash: str,
    inner: float,
    outer: float,
    ignore_index: int,
    chunk_rows: int,
    accumulate: str,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_prob [N], and the gradients of `sum(row_weight * -log_prob)` for x, weight and bias (shape [0] if
    not needed).

    float16 gradients come back in float32 (unscaled, they leave float16's range), the bias's always do.
    """
    chunk_rows = rows_per_chunk(x.shape[0], chunk_rows, weight.shape[0] * x.element_size())
    kernels, how = indexed_kernels(x), Squash(squash, inner, outer)
    log_prob = x.new_empty(x.shape[0], dtype=statistics_dtype(x.dtype))
    with no_autocast(x):
        weights = torch.ones_like(log_prob) if row_weight is None else row_weight.to(log_prob.dtype)
        weights = weights.contiguous()
        gain = row_gain(torch.where(target == ignore_index, 0.0, weights)) if x.dtype == torch.float16 else None
        if gain is not None:
            weights = weights * gain

        def visit(part: slice, u: Tensor, du: Tensor) -> None:
            kernels.indexed_fwd_bwd(
                u, cut(target, part), ignore_index, cut(weights, part), how, cut(log_prob, part), du
            )  # fmt: skip

        needs = Needs(need_x, need_weight, need_bias, accumulate)
        dtypes = saved_dtypes(x.dtype)
        grads = gradient_loop(Projection(x, weight, bias, logits), chunk_rows, needs, *dtypes, visit)
        if gain is not None:
            for grad in grads:
                grad.div_(gain)
    return log_prob, grads.x, grads.weight, grads.bias


@indexed_fwd_grad.register_fake
def _(
    x, weight, bias, target, row_weight, logits, squash, inner, outer, ignore_index, chunk_rows, accumulate,
    need_x, need_weight, need_bias,
):  # fmt: skip
    return (
        x.new_empty(x.shape[0], dtype=statistics_dtype(x.dtype)),
        *_fake_gradients(x, weight, bias, need_x, need_weight, need_bias, *saved_dtypes(x.dtype)),
    )


@inner_operator()
def indexed_bwd(
    grad_log_prob: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    statistics: Tensor,
    squash: str,
    inner: float,
    outer: float,
    ignore_index: int,
    chunk_rows: int,
    accumulate: str,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for x, weight and bias (shape [0] if not needed) from those of log_prob and lse; logits are
    recomputed.
    """
    chunk_rows = rows_per_chunk(x.shape[0], chunk_rows, weight.shape[0] * x.element_size())
    kernels, how = indexed_kernels(x), Squash(squash, inner, outer)
    with no_autocast(x):

        def visit(part: slice, u: Tensor, du: Tensor) -> None:
            above = cut_those(part, grad_log_prob, grad_lse)
            kernels.indexed_bwd(u, cut(target, part), ignore_index, *above, cut(statistics, part, 1), how, du)

        needs = Needs(need_x, need_weight, need_bias, accumulate)
        grads = gradient_loop(Projection(x, weight, bias, None), chunk_rows, needs, x.dtype, x.dtype, visit)
    return grads.x, grads.weight, grads.bias


@indexed_bwd.register_fake
def _(
    grad_log_prob, grad_lse, x, weight, bias, target, statistics, squash, inner, outer, ignore_index,
    chunk_rows, accumulate, need_x, need_weight, need_bias,
):  # fmt: skip
    return _fake_gradients(x, weight, bias, need_x, need_weight, need_bias, x.dtype, x.dtype)


def _fake_gradients(x, weight, bias, need_x, need_weight, need_bias, dtype, bias_dtype):
    return (
        torch.empty_like(x, dtype=dtype) if need_x else x.new_empty(0, dtype=dtype),
        torch.empty_like(weight, dtype=dtype) if need_weight else x.new_empty(0, dtype=dtype),
        x.new_empty(bias.shape if need_bias and bias is not None else 0, dtype=bias_dtype),
    )
