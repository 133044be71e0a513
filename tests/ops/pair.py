"""A student and a teacher, projected or given, with the operators and an eager computation over their tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fuse_losses.ops  # noqa: F401  registers the operators
from fuse_losses.losses import DIVERGENCES

OPS = torch.ops.fuse_losses
SQUASHES = {"identity": (1.0, 1.0), "scale": (1.0, 0.7), "tanh": (1 / 2.5, 2.5)}


@dataclasses.dataclass
class Pair:
    name: str
    k: float
    tensors: list[Tensor | None]  # p, p_weight, p_bias, q, q_weight, q_bias
    forms: tuple[str, str] = ("logits", "logits")
    squashes: tuple[str, str] = ("identity", "identity")
    row_weight: Tensor | None = None
    masked: bool = False

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        given = [t for t in self.tensors if t is not None]
        return [t.detach().to(dtype or t.dtype).requires_grad_() for t in given]

    def unpack(self, leaves: list[Tensor]) -> list[Tensor | None]:
        rest = iter(leaves)
        return [None if t is None else next(rest) for t in self.tensors]

    def how(self) -> tuple[Any, ...]:
        sides = [
            (form, "identity" if squash == "scale" else squash, *SQUASHES[squash])
            for form, squash in zip(self.forms, self.squashes, strict=True)
        ]
        return self.name, self.k, self.masked, *sides[0], *sides[1]

    def rows(self, leaves: list[Tensor], chunk_rows: int, accumulate: str = "float32") -> Tensor:
        return OPS.divergence(*self.unpack(leaves), *self.how(), chunk_rows, accumulate)

    def sum(self, leaves: list[Tensor], chunk_rows: int, accumulate: str = "float32") -> Tensor:
        return OPS.divergence_sum(*self.unpack(leaves), self.row_weight, *self.how(), chunk_rows, accumulate)

    def eager_rows(self, leaves: list[Tensor]) -> Tensor:
        """Logits in the leaves' dtype, the rest at least in float32."""
        tensors = self.unpack(leaves)
        log_probs = []
        for (x, weight, bias), form, squash in zip((tensors[:3], tensors[3:]), self.forms, self.squashes, strict=True):
            u = x if weight is None else F.linear(x, weight, bias)
            u = u if u.dtype == torch.float64 else u.float()
            inner, outer = SQUASHES[squash]
            z = outer * (torch.tanh(inner * u) if squash == "tanh" else inner * u)
            log_probs.append({"logits": z.log_softmax(1), "log_probs": u, "probs": u.log()}[form])
        if self.masked:
            gone = log_probs[0].isinf() | log_probs[1].isinf()
            lp, lq = (x.masked_fill(gone, 0.0) for x in log_probs)
            per_class = DIVERGENCES[self.name].reference(lp.unsqueeze(-1), lq.unsqueeze(-1), self.k)
            return per_class.masked_fill(gone, 0.0).sum(1)
        return DIVERGENCES[self.name].reference(*log_probs, self.k)

    def eager_sum(self, leaves: list[Tensor]) -> Tensor:
        d = self.eager_rows(leaves)
        return d.sum() if self.row_weight is None else (self.row_weight.to(d.dtype) * d).sum()


def make_pair(
    name="jsd", k=0.5, rows=11, hidden=(16, 24), vocab=127, dtypes=(torch.float32, torch.float32),
    squashes=("identity", "identity"), given=(None, None), bias=True, row_weight=False, spread=1.0, device="cpu",
) -> Pair:  # fmt: skip
    """`given`: for each side the form in which it is given, or None for a projection."""
    tensors: list[Tensor | None] = []
    for width, dtype, form in zip(hidden, dtypes, given, strict=True):
        if form is not None:
            z = spread * torch.randn(rows, vocab, device=device)
            values = {"logits": z, "log_probs": z.log_softmax(1), "probs": z.softmax(1)}[form]
            tensors += [values.to(dtype), None, None]
            continue
        weight = spread * torch.randn(vocab, width, device=device) / width**0.5
        tensors += [
            torch.randn(rows, width, device=device).to(dtype),
            weight.to(dtype),
            torch.randn(vocab, device=device).to(dtype) if bias else None,
        ]
    weights = None
    if row_weight:
        weights = torch.rand(rows, device=device)
        weights[:: max(2, rows // 3)] = 0
    forms = tuple(form or "logits" for form in given)
    return Pair(name, k, tensors, forms, squashes, weights)  # type: ignore[arg-type]


def graded(run, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Value and gradients of `run(leaves)`."""
    value = run(leaves)
    return [value, *torch.autograd.grad(value, leaves, upstream.to(value.dtype))]


def three(pair: Pair, run, eager, upstream: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What `run` gives, what eager gives, and what eager gives in float64."""
    return (
        graded(run, pair.leaves(), upstream),
        graded(eager, pair.leaves(), upstream),
        graded(eager, pair.leaves(torch.float64), upstream),
    )
