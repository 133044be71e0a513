"""The algebra of heads as pure data: projection, logit map, row functionals.

A head is `z = outer * squash(inner * (x W^T + b))` over rows of x, and a few numbers per row that leave it.
References to tensors are kept as `Ref`, opaque here: nodes of a graph in the pipeline, tensors in the reference
evaluator.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

Ref = Any
Size = Any  # an int, or the graph's name for a symbolic one


@dataclass(frozen=True)
class LogitMap:
    """Elementwise map from the raw product u to the logits: z = outer * squash(inner * u).

    The dtype of the steps between is not part of the form: everything is computed in float32 (float64 for float64),
    which is never further from the exact value than the user's own rounding in between.
    """

    squash: str = "identity"
    inner: float = 1.0
    outer: float = 1.0

    def scaled(self, factor: float) -> LogitMap:
        return replace(self, outer=self.outer * factor)

    def squashed(self, squash: str) -> LogitMap | None:
        """The map followed by `squash`, or None if it is squashed already."""
        if self.squash != "identity":
            return None
        return LogitMap(squash, inner=self.inner * self.outer, outer=1.0)

    def __str__(self) -> str:
        if self.squash == "identity":
            return "" if self.inner * self.outer == 1.0 else f"scale {self.inner * self.outer:g}"
        cap = self.outer
        if abs(self.inner * self.outer - 1.0) < 1e-6:
            return f"softcap {cap:g}"
        return f"softcap {cap:g}, scale {self.inner * self.outer:g}"


@dataclass(frozen=True)
class RowStep:
    """What rearranges or selects rows, on their dims alone: a view, `index`, `flip` or `roll`.

    `reshape` carries the new sizes of the row dims, `index` an index or None for each of them; the hidden (or
    vocabulary) dim is always last and untouched.
    `shape` are the sizes of the row dims behind the step.
    """

    kind: str
    args: tuple[Any, ...]
    shape: tuple[Size, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Logits:
    """One [*rows, V] tensor of logits: a product, its bias, its map, and which rows and classes (from, to) of it."""

    map: LogitMap = LogitMap()
    bias: Ref | None = None
    rows: tuple[RowStep, ...] = ()
    detached: bool = False  # no gradient flows from here to the projection
    product: Ref | None = None
    classes: tuple[int, int] | None = None


@dataclass(frozen=True)
class LogProb:
    """factor * log softmax(z)[target] per row, 0 where target == ignore_index (None: no row is ignored).

    wraps: a negative target counts from the end, as Python indices do.
    """

    logits: Logits
    target: Ref
    ignore_index: int | None = None
    factor: float = 1.0
    wraps: bool = False


@dataclass(frozen=True)
class LogSumExp:
    """logsumexp(z) per row."""

    logits: Logits


@dataclass(frozen=True)
class Selected:
    """z[target] per row; `wraps` as in LogProb."""

    logits: Logits
    target: Ref
    wraps: bool = False


@dataclass(frozen=True)
class NllLoss:
    """-factor * sum (or mean) over the rows that are not ignored of log softmax(z)[target]: a scalar."""

    logits: Logits
    target: Ref
    ignore_index: int
    mean: bool
    factor: float = 1.0


@dataclass(frozen=True)
class Link:
    """A linear step between values per row and the scalar: `times` or `over` a factor, `kept` or `dropped` by a mask,
    `sum` or `mean` over some dims, or a `shape` alone; with the sizes before and after it.
    """

    kind: str
    factor: Ref | float | None
    before: tuple[Size, ...] = field(compare=False)
    after: tuple[Size, ...] = field(compare=False)
    dims: tuple[int, ...] = ()
    keepdim: bool = False


@dataclass(frozen=True)
class Side:
    """One distribution of a pair: the softmax of its logits, or values of this `form` as they are given.

    form: "logits", "log_probs" or "probs"; logits: where they come from, and which rows; tensor: given values that are
    made from no product at all (`logits` is empty then).
    """

    form: str
    logits: Logits
    tensor: Ref | None = None


@dataclass(frozen=True)
class Divergence:
    """factor * sum_v phi(log p_v, log q_v; parameter) per row, times its weights; phi is the page `name` of losses/.

    masked: classes at -inf on either side contribute nothing; weights: values per row, each with what it does to the
    row: `times` or `over` it, or as a mask that keeps it (`kept`) or drops it (`dropped`).
    """

    name: str
    parameter: float
    masked: bool
    p: Side
    q: Side
    factor: float = 1.0
    weights: tuple[tuple[str, Ref], ...] = ()
    summed: bool = False  # over all rows

    @property
    def logits(self) -> Logits:
        return self.p.logits

    @property
    def target(self) -> Ref:
        return self.q


@dataclass(frozen=True)
class WeightedLoss:
    """sum_i w_i * value_i over all rows: a scalar. The links, from the values on, say what the weights are."""

    per_row: LogProb | Divergence
    links: tuple[Link, ...]

    @property
    def logits(self) -> Logits:
        return self.per_row.logits

    @property
    def target(self) -> Ref:
        """The classes that are picked, or the other distribution."""
        return self.per_row.target

    @property
    def ignore_index(self) -> int | None:
        return getattr(self.per_row, "ignore_index", None)


Picked = LogProb | LogSumExp | Selected | NllLoss  # of one distribution
Functional = Picked | Divergence | WeightedLoss
PER_ROW = (LogProb, LogSumExp, Selected)


@dataclass(frozen=True)
class Head:
    """What was lifted from one region: the functionals that share its products, or just how much happens in a row.

    vocab: the largest of the products; hidden: of those that are not given; rows: None if symbolic without a hint;
    dtype: of the logits; returned: the raw logits leave too; operations: values over the vocabulary that are computed
    for a row where the region has no form in the algebra, else 0; given: all logits are inputs of the graph; kinks:
    some operation of the region has a gradient that jumps, as |p - q| has at a tie.
    """

    functionals: tuple[Functional, ...]
    vocab: int
    hidden: tuple[int, ...]
    rows: int | None
    dtype: str
    returned: bool = False
    operations: int = 0
    given: bool = False
    kinks: bool = False

    @property
    def summary(self) -> str:
        products = "logits" if self.given else "linear" if len(self.hidden) == 1 else f"{len(self.hidden)} linear"
        if self.operations:
            return f"{products} + row-wise loss of {self.operations} operations over the vocabulary"
        parts = list(dict.fromkeys(_name(f) for f in self.functionals))
        logits = [x for f in self.functionals for x in all_logits(f)]
        extras = {str(x.map) for x in logits if str(x.map)}
        extras |= {"bias" for x in logits if x.bias is not None}
        tail = f" ({', '.join(sorted(extras))})" if extras else ""
        return f"{products} + {' + '.join(parts)}{tail}"


def all_logits(functional: Functional) -> tuple[Logits, ...]:
    """The logits that a functional reads: one distribution's, or two."""
    if isinstance(functional, WeightedLoss):
        return all_logits(functional.per_row)
    return (functional.p.logits, functional.q.logits) if isinstance(functional, Divergence) else (functional.logits,)


NAMES: dict[type, str] = {LogProb: "log-prob", LogSumExp: "logsumexp", Selected: "selected logit"}


def _name(functional: Functional) -> str:
    if isinstance(functional, NllLoss):
        return f"cross entropy ({'mean' if functional.mean else 'sum'})"
    if isinstance(functional, WeightedLoss):
        return f"weighted sum of {_name(functional.per_row).split(' (')[0].replace('log-prob', 'log-probs')}"
    if isinstance(functional, Divergence):
        return f"{functional.name.replace('_', ' ')}{' (sum)' if functional.summed else ''}"
    return NAMES[type(functional)]
