"""Weighted sum of divergences; the forward makes the gradients of projected sides (4 products for a frozen teacher)."""

import torch
from torch import Tensor

from fuse_losses.ops.autograd import forbid_double_backward, needs_gradient, scaled
from fuse_losses.ops.checks import check_rows
from fuse_losses.ops.divergence import check, divergence
from fuse_losses.ops.paired import HOW, TENSORS, How, paired_fwd_grad

SCHEMA = f"divergence_sum({TENSORS}, Tensor? row_weight, {HOW}, str accumulate) -> Tensor"


def _weighted_sum(d: Tensor, row_weight: Tensor | None) -> Tensor:
    if row_weight is None:
        return d.sum()
    weight = row_weight.to(d.dtype)
    weighted = weight * d
    if not needs_gradient(row_weight):  # else the weight of a row wants its divergence, also where it is 0
        weighted = torch.where(weight == 0, 0.0, weighted)
    return weighted.sum()


class _DivergenceSum(torch.autograd.Function):
    @staticmethod
    def forward(p, p_weight, p_bias, q, q_weight, q_bias, row_weight, how, accumulate, needs):
        d, *grads = paired_fwd_grad(
            p, p_weight, p_bias, q, q_weight, q_bias, row_weight, *how, accumulate, list(needs)
        )  # fmt: skip
        return _weighted_sum(d, row_weight), *grads

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, row_weight, _, _, needs = inputs
        _, *grads = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*grads)
        ctx.save_for_backward(row_weight, *[g if need else None for g, need in zip(grads, needs, strict=True)])
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.rows = tensors[0].shape[0]

    @staticmethod
    def backward(ctx, grad, *_):
        forbid_double_backward()
        if grad is None:
            return (None,) * 10
        row_weight, *saved = ctx.saved_tensors
        # a row without weight has no gradient, even if the upstream one is inf or NaN (mean of no rows)
        taken = grad.new_ones(ctx.rows, dtype=torch.bool) if row_weight is None else row_weight != 0  # [N]
        by_row = grad.unsqueeze(0) if row_weight is None else torch.where(taken, grad, 0.0)
        whole = torch.where(taken.any(), grad, 0.0).unsqueeze(0)
        factors = (by_row.unsqueeze(1), whole, whole) * 2
        grads = [
            None if g is None else scaled(g, factor, dtype)
            for g, factor, dtype in zip(saved, factors, ctx.dtypes, strict=True)
        ]
        return *grads, None, None, None, None


def divergence_sum(p, p_weight, p_bias, q, q_weight, q_bias, row_weight, *arguments):
    """0-d `sum_i row_weight_i * divergence_i` in float32 or float64; arguments as the package says.

    Without a projected side that needs a gradient, or with row weights that need one, the backward makes them.
    """
    tensors, how, accumulate = (p, p_weight, p_bias, q, q_weight, q_bias), How(*arguments[:-1]), arguments[-1]
    check(tensors, how, accumulate)
    check_rows(p.shape[0], None, row_weight)
    needs = tuple(needs_gradient(t) for t in tensors)
    projected = (p_weight is not None and any(needs[:3])) or (q_weight is not None and any(needs[3:]))
    if not projected or needs_gradient(row_weight):
        return _weighted_sum(divergence(*tensors, *arguments), row_weight)
    return _DivergenceSum.apply(*tensors, row_weight, how, accumulate, needs)[0]
