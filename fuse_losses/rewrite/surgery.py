"""Put fused operators into a graph in place of a region's exits. Only ever called on a copy."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.graph.products import value
from fuse_losses.graph.region import Region
from fuse_losses.head.algebra import Functional, Logits, LogSumExp, NllLoss, Selected
from fuse_losses.head.lift import same, sizes
from fuse_losses.plan.choose import Plan
from fuse_losses.rewrite.slices import SYM_SIZE, ExitSlice

aten = torch.ops.aten
NO_IGNORE = -(2**63)  # no valid target: where nothing is ignored, this value is out of range like any other


def rewrite(graph: fx.Graph, region: Region, slices: Sequence[ExitSlice], plan: Plan) -> None:
    """Replace every exit by fused operators and erase what nobody reads any more."""
    made: dict[Any, dict[str, fx.Node]] = {}
    for part in slices:
        with graph.inserting_before(part.exit):
            new = Writer(graph, region, part, plan, made).ref(part.root)
        for key in ("example_value", "stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in part.exit.meta:
                new.meta[key] = part.exit.meta[key]
        part.exit.replace_all_uses_with(new)
        graph.erase_node(part.exit)
    _erase_unused(graph, region)
    graph.lint()


def _erase_unused(graph: fx.Graph, region: Region) -> None:
    # A write into the logits has no users; it may go only when nothing that remains reads the logits.
    members = set(region.nodes)
    if region.written and any(user not in members for node in region.nodes for user in node.users):
        return
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)


class Writer:
    """Writes one exit's ATen slice into the Dynamo graph at the current insertion point."""

    def __init__(
        self,
        graph: fx.Graph,
        region: Region,
        part: ExitSlice,
        plan: Plan,
        made: dict[Any, dict[str, fx.Node]],
    ) -> None:
        self.graph, self.region, self.part, self.plan = graph, region, part, plan
        self.product = region.product
        self.dtype = value(self.product.node).dtype
        self.made = made  # operators already written, shared by exits with the same gradient state
        self.env: dict[fx.Node, fx.Node] = dict(part.leaves)
        self.measured: list[tuple[fx.Node, tuple[Any, ...]]] = []  # nodes written here whose sizes are known

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def ref(self, node: fx.Node) -> fx.Node:
        """The Dynamo node that holds the ATen node's value, written if need be."""
        if node not in self.env:
            self.env[node] = self._write(node)
        return self.env[node]

    def _write(self, node: fx.Node) -> fx.Node:
        if node in self.part.functionals:
            return self._functional(node, self.part.functionals[node])
        if node.target is SYM_SIZE:
            return cast(fx.Node, self.size(node.meta["val"]))
        args = fx.node.map_arg(node.args, self.ref)
        kwargs = fx.node.map_arg(node.kwargs, self.ref)
        return self.graph.call_function(cast("Callable[..., Any]", node.target), args, kwargs)

    def size(self, wanted: Any) -> Any:
        """A size as a constant, or read from a tensor that stays in the graph (never from the logits)."""
        if isinstance(wanted, int):
            return wanted
        kept = (self.product.x, self.product.weight, *self.part.reads)
        known = [(node, getattr(node.meta.get("example_value"), "shape", ())) for node in kept]
        for node, shape in (*known, *self.measured):
            for dim, size in enumerate(shape):
                if same(size, wanted):
                    return self.call(SYM_SIZE, node, dim)
        raise LookupError(f"no tensor of the graph has the size {wanted}")

    def as_dtype(self, node: fx.Node, dtype: torch.dtype, before: torch.dtype) -> fx.Node:
        return node if dtype == before else self.call(aten.to.dtype, node, dtype)

    # ------------------------------------------------------------------------------------------------ functionals

    def _functional(self, node: fx.Node, functional: Functional) -> fx.Node:
        fused = self._fused(functional)
        if isinstance(functional, NllLoss):
            result = self._nll(functional, fused)
        elif isinstance(functional, LogSumExp):
            result = fused["lse"]
        elif isinstance(functional, Selected):
            result = self.call(aten.add.Tensor, fused["log_prob"], fused["lse"])
        else:
            result = fused["log_prob"]
        factor = getattr(functional, "factor", 1.0)
        if factor != 1.0:
            result = (
                self.call(aten.neg.default, result) if factor == -1.0 else self.call(aten.mul.Tensor, result, factor)
            )
        if not isinstance(functional, NllLoss):
            result = self.call(aten.reshape.default, result, self._shape(node))
        statistics = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.as_dtype(result, node.meta["val"].dtype, statistics)

    def _shape(self, node: fx.Node) -> list[Any]:
        shape = [s if isinstance(s, int) else None for s in sizes(node)]
        if shape.count(None) == 1:
            return [-1 if s is None else s for s in shape]
        return [self.size(s) for s in sizes(node)]

    def _nll(self, functional: NllLoss, fused: dict[str, fx.Node]) -> fx.Node:
        total = fused.get("nll_sum")
        if total is None:
            total = self.call(aten.neg.default, self.call(aten.sum.default, fused["log_prob"]))
        if not functional.mean:
            return total
        valid = self.call(aten.ne.Scalar, fused["target"], functional.ignore_index)
        return self.call(aten.div.Tensor, total, self.call(aten.sum.default, valid))

    def _fused(self, functional: Functional) -> dict[str, fx.Node]:
        """The operator that makes the functional: one already written, or a new one."""
        grad = self.part.differentiable
        if isinstance(functional, LogSumExp):
            for (logits, *_, state), outputs in self.made.items():
                if logits == functional.logits and state == grad and "lse" in outputs:
                    return outputs
            return self._write_fused(functional.logits, None, None, False, summed=False)
        ignore = getattr(functional, "ignore_index", None)
        wraps = getattr(functional, "wraps", False)
        summed = isinstance(functional, NllLoss) and (self.plan.gradients == "forward" or not grad)
        key = (functional.logits, functional.target, ignore, wraps, summed, grad)
        if key not in self.made:
            self.made[key] = self._write_fused(functional.logits, functional.target, ignore, wraps, summed)
        return self.made[key]

    def _write_fused(
        self, logits: Logits, target: fx.Node | None, ignore: int | None, wraps: bool, summed: bool
    ) -> dict[str, fx.Node]:
        x, weight, bias = self._operands(logits)
        ignore_index = NO_IGNORE if ignore is None else ignore
        if target is None:  # only the logsumexp is wanted: every row is ignored
            rows = self.call(SYM_SIZE, x, 0)
            device = value(self.product.node).device
            y = self.graph.call_function(torch.full, ((rows,), ignore_index), {"dtype": torch.int64, "device": device})
        else:
            y = self.call(aten.reshape.default, self.ref(target), [-1])
            if wraps:
                from_end = self.call(aten.add.Tensor, y, self.size(self.product.vocab))
                y = self.call(aten.where.self, self.call(aten.lt.Scalar, y, 0), from_end, y)
        shape_of_map = (logits.map.squash, logits.map.inner, logits.map.outer, ignore_index)
        tail = (*shape_of_map, self.plan.chunk_rows, self.plan.accumulate)
        given = self._given_logits(logits)
        if summed:
            total = self.call(torch.ops.fuse_losses.linear_nll_sum.default, x, weight, bias, y, None, given, *tail)
            return {"nll_sum": total, "target": y}
        both = self.call(torch.ops.fuse_losses.linear_log_prob.default, x, weight, bias, y, given, *tail)
        log_prob, lse = self.call(operator.getitem, both, 0), self.call(operator.getitem, both, 1)
        return {"log_prob": log_prob, "lse": lse, "target": y}

    # --------------------------------------------------------------------------------------------------- operands

    def _operands(self, logits: Logits) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        product = self.product
        x = product.x
        if product.hidden_dim != value(x).dim() - 1:
            x = self.call(aten.movedim.int, x, product.hidden_dim, -1)
        hidden = self.size(value(product.x).shape[product.hidden_dim])
        for step in logits.rows:
            x = self._row_step(x, step.kind, step.args, hidden)
            self.measured.append((x, step.shape))
        x = self.call(aten.reshape.default, x, [-1, hidden])
        weight = product.weight if product.weight_is_vh else self.call(aten.t.default, product.weight)
        bias = product.bias and self.as_dtype(product.bias, self.dtype, value(product.bias).dtype)
        if logits.bias is not None:
            extra = self.call(aten.reshape.default, self.ref(logits.bias), [-1])
            extra = self.as_dtype(extra, self.dtype, logits.bias.meta["val"].dtype)
            bias = extra if bias is None else self.call(aten.add.Tensor, bias, extra)
        x = self.as_dtype(x, self.dtype, value(product.x).dtype)  # what autocast does to the product's operands
        weight = self.as_dtype(weight, self.dtype, value(product.weight).dtype)
        if logits.detached:
            x, weight = self.call(aten.detach.default, x), self.call(aten.detach.default, weight)
            bias = bias if bias is None else self.call(aten.detach.default, bias)
        return x, weight, bias

    def _row_step(self, x: fx.Node, kind: str, args: tuple[Any, ...], last: Any) -> fx.Node:
        args = tuple(self.ref(a) if isinstance(a, fx.Node) else a for a in args)
        if kind == "reshape":
            return self.call(aten.reshape.default, x, [*args, last])
        if kind == "permute":
            return self.call(aten.permute.default, x, [*args, len(args)])
        target = {"slice": aten.slice.Tensor, "select": aten.select.int, "unsqueeze": aten.unsqueeze.default}[kind]
        return self.call(target, x, *args)

    def _given_logits(self, logits: Logits) -> fx.Node | None:
        """The product itself, if it exists anyhow and its rows are these rows: one product less."""
        product = self.product
        plain = all(step.kind in ("reshape", "unsqueeze") for step in logits.rows)
        last = product.vocab_dim == value(product.node).dim() - 1
        if not (self.region.returned and plain and last) or self.region.written or logits.bias is not None:
            return None
        whole = self.call(aten.detach.default, product.node)
        return self.call(aten.reshape.default, whole, [-1, self.size(product.vocab)])
