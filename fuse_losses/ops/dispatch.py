"""Which row kernels run for a tensor."""

import functools
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton_runs(device: torch.device, *dtypes: torch.dtype) -> bool:
    return device.type == "cuda" and all(d in _TRITON_DTYPES for d in dtypes) and _triton_is_installed()


def indexed_kernels(like: Tensor) -> ModuleType:
    """The module with `indexed_fwd`, `indexed_bwd` and `indexed_fwd_bwd` for tensors like this one."""
    if _triton_runs(like.device, like.dtype):
        from fuse_losses.kernels.triton import (
            indexed,
        )  # here, so that importing the package imports no Triton

        return indexed
    from fuse_losses.kernels.chunked import indexed

    return indexed


def paired_kernels(p: torch.dtype, q: torch.dtype, device: torch.device) -> ModuleType:
    """The module with `paired_fwd`, `paired_bwd` and `paired_fwd_bwd` for sides of these dtypes."""
    if _triton_runs(device, p, q):
        from fuse_losses.kernels.triton import paired

        return paired
    from fuse_losses.kernels.chunked import paired

    return paired
