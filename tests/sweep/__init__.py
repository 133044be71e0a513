"""All language models of transformers through the pipeline: what is fused, what is not, and why."""

from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"
RECORD, COST = _DOCS / "models.json", _DOCS / "cost.json"
