"""The pull-back of a region as a graph of plain ATen operators, for a chunk of any number of rows.

It is traced before it runs, on tensors without data and in a thread of its own: neither the transforms and dispatch
modes that are open where an operator runs, nor its autocast, reach there.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

ROWS = 1_000_003  # what the tracer takes for the number of rows where it must compare sizes


@dataclass(frozen=True)
class Layout:
    """What a graph is traced for: sizes and strides of a tensor, its first size and stride left out if `by_row`."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    by_row: bool

    @staticmethod
    def of(tensor: Tensor, by_row: bool) -> Layout:
        """The layout of a tensor; one that is cut into chunks is taken for contiguous."""
        sizes = tuple(tensor.shape[1:] if by_row else tensor.shape)
        strides = () if by_row else tensor.stride()
        return Layout(sizes, strides, tensor.dtype, tensor.device, by_row)

    def empty(self, rows: Any) -> Tensor:
        if self.by_row:
            return torch.empty((rows, *self.sizes), dtype=self.dtype, device=self.device)
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)


def trace_pull_back(
    region: fx.GraphModule,
    needs: Sequence[bool],
    used: Sequence[bool],
    inputs: Sequence[Layout],
    grads: Sequence[Layout],
    rows: int | None = None,
) -> fx.GraphModule | None:
    """f(*inputs, *grads) -> gradients of the inputs that need one, from those of the outputs that are used.

    For `rows` rows, or for any number of them; None if one graph cannot serve all numbers.
    """

    from torch._dynamo.source import ConstantSource  # here, so that importing the package imports no Triton

    def pull_back(*args: Tensor) -> Sequence[Tensor]:
        given, upstream = args[: len(inputs)], args[len(inputs) :]

        def outputs(*wanted: Tensor) -> tuple[Tensor, ...]:
            left = iter(wanted)
            made = region.forward(*[next(left) if need else x for x, need in zip(given, needs, strict=True)])
            return tuple(o for o, use in zip(made, used, strict=True) if use)

        _, vjp, *_ = torch.func.vjp(outputs, *[x for x, need in zip(given, needs, strict=True) if need])
        return vjp(upstream)

    def trace() -> fx.GraphModule | None:
        shapes = ShapeEnv()
        source = ConstantSource("rows")
        symbol = shapes.create_symbol(ROWS, source, dynamic_dim=DimDynamic.DYNAMIC)
        count = shapes.create_symintnode(symbol, hint=ROWS, source=source) if rows is None else rows
        # the modes of the trace belong to this thread, and so must the backward of CUDA tensors
        try:
            with torch.autograd.set_multithreading_enabled(False), FakeTensorMode(shape_env=shapes):
                traced = make_fx(pull_back)(*[layout.empty(count) for layout in (*inputs, *grads)])
        except RuntimeError:
            if rows is None:
                return None  # an operator whose fake kernel takes no symbolic sizes, as lerp's with a tensor of weights
            raise
        return None if shapes.guards else traced

    with ThreadPoolExecutor(1) as thread:
        graph = thread.submit(trace).result()
    if graph is not None:
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return graph
