"""Which row kernels run for a tensor."""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def _kernels(name: str, device_type: str, *dtypes: torch.dtype) -> ModuleType:
    wanted = device_type == "cuda" and all(d in _TRITON_DTYPES for d in dtypes)
    triton = wanted and importlib.util.find_spec("triton") is not None
    # found here, so that importing the package imports no Triton
    return importlib.import_module(f"fuse_losses.kernels.{'triton' if triton else 'chunked'}.{name}")


def indexed_kernels(like: Tensor) -> ModuleType:
    """The module with `indexed_fwd`, `indexed_bwd` and `indexed_fwd_bwd` for tensors like this one."""
    return _kernels("indexed", like.device.type, like.dtype)


def paired_kernels(p: torch.dtype, q: torch.dtype, device: torch.device) -> ModuleType:
    """The module with `paired_fwd`, `paired_bwd` and `paired_fwd_bwd` for sides of these dtypes."""
    return _kernels("paired", device.type, p, q)
