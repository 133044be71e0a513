"""Lift an ATen tail into the algebra: an abstract interpreter that follows the vocabulary dim, never its size."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

import fuse_losses.head.rules  # noqa: F401  # pyright: ignore[reportUnusedImport]  fills the table
from fuse_losses.head.algebra import Logits, LogProb, LogSumExp, Selected
from fuse_losses.head.sizes import SIZES, same, sizes
from fuse_losses.head.values import RULES, Lift, Lifted, Unlifted, Wide, functional_behind

aten = torch.ops.aten
NAMES = {"logits": "logits", "log_probs": "log-probabilities", "probs": "probabilities"}


def lift(graph: fx.Graph, sources: Mapping[fx.Node, tuple[Any, int]], cut: Iterable[fx.Node]) -> dict[fx.Node, Lifted]:
    """Interpret `graph`; `sources` are the logits with their product and vocabulary dim, `cut` get no gradient."""
    cuts = set(cut)
    state = Lift({n: Wide("logits", Logits(detached=n in cuts, product=p), dim) for n, (p, dim) in sources.items()})
    for node in graph.nodes:
        if node.op != "call_function" or node.target in SIZES:
            continue
        alive = [a for a in node.all_input_nodes if isinstance(state.values.get(a), (Wide, Unlifted))]
        value = _interpret(state, node, alive) if alive else _combine(state, node)
        if value is not None and not isinstance(value, Unlifted) and node in cuts:
            value = replace(value, logits=replace(value.logits, detached=True))
        if value is not None:
            state.values[node] = value
    return state.values


def _interpret(state: Lift, node: fx.Node, alive: list[fx.Node]) -> Lifted:
    for a in alive:
        value = state.values[a]
        if isinstance(value, Unlifted):
            return value
    found = RULES.get(node.target)
    if found is None:
        form = cast(Wide, state.values[alive[0]]).form
        return Unlifted(f"{node.target} reads the {NAMES[form]}", node)
    return found(state, node)


def _combine(state: Lift, node: fx.Node) -> Lifted | None:
    """What a node that reads only functionals is: nll_loss's first output, or a law.

    The law: selected(z, y) - logsumexp(z) is the log-prob, exact where the difference of two large numbers is not.
    """
    if node.target is operator.getitem:
        value = state.values.get(cast(fx.Node, node.args[0]))
        if value is None or node.args[1] == 0:
            return value
        return Unlifted("the number of valid targets is read from nll_loss", node)
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    selected = functional_behind(state, node.args[0])
    lse = functional_behind(state, node.args[1])
    if not isinstance(selected, Selected) or not isinstance(lse, LogSumExp) or selected.logits != lse.logits:
        return None
    if not same(sizes(node.args[0]), sizes(node.args[1])):
        return None
    return LogProb(selected.logits, selected.target, wraps=selected.wraps)
