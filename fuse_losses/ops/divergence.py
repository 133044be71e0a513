"""Divergence between two distributions per row; the backward recomputes the logits of projected sides."""

import torch
from torch import Tensor

from fuse_losses.ops.autograd import forbid_double_backward, needs_gradient
from fuse_losses.ops.checks import check_divergence, check_how, check_side, check_sides
from fuse_losses.ops.given import given_pair_bwd, given_pair_fwd
from fuse_losses.ops.paired import HOW, TENSORS, How, paired_bwd, paired_fwd

SCHEMA = f"divergence({TENSORS}, {HOW}, str accumulate) -> Tensor"


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(p, p_weight, p_bias, q, q_weight, q_bias, how, accumulate, needs):
        return _fwd((p, p_weight, p_bias, q, q_weight, q_bias), how, needs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, how, accumulate, needs = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], *tensors)
        ctx.how, ctx.accumulate = how, accumulate
        ctx.needs = needs

    @staticmethod
    def backward(ctx, grad, _):
        forbid_double_backward()
        if grad is None:
            return (None,) * 9
        grads = iter(_bwd(grad, *ctx.saved_tensors, how=ctx.how, accumulate=ctx.accumulate, needs=ctx.needs))
        return *[next(grads) if need else None for need in ctx.needs], None, None, None


def _fwd(tensors: tuple[Tensor | None, ...], how: How, needs: tuple[bool, ...]) -> tuple[Tensor, Tensor]:
    p, p_weight, _, q, q_weight, _ = tensors
    if p_weight is None and q_weight is None:
        return given_pair_fwd(p, q, *how, needs[0], needs[3])
    return paired_fwd(*tensors, *how, list(needs))


def _bwd(grad: Tensor, statistics: Tensor, *tensors: Tensor | None, how: How, accumulate: str, needs: tuple[bool, ...]):
    """Those gradients that are needed, in the order of the tensors."""
    p, p_weight, _, q, q_weight, _ = tensors
    if p_weight is None and q_weight is None:
        return given_pair_bwd(grad, statistics, p, q, *how, needs[0], needs[3])
    return paired_bwd(grad, statistics, *tensors, *how, accumulate, list(needs))


def check(tensors: tuple[Tensor | None, ...], how: How, accumulate: str) -> None:
    """Raise ValueError or TypeError for arguments that do not fit."""
    p, p_weight, p_bias, q, q_weight, q_bias = tensors
    assert p is not None and q is not None  # the schema says so
    check_divergence(how.name, how.parameter)
    check_how(how.p_squash, how.chunk_rows, accumulate)
    check_how(how.q_squash, how.chunk_rows, accumulate)
    check_side("p", p, p_weight, p_bias, how.p_form, how[4:7])
    check_side("q", q, q_weight, q_bias, how.q_form, how[8:11])
    check_sides(p, p_weight, q, q_weight)


def divergence(p, p_weight, p_bias, q, q_weight, q_bias, *arguments):
    """The divergence [N] in float32 (float64 for float64). Arguments as the package says."""
    tensors, how, accumulate = (p, p_weight, p_bias, q, q_weight, q_bias), How(*arguments[:-1]), arguments[-1]
    check(tensors, how, accumulate)
    needs = tuple(needs_gradient(t) for t in tensors)
    if any(needs):
        return _Divergence.apply(*tensors, how, accumulate, needs)[0]
    return _fwd(tensors, how, needs)[0]
