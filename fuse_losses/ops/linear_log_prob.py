"""Log-probability and logsumexp of projected rows; the backward recomputes the logits (4 products in all)."""

import torch

from fuse_losses.ops.autograd import forbid_double_backward, last_derivative, needs_gradient
from fuse_losses.ops.checks import check_how, check_projection, check_rows
from fuse_losses.ops.indexed import indexed_bwd, indexed_fwd

SCHEMA = (
    "linear_log_prob(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? logits, "
    "str squash, float inner, float outer, SymInt ignore_index, SymInt chunk_rows, str accumulate) "
    "-> (Tensor, Tensor)"
)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias, target, logits, squash, inner, outer, ignore_index, chunk_rows, accumulate):
        log_prob, statistics = indexed_fwd(
            x, weight, bias, target, logits, squash, inner, outer, ignore_index, chunk_rows
        )
        return log_prob, statistics[0] + statistics[1], statistics

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, target, _, *how = inputs
        statistics = output[2]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(statistics)
        ctx.save_for_backward(x, weight, bias, target, statistics)
        ctx.how = how

    @staticmethod
    def backward(ctx, grad_log_prob, grad_lse, *_):
        forbid_double_backward()
        if grad_log_prob is None and grad_lse is None:
            return (None,) * 11
        needs = ctx.needs_input_grad[:3]
        grads = last_derivative(indexed_bwd, grad_log_prob, grad_lse, *ctx.saved_tensors, *ctx.how, *needs)
        return *[grad if need else None for grad, need in zip(grads, needs, strict=True)], *[None] * 8


def linear_log_prob(x, weight, bias, target, logits, squash, inner, outer, ignore_index, chunk_rows, accumulate):
    """(log_prob, lse) [N] in float32 (float64 for float64). Arguments as the package says."""
    check_how(squash, chunk_rows, accumulate)
    check_projection(x, weight, bias, logits)
    check_rows(x.shape[0], target)
    if logits is not None:
        logits = logits.detach()
    if any(needs_gradient(tensor) for tensor in (x, weight, bias)):
        values, lse, _ = _LinearLogProb.apply(
            x, weight, bias, target, logits, squash, inner, outer, ignore_index, chunk_rows, accumulate
        )
        return values, lse
    log_prob, statistics = indexed_fwd(x, weight, bias, target, logits, squash, inner, outer, ignore_index, chunk_rows)
    return log_prob, statistics[0] + statistics[1]
