"""Which divergence a function of two log-probabilities is: found by its values and slopes, whatever its spelling.

sum_v f(log p_v, log q_v) is spelled in dozens of ways (kl_div in either order, log-space or probability-space
mixtures, masks of infinities); f is a scalar function of two numbers, and two such functions that agree, with their
slopes, over a grid of 29 decades, at ties and at -inf are one function for every purpose of a kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fuse_losses.losses import DIVERGENCES, Divergence

TOLERANCE = 1e-6  # of the larger term: constants of a float32 graph are off by 1e-7, an epsilon of 1e-8 by much more
_LEVELS = (-1e-3, -0.07, -0.4, -1.0, -2.3, -4.1, -8.0, -14.0, -23.0, -37.0, -52.0, -67.0)
_INF = float("inf")


@dataclass(frozen=True)
class Match:
    """factor * phi of the page `name`; slopes: whether p's and q's gradients are phi's (else they are zero)."""

    name: str
    parameter: float
    factor: float
    masked: bool
    slopes: tuple[bool, bool]


def grid() -> tuple[Tensor, Tensor]:
    """(log p, log q) [K] in float64: all pairs of levels, ties among them, then pairs with -inf."""
    level = torch.tensor(_LEVELS, dtype=torch.float64)
    p, q = level.repeat_interleave(len(level)), level.repeat(len(level))
    nudge = torch.linspace(0.97, 1.03, len(p), dtype=torch.float64)
    p = torch.where(p == q, p, p * nudge)
    edge = torch.tensor([-0.5, -3.0, -20.0], dtype=torch.float64)
    never = torch.full_like(edge, -_INF)
    return torch.cat([p, edge, never, never]), torch.cat([q, never, edge, never])


def identify(
    f: Callable[[Tensor, Tensor], Tensor], constants: Iterable[float], normalised: bool = True
) -> Match | None:
    """The page of `losses` that f(log p, log q) is, in float64; `constants` are the numbers that f is written with.

    normalised: p and q are softmaxes, and f may differ from the page by a multiple of p - q, which sums to nothing.
    """
    lp, lq = (t.requires_grad_() for t in grid())
    with torch.enable_grad():
        made = f(lp, lq)
        slopes = torch.autograd.grad(made.sum(), [lp, lq], allow_unused=True) if made.requires_grad else (None, None)
    target = _Samples(lp.detach(), lq.detach(), made.detach(), (slopes[0], slopes[1]))
    parameters = list(_parameters(constants))
    for page in DIVERGENCES.values():
        choices = [page.default] if page.parameter is None else [page.default, *parameters]
        for k in dict.fromkeys(k for k in choices if k in page.valid):
            found = target.match(page, k, normalised)
            if found is not None:
                return found
    return None


def _rounded(factor: float) -> float:
    """A whole number where the factor is one but for rounding."""
    return float(round(factor)) if round(factor) and abs(factor - round(factor)) < TOLERANCE else factor


@functools.lru_cache(256)
def _on_grid(name: str, k: float) -> tuple[Tensor, Tensor, Tensor]:
    """phi of a page, and its derivatives by log p and by log q."""
    lp, lq = grid()
    page, point = DIVERGENCES[name], (lp.exp(), lq.exp(), lp, lq, k)
    scale = page.scale(k)
    return page.phi(*point), scale[0] * page.phi1(*point), scale[1] * page.phi2(*point)


def holds_beyond(match: Match, f: Callable[[Tensor, Tensor], Tensor], forms: tuple[str, str]) -> bool:
    """Whether f is that divergence, too, for numbers that no distribution has but a tensor that is given may hold.

    forms: those in which the two sides are given; the logarithm of a negative number is complex here.
    """
    if set(forms) == {"logits"}:
        return True
    usual = torch.tensor([-0.1, -1.2, -7.0], dtype=torch.complex128)
    strange = {
        "probs": torch.tensor([-0.7, -3.0, 0.0, 1.6], dtype=torch.complex128).log(),
        "log_probs": torch.tensor([0.6, 2.0, 0.0], dtype=torch.complex128),
    }
    sides = [torch.cat([usual, strange[form]]) if form in strange else usual for form in forms]
    lp, lq = sides[0].repeat_interleave(len(sides[1])), sides[1].repeat(len(sides[0]))
    mine = f(lp, lq)
    p, q = lp.exp().real, lq.exp().real
    wanted = match.factor * DIVERGENCES[match.name].phi(p, q, p.log(), q.log(), match.parameter)
    close = torch.isclose(mine, wanted, rtol=TOLERANCE, atol=TOLERANCE * abs(match.factor), equal_nan=True)
    return bool((close | mine.isnan()).all())


