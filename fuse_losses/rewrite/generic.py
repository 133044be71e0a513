"""Exits that have no form in the algebra, written as one operator that runs the region chunk by chunk."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.graph.rows import Rowed, argument
from fuse_losses.head.sizes import sizes
from fuse_losses.rewrite.chunk_graph import ChunkGraph, nll_behind
from fuse_losses.rewrite.joins import Schedule, leaves_of
from fuse_losses.rewrite.slices import ExitSlice
from fuse_losses.rewrite.writer import Writer

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Loop:
    """One run over the rows: a chunk's graph and the exits whose values it makes."""

    build: ChunkGraph
    exits: tuple[ExitSlice, ...]

    @property
    def leaves(self) -> list[fx.Node]:
        return [*self.build.operands, *(n for part in self.exits for n in leaves_of(part, self.build.reads))]


@dataclass(frozen=True, eq=False)
class Run:
    """Loops that are one function of different rows: they run as one, over the rows of the first, the second, ..."""

    loops: tuple[Loop, ...]


def loops(slices: Sequence[ExitSlice], graph: fx.Graph) -> list[Run]:
    """Share a loop between exits with the same rows and gradient state, and a run between loops of one function.

    Each only if the first of the exits has all that it reads: nothing of it is made, or written to, only behind.
    """
    schedule = Schedule(graph, slices)
    found: list[Loop] = []
    for part in slices:
        for node, build in part.cuts.items():
            for i, loop in enumerate(found):
                first = loop.exits[0]
                alike = first.differentiable == part.differentiable and bool(loop.build.row_set & build.row_set)
                if alike and schedule.ready(first, part, [*build.operands, *leaves_of(part, build.reads)]):
                    loop.build.add_output(node)
                    found[i] = Loop(loop.build, (*loop.exits, part))
                    break
            else:
                found.append(Loop(build, (part,)))
    runs: dict[Any, Run] = {}
    for loop in found:
        key = (loop.exits[0].differentiable, loop.build.function) if len(found) > 1 else ()
        known = runs.get(key)
        if known is not None and all(schedule.ready(known.loops[0].exits[0], p, loop.leaves) for p in loop.exits):
            runs[key] = Run((*known.loops, loop))
        else:
            runs[key if known is None else loop] = Run((loop,))
    return list(runs.values())


class GenericWriter(Writer):
    """Writes the values that chunked loops over the region make."""

    def __init__(self, *common: Any, loops: list[Run], register: Callable[[fx.GraphModule], str]) -> None:
        super().__init__(*common)
        self.runs, self.register = loops, register

    def made_by_operator(self, node: fx.Node) -> fx.Node | None:
        if node not in self.part.cuts:
            return None
        for run in self.runs:
            for i, loop in enumerate(run.loops):
                if self.part in loop.exits and node in loop.build.outputs:
                    return self._restored(node, self._flat(run, i, list(loop.build.outputs).index(node)))
        raise LookupError(f"no loop makes {node}")

    def _flat(self, run: Run, which: int, output: int) -> fx.Node:
        """One output of one loop, [N, inner...]."""
        if run not in self.made:
            self.made[run] = self._run(run)
        flat = self.call(operator.getitem, self.made[run], output)
        if len(run.loops) == 1:
            return flat
        counts = [loop.build.count for loop in run.loops]
        start = sum(counts[:which])
        return self.call(aten.slice.Tensor, flat, 0, start, start + counts[which])

    def _run(self, run: Run) -> fx.Node:
        for loop in run.loops:
            for part in loop.exits:
                self.also_reads(part, leaves_of(part, loop.build.reads))
        build = run.loops[0].build
        each = [[self.row_input(spec) for spec in loop.build.rows] for loop in run.loops]
        rows = each[0] if len(each) == 1 else [self.call(aten.cat.default, list(r)) for r in zip(*each, strict=True)]
        whole = [self.whole_input(spec) for spec in build.whole]
        chunk = build.finish()
        frozen = build.frozen(chunk) if self.part.differentiable else range(len(rows) + len(whole))
        inputs = [self.call(aten.detach.default, n) if i in frozen else n for i, n in enumerate([*rows, *whole])]
        rows, whole = inputs[: len(rows)], inputs[len(rows) :]
        key = self.register(chunk)
        how = (self.plan.chunk_rows, self.plan.accumulate, self.plan.compiled)
        return self.call(torch.ops.fuse_losses.chunked_rows.default, key, rows, whole, *how)

    # ------------------------------------------------------------------------- from [N, inner...] to the value's shape

    def _restored(self, node: fx.Node, flat: fx.Node) -> fx.Node:
        loss = nll_behind(node)
        if loss is not None:
            return self._nll(node, loss, flat)
        known = self.analysis.values[node]
        if not isinstance(known, Rowed):
            return self.sum_of_rows(node, flat)
        return self.unflattened(flat, known.labels, sizes(node))

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
