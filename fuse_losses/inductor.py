"""Handing a graph to Inductor, with its own validation of modes and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any], changed: bool
) -> Callable[..., Any]:
    """What `torch.compile(backend="inductor", mode=mode, options=options)` makes of the graph."""
    compiler = torch._TorchCompileInductorWrapper(mode, dict(options) or None, None)
    return compiler(gm, list(example_inputs))
