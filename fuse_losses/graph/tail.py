"""The tail: everything behind the products of a graph, retraced to ATen so that every spelling looks the same."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fuse_losses.graph import calls
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
