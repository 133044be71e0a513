"""Every language model of transformers, made so small that it compiles in seconds."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

VOCAB = 271  # prime, and no other size of these models
BATCH, LENGTH = 2, 16
FIRST_SPECIAL = 240  # token ids from here on mean an image, a sound, ...: no input has them

_SIZES: dict[int, str] = {
    VOCAB: (
        "vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input unpadded_vocab_size "
        "entity_vocab_size embedding_vocab_size encoder_vocab_size decoder_vocab_size"
    ),
    64: (
        "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len "
        "mem_len max_encoder_position_embeddings max_decoder_position_embeddings max_sequence_length "
        "seq_length max_2d_position_embeddings original_max_position_embeddings"
    ),
    48: (
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner dff n_inner dim_ff "
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size intermediate_size_mlp ffn_hidden_size expert_ffn_hidden_size "
        "dense_intermediate_size moe_shared_expert_intermediate_size hidden_dim feed_forward_size"
    ),
    32: (
        "hidden_size d_model n_embd embedding_size emb_dim dim input_embedding_size output_embedding_size "
        "lru_width attention_hidden_size embedding_dim d_latents entity_emb_size true_hidden_size mamba_d_ssm "
        "backbone_hidden_size hidden_size_global embed_dim"
    ),
    16: (
        "kv_lora_rank q_lora_rank o_lora_rank state_size mamba_d_state ssm_state_size chunk_size "
        "mamba_chunk_size sliding_window sliding_window_size attention_window_size local_attention "
        "window_size index_topk mamba_d_head attention_chunk_size embedding_rank prompt_mid_dim num_latents"
    ),
    8: (
        "rotary_dim head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim "
        "linear_value_head_dim swa_head_dim kv_channels d_head dim_head linear_head_dim mamba_head_dim "
        "attention_head_size index_head_dim global_head_dim hidden_size_per_layer_input swa_v_head_dim "
        "query_pre_attn_scalar"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads "
        "linear_num_key_heads index_n_heads mamba_n_heads mamba_num_heads swa_num_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads linear_num_heads attention_heads "
        "num_linear_key_value_heads laurel_rank"
    ),
    2: (
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers num_key_value_heads num_experts_per_tok moe_topk moe_k max_window_layers "
        "swa_num_key_value_heads num_blocks num_self_attends_per_block block_size num_kv_heads moe_top_k "
        "top_k_experts"
    ),
    1: "n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace mamba_n_groups n_groups",
    0: "num_kv_shared_layers num_nextn_predict_layers",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 3, "sep_token_id": 4}

# tried in turn until one can be built and run
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 4}, {"head_dim": None})

# class name -> what its configuration needs on top; a dict is for a nested configuration
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": ["full_attention", "full_attention"],
    },
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "LEDForConditionalGeneration": {"attention_window": 16},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {"head_dim": 16},
    "NeoMMEForMaskedLM": {"head_dim": 16},
    "PerceiverForMaskedLM": {"max_position_embeddings": LENGTH},
    "ReformerForMaskedLM": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4), "is_decoder": False},
    "ReformerModelWithLMHead": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4), "is_decoder": True},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"]},
    "ZambaForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"]},
}


def classes() -> dict[str, str]:
    """Class name -> model type, of all causal, masked and sequence-to-sequence language models."""
    found: dict[str, str] = {}
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ):
        for model_type, name in mapping.items():
            found.setdefault(name, model_type)
    return dict(sorted(found.items()))


def shrunk(config_class: type, extra: dict[str, Any]) -> dict[str, Any]:
    """Arguments that make a small configuration of the class; nested configurations are shrunk too."""
    fields = {f.name: f.default for f in dataclasses.fields(config_class)}
    small: dict[str, Any] = {}
    special = FIRST_SPECIAL
    for name, default in fields.items():
        if name in SMALL:
            small[name] = SMALL[name]
        elif name in TOKENS:
            small[name] = TOKENS[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default, int) and default >= VOCAB:
            small[name], special = special, special + 1
        elif "drop" in name and isinstance(default, float):
            small[name] = 0.0
    for name, spec in config_class.sub_configs_defaults.items():
        nested = CONFIG_MAPPING[spec.model_type] if spec.model_type else spec.config_class
        small[name] = {**spec.init_kwargs, **shrunk(nested, extra.get(name, {}))}
        if spec.model_type:
            small[name]["model_type"] = spec.model_type
    return {**small, **{k: v for k, v in extra.items() if not isinstance(v, dict) or k not in small}}


def build(name: str, variant: dict[str, Any] | None = None) -> nn.Module:
    """The model of that class with random weights, for training, without dropout."""
    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    extra = EXCEPTIONS.get(name, {})
    arguments = shrunk(config_class, extra)
    for part in (arguments, *(a for a in arguments.values() if isinstance(a, dict))):
        part.update({k: v for k, v in (variant or {}).items() if k in part})
    if getattr(config_class, "is_encoder_decoder", False):
        arguments.setdefault("decoder_start_token_id", TOKENS["decoder_start_token_id"])
    config = config_class(**arguments)
    for part in (config, *(getattr(config, n) for n in config_class.sub_configs_defaults)):
        part.use_cache = False
    if name.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = model_class(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # some classes start from zeros, which would hide what a gradient is
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.normal_(0.0, 0.1, generator=generator)
    return model


def batch(model: nn.Module) -> dict[str, Tensor]:
    """input_ids and labels, some of which are ignored."""
    generator = torch.Generator().manual_seed(2)
    books = model.config.num_codebooks if type(model).__name__.startswith("Musicgen") else 1
    input_ids = torch.randint(10, 200, (BATCH * books, LENGTH), generator=generator)
    labels = input_ids.clone()
    labels[1, :3] = labels[0, -2:] = -100
    if books > 1:
        labels = labels.view(BATCH, books, LENGTH).transpose(1, 2)
    given = {"input_ids": input_ids, "labels": labels}
    accepted = inspect.signature(model.forward).parameters
    if books == 1 and (model.config.is_encoder_decoder or "attention_mask" in accepted):
        given["attention_mask"] = torch.ones_like(input_ids)
    return given
