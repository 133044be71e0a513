"""Weighted sum of negative log-likelihoods of projected rows; the forward makes its gradients."""

import torch
from torch import Tensor

from fuse_losses.ops.autograd import forbid_double_backward, needs_gradient, refuse_gradients, scaled
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
    """needs: which of x, weight, bias and row_weight have a gradient. What waits for the backward is an output."""

    @staticmethod
    def forward(
        x, weight, bias, target, row_weight, logits, squash, inner, outer, ignore_index, chunk_rows, accumulate,
        needs,
    ):  # fmt: skip
        if any(needs[:3]):
            log_prob, *grads = indexed_fwd_grad(
                x, weight, bias, target, row_weight, logits, squash, inner, outer, ignore_index, chunk_rows,
                accumulate, *needs[:3],
            )  # fmt: skip
        else:
            log_prob, _ = indexed_fwd(x, weight, bias, target, logits, squash, inner, outer, ignore_index, chunk_rows)
            grads = [None, None, None]
        made = [grad if need else None for grad, need in zip(grads, needs[:3], strict=True)]
        return _weighted_sum(log_prob, row_weight), log_prob if needs[3] else None, *made

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, _, target, row_weight, _, _, _, _, ignore_index, _, _, needs = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(target, *output[1:])
        ctx.ignore_index = ignore_index
        ctx.dtype = x.dtype
        ctx.row_weight_dtype = row_weight.dtype if needs[3] else None

    @staticmethod
    def backward(ctx, grad, *of_gradients):
        refuse_gradients(*of_gradients)
        forbid_double_backward()
        if grad is None:
            return (None,) * 13
        target, log_prob, grad_x, grad_weight, grad_bias = ctx.saved_tensors
        need_x, need_weight, need_bias, _, need_row_weight = ctx.needs_input_grad[:5]  # at this level of torch.func
        # a row without a target has no gradient, even if the upstream one is inf or NaN (mean of no rows)
        valid = target != ctx.ignore_index
        per_row = torch.where(valid, grad, 0.0)  # [N]
        whole = torch.where(valid.any(), grad, 0.0).unsqueeze(0)  # [1]
        return (
            scaled(grad_x, per_row.unsqueeze(1), ctx.dtype) if need_x else None,
            scaled(grad_weight, whole, ctx.dtype) if need_weight else None,
            scaled(grad_bias, whole, ctx.dtype) if need_bias else None,
            None,
            (-log_prob * per_row).to(ctx.row_weight_dtype) if need_row_weight else None,
            *[None] * 8,
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
    needs = tuple(needs_gradient(tensor) for tensor in (x, weight, bias, row_weight))
    if any(needs):
        total, *_ = _LinearNllSum.apply(
            x, weight, bias, target, row_weight, logits, squash, inner, outer, ignore_index, chunk_rows,
            accumulate, needs,
        )  # fmt: skip
        return total
    log_prob, _ = indexed_fwd(x, weight, bias, target, logits, squash, inner, outer, ignore_index, chunk_rows)
    return _weighted_sum(log_prob, row_weight)
