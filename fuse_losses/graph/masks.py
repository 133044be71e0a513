"""Boolean indices into what depends on the logits become integer ones: the positions of their True entries.

The number of True entries is a symbol that Dynamo made. Read from the positions it keeps no logits alive, and the
retrace makes no second symbol for it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import fx
from torch._guards import TracingContext

from fuse_losses.graph import calls
from fuse_losses.graph.products import Product, is_tensor, value
from fuse_losses.graph.tail import dependents
from fuse_losses.head.sizes import same

aten = torch.ops.aten


def number_masks(graph: fx.Graph, products: Collection[Product]) -> None:
    """Write `x[mask]` as `x[i, j]`, with i and j the columns of `mask.nonzero()`, where x depends on the products."""
    nodes = dependents(graph, [p.node for p in products])
    found: dict[fx.Node, fx.Node] = {}  # masks and their positions
    for node in nodes:
        if calls.is_call(node, {operator.getitem}) and all(map(is_tensor, (node, node.args[0]))):
            _number(graph, node, set(nodes), found)
    counts = [(positions, value(positions).shape[0]) for positions in found.values()]
    for node in nodes:
        size = node.meta.get("example_value")
        if isinstance(size, torch.SymInt):
            _measure(graph, node, next((p for p, count in counts if same(count, size)), None))


def _number(graph: fx.Graph, node: fx.Node, inside: set[fx.Node], found: dict[fx.Node, fx.Node]) -> None:
    given: Any = node.args[1]
    entries: list[Any] = list(cast("tuple[Any, ...]", given)) if isinstance(given, (tuple, list)) else [given]
    tensors = [i for i, e in enumerate(entries) if is_tensor(e)]
    masks = [entries[i] for i in tensors if value(entries[i]).dtype == torch.bool and value(entries[i]).dim()]
    if not masks or any(m in inside for m in masks):
        return
    # what all tensors have picked is one dim, in the place of the first of them or, if they are apart, in front
    together = tensors[-1] - tensors[0] + 1 == len(tensors)
    at = _dims_before(node, entries, tensors[0]) if together else 0
    count: Any = value(node).shape[at]
    if isinstance(count, int):
        return
    numbered: list[Any] = []
    with graph.inserting_before(node):
        for entry in entries:
            if not any(entry is m for m in masks):
                numbered.append(entry)
                continue
            if entry not in found:
                found[entry] = _call(graph, node, aten.nonzero.default, (entry,), (count, value(entry).dim()))
            columns = range(value(entry).dim())
            numbered += [_call(graph, node, aten.select.int, (found[entry], 1, k), (count,)) for k in columns]
    node.args = (node.args[0], tuple(numbered))


def _dims_before(node: fx.Node, entries: list[Any], first: int) -> int:
    """How many dims of the result stand before what the entry `first` picks."""
    before = 0
    for entry in entries[:first]:
        if entry is Ellipsis:
            taken = sum(_dims_taken(e) for e in entries)
            before += value(cast(fx.Node, node.args[0])).dim() - taken
        elif entry is None or isinstance(entry, slice):
            before += 1
    return before


def _dims_taken(entry: Any) -> int:
    if entry is None or entry is Ellipsis:
        return 0
    return value(entry).dim() if is_tensor(entry) and value(entry).dtype == torch.bool else 1


def _call(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], shape: tuple[Any, ...]) -> fx.Node:
    """A call whose result is a tensor of integers of this shape."""
    made = graph.call_function(target, args)
    fake_mode = TracingContext.get().fake_mode
    assert fake_mode is not None
    with fake_mode:
        made.meta["example_value"] = torch.empty(shape, dtype=torch.int64, device=value(like).device)
    if "stack_trace" in like.meta:
        made.meta["stack_trace"] = like.meta["stack_trace"]
    return made


def _measure(graph: fx.Graph, node: fx.Node, positions: fx.Node | None) -> None:
    """Let a size that is the number of True entries be read from their positions."""
    if positions is None or node.op == "output":
        return
    with graph.inserting_before(node):
        size = graph.call_function(aten.sym_size.int, (positions, 0))
    size.meta.update(node.meta)
    node.replace_all_uses_with(size)
    graph.erase_node(node)
