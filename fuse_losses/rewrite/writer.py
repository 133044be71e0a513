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
from fuse_losses.head.algebra import RowStep
from fuse_losses.head.sizes import same, sizes
from fuse_losses.plan.choose import Plan
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

    def __init__(self, graph: fx.Graph, region: Region, part: ExitSlice, plan: Plan, written: Written) -> None:
        self.graph, self.region, self.part, self.plan = graph, region, part, plan
        self.made, self.measured = written.operators, written.measured
        self.env: dict[fx.Node, fx.Node] = dict(part.leaves)

    @abstractmethod
    def made_by_operator(self, node: fx.Node) -> fx.Node | None:
        """The value of an ATen node that an operator makes; None if it is to be copied."""

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

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
        known = [(n, getattr(n.meta.get("example_value"), "shape", ())) for n in (*kept, *self.part.reads)]
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
        hidden = self.size(value(product.x).shape[product.hidden_dim])
        x = self.flat_rows(x, steps, [hidden])
        return self.as_dtype(x, value(product.node).dtype, value(product.x).dtype)  # as autocast does

    def weight_of(self, product: Product) -> fx.Node:
        """The product's weight [V, H] in the product's dtype."""
        assert product.weight is not None
        weight = product.weight if product.weight_is_vh else self.call(aten.t.default, product.weight)
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
