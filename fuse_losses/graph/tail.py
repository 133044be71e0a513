"""The tail: everything behind the products of a graph, retraced to ATen so that every spelling looks the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fuse_losses.graph import calls
from fuse_losses.graph.parts import PARTS
from fuse_losses.graph.products import Product, is_tensor, storage
from fuse_losses.graph.transforms import of_transform
from fuse_losses.head.sizes import hint, same
from fuse_losses.report.decline import Declined

aten = torch.ops.aten
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
MAX_TAIL = 4000  # losses are short, but row loops unroll; what is longer is the body of a model behind a false head

MAX_NUMBERS = 1024  # that are written into a graph as a list


@dataclass(frozen=True)
class Tail:
    """The part of the graph that depends on `products`, in Dynamo's nodes and in ATen's.

    graph: functional ATen graph; inputs: its placeholders and the Dynamo nodes they stand for (the products among
    them); results: the ATen value of each Dynamo node of the tail; opaque: tail nodes that could not be retraced.
    """

    products: tuple[Product, ...]
    graph: fx.Graph
    nodes: tuple[fx.Node, ...]
    inputs: dict[fx.Node, fx.Node]
    results: dict[fx.Node, fx.Node]
    opaque: dict[fx.Node, str] = field(default_factory=dict)

    @property
    def sources(self) -> dict[fx.Node, Product]:
        """The ATen placeholders that are logits."""
        made = {p.node: p for p in self.products}
        return {aten: made[dynamo] for aten, dynamo in self.inputs.items() if dynamo in made}

    def aten(self, node: fx.Node) -> fx.Node | None:
        """The ATen value of a product or of a node of the tail."""
        if node in self.results:
            return self.results[node]
        return next((aten for aten, dynamo in self.inputs.items() if dynamo is node), None)


def retrace(gm: fx.GraphModule, products: Sequence[Product]) -> Tail:
    """Retrace what depends on the products under the tracing context's fake mode; raises Declined."""
    made = [p.node for p in products]
    nodes = dependents(gm.graph, made)
    if len(nodes) > MAX_TAIL:
        raise Declined("opaque", f"more than {MAX_TAIL} operations depend on the head", calls.user_line(made[0]))
    tail_nodes = set(nodes)
    written = {storage(t) for n in gm.graph.nodes for t in calls.writes_to(n) if is_tensor(t)}
    factories = _factories(gm.graph, nodes, written)
    shapes = {a for n in nodes for a in n.all_input_nodes if isinstance(a.meta.get("example_value"), torch.Size)}
    columns = {a for n in nodes for a in n.all_input_nodes if _is_column(a)}
    inside = {*nodes, *factories, *shapes, *columns, *_teachers(gm.graph, nodes, products, written)}
    inputs = list(made)
    for node in gm.graph.nodes:
        if node in inside:
            inputs.extend(a for a in node.all_input_nodes if a not in inside and a not in inputs and _has_value(a))
    fake_mode = TracingContext.get().fake_mode
    assert fake_mode is not None
    values = [_refake(node.meta["example_value"], fake_mode) for node in inputs]
    opaque: dict[fx.Node, str] = {}
    kept: list[fx.Node] = []

    def run(*args: Any) -> list[torch.Tensor]:
        opaque.clear()
        made = _execute(gm, inside, dict(zip(inputs, args, strict=True)), opaque)
        kept[:] = [n for n in made if n in tail_nodes]
        return [made[n] for n in kept]

    traced = _functional(run, values, fake_mode)
    if any(map(_writes, traced.graph.nodes)):  # composite operations that write in place inside (quantile), taken apart
        traced.recompile()
        traced = _functional(traced, values, fake_mode)
        if still := [str(n.target) for n in traced.graph.nodes if _writes(n)]:
            raise Declined("opaque", f"{still[0]} writes in place", calls.user_line(made[0]))
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    output = next(n for n in traced.graph.nodes if n.op == "output")
    outputs = output.args[0]
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return Tail(
        tuple(products),
        traced.graph,
        tuple(nodes),
        dict(zip(placeholders, inputs, strict=True)),
        {n: copy.args[0] for n, copy in zip(kept, outputs, strict=True)},
        opaque,
    )


def _functional(function: Callable[..., Any], values: Sequence[Any], fake_mode: Any) -> fx.GraphModule:
    """The function's ATen graph without writes in place, but for those inside of composite operations."""

    def run(*args: Any) -> Any:
        with fake_mode:  # for what reads no tensor (arange)
            return function(*args)

    traced = make_fx(torch.func.functionalize(run), PARTS, tracing_mode="real")(*values)
    traced.graph.eliminate_dead_code()  # what an operation that failed left behind has no value
    _write_out_numbers(traced)
    return traced


def _writes(node: fx.Node) -> bool:
    """Whether the node writes in place; at the end, functionalize puts what became of an input back into it."""
    schema = getattr(node.target, "_schema", None)
    put_back = node.target is aten.copy_.default and cast(fx.Node, node.args[0]).op == "placeholder"
    return schema is not None and schema.is_mutable and not put_back


