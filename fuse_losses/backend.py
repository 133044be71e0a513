"""The backend: fuse the heads of a captured graph, give everything else to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._dynamo.exc import RestartAnalysis, SkipFrame

import fuse_losses.ops  # noqa: F401  registers the operators
from fuse_losses import pipeline
from fuse_losses.inductor import compile_with_inductor
from fuse_losses.options import split_options
from fuse_losses.report import report as reports
from fuse_losses.report.report import log


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Entry point of `torch.compile(model, backend="fuse_losses")`.

    options: `fuse_losses.*` (see Options) and any of Inductor's; mode: Inductor's. Raises OptionError for a wrong
    option of ours, FusionError under `fuse_losses.strict` for a head that is not fused.
    """
    own, inductor_options = split_options(options)
    fused, report = pipeline.fuse(gm, own)
    try:
        compiled = compile_with_inductor(fused, example_inputs, mode, inductor_options, fused=fused is not gm)
    except (RestartAnalysis, SkipFrame):  # Dynamo's own signals, no failures
        raise
    except Exception as error:
        if fused is gm or own.strict:
            raise
        log.exception("the rewritten graph does not compile; the graph goes to Inductor as it came")
        compiled = compile_with_inductor(gm, example_inputs, mode, inductor_options, fused=False)
        report = pipeline.failed(report, error)
    reports.publish(report, own.report)
    return compiled


backend.reset = reports.clear  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it
