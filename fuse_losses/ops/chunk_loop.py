"""The loop over chunks of rows: at most one [chunk, V] buffer of logits is alive, whatever N is."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fuse_losses.ops.gemm import BiasGradient, WeightGradient, mm_into


class Projection(NamedTuple):
    """`u = x W^T + b`: x [N, H], weight [V, H], bias [V] or None, of one dtype and any strides.

    `logits` [N, V], where given, is `u` already computed: it is read, never written.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    logits: Tensor | None


class Needs(NamedTuple):
    """Which gradients are computed, and how the weight's chunks are added."""

    x: bool
    weight: bool
    bias: bool
    accumulate: str


class Gradients(NamedTuple):
    """Gradients of a projection; an empty [0] tensor stands for one that is not needed."""

    x: Tensor
    weight: Tensor
    bias: Tensor


SMALL = 16 * 2**20  # bytes of logits that need no second chunk


def rows_per_chunk(rows: int, chunk_rows: int, row_bytes: int, sides: int = 1) -> int:
    """chunk_rows, or half of the rows if that is fewer: the logits are never alive whole, unless they are small.

    sides: chunks of so many distributions, `row_bytes` together, are alive at a time, and share that half.
    """
    return chunk_rows if rows * row_bytes <= SMALL else min(chunk_rows, -(-rows // (2 * sides)))


def parts(rows: int, chunk_rows: int) -> Iterator[slice]:
    """Slices of at most `chunk_rows` rows that cover [0, rows)."""
    for start in range(0, rows, chunk_rows):
        yield slice(start, min(start + chunk_rows, rows))


def cut(tensor: Tensor, part: slice, dim: int = 0) -> Tensor:
    """Some rows of a tensor; where they are all, the tensor: a view of it would only cost the host time."""
    count = part.stop - part.start
    return tensor if count == tensor.shape[dim] else tensor.narrow(dim, part.start, count)


def cut_those(part: slice, *values: Tensor | None) -> list[Tensor | None]:
    """Some rows of those tensors that are there."""
    return [None if value is None else cut(value, part) for value in values]


def chunk_buffer(x: Tensor, vocab: int, chunk_rows: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised [min(N, chunk_rows), V or more], rows of x; the columns behind V are padding."""
    # rows that start at a multiple of 128 bytes keep loads vectorised for an odd vocabulary
    step = 128 // dtype.itemsize if x.is_cuda else 1
    return x.new_empty(min(x.shape[0], chunk_rows), -(-vocab // step) * step, dtype=dtype)


def chunk_logits(projection: Projection, part: slice, buffer: Tensor) -> Tensor:
    """Raw products of some rows [C, V]: the given ones, else computed into `buffer`."""
    if projection.logits is not None:
        return projection.logits[part]
    x, weight, bias = projection.x[part], projection.weight, projection.bias
    if bias is None:
        return torch.mm(x, weight.t(), out=buffer)
    return torch.addmm(bias, x, weight.t(), out=buffer)


def forward_loop(projection: Projection, chunk_rows: int, visit: Callable[[slice, Tensor], None]) -> None:
    """Call `visit(part, logits)` for every chunk; `logits` [C, V] is only to be read."""
    rows = projection.x.shape[0]
    if projection.logits is not None:
        for part in parts(rows, chunk_rows):
            visit(part, projection.logits[part])
        return
    vocab = projection.weight.shape[0]
    buffer = chunk_buffer(projection.x, vocab, chunk_rows, projection.x.dtype)[:, :vocab]
    for part in parts(rows, chunk_rows):
        visit(part, chunk_logits(projection, part, buffer[: part.stop - part.start]))


def gradient_loop(
    projection: Projection,
    chunk_rows: int,
    needs: Needs,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    visit: Callable[[slice, Tensor, Tensor], None],
) -> Gradients:
    """Gradients in `dtype`, the bias's in `bias_dtype`.

    `visit(part, logits, du)` writes the chunk's logit gradient [C, V] to `du`, which has x's dtype and may be
    `logits` itself.
    """
    x, weight, bias, _ = projection
    rows = x.shape[0]
    none = x.new_empty(0, dtype=dtype)
    grad_x = torch.empty_like(x, dtype=dtype) if needs.x else none
    chunks = -(-rows // chunk_rows)
    weight_sum = WeightGradient(weight, dtype, chunks, needs.accumulate) if needs.weight else None
    bias_sum = BiasGradient(bias, bias_dtype) if needs.bias and bias is not None else None
    vocab = weight.shape[0]
    buffer = chunk_buffer(x, vocab, chunk_rows, x.dtype)[:, :vocab]
    for part in parts(rows, chunk_rows):
        du = buffer[: part.stop - part.start]
        visit(part, chunk_logits(projection, part, du), du)
        if needs.x:
            mm_into(grad_x[part], du, weight)
        if weight_sum is not None:
            weight_sum.add(du, x[part])
        if bias_sum is not None:
            bias_sum.add(du)
    return Gradients(
        grad_x,
        none.clone() if weight_sum is None else weight_sum.result(),
        none.to(bias_dtype, copy=True) if bias_sum is None else bias_sum.result(),
    )
