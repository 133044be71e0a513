"""Log-probability and logsumexp of given logits; the backward writes one gradient in the logits' dtype."""

import torch

from fuse_losses.ops.autograd import forbid_double_backward, last_derivative, needs_gradient
from fuse_losses.ops.checks import check_how, check_rows
from fuse_losses.ops.given import given_bwd, given_fwd

SCHEMA = (
    "log_prob(Tensor logits, Tensor target, str squash, float inner, float outer, SymInt ignore_index, "
    "SymInt chunk_rows) -> (Tensor, Tensor)"
)


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(logits, target, squash, inner, outer, ignore_index, chunk_rows):
        log_prob, statistics = given_fwd(logits, target, squash, inner, outer, ignore_index, chunk_rows)
        return log_prob, statistics[0] + statistics[1], statistics

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, target, *how = inputs
        statistics = output[2]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(statistics)
        ctx.save_for_backward(logits, target, statistics)
        ctx.how = how

    @staticmethod
    def backward(ctx, grad_log_prob, grad_lse, *_):
        forbid_double_backward()
        if grad_log_prob is None and grad_lse is None:
            return (None,) * 7
        (grad,) = last_derivative(_given_bwd, grad_log_prob, grad_lse, *ctx.saved_tensors, *ctx.how)
        return grad, *[None] * 6


def _given_bwd(*args):
    return (given_bwd(*args),)


def log_prob(logits, target, squash, inner, outer, ignore_index, chunk_rows):
    """(log_prob, lse) [N] in float32 (float64 for float64) of raw products [N, V]."""
    check_how(squash, chunk_rows)
    if not logits.is_floating_point():
        raise TypeError(f"logits must be a float tensor, got {logits.dtype}")
    if logits.dim() != 2:
        raise ValueError(f"logits must be [N, V], got {tuple(logits.shape)}")
    check_rows(logits.shape[0], target)
    if needs_gradient(logits):
        values, lse, _ = _LogProb.apply(logits, target, squash, inner, outer, ignore_index, chunk_rows)
        return values, lse
    log_prob, statistics = given_fwd(logits, target, squash, inner, outer, ignore_index, chunk_rows)
    return log_prob, statistics[0] + statistics[1]
