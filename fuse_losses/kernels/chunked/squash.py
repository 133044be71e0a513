"""Squash functions in plain PyTorch. To add one, write its pair and one line of `_SQUASHES`."""

import torch
from torch import Tensor

from fuse_losses.kernels.squash import Squash


def _identity_(z: Tensor, inner: float, outer: float) -> Tensor:
    return z if inner * outer == 1.0 else z.mul_(inner * outer)


def _identity_slope(z: Tensor, inner: float, outer: float) -> float:
    return inner * outer


def _tanh_(z: Tensor, inner: float, outer: float) -> Tensor:
    return z.mul_(inner).tanh_().mul_(outer)


def _tanh_slope(z: Tensor, inner: float, outer: float) -> Tensor:
    return torch.square(z).mul_(-inner / outer).add_(inner * outer)  # inner * outer * (1 - tanh^2), tanh = z / outer


_SQUASHES = {"identity": (_identity_, _identity_slope), "tanh": (_tanh_, _tanh_slope)}
NAMES = tuple(_SQUASHES)


def squash_into(u: Tensor, squash: Squash, out: Tensor) -> Tensor:
    """Write `z` of the raw products `u` to `out`, in `out`'s dtype; `out` may be `u`."""
    return _SQUASHES[squash.name][0](out.copy_(u), squash.inner, squash.outer)


def slope(z: Tensor, squash: Squash) -> Tensor | float:
    """`dz/du` written in terms of `z`: a number where it is constant, else a new tensor shaped like `z`."""
    return _SQUASHES[squash.name][1](z, squash.inner, squash.outer)
