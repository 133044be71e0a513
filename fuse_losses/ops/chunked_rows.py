"""The generic operator: any row-wise function of projected rows, a chunk at a time, recomputed in the backward.

    chunked_rows(key, rows, whole, chunk_rows, accumulate, compiled) -> one [N, ...] tensor per output of the region

`key` names the function in a table of this process: fx graphs over [C, ...] slices of `rows` and over `whole`, put
there by the backend, which runs before any compile cache is asked, and named by their content, so that a cached
artifact finds the very function it was compiled for. Autograd is as eager's: gradients for every float tensor that
needs one, those of `whole` added up over chunks in float32 (or their own dtype, accumulate="native").
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from fuse_losses.ops.autograd import forbid_double_backward, last_derivative, needs_gradient
from fuse_losses.ops.chunk_loop import parts
from fuse_losses.ops.gemm import ACCUMULATE, statistics_dtype
from fuse_losses.ops.inner import inner_operator, no_autocast
from fuse_losses.ops.pull_back import Layout, trace_pull_back

SCHEMA = (
    "chunked_rows(str key, Tensor[] rows, Tensor[] whole, SymInt chunk_rows, str accumulate, bool compiled) -> Tensor[]"
)

SHARE, FEWEST = 16, 64  # a chunk is at most this share of the rows, unless that leaves it too few for a product

_regions: dict[str, fx.GraphModule] = {}


def register_region(region: fx.GraphModule) -> str:
    """Keep the region's function under the hash of its code and return that key."""
    key = hashlib.sha256(region.code.encode()).hexdigest()[:24]
    _regions.setdefault(key, region)
    return key


def _region(key: str) -> fx.GraphModule:
    if key not in _regions:
        raise RuntimeError(f"fuse_losses: no region {key} in this process; was a compiled function loaded without it?")
    return _regions[key]


@functools.cache
def _forward(key: str, compiled: bool) -> Callable[..., Sequence[Tensor]]:
    return _callable(_region(key), compiled)


def _callable(graph: fx.GraphModule, compiled: bool) -> Callable[..., Sequence[Tensor]]:
    # not the module, whose call would run the hooks of a user's FlopCounterMode
    return torch.compile(graph.forward, dynamic=True) if compiled else graph.forward


@functools.cache
def _backward(
    key: str,
    needs: tuple[bool, ...],
    used: tuple[bool, ...],
    compiled: bool,
    inputs: tuple[Layout, ...],
    grads: tuple[Layout, ...],
    count: int | None = None,
) -> Callable[..., Sequence[Tensor]] | None:
    """trace_pull_back's function for chunks of any number of rows, or of `count`."""
    graph = trace_pull_back(_region(key), needs, used, inputs, grads, count)
    return None if graph is None else _callable(graph, compiled)


