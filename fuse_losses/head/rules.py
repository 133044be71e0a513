"""What ATen operators make of wide values: still wide in another form, or a functional, or nothing with a form.

To add a transform or a way to leave the vocabulary, write one rule here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.head.algebra import LogProb, LogSumExp, NllLoss, RowStep, Selected
from fuse_losses.head.picks import pick_of
from fuse_losses.head.sizes import dim_of, product, same, shape_of, sizes
from fuse_losses.head.values import Lift, Lifted, Unlifted, Wide, is_own_lse, rule

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------- values that stay wide


@rule(aten.expand.default)
def _expand(state: Lift, node: fx.Node) -> Lifted:
    if not same(sizes(node.args[0]), sizes(node)):
        return Unlifted("the logits are repeated", node)
    return state.the_wide(node)


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
        return Unlifted("the logits are copied to another device", node)
    if not after.dtype.is_floating_point or (after.dtype == torch.float64) != (before.dtype == torch.float64):
        return Unlifted(f"the logits are converted from {before.dtype} to {after.dtype}", node)
    return wide


@rule(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
def _scale(state: Lift, node: fx.Node) -> Lifted:
    left, right = node.args[0], node.args[1]
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    wide, number = (state.wide(left), right) if state.wide(left) else (state.wide(right), left)
    if wide is None or isinstance(number, bool) or not isinstance(number, (int, float)) or (divides and left is number):
        return Unlifted(f"{node.target} with a factor that is not a constant", node)
    if number == 0 or wide.form == "probs":
        return Unlifted(f"{node.target} by {number} of {wide.form}", node)
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
        return Unlifted("tanh of logits that are squashed already", node)
    return replace(wide, logits=replace(wide.logits, map=squashed))


@rule(aten.add.Tensor)
def _bias(state: Lift, node: fx.Node) -> Lifted:
    left, right = node.args[0], node.args[1]
    wide, other = (state.wide(left), right) if state.wide(left) else (state.wide(right), left)
    plain = isinstance(other, fx.Node) and other not in state.values and "val" in other.meta
    if wide is None or not plain or wide.form != "logits" or node.kwargs:
        return Unlifted("something other than a bias of one vector is added", node)
    if (
        wide.logits.bias is not None
        or wide.logits.map.squash != "identity"
        or wide.logits.map != type(wide.logits.map)()
    ):
        return Unlifted("a bias is added after a scale, a softcap or another bias", node)
    shape, full = shape_of(cast(fx.Node, other)), sizes(node)
    from_end = len(full) - wide.vocab_dim
    is_vector = len(shape) >= from_end and same(shape[-from_end], full[wide.vocab_dim])
    if not is_vector or not all(i == len(shape) - from_end or same(s, 1) for i, s in enumerate(shape)):
        return Unlifted(
            "the tensor added to the logits is not one vector over the vocabulary",
            node,
        )
    if not same(full, sizes(left if state.wide(left) else right)):
        return Unlifted("adding the bias broadcasts the logits", node)
    return replace(wide, logits=replace(wide.logits, bias=other))


@rule(aten._log_softmax.default, aten._softmax.default)
def _normalise(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    name = "log_softmax" if node.target is aten._log_softmax.default else "softmax"
    if dim_of(node.args[1], node) != wide.vocab_dim:
        return Unlifted(f"{name} runs over dim {node.args[1]}, the vocabulary is dim {wide.vocab_dim}", node)
    if wide.form != "logits":
        return Unlifted(f"{name} of {wide.form}", node)
    return replace(wide, form="log_probs" if name == "log_softmax" else "probs")


@rule(aten.log.default)
def _log(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    if wide.form != "probs":
        return Unlifted(f"log of the {wide.form}", node)
    return replace(wide, form="log_probs")


@rule(aten.sub.Tensor)
def _minus_lse(state: Lift, node: fx.Node) -> Lifted:
    """z - logsumexp(z, keepdim=True) is log_softmax."""
    left, right = node.args[0], node.args[1]
    wide = state.wide(left)
    tensors = isinstance(right, fx.Node) and len(shape_of(right)) == len(sizes(node)) and not node.kwargs
    if wide is not None and wide.form == "logits" and tensors and is_own_lse(state, wide, right):
        return replace(wide, form="log_probs")
    return Unlifted("something other than their own logsumexp is subtracted", node)


# ----------------------------------------------------------------------------------------------- views of the rows


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    old, new = sizes(node.args[0]), sizes(node)
    p = wide.vocab_dim
    before, after = product(old[:p]), product(old[p + 1 :])
    # the vocabulary must come out as one dim with as many rows before and behind it as it had
    for q in range(len(new)):
        if same(new[q], old[p]) and same(product(new[:q]), before) and same(product(new[q + 1 :]), after):
            shape = cast("list[Any]", node.args[1])
            rows = tuple(s for i, s in enumerate(shape) if i != q)
            return _stepped(wide, "reshape", rows, q, new)
    return Unlifted("the logits are reshaped across the vocabulary", node)


@rule(aten.unsqueeze.default)
def _unsqueeze(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    dim = dim_of(node.args[1], node)
    p = wide.vocab_dim + (dim <= wide.vocab_dim)
    return _stepped(wide, "unsqueeze", (dim - (dim > p),), p, sizes(node))


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    old = sizes(node.args[0])
    dims = node.args[1] if len(node.args) > 1 else range(len(old))
    gone = sorted({cast(int, d) % len(old) for d in (dims if isinstance(dims, (list, tuple, range)) else [dims])})
    gone = [d for d in gone if same(old[d], 1)]
    if wide.vocab_dim in gone or len(old) - len(gone) != len(sizes(node)):
        return Unlifted("the vocabulary is squeezed away", node)
    for d in reversed(gone):
        p = wide.vocab_dim
        old = (*old[:d], *old[d + 1 :])
        wide = _stepped(wide, "select", (d - (d > p), 0), p - (d < p), old)
    return wide


@rule(aten.slice.Tensor)
def _slice(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim, p = dim_of(dim, node), wide.vocab_dim
    if same(sizes(node), sizes(node.args[0])) and step == 1:
        return wide
    if dim == p:
        cut = _classes(wide, sizes(node.args[0])[p], start, end) if step == 1 else None
        return cut or Unlifted("a part of the vocabulary is cut out", node)
    return _stepped(wide, "slice", (dim - (dim > p), start, end, step), p, sizes(node))


def _classes(wide: Wide, size: Any, start: Any, end: Any) -> Wide | None:
    """The logits of some classes side by side, if the bounds are known: rows of the weight."""
    known = all(isinstance(n, int) for n in (size, start or 0, end or 0))
    if wide.form != "logits" or wide.logits.bias is not None or not known:
        return None
    first, last, _ = slice(start, end).indices(size)
    before = wide.logits.classes[0] if wide.logits.classes else 0
    return replace(wide, logits=replace(wide.logits, classes=(before + first, before + last))) if last > first else None


@rule(aten.select.int)
def _select(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    dim = dim_of(node.args[1], cast(fx.Node, node.args[0]))
    if dim == wide.vocab_dim:
        return Unlifted("one class is selected from the vocabulary", node)
    p = wide.vocab_dim
    return _stepped(wide, "select", (dim - (dim > p), node.args[2]), p - (dim < p), sizes(node))


@rule(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    rank = len(sizes(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [d % rank for d in cast("list[int]", node.args[1])]
    elif rank > 1:
        a, b = (0, 1) if node.target is aten.t.default else (dim_of(node.args[1], node), dim_of(node.args[2], node))
        order[a], order[b] = order[b], order[a]
    p = wide.vocab_dim
    rows = tuple(d - (d > p) for d in order if d != p)
    if rows == tuple(sorted(rows)):
        return replace(wide, vocab_dim=order.index(p))
    return _stepped(wide, "permute", rows, order.index(p), sizes(node))


@rule(aten.flip.default, aten.roll.default)
def _moved(state: Lift, node: fx.Node) -> Lifted:
    wide, p = state.the_wide(node), state.the_wide(node).vocab_dim
    flips = node.target is aten.flip.default
    dims = [dim_of(d, node) for d in cast("list[int]", (*node.args, [])[1 if flips else 2])]
    if p in dims or not dims:
        return Unlifted("the vocabulary is moved", node)
    moved = tuple(d - (d > p) for d in dims)
    args = (moved,) if flips else (tuple(cast("list[Any]", node.args[1])), moved)
    return _stepped(wide, "flip" if flips else "roll", args, p, sizes(node))


def _stepped(wide: Wide, kind: str, args: tuple[Any, ...], vocab_dim: int, shape: tuple[Any, ...]) -> Wide:
    rows = (*shape[:vocab_dim], *shape[vocab_dim + 1 :])
    logits = replace(wide.logits, rows=(*wide.logits.rows, RowStep(kind, args, rows)))
    return replace(wide, logits=logits, vocab_dim=vocab_dim)


# ------------------------------------------------------------------------------------- where the vocabulary is left


@rule(aten.logsumexp.default)
def _logsumexp(state: Lift, node: fx.Node) -> Lifted:
    wide = state.the_wide(node)
    dims = [dim_of(d, cast(fx.Node, node.args[0])) for d in cast("list[int]", node.args[1])]
    if dims != [wide.vocab_dim]:
        return Unlifted(f"logsumexp runs over dims {dims}, the vocabulary is dim {wide.vocab_dim}", node)
    if wide.form != "logits":
        return Unlifted(f"logsumexp of {wide.form}", node)
    return LogSumExp(wide.logits)


@rule(aten.gather.default)
def _gather(state: Lift, node: fx.Node) -> Lifted:
    wide, index = state.wide(node.args[0]), node.args[2]
    if wide is None or index in state.values:
        return Unlifted("the logits are used as an index", node)
    old, new = sizes(node.args[0]), sizes(index)
    p = wide.vocab_dim
    if dim_of(node.args[1], cast(fx.Node, node.args[0])) != p:
        return Unlifted(f"gather runs over dim {node.args[1]}, the vocabulary is dim {p}", node)
    if not same(new[p], 1):
        return Unlifted("several classes per row are gathered", node)
    if not same((*old[:p], *old[p + 1 :]), (*new[:p], *new[p + 1 :])):
        return Unlifted("the index covers only some of the rows", node)
    return _pick(wide, index, node)


@rule(aten.index.Tensor, aten.index_select.default)
def _index(state: Lift, node: fx.Node) -> Lifted:
    """z[rows]: some of the rows; z[rows, y]: one class of each of them."""
    wide, pick = state.wide(node.args[0]), pick_of(node)
    if wide is None or pick is None or any(i in state.values for i in pick.indices):
        return Unlifted("an index is made from the logits, or picks by a mask or from dims that are apart", node)
    p, old = wide.vocab_dim, sizes(node.args[0])
    rows = [d for d in pick.dims if d != p]
    if p in pick.dims and (pick.of_one_mask or not (p == len(old) - 1 and len(rows) == p)):
        return Unlifted("some classes are picked", node)
    shape = sizes(node)
    if p not in pick.dims:
        entries = tuple(pick.indices[d - pick.first] if d in rows else None for d in range(len(old)) if d != p)
        return _stepped(wide, "index", entries, p + (pick.rank - len(rows)) * (p > pick.first), shape)
    target = pick.indices[-1]
    if not same(sizes(target), shape):
        return Unlifted("the index takes one class for several rows", node)
    if not pick.in_order(len(rows), node):
        if not pick.spanned(len(rows), node):
            return Unlifted("several classes of each row are picked", node)
        logits = replace(wide.logits, rows=(*wide.logits.rows, RowStep("index", pick.indices[:-1], shape)))
        wide = replace(wide, logits=logits)
    return _pick(wide, target, node, wraps=True)


def _pick(wide: Wide, target: Any, node: fx.Node, wraps: bool = False) -> Lifted:
    if wide.form == "log_probs":
        return LogProb(wide.logits, target, factor=wide.factor, wraps=wraps)
    if wide.form == "logits":
        return Selected(wide.logits, target, wraps)
    return Unlifted("a class is picked from the probabilities", node)


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll(state: Lift, node: fx.Node) -> Lifted:
    _, target, weight, reduction, ignore_index = node.args
    wide = state.wide(node.args[0])
    if wide is None or wide.form != "log_probs":
        return Unlifted("nll_loss of something that is not a log_softmax", node)
    if target in state.values:
        return Unlifted("the targets are computed from the logits", node)
    if weight is not None:
        return Unlifted("class weights have no fused form yet", node)
    old = sizes(node.args[0])
    axis = 0 if len(old) == 1 else 1
    if wide.vocab_dim != axis:
        return Unlifted(f"nll_loss takes its classes from dim {axis}, not from the vocabulary", node)
    if not same((*old[:axis], *old[axis + 1 :]), sizes(target)) and len(old) > 1:
        return Unlifted("the targets do not have one entry per row", node)
    ignore = cast(int, ignore_index)
    if reduction == 0:
        return LogProb(wide.logits, target, ignore, factor=-wide.factor)
    return NllLoss(wide.logits, target, ignore, mean=bool(reduction == 1), factor=wide.factor)
