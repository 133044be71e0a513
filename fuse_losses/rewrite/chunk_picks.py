"""What picks or moves rows or classes, in the graph of a chunk: rows are picked and moved in the inputs."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from fuse_losses.graph import row_picks as P
from fuse_losses.graph.rows import argument
from fuse_losses.head.algebra import RowStep
from fuse_losses.head.picks import pick_of
from fuse_losses.head.sizes import dim_of, same, sizes
from fuse_losses.rewrite.chunk_graph import ChunkGraph, constant, emitter, row_sizes
from fuse_losses.rewrite.chunk_inputs import RowInput, Steps, WholeInput

aten = torch.ops.aten


@emitter(aten.index.Tensor, aten.index_select.default)
def _index(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source, pick = cast(fx.Node, node.args[0]), pick_of(node)
    assert pick is not None
    labels = build.labels(source)
    rows = [d for d in pick.dims if labels[d] == "r"]
    if rows and not (len(rows) < len(pick.indices) and pick.in_order(len(rows), node)):
        entries = [pick.indices[d - pick.first] if d in rows else None for d, x in enumerate(labels) if x == "r"]
        step = RowStep("index", tuple(entries), row_sizes(build.labels(node), sizes(node)))
        made = build.emit(source, (step, *steps))
    else:
        made = build.emit(source, steps)
    if len(rows) == len(pick.indices):
        return made
    classes = pick.indices[-1]
    if not rows:
        ids = build.whole_input(WholeInput(classes))
        return build.call(aten.index.Tensor, made, [*[None] * build.inner_dim(source, pick.first), ids])
    out = build.labels(node)
    if build.analysis.depends(classes):
        target = build.rowwise(classes, out, steps)
    else:  # which may be broadcast
        target = build.row_input(RowInput(classes, steps, out, sizes(node)))
    return build.call(aten.squeeze.dim, build.call(aten.gather.default, made, 1, _column(build, made, target)), 1)


def _column(build: ChunkGraph, made: fx.Node, target: fx.Node) -> fx.Node:
    """The classes [C, 1] of the targets [C] of rows [C, V]; negative ones count from the end."""
    from_end = build.call(aten.add.Tensor, target, build.call(aten.sym_size.int, made, 1))
    column = build.call(aten.where.self, build.call(aten.lt.Scalar, target, 0), from_end, target)
    return build.call(aten.unsqueeze.default, column, 1)


@emitter(aten.index_put.default)
def _index_put(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source, pick, values = cast(fx.Node, node.args[0]), pick_of(node), cast(fx.Node, node.args[2])
    assert pick is not None
    made, rows = build.emit(source, steps), build.labels(source)[:-1]
    column = _column(build, made, build.rowwise(pick.indices[-1], rows, steps))
    if same(sizes(values), sizes(source)[:-1]):
        written = build.rowwise(values, rows, steps)
    else:
        written = build.call(aten.reshape.default, build.whole_input(WholeInput(values)), [])
        written = build.call(aten.expand.default, written, [build.call(aten.sym_size.int, made, 0)])
    write = aten.scatter_add.default if argument(node, "accumulate") else aten.scatter.src
    return build.call(write, made, 1, column, build.call(aten.unsqueeze.default, written, 1))


@emitter(aten.flip.default)
def _flip(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source = cast(fx.Node, node.args[0])
    labels, dims = build.labels(source), argument(node, "dims")
    at_rows, others = P.split_dims(node, labels)
    if at_rows:
        moved = tuple(_row_dim(labels, dim_of(dims[i], node)) for i in at_rows)
        steps = (RowStep("flip", (moved,), row_sizes(labels, sizes(node))), *steps)
    made = build.emit(source, steps)
    inner = [build.inner_dim(source, dim_of(dims[i], node)) for i in others]
    return build.call(aten.flip.default, made, inner) if inner else made


@emitter(aten.roll.default)
def _roll(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source = cast(fx.Node, node.args[0])
    labels, dims = build.labels(source), argument(node, "dims")
    shifts = [constant(s, "a roll") for s in argument(node, "shifts")]
    at_rows, others = P.split_dims(node, labels)
    if at_rows:
        moved = tuple(_row_dim(labels, dim_of(dims[i], node)) for i in at_rows)
        by = tuple(shifts[i] for i in at_rows)
        steps = (RowStep("roll", (by, moved), row_sizes(labels, sizes(node))), *steps)
    made = build.emit(source, steps)
    inner = [build.inner_dim(source, dim_of(dims[i], node)) for i in others]
    return build.call(aten.roll.default, made, [shifts[i] for i in others], inner) if inner else made


def _row_dim(labels: str, dim: int) -> int:
    """Where a dim that is a row is among the rows."""
    return labels[:dim].count("r")
