"""A region as a function of one chunk: the same ATen operators over [C, inner...], rows flattened to the front.

Every value of the region becomes a tensor whose first dim runs over the rows of the chunk and whose other dims are the
value's own dims that are not rows, in their order. Views of rows are not computed but pushed out to the inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from fuse_losses.graph import rows as R
from fuse_losses.graph.products import Product
from fuse_losses.graph.rows import RowAnalysis, Rowed, argument
from fuse_losses.head.sizes import dim_of, hint, same, sizes
from fuse_losses.head.sizes import product as product_of
from fuse_losses.head.table import OperatorTable
from fuse_losses.report.decline import Declined
from fuse_losses.rewrite.chunk_inputs import RowInput, Steps, WholeInput

aten = torch.ops.aten
KINKS = {
    aten.abs.default,
    aten.sign.default,
    aten.sgn.default,
    aten.relu.default,
    aten.maximum.default,
    aten.minimum.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.clamp.Tensor,
    aten.clamp_min.Tensor,
    aten.clamp_max.Tensor,
    aten.sort.default,
    aten.gt.Tensor,
    aten.lt.Tensor,
    aten.ge.Tensor,
    aten.le.Tensor,
    aten.eq.Tensor,
    aten.ne.Tensor,
}


class ChunkGraph:
    """Builds the graph of one chunk. `steps` are views of the rows applied behind a value, outermost last."""

    def __init__(self, analysis: RowAnalysis, sources: dict[fx.Node, Product], cuts: set[fx.Node]) -> None:
        self.analysis, self.sources, self.cuts = analysis, sources, cuts
        self.graph = fx.Graph()
        self.rows: list[RowInput] = []
        self.whole: list[WholeInput] = []
        self.specs: dict[fx.Node, RowInput | WholeInput] = {}  # what each placeholder stands for
        self.outputs: dict[fx.Node, fx.Node] = {}  # ATen node: its canonical value, sums over rows not yet taken
        self.wide = 0  # wide values computed for a chunk: what its memory grows with
        self._inputs: dict[Any, fx.Node] = {}
        self._done: dict[tuple[fx.Node, Steps], fx.Node] = {}

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def emit(self, node: fx.Node, steps: Steps = ()) -> fx.Node:
        """The canonical value of a node whose rows are then viewed by `steps`."""
        key = (node, steps)
        if key not in self._done:
            made = self._emit(node, steps)
            if node in self.cuts:
                made = self.call(aten.detach.default, made)
            self._done[key] = made
        return self._done[key]

    def add_output(self, node: fx.Node) -> None:
        """Compute the value of a node that leaves the region."""
        if node in self.outputs:
            return
        if nll_behind(node) is not None:
            made = _nll(self, cast(fx.Node, nll_behind(node)), ())
        elif isinstance(self.analysis.values[node], Rowed):
            made = self.emit(node)
        else:
            made = _sum_of_rows(self, node)
        if node in self.cuts:
            made = self.call(aten.detach.default, made)
        self.outputs[node] = made

    @property
    def reads(self) -> list[fx.Node]:
        """The ATen nodes outside of the region that its inputs are made of."""
        found: list[Any] = [spec.source for spec in (*self.rows, *self.whole)]
        for spec in self.rows:
            for step in spec.steps:
                found.extend(step.args)
        return [n for n in found if isinstance(n, fx.Node)]

    @property
    def operands(self) -> list[fx.Node]:
        """The Dynamo nodes that its products are made of."""
        return [n for s in self.rows if isinstance(s.source, Product) for n in s.source.operands]

    @property
    def row_set(self) -> Any:
        """Which rows these are, of each product: graphs that have one in common can share a loop."""
        found: set[tuple[fx.Node, Steps]] = set()
        for spec in self.rows:
            if isinstance(spec.source, Product):
                # what only regroups rows behind the last choice leaves their order as it is
                chosen = [i for i, s in enumerate(spec.steps) if s.kind not in ("reshape", "unsqueeze")]
                found.add((spec.source.node, spec.steps[: chosen[-1] + 1] if chosen else ()))
        return frozenset(found)

    @property
    def count(self) -> Any:
        """How many rows there are."""
        spec = next(s for s in self.rows if isinstance(s.source, Product))
        product = cast(Product, spec.source)
        whole = product.node.meta["example_value"].shape
        rows = (*whole[: product.vocab_dim], *whole[product.vocab_dim + 1 :])
        return product_of(spec.steps[-1].shape if spec.steps else rows)

    @property
    def function(self) -> Any:
        """What is computed, whatever the rows: graphs with the same answer can be one, of the rows of both.

        Not where inputs as wide as the vocabulary would be copied for it, or the number of rows is not known.
        """
        products = [s.source for s in self.rows if isinstance(s.source, Product)]
        inputs = [s.source if isinstance(s.source, Product) else s.held for s in self.rows]
        copied = [held[1:] for held in inputs if isinstance(held, tuple)]
        if any(p.given for p in products) or not all(isinstance(n, int) for n in (self.count, *sum(copied, ()))):
            return id(self)
        narrow = min(hint(p.node.meta["example_value"].shape[p.vocab_dim]) or 0 for p in products) // 8
        if any(product_of(row) > narrow for row in copied):
            return id(self)
        return (self.finish().code, tuple(inputs), tuple(self.whole))

    @property
    def has_kinks(self) -> bool:
        """True if the gradient of some operation jumps where two values are equal."""
        return any(n.target in KINKS for n in self.graph.nodes)

    def _emit(self, node: fx.Node, steps: Steps) -> fx.Node:
        if node in self.sources:
            self.wide += 1
            return self._product(self.sources[node], steps)
        value = self.analysis.values[node]
        if not isinstance(value, Rowed):
            raise Declined("rows_mix", f"{node.target} combines rows and is read again with the vocabulary")
        self.wide += value.wide
        emitter = EMITTERS.get(node.target, _pointwise)
        return emitter(self, node, steps)

    def labels(self, node: object) -> str:
        return cast(Rowed, self.analysis.values[cast(fx.Node, node)]).labels

    def inner_dim(self, node: object, dim: int) -> int:
        """Where a dim of the value (not a row) is in the canonical tensor."""
        return 1 + sum(label != "r" for label in self.labels(node)[:dim])

    # ------------------------------------------------------------------------------------------------------ inputs

    def _product(self, product: Product, steps: Steps) -> fx.Node:
        x = self.row_input(RowInput(product, steps))
        if product.given:
            return x
        weight = self.whole_input(WholeInput(product, "weight"))
        if product.bias is None:
            return self.call(aten.linear.default, x, weight)
        return self.call(aten.linear.default, x, weight, self.whole_input(WholeInput(product, "bias")))

    def size(self, number: Any, what: str) -> Any:
        """A size of what a row holds: a number, or that of a vocabulary, which the chunk reads off the weight."""
        if not isinstance(number, torch.SymInt):
            return constant(number, what)
        made = [p for p in self.sources.values() if not p.given and same(p.vocab, number)]
        if not made:
            return constant(number, what)
        return self.call(aten.sym_size.int, self.whole_input(WholeInput(made[0], "weight")), 0)

    def row_input(self, spec: RowInput) -> fx.Node:
        return self._input(("rows", *spec.key), self.rows, spec)

    def whole_input(self, spec: WholeInput) -> fx.Node:
        return self._input(spec, self.whole, spec)

    def _input(self, key: Any, specs: list[Any], spec: Any) -> fx.Node:
        if key not in self._inputs:
            self._inputs[key] = self.graph.placeholder(f"{'rows' if specs is self.rows else 'whole'}_{len(specs)}")
            specs.append(spec)
            self.specs[self._inputs[key]] = spec
        return self._inputs[key]

    def finish(self) -> fx.GraphModule:
        """The graph as a module: inputs `rows_*` then `whole_*`, one output per entry of `outputs`."""
        graph = fx.Graph()
        made = {str(n.target): n for n in self._inputs.values()}
        copied: dict[fx.Node, fx.Node] = {}
        for kind, specs in (("rows", self.rows), ("whole", self.whole)):
            for i in range(len(specs)):
                copied[made[f"{kind}_{i}"]] = graph.placeholder(f"{kind}_{i}")
        for node in self.graph.nodes:
            if node not in copied:
                copied[node] = graph.node_copy(node, lambda n: copied[n])
        graph.output([copied[n] for n in self.outputs.values()])
        graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), graph)

    @staticmethod
    def frozen(chunk: fx.GraphModule) -> set[int]:
        """Which inputs reach no output but through a detach: eager gives them no gradient, not even zeros."""
        output = next(n for n in reversed(chunk.graph.nodes) if n.op == "output")
        stack, reached = list(output.all_input_nodes), set[fx.Node]()
        while stack:
            node = stack.pop()
            if node not in reached and node.target is not aten.detach.default:
                reached.add(node)
                stack.extend(node.all_input_nodes)
        inputs = chunk.graph.find_nodes(op="placeholder")
        return {i for i, node in enumerate(inputs) if node not in reached}

    def plain(self, node: fx.Node, labels: str, shape: tuple[Any, ...], steps: Steps) -> fx.Node:
        """A value that does not depend on the logits, where it meets one with these labels and this shape."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return self.whole_input(WholeInput(node, "number"))
        own = sizes(node)
        offset = len(shape) - len(own)
        at_rows = [k for k in range(len(own)) if labels[k + offset] == "r"]
        wide = any(labels[k + offset] == "v" and not same(size, 1) for k, size in enumerate(own))
        if wide and node.op == "call_function" and _repeats(node):  # made for a chunk, it is never there whole
            return self.elementwise(node, labels, shape, steps)
        if any(not same(own[k], 1) for k in at_rows):
            return self.row_input(RowInput(node, steps, labels, shape))
        return self.whole_input(WholeInput(node, "", tuple(at_rows)))

    def elementwise(self, node: fx.Node, labels: str, shape: tuple[Any, ...], steps: Steps) -> fx.Node:
        """An elementwise operator whose result has these labels and this shape."""
        target = cast(Any, node.target)
        schema = target._schema.arguments
        given = {**{a.name: value for a, value in zip(schema, node.args, strict=False)}, **node.kwargs}
        numbers = {a.name: given.get(a.name) for a in schema if "Tensor" not in str(a.type)}
        symbolic = {name for name, value in numbers.items() if isinstance(value, fx.Node)}  # inputs: tensors of no dims
        if symbolic and target in OF_TENSORS and all(v is None or n in symbolic for n, v in numbers.items()):
            target, symbolic = OF_TENSORS[target], set[str]()
        made = {
            name: self.size(cast(fx.Node, value).meta.get("val"), f"a number of {target}")
            if name in symbolic
            else map_arg(value, lambda a: self.aligned(a, labels, shape, steps))
            for name, value in given.items()
        }
        positional = [a.name for a in schema][: len(node.args)]
        return self.call(target, *[made.pop(name) for name in positional], **made)

    def aligned(self, arg: object, labels: str, shape: tuple[Any, ...], steps: Steps) -> Any:
        """An operand of a broadcasting operator whose result has these labels and this shape."""
        if not isinstance(arg, fx.Node):
            return arg
        if not self.analysis.depends(arg):
            return self.plain(arg, labels, shape, steps)
        made = self.emit(arg, steps)
        own = self.labels(arg)
        offset = len(labels) - len(own)
        # a dim of size one may stand where another operand has a row: it is no inner dim of the result
        for k in reversed(range(len(own))):
            if own[k] != "r" and labels[k + offset] == "r":
                made = self.call(aten.squeeze.dim, made, self.inner_dim(arg, k))
        if any(own[k] == "r" and labels[k + offset] != "r" for k in range(len(own))):
            raise Declined("rows_mix", "rows are aligned with another dim")
        missing = sum(label != "r" for label in labels[:offset])
        for _ in range(missing):
            made = self.call(aten.unsqueeze.default, made, 1)
        return made

    def rowwise(self, arg: object, labels: str, steps: Steps) -> Any:
        """An operand that has every row itself, a single one too: nothing is broadcast."""
        if not isinstance(arg, fx.Node) or not isinstance(arg.meta.get("val"), torch.Tensor):
            return self.aligned(arg, labels, (), steps)
        if self.analysis.depends(arg):
            return self.aligned(arg, labels, sizes(arg), steps)
        return self.row_input(RowInput(arg, steps, labels, sizes(arg)))


