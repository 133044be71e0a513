"""What the autograd functions share."""

import torch
from torch import Tensor


def forbid_double_backward() -> None:
    """Raise RuntimeError where autograd records the backward: its result would carry no graph, silently."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fuse_losses: double backward (create_graph=True) is not supported by a fused loss. "
            "Compute this loss without fuse_losses where you need second derivatives."
        )


def scaled(saved: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """New tensor `saved * factor` in `dtype`, rounded once; `factor` is wide, has a dim and broadcasts.

    `out=` keeps a float32 product from being allocated first, and leaves `saved` for another backward.
    """
    return torch.mul(saved, factor, out=torch.empty_like(saved, dtype=dtype))


def needs_gradient(tensor: Tensor | None) -> bool:
    """Whether autograd (or a tracer that stands in for it) will ask for this tensor's gradient."""
    return torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
