"""`explain(fn)(*args)`: run a function once and tell what the backend makes of its heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuse_losses.options import split_options
from fuse_losses.report.report import Report


def explain(fn: Callable[..., Any], **options: Any) -> Callable[..., Report]:
    """Return a function that runs `fn` under the backend's pipeline, without Inductor, and returns the Report.

    options: the backend's own, without their prefix: `explain(fn, min_vocab=1)(x, y)`. `print(report)` shows it.
    Runs `fn` for real, once, and resets torch._dynamo before and after.
    """
    own, _ = split_options({f"fuse_losses.{name}": value for name, value in options.items()})

    def explained(*args: Any, **kwargs: Any) -> Report:
        import fuse_losses.ops  # noqa: F401  registers the operators
        from fuse_losses import pipeline

        report = Report()

        def reader(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            fused, found = pipeline.fuse(gm, own)
            report.extend(found)
            return fused.forward

        torch._dynamo.reset()
        try:
            torch.compile(fn, backend=reader)(*args, **kwargs)
        finally:
            torch._dynamo.reset()
        return report

    return explained
