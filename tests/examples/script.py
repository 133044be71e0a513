"""Run an example as its users do, at toy sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_tiny(name: str, folder: Path, *arguments: str) -> str:
    """What the example prints in `folder`; it has to hold, without a warning, under every backend."""
    command = [sys.executable, str(EXAMPLES / name), "--tiny", "--steps", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    for backend in ("eager", "inductor", "fuse_losses"):
        assert backend in done.stdout
    assert "The losses are equal at every step" in done.stdout
    return done.stdout
