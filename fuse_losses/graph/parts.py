"""What the retrace takes operations apart to, so that the rules for rows need to know fewer of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions

from fuse_losses.head.sizes import hint, same

aten = torch.ops.aten


def _split(x: torch.Tensor, size: Any, dim: int = 0) -> Any:
    whole = x.shape[dim]
    known = hint(whole), hint(size)
    if known[0] is None or not known[1]:
        return NotImplemented
    parts = max(1, -(-known[0] // known[1]))
    if not isinstance(whole, int) and not same((whole + size - 1) // size, parts):
        return NotImplemented  # of symbolic sizes, the number of parts is a condition of the graph, or is not known
    ends = [*(i * size for i in range(1, parts)), whole]
    return [aten.slice.Tensor(x, dim, i * size, end) for i, end in enumerate(ends)]


def _split_with_sizes(x: torch.Tensor, split_sizes: Sequence[Any], dim: int = 0) -> Any:
    ends = list(itertools.accumulate(split_sizes))
    return [aten.slice.Tensor(x, dim, e - n, e) for n, e in zip(split_sizes, ends, strict=True)]


def _unbind(x: torch.Tensor, dim: int = 0) -> Any:
    whole = x.shape[dim]
    if not isinstance(whole, int):
        return NotImplemented
    return [aten.select.int(x, dim, i) for i in range(whole)]


def _number(x: torch.Tensor, size: Sequence[Any], fill_value: Any = 0, **how: Any) -> Any:
    """A number that takes its dtype and device from the logits, and nothing else."""
    if size:
        return NotImplemented
    return aten.full.default([], fill_value, dtype=how.get("dtype") or x.dtype, device=how.get("device") or x.device)


def _pad(x: torch.Tensor, pad: Sequence[Any], value: Any = 0) -> Any:
    for i in range(0, len(pad), 2):
        dim = x.dim() - 1 - i // 2
        if any(isinstance(n, int) and n < 0 for n in pad[i : i + 2]):
            x = aten.slice.Tensor(x, dim, max(0, -pad[i]), pad[i + 1] if pad[i + 1] < 0 else 2**63 - 1)
        added: list[Any] = []
        for n in pad[i : i + 2]:
            shape = [n if d == dim else s for d, s in enumerate(x.shape)]
            some = not isinstance(n, int) or n > 0
            added.append([aten.full.default(shape, value, dtype=x.dtype, device=x.device)] if some else [])
        if any(added):
            x = aten.cat.default([*added[0], x, *added[1]], dim)
    return x


def _index_put(x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False) -> Any:
    """`x[mask] = number`, and `x[..., ids] = values`."""
    used = [d for d, index in enumerate(indices) if index is not None]
    if len(used) != 1 or indices[used[0]].dtype == torch.uint8:
        return NotImplemented
    dim, index = used[0], indices[used[0]]
    if index.dtype != torch.bool:
        write = aten.scatter_add.default if accumulate else aten.scatter.src
        return _scatter(write, x, dim, _from_start(index, x.shape[dim]), values)
    if dim or accumulate or not all(same(s, 1) for s in values.shape):
        return NotImplemented
    for _ in range(x.dim() - index.dim()):
        index = aten.unsqueeze.default(index, -1)
    return aten.where.self(index, aten.reshape.default(values, []), x)


def _from_start(index: torch.Tensor, size: Any) -> torch.Tensor:
    """Negative indices count from the end."""
    return aten.where.self(aten.lt.Scalar(index, 0), aten.add.Tensor(index, size), index)


def _scatter(operator: Callable[..., Any], x: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor) -> Any:
    """Writes to, or adds at, the places along `dim` that a list says."""
    if index.dim() != 1:
        return NotImplemented
    dim %= x.dim()
    shape = [*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]]
    index = index.to(torch.int64)
    index = aten.expand.default(aten.view.default(index, [-1 if d == dim else 1 for d in range(x.dim())]), shape)
    return operator(x, dim, index, aten.expand.default(values, shape))


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        value = aten.full.default([], value, dtype=x.dtype, device=x.device)
    return _scatter(aten.scatter.src, x, dim, _from_start(index, x.shape[dim]), value)


def _index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    return _scatter(aten.scatter.src, x, dim, index, source)


def _index_add(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1) -> Any:
    return _scatter(aten.scatter_add.default, x, dim, index, source if alpha == 1 else aten.mul.Tensor(source, alpha))


def _select_scatter(x: torch.Tensor, src: torch.Tensor, dim: int, index: Any) -> Any:
    """`x[:, index] = src`."""
    end = 2**63 - 1 if same(index, -1) else index + 1
    return aten.slice_scatter.default(x, aten.unsqueeze.default(src, dim), dim, index, end)


def _copy(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
    """What a part has become that was written to: `src`, of which autograd knows the derivative."""
    if src.device != x.device:
        return NotImplemented
    src = src if src.dtype == x.dtype else aten._to_copy.default(src, dtype=x.dtype)
    return aten.clone.default(src) if same(src.shape, x.shape) else aten.expand.default(src, x.shape)


# What splits a tensor is retraced as slices of it, so that the rows of each part are known; what pads it joins it with
# constants (and is spared a fake kernel that takes no symbolic sizes); a number is no dependent; what writes to some
# classes or rows says where in one way.
PARTS: dict[Any, Callable[..., Any]] = {
    aten.constant_pad_nd.default: _pad,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.new_full.default: _number,
    aten.new_zeros.default: _number,
    aten.copy.default: _copy,
    aten.index_put.default: _index_put,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten.index_copy.default: _index_copy,
    aten.index_add.default: _index_add,
    aten.select_scatter.default: _select_scatter,
}
# What is made of operations whose rows are known is retraced as those, in PyTorch's own words.
PARTS |= get_decompositions(
    [
        *(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss, aten.multi_margin_loss),
        *(aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, aten.log_sigmoid_forward),
        *(aten.glu, aten.hardswish, aten.norm, aten.aminmax, aten.count_nonzero, aten.nansum),
    ]
)
