"""Views in the graph of a chunk: those of rows are pushed out to the inputs, the others act on what a row holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.graph import row_views as V
from fuse_losses.graph.rows import VIEWS, argument
from fuse_losses.head.algebra import RowStep
from fuse_losses.head.sizes import dim_of, same, sizes
from fuse_losses.rewrite.chunk_graph import ChunkGraph, constant, emitter, row_sizes
from fuse_losses.rewrite.chunk_inputs import Steps

aten = torch.ops.aten


@emitter(*VIEWS)
def _view(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source = cast(fx.Node, node.args[0])
    old, new = sizes(source), sizes(node)
    before, after = build.labels(source), build.labels(node)
    old_rows, new_rows = row_sizes(before, old), row_sizes(after, new)
    if not same(old_rows, new_rows):
        wanted = tuple(s for s, label in zip(cast("list[Any]", node.args[1]), after, strict=True) if label == "r")
        steps = (RowStep("reshape", wanted, new_rows), *steps)
    made = build.emit(source, steps)
    inner_old = [d for d, label in enumerate(before) if label != "r"]
    inner_new = [d for d, label in enumerate(after) if label != "r"]
    if same(tuple(old[d] for d in inner_old), tuple(new[d] for d in inner_new)):
        return made
    shape: list[Any] = []
    for left, right in V.view_groups(old, new) or []:
        for d in right:
            if after[d] == "r":
                continue
            twin = next((k for k in left if not isinstance(new[d], int) and same(old[k], new[d])), None)
            found = None if twin is None else build.call(aten.sym_size.int, made, build.inner_dim(source, twin))
            shape.append(constant(new[d], "a reshape") if found is None else found)
    return build.call(aten.reshape.default, made, [-1, *shape])


@emitter(aten.unsqueeze.default)
def _unsqueeze(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    dim = dim_of(node.args[1], node)
    return build.call(
        aten.unsqueeze.default, build.emit(cast(fx.Node, node.args[0]), steps), build.inner_dim(node, dim)
    )


@emitter(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source = cast(fx.Node, node.args[0])
    labels, gone = build.labels(source), V.squeezed(node)
    row_at = {d: i for i, d in enumerate(d for d, label in enumerate(labels) if label == "r")}
    left = list(row_sizes(labels, sizes(source)))
    dropped: list[RowStep] = []
    for d in reversed(gone):
        if labels[d] == "r":
            del left[row_at[d]]
            dropped.append(RowStep("select", (row_at[d], 0), tuple(left)))
    made = build.emit(source, (*dropped, *steps))
    for d in reversed(gone):
        if labels[d] != "r":
            made = build.call(aten.squeeze.dim, made, build.inner_dim(source, d))
    return made


@emitter(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source = cast(fx.Node, node.args[0])
    labels, order = build.labels(source), V.permutation(node)
    rank_of_row = {d: i for i, d in enumerate(d for d in range(len(labels)) if labels[d] == "r")}
    rows = tuple(rank_of_row[d] for d in order if labels[d] == "r")
    if rows != tuple(sorted(rows)):
        steps = (RowStep("permute", rows, row_sizes(build.labels(node), sizes(node))), *steps)
    made = build.emit(source, steps)
    inner = [build.inner_dim(source, d) for d in order if labels[d] != "r"]
    return made if inner == sorted(inner) else build.call(aten.permute.default, made, [0, *inner])


@emitter(aten.expand.default)
def _expand(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source = cast(fx.Node, node.args[0])
    made = build.emit(source, steps)
    offset = len(sizes(node)) - len(sizes(source))
    for _ in range(offset):
        made = build.call(aten.unsqueeze.default, made, 1)
    shape: list[Any] = [-1]
    for d, label in enumerate(build.labels(node)):
        if label != "r":
            kept = d >= offset and same(sizes(source)[d - offset], sizes(node)[d])
            shape.append(-1 if kept else build.size(sizes(node)[d], "an expand"))
    return build.call(aten.expand.default, made, shape)


@emitter(aten.slice.Tensor, aten.select.int)
def _slice(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source = cast(fx.Node, node.args[0])
    labels = build.labels(source)
    dim = dim_of(argument(node, "dim"), source)
    if node.target is aten.slice.Tensor:
        kind, args = "slice", (argument(node, "start"), argument(node, "end"), argument(node, "step"))
    else:
        kind, args = "select", (argument(node, "index"),)
    if labels[dim] == "r":
        at = sum(label == "r" for label in labels[:dim])
        rows = row_sizes(build.labels(node), sizes(node))
        return build.emit(source, (RowStep(kind, (at, *args), rows), *steps))
    fixed = [constant(a, "a slice of the vocabulary") for a in args]
    target = cast("Callable[..., Any]", node.target)
    return build.call(target, build.emit(source, steps), build.inner_dim(source, dim), *fixed)


@emitter(aten.slice_scatter.default)
def _slice_scatter(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    source, part = cast(fx.Node, node.args[0]), cast(fx.Node, node.args[1])
    if V.overwrites(node) and build.analysis.depends(part):
        return build.emit(part, steps)
    labels = build.labels(source)
    dim = dim_of(argument(node, "dim"), source)
    fixed = [constant(argument(node, name), "a slice of the vocabulary") for name in ("start", "end", "step")]
    shape = sizes(part)
    written = build.aligned(part, labels[len(labels) - len(shape) :], shape, steps)
    return build.call(
        aten.slice_scatter.default, build.emit(source, steps), written, build.inner_dim(source, dim), *fixed
    )


@emitter(aten.cat.default, aten.stack.default)
def _join(build: ChunkGraph, node: fx.Node, steps: Steps) -> fx.Node:
    parts = cast("list[fx.Node]", node.args[0])
    labels = next(build.labels(p) for p in parts if build.analysis.depends(p))
    made = [build.rowwise(p, labels, steps) for p in parts]
    dim = dim_of(argument(node, "dim"), node)
    return build.call(cast("Callable[..., Any]", node.target), made, build.inner_dim(node, dim))
