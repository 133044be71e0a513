"""Runs the Triton kernels' tests on the CPU, in Triton's interpreter.

The interpreter must be chosen before Triton is first imported, and it would then serve the whole process: hence a
process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = [str(Path(__file__).with_name(name)) for name in ("test_triton_indexed.py", "test_paired.py")]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already in the interpreter")
def test_triton_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *TESTS]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]
