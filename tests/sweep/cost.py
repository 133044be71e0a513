"""What the pipeline adds to a compilation: `python -m tests.sweep.cost` measures it into docs/cost.json."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fuse_losses import pipeline
from fuse_losses.options import Options
from tests.sweep import COST

LAYERS, VOCAB, RUNS = 32, 32000, 5


def llama() -> nn.Module:
    """As many nodes as the real one, in small."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


@dataclass(frozen=True)
class Cost:
    nodes: int
    seconds: tuple[float, ...]  # of several runs over the one graph; the first one also fills caches

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def fuse_cost(model: nn.Module, runs: int = RUNS) -> Cost:
    """How long `pipeline.fuse` takes for the graph of a training step with labels, the logits returned."""
    measured: list[Cost] = []

    def backend(gm: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        seconds = []
        for _ in range(runs):
            start = time.process_time()  # on a shared machine the clock also counts the others
            _, report = pipeline.fuse(gm, Options())
            seconds.append(time.process_time() - start)
            assert len(report.fused) == 1
        measured.append(Cost(len(gm.graph.nodes), tuple(seconds)))
        return gm.forward

    step(torch.compile(model, backend=backend))
    (cost,) = measured
    return cost


def step(model: Any) -> None:
    input_ids = torch.randint(3, VOCAB, (2, 16))
    model(input_ids, labels=input_ids).loss.backward()


def inductor_seconds(model: nn.Module) -> float:
    """A first step under Inductor, with nothing in its caches."""
    torch._dynamo.reset()
    with torch._inductor.utils.fresh_cache():
        start = time.perf_counter()
        step(torch.compile(model, backend="inductor"))
        return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    model = llama()
    cost = fuse_cost(model)
    record = {
        "layers": LAYERS,
        "vocab": VOCAB,
        "nodes": cost.nodes,
        "runs": RUNS,
        "fuse_ms": round(1000 * cost.median, 1),
        "first_ms": round(1000 * cost.seconds[0], 1),
        "inductor_s": round(inductor_seconds(model), 1),
        "torch": torch.__version__.split("+")[0],
    }
    COST.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(record)


if __name__ == "__main__":
    main()
