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


@dataclass(frozen=True)
class Divergence:
    """`sum_v phi(p_v, q_v)` of a student p and a teacher q, with one float parameter k.

    phi, slope1, slope2: functions of (p, q, lp, lq, k), where lp = log p and lq = log q; phi1, phi2: also of `centred`.
    They are written once, in the language of `losses.scalar`, and run on torch tensors and in Triton kernels.

    phi1 is d phi / d lp, the gradient for given log-probabilities. With `centred=1.0` it is phi1 + c1 * p, where
    (c1, c2) = centre(k): a softmax does not see a multiple of p, and this one is exactly 0 where p equals q.
    slope1 is d phi / d p, the gradient for given probabilities, with a limit where eager has NaN. phi2, c2 and slope2
    are the same for q.

    All are 0 or a number, never NaN, where p or q is 0. `reference(lp, lq, k)` gives float64 values [...] of
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
    centre: Callable[[float], tuple[float, float]]
    reference: Callable[[Tensor, Tensor, float], Tensor]
    spellings: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]]

    def check(self, k: float) -> None:
        """Raise ValueError for a parameter out of its range."""
        if k not in self.valid:
            said = f"in {self.valid}" if self.parameter else f"{self.default:g}, as there is none"
            raise ValueError(f"the parameter {self.parameter or ''} of {self.name} must be {said}, got {k}")
