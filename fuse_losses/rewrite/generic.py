"""Exits that have no form in the algebra, written as one operator that runs the region chunk by chunk."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.graph import calls
from fuse_losses.graph.products import Product, is_tensor, storage, value
from fuse_losses.graph.rows import RowAnalysis, Rowed, argument
from fuse_losses.head.sizes import same, sizes
from fuse_losses.rewrite.chunk_graph import ChunkGraph, RowInput, WholeInput, nll_behind, row_sum_dims
from fuse_losses.rewrite.slices import ExitSlice
from fuse_losses.rewrite.writer import Writer

aten = torch.ops.aten


@dataclass(frozen=True)
class Loop:
    """One run over the rows: a chunk's graph and the exits whose values it makes."""

    build: ChunkGraph
    exits: tuple[ExitSlice, ...]


def loops(slices: Sequence[ExitSlice], graph: fx.Graph) -> list[Loop]:
    """Share a loop between exits with the same rows and gradient state, if the first of them has all that it reads.

    It has not, if what a later exit reads is made, or written to, only behind the first.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    writes = [(order[n], storage(t)) for n in graph.nodes for t in calls.writes_to(n) if is_tensor(t)]
    found: list[Loop] = []
    for part in slices:
        for node, build in part.cuts.items():
            for i, loop in enumerate(found):
                first = loop.exits[0]
                leaves = _leaves(part, build)
                memory = {storage(n) for n in leaves if is_tensor(n)}
                written = any(order[first.exit] < at < order[part.exit] and to in memory for at, to in writes)
                ready = not written and all(order[n] < order[first.exit] for n in leaves)
                alike = first.differentiable == part.differentiable and loop.build.row_set == build.row_set
                if alike and ready:
                    loop.build.add_output(node)
                    found[i] = Loop(loop.build, (*loop.exits, part))
                    break
            else:
                found.append(Loop(build, (part,)))
    return found


def _leaves(part: ExitSlice, build: ChunkGraph) -> list[fx.Node]:
    """The Dynamo nodes that the inputs of the build are made of."""
    found: list[fx.Node] = []
    stack, seen = list(build.reads), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in part.leaves:
            found.append(part.leaves[node])
        else:
            stack.extend(node.all_input_nodes)
    return found


class GenericWriter(Writer):
    """Writes the values that chunked loops over the region make."""

    def __init__(
        self, *common: Any, analysis: RowAnalysis, loops: list[Loop], register: Callable[[fx.GraphModule], str]
    ) -> None:
        super().__init__(*common)
        self.analysis, self.loops, self.register = analysis, loops, register

    def made_by_operator(self, node: fx.Node) -> fx.Node | None:
        if node not in self.part.cuts:
            return None
        loop = next(x for x in self.loops if self.part in x.exits and node in x.build.outputs)
        if loop.build not in self.made:
            self.made[loop.build] = self._run(loop)
        flat = self.call(operator.getitem, self.made[loop.build], list(loop.build.outputs).index(node))
        return self._restored(node, flat)

    def _run(self, loop: Loop) -> fx.Node:
        for other in loop.exits:  # what the others' inputs are made of is here already: the loop was shared for that
            for aten_node, dynamo in other.leaves.items():
                self.env.setdefault(aten_node, dynamo)
        rows = [self._row_input(spec) for spec in loop.build.rows]
        whole = [self._whole_input(spec) for spec in loop.build.whole]
        chunk = loop.build.finish()
        frozen = loop.build.frozen(chunk) if self.part.differentiable else range(len(rows) + len(whole))
        inputs = [self.call(aten.detach.default, n) if i in frozen else n for i, n in enumerate([*rows, *whole])]
        rows, whole = inputs[: len(rows)], inputs[len(rows) :]
        key = self.register(chunk)
        how = (self.plan.chunk_rows, self.plan.accumulate, self.plan.compiled)
        return self.call(torch.ops.fuse_losses.chunked_rows.default, key, rows, whole, *how)

    def _row_input(self, spec: RowInput) -> fx.Node:
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

    def _whole_input(self, spec: WholeInput) -> fx.Node:
        if isinstance(spec.source, Product):
            return cast(fx.Node, self.weight_of(spec.source) if spec.part == "weight" else self.bias_of(spec.source))
        x = self.ref(spec.source)
        if spec.part == "number":  # a 0-d tensor takes part in no promotion, like the number
            kind = torch.int64 if isinstance(spec.source.meta["val"], torch.SymInt) else torch.float64
            device = value(self.region.products[0].node).device
            return self.call(aten.scalar_tensor.default, x, dtype=kind, device=device)
        return self.call(aten.squeeze.dims, x, list(spec.squeezed)) if spec.squeezed else x

    # ------------------------------------------------------------------------- from [N, inner...] to the value's shape

    def _restored(self, node: fx.Node, flat: fx.Node) -> fx.Node:
        loss = nll_behind(node)
        if loss is not None:
            return self._nll(node, loss, flat)
        known = self.analysis.values[node]
        if not isinstance(known, Rowed):
            return self._sum(node, flat)
        return self._unflattened(flat, known.labels, sizes(node))

    def _unflattened(self, flat: fx.Node, labels: str, shape: tuple[Any, ...]) -> fx.Node:
        first = [d for d, label in enumerate(labels) if label == "r"]
        rest = [d for d, label in enumerate(labels) if label != "r"]
        out = self.call(aten.reshape.default, flat, self.shape([shape[d] for d in first + rest]))
        order = first + rest
        return (
            out
            if order == sorted(order)
            else self.call(aten.permute.default, out, [order.index(d) for d in sorted(order)])
        )

    def _sum(self, node: fx.Node, flat: fx.Node) -> fx.Node:
        """Sums over rows of the sums inside them; a mean divides by all that it summed."""
        source = cast(fx.Node, node.args[0])
        labels, shape = cast(Rowed, self.analysis.values[source]).labels, sizes(source)
        inner, rows = row_sum_dims(self.analysis, node)
        left = [d for d in range(len(labels)) if d not in inner]
        out = self._unflattened(flat, "".join(labels[d] for d in left), tuple(shape[d] for d in left))
        out = self.call(aten.sum.dim_IntList, out, [left.index(d) for d in rows])
        if node.target in (aten.mean.default, aten.mean.dim):
            count = self.numel([shape[d] for d in (*inner, *rows)])
            out = self.call(aten.div.Tensor, out, count)
        out = self.call(aten.reshape.default, out, self.shape(sizes(node)))
        return self.call(aten.to.dtype, out, node.meta["val"].dtype)

    def _nll(self, node: fx.Node, loss: fx.Node, flat: fx.Node) -> fx.Node:
        target, weight = self.ref(cast(fx.Node, loss.args[1])), loss.args[2]
        reduction, ignore_index = argument(loss, "reduction"), argument(loss, "ignore_index")
        if reduction == 0:
            return self.call(aten.reshape.default, flat, self.shape(sizes(node)))
        dtype = node.meta["val"].dtype
        total = self.call(aten.sum.default, flat, dtype=torch.promote_types(dtype, torch.float32))
        if reduction == 1:
            valid = self.call(aten.ne.Scalar, target, ignore_index)
            if weight is None:
                count = self.call(aten.sum.default, valid)
            else:  # the mean is over the weights of the targets
                safe = self.call(aten.mul.Tensor, target, valid)
                picked = self.call(aten.index.Tensor, self.ref(cast(fx.Node, weight)), [safe])
                count = self.call(aten.sum.default, self.call(aten.mul.Tensor, picked, valid))
            total = self.call(aten.div.Tensor, total, count)
        return self.call(aten.to.dtype, total, dtype)
