"""Tiny language models: one layer each, with the head and the loss of the real ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = 264
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}


class NanoGPT(nn.Module):
    """As the teaching repositories write it: a tied head, `ignore_index=-1`, and (logits, loss) returned."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.ln, self.ln_f = nn.LayerNorm(32, bias=False), nn.LayerNorm(32, bias=False)
        self.attn, self.proj = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.lm_head = nn.Linear(32, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, input_ids, labels=None):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        q, k, v = self.attn(self.ln(x)).chunk(3, dim=-1)
        x = self.ln_f(x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1)
        return logits, loss


# name -> (how to build it, what the report says of its head)
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)), "linear + cross entropy (mean)"),
    "qwen2": (
        lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED, tie_word_embeddings=True)),
        "linear + cross entropy (mean)",
    ),
    "gemma2": (
        lambda: Gemma2ForCausalLM(Gemma2Config(**GROUPED, head_dim=16, final_logit_softcapping=5.0)),
        "linear + cross entropy (mean) (softcap 5)",
    ),
    "cohere": (
        lambda: CohereForCausalLM(CohereConfig(**GROUPED, logit_scale=0.0625)),
        "linear + cross entropy (mean) (scale 0.0625)",
    ),
    "gpt_neox": (lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)), "linear + cross entropy (mean)"),
    "nano_gpt": (NanoGPT, "linear + cross entropy (mean)"),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name][0]().train()


def batch(length: int, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and labels [2, length], the first labels of the second row ignored."""
    input_ids = torch.randint(3, VOCAB, (2, length))
    labels = input_ids.clone()
    labels[1, :3] = ignored
    return input_ids, labels
