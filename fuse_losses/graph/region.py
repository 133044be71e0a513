"""Regions: Dynamo nodes in which the vocabulary is alive, the products they come from, and where values leave."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fuse_losses.graph import calls
from fuse_losses.graph.products import Product, is_tensor, storage, value
from fuse_losses.graph.rows import Lost, RowAnalysis, Rowed
from fuse_losses.graph.tail import Tail
from fuse_losses.graph.transforms import is_unwrapped
from fuse_losses.report.decline import Decline, Declined

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Region:
    """Products whose logits meet, the nodes in which the vocabulary is alive, and what becomes of it.

    nodes: the products among them; exits: first values without the vocabulary, in order; returned: nodes of the region
    that the graph returns; written: some node of the region is written to in place; problem: why it must be left alone.
    """

    products: tuple[Product, ...]
    nodes: tuple[fx.Node, ...]
    exits: tuple[fx.Node, ...]
    returned: tuple[fx.Node, ...]
    written: bool
    problem: Decline | None = None


def gradient_cuts(tail: Tail) -> set[fx.Node]:
    """ATen values of nodes that get no gradient although what they read would give them one (no_grad, detach)."""
    cuts: set[fx.Node] = set()
    for node in (*(p.node for p in tail.products), *tail.nodes):
        if not is_tensor(node) or value(node).requires_grad or not value(node).is_floating_point():
            continue
        aten = tail.aten(node)
        if aten is not None and any(is_tensor(a) and value(a).requires_grad for a in node.all_input_nodes):
            cuts.add(aten)
    return cuts


def find_regions(tail: Tail, analysis: RowAnalysis) -> list[Region]:
    """One region for each set of products whose logits meet in some operation."""
    origin: dict[fx.Node, set[int]] = {p.node: {i} for i, p in enumerate(tail.products)}
    group = list(range(len(tail.products)))
    reached: dict[fx.Node, set[int]] = {}  # nodes that read the vocabulary without carrying it on
    for node in tail.nodes:
        found = set().union(*(origin.get(a, set()) for a in node.all_input_nodes))
        if not found:
            continue
        if _alive(tail, analysis, node) or _only_asks(tail, analysis, node):
            origin[node] = found
        else:
            reached[node] = found
        joined = {group[i] for i in found}
        group = [min(joined) if g in joined else g for g in group]
    return [_region(tail, analysis, origin, reached, group, g) for g in sorted(set(group))]


def _alive(tail: Tail, analysis: RowAnalysis, node: fx.Node) -> bool:
    found = analysis.values.get(tail.results[node]) if node in tail.results else None
    return isinstance(found, Lost) or (isinstance(found, Rowed) and found.wide) or _holds_alive(tail, analysis, node)


def _only_asks(tail: Tail, analysis: RowAnalysis, node: fx.Node) -> bool:
    """True if the node asks the logits for their dtype or shape alone (`teacher.type_as(student)`)."""
    return node in tail.results and not analysis.depends(tail.results[node])


def _holds_alive(tail: Tail, analysis: RowAnalysis, node: fx.Node) -> bool:
    """A tuple (of a split, a sort, a max) some part of which carries the vocabulary."""
    if node in tail.results or node in tail.opaque or is_tensor(node):
        return False
    held = node.meta.get("example_value")
    return isinstance(held, (tuple, list)) and any(isinstance(t, torch.Tensor) for t in held)


def _region(
    tail: Tail,
    analysis: RowAnalysis,
    origin: dict[fx.Node, set[int]],
    reached: dict[fx.Node, set[int]],
    group: Sequence[int],
    which: int,
) -> Region:
    def mine(found: set[int]) -> bool:
        return any(group[i] == which for i in found)

    products = tuple(p for i, p in enumerate(tail.products) if group[i] == which)
    nodes = [p.node for p in products] + [n for n in tail.nodes if n in origin and mine(origin[n])]
    members = set(nodes)
    exits: list[fx.Node] = []
    problem: Decline | None = None
    for node in (n for n in tail.nodes if n in reached and mine(reached[n])):
        if is_unwrapped(node):  # returned by the function that a transform was given
            continue
        if node in tail.opaque:
            why = f"{node.target} reads the logits: {tail.opaque[node]}"
            problem = problem or Decline("opaque", why, calls.user_line(node))
        elif node in tail.results:
            exits.append(node)
    returned = tuple(n for n in nodes if any(u.op == "output" or is_unwrapped(u) for u in n.users))
    written = any(w in members for n in nodes for w in calls.writes_to(n))
    return Region(products, tuple(nodes), tuple(exits), returned, written, problem)


def check_product(product: Product) -> None:
    """Refuse what the operators cannot take: tensor subclasses (DTensor), dtypes that are not floats."""
    where = calls.user_line(product.node)
    for node in (*product.operands, product.node):
        if is_traceable_wrapper_subclass(value(node)) or type(value(node)).__name__ == "DTensor":
            raise Declined("sharded", f"{node.name} is a {type(value(node)).__name__}", where)
    if value(product.node).dtype not in FLOATS:
        raise Declined("unsupported_dtype", f"the logits are {value(product.node).dtype}", where)


def check_writes(
    graph: fx.Graph, region: Region, exit: fx.Node, reads: Collection[fx.Node], dead: Collection[fx.Node] = ()
) -> None:
    """Refuse to move the reading of `reads` down to `exit` if one of them is written to in between.

    dead: nodes on the way to the exit that read them now and go with it.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    members = set(region.nodes)
    operands = {n for p in region.products for n in p.operands}
    first: dict[Any, int] = {}
    for node in reads:
        if not is_tensor(node):
            continue
        readers = [order[u] for u in node.users if u in members or u in region.exits or u in dead]
        key = storage(node)
        first[key] = min([first.get(key, order[exit]), *readers, order[exit]])
        if node in operands:
            first[key] = min(first[key], *(order[p.node] for p in region.products if node in p.operands))
    for node in graph.nodes:
        if order[node] >= order[exit]:
            break
        for target in calls.writes_to(node):
            if target in members or not is_tensor(target):
                continue
            if order[node] >= first.get(storage(target), order[exit]):
                raise Declined(
                    "mutated", f"{target.name} is written to before the loss reads it", calls.user_line(node)
                )
