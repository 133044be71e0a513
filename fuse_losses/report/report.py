"""The report: every head found, what became of it and why."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# (torch._dynamo and its like are our interface)

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from fuse_losses.report.decline import Decline

log = logging.getLogger("fuse_losses")


@dataclass(frozen=True)
class HeadReport:
    """One head: `outcome` is "fused" or "declined"; bytes_saved is None where the number of rows is not known."""

    outcome: str
    summary: str
    where: str
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    bytes_saved: int | None = None
    decline: Decline | None = None

    def to_dict(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"outcome": self.outcome, "summary": self.summary, "where": self.where}
        if self.decline is not None:
            entry |= {"code": self.decline.code, "reason": self.decline.reason, "remedy": self.decline.remedy}
            entry["declined_at"] = self.decline.where
        else:
            entry |= {**self.details, "bytes_saved": self.bytes_saved}
        return entry

    def __str__(self) -> str:
        lines = [f"{self.outcome:<8} {self.summary}"]
        if self.where:
            lines.append(f"         {self.where}")
        if self.decline is not None:
            lines.append(f"         [{self.decline.code}] {self.decline.reason}")
            if self.decline.where and self.decline.where != self.where:
                lines.append(f"         at {self.decline.where}")
            lines.append(f"         what to do: {self.decline.remedy}")
        else:
            facts = [f"{name.replace('_', ' ')}: {fact}" for name, fact in self.details.items()]
            if self.bytes_saved is not None:
                facts.append(f"saves about {_mib(self.bytes_saved)}")
            lines.append("         " + "; ".join(facts))
        return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


@dataclass
class Report:
    """The heads of one or more compiled graphs, in the order in which they were found."""

    heads: list[HeadReport] = field(default_factory=list[HeadReport])
    graphs: int = 0

    @property
    def fused(self) -> list[HeadReport]:
        return [h for h in self.heads if h.outcome == "fused"]

    @property
    def declined(self) -> list[HeadReport]:
        return [h for h in self.heads if h.outcome == "declined"]

    def extend(self, other: Report) -> None:
        self.heads.extend(other.heads)
        self.graphs += other.graphs

    def to_dict(self) -> dict[str, Any]:
        return {"graphs": self.graphs, "heads": [h.to_dict() for h in self.heads]}

    def __str__(self) -> str:
        graphs = "1 graph" if self.graphs == 1 else f"{self.graphs} graphs"
        title = f"fuse_losses: {len(self.fused)} fused, {len(self.declined)} declined in {graphs}"
        return "\n".join([title, *map(str, self.heads), f"with {versions()}"])


def versions() -> str:
    """What a bug report must name: this package, torch, Triton and transformers if there, Python, the device."""
    found: list[str] = []
    for name in ("fuse-losses", "torch", "triton", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return ", ".join([*found, f"Python {platform.python_version()}", device])


_session = Report()


def last_report() -> Report:
    """What this process has compiled with the backend since the last torch._dynamo.reset()."""
    return _session


def clear() -> None:
    """Start the session's report anew (torch._dynamo.reset() calls this)."""
    global _session
    _session = Report()


def publish(report: Report, path: str | None) -> None:
    """Make a graph's report visible: session, counters, log, trace, and the file the user asked for."""
    _session.extend(report)
    for head in report.heads:
        torch._dynamo.utils.counters["fuse_losses"][head.outcome] += 1
        log.info("%s", head)
    if not report.heads:
        log.debug("no head in this graph")
    line = json.dumps(report.to_dict())
    _trace(line)
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _trace(payload: str) -> None:
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "fuse_losses_report", "encoding": "json"},
        payload_fn=lambda: payload,
    )
