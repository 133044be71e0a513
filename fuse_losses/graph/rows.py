"""Which dims of every value behind the logits run over rows, which over the vocabulary, and where rows mix.

A label per dim: "r" a row, "v" the vocabulary (or an order of it), "i" anything else (a size of one, the K of a top-k).
Dims are followed through every operator by what it does to them, never recognised by their size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.head.sizes import SIZES, dim_of, same, sizes
from fuse_losses.head.table import OperatorTable

aten = torch.ops.aten


@dataclass(frozen=True)
class Rowed:
    """Rows are kept apart; `labels` has one letter per dim."""

    labels: str

    @property
    def wide(self) -> bool:
        return "v" in self.labels


@dataclass(frozen=True)
class Loose:
    """Made from rows, the vocabulary gone, rows perhaps combined: computed behind the region, not inside."""


@dataclass(frozen=True)
class Lost:
    """The vocabulary is (or may be) alive and the rows cannot be kept apart: a decline code, why, and where."""

    code: str
    reason: str
    node: fx.Node


Value = Rowed | Loose | Lost
Rule = Callable[["RowAnalysis", fx.Node], Value]
RULES: OperatorTable[Rule] = OperatorTable()  # how an operator labels its result
rule = RULES.rule

UNARY = (
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
)
BROADCAST = (
    aten.masked_fill.Tensor,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.where.Scalar,
    aten.fill.Scalar,
    aten.fill.Tensor,
)
# dims argument first, keepdim second; every other argument stays as it is
REDUCE = (
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.logsumexp.default,
    aten.prod.dim_int,
    aten.any.dim,
    aten.all.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.kthvalue.default,
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
    aten.linalg_vector_norm.default,
)
SUMS = (aten.sum.default, aten.mean.default, aten.sum.dim_IntList, aten.mean.dim)
# computed along one dim, which stays
ALONG = (
    aten._softmax.default,
    aten._log_softmax.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
)
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass
class RowAnalysis:
    """values: what is known of each node that depends on the logits; other nodes are plain."""

    values: dict[fx.Node, Value]

    def rowed(self, node: object) -> Rowed | None:
        found = self.values.get(node) if isinstance(node, fx.Node) else None
        return found if isinstance(found, Rowed) else None

    def depends(self, node: object) -> bool:
        return isinstance(node, fx.Node) and node in self.values


def analyse(graph: fx.Graph, sources: Mapping[fx.Node, int]) -> RowAnalysis:
    """Label the values of `graph`; `sources` are the logits with the position of their vocabulary."""
    state = RowAnalysis({})
    for node, vocab_dim in sources.items():
        rank = len(sizes(node))
        state.values[node] = Rowed("".join("v" if i == vocab_dim else "r" for i in range(rank)))
    for node in graph.nodes:
        if node.op != "call_function" or node.target in SIZES:
            continue
        inputs = [a for a in node.all_input_nodes if a in state.values]
        if inputs:
            state.values[node] = _value(state, node, inputs)
    return state


def _value(state: RowAnalysis, node: fx.Node, inputs: list[fx.Node]) -> Value:
    values = [state.values[a] for a in inputs]
    lost = next((v for v in values if isinstance(v, Lost)), None)
    if lost is not None:
        return lost
    wide = any(isinstance(v, Rowed) and v.wide for v in values)
    if any(isinstance(v, Loose) for v in values):
        return (
            lose(node, "rows_mix", f"{name_of(node)} combines the vocabulary with a value of several rows")
            if wide
            else Loose()
        )
    found = RULES.get(node.target)
    if found is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        found = _pointwise
    value = found(state, node) if found is not None else lose(node, "rows_mix", f"{name_of(node)} may mix rows")
    # what has lost the vocabulary already may do what it likes: it is computed behind the region
    return Loose() if isinstance(value, Lost) and not wide else value


def name_of(node: fx.Node) -> str:
    return str(node.target)


def relabelled(labels: str, dim: int, label: str) -> str:
    return labels[:dim] + label + labels[dim + 1 :]


def lose(node: fx.Node, code: str, reason: str) -> Lost:
    return Lost(code, reason, node)


def argument(node: fx.Node, name: str) -> Any:
    """An argument of the operator by its schema name, its default where it is not given."""
    for i, arg in enumerate(cast(Any, node.target)._schema.arguments):
        if arg.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[i] if i < len(node.args) else arg.default_value
    raise KeyError(name)


# ------------------------------------------------------------------------------------------------------- pointwise


@rule(*UNARY, *BROADCAST)
def _pointwise(state: RowAnalysis, node: fx.Node) -> Value:
    out = sizes(node)
    labels = ["i"] * len(out)
    rowed = [(a, r) for a in node.all_input_nodes if (r := state.rowed(a)) is not None]
    for a, r in rowed:
        offset = len(out) - len(r.labels)
        for k, label in enumerate(r.labels):
            if not same(sizes(a)[k], 1) or label == "r":
                labels[k + offset] = (
                    max(labels[k + offset], label, key="irv".index) if label != labels[k + offset] else label
                )
    for a, r in rowed:
        offset = len(out) - len(r.labels)
        for j, label in enumerate(labels):
            k = j - offset
            here = r.labels[k] if k >= 0 else "-"
            if label == "r" and here != "r" and not same(out[j], 1):
                return lose(node, "rows_mix", f"{name_of(node)} broadcasts over the rows")
            if label == "r" and here == "r" and not same(sizes(a)[k], out[j]):
                return lose(node, "rows_mix", f"{name_of(node)} broadcasts the rows")
            if label == "v" and here == "r" and not same(out[j], 1):
                return lose(node, "rows_mix", f"{name_of(node)} aligns rows with the vocabulary")
    return Rowed("".join(labels))


# ------------------------------------------------------------------------------------------ along and over some dims


def reduced_dims(node: fx.Node) -> list[int]:
    """The dims that a reduction removes, all of them if it names none."""
    names = {a.name for a in cast(Any, node.target)._schema.arguments}
    dims = argument(node, "dim") if "dim" in names else None
    rank = len(sizes(node.args[0]))
    if dims is None or dims == []:
        return list(range(rank))
    return [d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])] if rank else []


@rule(*REDUCE, aten.sum.default, aten.mean.default)
def _reduce(state: RowAnalysis, node: fx.Node) -> Value:
    source = state.rowed(node.args[0])
    if source is None:
        return lose(node, "rows_mix", f"{name_of(node)} takes its dims from something else")
    dims = reduced_dims(node)
    if "r" not in source.labels and node.target in (aten.sum.default, aten.mean.default):
        return Loose()
    if any(source.labels[d] == "r" for d in dims):
        inner_gone = all(source.labels[d] == "r" or d in dims for d in range(len(source.labels)))
        if node.target in SUMS and (inner_gone or not source.wide):
            return Loose()  # the sum over the rest of a row is taken inside, the sum over rows behind the region
        return lose(node, "rows_mix", f"{name_of(node)} combines rows")
    keep = bool(argument(node, "keepdim"))
    kept = ["i" if d in dims else label for d, label in enumerate(source.labels) if keep or d not in dims]
    return Rowed("".join(kept))


@rule(*ALONG)
def _along(state: RowAnalysis, node: fx.Node) -> Value:
    source = state.rowed(node.args[0])
    dim = dim_of(argument(node, "dim"), node.args[0])
    if source is None or (source.labels and source.labels[dim] == "r"):
        return lose(node, "wrong_axis", f"{name_of(node)} runs over dim {dim}, which is not the vocabulary")
    return source


@rule(aten.topk.default)
def _topk(state: RowAnalysis, node: fx.Node) -> Value:
    source, dim = state.rowed(node.args[0]), dim_of(argument(node, "dim"), node.args[0])
    if source is None or source.labels[dim] == "r" or isinstance(argument(node, "k"), fx.Node):
        return lose(node, "wrong_axis", f"topk runs over dim {dim}, which is not the vocabulary")
    return Rowed(relabelled(source.labels, dim, "i"))


@rule(aten.gather.default)
def _gather(state: RowAnalysis, node: fx.Node) -> Value:
    source, index = state.rowed(node.args[0]), node.args[2]
    dim = dim_of(node.args[1], node.args[0])
    if source is None or source.labels[dim] == "r":
        return lose(node, "wrong_axis", f"gather runs over dim {dim}, which is not the vocabulary")
    old, new = sizes(node.args[0]), sizes(index)
    if not same((*old[:dim], *old[dim + 1 :]), (*new[:dim], *new[dim + 1 :])):
        return lose(node, "rows_mix", "gather's index covers only some of the rows")
    picked = state.rowed(index)
    if picked is not None and any((a == "r") != (b == "r") for a, b in zip(picked.labels, source.labels, strict=True)):
        return lose(node, "rows_mix", "gather's index has its rows elsewhere")
    return Rowed(relabelled(source.labels, dim, picked.labels[dim] if picked is not None else "i"))


@rule(aten.scatter.value, aten.scatter.src, aten.scatter_add.default)
def _scatter(state: RowAnalysis, node: fx.Node) -> Value:
    source, dim = state.rowed(node.args[0]), dim_of(node.args[1], node.args[0])
    if source is None or source.labels[dim] == "r":
        return lose(node, "wrong_axis", f"{name_of(node)} runs over dim {dim}, which is not the vocabulary")
    old = sizes(node.args[0])
    for other in (node.args[2], node.args[3]):
        if not isinstance(other, fx.Node) or "val" not in other.meta or not sizes(other):
            continue
        new = sizes(other)
        if not same((*old[:dim], *old[dim + 1 :]), (*new[:dim], *new[dim + 1 :])):
            return lose(node, "rows_mix", f"{name_of(node)} covers only some of the rows")
        r = state.rowed(other)
        if r is not None and any((a == "r") != (b == "r") for a, b in zip(r.labels, source.labels, strict=True)):
            return lose(node, "rows_mix", f"{name_of(node)} has its rows elsewhere")
    return source


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll(state: RowAnalysis, node: fx.Node) -> Value:
    source, target = state.rowed(node.args[0]), node.args[1]
    old = sizes(node.args[0])
    axis = 0 if len(old) == 1 else 1
    labels = "" if source is None else source.labels
    # a dim of one row may have been labelled as no row at all
    others = all(labels[d] == "r" or same(old[d], 1) for d in range(len(labels)) if d != axis)
    if source is None or labels[axis] == "r" or not others:
        return lose(node, "wrong_axis", f"nll_loss takes its classes from dim {axis}, not from the vocabulary")
    if state.depends(target) or state.depends(node.args[2]):
        return lose(node, "rows_mix", "the targets of nll_loss are computed from the logits")
    return Rowed("r" * (len(old) - 1)) if argument(node, "reduction") == 0 else Loose()


@rule(operator.getitem)
def _getitem(state: RowAnalysis, node: fx.Node) -> Value:
    return state.values[cast(fx.Node, node.args[0])]


# last, for their rules are made with what is above
import fuse_losses.graph.row_picks  # noqa: E402
import fuse_losses.graph.row_products  # noqa: E402
import fuse_losses.graph.row_views  # noqa: E402, F401
