"""The types of models, by the `model_type` of transformers: a row for each.

The defaults are those of the configuration classes of transformers, of the keys that GGUF needs, and for the models
that only folding knows of the sizes of heads. The text_config of a model of images and text states only what differs
from them. llama.cpp's defaults for missing metadata are others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pqweights.checkpoint.models import layers, llama_cpp
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
    flow=layers.GEMMA2, llama_cpp=llama_cpp.GEMMA3, traits=_ZERO_CENTRED,
    defaults=_sizes(2304, 9216, 26, 8, 131072) | _LATER_GEMMA | {
        "use_bidirectional_attention": False, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
)  # fmt: skip
_QWEN3_5_MOE = Row(flow=layers.QWEN3_5, defaults=_sizes(2048, 16, 2, 256), traits=_ZERO_CENTRED)

# What is known of a type beyond its traits in TYPES_WITH.
_ROWS: dict[str, Row] = {
    "cohere": Row(llama_cpp=llama_cpp.COHERE, defaults=_sizes(8192, 22528, 40, 64, 8192) | _COHERE | {
        "use_qk_norm": False, "rope_theta": 5e5,
    }),
    "cohere2": Row(llama_cpp=llama_cpp.COHERE2, defaults=_sizes(8192, 22528, 40, 64, 8192) | _COHERE | {
        "sliding_window": 4096,
    }),
    "falcon_h1": Row(mlx=MlxDifferences(other_head_dim=True)),
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
    "gpt2": Row(mlx=MlxDifferences(layout=UNPREFIXED)),
    "gpt_neox": Row(mlx=MlxDifferences(
        rope_names={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    )),
    "gpt_oss": Row(
        flow=layers.GPT_OSS, defaults=_sizes(2880, 64, 8, 64), mlx=MlxDifferences(layout=TURNED), traits=_TURNED,
    ),
    "granite": Row(
        llama_cpp=llama_cpp.GRANITE,
        defaults=_sizes(4096, 11008, 32, 32, 2048) | _LLAMA | dict.fromkeys(_MULTIPLIERS, 1.0),
    ),
    "llama": Row(flow=layers.LLAMA, llama_cpp=llama_cpp.LLAMA, defaults=_sizes(4096, 11008, 32, 32, 2048) | _LLAMA),
    "llama4": Row(traits=_TURNED),
    "llama4_text": Row(traits=_TURNED),
    "mistral": Row(
        flow=layers.LLAMA, llama_cpp=llama_cpp.MISTRAL,
        defaults=_sizes(4096, 14336, 32, 32, 131072) | _LLAMA | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "mixtral": Row(
        flow=layers.MIXTRAL, llama_cpp=llama_cpp.MIXTRAL,
        defaults=_sizes(4096, 14336, 32, 32, 131072) | _LLAMA | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "olmo2": Row(llama_cpp=llama_cpp.OLMO2, defaults=_sizes(4096, 11008, 32, 32, 2048) | _OLMO),
    "olmo3": Row(llama_cpp=llama_cpp.OLMO3, defaults=_sizes(4096, 11008, 32, 32, 2048) | _OLMO | {
        "sliding_window": 4096, "rope_theta": 5e5,
    }),
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
    "qwen2_moe": Row(llama_cpp=llama_cpp.QWEN2_MOE, defaults=_sizes(2048, 5632, 24, 16, 32768) | _QWEN | _SPARSE | {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }),
    "qwen2_vl": Row(mlx=MlxDifferences(head_in_text=True, tied=True)),
    "qwen2_5_vl": Row(mlx=MlxDifferences(head_in_text=True, tied=True)),
    "qwen3": Row(
        flow=layers.LLAMA, llama_cpp=llama_cpp.QWEN3,
        defaults=_sizes(4096, 22016, 32, 32, 32768) | _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_moe": Row(
        flow=layers.QWEN_MOE, llama_cpp=llama_cpp.QWEN3_MOE,
        defaults=_sizes(2048, 6144, 24, 32, 32768) | _QWEN | _SPARSE | {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
    ),
    "qwen3_next": _QWEN3_5_MOE,
    "qwen3_5": replace(_QWEN3_5_MOE, defaults=_sizes(4096, 16, 4, 256)),
    "qwen3_5_text": replace(_QWEN3_5_MOE, defaults=_sizes(4096, 16, 4, 256)),
    "qwen3_5_moe": replace(_QWEN3_5_MOE, mlx=MlxDifferences(layout=STACKED)),
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_vl": Row(mlx=MlxDifferences(head_in_text=True)),
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
}  # fmt: skip


def _with_traits() -> dict[str, Row]:
    models = dict(_ROWS)
    for trait, types in TYPES_WITH.items():
        for model_type in types.split():
            model = models.get(model_type, UNKNOWN)
            models[model_type] = replace(model, traits=model.traits | {trait})
    return models


MODELS = _with_traits()
