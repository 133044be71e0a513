"""What a workload is made of: cases, the phases of each that are timed, and the steps that a peer runs for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuse_losses.bench.exact import Errors
from fuse_losses.bench.peers import Peer

FULL = "forward+backward"
FORWARD = "forward, no gradient"
LOSS = "forward, gradient wanted"


@dataclass(frozen=True)
class Check:
    """One step against float64, and whether the peer wrote into its inputs."""

    errors: Errors
    overwrites: bool


@dataclass(frozen=True)
class Step:
    """A step to time. `clear` drops the gradients and restores what was overwritten, untimed.

    Where `gradients_stay`, those of the step before are resident while the memory is measured, and so do not count.
    `check` runs a step and compares it with float64; it comes first, and finds out what `clear` has to restore.
    """

    run: Callable[[], Tensor]
    clear: Callable[[], None]
    gradients_stay: bool = False
    check: Callable[[], Check] | None = None


class BenchError(ValueError):
    """A workload, a peer or a size that does not exist."""


class NotApplicable(Exception):
    """A peer that cannot do a case; the message says why."""


@dataclass(frozen=True)
class Phase:
    """What of a case is timed. Where the work that cannot be avoided is known, the time has a floor."""

    name: str
    flops: float | None = None
    bytes: float | None = None

    def floor_ms(self, roofs: Mapping[str, float]) -> float | None:
        """The larger of the bytes over the copy bandwidth and the flops over the matmul rate."""
        if self.flops is None or self.bytes is None:
            return None
        memory = self.bytes / roofs["copy_bytes_per_second"]
        return 1e3 * max(memory, self.flops / roofs["matmul_bf16_flops_per_second"])


@dataclass(frozen=True)
class Case:
    """One size. `build` makes the inputs for one peer and, under each phase's name, its step."""

    name: str
    size: int  # the number that --sizes names
    phases: tuple[Phase, ...]
    build: Callable[[Peer, str], Mapping[str, Step]]


@dataclass(frozen=True)
class Workload:
    """`peers` are those that can do it, by name; None are all."""

    name: str
    parameters: dict[str, Any]
    cases: tuple[Case, ...]
    repeats: int = 10
    peers: tuple[str, ...] | None = None


def upstream(device: str, *shape: int) -> Tensor:
    """A gradient of the loss that is not 1, so that a kernel which assumes 1 gains nothing."""
    return 0.5 + torch.rand(shape, device=device)