def _repeats(node: fx.Node) -> bool:
    """True for an elementwise operator that gives the same again."""
    tags = getattr(node.target, "tags", ())
    elementwise = torch.Tag.pointwise in tags or node.target is aten._to_copy.default
    return elementwise and torch.Tag.nondeterministic_seeded not in tags


# Operators of a number, and the same of a tensor.
OF_TENSORS = {
    aten.clamp.default: aten.clamp.Tensor,
    aten.clamp_min.default: aten.clamp_min.Tensor,
    aten.clamp_max.default: aten.clamp_max.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
    **{getattr(aten, n).Scalar: getattr(aten, n).Tensor for n in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{getattr(aten, n).Scalar: getattr(aten, n).Tensor for n in ("add", "sub", "mul", "div", "remainder", "fmod")},
}
Emitter = Callable[[ChunkGraph, fx.Node, Steps], fx.Node]
EMITTERS: OperatorTable[Emitter] = OperatorTable()  # how an operator is written for a chunk; else elementwise
emitter = EMITTERS.rule


def constant(number: Any, what: str) -> Any:
    """An argument that must be known when the chunk's graph is written."""
    if isinstance(number, (fx.Node, torch.SymInt, torch.SymFloat)):
        raise Declined("rows_mix", f"{what} is known at run time only")
    return number


def _pointwise(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    return build.elementwise(node, build.labels(node), sizes(node), steps)


@emitter(*R.REDUCE, *R.ALONG, aten.topk.default)
def _along(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source = cast(fx.Node, node.args[0])
    schema = cast(Any, node.target)._schema.arguments
    args: list[Any] = []
    for arg in schema[1:]:
        given = argument(node, arg.name)
        if arg.name == "dim":
            dims = R.reduced_dims(node) if node.target in R.REDUCE else [dim_of(given, source)]
            mapped = [build.inner_dim(source, d) for d in dims]
            given = (
                mapped if isinstance(given, (list, tuple)) or str(arg.type).startswith("Optional[List") else mapped[0]
            )
            if given is not mapped and len(mapped) != 1:
                raise Declined("rows_mix", f"{node.target} flattens its input")
        args.append(constant(given, f"an argument of {node.target}"))
    made = build.emit(source, steps)
    plain = [a for a, s in zip(args, schema[1:], strict=True) if not s.kwarg_only]
    named = {s.name: a for a, s in zip(args, schema[1:], strict=True) if s.kwarg_only and a is not None}
    return build.call(cast("Callable[..., Any]", node.target), made, *plain, **named)


NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


def nll_behind(node: fx.Node) -> fx.Node | None:
    """The nll_loss whose loss this node is, if it is one."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) and source.target in NLL and node.args[1] == 0 else None


def row_sum_dims(analysis: RowAnalysis, node: fx.Node) -> tuple[list[int], list[int]]:
    """The dims that a sum or mean over several rows removes: those inside a row, and those of rows."""
    labels = cast(Rowed, analysis.values[cast(fx.Node, node.args[0])]).labels
    dims = R.reduced_dims(node)
    return [d for d in dims if labels[d] != "r"], [d for d in dims if labels[d] == "r"]


def _sum_of_rows(build: ChunkGraph, node: fx.Node) -> fx.Node:
    """The part of a sum or mean over several rows that is taken inside each row, unrounded; [C, what is left]."""
    source = cast(fx.Node, node.args[0])
    inner, _ = row_sum_dims(build.analysis, node)
    made = build.emit(source)
    dtype = source.meta["val"].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
    dims = [build.inner_dim(source, d) for d in inner]
    if not dims:
        return made
    return build.call(aten.sum.dim_IntList, made, dims, False, **({"dtype": wide} if wide else {}))


@emitter(operator.getitem)
def _getitem(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source = cast(fx.Node, node.args[0])
    if source.target in NLL:
        return build.emit(source, steps)
    return build.call(operator.getitem, build.emit(source, steps), node.args[1])


@emitter(aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default)
def _indexed(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source = cast(fx.Node, node.args[0])
    labels = build.labels(source)
    dim = build.inner_dim(source, dim_of(node.args[1], source))
    operands = [build.rowwise(a, labels, steps) for a in node.args[2:]]
    return build.call(cast("Callable[..., Any]", node.target), build.emit(source, steps), dim, *operands, **node.kwargs)


@emitter(*NLL)
def _nll(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    """Per-row losses; mean and sum over rows are taken behind the region."""
    log_probs, target, weight, _, ignore_index = node.args
    made = build.emit(cast(fx.Node, log_probs), steps)
    labels = build.labels(log_probs)
    if labels.count("r") < len(labels) - 1:  # the other dims have size one
        vocab = build.call(aten.sym_size.int, made, build.inner_dim(log_probs, 0 if len(labels) == 1 else 1))
        made = build.call(aten.reshape.default, made, [-1, vocab])
    y = build.row_input(RowInput(cast(fx.Node, target), steps, "r" * len(sizes(target)), sizes(target)))
    w = None if weight is None else build.whole_input(WholeInput(cast(fx.Node, weight)))
    per_row = build.call(aten.nll_loss_forward.default, made, y, w, 0, ignore_index)
    return build.call(operator.getitem, per_row, 0)


def row_sizes(labels: str, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sizes of the dims that are rows."""
    return tuple(s for s, label in zip(shape, labels, strict=True) if label == "r")


# last, for their emitters are made with what is above
import fuse_losses.rewrite.chunk_picks  # noqa: E402
import fuse_losses.rewrite.chunk_products  # noqa: E402
import fuse_losses.rewrite.chunk_views  # noqa: E402, F401
