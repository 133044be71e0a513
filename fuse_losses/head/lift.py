"""Lift an ATen tail into the algebra: an abstract interpreter that follows the vocabulary dim, never its size."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuse_losses.head.algebra import Functional, Logits, LogProb, LogSumExp, NllLoss, RowStep, Selected

aten = torch.ops.aten


@dataclass(frozen=True)
class Wide:
    """A value in which the vocabulary is alive, at `vocab_dim`: factor * (logits | their log-probs | their probs)."""

    form: str  # "logits", "log_probs", "probs"
    logits: Logits
    vocab_dim: int
    factor: float = 1.0


@dataclass(frozen=True)
class Unlifted:
    """A value that has no form in the algebra: the decline code, the reason, and the ATen node where it was lost."""

    code: str
    reason: str
    node: fx.Node


Lifted = Wide | Unlifted | Functional
Rule = Callable[["Lift", fx.Node], "Lifted | None"]
RULES: dict[Any, Rule] = {}
REDUCTIONS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.max.dim,
    aten.amax.default,
    aten.argmax.default,
    aten.topk.default,
    aten.sort.default,
    aten.var.correction,
}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register what an ATen operator makes of a wide value; None means that the vocabulary is gone without trace."""

    def register(function: Rule) -> Rule:
        for target in targets:
            RULES[target] = function
        return function

    return register


@dataclass
class Lift:
    """Values of the ATen nodes that depend on the logits; nodes that are absent carry no vocabulary."""

    values: dict[fx.Node, Lifted] = field(default_factory=dict)

    def wide(self, node: object) -> Wide | None:
        found = self.values.get(node) if isinstance(node, fx.Node) else None
        return found if isinstance(found, Wide) else None

    def the_wide(self, node: fx.Node) -> Wide:
        """The first argument, which is wide (a rule's precondition)."""
        return cast(Wide, self.values[cast(fx.Node, node.args[0])])


def lift(graph: fx.Graph, sources: Mapping[fx.Node, tuple[Any, int]], cut: Iterable[fx.Node]) -> dict[fx.Node, Lifted]:
    """Interpret `graph`; `sources` are the logits with their product and vocabulary dim, `cut` get no gradient."""
    cuts = set(cut)
    state = Lift({n: Wide("logits", Logits(detached=n in cuts, product=p), dim) for n, (p, dim) in sources.items()})
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        alive = [a for a in node.all_input_nodes if isinstance(state.values.get(a), (Wide, Unlifted))]
        value = _interpret(state, node, alive) if alive else _combine(state, node)
        if value is not None and not isinstance(value, Unlifted) and node in cuts:
            value = replace(value, logits=replace(value.logits, detached=True))
        if value is not None:
            state.values[node] = value
    return state.values


def _interpret(state: Lift, node: fx.Node, alive: list[fx.Node]) -> Lifted | None:
    for a in alive:
        value = state.values[a]
        if isinstance(value, Unlifted):
            return value
    if node.target is aten.sym_size.int:
        return None
    found = RULES.get(node.target)
    if found is None:
        code = "unsupported_loss" if node.target in REDUCTIONS else "unsupported_transform"
        return Unlifted(code, f"{node.target} reads the {_name(state, alive[0])}", node)
    return found(state, node)


def _name(state: Lift, node: fx.Node) -> str:
    value = state.values[node]
    return {"logits": "logits", "log_probs": "log-probabilities", "probs": "probabilities"}[cast(Wide, value).form]


def sizes(node: object) -> tuple[Any, ...]:
    """Shape of the node's value."""
    return tuple(cast(fx.Node, node).meta["val"].shape)


