"""Row weights: from values per row to the scalar they are summed into, if every step on the way is linear.

The scalar is then sum_i w_i * value_i with w known before the loss, and gradients can be made in the forward.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.head.algebra import Divergence, Link, LogProb, WeightedLoss
from fuse_losses.head.sizes import same, sizes

aten = torch.ops.aten

SHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.unsqueeze.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
)
SUMS = (aten.sum.default, aten.mean.default, aten.sum.dim_IntList, aten.mean.dim)


def weighted_loss(
    per_row: LogProb | Divergence, node: fx.Node, dependent: Collection[fx.Node], cuts: Collection[fx.Node]
) -> tuple[fx.Node, WeightedLoss] | None:
    """The node of the scalar that `node` (a value per row) is summed into, and its form; None if there is none.

    dependent: nodes made from the logits; cuts: nodes that get no gradient.
    """
    links: list[Link] = []
    while True:
        readers = [u for u in node.users if not _is_snapshot(u)]
        if node in cuts or len(readers) != 1 or readers[0].op != "call_function":
            return None
        reader = readers[0]
        link = _link(node, reader, dependent)
        if link is None:
            return None
        links.append(link)
        if link.kind in ("sum", "mean") and not sizes(reader):
            return reader, WeightedLoss(per_row, tuple(links))
        node = reader


def _is_snapshot(node: fx.Node) -> bool:
    return node.target is aten.clone.default and all(u.op == "output" for u in node.users)


def _link(node: fx.Node, reader: fx.Node, dependent: Collection[fx.Node]) -> Link | None:
    before, after = sizes(node), sizes(reader)
    first, *rest = reader.args
    if reader.target in SHAPES:
        kept = reader.meta["val"].dtype.is_floating_point and reader.meta["val"].device == node.meta["val"].device
        return Link("shape", None, before, after) if kept else None
    if reader.target in SUMS:
        dims = rest[0] if rest else None
        rank = len(before)
        over = tuple(d % rank for d in cast("list[int]", dims)) if dims else tuple(range(rank))
        kept = len(after) == rank and rank > 0
        kind = "mean" if reader.target in (aten.mean.default, aten.mean.dim) else "sum"
        return Link(kind, None, before, after, over, kept)
    if reader.target is aten.neg.default:
        return Link("times", -1.0, before, after)
    if not same(before, after):
        return None
    if reader.target is aten.mul.Tensor:
        other = rest[0] if first is node else first
        return _factor("times", other, before, after, dependent) if first is not other else None
    if reader.target is aten.div.Tensor and first is node:
        return _factor("over", rest[0], before, after, dependent)
    if reader.target is aten.masked_fill.Scalar and first is node and rest[1] == 0:
        return _factor("dropped", rest[0], before, after, dependent)
    if reader.target in (aten.where.ScalarOther, aten.where.self) and rest[0] is node and _is_zero(rest[1]):
        return _factor("kept", first, before, after, dependent)
    return None


def _is_zero(other: Any) -> bool:
    if isinstance(other, fx.Node) and other.target is aten.scalar_tensor.default:
        other = other.args[0]
    return isinstance(other, (int, float)) and other == 0


def _factor(kind: str, other: Any, before: Any, after: Any, dependent: Collection[fx.Node]) -> Link | None:
    if isinstance(other, fx.Node):
        if other in dependent or not isinstance(other.meta.get("val"), torch.Tensor):
            return None
    elif isinstance(other, bool) or not isinstance(other, (int, float)):
        return None
    return Link(kind, other, before, after)
