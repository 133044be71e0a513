"""What turns a head that can be fused into one that cannot, or that can only just."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.properties.heads import Data, Program, Step


@dataclass(frozen=True)
class Miss:
    """between: applied to the logits before the losses; extra: one more output; fusable: fusing stays right.

    learned: with gradients (what writes to operands of the head has none, as eager's backward refuses them); silent:
    what is behind the loss is taken for the body of a model; writes: to the labels.
    """

    between: Step | None = None
    extra: Step | None = None
    fusable: bool = False
    learned: bool = True
    silent: bool = False
    writes: bool = False


def written(z: Tensor, d: Data, operand: str) -> Tensor:
    getattr(d, operand).mul_(2)
    return z


def labels_written(z: Tensor, d: Data) -> Tensor:
    d.y[:1] = d.ignore
    d.c[:1] = 2
    return z


MISSES: dict[str, Miss] = {
    # the vocabulary leaves
    "log-probs returned": Miss(extra=lambda z, d: z.log_softmax(-1)),
    "probs returned": Miss(extra=lambda z, d: F.softmax(z, -1)),
    "log-probs less their mean returned": Miss(extra=lambda z, d: z - z.logsumexp(-1, keepdim=True)),
    "logits returned": Miss(extra=lambda z, d: z * 1.0, fusable=True),
    # rows mix
    "softmax over positions": Miss(between=lambda z, d: z.log_softmax(1)),
    "cumsum over positions": Miss(between=lambda z, d: z.cumsum(1)),
    "cumsum over sequences": Miss(between=lambda z, d: z.cumsum(0)),
    "less the mean over rows": Miss(between=lambda z, d: z - z.mean((0, 1), keepdim=True)),
    "less the mean over positions": Miss(between=lambda z, d: z - z.mean(1, keepdim=True)),
    "plus the rows before": Miss(between=lambda z, d: z + z.roll(1, 1).cumsum(1)),
    "plus the first sequence": Miss(between=lambda z, d: z + z[:1]),
    "divided by the largest of all": Miss(between=lambda z, d: z / z.abs().max()),
    "rows and classes reshaped": Miss(
        between=lambda z, d: (
            z.reshape(z.size(0), z.size(2), z.size(1))
            .reshape(z.shape)
            .sin()
            .reshape(z.size(0), z.size(2), z.size(1))
            .mT.contiguous()
            .view(z.shape)
        )
    ),
    "mixed by a matrix": Miss(
        between=lambda z, d: torch.matmul(z.new_ones(z.size(1), z.size(1)).triu(), z), silent=True
    ),
    # rows move: right to fuse if they are followed
    "plus the next row": Miss(between=lambda z, d: z + z.roll(1, 1), fusable=True),
    "probs times weight returned": Miss(extra=lambda z, d: z.softmax(-1) @ d.w, fusable=True),
    "rows rolled": Miss(between=lambda z, d: z.roll(1, 1), fusable=True),
    "rows flipped": Miss(between=lambda z, d: z.flip(0), fusable=True),
    "rows indexed": Miss(between=lambda z, d: z[torch.arange(z.size(0) - 1, -1, -1)], fusable=True),
    "rows masked": Miss(between=lambda z, d: z * d.m.unsqueeze(-1), fusable=True),
    "rows masked in place": Miss(
        between=lambda z, d: (z * 1.0).masked_fill_(d.m.unsqueeze(-1) == 0, 0.5), fusable=True
    ),
    # what is read is written to
    "hidden states written to": Miss(between=lambda z, d: written(z, d, "x"), learned=False, fusable=True),
    "weight written to": Miss(between=lambda z, d: written(z, d, "w"), learned=False, fusable=True),
    "labels written to": Miss(between=labels_written, fusable=True, writes=True),
    # every run is another one
    "dropout": Miss(between=lambda z, d: F.dropout(z, 0.5, True), silent=True),
    "noise": Miss(between=lambda z, d: z + torch.randn_like(z)),
    "noise for one of all": Miss(between=lambda z, d: z + 0.1 * torch.rand(z.shape), fusable=True),
}


def near_miss(program: Program, miss: Miss) -> Callable[..., Any]:
    """The program with the change."""

    def fn(x: Tensor, w: Tensor, b: Tensor, y: Tensor, c: Tensor, m: Tensor) -> Any:
        if miss.writes or not miss.learned:
            x, w, y, c = x.clone(), w.clone(), y.clone(), c.clone()
        rows = program.rows
        d = Data(x, w, b, y[:, rows], c[:, rows], m[:, rows], program.ignore)
        z = program.project(program.before(x, d), d)
        for step in program.maps:
            z = step(z, d)
        z = z[:, rows]
        if miss.between is not None:
            z = miss.between(z, d)
        outputs = [after(loss(z, d), d) for loss, after in program.losses]
        return outputs if miss.extra is None else [*outputs, miss.extra(z, d)]

    return fn
