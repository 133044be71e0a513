"""The values of the abstract interpreter, and the table of rules that make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import fx

from fuse_losses.head.algebra import Functional, Logits, LogSumExp
from fuse_losses.head.sizes import same, sizes
from fuse_losses.head.table import OperatorTable

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
    """A value that has no form in the algebra: why, and the ATen node where it was lost."""

    reason: str
    node: fx.Node


Lifted = Wide | Unlifted | Functional
Rule = Callable[["Lift", fx.Node], Lifted]
RULES: OperatorTable[Rule] = OperatorTable()  # what an ATen operator makes of a wide value
rule = RULES.rule


@dataclass
class Lift:
    """Values of the ATen nodes that depend on the logits; nodes that are absent carry no vocabulary."""

    values: dict[fx.Node, Lifted] = field(default_factory=dict[fx.Node, Lifted])

    def wide(self, node: object) -> Wide | None:
        found = self.values.get(node) if isinstance(node, fx.Node) else None
        return found if isinstance(found, Wide) else None

    def the_wide(self, node: fx.Node) -> Wide:
        """The first argument, which is wide (a rule's precondition)."""
        return cast(Wide, self.values[cast(fx.Node, node.args[0])])


_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.alias.default,
)


def functional_behind(state: Lift, node: object) -> Functional | None:
    """The functional that `node` is a mere reshape of."""
    while isinstance(node, fx.Node):
        value = state.values.get(node)
        if value is not None and not isinstance(value, (Wide, Unlifted)):
            return value
        if node.target not in _RESHAPES:
            return None
        node = node.args[0]
    return None


def is_own_lse(state: Lift, wide: Wide, node: object) -> bool:
    """True if `node` is the logsumexp of these very logits, shaped to be subtracted from them."""
    lse = functional_behind(state, node)
    return isinstance(lse, LogSumExp) and lse.logits == wide.logits and same(sizes(node)[wide.vocab_dim], 1)
