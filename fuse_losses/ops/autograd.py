"""What the autograd functions share.

They have the form that torch.func asks for: a forward without a context, what is saved chosen in `setup_context`.
Whose gradients are needed is an argument of their forward, found outside with `needs_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_gradtrackingtensor

_DOUBLE = (
    "fuse_losses: double backward (create_graph=True) is not supported by a fused loss. "
    "Compute this loss without fuse_losses where you need second derivatives."
)


def _transformed() -> bool:
    """Whether a transform of torch.func is open; its backward always runs with gradients enabled."""
    return torch._C._are_functorch_transforms_active()


def forbid_double_backward() -> None:
    """Raise RuntimeError where autograd records the backward: its result would carry no graph, silently.

    Under torch.func.grad the record is kept in any case and mostly dropped: what reads it raises then.
    """
    if torch.is_grad_enabled() and not _transformed():
        raise RuntimeError(_DOUBLE)


def refuse_gradients(*grads: Tensor | None) -> None:
    """Raise RuntimeError if a derivative is asked of what a forward or backward made as its own gradient."""
    if any(g is not None for g in grads):
        raise RuntimeError(_DOUBLE)


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(operator, *args):
        return tuple(operator(*args))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.arguments = len(inputs)

    @staticmethod
    def backward(ctx, *grads):
        refuse_gradients(*grads)
        return (None,) * ctx.arguments


def last_derivative(operator: Callable[..., Sequence[Tensor]], *args: Any) -> Sequence[Tensor]:
    """The tensors that `operator(*args)` returns; differentiating them raises RuntimeError."""
    return _Last.apply(operator, *args) if torch.is_grad_enabled() else operator(*args)


def scaled(saved: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """New tensor `saved * factor` in `dtype`, rounded once; `factor` is wide, has a dim and broadcasts.

    `out=` keeps a float32 product from being allocated first, and leaves `saved` for another backward.
    """
    if torch.is_grad_enabled():  # autograd knows no `out=`
        return (saved * factor).to(dtype)
    return torch.mul(saved, factor, out=torch.empty_like(saved, dtype=dtype))


def needs_gradient(tensor: Tensor | None) -> bool:
    """Whether autograd (or a tracer that stands in for it) will ask for this tensor's gradient, at any level."""
    if not torch.is_grad_enabled() or tensor is None:
        return False
    while is_gradtrackingtensor(tensor) and not tensor.requires_grad:
        tensor = get_unwrapped(tensor)
    return tensor.requires_grad
