"""What a benchmark run leaves behind: one JSON file that says where, when, with what, and how fast."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fuse_losses.bench.measure import Timing
from fuse_losses.bench.peers import OURS, PEERS, version


@dataclass(frozen=True)
class Row:
    """One peer in one phase of one case. `status` is "ok", or why there are no numbers."""

    case: str
    phase: str
    peer: str
    status: str = "ok"
    timing: Timing | None = None
    peak_mib: float | None = None
    loss: float | None = None
    floor_ms: float | None = None
    fused: int | None = None  # heads that fuse_losses fused in the graphs of this case, so far
    replay_ms: float | None = None  # the kernels alone, replayed as one CUDA graph
    unpinned_ms: float | None = None  # where the scheduler may move the threads that launch them
    loss_error: float | None = None  # from float64, relative
    gradient_error: float | None = None
    overwrites: bool | None = None  # the peer wrote into its inputs

    @property
    def ratio(self) -> float | None:
        """Time over the floor, where the case has one."""
        return self.timing.median / self.floor_ms if self.timing and self.floor_ms else None

    @property
    def replay_ratio(self) -> float | None:
        return self.replay_ms / self.floor_ms if self.replay_ms and self.floor_ms else None


@dataclass(frozen=True)
class Origin:
    """Where the numbers come from."""

    device: str
    versions: dict[str, str | None]
    commit: str
    dirty: bool
    date: str


@dataclass(frozen=True)
class Record:
    """A run of one workload: every peer in one process, one after the other."""

    workload: str
    parameters: dict[str, Any]
    origin: Origin
    roofs: dict[str, float]
    rows: tuple[Row, ...] = field(default=())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Record:
        data = json.loads(text)
        rows = tuple(
            Row(**{**row, "timing": Timing(**row["timing"]) if row["timing"] else None}) for row in data["rows"]
        )
        return Record(**{**data, "origin": Origin(**data["origin"]), "rows": rows})

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), "utf-8")

    @staticmethod
    def load(path: Path) -> Record:
        return Record.from_json(path.read_text("utf-8"))


def here(device: str, commit: str | None = None) -> Origin:
    """This machine and this tree; `commit` names the tree's state where it carries no git."""
    found, dirty = _git()
    return Origin(
        device=_device_name(device),
        versions=_versions(device),
        commit=commit or found,
        dirty=dirty if commit is None else False,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()


def _versions(device: str) -> dict[str, str | None]:
    import torch

    names = dict.fromkeys([OURS, "torch", "triton", "transformers", *(peer.package for peer in PEERS)])
    names["nvidia-cutlass-dsl"] = None  # with it Liger prefers other kernels than Triton's
    versions: dict[str, str | None] = {name: version(name) for name in names}
    versions["torch"] = torch.__version__
    versions["python"] = platform.python_version()
    if device == "cuda":
        versions["cuda"] = torch.version.cuda
        versions["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")
    return versions


def _git() -> tuple[str, bool]:
    root = str(Path(__file__).parents[2])
    commit = _output("git", "-C", root, "rev-parse", "HEAD")
    dirty = _output("git", "-C", root, "status", "--porcelain", "--untracked-files=no")
    return commit or "unknown", bool(dirty)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
