"""The algebra, evaluated: what a functional is worth, in float64 and the plainest PyTorch. Refs are tensors here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuse_losses.head.algebra import (
    Link,
    LogitMap,
    Logits,
    LogProb,
    LogSumExp,
    Picked,
    RowStep,
    Selected,
    WeightedLoss,
)

SQUASHES: dict[str, Callable[[Tensor], Tensor]] = {"identity": torch.clone, "tanh": torch.tanh}
VIEWS: dict[str, Callable[..., Tensor]] = {
    "slice": torch.ops.aten.slice.Tensor,
    "select": torch.select,
    "unsqueeze": torch.unsqueeze,
    "flip": torch.flip,
    "roll": torch.roll,
}


def evaluate(functional: Picked | WeightedLoss, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The functional over x [*rows, H], weight [V, H] and bias [V]: a value per row, or a scalar for a loss."""
    if isinstance(functional, WeightedLoss):
        assert isinstance(functional.per_row, LogProb)
        value = evaluate(functional.per_row, x, weight, bias)
        for link in functional.links:
            value = linked(link, value)
        return value
    z = logits(functional.logits, x, weight, bias)
    if isinstance(functional, LogSumExp):
        return z.logsumexp(-1)
    target = functional.target.reshape(z.shape[:-1])
    if isinstance(functional, Selected):
        return _pick(z, target, functional.wraps)
    kept = torch.ones_like(target, dtype=torch.bool)
    if functional.ignore_index is not None:
        kept = target != functional.ignore_index
    wraps = isinstance(functional, LogProb) and functional.wraps
    log_prob = _pick(z.log_softmax(-1), torch.where(kept, target, 0), wraps)
    log_prob = torch.where(kept, functional.factor * log_prob, 0.0)
    if isinstance(functional, LogProb):
        return log_prob
    return -log_prob.sum() / (kept.sum() if functional.mean else 1)


def linked(link: Link, value: Tensor) -> Tensor:
    """One linear step on the way from log-probs to the scalar."""
    factor: Any = link.factor
    if link.kind in ("times", "over"):
        return value * factor if link.kind == "times" else value / factor
    if link.kind in ("kept", "dropped"):
        return torch.where(factor if link.kind == "kept" else ~factor, value, 0.0)
    if link.kind == "shape":
        return value.reshape(link.after)
    return (value.sum if link.kind == "sum" else value.mean)(link.dims, keepdim=link.keepdim)


def logits(head: Logits, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[*rows, V] of what the head says, the vocabulary last."""
    z = x.double() @ weight.double().t()
    if bias is not None:
        z = z + bias.double()
    if head.classes is not None:
        z = z[..., slice(*head.classes)]
    if head.bias is not None:
        z = z + head.bias.double().reshape(-1)
    z = mapped(head.map, z)
    for step in head.rows:
        z = stepped(step, z)
    return z.detach() if head.detached else z


def mapped(map: LogitMap, u: Tensor) -> Tensor:
    """outer * squash(inner * u)."""
    return map.outer * SQUASHES[map.squash](map.inner * u)


def stepped(step: RowStep, rows: Tensor) -> Tensor:
    """What a step makes of [*rows, last]; the last dim is left alone."""
    if step.kind == "reshape":
        return rows.reshape(*step.args, rows.shape[-1])
    if step.kind == "permute":
        return rows.permute(*step.args, rows.dim() - 1)
    if step.kind == "index":
        return torch.ops.aten.index.Tensor(rows, list(step.args))
    return VIEWS[step.kind](rows, *step.args)


def _pick(values: Tensor, target: Tensor, wraps: bool) -> Tensor:
    if wraps:
        target = torch.where(target < 0, target + values.shape[-1], target)
    return values.gather(-1, target.unsqueeze(-1)).squeeze(-1)
