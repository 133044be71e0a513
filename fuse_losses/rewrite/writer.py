"""Writing into a Dynamo graph: copies of ATen nodes, sizes, and the rows of a product's input."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from fuse_losses.graph.products import Product, value
from fuse_losses.graph.region import Region
from fuse_losses.graph.rows import RowAnalysis, Rowed
from fuse_losses.head.algebra import RowStep
from fuse_losses.head.sizes import same, sizes
from fuse_losses.plan.choose import Plan
from fuse_losses.rewrite.chunk_graph import row_sum_dims
from fuse_losses.rewrite.chunk_inputs import RowInput, WholeInput
from fuse_losses.rewrite.slices import ExitSlice

aten = torch.ops.aten
SYM_SIZE = aten.sym_size.int
VIEWS = {
    "slice": aten.slice.Tensor,
    "select": aten.select.int,
    "unsqueeze": aten.unsqueeze.default,
    "flip": aten.flip.default,
    "roll": aten.roll.default,
}


@dataclass
class Written:
    """What earlier exits wrote and later ones may share: operators, and nodes whose sizes are known."""

    operators: dict[Any, Any] = field(default_factory=dict[Any, Any])
    measured: list[tuple[fx.Node, tuple[Any, ...]]] = field(default_factory=list[tuple[fx.Node, tuple[Any, ...]]])


class Writer(ABC):
    """Writes one exit's ATen slice into the graph at its insertion point; a subclass writes what an operator makes."""

    def __init__(
        self, graph: fx.Graph, region: Region, part: ExitSlice, plan: Plan, written: Written, analysis: RowAnalysis
    ) -> None:
        self.graph, self.region, self.part, self.plan, self.analysis = graph, region, part, plan, analysis
        self.made, self.measured = written.operators, written.measured
        self.reads = [*part.reads]
        self.env: dict[fx.Node, fx.Node] = dict(part.leaves)

    @abstractmethod
    def made_by_operator(self, node: fx.Node) -> fx.Node | None:
        """The value of an ATen node that an operator makes; None if it is to be copied."""

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def also_reads(self, other: ExitSlice, leaves: Sequence[fx.Node]) -> None:
        """Let the operator that is made here read `leaves` of another exit too, which are there already."""
        for aten_node, dynamo in other.leaves.items():
            self.env.setdefault(aten_node, dynamo)
        self.reads.extend(leaves)

    def ref(self, node: fx.Node) -> fx.Node:
        """The Dynamo node that holds the ATen node's value, written if need be."""
        if node not in self.env:
            self.env[node] = self._write(node)
        return self.env[node]

    def _write(self, node: fx.Node) -> fx.Node:
        made = self.made_by_operator(node)
        if made is not None:
            return made
        if node.target is SYM_SIZE:
            return cast(fx.Node, self.size(node.meta["val"]))
        if node.target is aten.sym_numel.default:
            return cast(fx.Node, self.numel(sizes(node.args[0])))
        args = map_arg(node.args, self.ref)
        kwargs = map_arg(node.kwargs, self.ref)
        return self.graph.call_function(cast("Callable[..., Any]", node.target), args, kwargs)

    def size(self, wanted: Any) -> Any:
        """A size as a constant, or read from a tensor that stays in the graph (never from the logits)."""
        if isinstance(wanted, int):
            return wanted
        for node, dim in self._holding(wanted):
            return self.call(SYM_SIZE, node, dim)
        raise LookupError(f"no tensor of the graph has the size {wanted}")

    def _holding(self, wanted: Any) -> Iterator[tuple[fx.Node, int]]:
        """Tensors that stay in the graph and have a dim of this size."""
        kept = [n for p in self.region.products for n in p.operands]
        known = [(n, getattr(n.meta.get("example_value"), "shape", ())) for n in (*kept, *self.reads)]
        for node, shape in (*known, *self.measured):
            yield from ((node, dim) for dim, size in enumerate(shape) if same(size, wanted))

    def numel(self, shape: Sequence[Any]) -> Any:
        """The product of sizes, as a constant or as a node."""
        count: Any = 1
        for wanted in shape:
            size = self.size(wanted)
            known = isinstance(count, int) and isinstance(size, int)
            count = count * size if known else self.call(operator.mul, count, size)
        return count

    def shape(self, wanted: Sequence[Any]) -> list[Any]:
        """A shape to reshape to; one unknown size is left to the reshape."""
        unknown = [i for i, s in enumerate(wanted) if not isinstance(s, int)]
        if len(unknown) != 1:
            unknown = [i for i in unknown if not any(self._holding(wanted[i]))]
        if len(unknown) == 1:
            return [-1 if i in unknown else self.size(s) for i, s in enumerate(wanted)]
        return [self.size(s) for s in wanted]

    def as_dtype(self, node: fx.Node, dtype: torch.dtype, before: torch.dtype) -> fx.Node:
        return node if dtype == before else self.call(aten.to.dtype, node, dtype)

    # ------------------------------------------------------------------------------------------ a product's operands

    def rows_of(self, product: Product, steps: Sequence[RowStep]) -> fx.Node:
        """The product's input [N, H], its rows viewed as the logits' rows are, in the product's dtype."""
        x = product.x
        if product.hidden_dim != value(x).dim() - 1:
            x = self.call(aten.movedim.int, x, product.hidden_dim, -1)
        hidden = value(product.x).shape[product.hidden_dim]
        hidden = hidden if isinstance(hidden, int) else self.call(SYM_SIZE, product.x, product.hidden_dim)
        x = self.flat_rows(x, steps, [hidden])
        return self.as_dtype(x, value(product.node).dtype, value(product.x).dtype)  # as autocast does

    def weight_of(self, product: Product) -> fx.Node:
        """The product's weight [V, H] in the product's dtype."""
        assert product.weight is not None
        weight = product.weight if product.weight_is_vh else self.call(aten.t.default, product.weight)
        if value(product.weight).dim() == 3:
            weight = self.call(aten.squeeze.dim, weight, 2)
        return self.as_dtype(weight, value(product.node).dtype, value(product.weight).dtype)

    def bias_of(self, product: Product) -> fx.Node | None:
        """The product's bias [V] in the product's dtype."""
        return product.bias and self.as_dtype(product.bias, value(product.node).dtype, value(product.bias).dtype)

    def flat_rows(self, x: fx.Node, steps: Sequence[RowStep], inner: list[Any]) -> fx.Node:
        """[N, *inner] of x [*rows, *inner] after views of its rows."""
        for step in steps:
            args = tuple(self.ref(a) if isinstance(a, fx.Node) else a for a in step.args)
            if step.kind == "reshape":
                x = self.call(aten.reshape.default, x, [*args, *inner])
            elif step.kind == "permute":
                x = self.call(aten.permute.default, x, [*args, *range(len(args), len(args) + len(inner))])
            elif step.kind == "index":
                x = self.call(aten.index.Tensor, x, list(args))
            else:
                x = self.call(VIEWS[step.kind], x, *args)
            self.measured.append((x, step.shape))
        return self.call(aten.reshape.default, x, [-1, *inner])

    # -------------------------------------------------------------------------------------- inputs and results by rows

    def row_input(self, spec: RowInput) -> fx.Node:
        """[N, inner...] of a tensor that is cut into chunks."""
        if isinstance(spec.source, Product):
            return self.rows_of(spec.source, spec.steps)
        x, own = self.ref(spec.source), sizes(spec.source)
        offset = len(spec.shape) - len(own)
        for _ in range(offset):
            x = self.call(aten.unsqueeze.default, x, 0)
        own = (*[1] * offset, *own)
        if any(label == "r" and not same(o, s) for o, s, label in zip(own, spec.shape, spec.labels, strict=True)):
            full = [self.size(s) if label == "r" else -1 for s, label in zip(spec.shape, spec.labels, strict=True)]
            x = self.call(aten.expand.default, x, full)
        first = [d for d, label in enumerate(spec.labels) if label == "r"]
        rest = [d for d, label in enumerate(spec.labels) if label != "r"]
        if first + rest != sorted(first + rest):
            x = self.call(aten.permute.default, x, first + rest)
        return self.flat_rows(x, spec.steps, [self.size(own[d]) for d in rest])

    def whole_input(self, spec: WholeInput) -> fx.Node:
        """A tensor that every chunk reads whole."""
        if isinstance(spec.source, Product):
            return cast(fx.Node, self.weight_of(spec.source) if spec.part == "weight" else self.bias_of(spec.source))
        x = self.ref(spec.source)
        if spec.part == "number":  # a 0-d tensor takes part in no promotion, like the number
            kind = torch.int64 if isinstance(spec.source.meta["val"], torch.SymInt) else torch.float64
            device = value(self.region.products[0].node).device
            # AOTAutograd keeps floats symbolic in arithmetic only: elsewhere it compiles for this one number, and its
            # cache would then give what was compiled for another
            return self.call(operator.mul, self.call(aten.full.default, [], 1, dtype=kind, device=device), x)
        return self.call(aten.squeeze.dims, x, list(spec.squeezed)) if spec.squeezed else x

    def unflattened(self, flat: fx.Node, labels: str, shape: tuple[Any, ...]) -> fx.Node:
        """A value [N, inner...] with its dims where its labels have them."""
        first = [d for d, label in enumerate(labels) if label == "r"]
        rest = [d for d, label in enumerate(labels) if label != "r"]
        out = self.call(aten.reshape.default, flat, self.shape([shape[d] for d in first + rest]))
        order = first + rest
        return (
            out
            if order == sorted(order)
            else self.call(aten.permute.default, out, [order.index(d) for d in sorted(order)])
        )

    def sum_of_rows(self, node: fx.Node, flat: fx.Node) -> fx.Node:
        """Sums over rows of the sums inside them; a mean divides by all that it summed."""
        source = cast(fx.Node, node.args[0])
        labels, shape = cast(Rowed, self.analysis.values[source]).labels, sizes(source)
        inner, rows = row_sum_dims(self.analysis, node)
        left = [d for d in range(len(labels)) if d not in inner]
        out = self.unflattened(flat, "".join(labels[d] for d in left), tuple(shape[d] for d in left))
        out = self.call(aten.sum.dim_IntList, out, [left.index(d) for d in rows])
        if node.target in (aten.mean.default, aten.mean.dim):
            count = self.numel([shape[d] for d in (*inner, *rows)])
            out = self.call(aten.div.Tensor, out, count)
        out = self.call(aten.reshape.default, out, self.shape(sizes(node)))
        return self.call(aten.to.dtype, out, node.meta["val"].dtype)
