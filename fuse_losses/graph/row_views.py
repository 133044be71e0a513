"""Labels of views: reshapes, slices, joins of values behind the logits."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from fuse_losses.graph.rows import VIEWS, RowAnalysis, Rowed, Value, argument, lose, name_of, relabelled, rule
from fuse_losses.head.sizes import dim_of, hint, same, sizes

aten = torch.ops.aten


def view_groups(old: tuple[Any, ...], new: tuple[Any, ...]) -> list[tuple[list[int], list[int]]] | None:
    """Match the dims of a reshape: groups of old dims whose product is that of a group of new dims; None if unknown."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        a, b = old[i] if left else 1, new[j] if right else 1
        i, j = i + len(left), j + len(right)
        while not same(a, b):
            ha, hb = hint(a), hint(b)
            if ha is None or hb is None or ha == hb:
                return None
            if ha < hb and i < len(old):
                left, a, i = [*left, i], a * old[i], i + 1
            elif hb < ha and j < len(new):
                right, b, j = [*right, j], b * new[j], j + 1
            else:
                return None
        groups.append((left, right))
    return groups


@rule(*VIEWS)
def _view(state: RowAnalysis, node: fx.Node) -> Value:
    source = state.rowed(node.args[0])
    assert source is not None
    old, new = sizes(node.args[0]), sizes(node)
    groups = view_groups(old, new)
    if groups is None:
        return lose(node, "rows_mix", "the logits are reshaped across the vocabulary")
    labels = ["i"] * len(new)
    for left, right in groups:
        kinds = {source.labels[d] for d in left if not same(old[d], 1)} or {source.labels[d] for d in left} or {"i"}
        if "r" in kinds and len(kinds) > 1:
            return lose(node, "rows_mix", "the logits are reshaped across the vocabulary")
        for d in right:
            labels[d] = "r" if "r" in kinds else "v" if "v" in kinds and not same(new[d], 1) else "i"
    return Rowed("".join(labels))


@rule(aten.unsqueeze.default)
def _unsqueeze(state: RowAnalysis, node: fx.Node) -> Value:
    source = state.rowed(node.args[0])
    assert source is not None
    dim = dim_of(node.args[1], node)
    return Rowed(source.labels[:dim] + "i" + source.labels[dim:])


def squeezed(node: fx.Node) -> list[int]:
    """The dims that a squeeze removes."""
    old = sizes(node.args[0])
    if node.target is aten.squeeze.default:
        return [d for d, s in enumerate(old) if same(s, 1)]
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    return sorted({cast(int, d) % len(old) for d in dims if same(old[cast(int, d) % len(old)], 1)}) if old else []


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(state: RowAnalysis, node: fx.Node) -> Value:
    source, gone = state.rowed(node.args[0]), squeezed(node)
    assert source is not None
    if len(sizes(node.args[0])) - len(gone) != len(sizes(node)):
        return lose(node, "rows_mix", "a squeeze depends on a symbolic size")
    return Rowed("".join(label for d, label in enumerate(source.labels) if d not in gone))


def permutation(node: fx.Node) -> list[int]:
    """The order of a permute, transpose or t: new dim i is old dim order[i]."""
    rank = len(sizes(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [cast(int, d) % rank for d in cast("list[int]", node.args[1])]
    if rank > 1:
        a, b = (0, 1) if node.target is aten.t.default else (dim_of(node.args[1], node), dim_of(node.args[2], node))
        order[a], order[b] = order[b], order[a]
    return order


@rule(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(state: RowAnalysis, node: fx.Node) -> Value:
    source = state.rowed(node.args[0])
    assert source is not None
    return Rowed("".join(source.labels[d] for d in permutation(node)))


@rule(aten.expand.default)
def _expand(state: RowAnalysis, node: fx.Node) -> Value:
    source = state.rowed(node.args[0])
    assert source is not None
    old, new = sizes(node.args[0]), sizes(node)
    offset = len(new) - len(old)
    for d, label in enumerate(source.labels):
        if label == "r" and not same(old[d], new[d + offset]):
            return lose(node, "rows_mix", "expand repeats rows")
    return Rowed("i" * offset + source.labels)


@rule(aten.slice.Tensor)
def _slice(state: RowAnalysis, node: fx.Node) -> Value:
    source, dim = state.rowed(node.args[0]), dim_of(argument(node, "dim"), node.args[0])
    assert source is not None
    old, new = hint(sizes(node.args[0])[dim]), hint(sizes(node)[dim])
    few = old is not None and new is not None and new * 8 <= old
    return Rowed(relabelled(source.labels, dim, "i")) if source.labels[dim] == "v" and few else source


@rule(aten.select.int)
def _select(state: RowAnalysis, node: fx.Node) -> Value:
    source, dim = state.rowed(node.args[0]), dim_of(node.args[1], node.args[0])
    assert source is not None
    return Rowed(source.labels[:dim] + source.labels[dim + 1 :])


def overwrites(node: fx.Node) -> bool:
    """True if a slice_scatter leaves nothing of what it writes to."""
    return same(sizes(node.args[0]), sizes(node.args[1]))


@rule(aten.slice_scatter.default)
def _slice_scatter(state: RowAnalysis, node: fx.Node) -> Value:
    source, dim = state.rowed(node.args[0]), dim_of(argument(node, "dim"), node.args[0])
    part = state.rowed(node.args[1])
    if overwrites(node) and part is not None:
        return part
    if source is None or source.labels[dim] == "r":
        return lose(node, "rows_mix", "some rows of the logits are written to")
    if part is not None and any((a == "r") != (b == "r") for a, b in zip(part.labels, source.labels, strict=True)):
        return lose(node, "rows_mix", "slices with their rows elsewhere are written to the logits")
    return source


@rule(aten.cat.default, aten.stack.default)
def _join(state: RowAnalysis, node: fx.Node) -> Value:
    parts = cast("list[fx.Node]", node.args[0])
    dim = dim_of(argument(node, "dim"), node)
    found = [r for r in map(state.rowed, parts) if r is not None]  # the others are plain, of the same rows
    labels = found[0].labels
    if len({r.labels for r in found}) != 1 or any(len(sizes(p)) != len(labels) for p in parts):
        return lose(node, "rows_mix", f"{name_of(node)} joins the logits with something else")
    if node.target is aten.stack.default:
        return Rowed(labels[:dim] + "i" + labels[dim:])
    if labels[dim] == "r":
        return lose(node, "rows_mix", "rows are concatenated")
    return Rowed(relabelled(labels, dim, "v"))