def _write_out_numbers(traced: fx.GraphModule) -> None:
    """Tensors made of Python numbers (`z[..., V:] = -1e9`, `z[..., [1, 5]]`) become calls that make them."""
    for node in traced.graph.find_nodes(op="get_attr"):
        constant = getattr(traced, str(node.target))
        if type(constant) is not torch.Tensor or constant.numel() > MAX_NUMBERS:
            continue
        make = torch.tensor if constant.dim() else aten.scalar_tensor.default
        how = {"dtype": constant.dtype, "device": constant.device}
        with traced.graph.inserting_before(node):
            made = traced.graph.call_function(make, (constant.tolist(),), how)
        made.meta.update(node.meta, val=constant)
        node.replace_all_uses_with(made)
        traced.graph.erase_node(node)


def dependents(graph: fx.Graph, roots: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that depend on `roots`, which are not among them, in the graph's order."""
    depends = set(roots)
    found = []
    for node in graph.nodes:
        if node.op != "output" and node not in depends and any(a in depends for a in node.all_input_nodes):
            depends.add(node)
            found.append(node)
    return found


def _factories(graph: fx.Graph, nodes: list[fx.Node], written: set[Any]) -> set[fx.Node]:
    """Nodes that read no tensor (arange, full, ...) and feed the tail: retraced too, so that the lift can read them."""
    pure: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or not is_tensor(node) or storage(node) in written:
            continue
        if calls.is_call(node, calls.CONSTANTS | calls.RANDOM) or any(hint(s) is None for s in _shape(node)):
            continue  # a retrace would lift the values of some out of the graph, and draw or count the others again
        if all(a in pure or isinstance(a.meta.get("example_value"), _NUMBERS) for a in node.all_input_nodes):
            pure.add(node)
    needed: set[fx.Node] = set()
    stack = [a for n in nodes for a in n.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in pure and node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _teachers(
    graph: fx.Graph, nodes: Sequence[fx.Node], products: Sequence[Product], written: set[Any]
) -> set[fx.Node]:
    """What is made, class by class, of a tensor as wide as the logits for the tail alone (`teacher.float().exp()`).

    Retraced with the tail, it is made for a chunk of rows and is never there whole.
    """
    taken, found = set(nodes), set[fx.Node]()
    for node in reversed(graph.nodes):
        if not is_tensor(node) or node in taken or not calls.is_call(node, calls.PREPARATIONS):
            continue
        held, tensors = node.meta["example_value"], [a for a in node.all_input_nodes if is_tensor(a)]
        wide = held.dim() > 1 and any(same(held.shape[-1], p.vocab) for p in products)
        readers = bool(node.users) and all(u in taken or u in found for u in node.users)
        kept = not any(storage(t) in written for t in (node, *tensors))
        learns = held.requires_grad == any(t.meta["example_value"].requires_grad for t in tensors)
        if wide and readers and kept and learns:
            found.add(node)
    return found


def _is_column(node: fx.Node) -> bool:
    """True for one of the indices that a mask stands for: the retrace sees that they belong together."""
    source = node.args[0] if node.target is aten.select.int else None
    return isinstance(source, fx.Node) and source.target is aten.nonzero.default


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["example_value"].shape)


def _has_value(node: fx.Node) -> bool:
    return "example_value" in node.meta


def _refake(value: Any, fake_mode: Any) -> Any:
    # Dynamo's fake tensors belong to a fake mode that is over; the shapes (and their symbols) are still ours to use.
    if not isinstance(value, torch.Tensor):
        return value
    with fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _execute(
    gm: fx.GraphModule, inside: set[fx.Node], env: dict[fx.Node, Any], opaque: dict[fx.Node, str]
) -> dict[fx.Node, torch.Tensor]:
    """Run the nodes `inside`; returns a copy of each tensor as it was made, before any later write to it."""
    interpreter = fx.Interpreter(gm)
    made: dict[fx.Node, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for node in gm.graph.nodes:
            if calls.is_call(node, {calls.ENTER_AUTOCAST}):
                env[node] = stack.enter_context(_entered(node))
            elif calls.is_call(node, {calls.EXIT_AUTOCAST}):
                mode = env.get(node.args[0])
                if mode is not None:
                    mode.close()
            elif node in inside:
                if any(a in opaque for a in node.all_input_nodes):
                    opaque[node] = "it reads an operation that cannot be retraced"
                    continue
                if of_transform(node):
                    opaque[node] = "it belongs to a transform of torch.func"
                    continue
                try:
                    args = map_arg(node.args, lambda a: env[a])
                    kwargs = map_arg(node.kwargs, lambda a: env[a])
                    run: Callable[..., Any] = getattr(interpreter, node.op)
                    env[node] = run(node.target, args, kwargs)
                    if isinstance(env[node], torch.Tensor):
                        made[node] = env[node].clone()
                except Exception as error:  # any operation may be beyond a retrace; the region says whether it matters
                    opaque[node] = f"{type(error).__name__}: {error}"
    return made


@contextlib.contextmanager
def _entered(node: fx.Node) -> Iterator[contextlib.ExitStack]:
    """Enter the autocast of an `_enter_autocast` node until its exit node (or the end of the graph) closes it."""
    with contextlib.ExitStack() as stack:
        given: tuple[Any, ...] = (*node.args, None, None, None, None)
        device, dtype, enabled, cache = given[:4]
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled is not False, cache_enabled=cache))
        yield stack
