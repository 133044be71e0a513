"""Weighted sum of divergences; the forward makes the gradients of projected sides (4 products for a frozen teacher)."""

import torch
from torch import Tensor

from fuse_losses.ops.autograd import forbid_double_backward, needs_gradient, scaled
from fuse_losses.ops.checks import check_rows
from fuse_losses.ops.divergence import check, divergence
from fuse_losses.ops.inner import no_autocast
from fuse_losses.ops.paired import HOW, TENSORS, How, paired_fwd_grad, paired_fwd_keep

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
        ctx.save_for_backward(row_weight, *grads)
        ctx.needed = [t.dtype if need else None for t, need in zip(tensors, needs, strict=True)]
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
        waiting = iter(saved)
        grads = [
            None if dtype is None else scaled(next(waiting), factor, dtype)
            for factor, dtype in zip(factors, ctx.needed, strict=True)
        ]
        return *grads, None, None, None, None


class _FewRows(torch.autograd.Function):
    """Where rows are few beside hidden units, the gradient for the logits is small beside that for the weight: it is
    what waits for the upstream gradient, and the products that take it to x and weight are the backward's.
    """

    @staticmethod
    def forward(p, p_weight, p_bias, q, q_weight, q_bias, row_weight, how, needs):
        sides = any(needs[:3]), any(needs[3:])
        d, *kept = paired_fwd_keep(p, p_weight, p_bias, q, q_weight, q_bias, row_weight, *how, *sides)
        return _weighted_sum(d, row_weight), *kept

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, row_weight, _, needs = inputs
        _, *kept = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(row_weight, *kept, *tensors)
        ctx.needs = needs

    @staticmethod
    def backward(ctx, grad, *_):
        forbid_double_backward()
        if grad is None:
            return (None,) * 9
        row_weight, *kept = ctx.saved_tensors[:3]
        tensors = ctx.saved_tensors[3:]
        grads: list[Tensor | None] = []
        for du, (x, weight, _), (need_x, need_weight, need_bias) in zip(
            kept, (tensors[:3], tensors[3:]), (ctx.needs[:3], ctx.needs[3:]), strict=True
        ):
            # a row without weight has no gradient, even if the upstream one is inf or NaN
            taken = None if row_weight is None else row_weight != 0
            by_row = grad if taken is None else torch.where(taken, grad, 0.0).unsqueeze(1)
            whole = grad if taken is None else torch.where(taken.any(), grad, 0.0)
            with no_autocast(grad):
                grads += [
                    ((du @ weight) * by_row).to(x.dtype) if need_x else None,
                    du.t() @ (x * by_row).to(x.dtype) if need_weight else None,
                    (du.sum(0, dtype=grad.dtype) * whole).to(x.dtype) if need_bias else None,
                ]
        return *grads, None, None, None


FEW = 4  # at most a fourth of the hidden units are few rows


def _are_few(side: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> bool:
    """Whether the rows of a side are few, as far as this is known; a side that needs no gradient does not matter."""
    x, weight, _ = side
    if x is None or not any(needs):
        return True
    known = isinstance(x.shape[0], int) and isinstance(x.shape[1], int)
    return weight is not None and known and 0 < FEW * x.shape[0] <= x.shape[1] and x.dtype != torch.float16


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
    if _are_few(tensors[:3], needs[:3]) and _are_few(tensors[3:], needs[3:]):
        return _FewRows.apply(*tensors, row_weight, how, needs)[0]
    return _DivergenceSum.apply(*tensors, row_weight, how, accumulate, needs)[0]
