"""What is measured: whole training steps of a language model, its linear head alone, and the tables of an index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuse_losses.bench.case import FORWARD, FULL, Case, NotApplicable, Phase, Step, Workload, upstream
from fuse_losses.bench.index import INDEX
from fuse_losses.bench.losses import Data, linear_head, loss_case
from fuse_losses.bench.peers import Peer, plain_head

# ---- the linear head alone


@dataclass(frozen=True)
class HeadSize:
    hidden: int
    vocab: int
    tokens: int

    def data(self, device: str) -> Data:
        hidden, weight = linear_head(self.tokens, self.hidden, self.vocab, device)
        labels = torch.randint(self.vocab, (self.tokens,), device=device)
        return Data((hidden, weight, labels), learns=(0, 1), shared=frozenset({1}))


HEADS = (HeadSize(4096, 128256, 8192), HeadSize(2304, 256000, 8192), HeadSize(896, 151936, 16384))
SMOKE_HEADS = (HeadSize(64, 8192, 128),)


def linear_ce(tokens: int | None = None, smoke: bool = False) -> Workload:
    """bf16 linear + cross entropy at the sizes of real models; the gradients count as memory."""
    sizes = [HeadSize(s.hidden, s.vocab, tokens or s.tokens) for s in (SMOKE_HEADS if smoke else HEADS)]
    cases = tuple(
        loss_case("linear-ce", size.tokens, size.data, plain_head, lambda peer: peer.head, phases=(FULL, FORWARD))
        for size in sizes
    )
    parameters = {"heads": [vars(size) for size in sizes], "dtype": "bfloat16", "reference": "float64, every row"}
    return Workload("linear-ce", parameters, cases)


# ---- whole training steps

LLAMA_1B: dict[str, Any] = {  # the shape of Llama-3.2-1B
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
SMOKE_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}


def llama_1b(tokens: int | None = None, smoke: bool = False) -> Workload:
    """Steps of an unmodified LlamaForCausalLM in bf16; memory is counted over weights and gradients.

    Once the compiled function returns the loss alone, once what the model returns: the logits too.
    """
    length = 64 if smoke else 4096
    tokens = tokens or (128 if smoke else 16384)
    config = SMOKE_LLAMA if smoke else LLAMA_1B

    def case(logits: bool) -> Case:
        name = f"T={tokens}, {'loss and logits' if logits else 'loss'} returned"

        def build(peer: Peer, device: str) -> dict[str, Step]:
            return {FULL: _llama_step(peer, device, config, tokens, length, logits)}

        return Case(name, tokens, (Phase(FULL),), build)

    parameters = {"config": config, "tokens": tokens, "sequence": length, "dtype": "bfloat16"}
    return Workload("llama-1b", parameters, (case(logits=False), case(logits=True)))


def _llama_step(peer: Peer, device: str, config: dict[str, Any], tokens: int, length: int, logits: bool) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    own_head = peer.head is not plain_head
    if own_head and logits:
        raise NotApplicable("has no logits to return")
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(LlamaConfig(**config))
        model = model.to(torch.bfloat16)
        ids = torch.randint(config["vocab_size"], (tokens // length, length))
    gradient = upstream(device)

    def outputs(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        if own_head:
            hidden = model.model(input_ids=ids).last_hidden_state
            labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]  # as transformers shifts them
            return peer.head(hidden.flatten(0, 1), model.lm_head.weight, labels.flatten()), None
        output = model(input_ids=ids, labels=ids)
        return output.loss, output.logits if logits else None

    compiled = peer.compile(outputs)

    def run() -> Tensor:
        loss, _kept = compiled(ids)
        loss.backward(gradient.to(loss.dtype))
        return loss.detach()

    return Step(run, clear=lambda: model.zero_grad(set_to_none=True), gradients_stay=True)


WORKLOADS: dict[str, Callable[..., Workload]] = {"llama-1b": llama_1b, "linear-ce": linear_ce, **INDEX}
