"""Tiny models of the architectures that llama.cpp runs, with random weights from a seed, saved by transformers.

Version 5 writes the names that published files have, such as single experts, by its conversion_mapping.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf_files import edit_config
from helpers import read_all, write_checkpoint

VOCABULARY = 128
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WIDE_HEADS = {"head_dim": 32}
WINDOWED = WIDE_HEADS | {"sliding_window": 32, "query_pre_attn_scalar": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Behind one layer without experts.
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3,
}  # fmt: skip
MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20,
    "num_key_value_heads": 4,
}  # fmt: skip
V4 = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "q_lora_rank": 24,
    "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 16,
    "index_n_heads": 4, "index_head_dim": 64, "partial_rotary_factor": 0.25, "sliding_window": 32,
    "mlp_layer_types": ["hash_moe"] + ["moe"] * 3, "swiglu_limit": 0.5, "hc_sinkhorn_iters": 5,
    "layer_types": ["sliding_attention",
    "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
}  # fmt: skip
DELTA_NET = WIDE_HEADS | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
HYBRID = MAMBA | {
    "layer_types": ["mamba", "attention", "mamba"],
    "num_hidden_layers": 3,
    "shared_intermediate_size": 40,
}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 80}
ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
LONG = {"rope_type": "longrope", "long_factor": [1.0 + 2 * n for n in range(8)], **ORIGINAL}
LONG |= {"short_factor": [1.0 + n / 8 for n in range(8)]}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
PHI4 = ORIGINAL | {
    "audio_config": SMALL | {"num_blocks": 1, "ext_pw_out_channel": 32, "nemo_conv_channels": 32},
    "vision_config": SMALL | {"num_hidden_layers": 1},
}  # fmt: skip
SCALED_YARN = YARN | {"factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7}
VISION = {
    "depth": 1, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
MUSE_VISION = SMALL | {"num_hidden_layers": 1, "patch_size": 8, "pos_emb_height": 4, "pos_emb_width": 4}
BOTH_KINDS = WIDE_HEADS | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
BOTH_KINDS |= {"sliding_window": 32, "global_head_dim": 64, "vocab_size_per_layer_input": VOCABULARY}
MAMBA_H = WIDE_HEADS | {
    "num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 40,
    "time_step_min": 1e-9,  # transformers has no smaller steps, and llama.cpp knows no such limit
}  # fmt: skip
LAYERED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model.

    name: of its family, in the names of classes
    head: the class, if it is not {name}ForCausalLM or {name}ForConditionalGeneration
    settings: beside SETTINGS
    rope: its rope_parameters, but for a theta of 10000
    tokens: how many are compared
    text: whether its config is that of the text model of a family that also sees
    vision: the vision_config of a model that sees; its settings are those of its text_config
    published: keys of config.json that published files have otherwise
    """

    name: str
    head: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | None = None
    tokens: int = 80
    text: bool = False
    vision: dict[str, Any] | None = None
    published: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case(name="Llama", settings=WIDE_HEADS),
    "llama with biases, tied": Case(
        name="Llama", settings={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama linear": Case(name="Llama", rope={"rope_type": "linear", "factor": 4.0}, tokens=200),
    "llama llama3": Case(name="Llama", rope=LLAMA3, tokens=200),
    "llama yarn": Case(name="Llama", rope=YARN, tokens=200),
    "llama yarn factor": Case(name="Llama", rope=YARN | {"attention_factor": 1.3}, tokens=200),
    "llama yarn mscale": Case(name="Llama", rope=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, tokens=200),
    "llama with two bases": Case(
        name="Llama", rope={"rope_type": "default", "rope_theta": 500.0}, published={"rope_theta": 5e5}
    ),
    "llama yarn without an original length": Case(name="Llama", rope={"rope_type": "yarn", "factor": 4.0}, tokens=200),
    "qwen3 with rope_scaling beside rope_parameters": Case(
        name="Qwen3", settings=WIDE_HEADS, rope=YARN, tokens=200,
        published={"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "qwen2 with windows": Case(
        name="Qwen2", settings={"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 80}
    ),
    "mistral": Case(name="Mistral", settings=WIDE_HEADS | {"sliding_window": 80}),
    "mixtral": Case(name="Mixtral", settings={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": Case(name="Qwen2", rope=YARN, tokens=200),
    "qwen2 moe": Case(name="Qwen2Moe", settings=SHARED_EXPERT),
    "qwen2 moe tied": Case(name="Qwen2Moe", settings=SHARED_EXPERT | {"tie_word_embeddings": True}),
    "qwen3": Case(name="Qwen3", settings=WIDE_HEADS),
    "qwen3 moe": Case(name="Qwen3Moe", settings=WIDE_HEADS | EXPERTS | {"norm_topk_prob": True}),
    "gemma": Case(name="Gemma", settings=WIDE_HEADS),
    "gemma2": Case(name="Gemma2", settings=WINDOWED),
    "gemma2 full": Case(name="Gemma2", settings=WINDOWED | {"layer_types": ["full_attention"] * 2}),
    "gemma3": Case(name="Gemma3", settings=WINDOWED | {"num_hidden_layers": 7}, text=True),
    "gemma3 layers": Case(
        name="Gemma3",
        settings=WINDOWED | {"final_logit_softcapping": 20.0, "rope_parameters": LAYERED}
        | {"layer_types": ["full_attention", "sliding_attention"]},
        text=True,
    ),
    "phi3": Case(name="Phi3", settings={"partial_rotary_factor": 0.5}, rope={"partial_rotary_factor": 0.5}),
    # llama.cpp chooses factors by the length of its context, which is 256 here.
    "phi3 short": Case(
        name="Phi3",
        settings={"original_max_position_embeddings": 256},
        rope=LONG | {"original_max_position_embeddings": 256},
    ),
    "phi3 long": Case(name="Phi3", settings=ORIGINAL, rope=LONG, tokens=200),
    "phi4 multimodal": Case(name="Phi4Multimodal", rope=LONG, tokens=200, settings=PHI4),
    "phi4mm": Case(name="Phi4Multimodal", rope=LONG, tokens=200, settings=PHI4, published={"model_type": "phi4mm"}),
    "granite": Case(
        name="Granite", settings={"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
        "logits_scaling": 2.0},
    ),
    "olmo2": Case(name="Olmo2"),
    "olmo3": Case(name="Olmo3", settings={"num_hidden_layers": 5, "sliding_window": 32}),
    "smollm3": Case(name="SmolLM3", settings={"num_hidden_layers": 5}),
    "starcoder2": Case(name="Starcoder2"),
    "stablelm": Case(name="StableLm", settings={"use_qkv_bias": True}),
    "cohere": Case(name="Cohere", settings={"logit_scale": 0.3}),
    "cohere2": Case(name="Cohere2", settings={"logit_scale": 0.3, "sliding_window": 32, "num_hidden_layers": 5}),
    "arcee": Case(name="Arcee", settings=WIDE_HEADS | {"tie_word_embeddings": True}),
    "glm4": Case(name="Glm4", settings=WIDE_HEADS),
    "seed_oss": Case(name="SeedOss", settings=WIDE_HEADS),
    "exaone4": Case(name="Exaone4", settings={"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4 windows": Case(
        name="Exaone4", settings={"hidden_size": 32, "sliding_window": 32, "num_hidden_layers": 64}, rope=LLAMA3
    ),
    "hunyuan": Case(
        name="HunYuanDenseV1", settings=WIDE_HEADS, rope={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    ),
    "ernie4_5": Case(name="Ernie4_5", settings=WIDE_HEADS),
    "ministral3": Case(name="Ministral3", settings=WIDE_HEADS, rope=YARN | {"llama_4_scaling_beta": 0.1}),
    "ministral3 llama3": Case(name="Ministral3", settings=WIDE_HEADS, rope=LLAMA3 | {"llama_4_scaling_beta": 0.1}),
    "gpt-oss": Case(
        name="GptOss", settings=WIDE_HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
        rope=YARN, tokens=200,
    ),
    "deepseek v3": Case(name="DeepseekV3", settings=MLA | ROUTED | {"n_group": 2}),
    "deepseek v3 yarn": Case(name="DeepseekV3", settings=MLA | ROUTED, rope=SCALED_YARN, tokens=200),
    "deepseek v2 lite": Case(
        name="DeepseekV2", rope=SCALED_YARN,
        settings=MLA | ROUTED | {"q_lora_rank": None, "n_routed_experts": 3, "num_hidden_layers": 27},
    ),
    "kimi k2": Case(
        name="DeepseekV3", settings=MLA | ROUTED, tokens=200, published={"model_type": "kimi_k2"},
        rope=SCALED_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0},
    ),
    "kimi k2.5": Case(
        name="Kimi_K25", settings=MLA | ROUTED | {"model_type": "deepseek_v3"}, vision=SMALL | {"num_hidden_layers": 1}
    ),
    "glm4 moe": Case(name="Glm4Moe", settings=WIDE_HEADS | ROUTED | {"use_qk_norm": True, "attention_bias": True}),
    "glm4 moe lite": Case(name="Glm4MoeLite", settings=MLA | ROUTED | {"rms_norm_eps": 1e-6}),
    # All tokens are chosen: llama.cpp compares those that are not in half precision.
    "glm dsa": Case(
        name="GlmMoeDsa", settings=MLA | ROUTED | {"index_n_heads": 4, "index_head_dim": 64, "rms_norm_eps": 1e-6}
    ),
    "deepseek v3.2": Case(
        name="DeepseekV32", settings=MLA | ROUTED | {"index_n_heads": 4, "index_head_dim": 64, "n_group": 2},
        rope=SCALED_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, tokens=200,
    ),
    "hy v4": Case(
        name="HYV4", settings=MLA | ROUTED | {"index_n_heads": 4, "index_head_dim": 64, "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"], "hc_mult": 3, "hc_magnitude": 1.5, "swiglu_limit": 0.3,
        "rms_norm_eps": 1e-6, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    ),
    "deepseek v4": Case(name="DeepseekV4", settings=V4, tokens=200),
    "deepseek v4 yarn": Case(name="DeepseekV4", settings=V4, rope=YARN, tokens=200),
    "mistral4": Case(
        name="Mistral4", settings=MLA | ROUTED | {"head_dim": 24},
        rope=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 1 / 3},
    ),
    "dots1": Case(name="Dots1", settings=ROUTED | {"num_key_value_heads": 4}),
    "minimax m2": Case(
        name="MiniMaxM2",
        settings=WIDE_HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16},
        rope={"partial_rotary_factor": 0.5},
    ),
    "minimax m3": Case(
        name="MiniMaxM3VL", head="MiniMaxM3SparseForConditionalGeneration",
        vision=SMALL | {"num_hidden_layers": 1}, rope={"partial_rotary_factor": 0.5},
        settings=WIDE_HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16, "index_n_heads": 2,
        "dense_intermediate_size": 80, "shared_intermediate_size": 96, "index_head_dim": 32, "num_hidden_layers": 3,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 2, "mlp_layer_types": ["dense"] + ["sparse"] * 2},
    ),
    "ernie4_5 moe": Case(
        name="Ernie4_5_Moe", settings={"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48}
    ),
    "hunyuan moe": Case(name="HunYuanMoEV1", settings=WIDE_HEADS | {"num_experts": 4, "moe_topk": 2}),
    "hy v3": Case(name="HYV3", settings=WIDE_HEADS | EXPERTS | {"num_hidden_layers": 3, "num_experts": 8}),
    "mimo v2": Case(
        name="MiMoV2Flash", settings=WIDE_HEADS | ROUTED | {"num_hidden_layers": 4, "v_head_dim": 24,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 33},
        rope={kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
              for kind, base in (("full_attention", 5e5), ("sliding_attention", 1e4))},
    ),
    "step3p5": Case(
        name="Step3p7", vision=VISION | {"num_hidden_layers": 1, "num_attention_heads": 2},
        settings=WIDE_HEADS | ROUTED | {"num_hidden_layers": 4, "share_expert_dim": 40, "sliding_window": 32,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3, "num_sliding_attention_heads": 6,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "swiglu_limits": [None, 0.05, 0.0, 0.1],
        "swiglu_limits_shared": [0.2, None, 0.1, 0.3]},
        rope={"full_attention": LLAMA3 | {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "olmoe": Case(name="Olmoe", settings=EXPERTS | {"num_key_value_heads": 4}),
    "exaone moe": Case(
        name="ExaoneMoe", settings=WIDE_HEADS | EXPERTS | {"num_hidden_layers": 4, "sliding_window": 32}
    ),
    "llama4": Case(
        name="Llama4", settings=WIDE_HEADS | {"intermediate_size_mlp": 80, "num_local_experts": 4,
        "interleave_moe_layer_step": 2, "num_hidden_layers": 4}, text=True, tokens=200,
        rope=LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0},  # as Scout has it: both bounds are 1
    ),
    "granite moe": Case(name="GraniteMoe", settings={"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite moe shared": Case(
        name="GraniteMoeShared",
        settings={"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "granite hybrid": Case(
        name="GraniteMoeHybrid", settings=HYBRID | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "granite hybrid dense": Case(
        name="GraniteMoeHybrid", settings=HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"}
    ),
    "lfm2": Case(name="Lfm2", settings={"layer_types": ["conv", "full_attention"]}),
    "lfm2 moe": Case(
        name="Lfm2Moe",
        settings=EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
        "num_hidden_layers": 3},
    ),
    "kimi linear": Case(
        name="KimiLinear", settings={key: size for key, size in MLA.items() if key != "q_lora_rank"} | {
        "layer_types": ["linear_attention"] * 2 + ["full_attention"], "linear_head_dim": 16, "linear_num_heads": 4,
        "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 48, "num_shared_experts": 1,
        "num_hidden_layers": 3, "rms_norm_eps": 1e-6},
    ),
    "falcon h1": Case(
        name="FalconH1", settings=WIDE_HEADS | MAMBA | {"mamba_d_ssm": 128, "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 1.3, "embedding_multiplier": 2.0, "key_multiplier": 0.8, "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.6, 1.4], "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.9,
        "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2]},
    ),
    "jamba": Case(
        name="Jamba", settings={"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2,
        "expert_layer_period": 3, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8},
    ),
    "gemma3n": Case(
        name="Gemma3n", text=True, settings=WIDE_HEADS | {"num_hidden_layers": 25, "num_kv_shared_layers": 5,
        "sliding_window": 32, "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 5},
    ),
    "gemma4": Case(
        name="Gemma4", text=True, settings=BOTH_KINDS | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True},
    ),
    "gemma4 moe": Case(
        name="Gemma4", text=True, settings=BOTH_KINDS | {"hidden_size_per_layer_input": 0, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "final_logit_softcapping": 30.0},
    ),
    "nemotron h": Case(name="NemotronH", settings=MAMBA_H | {"layers_block_type": ["mamba", "attention", "mlp"]}),
    "nemotron h moe": Case(name="NemotronH", settings=MAMBA_H | {"layers_block_type": ["mamba", "attention", "moe"]}),
    "nemotron h latent": Case(
        name="NemotronH",
        settings=MAMBA_H | {"layers_block_type": ["mamba", "attention", "moe"], "moe_latent_size": 32},
    ),
    "qwen2 vl": Case(
        name="Qwen2VL", settings={"rms_norm_eps": 1e-9}, rope={"mrope_section": [2, 3, 3]}, vision=VISION
    ),
    "qwen2_5 vl": Case(  # llama.cpp 0.3.36 takes an rms_norm_eps of 0
        name="Qwen2_5_VL", settings={"rms_norm_eps": 1e-9}, rope={"mrope_section": [2, 3, 3]}, vision=VISION
    ),
    "qwen3 vl": Case(name="Qwen3VL", settings=WIDE_HEADS, rope={"mrope_section": [6, 5, 5]}, vision=VISION),
    "qwen3 vl moe": Case(
        name="Qwen3VLMoe", settings=WIDE_HEADS | EXPERTS, rope={"mrope_section": [6, 5, 5]}, vision=VISION
    ),
    "mistral3": Case(
        name="Mistral3", settings=WIDE_HEADS | {"model_type": "ministral3"},
        rope=YARN | {"llama_4_scaling_beta": 0.1}, vision=SMALL | {"num_hidden_layers": 1, "model_type": "pixtral"},
    ),
    "muse glimmer": Case(
        name="MuseGlimmer", vision=MUSE_VISION,
        settings=WIDE_HEADS | {
            "sliding_window": 32, "num_hidden_layers": 5, "qk_scale_factor": 2.5,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
            "layer_rope_theta": [1e4, 0, 1e4, 1e4, 0],
        },
    ),
    "qwen3 next": Case(name="Qwen3Next", settings=DELTA_NET | SHARED_EXPERT),
    "qwen3_5": Case(name="Qwen3_5", settings=DELTA_NET, text=True),
    "qwen3_5 moe": Case(name="Qwen3_5Moe", settings=DELTA_NET | SHARED_EXPERT, text=True),
    "qwen4 exp": Case(
        name="Qwen4Exp", text=True, rope={"partial_rotary_factor": 0.5},
        settings=DELTA_NET | SHARED_EXPERT | {
            "hc_count": 3, "hc_lowrank": 24, "ple_layer_ids": [2], "heads_per_ngram": 4, "ngram_vocab_size_base": 67,
            "split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 700, "output_gate_type": "sigmoid",
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 128,
            "indexer_compress_ratio": 4,
        },
    ),
}  # fmt: skip


def build(case: Case) -> Any:
    """The model of a case, with gains and biases that are not those that it starts with."""
    torch.manual_seed(1)
    settings = {**SETTINGS, **case.settings}
    if case.rope is not None:
        settings["rope_parameters"] = {"rope_theta": 1e4, **case.rope}
    if case.vision is not None:
        settings = {"text_config": settings, "vision_config": case.vision, "tie_word_embeddings": False}
    config = getattr(transformers, f"{case.name}{'Text' if case.text else ''}Config")(**settings)
    head = case.head or f"{case.name}For{'CausalLM' if case.vision is None else 'ConditionalGeneration'}"
    model = getattr(transformers, head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif not parameter.any():  # as biases of experts start
                parameter.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(VOCABULARY, 8).argsort()[:, : buffer.shape[1]])
            if name.endswith("bias"):  # of routers
                buffer.normal_(0, 0.1)
    return model


def saved(case: Case, folder: Path) -> Any:
    """The model of a case, which is also written to a folder."""
    model = build(case)
    model.save_pretrained(folder)
    edit_config(folder, case.published)
    if case.name == "Gemma3n":  # published files have keys and values, which it does without, of the last layers, too
        tensors = read_all(folder)
        parts = ("k_proj", "v_proj", "k_norm")
        copied = {
            f"model.layers.{layer}.self_attn.{part}.weight": tensors[f"model.layers.0.self_attn.{part}.weight"]
            for layer in range(20, case.settings["num_hidden_layers"])
            for part in parts
        }
        write_checkpoint(folder, tensors | copied)
    if case.name == "HYV4":  # transformers reads published names, and saves others
        published = {
            r"hc_pre\.(hc_attn_layer|hc_mlp_layer)\.": r"\1.hc_pre.", r"hc_pre\.hc_head": "hc_head",
            r"(mlp|experts)\.linear_gate": r"\1.gate_proj",
        }  # fmt: skip
        tensors = read_all(folder)
        for expression, name in published.items():
            tensors = {re.sub(expression, name, of): tensors[of] for of in tensors}
        write_checkpoint(folder, tensors)
    if case.name == "Kimi_K25":  # transformers calls layers of the text model as those of the tower are called
        tensors = read_all(folder)
        write_checkpoint(folder, {name.replace("model.blocks.", "model.layers."): tensors[name] for name in tensors})
    return model


def with_gelu_table(model: Any) -> Any:
    """The model with the values of gelu that ggml has: those of half-precision numbers, in half precision.

    And with its standard deviation in Gemma 3n, which is that of a sample: for 16384 values it is the same.
    """
    for module in model.modules():
        if type(module).__name__ == "Gemma3nTextMLP":
            module._gaussian_topk = lambda x: torch.relu(x - x.mean(-1, True) - 1.6448536 * x.std(-1, keepdim=True))
        if "GELU" in type(module).__name__:
            module.forward = lambda x: torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
    return model


def token_ids(count: int) -> list[int]:
    """Tokens of which none is special."""
    found: list[int] = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    return found


def logits(model: Any, ids: list[int]) -> Any:
    """What a model predicts after each token, [tokens, vocabulary] f32."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()
