"""A backend that runs the pipeline alone: graphs before and after, reports, and what ran is the rewritten graph."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import fuse_losses.ops  # noqa: F401  registers the operators
from fuse_losses import pipeline
from fuse_losses.options import Options
from fuse_losses.report.report import Report


class Capture:
    """`Capture(min_vocab=1)` is a backend for torch.compile; it keeps what it saw and what it made of it."""

    def __init__(self, **options: Any) -> None:
        self.options = Options(**{"min_vocab": 1, **options})
        self.before: list[fx.GraphModule] = []
        self.after: list[fx.GraphModule] = []
        self.report = Report()

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        fused, report = pipeline.fuse(gm, self.options)
        self.before.append(gm)
        self.after.append(fused)
        self.report.extend(report)
        return fused.forward

    def compile(self, fn: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        return torch.compile(fn, backend=self, **how)

    @property
    def codes(self) -> list[str]:
        return [h.decline.code for h in self.report.declined if h.decline is not None]

    @property
    def summaries(self) -> list[str]:
        return [h.summary for h in self.report.fused]


def operators(gm: fx.GraphModule) -> list[str]:
    """The fused operators of a graph, in order, those of checkpoint bodies included."""
    found = []
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            found += [
                str(n.target).split(".")[1] for n in module.graph.nodes if str(n.target).startswith("fuse_losses.")
            ]
    return found


def listing(gm: fx.GraphModule) -> str:
    """One line per node: `name = target(arguments)`, with nothing in it that depends on where the code lies."""
    lines = []
    for node in gm.graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        if isinstance(node.target, torch._ops.OpOverload):
            target = str(node.target)
        if node.op == "placeholder":
            lines.append(f"{node.name} = input")
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
        else:
            given = [*map(_text, node.args), *(f"{k}={_text(v)}" for k, v in node.kwargs.items())]
            lines.append(f"{node.name} = {target}({', '.join(given)})")
    wrapped = [textwrap.fill(line, 110, subsequent_indent="    ", break_long_words=False) for line in lines]
    return "\n".join(wrapped) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(map(_text, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value) if isinstance(value, fx.Node) else repr(value)
