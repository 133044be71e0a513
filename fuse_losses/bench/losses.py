"""A loss on one set of inputs as a case: its data, the work that cannot be avoided, its steps and their check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fuse_losses.bench.case import FORWARD, FULL, Case, Check, Phase, Step, upstream
from fuse_losses.bench.exact import errors
from fuse_losses.bench.peers import Peer

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Data:
    """What a loss is called with. The inputs at `learns` get a gradient; those at `shared` are weights, not rows."""

    inputs: tuple[Tensor, ...]
    learns: tuple[int, ...] = (0,)
    shared: frozenset[int] = frozenset()
    loss_shape: tuple[int, ...] = ()

    @property
    def vocab(self) -> int:
        return self.inputs[min(self.shared)].shape[0] if self.shared else self.inputs[0].shape[-1]

    def __str__(self) -> str:
        shapes = dict.fromkeys(str(list(x.shape)) for x in self.inputs if x.is_floating_point())
        return f"{' x '.join(shapes)} {str(self.inputs[0].dtype).removeprefix('torch.')}"

    def phase(self, name: str) -> Phase:
        """Every input is read once and every gradient written once. A product is made once, and twice more for a
        weight that learns: for its own gradient and for that of the hidden states."""
        flops = {i: 2.0 * len(self.inputs[0]) * self.inputs[i].numel() for i in self.shared}
        read = sum(x.numel() * x.itemsize for x in self.inputs)
        if name != FULL:
            return Phase(name, sum(flops.values()), read)
        written = sum(self.inputs[i].numel() * self.inputs[i].itemsize for i in self.learns)
        backward = sum(2 * flops[i] for i in self.shared.intersection(self.learns))
        return Phase(name, sum(flops.values()) + backward, read + written)


def linear_head(rows: int, hidden: int, vocab: int, device: str) -> tuple[Tensor, Tensor]:
    """Hidden states [rows, H] and weight [V, H] in bfloat16; the logits have about unit variance."""
    states = torch.randn(rows, hidden, dtype=torch.bfloat16, device=device)
    return states, torch.randn(vocab, hidden, dtype=torch.bfloat16, device=device) / math.sqrt(hidden)


def loss_case(
    name: str,
    size: int,
    make: Callable[[str], Data],
    plain: Loss,
    kernel: Callable[[Peer], Loss],
    phases: tuple[str, ...],
) -> Case:
    """`make(device)` makes the data, `plain` is what float64 computes, `kernel(peer)` what the peer compiles."""
    planned = make("meta")

    def build(peer: Peer, device: str) -> Mapping[str, Step]:
        torch.manual_seed(0)
        bound = _Bound(make(device), plain, peer.compile(kernel(peer)), device)
        return {phase: bound.step(phase) for phase in phases}

    return Case(f"{name} {planned}", size, tuple(map(planned.phase, phases)), build)


class _Bound:
    """One peer's loss on its data."""

    def __init__(self, data: Data, plain: Loss, loss: Loss, device: str) -> None:
        self.data, self.plain, self.loss = data, plain, loss
        self.upstream = upstream(device, *data.loss_shape)
        self.kept: dict[int, Tensor] = {}  # copies of the inputs that the peer overwrites
        for i in data.learns:
            data.inputs[i].requires_grad_()

    def step(self, phase: str) -> Step:
        return Step(partial(self.run, phase), self.clear, check=partial(self.check, phase))

    def run(self, phase: str) -> Tensor:
        with torch.no_grad() if phase == FORWARD else nullcontext():
            loss = self.loss(*self.data.inputs)
        if phase == FULL:
            loss.backward(self.upstream.to(loss.dtype))
        return loss.detach()

    @torch.no_grad()
    def clear(self) -> None:
        for tensor in self.data.inputs:
            tensor.grad = None
        for i, copy in self.kept.items():
            self.data.inputs[i].copy_(copy)

    def check(self, phase: str) -> Check:
        inputs = self.data.inputs
        before = [x.detach().clone() for x in inputs]
        loss = self.run(phase)
        self.kept |= {i: copy for i, copy in enumerate(before) if not torch.equal(inputs[i], copy)}
        del before
        gradients = {i: self._gradient(i) for i in self.data.learns} if phase == FULL else {}
        self.clear()
        found = errors(self.plain, inputs, self.data.shared, self.data.vocab, self.upstream, loss, gradients)
        return Check(found, overwrites=bool(self.kept))

    def _gradient(self, i: int) -> Tensor:
        """A copy: it may lie in the memory of an input, which is about to be restored."""
        gradient = self.data.inputs[i].grad
        if gradient is None:
            raise RuntimeError(f"no gradient for input {i}")
        return gradient.clone()
