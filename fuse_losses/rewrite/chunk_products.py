"""Products that sum over the vocabulary, in the graph of a chunk."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from fuse_losses.head.sizes import same, sizes
from fuse_losses.rewrite.chunk_graph import ChunkGraph, emitter
from fuse_losses.rewrite.chunk_inputs import RowInput, Steps, WholeInput

aten = torch.ops.aten


@emitter(aten.mm.default, aten.mv.default)
def _product(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    left, right = cast("tuple[fx.Node, fx.Node]", node.args[:2])
    if build.analysis.depends(left):
        made, matrix = build.emit(left, steps), build.whole_input(WholeInput(right))
        return build.call(aten.matmul.default, made, matrix)
    made, matrix = build.emit(right, steps), build.whole_input(WholeInput(left))
    return build.call(aten.linear.default, made, matrix)


@emitter(aten.addmm.default)
def _addmm(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    bias, left, right = cast("tuple[fx.Node, fx.Node, fx.Node]", node.args[:3])
    made = build.emit(left, steps)
    plain = [build.whole_input(WholeInput(a)) for a in (bias, right)]
    return build.call(aten.addmm.default, plain[0], made, plain[1], **node.kwargs)


@emitter(aten.bmm.default)
def _batched(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    left, right = cast("tuple[fx.Node, fx.Node]", node.args[:2])
    labels = build.labels(node)
    if labels[0] == "r":
        a, b = (_of_each_row(build, operand, labels, steps) for operand in (left, right))
        return build.call(aten.matmul.default, a, b)
    if build.analysis.depends(left):  # [1, rows, V] @ [1, V, D]
        made = build.emit(left, steps)  # [C, 1, V]
        return build.call(aten.matmul.default, made, _matrix(build, right))
    made = build.emit(right, steps)  # [C, 1, V] of [1, V, rows]
    return build.call(aten.linear.default, made, _matrix(build, left))


def _matrix(build: ChunkGraph, node: fx.Node) -> fx.Node:
    return build.call(aten.select.int, build.whole_input(WholeInput(node)), 0, 0)


def _of_each_row(build: ChunkGraph, node: fx.Node, labels: str, steps: Steps) -> Any:
    if build.analysis.depends(node):
        return build.emit(node, steps)
    if node.target is aten.expand.default and same(sizes(node.args[0]), (1, *sizes(node)[1:])):  # one for all rows
        return _matrix(build, cast(fx.Node, node.args[0]))
    return build.row_input(RowInput(node, steps, labels, sizes(node)))
