"""What keys mean that a config.json leaves out: the defaults of the configuration classes of transformers.

Of the keys that GGUF needs, and for the models that only folding knows the sizes of heads; one without a default is
None. llama.cpp's defaults for missing metadata are others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_SHAPES = {
    "cohere": (8192, 22528, 40, 64, 8192),
    "cohere2": (8192, 22528, 40, 64, 8192),
    "gemma": (3072, 24576, 28, 16, 8192),
    "gemma2": (2304, 9216, 26, 8, 8192),
    "gemma3_text": (2304, 9216, 26, 8, 131072),
    "granite": (4096, 11008, 32, 32, 2048),
    "llama": (4096, 11008, 32, 32, 2048),
    "mistral": (4096, 14336, 32, 32, 131072),
    "mixtral": (4096, 14336, 32, 32, 131072),
    "olmo2": (4096, 11008, 32, 32, 2048),
    "olmo3": (4096, 11008, 32, 32, 2048),
    "phi3": (3072, 8192, 32, 32, 4096),
    "qwen2": (4096, 22016, 32, 32, 32768),
    "qwen2_moe": (2048, 5632, 24, 16, 32768),
    "qwen3": (4096, 22016, 32, 32, 32768),
    "qwen3_moe": (2048, 6144, 24, 32, 32768),
    "smollm3": (2048, 11008, 36, 16, 32768),
    "stablelm": (2560, 6912, 32, 32, 4096),
    "starcoder2": (3072, 12288, 30, 24, 4096),
}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_OWN_HEAD: dict[str, Any] = {"tie_word_embeddings": False}
_SILU = {"hidden_act": "silu"}
_LLAMA = _OWN_HEAD | _SILU | {"rms_norm_eps": 1e-6}
_QWEN = _LLAMA | {"use_sliding_window": False}
_SPARSE = {"decoder_sparse_step": 1, "norm_topk_prob": False}
_GEMMA = _TIED | {"rms_norm_eps": 1e-6, "head_dim": 256}
_LATER_GEMMA = _GEMMA | {
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_COHERE = _TIED | _SILU | {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
_OTHERS: dict[str, dict[str, Any]] = {
    "cohere": _COHERE | {"use_qk_norm": False, "rope_theta": 5e5},
    "cohere2": _COHERE | {"sliding_window": 4096},
    "gemma": _GEMMA | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": _LATER_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _LATER_GEMMA
    | {"use_bidirectional_attention": False, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "granite": _LLAMA | dict.fromkeys(_MULTIPLIERS, 1.0),
    "llama": _LLAMA,
    "mistral": _LLAMA | {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": _LLAMA
    | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6}
    | {"num_experts": 8, "num_experts_per_tok": 2},
    "olmo2": _LLAMA | {"rms_norm_eps": 1e-5},
    "olmo3": _LLAMA | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
    "phi3": _LLAMA | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "qwen2": _QWEN | {"num_key_value_heads": 32},
    "qwen2_moe": _QWEN
    | _SPARSE
    | {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen3": _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": _QWEN
    | _SPARSE
    | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "smollm3": _QWEN | _TIED | {"num_key_value_heads": 4, "rope_theta": 2e6, "no_rope_layer_interval": 4},
    "stablelm": _OWN_HEAD
    | _SILU
    | {"layer_norm_eps": 1e-5, "num_key_value_heads": 32, "partial_rotary_factor": 0.25}
    | {"use_parallel_residual": False, "qk_layernorm": False},
    "starcoder2": _TIED
    | {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "num_key_value_heads": 2, "use_bias": True},
}

# By the model_type of transformers. The text_config of a model of images and text states only what differs from these.
DEFAULTS = {kind: dict(zip(_SHAPE, _SHAPES[kind], strict=True)) | others for kind, others in _OTHERS.items()}
DEFAULTS["gemma3"] = DEFAULTS["gemma3_text"]
HEAD_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
DEFAULTS |= {
    kind: dict(zip(HEAD_SIZES, sizes, strict=True))
    for kind, sizes in {
        "gpt_oss": (2880, 64, 8, 64),
        "qwen3_next": (2048, 16, 2, 256),
        "qwen3_5": (4096, 16, 4, 256),
        "qwen3_5_text": (4096, 16, 4, 256),
        "qwen3_5_moe": (2048, 16, 2, 256),
        "qwen3_5_moe_text": (2048, 16, 2, 256),
    }.items()
}


def stated_or_default(config: Mapping[str, Any], model_type: str, key: str) -> Any:
    """Return the value of a key; the default of transformers for one that is absent, None if that is not known."""
    return config[key] if key in config else DEFAULTS.get(model_type, {}).get(key)
