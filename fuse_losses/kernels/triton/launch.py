"""Launching kernels, and what depends on the device there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_PER_LANE = 16  # elements of a tile per thread: two 16-byte loads of a 16-bit dtype
_MOST_THREADS = 1024
_ALIGNMENT = 16  # bytes; Triton compiles for pointers that are multiples of it, and for those that are not
_MOST_KINDS = 1000


@functools.cache
def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def num_warps(block: int, device: torch.device, per_lane: int = _PER_LANE) -> int:
    """Warps for a tile of `block` columns; a warp has 64 lanes on some AMD devices, and a program 1024 threads."""
    warp = _warp_size(device)
    return max(1, min(block // (per_lane * warp), _MOST_THREADS // warp))


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes the device of a kernel's tensors the current one, if it is another."""
    known = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if known else torch.cuda.device(device)


class Launcher:
    """Launches a kernel, one program per row, and keeps what Triton compiled for arguments of a kind.

    Triton would look at every argument again, each time, to find what it has compiled: that is half of the host's time
    for a launch. A kind here is finer than Triton's for NVIDIA: the numbers themselves, not only how they divide.
    """

    def __init__(self, kernel: Any, constants: Callable[..., tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """The kernel's parameters are tensors, the first one [rows, vocab], then numbers, then constexprs.

        `constants(vocab, device, *how)` gives the constexprs by name, those of other kernels among them, and Triton's
        options.
        """
        self._kernel, self._constants = kernel, constants
        self._compiled: dict[Hashable, tuple[Any, list[Any]]] = {}

    def __call__(self, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...], how: tuple[Any, ...]) -> None:
        """Run the kernel on the rows of the first tensor."""
        first = tensors[0]
        assert first is not None
        (rows, vocab), device = first.shape, first.device
        # as numbers, pointers are not looked up in the driver: a tensor of another device is another kind
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        kinds = [None if t is None else (t.dtype, t.device) for t in tensors]
        kind = (vocab, numbers, how, *kinds, *[None if p is None else p % _ALIGNMENT for p in pointers])
        known = self._compiled.get(kind)
        with _current(device):
            if known is not None:
                compiled, constants = known
                compiled[(rows, 1, 1)](*pointers, *numbers, *constants)
                return
            named, options = self._constants(vocab, device, *how)
            constants = [named[name] for name in self._kernel.arg_names[len(tensors) + len(numbers) :]]
            compiled = self._kernel[(rows,)](*tensors, *numbers, *constants, **options)
        # the interpreter compiles nothing; for AMD, Triton's kinds depend on the size of a tensor's memory too
        if compiled is not None and torch.version.hip is None:
            if len(self._compiled) >= _MOST_KINDS:
                self._compiled.clear()
            self._compiled[kind] = compiled, constants
