"""The types of models, by the `model_type` of transformers: a row for each.

The defaults are those of the configuration classes of transformers, of the keys that GGUF needs, and for the models
that only folding knows of the sizes of heads. The text_config of a model of images and text states only what differs
from them. llama.cpp's defaults for missing metadata are others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pqweights.checkpoint.models import layers, llama_cpp, llama_cpp_encoders, llama_cpp_experts, llama_cpp_hybrids
from pqweights.checkpoint.models.description import STACKED, TURNED, UNKNOWN, UNPREFIXED, MlxDifferences
from pqweights.checkpoint.models.description import ModelDescription as Row
from pqweights.checkpoint.models.traits import TYPES_WITH, Trait

HEAD_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def _sizes(*sizes: int) -> dict[str, Any]:
    """Return the defaults of _SHAPE, or of HEAD_SIZES."""
    return dict(zip(_SHAPE if len(sizes) == len(_SHAPE) else HEAD_SIZES, sizes, strict=True))


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_OWN_HEAD: dict[str, Any] = {"tie_word_embeddings": False}
_SILU = {"hidden_act": "silu"}
_LLAMA = _OWN_HEAD | _SILU | {"rms_norm_eps": 1e-6}
_QWEN = _LLAMA | {"use_sliding_window": False}
_SPARSE = {"decoder_sparse_step": 1, "norm_topk_prob": False}
_GEMMA = _TIED | {"rms_norm_eps": 1e-6, "head_dim": 256}
_LATER_GEMMA = _GEMMA | {"num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh"}
_LATER_GEMMA |= {"query_pre_attn_scalar": 256, "sliding_window": 4096}
_COHERE = _TIED | _SILU | {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
_OLMO = _LLAMA | {"rms_norm_eps": 1e-5}
_ZERO_CENTRED, _TURNED = frozenset({Trait.ZERO_CENTRED_NORMS}), frozenset({Trait.TURNED_EXPERTS})

_GEMMA3 = Row(
    flow=layers.GEMMA2, llama_cpp=llama_cpp_encoders.GEMMA3, traits=_ZERO_CENTRED,
    defaults=_sizes(2304, 9216, 26, 8, 131072) | _LATER_GEMMA | {
        "use_bidirectional_attention": False, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
)  # fmt: skip
_QWEN2_VL = Row(
    llama_cpp=llama_cpp.QWEN2_VL, defaults=_sizes(8192, 29568, 80, 64, 32768) | {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "hidden_act": "silu",
        "use_sliding_window": False,
    },
)  # fmt: skip
_QWEN3_VL = Row(
    llama_cpp=llama_cpp.QWEN3_VL, defaults=_sizes(4096, 22016, 32, 32, 128000) | {
        "num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 500000.0,
        "hidden_act": "silu",
    },
)  # fmt: skip
_QWEN3_VL_MOE = Row(
    llama_cpp=llama_cpp.QWEN3_VL_MOE, defaults=_sizes(2048, 5632, 24, 16, 128000) | _TIED | _SILU | {
        "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 500000.0, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
    },
)  # fmt: skip

_ROBERTA = Row(
    llama_cpp=llama_cpp_encoders.ROBERTA, defaults=_sizes(768, 3072, 12, 12, 512) | _TIED | {
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "is_decoder": False, "pad_token_id": 1,
    },
)  # fmt: skip

_MT5 = _sizes(512, 1024, 8, 6, 512) | {
    "head_dim": 64, "rms_norm_eps": 1e-6, "relative_attention_num_buckets": 32, "feed_forward_proj": "gated-gelu",
    "relative_attention_max_distance": 128,
}  # fmt: skip

# What is known of a type beyond its traits in TYPES_WITH.
_ROWS: dict[str, Row] = {
    "arcee": Row(
        llama_cpp=llama_cpp.ARCEE, defaults=_sizes(2560, 18432, 32, 32, 4096) | _OWN_HEAD | {
            "rms_norm_eps": 1e-05, "hidden_act": "relu2",
        },
    ),
    "bert": Row(
        llama_cpp=llama_cpp_encoders.BERT, defaults=_sizes(768, 3072, 12, 12, 512) | _TIED | {
            "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "is_decoder": False,
        },
    ),
    "camembert": _ROBERTA,
    "cohere": Row(llama_cpp=llama_cpp.COHERE, defaults=_sizes(8192, 22528, 40, 64, 8192) | _COHERE | {
        "use_qk_norm": False, "rope_theta": 5e5,
    }),
    "cohere2": Row(llama_cpp=llama_cpp.COHERE2, defaults=_sizes(8192, 22528, 40, 64, 8192) | _COHERE | {
        "sliding_window": 4096,
    }),
    "deepseek_v2": Row(
        llama_cpp=llama_cpp_experts.DEEPSEEK2_SOFTMAX, defaults=_sizes(4096, 11008, 32, 32, 2048) | _LLAMA | {
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "num_experts": 64, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
            "n_shared_experts": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
            "attention_bias": False, "topk_method": "greedy",
        },
    ),
    "deepseek_v3": Row(
        llama_cpp=llama_cpp_experts.DEEPSEEK2, defaults=_sizes(7168, 18432, 61, 128, 4096) | _LLAMA | {
            "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
            "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
            "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "rope_interleave": True, "attention_bias": False,
        },
    ),
    "distilbert": Row(
        llama_cpp=llama_cpp_encoders.DISTILBERT, defaults=_sizes(768, 3072, 6, 12, 512) | _TIED | {
            "activation": "gelu", "layer_norm_eps": 1e-12,
        },
    ),
    "dots1": Row(
        llama_cpp=llama_cpp_experts.DOTS1, defaults=_sizes(4608, 10944, 62, 32, 2048) | _LLAMA | {
            "num_key_value_heads": 32, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
        },
    ),
    "ernie4_5": Row(
        llama_cpp=llama_cpp.ERNIE4_5, defaults=_sizes(1024, 3072, 18, 16, 131072) | _TIED | _SILU | {
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
            "use_bias": False,
        },
    ),
    "ernie4_5_moe": Row(
        llama_cpp=llama_cpp_experts.ERNIE4_5_MOE, defaults=_sizes(2560, 12288, 28, 20, 131072) | _TIED | _SILU | {
            "num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "num_experts": 64,
            "num_experts_per_tok": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1, "moe_layer_interval": 1, "use_bias": False,
        },
    ),
    "eurobert": Row(
        llama_cpp=llama_cpp_encoders.EUROBERT, defaults=_sizes(768, 3072, 12, 12, 8192) | _LLAMA | {
            "rms_norm_eps": 1e-5, "attention_bias": False,
        },
    ),
    "exaone4": Row(
        llama_cpp=llama_cpp.EXAONE4, defaults=_sizes(4096, 16384, 32, 32, 2048) | _LLAMA | {
            "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "sliding_window": 4096,
        },
    ),
    "exaone_moe": Row(
        llama_cpp=llama_cpp_experts.EXAONE_MOE, defaults=_sizes(4096, 16384, 32, 32, 2048) | _LLAMA | {
            "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "sliding_window": 4096, "num_experts": 64,
            "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "num_shared_experts": 1,
        },
    ),
    "falcon_h1": Row(
        mlx=MlxDifferences(other_head_dim=True),
        llama_cpp=llama_cpp_hybrids.FALCON_H1, defaults=_sizes(4096, 14336, 32, 32, 8192) | _LLAMA | {
            "key_multiplier": 1.0, "attention_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
            "lm_head_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0,
            "embedding_multiplier": 1.0, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "mamba_d_conv": 4,
            "mamba_d_ssm": 1024, "mamba_d_state": 256, "mamba_n_heads": 128, "mamba_n_groups": 1,
            "mamba_rms_norm": False,
        },
    ),
    "gemma": Row(
        flow=layers.LLAMA, llama_cpp=llama_cpp.GEMMA, traits=_ZERO_CENTRED,
        defaults=_sizes(3072, 24576, 28, 16, 8192) | _GEMMA | {
            "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "gemma2": Row(
        flow=layers.GEMMA2, llama_cpp=llama_cpp.GEMMA2, traits=_ZERO_CENTRED,
        defaults=_sizes(2304, 9216, 26, 8, 8192) | _LATER_GEMMA | {
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": replace(_GEMMA3, mlx=MlxDifferences(vocabulary=262208)),
    "gemma3_text": _GEMMA3,
    "gemma3n_text": Row(
        llama_cpp=llama_cpp.GEMMA3N, defaults=_sizes(2048, 16384, 35, 8, 32768) | _TIED | {
            "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-06, "sliding_window": 512,
            "hidden_size_per_layer_input": 256, "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": 30.0, "laurel_rank": 64, "altup_num_inputs": 4, "altup_active_idx": 0,
            "altup_correct_scale": True, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
    ),
    "gemma4_text": Row(
        llama_cpp=llama_cpp.GEMMA4, defaults=_sizes(2304, 9216, 30, 8, 131072) | _TIED | {
            "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-06, "sliding_window": 512,
            "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "glm4": Row(
        llama_cpp=llama_cpp.GLM4, defaults=_sizes(4096, 13696, 40, 32, 131072) | _LLAMA | {
            "partial_rotary_factor": 0.5, "num_key_value_heads": 2, "head_dim": 128,
            "rms_norm_eps": 1.5625e-07,
        },
    ),
    "glm4_moe": Row(
        llama_cpp=llama_cpp_experts.GLM4_MOE, defaults=_sizes(4096, 10944, 46, 96, 131072) | _LLAMA | {
            "partial_rotary_factor": 0.5, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "num_experts": 128, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_shared_experts": 1,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True,
        },
    ),
    "glm4_moe_lite": Row(
        llama_cpp=llama_cpp_experts.DEEPSEEK2, defaults=_sizes(2048, 10240, 47, 20, 202752) | _LLAMA | {
            "num_key_value_heads": 20, "rms_norm_eps": 1e-05, "q_lora_rank": 768, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "num_experts": 64,
            "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1536,
            "n_shared_experts": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
            "rope_interleave": True, "attention_bias": False,
        },
    ),
    "glm_moe_dsa": Row(
        llama_cpp=llama_cpp_experts.GLM_DSA, defaults=_sizes(6144, 12288, 78, 64, 202752) | _LLAMA | {
            "num_key_value_heads": 64, "head_dim": 64, "rms_norm_eps": 1e-05, "q_lora_rank": 2048,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
            "num_experts": 256, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_shared_experts": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": True, "index_n_heads": 32,
            "index_head_dim": 128, "index_topk": 2048, "attention_bias": False,
        },
    ),
    "gpt2": Row(mlx=MlxDifferences(layout=UNPREFIXED)),
    "gpt_neox": Row(mlx=MlxDifferences(
        rope_names={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    )),
    "gpt_oss": Row(
        flow=layers.GPT_OSS, mlx=MlxDifferences(layout=TURNED), traits=_TURNED,
        llama_cpp=llama_cpp_experts.GPT_OSS, defaults=_sizes(2880, 2880, 36, 64, 131072) | _LLAMA | {
            "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-05, "rope_theta": 150000.0,
            "sliding_window": 128, "num_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
    ),
    "granite": Row(
        llama_cpp=llama_cpp.GRANITE,
        defaults=_sizes(4096, 11008, 32, 32, 2048) | _LLAMA | dict.fromkeys(_MULTIPLIERS, 1.0),
    ),
    "granitemoe": Row(
        llama_cpp=llama_cpp_experts.GRANITE_MOE, defaults=_sizes(4096, 11008, 32, 32, 2048) | _LLAMA | {
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "logits_scaling": 1.0, "num_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "granitemoehybrid": Row(
        llama_cpp=llama_cpp_hybrids.GRANITE_HYBRID, defaults=_sizes(4096, 11008, 32, 32, 2048) | _LLAMA | {
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "logits_scaling": 1.0, "num_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_state": 256,
            "mamba_n_heads": 128, "mamba_n_groups": 1,
        },
    ),
    "granitemoeshared": Row(
        llama_cpp=llama_cpp_experts.GRANITE_MOE, defaults=_sizes(4096, 11008, 32, 32, 2048) | _LLAMA | {
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "logits_scaling": 1.0, "num_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0,
        },
    ),
    "hunyuan_v1_dense": Row(
        llama_cpp=llama_cpp.HUNYUAN_DENSE, defaults=_sizes(4096, 11008, 32, 32, 2048) | _LLAMA | {
            "rms_norm_eps": 1e-05,
        },
    ),
    "hunyuan_v1_moe": Row(
        llama_cpp=llama_cpp_experts.HUNYUAN_MOE, defaults=_sizes(4096, 11008, 32, 32, 2048) | _LLAMA | {
            "rms_norm_eps": 1e-05, "num_experts": 1, "num_experts_per_tok": 1,
        },
    ),
    "jina_embeddings_v3": Row(
        llama_cpp=llama_cpp_encoders.JINA_BERT_V3, defaults=_sizes(1024, 4096, 24, 16, 8194) | _TIED | {
            "hidden_act": "gelu", "layer_norm_eps": 1e-5, "type_vocab_size": 1, "rope_theta": 20000.0,
        },
    ),
    # Of the configuration's own code; what published files leave out is what DeepSeek V3 leaves out.
    "jamba": Row(
        llama_cpp=llama_cpp_hybrids.JAMBA, defaults=_sizes(4096, 14336, 32, 32, 262144) | _OWN_HEAD | _SILU | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "num_experts": 16, "num_experts_per_tok": 2,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
            "mamba_proj_bias": False, "mamba_dt_rank": "auto",
        },
    ),
    "kimi_k2": Row(llama_cpp=llama_cpp_experts.DEEPSEEK2, defaults=_OWN_HEAD | _SILU | {"rope_interleave": True}),
    "kimi_linear": Row(
        llama_cpp=llama_cpp_hybrids.KIMI_LINEAR, defaults=_sizes(2304, 9216, 27, 32, 1048576) | _LLAMA | {
            "linear_num_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446,
            "linear_conv_kernel_dim": 4, "linear_head_dim": 128,
        },
    ),
    "lfm2": Row(
        llama_cpp=llama_cpp_hybrids.LFM2, defaults=_sizes(2560, 12288, 32, 32, 128000) | _TIED | {
            "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_auto_adjust_ff_dim": True,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "conv_L_cache": 3,
            "conv_bias": False,
        },
    ),
    "lfm2_moe": Row(
        llama_cpp=llama_cpp_hybrids.LFM2_MOE, defaults=_sizes(2048, 7168, 32, 32, 128000) | _TIED | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "conv_L_cache": 3,
            "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
            "num_dense_layers": 2, "conv_bias": False, "use_expert_bias": True, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
    ),
    "llama": Row(flow=layers.LLAMA, llama_cpp=llama_cpp.LLAMA, defaults=_sizes(4096, 11008, 32, 32, 2048) | _LLAMA),
    "llama4": Row(traits=_TURNED),
    "llama4_text": Row(
        traits=_TURNED,
        llama_cpp=llama_cpp_experts.LLAMA4, defaults=_sizes(5120, 8192, 48, 40, 131072) | _LLAMA | {
            "no_rope_layer_interval": 4, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0, "num_experts": 16, "num_experts_per_tok": 1,
            "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192,
            "use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
        },
    ),
    "minimax_m2": Row(
        llama_cpp=llama_cpp_experts.MINIMAX_M2, defaults=_sizes(3072, 1536, 62, 48, 196608) | _LLAMA | {
            "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5000000.0, "num_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
    "ministral3": Row(
        llama_cpp=llama_cpp.MINISTRAL3, defaults=_sizes(4096, 14336, 34, 32, 262144) | _LLAMA | {
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-05,
        },
    ),
    "mistral": Row(
        flow=layers.LLAMA, llama_cpp=llama_cpp.MISTRAL,
        defaults=_sizes(4096, 14336, 32, 32, 131072) | _LLAMA | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "mistral4": Row(
        llama_cpp=llama_cpp_experts.MISTRAL4, defaults=_sizes(4096, 12288, 36, 32, 1048576) | _LLAMA | {
            "partial_rotary_factor": 0.5, "num_key_value_heads": 32, "q_lora_rank": 1024,
            "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 0, "n_shared_experts": 1,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True, "rope_interleave": True,
            "attention_bias": False,
        },
    ),
    "mixtral": Row(
        flow=layers.MIXTRAL, llama_cpp=llama_cpp.MIXTRAL,
        defaults=_sizes(4096, 14336, 32, 32, 131072) | _LLAMA | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "modernbert": Row(
        llama_cpp=llama_cpp_encoders.MODERN_BERT, defaults=_sizes(768, 1152, 22, 12, 8192) | _TIED | {
            "hidden_activation": "gelu", "layer_norm_eps": 1e-5, "rope_theta": 160000.0, "rope_local_base_freq": 1e4,
            "sliding_window": 128, "classifier_pooling": "cls",
        },
    ),
    "mt5": Row(llama_cpp=llama_cpp_encoders.MT5, defaults=_MT5),
    "nemotron_h": Row(
        llama_cpp=llama_cpp_hybrids.NEMOTRON_H, defaults=_OWN_HEAD | {
            "num_attention_heads": 32, "max_position_embeddings": 4096, "hidden_size": 4096,
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-05, "intermediate_size": 21504,
            "conv_kernel": 4, "mamba_head_dim": 64, "mamba_num_heads": 128, "ssm_state_size": 128,
            "n_groups": 8, "num_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 7688, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
            "norm_topk_prob": True, "moe_shared_expert_intermediate_size": 7688, "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
        },
    ),
    "nomic_bert": Row(
        llama_cpp=llama_cpp_encoders.NOMIC_BERT, defaults=_sizes(768, 3072, 12, 12, 2048) | {
            "hidden_act": "silu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "rope_theta": 1000.0,
        },
    ),
    "olmo2": Row(llama_cpp=llama_cpp.OLMO2, defaults=_sizes(4096, 11008, 32, 32, 2048) | _OLMO),
    "olmo3": Row(llama_cpp=llama_cpp.OLMO3, defaults=_sizes(4096, 11008, 32, 32, 2048) | _OLMO | {
        "sliding_window": 4096, "rope_theta": 5e5,
    }),
    "olmoe": Row(
        llama_cpp=llama_cpp_experts.OLMOE, defaults=_sizes(2048, 2048, 16, 16, 4096) | _LLAMA | {
            "rms_norm_eps": 1e-05, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        },
    ),
    "phi3": Row(
        flow=layers.PHI3, llama_cpp=llama_cpp.PHI3,
        defaults=_sizes(3072, 8192, 32, 32, 4096) | _LLAMA | {
            "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096,
        },
    ),
    "qwen2": Row(
        flow=layers.LLAMA, llama_cpp=llama_cpp.QWEN2,
        defaults=_sizes(4096, 22016, 32, 32, 32768) | _QWEN | {"num_key_value_heads": 32},
    ),
    "qwen2_5_vl": replace(_QWEN2_VL, mlx=MlxDifferences(head_in_text=True, tied=True)),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_moe": Row(llama_cpp=llama_cpp.QWEN2_MOE, defaults=_sizes(2048, 5632, 24, 16, 32768) | _QWEN | _SPARSE | {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }),
    "qwen2_vl": replace(_QWEN2_VL, mlx=MlxDifferences(head_in_text=True, tied=True)),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": Row(
        flow=layers.LLAMA, llama_cpp=llama_cpp.QWEN3,
        defaults=_sizes(4096, 22016, 32, 32, 32768) | _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_5": Row(flow=layers.QWEN3_5, defaults=_sizes(4096, 16, 4, 256), traits=_ZERO_CENTRED),
    "qwen3_5_moe": Row(
        flow=layers.QWEN3_5, defaults=_sizes(2048, 16, 2, 256), traits=_ZERO_CENTRED,
        mlx=MlxDifferences(layout=STACKED),
    ),
    "qwen3_5_moe_text": Row(
        flow=layers.QWEN3_5, traits=_ZERO_CENTRED,
        llama_cpp=llama_cpp_hybrids.QWEN3_5_MOE, defaults=_LLAMA | {
            "num_hidden_layers": 40, "num_attention_heads": 16, "max_position_embeddings": 32768,
            "hidden_size": 2048, "partial_rotary_factor": 0.25, "num_key_value_heads": 2, "head_dim": 256,
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "attention_bias": False,
        },
    ),
    "qwen3_5_text": Row(
        flow=layers.QWEN3_5, traits=_ZERO_CENTRED,
        llama_cpp=llama_cpp_hybrids.QWEN3_5, defaults=_sizes(4096, 12288, 32, 16, 32768) | _LLAMA | {
            "partial_rotary_factor": 0.25, "num_key_value_heads": 4, "head_dim": 256,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "attention_bias": False,
        },
    ),
    "qwen3_moe": Row(
        flow=layers.QWEN_MOE, llama_cpp=llama_cpp.QWEN3_MOE,
        defaults=_sizes(2048, 6144, 24, 32, 32768) | _QWEN | _SPARSE | {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
    ),
    "qwen3_next": Row(
        flow=layers.QWEN3_5, traits=_ZERO_CENTRED,
        llama_cpp=llama_cpp_hybrids.QWEN3_NEXT, defaults=_sizes(2048, 5632, 48, 16, 32768) | _LLAMA | {
            "partial_rotary_factor": 0.25, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "decoder_sparse_step": 1,
            "norm_topk_prob": True, "attention_bias": False,
        },
    ),
    "qwen3_vl": replace(_QWEN3_VL, mlx=MlxDifferences(head_in_text=True)),
    "qwen3_vl_moe": _QWEN3_VL_MOE,
    "qwen3_vl_moe_text": _QWEN3_VL_MOE,
    "qwen3_vl_text": _QWEN3_VL,
    "roberta": _ROBERTA,
    "seed_oss": Row(
        llama_cpp=llama_cpp.SEED_OSS, defaults=_sizes(4096, 27648, 64, 80, 524288) | _LLAMA | {
            "num_key_value_heads": 8, "head_dim": 128,
        },
    ),
    "smollm3": Row(llama_cpp=llama_cpp.SMOLLM3, defaults=_sizes(2048, 11008, 36, 16, 32768) | _QWEN | _TIED | {
        "num_key_value_heads": 4, "rope_theta": 2e6, "no_rope_layer_interval": 4,
    }),
    "stablelm": Row(llama_cpp=llama_cpp.STABLELM, defaults=_sizes(2560, 6912, 32, 32, 4096) | _OWN_HEAD | _SILU | {
        "layer_norm_eps": 1e-5, "num_key_value_heads": 32, "partial_rotary_factor": 0.25,
        "use_parallel_residual": False, "qk_layernorm": False,
    }),
    "starcoder2": Row(llama_cpp=llama_cpp.STARCODER2, defaults=_sizes(3072, 12288, 30, 24, 4096) | _TIED | {
        "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "num_key_value_heads": 2, "use_bias": True,
    }),
    "t5": Row(
        llama_cpp=llama_cpp_encoders.T5, defaults=_sizes(512, 2048, 6, 8, 512) | {
            "head_dim": 64, "rms_norm_eps": 1e-6, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu",
            "relative_attention_max_distance": 128,
        },
    ),
    "umt5": Row(llama_cpp=llama_cpp_encoders.T5, defaults=_MT5),  # every layer has its own biases of positions
    "xlm-roberta": _ROBERTA,
}  # fmt: skip


def _with_traits() -> dict[str, Row]:
    models = dict(_ROWS)
    for trait, types in TYPES_WITH.items():
        for model_type in types.split():
            model = models.get(model_type, UNKNOWN)
            models[model_type] = replace(model, traits=model.traits | {trait})
    return models


MODELS = _with_traits()
