"""Whom fuse_losses is compared with. A peer is a way to compile plain PyTorch, or a head of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Head = Callable[..., Tensor]  # (hidden [N, H], weight [V, H], labels [N]) -> mean loss
OURS = "fuse_losses"
P = ParamSpec("P")
R = TypeVar("R")


def plain_head(hidden: Tensor, weight: Tensor, labels: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
    """The head as transformers writes it: bf16 logits, the loss in float32 (`wide`; the reference's is float64)."""
    return F.cross_entropy(F.linear(hidden, weight).to(wide), labels)


def _liger_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)


def _cce_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Exact: `filter_eps=None` switches off the gradient filter, which drops small tiles."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, labels, filter_eps=None)


def _torch_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch 2.13's own chunked operator."""
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    return F.linear_cross_entropy(hidden, weight, labels, options=options)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Peer:
    """It runs where `module` is importable and `feature` holds; the version of `package` is recorded."""

    name: str
    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    head: Head = plain_head
    module: str = "torch"
    package: str = "torch"
    feature: Callable[[], bool] = lambda: True
    cuda_only: bool = False

    def missing(self, device: str) -> str:
        """Why the peer cannot run here; empty if it can."""
        if importlib.util.find_spec(self.module) is None:
            return "not installed"
        if self.cuda_only and device != "cuda":
            return "needs CUDA"
        return "" if self.feature() else f"not in {self.package} {version(self.package)}"

    def compile(self, function: Callable[P, R]) -> Callable[P, R]:
        if self.backend is None:
            return function
        return torch.compile(function, backend=self.backend, options=dict(self.options) or None)


def version(package: str) -> str | None:
    """The installed version; None if there is none. A checkout that is not installed knows its own."""
    if package == OURS:
        import fuse_losses

        return fuse_losses.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _has_auto_chunker() -> bool:
    import torch._inductor.config as config

    return hasattr(config, "auto_chunker")


PEERS: tuple[Peer, ...] = (
    Peer("eager"),
    Peer("inductor", backend="inductor"),
    Peer(
        "inductor, auto_chunker",
        backend="inductor",
        options={"auto_chunker.enable": True},
        feature=_has_auto_chunker,
    ),
    Peer("F.linear_cross_entropy", head=_torch_head, feature=partial(hasattr, F, "linear_cross_entropy")),
    Peer("liger", head=_liger_head, module="liger_kernel", package="liger-kernel", cuda_only=True),
    Peer("cce, exact", head=_cce_head, module="cut_cross_entropy", package="cut-cross-entropy", cuda_only=True),
    Peer(OURS, backend=OURS, module=OURS, package=OURS),
)
