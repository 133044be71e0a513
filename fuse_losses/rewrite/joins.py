"""Which values of a region one operator can make for several exits: the same function, of other rows.

A Python loop over sequences is unrolled into an exit per sequence. The first of them runs over the rows of all, if all
that the others read is there by then, or can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.graph import calls
from fuse_losses.graph.products import Product, is_tensor, storage, value
from fuse_losses.head.algebra import Logits, LogProb, NllLoss, Selected
from fuse_losses.head.sizes import product as product_of
from fuse_losses.rewrite.slices import ExitSlice, refs


class Schedule:
    """What is there when: whether a later exit's inputs exist at an earlier one, moved up to it if need be."""

    def __init__(self, graph: fx.Graph, slices: Sequence[ExitSlice]) -> None:
        self.graph = graph
        self.exits = {part.exit for part in slices}  # what is written anew stays where it is
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.modes = [n for n in graph.nodes if calls.is_call(n, calls.MODES)]
        self.writes = [(n, storage(t)) for n in graph.nodes for t in calls.writes_to(n) if is_tensor(t)]

    def ready(self, first: ExitSlice, part: ExitSlice, leaves: Iterable[fx.Node]) -> bool:
        """True if `leaves`, which `part` reads, can be read at `first` already; moves there what is made in between."""
        start, end = self.order[first.exit], self.order[part.exit]
        moved: list[fx.Node] = []
        stack, seen = list(leaves), set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if is_tensor(node) and any(start < self.order[at] < end and to == storage(node) for at, to in self.writes):
                return False
            if self.order[node] >= start:
                same_modes = not any(start < self.order[mode] < self.order[node] for mode in self.modes)
                if node in self.exits or not _movable(node, same_modes):
                    return False
                moved.append(node)
                stack.extend(node.all_input_nodes)
        for node in sorted(moved, key=self.order.__getitem__):
            first.exit.prepend(node)
        if moved:
            self.order = {n: i for i, n in enumerate(self.graph.nodes)}
        return True


def _movable(node: fx.Node, same_modes: bool) -> bool:
    """Whether the node may stand elsewhere: an operation on indices anywhere, what prepares a teacher or a weight in
    its own modes.
    """
    if node.op not in ("call_function", "call_method") or calls.writes_to(node) or calls.is_call(node, calls.RANDOM):
        return False
    held = node.meta.get("example_value")
    values = held if isinstance(held, (tuple, list)) else [held]
    if all(isinstance(v, torch.Tensor) and not v.is_floating_point() for v in values):
        return True  # neither autocast nor gradients change it
    return same_modes and calls.is_call(node, calls.MOVABLE)


def leaves_of(part: ExitSlice, roots: Iterable[fx.Node]) -> list[fx.Node]:
    """The Dynamo nodes that ATen values outside of the region are made of."""
    found: list[fx.Node] = []
    stack, seen = list(roots), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in part.leaves:
            found.append(part.leaves[node])
        else:
            stack.extend(node.all_input_nodes)
    return found


@dataclass(frozen=True)
class Join:
    """Functionals of one distribution over several selections of its rows, and the exits that they belong to."""

    functionals: tuple[LogProb | Selected | NllLoss, ...]
    parts: tuple[ExitSlice, ...]


def joins(slices: Sequence[ExitSlice], graph: fx.Graph) -> list[Join]:
    """The picks of a target that differ in their rows alone; each has two functionals at least."""
    found: dict[Any, list[tuple[Any, ExitSlice]]] = {}
    schedule = Schedule(graph, slices)
    for part in slices:
        for f in part.functionals.values():
            if not isinstance(f, (LogProb, Selected, NllLoss)) or cast(Product, f.logits.product).given:
                continue
            map_of = (f.logits.map, f.logits.bias, f.logits.classes, f.logits.detached, id(f.logits.product))
            key = (*map_of, getattr(f, "ignore_index", None), getattr(f, "wraps", False), part.differentiable)
            group = found.setdefault(key, [])
            rows = {(g.logits, g.target) for g, _ in group}
            alike = (f.logits, f.target) in rows or all(f.logits.rows != g.logits.rows for g, _ in group)
            if not group or (alike and schedule.ready(group[0][1], part, leaves_of(part, refs(f)))):
                group.append((f, part))
    several = [g for g in found.values() if len({f.logits.rows for f, _ in g}) > 1]
    return [Join(tuple(f for f, _ in g), tuple(p for _, p in g)) for g in several]


def row_count(logits: Logits) -> Any:
    """How many rows of its product the logits are."""
    product = cast(Product, logits.product)
    whole = value(product.node).shape
    rows = (*whole[: product.vocab_dim], *whole[product.vocab_dim + 1 :])
    return product_of(logits.rows[-1].shape if logits.rows else rows)
