"""The pages: their Python runs, and what is generated into them is complete."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from fuse_losses.options import Options
from fuse_losses.report.decline import CODES

ROOT = Path(__file__).parents[2]
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if "```python" in page.read_text("utf-8")]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "index"], ids=lambda page: page.stem)
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """As one file: torch.compile and the report read source lines."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    program = tmp_path / f"{page.stem}.py"
    program.write_text("\n\n".join(blocks), "utf-8")
    runpy.run_path(str(program))


def test_generated_tables_are_complete() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page = hooks["on_page_markdown"]("<!-- generated: options -->\n<!-- generated: declines -->")
    assert "generated:" not in page
    for option in fields(Options):
        assert f"`fuse_losses.{option.name}`" in page
    for code in CODES:
        assert f"`{code}`" in page


def test_the_readme_names_every_option() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for option in fields(Options):
        assert f"`fuse_losses.{option.name}`" in readme


def test_every_record_makes_a_table() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page = hooks["on_page_markdown"]("<!-- generated: benchmarks -->")
    for record in (ROOT / "docs" / "benchmarks").glob("*.json"):
        assert json.loads(record.read_text("utf-8"))["origin"]["commit"][:12] in page
