"""What is measured: whole training steps of a language model, and its linear head alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuse_losses.bench.peers import Peer, plain_head

FULL = "forward+backward"
FORWARD = "forward, no gradient"


@dataclass(frozen=True)
class Step:
    """A step to time. `clear` drops the gradients, untimed.

    Where `gradients_stay`, those of the step before are resident while the memory is measured, and so do not count.
    """

    run: Callable[[], Tensor]
    clear: Callable[[], None]
    gradients_stay: bool = False


class NotApplicable(Exception):
    """A peer that cannot do a case; the message says why."""


@dataclass(frozen=True)
class Case:
    """One size in one phase, with the work that cannot be avoided. `build` makes all of it for one peer."""

    name: str
    phase: str
    build: Callable[[Peer, str], Step]
    flops: float | None = None
    bytes: float | None = None


@dataclass(frozen=True)
class Workload:
    name: str
    parameters: dict[str, Any]
    cases: tuple[Case, ...]


def upstream(device: str) -> Tensor:
    """A gradient of the loss that is not 1, so that a kernel which assumes 1 gains nothing."""
    return 0.5 + torch.rand((), device=device)


# ---- the linear head alone


@dataclass(frozen=True)
class HeadSize:
    hidden: int
    vocab: int
    tokens: int

    def __str__(self) -> str:
        return f"H={self.hidden} V={self.vocab} T={self.tokens}"


HEADS = (HeadSize(4096, 128256, 8192), HeadSize(2304, 256000, 8192), HeadSize(896, 151936, 16384))
SMOKE_HEADS = (HeadSize(64, 8192, 128),)


def linear_ce(tokens: int | None = None, smoke: bool = False) -> Workload:
    """bf16 linear + cross entropy at the sizes of real models; the gradients count as memory."""
    sizes = [HeadSize(s.hidden, s.vocab, tokens or s.tokens) for s in (SMOKE_HEADS if smoke else HEADS)]
    parameters = {"heads": [vars(size) for size in sizes], "dtype": "bfloat16"}
    return Workload("linear-ce", parameters, tuple(_head_case(s, phase) for s in sizes for phase in (FULL, FORWARD)))


def _head_case(size: HeadSize, phase: str) -> Case:
    product = 2.0 * size.tokens * size.hidden * size.vocab
    inputs = 2.0 * (size.tokens + size.vocab) * size.hidden + 8 * size.tokens
    gradients = 2.0 * (size.tokens + size.vocab) * size.hidden
    train = phase == FULL

    def build(peer: Peer, device: str) -> Step:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        hidden = torch.randn(size.tokens, size.hidden, **options).requires_grad_(train)
        weight = (torch.randn(size.vocab, size.hidden, **options) / math.sqrt(size.hidden)).requires_grad_(train)
        labels = torch.randint(size.vocab, (size.tokens,), device=device)
        gradient = upstream(device)
        head = peer.compile(peer.head)

        def run() -> Tensor:
            with nullcontext() if train else torch.no_grad():
                loss = head(hidden, weight, labels)
            if train:
                loss.backward(gradient.to(loss.dtype))
            return loss.detach()

        def clear() -> None:
            hidden.grad = weight.grad = None

        return Step(run, clear)

    return Case(str(size), phase, build, flops=product * (3 if train else 1), bytes=inputs + gradients * train)


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
        return Case(name, FULL, lambda peer, device: _llama_step(peer, device, config, tokens, length, logits))

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


WORKLOADS: dict[str, Callable[..., Workload]] = {"llama-1b": llama_1b, "linear-ce": linear_ce}
