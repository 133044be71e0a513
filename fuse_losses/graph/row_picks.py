"""Labels of what picks or moves rows or classes: indices, flips, rolls."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from fuse_losses.graph.rows import RowAnalysis, Rowed, Value, argument, lose, rule
from fuse_losses.head.picks import pick_of
from fuse_losses.head.sizes import dim_of, hint, product, same, sizes

aten = torch.ops.aten


@rule(aten.index.Tensor, aten.index_select.default)
def _index(state: RowAnalysis, node: fx.Node) -> Value:
    """z[mask] picks rows, z[..., ids] some classes of every row, z[rows, y] one class of each of some rows."""
    source, pick = state.rowed(node.args[0]), pick_of(node)
    if source is None or pick is None:
        return lose(node, "rows_mix", "an index picks rows by a mask or together with a dim that is no neighbour")
    here = source.labels[pick.first : pick.first + len(pick.indices)]
    dependent = [i for i in pick.indices if state.depends(i)]
    if "v" in here and pick.of_one_mask:
        return lose(node, "rows_mix", "a mask over the vocabulary picks single values")
    if not dependent and set(here) == {"r"}:
        return Rowed(pick.replaced(source.labels, "r"))
    if not dependent and len(here) == 1:
        new, old = hint(product(sizes(pick.indices[0]))), hint(sizes(node.args[0])[pick.first])
        few = new is not None and old is not None and new * 8 <= old
        return Rowed(pick.replaced(source.labels, "i" if few else "v"))
    rows = len(here) - 1
    spanned = pick.spanned(rows, node) or pick.in_order(rows, node)
    if here == "r" * rows + "v" and source.labels.count("r") == len(source.labels) - 1 and spanned:
        found = Rowed(pick.replaced(source.labels, "r"))
        classes = pick.indices[-1]
        own = state.rowed(classes)
        if not dependent or (dependent == [classes] and own == found and same(sizes(classes), sizes(node))):
            return found
    return lose(node, "rows_mix", "an index made from the logits picks rows, or mixes them with classes")


@rule(aten.index_put.default)
def _index_put(state: RowAnalysis, node: fx.Node) -> Value:
    """z[rows, y] = v: one class of every row is written to."""
    source, pick, values = state.rowed(node.args[0]), pick_of(node), cast(fx.Node, node.args[2])
    labels = "" if source is None else source.labels
    rows = len(labels) - 1
    if source is None or pick is None or labels != "r" * rows + "v" or not pick.in_every_row(node):
        return lose(node, "rows_mix", "some rows of the logits are written to")
    for made in (pick.indices[-1], values):
        own = state.rowed(made)
        if state.depends(made) and (own is None or own.labels != "r" * rows):
            return lose(node, "rows_mix", "what is written to the logits has its rows elsewhere")
    return source


@rule(aten.flip.default)
def _flip(state: RowAnalysis, node: fx.Node) -> Value:
    source = state.rowed(node.args[0])
    assert source is not None
    return source


@rule(aten.roll.default)
def _roll(state: RowAnalysis, node: fx.Node) -> Value:
    source = state.rowed(node.args[0])
    if source is None or not argument(node, "dims"):
        return lose(node, "rows_mix", "the logits are rolled as if they were flat")
    return source


def split_dims(node: fx.Node, labels: str) -> tuple[list[int], list[int]]:
    """Positions, in the dims argument of a flip or roll, of dims that are rows and of others."""
    dims = [dim_of(d, node) for d in argument(node, "dims")]
    at_rows = [i for i, d in enumerate(dims) if labels[d] == "r"]
    return at_rows, [i for i in range(len(dims)) if i not in at_rows]
