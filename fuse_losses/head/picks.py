"""Indices of integers: which dims they pick from, and what stands in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.head.sizes import arange_along, dim_of, same, sizes

aten = torch.ops.aten
INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Pick:
    """`indices` pick together from as many neighbouring dims, from `first` on; `rank` dims stand in their place."""

    first: int
    indices: tuple[fx.Node, ...]
    rank: int

    @property
    def dims(self) -> range:
        return range(self.first, self.first + len(self.indices))

    def replaced(self, labels: str, label: str) -> str:
        """Labels (one per dim) with `label` for what was picked."""
        return labels[: self.first] + label * self.rank + labels[self.first + len(self.indices) :]

    @property
    def of_one_mask(self) -> bool:
        """True if the last index and another one are columns of one mask's positions: single values, many in a row."""
        sources = [i.args[0] if i.target is aten.select.int else i for i in self.indices]
        return sources[-1] in sources[:-1]

    def spanned(self, dims: int, node: fx.Node) -> bool:
        """True if the first `dims` of the indices broadcast to all that is picked, without the others."""
        here = sizes(node)[self.first : self.first + self.rank]
        own = [sizes(i) for i in self.indices[:dims]]
        return all(any(len(o) >= k and same(o[-k], here[-k]) for o in own) for k in range(1, self.rank + 1))

    def in_order(self, dims: int, node: fx.Node) -> bool:
        """True if the first `dims` of the indices go through all of these dims in their own order."""
        old, new = sizes(node.args[0]), sizes(node)
        rows = old[self.first : self.first + dims]
        here = new[self.first : self.first + self.rank]
        return same(rows, here) and all(arange_along(index, d, rows) for d, index in enumerate(self.indices[:dims]))

    def in_every_row(self, node: fx.Node) -> bool:
        """True if an index_put writes, in every row, to one class, a number or a value of the row."""
        old, values = sizes(node.args[0]), sizes(node.args[2])
        rows, given = old[:-1], self.indices[:-1]
        known = len(self.indices) == len(old) and same(sizes(self.indices[-1]), rows)
        one = all(same(s, 1) for s in values)
        return known and (one or same(values, rows)) and all(arange_along(i, d, rows) for d, i in enumerate(given))


def pick_of(node: fx.Node) -> Pick | None:
    """What an `index` or `index_select` picks; None if it picks by a mask, or from dims that are apart."""
    if node.target is aten.index_select.default:
        index = cast(fx.Node, node.args[2])
        return Pick(dim_of(node.args[1], node.args[0]), (index,), 1) if len(sizes(index)) == 1 else None
    indices = cast("list[Any]", node.args[1])
    used = [d for d, i in enumerate(indices) if i is not None]
    picked = tuple(indices[d] for d in used)
    if not used or used != list(range(used[0], used[-1] + 1)):
        return None
    if any(not isinstance(i, fx.Node) or i.meta["val"].dtype not in INTEGERS for i in picked):
        return None
    return Pick(used[0], picked, max(len(sizes(i)) for i in picked))
