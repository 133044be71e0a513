"""The options of the backend: `torch.compile(..., options={"fuse_losses.min_vocab": 1})`."""

# pyright: reportUnnecessaryIsInstance=false
# (options are checked because callers are not)

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

PREFIX = "fuse_losses."
ACCUMULATE = ("float32", "native")
LOGITS = ("keep",)


class OptionError(ValueError):
    """An option that does not exist or has a value it cannot have."""


@dataclass(frozen=True)
class Options:
    """What a user may decide; everything else is decided by `plan`.

    min_vocab: heads with fewer classes are left to Inductor.
    chunk_rows: rows of logits alive at a time; None lets the plan choose.
    accumulate: "float32" sums weight gradients over chunks in float32, "native" in the weight's dtype.
    logits: "keep" returns real logits where the model returns them.
    strict: raise FusionError instead of leaving a declined head to Inductor.
    report: a file that receives the report of every compiled graph as a line of JSON.
    """

    min_vocab: int = 4000
    chunk_rows: int | None = None
    accumulate: str = "float32"
    logits: str = "keep"
    strict: bool = False
    report: str | None = None

    def __post_init__(self) -> None:
        _require_int("min_vocab", self.min_vocab)
        if self.chunk_rows is not None:
            _require_int("chunk_rows", self.chunk_rows)
        _require_one_of("accumulate", self.accumulate, ACCUMULATE)
        _require_one_of("logits", self.logits, LOGITS)
        if not isinstance(self.strict, bool):
            raise OptionError(f"fuse_losses.strict must be True or False, got {self.strict!r}")
        if self.report is not None and not isinstance(self.report, str):
            raise OptionError(f"fuse_losses.report must be a file name, got {self.report!r}")


def split_options(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Separate `fuse_losses.*` (validated) from what belongs to Inductor (passed on untouched).

    Raises OptionError for an unknown or impossible `fuse_losses.*` option, naming the nearest right one.
    """
    ours: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    known = [f.name for f in fields(Options)]
    for key, value in (options or {}).items():
        if not key.startswith(PREFIX):
            rest[key] = value
            continue
        name = key[len(PREFIX) :]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else f"the options are: {', '.join(known)}"
            raise OptionError(f"unknown option {key!r}; {hint}")
        ours[name] = value
    return Options(**ours), rest


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{PREFIX}{name} must be a positive integer, got {value!r}")


def _require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{PREFIX}{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
