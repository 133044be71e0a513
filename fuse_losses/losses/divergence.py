"""What a page says of a divergence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`; `ends` says which of the two belong to it, as in "[)"."""

    low: float
    high: float
    ends: str = "[]"

    def __contains__(self, number: float) -> bool:
        above = number >= self.low if self.ends[0] == "[" else number > self.low
        return above and (number <= self.high if self.ends[1] == "]" else number < self.high)

    def __str__(self) -> str:
        return f"{self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"


@dataclass(frozen=True, eq=False)  # a page is itself alone
class Divergence:
    """`sum_v phi(p_v, q_v)` of a student p and a teacher q, with one float parameter k.

    phi, slope1, slope2: functions of (p, q, lp, lq, k), where lp = log p and lq = log q; phi1, phi2: also of `centred`.
    They are written once, in the language of `losses.scalar`, and run on torch tensors and in Triton kernels.

    With (a1, a2) = scale(k), a1 * phi1 is d phi / d lp, the gradient for given log-probabilities, and a1 * slope1 is
    d phi / d p, the gradient for given probabilities, a limit of it where eager has NaN. That for logits is
    a1 * (g - p * sum(g) / sum(p)) for g = phi1 or, with `centred=1.0`, g = phi1 + c1 * p, where (c1, c2) = centre(k):
    a softmax does not see a multiple of p. The shift keeps digits where p is close to q. There g is 0 or p or -p to the
    last bit, so that equal distributions have gradients of exact zeros. phi2, a2, c2 and slope2 are the same for q.

    Of p and q either may be 0, and no function gives NaN. `reference(lp, lq, k)` gives float64 values [...] of
    log-probabilities [..., V] without phi; `spellings` are functions of (student logits, teacher logits, k) in eager
    PyTorch.
    """

    name: str
    formula: str
    parameter: str | None  # how users call k; None: there is none, and k is 0
    default: float
    valid: Interval
    phi: Callable[..., Any]
    phi1: Callable[..., Any]
    phi2: Callable[..., Any]
    slope1: Callable[..., Any]
    slope2: Callable[..., Any]
    scale: Callable[[float], tuple[float, float]]
    centre: Callable[[float], tuple[float, float]]
    reference: Callable[[Tensor, Tensor, float], Tensor]
    spellings: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]]

    def check(self, k: float) -> None:
        """Raise ValueError for a parameter out of its range."""
        if k not in self.valid:
            said = f"in {self.valid}" if self.parameter else f"{self.default:g}, as there is none"
            raise ValueError(f"the parameter {self.parameter or ''} of {self.name} must be {said}, got {k}")
