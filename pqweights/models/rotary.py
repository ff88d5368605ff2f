"""What transformers takes where config.json does not say how a model knows the positions of tokens: bases of rotary
embeddings, shares of heads that are rotated, and which layers attend over a sliding window.

The values are those of its configuration classes (5.23); types that state the same for themselves are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqweights.models.llama_cpp import FULL, LINEAR_ATTENTION, SLIDING

LEGACY_LAYER_TYPES = {
    "attention": FULL, "mamba": LINEAR_ATTENTION, "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}  # fmt: skip


def _by_type(groups: Mapping[Any, str]) -> dict[str, Any]:
    return {model_type: value for value, types in groups.items() for model_type in types.split()}


DEFAULT_BASE = 10000.0
BASES: Mapping[str, float] = _by_type({
    1e3: "nomic_bert",
    2e4: "jina_embeddings_v3",
    1e5: "helium",
    1.5e5: "gpt_oss",
    1.6e5: "gte",
    5e5: """bitnet cohere ernie4_5 ernie4_5_moe flex_olmo llama4_text olmo3 qwen3_vl qwen3_vl_text qwen3_vl_moe
            qwen3_vl_moe_text""",
    1e6: """cwm emu3 lfm2 lfm2_moe lfm3 minimax mixtral phimoe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text
            solar_open""",
    2e6: "smollm3",
    5e6: "minimax_m2 minimax_m3_vl minimax_m3_vl_text",
    6e6: "bailing_hybrid",
    1e7: "longcat_flash",
    1.2e7: "apertus",
    11158840.0: "hy_v3",
})  # fmt: skip
ROTATED_SHARES: Mapping[str, float] = _by_type(
    {
        0.25: """gpt_neox gpt_neox_japanese qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next stablelm""",
        0.5: "glm glm4 glm4_moe nemotron persimmon phi recurrent_gemma",
        1.0: "phi3 phi4_multimodal phi4mm",
    }
)
# Keys that state the base and the share under other names.
OTHER_BASE_KEYS = dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), "rotary_emb_base")
OTHER_SHARE_KEYS = dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), "rotary_pct")
# Types whose kinds of layers have rotary embeddings of their own: the older keys of their bases and the defaults.
_GEMMA3 = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
_MODERNBERT = {FULL: ("global_rope_theta", 1.6e5), SLIDING: ("local_rope_theta", 1e4)}
BASES_BY_KIND: Mapping[str, Mapping[str, tuple[str, float]]] = {
    **dict.fromkeys(("gemma3", "gemma3_text", "gemma3n", "gemma3n_text"), _GEMMA3),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), _MODERNBERT),
    "olmo3": {FULL: ("rope_theta", 5e5), SLIDING: ("", 5e5)},
}
# Those of them whose scaling is that of all layers, not just of those with full attention.
SCALED_ALIKE = ("modernbert", "modernbert-decoder")

_GEMMA4 = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_LLAMA_4_SCALING = {
    "type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
# rope_parameters, where config.json has none, and no rope_scaling.
PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "apertus": {
        "rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _GEMMA4),
    "gpt_oss": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "laguna": {
        FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "mellum": {
        FULL: {"rope_type": "default", "rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
    "mimo_v2_flash": {
        FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
    },
    "ministral3": _LLAMA_4_SCALING | {
        "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    },
    "mistral4": _LLAMA_4_SCALING | {
        "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
    },
    "muse_spark_text": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
# Types that take what rope_parameters says, and nothing of the older keys.
NEW_KEYS_ALONE = frozenset(
    _by_type({True: "gemma4 gemma4_text gemma4_unified gemma4_unified_text laguna mellum mimo_v2_flash zaya"})
)
# The length for which a model was trained first is stated outside of the parameters, or is this.
FIRST_LENGTHS: Mapping[str, int] = dict.fromkeys(("phi3", "phi4_multimodal", "phi4mm"), 4096)

# Every layer attends over the last `sliding_window` tokens.
WINDOWS_EVERYWHERE = frozenset(
    _by_type({True: "doge minimax ministral3 mistral mixtral phi3 phi4_multimodal phi4mm phimoe qwen3_moe starcoder2"})
)
# One layer in so many has full attention, the last of each period, unless layer_types lists them.
WINDOW_PERIODS: Mapping[str, int] = _by_type(
    {
        2: "gemma2 gpt_oss",
        4: "afmoe cohere2 exaone4 exaone_moe olmo3",
        5: "gemma3n gemma3n_text",
        6: "gemma3 gemma3_text gemma4 gemma4_text gemma4_unified gemma4_unified_text",
    }
)
# Keys that state another period.
PERIOD_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("gemma3", "gemma3_text", "cohere2", "exaone4", "exaone_moe"), "sliding_window_pattern"),
    "afmoe": "global_attn_every_n_layers",
}
# use_sliding_window says whether there is a window; these have it in the layers from max_window_layers on.
UPPER_WINDOWS: Mapping[str, int] = _by_type({
    28: "qwen2 qwen3", 62: "dots1", 80: "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
})  # fmt: skip
OPTIONAL_WINDOWS = frozenset({*UPPER_WINDOWS, "qwen2_moe", "qwen3_moe", "smollm3"} - {"dots1"})
DEFAULT_WINDOWS: Mapping[str, int] = _by_type(
    {
        128: "gpt_oss",
        129: "mimo_v2_flash",
        512: "gemma3n gemma3n_text gemma4 gemma4_text laguna",
        1024: "afmoe gemma4_unified gemma4_unified_text mellum",
        2048: "muse_glimmer_text muse_spark_text",
        4096: """cohere2 dots1 exaone4 exaone_moe gemma2 gemma3 gemma3_text mistral olmo3 qwen2 qwen2_moe qwen2_vl
             qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3 qwen3_moe""",
    }
)
# Layers of the kind SLIDING attend over the last `sliding_window` tokens; other types pass over such kinds.
WINDOWS_BY_KIND = frozenset(
    {*WINDOW_PERIODS, *DEFAULT_WINDOWS, *OPTIONAL_WINDOWS, "step3p5", "step3p7"} - WINDOWS_EVERYWHERE
)
# Types without rotary embeddings.
WITHOUT = frozenset(
    _by_type(
        {
            True: """
bart bert big_bird biogpt bloom camembert codegen ctrl distilbert electra falcon_mamba gpt-sw3 gpt2 gpt_bigcode gpt_neo
gptj jamba kimi_linear mamba mamba2 mpt mt5 nemotron_h openai-gpt opt rembert roberta roberta-prelayernorm rwkv t5 umt5
xlm-roberta xlm-roberta-xl xlnet xlstm
"""
        }
    )
)
