"""Transforms of torch.func inside of a graph: which are open at a node, and which a head can be fused in or beside.

Dynamo writes `torch.func.grad(f)(x)` out: a level is opened, x is wrapped for it, f runs, `_autograd_grad` takes the
gradients, they are unwrapped, the level is closed. A fused loss can be differentiated once, by that level or by what is
around it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fuse_losses.graph.products import Product, is_tensor, outside, value
from fuse_losses.report.decline import Declined

GRAD = "_grad_increment_nesting"


def of_transform(node: fx.Node) -> str:
    """The name of the function of functorch that the node calls, else ""."""
    if node.op != "call_function":
        return ""
    name = getattr(node.target, "__name__", str(node.target))
    target = f"{getattr(node.target, '__module__', '')}.{name}"
    return name if "functorch" in target or "_wrap_for_grad" in target or "vmap" in target else ""


def is_unwrapped(node: fx.Node) -> bool:
    """True if the node takes a value out of a transform as it is."""
    return of_transform(node) == "_unwrap_for_grad"


def _walk(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[str, ...]]]:
    """Every node with the names of the calls that opened the transforms around it."""
    levels: tuple[str, ...] = ()
    for node in graph.nodes:
        name = of_transform(node)
        if name.endswith("increment_nesting"):
            levels = (*levels, name)
        elif name.endswith("decrement_nesting"):
            levels = levels[:-1]
        yield node, levels


def transformed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that run while a transform is open."""
    return {node for node, levels in _walk(graph) if levels}


def check_transforms(graph: fx.Graph, product: Product, where: str) -> None:
    """Refuse a head that a transform maps over, or differentiates more than once; raises Declined.

    A transform that has ended before the head is the model's body.
    """
    head, around, behind = product.node, (), False
    tail = {head}
    for node, levels in _walk(graph):
        if node is head:
            around, behind = levels, True
            if any(name != GRAD for name in levels) or len(levels) > 1:
                raise Declined("functorch", f"the head is inside of {', '.join(levels)}", where)
            if levels and any(outside(value(n)).requires_grad for n in product.operands):
                raise Declined("functorch", "what is differentiated inside of the graph needs a gradient itself", where)
        if not behind:
            continue
        called = of_transform(node)
        if called.endswith("increment_nesting") and (called != GRAD or len(levels) > 1):
            raise Declined("functorch", f"the graph calls {called}", where)
        if any(a in tail for a in node.all_input_nodes) and node.op != "output":
            tail.add(node)
            if levels and not around:
                raise Declined("functorch", "the head is read inside of a functorch transform", where)
            if called == "_autograd_grad" and not levels:
                raise Declined("functorch", "the graph calls torch.func.vjp", where)
            if is_unwrapped(node) and is_tensor(node) and value(node).requires_grad:
                raise Declined("functorch", "a gradient taken inside of the graph needs a gradient itself", where)
