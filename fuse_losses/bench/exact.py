"""How far a peer is from float64, in blocks of rows, so that the largest case fits beside its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 2**26  # of a [rows, V] tensor in float64: 512 MiB


@dataclass(frozen=True)
class Errors:
    """Distance from float64 relative to its norm, over all elements; `gradient` is the worst of the inputs'."""

    loss: float
    gradient: float | None


class _Distance:
    """||found - exact|| / ||exact||, added up over parts."""

    def __init__(self) -> None:
        self.apart: Tensor | float = 0.0
        self.norm: Tensor | float = 0.0

    def add(self, found: Tensor, exact: Tensor) -> None:
        self.apart = self.apart + (found.double() - exact).square().sum()
        self.norm = self.norm + exact.square().sum()

    def relative(self) -> float:
        return float(self.apart) ** 0.5 / float(self.norm) ** 0.5


def errors(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    shared: Set[int],
    vocab: int,
    upstream: Tensor,
    loss: Tensor,
    gradients: Mapping[int, Tensor],
) -> Errors:
    """Errors of `loss` and of `gradients`, those of the inputs at these positions.

    `function(*inputs, wide=torch.float64)` computes in float64 and returns the loss of each index of dim 0, or its
    mean over them. The inputs that are `shared` have no rows. Every row is compared.
    """
    whole = {i: _widened(inputs[i], i in gradients) for i in shared}
    totals = {i: torch.zeros_like(whole[i]) for i in whole if i in gradients}
    apart = {i: _Distance() for i in gradients}
    loss_apart, mean = _Distance(), torch.zeros((), dtype=torch.float64, device=loss.device)
    rows = len(inputs[0])
    height = max(1, BLOCK_ELEMENTS // vocab)
    for start in range(0, rows, height):
        block = slice(start, min(start + height, rows))
        wide = [whole[i] if i in whole else _widened(tensor[block], i in gradients) for i, tensor in enumerate(inputs)]
        value = function(*wide, wide=torch.float64)
        if value.dim():
            loss_apart.add(loss[block], value.detach())
        else:
            value = value * ((block.stop - start) / rows)
            mean += value.detach()
        if gradients:
            above = upstream[block] if value.dim() else upstream
            exact = torch.autograd.grad(value, [wide[i] for i in gradients], above.double())
            for i, gradient in zip(gradients, exact, strict=True):
                if i in totals:
                    totals[i] += gradient
                else:
                    apart[i].add(gradients[i][block], gradient)
    if not loss.dim():
        loss_apart.add(loss, mean)
    for i, total in totals.items():
        apart[i].add(gradients[i], total)
    return Errors(loss_apart.relative(), max(d.relative() for d in apart.values()) if apart else None)


def _widened(tensor: Tensor, learns: bool) -> Tensor:
    """A leaf in float64; integers stay."""
    return tensor.detach().double().requires_grad_(learns) if tensor.is_floating_point() else tensor
