"""Sizes of traced values, read without adding a guard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
SIZES = (aten.sym_size.int, aten.sym_numel.default)  # they read a shape, not the values


def sizes(node: object) -> tuple[Any, ...]:
    """Shape of the node's value (of its first output, if it has several)."""
    value: Any = cast(fx.Node, node).meta["val"]
    first: Any = cast("list[Any]", value)[0] if isinstance(value, (tuple, list)) else value
    return tuple(first.shape)


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Shape of the node's value, () for a number (a size of the graph)."""
    return sizes(node) if isinstance(node.meta.get("val"), torch.Tensor) else ()


def same(a: Any, b: Any) -> bool:
    """True if two sizes (or tuples of sizes) are known to be equal."""
    if isinstance(a, tuple):
        left, right = cast("tuple[Any, ...]", a), cast("tuple[Any, ...]", b)
        return len(left) == len(right) and all(same(x, y) for x, y in zip(left, right, strict=True))
    return statically_known_true(a == b)


def hint(size: Any) -> int | None:
    """The size, or the size that a symbol had when it was captured."""
    if isinstance(size, int):
        return size
    found = getattr(size.node, "hint", None)
    return found if isinstance(found, int) else None


def product(items: Iterable[Any]) -> Any:
    """The product of sizes."""
    result: Any = 1
    for item in items:
        result = result * item
    return result


def dim_of(dim: Any, node: object) -> int:
    """A dim argument as a non-negative index into the node's shape."""
    rank = len(sizes(node))
    return cast(int, dim) % rank if rank else 0


def arange_along(index: Any, dim: int, rows: tuple[Any, ...]) -> bool:
    """True if the index is arange(rows[dim]), with unit dims around it that broadcast it along `dim`."""
    if not isinstance(index, fx.Node):
        return False
    shape = sizes(index)
    at = dim - (len(rows) - len(shape))
    if at < 0 or not same(shape[at], rows[dim]) or not all(i == at or same(s, 1) for i, s in enumerate(shape)):
        return False
    while index.target in (aten.unsqueeze.default, aten.view.default, aten.alias.default, aten.slice.Tensor):
        before = index.args[0]
        if index.target is aten.slice.Tensor and not same(sizes(before), sizes(index)):
            return False
        index = before
    if index.target is aten.arange.default:
        return True
    if index.target not in (aten.arange.start, aten.arange.start_step):
        return False
    return bool(index.args[0] == 0 and (len(index.args) < 3 or index.args[2] == 1))
