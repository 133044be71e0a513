"""Functions of `losses`, written once for both executors, as Triton functions."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from fuse_losses.kernels.triton import scalar as on_tiles
from fuse_losses.losses import scalar as on_tensors


@functools.cache
def jitted(function: Callable[..., Any]) -> Any:
    """The same code over other globals: the scalar language on tiles, and what it calls treated likewise."""
    assert isinstance(function, FunctionType)
    names = {name for name in function.__code__.co_names if name in function.__globals__}
    namespace = {name: _in_triton(function.__globals__[name]) for name in names}
    # the module's name keeps the names of compiled functions apart; the interpreter looks for `tl`
    namespace |= {"__name__": function.__module__, "tl": tl}
    return triton.jit(FunctionType(function.__code__, namespace, function.__name__, function.__defaults__))


def _in_triton(value: Any) -> Any:
    if value is on_tensors:
        return on_tiles
    return jitted(value) if isinstance(value, FunctionType) else value
