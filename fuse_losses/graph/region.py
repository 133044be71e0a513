"""The region: Dynamo nodes in which the vocabulary is alive, what they read, and where values leave."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fuse_losses.graph import calls
from fuse_losses.graph.products import Product, is_tensor, value
from fuse_losses.graph.tail import Tail
from fuse_losses.report.decline import Declined

_FUNCTORCH = ("functorch", "_func_", "torch._C._functorch")


@dataclass(frozen=True)
class Region:
    """nodes: the vocabulary is alive in them (the product first); exits: first values without it, in order.

    returned: nodes of the region that the graph returns; written: some node of the region is written to in place.
    """

    product: Product
    nodes: tuple[fx.Node, ...]
    exits: tuple[fx.Node, ...]
    returned: tuple[fx.Node, ...]
    written: bool


def gradient_cuts(tail: Tail) -> list[fx.Node]:
    """Nodes of the tail that get no gradient although what they read would give them one (no_grad, detach)."""
    product = tail.product
    cuts: list[fx.Node] = []
    for node in (product.node, *tail.nodes):
        if not is_tensor(node) or value(node).requires_grad or not value(node).is_floating_point():
            continue
        if any(is_tensor(a) and value(a).requires_grad for a in node.all_input_nodes):
            cuts.append(node)
    return cuts


def find_region(tail: Tail, alive: Collection[fx.Node]) -> Region:
    """Classify the tail's nodes, given those in which the vocabulary is `alive`; raises Declined."""
    product = tail.product
    inside = [product.node, *(n for n in tail.nodes if n in alive)]
    members = set(inside)
    exits: list[fx.Node] = []
    returned: list[fx.Node] = []
    written = False
    for node in inside:
        for user in node.users:
            if user in members:
                continue
            if user.op == "output":
                returned.append(node)
            elif user in tail.opaque:
                raise Declined("opaque", f"{user.target} reads the logits: {tail.opaque[user]}", calls.user_line(user))
            elif user in tail.results and user not in exits:
                exits.append(user)
        written = written or any(w in members for w in calls.writes_to(node))
    order = {n: i for i, n in enumerate(tail.nodes)}
    exits.sort(key=lambda n: order[n])
    return Region(product, tuple(inside), tuple(exits), tuple(returned), written)


def check_plain(graph: fx.Graph, product: Product) -> None:
    """Refuse what the operators cannot take: tensor subclasses (DTensor), functorch levels, foreign dtypes."""
    where = calls.user_line(product.node)
    for node in (product.x, product.weight, product.bias, product.node):
        if node is not None and (is_traceable_wrapper_subclass(value(node)) or _is_dtensor(value(node))):
            raise Declined("sharded", f"{node.name} is a {type(value(node)).__name__}", where)
    for node in graph.nodes:
        target = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', node.target)}"
        if node.op == "call_function" and ("functorch" in target or "_wrap_for_grad" in target or "vmap" in target):
            raise Declined("functorch", f"the graph calls {getattr(node.target, '__name__', node.target)}", where)
    if value(product.node).dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise Declined("unsupported_dtype", f"the logits are {value(product.node).dtype}", where)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor"


def check_writes(graph: fx.Graph, region: Region, exit: fx.Node, reads: Collection[fx.Node]) -> None:
    """Refuse to move the reading of `reads` down to `exit` if one of them is written to in between."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    members = set(region.nodes)
    first: dict[Any, int] = {}
    for node in reads:
        if not is_tensor(node):
            continue
        readers = [order[u] for u in node.users if u in members or u in region.exits]
        key = _storage(node)
        first[key] = min([first.get(key, order[exit]), *readers, order[exit]])
        if node in (region.product.x, region.product.weight, region.product.bias):
            first[key] = min(first[key], order[region.product.node])
    for node in graph.nodes:
        if order[node] >= order[exit]:
            break
        for target in calls.writes_to(node):
            if target in members or not is_tensor(target):
                continue
            if order[node] >= first.get(_storage(target), order[exit]):
                raise Declined(
                    "mutated", f"{target.name} is written to before the loss reads it", calls.user_line(node)
                )


def _storage(node: fx.Node) -> Any:
    return value(node).untyped_storage()._cdata
