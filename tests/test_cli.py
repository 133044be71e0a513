"""The command line: what it offers, and what it says when it is asked for something that is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

import fuse_losses
from fuse_losses.bench.workloads import WORKLOADS
from fuse_losses.cli import main


def invoke(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def test_help_names_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert 'backend="fuse_losses"' in result.output
    for command in main.commands:
        assert f"  {command} " in result.output


def test_version() -> None:
    assert fuse_losses.__version__ in invoke("--version").output


def test_demo_help_is_the_help_of_the_example() -> None:
    result = invoke("demo", "--help")
    assert result.exit_code == 0
    assert "usage: fuse-losses demo" in result.output
    assert "--steps" in result.output


@pytest.mark.parametrize(
    "arguments",
    [("--workload", "nothing"), ("--smoke", "--peers", "nobody"), ("--workload", "ce", "--sizes", "4096,5")],
)
def test_bench_names_what_there_is(arguments: tuple[str, ...]) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 1
    assert "there are:" in result.output


def test_bench_help_names_every_workload() -> None:
    words = (
        invoke("bench", "--help").output.replace(",", " ").replace(";", " ").replace(":", " ").replace(".", " ").split()
    )
    assert set(WORKLOADS) <= set(words)


def test_sizes_that_are_no_numbers_are_a_usage_error() -> None:
    result = invoke("bench", "--sizes", "large")
    assert result.exit_code == 2 and "--sizes" in result.output


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "fuse_losses.cli", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).returncode == 0
