"""Fill what is generated into the pages, so that no page can disagree with the code or the records."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

from fuse_losses.bench.record import Record
from fuse_losses.bench.table import markdown as record_markdown
from fuse_losses.options import Options
from fuse_losses.report.decline import CODES

HERE = Path(__file__).parent
RECORDS = HERE / "benchmarks"

# what `python -m tests.sweep` records of a class -> what the page says
OUTCOMES = {
    "fused": "fused",
    "declined": "declined",
    "not_found": "no head found",
    "wrong": "not as eager's",
    "crashed": "the compilation fails",
    "apart": "head and loss in two graphs",
    "not_compiled": "torch.compile itself fails",
    "no_loss": "returns no loss",
    "not_run": "needs more than tokens and labels",
    "not_built": "not built small",
    "too_slow": "out of time",
}


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


def models() -> str:
    """The classes that are not fused one by one, those that are by what the report says of them."""
    record = json.loads((HERE / "models.json").read_text("utf-8"))
    classes, versions = record["classes"], record["versions"]
    outcomes = Counter(found["outcome"] for found in classes.values())
    together = [found for found in classes.values() if found.get("together")]
    fused = sum(found["outcome"] == "fused" for found in together)
    lines = [
        f"{len(classes)} classes of transformers {versions['transformers']} under torch {versions['torch']}. In "
        f"{len(together)} of them head and loss share a graph; {fused} of those are fused, each with the loss and "
        "the gradients of all parameters as in eager mode.",
        "",
        "| outcome | classes |",
        "|---|---|",
        *(f"| {words} | {outcomes[outcome]} |" for outcome, words in OUTCOMES.items() if outcomes[outcome]),
        "",
        "| class | outcome | why, or what was fused |",
        "|---|---|---|",
    ]
    for name, found in classes.items():
        why = found.get("reason") or "; ".join(dict.fromkeys(found["declined"] or found["fused"]))
        why = re.sub(r"([|<>*_])", r"\\\1", why)
        lines.append(f"| `{name}` | {OUTCOMES[found['outcome']]} | {why} |")
    return "\n".join(lines)


def cost() -> str:
    record = json.loads((HERE / "cost.json").read_text("utf-8"))
    return (
        f"For the training graph of a Llama of {record['layers']} layers ({record['nodes']:,} nodes, "
        f"{record['vocab']:,} tokens) finding, checking and rewriting the head takes {record['fuse_ms']:.0f} ms of one "
        f"core, the median of {record['runs']} runs. The first compilation of that model by Inductor takes "
        f"{record['inductor_s']:.0f} s "
        "on the same, busy machine."
    )


GENERATED = {"options": options, "declines": declines, "benchmarks": benchmarks, "models": models, "cost": cost}


def on_page_markdown(markdown: str, **_: object) -> str:
    """mkdocs calls this for every page."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda match: GENERATED[match[1]](), markdown)
