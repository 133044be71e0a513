"""Weighted sum of negative log-likelihoods of projected rows; the forward makes its gradients."""

import torch
from torch import Tensor

from fuse_losses.ops.autograd import forbid_double_backward, needs_gradient, scaled
from fuse_losses.ops.checks import check_how, check_projection, check_rows
from fuse_losses.ops.indexed import indexed_fwd, indexed_fwd_grad

SCHEMA = (
    "linear_nll_sum(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? row_weight, "
    "Tensor? logits, str squash, float inner, float outer, SymInt ignore_index, SymInt chunk_rows, "
    "str accumulate) -> Tensor"
)


def _weighted_sum(log_prob: Tensor, row_weight: Tensor | None) -> Tensor:
    weighted = log_prob if row_weight is None else row_weight.to(log_prob.dtype) * log_prob
    return -weighted.sum()


class _LinearNllSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, target, row_weight, logits, squash, inner, outer, ignore_index, chunk_rows,
        accumulate
    ):  # fmt: skip
        need_x, need_weight, need_bias, _, need_row_weight = ctx.needs_input_grad[:5]
        if need_x or need_weight or need_bias:
            log_prob, *grads = indexed_fwd_grad(
                x, weight, bias, target, row_weight, logits, squash, inner, outer, ignore_index, chunk_rows,
                accumulate, need_x, need_weight, need_bias,
            )  # fmt: skip
        else:
            log_prob, _, _ = indexed_fwd(
                x, weight, bias, target, logits, squash, inner, outer, ignore_index, chunk_rows
            )
            grads = [None, None, None]
        saved = [grad if need else None for grad, need in zip(grads, (need_x, need_weight, need_bias), strict=True)]
        ctx.save_for_backward(target, log_prob if need_row_weight else None, *saved)
        ctx.ignore_index = ignore_index
        ctx.dtype = x.dtype
        ctx.row_weight_dtype = row_weight.dtype if need_row_weight else None
        return _weighted_sum(log_prob, row_weight)

    @staticmethod
    def backward(ctx, grad):
        forbid_double_backward()
        target, log_prob, grad_x, grad_weight, grad_bias = ctx.saved_tensors
        # a row without a target has no gradient, even if the upstream one is inf or NaN (mean of no rows)
        valid = target != ctx.ignore_index
        per_row = torch.where(valid, grad, 0.0)  # [N]
        whole = torch.where(valid.any(), grad, 0.0).unsqueeze(0)  # [1]
        return (
            None if grad_x is None else scaled(grad_x, per_row.unsqueeze(1), ctx.dtype),
            None if grad_weight is None else scaled(grad_weight, whole, ctx.dtype),
            None if grad_bias is None else scaled(grad_bias, whole, ctx.dtype),
            None,
            None if log_prob is None else (-log_prob * per_row).to(ctx.row_weight_dtype),
            *[None] * 7,
        )


def linear_nll_sum(
    x, weight, bias, target, row_weight, logits, squash, inner, outer, ignore_index, chunk_rows, accumulate
):  # fmt: skip
    """0-d `sum_i row_weight_i * -log_prob_i` in float32 or float64; arguments as the package says."""
    check_how(squash, chunk_rows, accumulate)
    check_projection(x, weight, bias, logits)
    check_rows(x.shape[0], target, row_weight)
    if logits is not None:
        logits = logits.detach()
    if any(needs_gradient(tensor) for tensor in (x, weight, bias, row_weight)):
        return _LinearNllSum.apply(
            x, weight, bias, target, row_weight, logits, squash, inner, outer, ignore_index, chunk_rows,
            accumulate,
        )  # fmt: skip
    log_prob, _, _ = indexed_fwd(x, weight, bias, target, logits, squash, inner, outer, ignore_index, chunk_rows)
    return _weighted_sum(log_prob, row_weight)
