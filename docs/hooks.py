"""Fill what is generated into the pages, so that no page can disagree with the code or the records."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from fuse_losses.bench.record import Record
from fuse_losses.bench.table import markdown as record_markdown
from fuse_losses.options import Options
from fuse_losses.report.decline import CODES

RECORDS = Path(__file__).parent / "benchmarks"


def options() -> str:
    """The options with their defaults; the words are those of the docstring of Options."""
    said = dict(re.findall(r"^    (\w+): (.+(?:\n     +.+)*)", Options.__doc__ or "", re.MULTILINE))
    lines = ["| option | default | what it does |", "|---|---|---|"]
    for option in fields(Options):
        words = " ".join(said[option.name].split())
        lines.append(f"| `fuse_losses.{option.name}` | `{option.default!r}` | {words} |")
    return "\n".join(lines)


def declines() -> str:
    lines = ["| code | what it means | what to do |", "|---|---|---|"]
    lines += [f"| `{code}` | {meaning} | {remedy} |" for code, (meaning, remedy) in CODES.items()]
    return "\n".join(lines)


def benchmarks() -> str:
    records = [(path, Record.load(path)) for path in sorted(RECORDS.glob("*.json"))]
    if not records:
        return "No record has been committed yet."
    return "\n\n".join(f"## {path.stem}\n\n{record_markdown(record)}" for path, record in records)


GENERATED = {"options": options, "declines": declines, "benchmarks": benchmarks}


def on_page_markdown(markdown: str, **_: object) -> str:
    """mkdocs calls this for every page."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda match: GENERATED[match[1]](), markdown)
