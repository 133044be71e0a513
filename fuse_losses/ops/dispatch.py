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


def indexed_kernels(like: Tensor) -> ModuleType:
    """The module with `indexed_fwd`, `indexed_bwd` and `indexed_fwd_bwd` for tensors like this one."""
    if like.is_cuda and like.dtype in _TRITON_DTYPES and _triton_is_installed():
        from fuse_losses.kernels.triton import (
            indexed,
        )  # here, so that importing the package imports no Triton

        return indexed
    from fuse_losses.kernels.chunked import indexed

    return indexed
