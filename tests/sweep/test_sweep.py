"""A sample of the sweep, the claims its record must bear out, and what the pipeline costs."""

from __future__ import annotations

import json

import pytest

from tests.sweep import RECORD, cost, one

CLASSES = json.loads(RECORD.read_text("utf-8"))["classes"]
SAMPLE = (
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",  # softcap
    "CohereForCausalLM",  # scale
    "GraniteForCausalLM",  # division
    "MambaForCausalLM",  # vmap in its body, two upcasts
    "MixtralForCausalLM",  # experts
    "DeepseekV3ForCausalLM",  # latent attention
    "BertForMaskedLM",  # bias, no upcast
    "ModernBertForMaskedLM",
    "BartForConditionalGeneration",  # a buffer is added to the logits
    "T5ForConditionalGeneration",  # hidden states are scaled
    "BertLMHeadModel",  # head and loss in two graphs
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_the_record_is_true(name: str) -> None:
    found, recorded = one.sweep_one(name), CLASSES[name]
    assert found["outcome"] == recorded["outcome"], found
    assert found["fused"] == recorded["fused"]


def test_nothing_is_wrong_and_nearly_all_is_fused() -> None:
    outcomes = [found["outcome"] for found in CLASSES.values()]
    assert not {"wrong", "crashed"} & set(outcomes)
    together = [found["outcome"] for found in CLASSES.values() if found.get("together")]
    assert len(together) >= 200
    assert together.count("fused") >= 0.95 * len(together)


@pytest.mark.slow
def test_what_the_pipeline_costs() -> None:
    """150 ms of a core for 32 layers; the slack is for a machine that is busy."""
    assert cost.fuse_cost(cost.llama()).median < 2 * 0.150
