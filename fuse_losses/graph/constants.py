"""Numbers that a graph computes for itself: `torch.tensor(0.1)`, its logarithm, what a retrace wrote out."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from fuse_losses.graph import calls
from fuse_losses.graph.tail import Tail

DEEPEST = 16  # operations between the literal and what is made of it


def constant(tail: Tail, node: fx.Node) -> float | None:
    """The number that an ATen node of the tail always holds, or None if that depends on an input of the graph."""
    try:
        with _disable_current_modes():
            found = _value(tail, node, DEEPEST)
    except (_Unknown, RuntimeError, TypeError, ValueError, AttributeError):
        return None
    if isinstance(found, torch.Tensor):
        found = found.item()
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


class _Unknown(Exception):
    pass


def _value(tail: Tail, node: fx.Node, depth: int) -> Any:
    node = tail.inputs.get(node, node)
    held = node.meta.get("val", node.meta.get("example_value"))
    single = isinstance(held, torch.Tensor) and not held.dim()
    written = any(node in calls.writes_to(user) for user in node.users)
    if not single or not depth or written or node.op not in ("call_function", "call_method"):
        raise _Unknown
    if calls.is_call(node, calls.RANDOM):
        raise _Unknown
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda a: _value(tail, a, depth - 1))
    kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]