def same(a: Any, b: Any) -> bool:
    """True if two sizes (or tuples of sizes) are known to be equal, without adding a guard."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return statically_known_true(a == b)


def _product(items: Iterable[Any]) -> Any:
    result: Any = 1
    for item in items:
        result = result * item
    return result


def _dim(dim: Any, node: fx.Node) -> int:
    rank = len(sizes(node))
    return cast(int, dim) % rank if rank else 0


# ------------------------------------------------------------------------------------------- values that stay wide


@rule(
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
)
def _same(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    before, after = cast(fx.Node, node.args[0]).meta["val"], node.meta["val"]
    if after.device != before.device:
        return Unlifted("logits_used", "the logits are copied to another device", node)
    if not after.dtype.is_floating_point or (after.dtype == torch.float64) != (before.dtype == torch.float64):
        return Unlifted("unsupported_dtype", f"the logits are converted from {before.dtype} to {after.dtype}", node)
    return wide


@rule(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
def _scale(state: Lift, node: fx.Node) -> Lifted:
    left, right = node.args[0], node.args[1]
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    wide, number = (state.wide(left), right) if state.wide(left) else (state.wide(right), left)
    if wide is None or isinstance(number, bool) or not isinstance(number, (int, float)) or (divides and left is number):
        return Unlifted("unsupported_transform", f"{node.target} with a factor that is not a constant", node)
    if number == 0 or wide.form == "probs":
        return Unlifted("unsupported_transform", f"{node.target} by {number} of {wide.form}", node)
    factor = 1.0 / number if divides else float(number)
    if wide.form == "logits":
        return replace(wide, logits=replace(wide.logits, map=wide.logits.map.scaled(factor)))
    return replace(wide, factor=wide.factor * factor)


@rule(aten.neg.default)
def _negate(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    if wide.form == "logits":
        return replace(wide, logits=replace(wide.logits, map=wide.logits.map.scaled(-1.0)))
    return replace(wide, factor=-wide.factor)


@rule(aten.tanh.default)
def _tanh(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    squashed = wide.logits.map.squashed("tanh") if wide.form == "logits" else None
    if squashed is None:
        return Unlifted("unsupported_transform", "tanh of logits that are squashed already", node)
    return replace(wide, logits=replace(wide.logits, map=squashed))


@rule(aten.add.Tensor)
def _bias(state: Lift, node: fx.Node) -> Lifted:
    left, right = node.args[0], node.args[1]
    wide, other = (state.wide(left), right) if state.wide(left) else (state.wide(right), left)
    plain = isinstance(other, fx.Node) and other not in state.values and "val" in other.meta
    if wide is None or not plain or wide.form != "logits" or node.kwargs:
        return Unlifted("unsupported_transform", "something other than a bias of one vector is added", node)
    if (
        wide.logits.bias is not None
        or wide.logits.map.squash != "identity"
        or wide.logits.map != type(wide.logits.map)()
    ):
        return Unlifted("unsupported_transform", "a bias is added after a scale, a softcap or another bias", node)
    shape, full = sizes(other), sizes(node)
    from_end = len(full) - wide.vocab_dim
    is_vector = len(shape) >= from_end and same(shape[-from_end], full[wide.vocab_dim])
    if not is_vector or not all(i == len(shape) - from_end or same(s, 1) for i, s in enumerate(shape)):
        return Unlifted(
            "unsupported_transform",
            "the tensor added to the logits is not one vector over the vocabulary",
            node,
        )
    if not same(full, sizes(left if state.wide(left) else right)):
        return Unlifted("unsupported_transform", "adding the bias broadcasts the logits", node)
    return replace(wide, logits=replace(wide.logits, bias=other))


@rule(aten._log_softmax.default, aten._softmax.default)
def _normalise(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    name = "log_softmax" if node.target is aten._log_softmax.default else "softmax"
    if _dim(node.args[1], node) != wide.vocab_dim:
        return Unlifted(
            "wrong_axis", f"{name} runs over dim {node.args[1]}, the vocabulary is dim {wide.vocab_dim}", node
        )
    if wide.form != "logits":
        return Unlifted("unsupported_transform", f"{name} of {wide.form}", node)
    return replace(wide, form="log_probs" if name == "log_softmax" else "probs")


@rule(aten.log.default)
def _log(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    if wide.form != "probs":
        return Unlifted("logits_used", f"log of the {wide.form}", node)
    return replace(wide, form="log_probs")


@rule(aten.sub.Tensor)
def _minus_lse(state: Lift, node: fx.Node) -> Lifted:
    """z - logsumexp(z, keepdim=True) is log_softmax."""
    left, right = node.args[0], node.args[1]
    wide = state.wide(left)
    lse, base = _functional_behind(state, right)
    if (
        wide is not None
        and wide.form == "logits"
        and isinstance(lse, LogSumExp)
        and lse.logits == wide.logits
        and not node.kwargs
        and base is not None
        and len(sizes(right)) == len(sizes(left))
        and same(sizes(right)[wide.vocab_dim], 1)
    ):
        return replace(wide, form="log_probs")
    return Unlifted("unsupported_transform", "something other than their own logsumexp is subtracted", node)


# ----------------------------------------------------------------------------------------------- views of the rows


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    old, new = sizes(node.args[0]), sizes(node)
    p = wide.vocab_dim
    before, after = _product(old[:p]), _product(old[p + 1 :])
    # the vocabulary must come out as one dim with as many rows before and behind it as it had
    for q in range(len(new)):
        if same(new[q], old[p]) and same(_product(new[:q]), before) and same(_product(new[q + 1 :]), after):
            shape = cast("list[Any]", node.args[1])
            rows = tuple(s for i, s in enumerate(shape) if i != q)
            return _stepped(wide, "reshape", rows, q, new)
    return Unlifted("rows_mix", "the logits are reshaped across the vocabulary", node)


@rule(aten.unsqueeze.default)
def _unsqueeze(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    dim = _dim(node.args[1], node)
    p = wide.vocab_dim + (dim <= wide.vocab_dim)
    return _stepped(wide, "unsqueeze", (dim - (dim > p),), p, sizes(node))


@rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    old = sizes(node.args[0])
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    gone = sorted({cast(int, d) % len(old) for d in dims})
    gone = [d for d in gone if same(old[d], 1)]
    if wide.vocab_dim in gone or len(old) - len(gone) != len(sizes(node)):
        return Unlifted("rows_mix", "the vocabulary is squeezed away", node)
    for d in reversed(gone):
        p = wide.vocab_dim
        old = (*old[:d], *old[d + 1 :])
        wide = _stepped(wide, "select", (d - (d > p), 0), p - (d < p), old)
    return wide


@rule(aten.slice.Tensor)
def _slice(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim, p = _dim(dim, node), wide.vocab_dim
    if same(sizes(node), sizes(node.args[0])) and step == 1:
        return wide
    if dim == p:
        return Unlifted("unsupported_transform", "a part of the vocabulary is cut out", node)
    return _stepped(wide, "slice", (dim - (dim > p), start, end, step), p, sizes(node))


@rule(aten.select.int)
def _select(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    dim = _dim(node.args[1], cast(fx.Node, node.args[0]))
    if dim == wide.vocab_dim:
        return Unlifted("unsupported_loss", "one class is selected from the vocabulary", node)
    p = wide.vocab_dim
    return _stepped(wide, "select", (dim - (dim > p), node.args[2]), p - (dim < p), sizes(node))


@rule(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    rank = len(sizes(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [cast(int, d) % rank for d in cast("list[int]", node.args[1])]
    elif rank > 1:
        a, b = (0, 1) if node.target is aten.t.default else (_dim(node.args[1], node), _dim(node.args[2], node))
        order[a], order[b] = order[b], order[a]
    p = wide.vocab_dim
    rows = tuple(d - (d > p) for d in order if d != p)
    if rows == tuple(sorted(rows)):
        return replace(wide, vocab_dim=order.index(p))
    return _stepped(wide, "permute", rows, order.index(p), sizes(node))


def _stepped(wide: Wide, kind: str, args: tuple[Any, ...], vocab_dim: int, shape: tuple[Any, ...]) -> Wide:
    rows = (*shape[:vocab_dim], *shape[vocab_dim + 1 :])
    logits = replace(wide.logits, rows=(*wide.logits.rows, RowStep(kind, args, rows)))
    return replace(wide, logits=logits, vocab_dim=vocab_dim)


# ------------------------------------------------------------------------------------- where the vocabulary is left


@rule(aten.logsumexp.default)
def _logsumexp(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    dims = [_dim(d, cast(fx.Node, node.args[0])) for d in cast("list[int]", node.args[1])]
    if dims != [wide.vocab_dim]:
        return Unlifted("wrong_axis", f"logsumexp runs over dims {dims}, the vocabulary is dim {wide.vocab_dim}", node)
    if wide.form != "logits":
        return Unlifted("unsupported_loss", f"logsumexp of {wide.form}", node)
    return LogSumExp(wide.logits)


@rule(aten.gather.default)
def _gather(state: Lift, node: fx.Node) -> Lifted:
    wide, index = state.wide(node.args[0]), node.args[2]
    if wide is None or index in state.values:
        return Unlifted("unsupported_loss", "the logits are used as an index", node)
    old, new = sizes(node.args[0]), sizes(index)
    p = wide.vocab_dim
    if _dim(node.args[1], cast(fx.Node, node.args[0])) != p:
        return Unlifted("wrong_axis", f"gather runs over dim {node.args[1]}, the vocabulary is dim {p}", node)
    if not same(new[p], 1):
        return Unlifted("unsupported_loss", "several classes per row are gathered", node)
    if not same((*old[:p], *old[p + 1 :]), (*new[:p], *new[p + 1 :])):
        return Unlifted("rows_mix", "the index covers only some of the rows", node)
    return _pick(wide, index, node)


@rule(aten.index.Tensor)
def _index(state: Lift, node: fx.Node) -> Lifted:
    """z[arange(N), y]: one class per row, the rows in their own order."""
    wide, indices = state.wide(node.args[0]), cast("list[fx.Node | None]", node.args[1])
    old = sizes(node.args[0])
    if wide is None or any(i in state.values for i in indices if i is not None):
        return Unlifted("unsupported_loss", "the logits are used as an index", node)
    p = wide.vocab_dim
    if len(indices) != len(old) or p != len(old) - 1 or any(i is None for i in indices):
        return Unlifted("rows_mix", "an index selects rows of the logits", node)
    rows = old[:p]
    target = indices[p]
    if target is None or not same(sizes(target), rows) or not same(sizes(node), rows):
        return Unlifted("rows_mix", "the index does not take one class of every row", node)
    for d, index in enumerate(indices[:p]):
        if not _is_arange_along(index, d, rows):
            return Unlifted("rows_mix", "the row index is not arange over all rows", node)
    return _pick(wide, target, node, wraps=True)


def _is_arange_along(index: fx.Node | None, dim: int, rows: tuple[Any, ...]) -> bool:
    """True if the index is arange(rows[dim]), with unit dims around it that broadcast it along `dim`."""
    if index is None:
        return False
    shape = sizes(index)
    at = dim - (len(rows) - len(shape))
    if at < 0 or not same(shape[at], rows[dim]) or not all(i == at or same(s, 1) for i, s in enumerate(shape)):
        return False
    node = index
    while node.target in (aten.unsqueeze.default, aten.view.default, aten.alias.default, aten.slice.Tensor):
        before = cast(fx.Node, node.args[0])
        if node.target is aten.slice.Tensor and not same(sizes(before), sizes(node)):
            return False
        node = before
    if node.target not in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return False
    numbers = list(node.args)
    if node.target is aten.arange.default:
        return True
    start, step = numbers[0], numbers[2] if len(numbers) > 2 else 1
    return start == 0 and step == 1


def _pick(wide: Wide, target: Any, node: fx.Node, wraps: bool = False) -> Lifted:
    if wide.form == "log_probs":
        return LogProb(wide.logits, target, factor=wide.factor, wraps=wraps)
    if wide.form == "logits":
        return Selected(wide.logits, target, wraps)
    return Unlifted("unsupported_loss", "a class is picked from the probabilities", node)


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll(state: Lift, node: fx.Node) -> Lifted:
    _, target, weight, reduction, ignore_index = node.args
    wide = state.wide(node.args[0])
    if wide is None or wide.form != "log_probs":
        return Unlifted("unsupported_loss", "nll_loss of something that is not a log_softmax", node)
    if target in state.values:
        return Unlifted("unsupported_loss", "the targets are computed from the logits", node)
    if weight is not None:
        return Unlifted("unsupported_loss", "class weights have no fused form yet", node)
    old = sizes(node.args[0])
    axis = 0 if len(old) == 1 else 1
    if wide.vocab_dim != axis:
        return Unlifted("wrong_axis", f"nll_loss takes its classes from dim {axis}, not from the vocabulary", node)
    if not same((*old[:axis], *old[axis + 1 :]), sizes(target)) and len(old) > 1:
        return Unlifted("rows_mix", "the targets do not have one entry per row", node)
    ignore = cast(int, ignore_index)
    if reduction == 0:
        return LogProb(wide.logits, target, ignore, factor=-wide.factor)
    return NllLoss(wide.logits, target, ignore, mean=reduction == 1, factor=wide.factor)


# ------------------------------------------------------------------------------------- laws between functionals

_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)


def _functional_behind(state: Lift, node: object) -> tuple[Functional | None, fx.Node | None]:
    """The functional that `node` is a mere reshape of, and the node that holds it."""
    while isinstance(node, fx.Node):
        value = state.values.get(node)
        if value is not None and not isinstance(value, (Wide, Unlifted)):
            return value, node
        if node.target not in _RESHAPES:
            return None, None
        node = node.args[0]
    return None, None


def _combine(state: Lift, node: fx.Node) -> Lifted | None:
    """What a node that reads only functionals is: nll_loss's first output, or a law.

    The law: selected(z, y) - logsumexp(z) is the log-prob, exact where the difference of two large numbers is not.
    """
    if node.target is operator.getitem:
        value = state.values.get(cast(fx.Node, node.args[0]))
        if value is None or node.args[1] == 0:
            return value
        return Unlifted("unsupported_loss", "the number of valid targets is read from nll_loss", node)
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    selected, _ = _functional_behind(state, node.args[0])
    lse, _ = _functional_behind(state, node.args[1])
    if not isinstance(selected, Selected) or not isinstance(lse, LogSumExp) or selected.logits != lse.logits:
        return None
    if not same(sizes(node.args[0]), sizes(node.args[1])):
        return None
    return LogProb(selected.logits, selected.target, wraps=selected.wraps)
