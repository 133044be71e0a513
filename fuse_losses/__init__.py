"""Fused losses for language models: torch.compile(model, backend="fuse_losses")."""

from __future__ import annotations

from fuse_losses.explain import explain
from fuse_losses.options import OptionError, Options
from fuse_losses.report.decline import Decline, FusionError
from fuse_losses.report.report import HeadReport, Report, last_report

__version__ = "0.1.0"

__all__ = [
    "Decline",
    "FusionError",
    "HeadReport",
    "OptionError",
    "Options",
    "Report",
    "__version__",
    "explain",
    "last_report",
]
