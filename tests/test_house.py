"""The rules of the house: what imports what, how long a file is, and what an import of the package costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fuse_losses

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fuse_losses"
SOURCES = sorted(PACKAGE.rglob("*.py"))
EVERYTHING = sorted(p for folder in ("fuse_losses", "tests", "examples") for p in (ROOT / folder).rglob("*.py"))

# part -> the parts that it may import. `fuse_losses` is the package itself, that is, its public names.
ARROWS: dict[str, set[str]] = {
    "options": set(),
    "report": {"options"},
    "graph": {"head", "report"},
    "head": {"losses"},
    "losses": set(),
    "plan": {"head", "options", "report"},
    "rewrite": {"graph", "head", "plan", "report"},
    "kernels": {"losses"},
    "ops": {"kernels", "losses"},
    "functional": {"losses", "ops", "plan"},
    "inductor": set(),
    "pipeline": {"graph", "head", "plan", "rewrite", "ops", "report", "options"},
    "backend": {"pipeline", "inductor", "ops", "options", "report"},
    "explain": {"pipeline", "ops", "options", "report"},
    "fuse_losses": {"backend", "explain", "functional", "options", "report"},
    "bench": {"fuse_losses"},
    "cli": {"fuse_losses", "bench"},
}


def part_of(module: str) -> str:
    """`fuse_losses.graph.region` belongs to `graph`, `fuse_losses` to itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else names[0]


def imports_of(file: Path) -> set[str]:
    """The parts of the package that a file imports, at the top or inside a function."""
    parts = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            parts |= {part_of(a.name) for a in node.names if a.name.split(".")[0] == "fuse_losses"}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import; write it out"
            module = node.module or ""
            if module == "fuse_losses":  # `from fuse_losses import pipeline` names a part or a public name
                parts |= {a.name if a.name in ARROWS else "fuse_losses" for a in node.names}
            elif module.startswith("fuse_losses."):
                parts.add(part_of(module))
    return parts


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down(file: Path) -> None:
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    part = part_of(module)
    assert part in ARROWS, f"{part} is a new part: say in ARROWS what it may import"
    wrong = imports_of(file) - ARROWS[part] - {part}
    assert not wrong, f"{part} must not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("file", EVERYTHING, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_can_be_read_whole(file: Path) -> None:
    lines = file.read_text("utf-8").count("\n")
    assert lines <= 450
    assert file.stem not in {"utils", "util", "common", "helpers", "misc"}, "name it after what it does"


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_backend_is_listed_before_the_package_is_imported() -> None:
    python(
        "import sys, torch._dynamo\n"
        "assert 'fuse_losses' in torch._dynamo.list_backends(None), 'not installed: pip install -e .'\n"
        "assert 'fuse_losses' not in sys.modules"
    )


def test_importing_the_package_is_light() -> None:
    """No Triton, no transformers and nothing of the command line beyond what torch itself imports."""
    loaded = python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import fuse_losses\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    ).split()
    assert not {"triton", "transformers", "click", "rich", "matplotlib", "numpy"} & set(loaded)


def test_the_versions_agree() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert declared and declared[1] == fuse_losses.__version__
