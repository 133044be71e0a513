"""Inner operators: Python functions under a name of the dispatcher, for every device, with no autograd of their own.

They are called by every step of a training loop. `torch.library.custom_op` would look for aliases among the results,
and ask whether a gradient is wanted, in Python each time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("fuse_losses", "FRAGMENT")


def no_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """Switches off an ambient autocast on the tensor's device: the dtypes of an operator's arguments say all."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class Inner:
    """An operator that mutates nothing and returns fresh tensors: calling it runs it through the dispatcher."""

    def __init__(self, name: str, schema: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        _library.define(name + schema, tags=[torch.Tag.pt2_compliant_tag])
        _library.impl(name, function, "CompositeExplicitAutograd")
        self.operator = getattr(torch.ops.fuse_losses, name).default

    def __call__(self, *args: Any) -> Any:
        return self.operator(*args)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Say what the results look like."""
        torch.library.register_fake(f"fuse_losses::{self.name}", fake, lib=_library)
        return fake


def inner_operator(schema: str | None = None) -> Callable[[Callable[..., Any]], Inner]:
    """Make the function an operator of its name; without a schema, its annotations are one."""

    def register(function: Callable[..., Any]) -> Inner:
        said = schema or torch.library.infer_schema(function, mutates_args=())
        return Inner(function.__name__, said, function)

    return register
