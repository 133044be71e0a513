"""Labels of products that sum over the vocabulary: probabilities with a matrix, two values of the same rows."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from fuse_losses.graph.rows import RowAnalysis, Rowed, Value, lose, name_of, rule
from fuse_losses.head.sizes import hint, same, sizes

aten = torch.ops.aten


def _width(size: object, vocab: object) -> str:
    """The label of a dim that a product makes: another vocabulary, or the few numbers that it was summed to."""
    new, old = hint(size), hint(vocab)
    return "i" if new is not None and old is not None and 2 * new <= old else "v"


@rule(aten.mm.default, aten.mv.default)
def _product(state: RowAnalysis, node: fx.Node) -> Value:
    """probs @ W, W @ probs.T, probs @ values."""
    left, right = cast("tuple[fx.Node, fx.Node]", node.args[:2])
    a, b = state.rowed(left), state.rowed(right)
    if a is not None and b is None and a.labels[1] != "r" and not state.depends(right):
        made = "" if node.target is aten.mv.default else _width(sizes(right)[1], sizes(right)[0])
        return Rowed(a.labels[0] + made)
    if b is not None and a is None and len(b.labels) == 2 and b.labels[0] != "r" and not state.depends(left):
        return Rowed(_width(sizes(left)[0], sizes(left)[1]) + b.labels[1])
    return lose(node, "rows_mix", f"{name_of(node)} multiplies rows with each other, or sums over them")


@rule(aten.addmm.default)
def _addmm(state: RowAnalysis, node: fx.Node) -> Value:
    bias, left, right = cast("tuple[fx.Node, fx.Node, fx.Node]", node.args[:3])
    a = state.rowed(left)
    plain = not state.depends(bias) and not state.depends(right)
    if a is None or a.labels[1] == "r" or not plain or len(sizes(bias)) != 1:
        return lose(node, "rows_mix", "addmm multiplies rows with each other, or adds something else to them")
    return Rowed(a.labels[0] + _width(sizes(right)[1], sizes(right)[0]))


@rule(aten.bmm.default)
def _batched(state: RowAnalysis, node: fx.Node) -> Value:
    """One product per row, or a batch of one."""
    left, right = cast("tuple[fx.Node, fx.Node]", node.args[:2])
    made = (_width(sizes(left)[1], sizes(left)[2]), _width(sizes(right)[2], sizes(right)[1]))
    if all(_one_per_row(state, operand, kept) for operand, kept in ((left, 1), (right, 2))):
        return Rowed("r" + made[0] + made[1])
    if same(sizes(node)[0], 1):
        a, b = state.rowed(left), state.rowed(right)
        if a is not None and a.labels[1] == "r" and a.labels[2] != "r" and not state.depends(right):
            return Rowed("ir" + made[1])
        if b is not None and b.labels[2] == "r" and b.labels[1] != "r" and not state.depends(left):
            return Rowed("i" + made[0] + "r")
    return lose(node, "rows_mix", "bmm multiplies rows with each other, or sums over them")


def _one_per_row(state: RowAnalysis, operand: fx.Node, kept: int) -> bool:
    """True if the batch runs over rows; of what is plain a row has only a vector."""
    rowed = state.rowed(operand)
    if rowed is None:
        return not state.depends(operand) and same(sizes(operand)[kept], 1)
    return rowed.labels[0] == "r" and "r" not in rowed.labels[1:]
