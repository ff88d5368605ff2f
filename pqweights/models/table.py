"""The types of models, by the `model_type` of transformers: a row for each.

The defaults are those of the configuration classes of transformers, of the keys that GGUF needs, and elsewhere of the
sizes of heads. The text_config of a model of images and text states only what differs
from them. llama.cpp's defaults for missing metadata are others.
"""

from __future__ import annotations

from dataclasses import replace

from pqweights.models import llama_cpp, llama_cpp_encoders, llama_cpp_hybrids, table_experts
from pqweights.models.defaults import LLAMA, OWN_HEAD, SILU, TIED, sizes
from pqweights.models.description import UNKNOWN
from pqweights.models.description import ModelDescription as Row
from pqweights.models.mlx_lm import MLX_DIFFERENCES
from pqweights.models.traits import IN_MEMORY, TYPES_WITH, Trait

_SPARSE = {"decoder_sparse_step": 1, "norm_topk_prob": False}
_GEMMA = TIED | {"rms_norm_eps": 1e-6, "head_dim": 256}
_LATER_GEMMA = _GEMMA | {"num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh"}
_LATER_GEMMA |= {"query_pre_attn_scalar": 256}
_COHERE = TIED | SILU | {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
_OLMO = LLAMA | {"rms_norm_eps": 1e-5}
_ZERO_CENTRED = frozenset({Trait.ZERO_CENTRED_NORMS})

_GEMMA3 = Row(
    llama_cpp=llama_cpp_encoders.GEMMA3, traits=_ZERO_CENTRED,
    defaults=sizes(2304, 9216, 26, 8, 131072) | _LATER_GEMMA | {
        "use_bidirectional_attention": False,
    },
)  # fmt: skip
_QWEN2_VL = Row(
    llama_cpp=llama_cpp.QWEN2_VL, defaults=sizes(8192, 29568, 80, 64, 32768) | {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "hidden_act": "silu",
    },
)  # fmt: skip
_QWEN3_VL = Row(
    llama_cpp=llama_cpp.QWEN3_VL, defaults=sizes(4096, 22016, 32, 32, 128000) | {
        "num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
    },
)  # fmt: skip
_QWEN3_VL_MOE = Row(
    llama_cpp=llama_cpp.QWEN3_VL_MOE, defaults=sizes(2048, 5632, 24, 16, 128000) | TIED | SILU | {
        "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
    },
)  # fmt: skip

_PHI4_MULTIMODAL = Row(
    llama_cpp=llama_cpp.PHI4_MULTIMODAL, defaults=sizes(3072, 8192, 32, 32, 131072) | LLAMA | {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    },
)  # fmt: skip
_ROBERTA = Row(
    llama_cpp=llama_cpp_encoders.ROBERTA, defaults=sizes(768, 3072, 12, 12, 512) | TIED | {
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "is_decoder": False, "pad_token_id": 1,
    },
)  # fmt: skip

_MT5 = sizes(512, 1024, 8, 6, 512) | {
    "head_dim": 64, "rms_norm_eps": 1e-6, "relative_attention_num_buckets": 32, "feed_forward_proj": "gated-gelu",
    "relative_attention_max_distance": 128,
}  # fmt: skip

# What is known of a type beyond its traits in TYPES_WITH.
_ROWS: dict[str, Row] = {
    "arcee": Row(
        llama_cpp=llama_cpp.ARCEE, defaults=sizes(2560, 18432, 32, 32, 4096) | OWN_HEAD | {
            "rms_norm_eps": 1e-05, "hidden_act": "relu2",
        },
    ),
    "bert": Row(
        llama_cpp=llama_cpp_encoders.BERT, defaults=sizes(768, 3072, 12, 12, 512) | TIED | {
            "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "is_decoder": False,
        },
    ),
    "camembert": _ROBERTA,
    "cohere": Row(llama_cpp=llama_cpp.COHERE, defaults=sizes(8192, 22528, 40, 64, 8192) | _COHERE | {
        "use_qk_norm": False,
    }),
    "cohere2": Row(llama_cpp=llama_cpp.COHERE2, defaults=sizes(8192, 22528, 40, 64, 8192) | _COHERE | {

    }),
    "distilbert": Row(
        llama_cpp=llama_cpp_encoders.DISTILBERT, defaults=sizes(768, 3072, 6, 12, 512) | TIED | {
            "activation": "gelu", "layer_norm_eps": 1e-12,
        },
    ),
    "ernie4_5": Row(
        llama_cpp=llama_cpp.ERNIE4_5, defaults=sizes(1024, 3072, 18, 16, 131072) | TIED | SILU | {
            "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-05,
            "use_bias": False,
        },
    ),
    "eurobert": Row(
        llama_cpp=llama_cpp_encoders.EUROBERT, defaults=sizes(768, 3072, 12, 12, 8192) | LLAMA | {
            "rms_norm_eps": 1e-5, "attention_bias": False,
        },
    ),
    "exaone4": Row(
        llama_cpp=llama_cpp.EXAONE4, defaults=sizes(4096, 16384, 32, 32, 2048) | LLAMA | {
            "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
        },
    ),
    "falcon_h1": Row(
        llama_cpp=llama_cpp_hybrids.FALCON_H1, defaults=sizes(4096, 14336, 32, 32, 8192) | LLAMA | {
            "key_multiplier": 1.0, "attention_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
            "lm_head_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0,
            "embedding_multiplier": 1.0, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "mamba_d_conv": 4,
            "mamba_d_ssm": 1024, "mamba_d_state": 256, "mamba_n_heads": 128, "mamba_n_groups": 1,
            "mamba_rms_norm": False,
        },
    ),
    "gemma": Row(
        llama_cpp=llama_cpp.GEMMA, traits=_ZERO_CENTRED,
        defaults=sizes(3072, 24576, 28, 16, 8192) | _GEMMA | {
            "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "gemma2": Row(
        llama_cpp=llama_cpp.GEMMA2, traits=_ZERO_CENTRED,
        defaults=sizes(2304, 9216, 26, 8, 8192) | _LATER_GEMMA | {
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": Row(
        llama_cpp=llama_cpp.GEMMA3N, defaults=sizes(2048, 16384, 35, 8, 32768) | TIED | {
            "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-06,
            "hidden_size_per_layer_input": 256, "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": 30.0, "laurel_rank": 64, "altup_num_inputs": 4, "altup_active_idx": 0,
            "altup_correct_scale": True,
        },
    ),
    "gemma4_text": Row(
        llama_cpp=llama_cpp.GEMMA4, defaults=sizes(2304, 9216, 30, 8, 131072) | TIED | {
            "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-06,
            "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "glm4": Row(
        llama_cpp=llama_cpp.GLM4, defaults=sizes(4096, 13696, 40, 32, 131072) | LLAMA | {
            "num_key_value_heads": 2, "head_dim": 128,
            "rms_norm_eps": 1.5625e-07,
        },
    ),
    "granite": Row(
        llama_cpp=llama_cpp.GRANITE,
        defaults=sizes(4096, 11008, 32, 32, 2048) | LLAMA | dict.fromkeys(_MULTIPLIERS, 1.0),
    ),
    "granitemoehybrid": Row(
        llama_cpp=llama_cpp_hybrids.GRANITE_HYBRID, defaults=sizes(4096, 11008, 32, 32, 2048) | LLAMA | {
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "logits_scaling": 1.0, "num_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_state": 256,
            "mamba_n_heads": 128, "mamba_n_groups": 1,
        },
    ),
    "hunyuan_v1_dense": Row(
        llama_cpp=llama_cpp.HUNYUAN_DENSE, defaults=sizes(4096, 11008, 32, 32, 2048) | LLAMA | {
            "rms_norm_eps": 1e-05,
        },
    ),
    "jina_embeddings_v3": Row(
        llama_cpp=llama_cpp_encoders.JINA_BERT_V3, defaults=sizes(1024, 4096, 24, 16, 8194) | TIED | {
            "hidden_act": "gelu", "layer_norm_eps": 1e-5, "type_vocab_size": 1,
        },
    ),
    "jamba": Row(
        llama_cpp=llama_cpp_hybrids.JAMBA, defaults=sizes(4096, 14336, 32, 32, 262144) | OWN_HEAD | SILU | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "num_experts": 16, "num_experts_per_tok": 2,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
            "mamba_proj_bias": False, "mamba_dt_rank": "auto",
        },
    ),
    "kimi_linear": Row(
        llama_cpp=llama_cpp_hybrids.KIMI_LINEAR, defaults=sizes(2304, 9216, 27, 32, 1048576) | LLAMA | {
            "linear_num_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446,
            "linear_conv_kernel_dim": 4, "linear_head_dim": 128,
        },
    ),
    "lfm2": Row(
        llama_cpp=llama_cpp_hybrids.LFM2, defaults=sizes(2560, 12288, 32, 32, 128000) | TIED | {
            "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_auto_adjust_ff_dim": True,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "conv_L_cache": 3,
            "conv_bias": False,
        },
    ),
    "lfm2_moe": Row(
        llama_cpp=llama_cpp_hybrids.LFM2_MOE, defaults=sizes(2048, 7168, 32, 32, 128000) | TIED | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "conv_L_cache": 3,
            "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
            "num_dense_layers": 2, "conv_bias": False, "use_expert_bias": True, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
    ),
    "llama": Row(llama_cpp=llama_cpp.LLAMA, defaults=sizes(4096, 11008, 32, 32, 2048) | LLAMA),
    "llama4": Row(traits=frozenset({Trait.TRANSPOSED_EXPERTS})),
    "ministral3": Row(
        llama_cpp=llama_cpp.MINISTRAL3, defaults=sizes(4096, 14336, 34, 32, 262144) | LLAMA | {
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-05,
        },
    ),
    "mistral": Row(
        llama_cpp=llama_cpp.LLAMA,
        defaults=sizes(4096, 14336, 32, 32, 131072) | LLAMA | {"num_key_value_heads": 8},
    ),
    "mixtral": Row(
        llama_cpp=llama_cpp.MIXTRAL,
        defaults=sizes(4096, 14336, 32, 32, 131072) | LLAMA | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "modernbert": Row(
        llama_cpp=llama_cpp_encoders.MODERN_BERT, defaults=sizes(768, 1152, 22, 12, 8192) | TIED | {
            "hidden_activation": "gelu", "layer_norm_eps": 1e-5,
            "sliding_window": 128, "classifier_pooling": "cls",
        },
    ),
    "mt5": Row(llama_cpp=llama_cpp_encoders.MT5, defaults=_MT5),
    "nemotron_h": Row(
        llama_cpp=llama_cpp_hybrids.NEMOTRON_H, defaults=OWN_HEAD | {
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
        llama_cpp=llama_cpp_encoders.NOMIC_BERT, defaults=sizes(768, 3072, 12, 12, 2048) | {
            "hidden_act": "silu", "layer_norm_eps": 1e-12, "type_vocab_size": 2,
        },
    ),
    "olmo2": Row(llama_cpp=llama_cpp.OLMO2, defaults=sizes(4096, 11008, 32, 32, 2048) | _OLMO),
    "olmo3": Row(llama_cpp=llama_cpp.OLMO3, defaults=sizes(4096, 11008, 32, 32, 2048) | _OLMO | {

    }),
    "phi3": Row(
        llama_cpp=llama_cpp.PHI3,
        defaults=sizes(3072, 8192, 32, 32, 4096) | LLAMA | {
            "rms_norm_eps": 1e-5,
        },
    ),
    "phi4_multimodal": _PHI4_MULTIMODAL,
    "phi4mm": _PHI4_MULTIMODAL,
    "qwen2": Row(
        llama_cpp=llama_cpp.QWEN2,
        defaults=sizes(4096, 22016, 32, 32, 32768) | LLAMA | {"num_key_value_heads": 32},
    ),
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_moe": Row(llama_cpp=llama_cpp.QWEN2_MOE, defaults=sizes(2048, 5632, 24, 16, 32768) | LLAMA | _SPARSE | {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": Row(
        llama_cpp=llama_cpp.QWEN3,
        defaults=sizes(4096, 22016, 32, 32, 32768) | LLAMA | {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_5": Row(defaults=sizes(4096, 16, 4, 256), traits=_ZERO_CENTRED),
    "qwen3_5_moe": Row(defaults=sizes(2048, 16, 2, 256), traits=_ZERO_CENTRED),
    "qwen3_5_moe_text": Row(
        traits=_ZERO_CENTRED,
        llama_cpp=llama_cpp_hybrids.QWEN3_5_MOE, defaults=LLAMA | {
            "num_hidden_layers": 40, "num_attention_heads": 16, "max_position_embeddings": 32768,
            "hidden_size": 2048, "num_key_value_heads": 2, "head_dim": 256,
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "attention_bias": False,
        },
    ),
    "qwen3_5_text": Row(
        traits=_ZERO_CENTRED,
        llama_cpp=llama_cpp_hybrids.QWEN3_5, defaults=sizes(4096, 12288, 32, 16, 32768) | LLAMA | {
            "num_key_value_heads": 4, "head_dim": 256,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "attention_bias": False,
        },
    ),
    "qwen3_moe": Row(
        llama_cpp=llama_cpp.QWEN3_MOE,
        defaults=sizes(2048, 6144, 24, 32, 32768) | LLAMA | _SPARSE | {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
    ),
    "qwen3_next": Row(
        traits=_ZERO_CENTRED,
        llama_cpp=llama_cpp_hybrids.QWEN3_NEXT, defaults=sizes(2048, 5632, 48, 16, 32768) | LLAMA | {
            "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "decoder_sparse_step": 1,
            "norm_topk_prob": True, "attention_bias": False,
        },
    ),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL_MOE,
    "qwen3_vl_moe_text": _QWEN3_VL_MOE,
    "qwen3_vl_text": _QWEN3_VL,
    "roberta": _ROBERTA,
    "seed_oss": Row(
        llama_cpp=llama_cpp.SEED_OSS, defaults=sizes(4096, 27648, 64, 80, 524288) | LLAMA | {
            "num_key_value_heads": 8, "head_dim": 128,
        },
    ),
    "smollm3": Row(llama_cpp=llama_cpp.SMOLLM3, defaults=sizes(2048, 11008, 36, 16, 32768) | LLAMA | TIED | {
        "num_key_value_heads": 4, "no_rope_layer_interval": 4,
    }),
    "stablelm": Row(llama_cpp=llama_cpp.STABLELM, defaults=sizes(2560, 6912, 32, 32, 4096) | OWN_HEAD | SILU | {
        "layer_norm_eps": 1e-5, "num_key_value_heads": 32,
        "use_parallel_residual": False, "qk_layernorm": False,
    }),
    "starcoder2": Row(llama_cpp=llama_cpp.STARCODER2, defaults=sizes(3072, 12288, 30, 24, 4096) | TIED | {
        "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "num_key_value_heads": 2, "use_bias": True,
    }),
    "t5": Row(
        llama_cpp=llama_cpp_encoders.T5, defaults=sizes(512, 2048, 6, 8, 512) | {
            "head_dim": 64, "rms_norm_eps": 1e-6, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu",
            "relative_attention_max_distance": 128,
        },
    ),
    "umt5": Row(llama_cpp=llama_cpp_encoders.T5, defaults=_MT5),  # every layer has its own biases of positions
    "xlm-roberta": _ROBERTA,
}  # fmt: skip


def _completed() -> dict[str, Row]:
    models = {**_ROWS, **table_experts.ROWS}
    for model_type, differences in MLX_DIFFERENCES.items():
        models[model_type] = replace(models.get(model_type, UNKNOWN), mlx=differences)
    for model_type, names in IN_MEMORY.items():
        models[model_type] = replace(models.get(model_type, UNKNOWN), in_memory=names)
    for trait, types in TYPES_WITH.items():
        for model_type in types.split():
            model = models.get(model_type, UNKNOWN)
            models[model_type] = replace(model, traits=model.traits | {trait})
    return models


MODELS = _completed()