def _parameters(constants: Iterable[float]) -> Iterator[float]:
    """What a number in the graph says of a mixture's weight: itself, its complement, or the logarithm of either."""
    for c in constants:
        share = math.exp(-abs(c))
        for k in (c, 1.0 - c, share, 1.0 - share):
            if 0.0 < k < 1.0:
                yield k


@dataclass(frozen=True)
class _Samples:
    lp: Tensor
    lq: Tensor
    value: Tensor
    slopes: tuple[Tensor | None, Tensor | None]

    def match(self, page: Divergence, k: float, normalised: bool) -> Match | None:
        phi, *partials = _on_grid(page.name, k)
        inside = self.lp.isfinite() & self.lq.isfinite()
        p, q = self.lp.exp(), self.lq.exp()
        factor, shift = self._fit(phi, p - q, inside) if normalised else (self._factor(phi, inside), 0.0)
        if factor is None or not self._agree(self.value, factor * phi + shift * (p - q), inside):
            return None
        masked = self._edges(factor * phi + shift * (p - q), ~inside)
        if masked is None:
            return None
        slopes: list[bool] = []
        for mine, partial, own in zip(self.slopes, partials, (p, -q), strict=True):
            wanted = factor * partial + shift * own
            slopes.append(mine is not None and bool(mine[inside].any()))
            if mine is not None and slopes[-1] and not self._agree(mine, wanted, inside):
                return None
        return Match(page.name, k, factor, masked, (slopes[0], slopes[1]))

    def _fit(self, phi: Tensor, nothing: Tensor, inside: Tensor) -> tuple[float | None, float]:
        """The factors of phi and of what sums to nothing in f, by least squares; None if that is no number, or zero."""
        scale = self._scale()[inside]
        basis = torch.stack([phi[inside], nothing[inside]], 1) / scale.unsqueeze(1)
        if not (basis.isfinite().all() and self.value[inside].isfinite().all()):
            return None, 0.0
        inverse = cast(Tensor, torch.linalg.pinv(basis))  # pyright: ignore[reportUnknownMemberType]
        solved = inverse @ (self.value[inside] / scale)
        factor, shift = float(solved[0]), float(solved[1])
        if not math.isfinite(factor) or abs(factor) < 1e-9 or abs(shift) < TOLERANCE * abs(factor):
            return self._factor(phi, inside), 0.0
        return _rounded(factor), shift

    def _scale(self) -> Tensor:
        """The size of a term of f at each point: what rounding is relative to."""
        return torch.maximum(self.lp, self.lq).exp() * (1 + self.lp.abs() + self.lq.abs())

    def _factor(self, phi: Tensor, inside: Tensor) -> float | None:
        """f / phi where phi is large among its terms; None if it is no number, or zero."""
        share = torch.where(inside, phi.abs() / self._scale(), 0.0)
        best = int(share.nan_to_num(0.0).argmax())
        ratio = float(self.value[best] / phi[best])
        if not math.isfinite(ratio) or ratio == 0.0:
            return None
        return _rounded(ratio)

    def _agree(self, mine: Tensor, wanted: Tensor, where: Tensor) -> bool:
        scale = self._scale()[where]
        mine, wanted = mine[where], wanted[where]
        factor = (torch.maximum(mine.abs(), wanted.abs()) / scale).max()
        return bool(((mine - wanted).abs() <= TOLERANCE * factor * scale).all())

    def _edges(self, wanted: Tensor, edges: Tensor) -> bool | None:
        """Whether f drops classes at -inf; None if it does neither that nor what phi does. NaN agrees with anything."""
        mine = self.value[edges]
        known = ~mine.isnan()
        plain = (mine == wanted[edges]) | ((mine - wanted[edges]).abs() <= TOLERANCE)
        if bool(plain[known].all()):
            return False
        return True if bool((mine == 0)[known].all()) else None