def _rows_per_chunk(count: int, chunk_rows: int) -> int:
    """chunk_rows, or fewer: a region's operations and their backward keep about ten values of a chunk alive."""
    return min(chunk_rows, max(FEWEST, -(-count // SHARE)))


@inner_operator()
def rows_fwd(key: str, rows: list[Tensor], whole: list[Tensor], chunk_rows: int, compiled: bool) -> list[Tensor]:
    """The region's outputs [N, ...], chunk by chunk."""
    count = rows[0].shape[0]
    run = _forward(key, compiled)
    outputs: list[Tensor] = []
    with no_autocast(rows[0]):
        for part in parts(
            max(count, 1), _rows_per_chunk(count, chunk_rows)
        ):  # no rows: one empty chunk tells the shapes
            made = run(*[r[part] for r in rows], *whole)
            if not outputs:
                outputs = [o.new_empty(count, *o.shape[1:]) for o in made]
            for whole_output, o in zip(outputs, made, strict=True):
                whole_output[part] = o
    return outputs


@rows_fwd.register_fake
def _(key, rows, whole, chunk_rows, compiled):
    return [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in _region(key)(*rows, *whole)]


@inner_operator()
def rows_bwd(
    key: str,
    grads: list[Tensor | None],
    rows: list[Tensor],
    whole: list[Tensor],
    needs: list[bool],
    chunk_rows: int,
    accumulate: str,
    compiled: bool,
) -> list[Tensor]:
    """Gradients of `rows` then `whole`, [0] for those that need none."""
    count = rows[0].shape[0]
    used = tuple(g is not None for g in grads)
    given = [g for g in grads if g is not None]
    inputs = (*[Layout.of(r, by_row=True) for r in rows], *[Layout.of(w, by_row=False) for w in whole])
    upstream = tuple(Layout.of(g, by_row=True) for g in given)
    how = (key, tuple(needs), used, compiled, inputs, upstream)
    results = [
        _start(x, need, i < len(rows), accumulate)
        for i, (x, need) in enumerate(zip([*rows, *whole], needs, strict=True))
    ]
    with no_autocast(rows[0]):
        for part in parts(count, _rows_per_chunk(count, chunk_rows)):
            chunk = [r[part].contiguous() for r in rows]
            run = _backward(*how) or _backward(*how, chunk[0].shape[0])
            assert run is not None
            made = iter(run(*chunk, *whole, *[g[part].contiguous() for g in given]))
            for i, need in enumerate(needs):
                if need and i < len(rows):
                    results[i][part] = next(made)
                elif need:
                    results[i] += next(made)
    return [r.to(x.dtype) for r, x in zip(results, [*rows, *whole], strict=True)]


def _start(x: Tensor, need: bool, by_row: bool, accumulate: str) -> Tensor:
    if not need:
        return x.new_empty(0)
    if by_row:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.zeros(x.shape, dtype=x.dtype if accumulate == "native" else statistics_dtype(x.dtype), device=x.device)


@rows_bwd.register_fake
def _(key, grads, rows, whole, needs, chunk_rows, accumulate, compiled):
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else x.new_empty(0)
        for x, need in zip([*rows, *whole], needs, strict=True)
    ]


def _rows_bwd(key, used, needs, count, how, *tensors):
    """rows_bwd of tensors in one row: the inputs, then the gradients of the outputs that are used."""
    inputs, given = tensors[: len(needs)], iter(tensors[len(needs) :])
    grads = [next(given) if use else None for use in used]
    return rows_bwd(key, grads, list(inputs[:count]), list(inputs[count:]), needs, *how)


class _ChunkedRows(torch.autograd.Function):
    @staticmethod
    def forward(key, count, chunk_rows, accumulate, compiled, *tensors):
        return tuple(rows_fwd(key, list(tensors[:count]), list(tensors[count:]), chunk_rows, compiled))

    @staticmethod
    def setup_context(ctx, inputs, output):
        key, count, chunk_rows, accumulate, compiled, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.key, ctx.count, ctx.how = key, count, (chunk_rows, accumulate, compiled)
        ctx.mark_non_differentiable(*[o for o in output if not o.is_floating_point()])

    @staticmethod
    def backward(ctx, *grads):
        forbid_double_backward()
        tensors = ctx.saved_tensors
        floats = [g for g in grads if g is not None]
        if not floats:
            return (None,) * (5 + len(tensors))
        needs, used = list(ctx.needs_input_grad[5:]), [g is not None for g in grads]
        made = last_derivative(_rows_bwd, ctx.key, used, needs, ctx.count, ctx.how, *tensors, *floats)
        return *[None] * 5, *[g if need else None for g, need in zip(made, needs, strict=True)]


def chunked_rows(key, rows, whole, chunk_rows, accumulate, compiled):
    """The outputs of region `key` over all rows; the arguments are described at the top of this file."""
    if accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate must be one of {ACCUMULATE}, got {accumulate!r}")
    torch._check_value(chunk_rows >= 1, lambda: f"chunk_rows must be at least 1, got {chunk_rows}")
    if any(needs_gradient(t) for t in (*rows, *whole)):
        return list(_ChunkedRows.apply(key, len(rows), chunk_rows, accumulate, compiled, *rows, *whole))
    return rows_fwd(key, list(rows), list(whole), chunk_rows, compiled)
