"""Where mlx-lm's models differ from those of transformers, by type of model: a row for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

# What is done to the tensors of transformers before mlx-lm's own sanitize.
UNPREFIXED, TRANSPOSED, STACKED = "unprefixed", "transposed experts", "stacked experts"
AS_PUBLISHED = "stacks of experts [experts, in, out]"
NESTED, UNWRAPPED = "below language_model", "the text model alone"


@dataclass(frozen=True, kw_only=True)
class MlxDifferences:
    """Where mlx-lm differs from transformers.

    module: the type under which it has the model
    layout: one of the constants above: what its sanitize expects, and transformers does not write
    other_head_dim: whether its default for head_dim is not that of transformers
    head_in_text: whether the text_config of a model of images and text must say whether the head is tied
    tied: what it takes if that does not say it, where it is known
    vocabulary: its default for the size, which it looks for in the outer configuration only
    rope_names: keys, and the keys in rope_parameters under which transformers 5 writes them
    constants: settings that it requires, and that are a matter of course for transformers
    computed: returns settings that transformers 5 writes under other names; a KeyError means that it did not
    """

    module: str | None = None
    layout: str | None = None
    other_head_dim: bool = False
    head_in_text: bool = False
    tied: bool | None = None
    vocabulary: int | None = None
    rope_names: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    computed: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}


# How experts are chosen by DeepSeek V3, and by many since.
_BIASED_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _exaone_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"is_moe_layer": [kind == "sparse" for kind in config["mlp_layer_types"]]}


def _gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with full attention have sizes of their own, which transformers 5 lists layer by layer."""
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    listed = zip(config["layer_types"], map(str, range(len(config["layer_types"]))), strict=True)
    own = next((config["per_layer_config"].get(layer) for kind, layer in listed if kind == "full_attention"), None)
    return {names[key]: value for key, value in (own or {}).items() if key in names}


def _granite_hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    return {"layer_types": [names.get(kind, kind) for kind in config["layer_types"]]}


def _kimi_linear(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers are counted from 1."""
    kinds, dense = config["layer_types"], takewhile("dense".__eq__, config["mlp_layer_types"])
    return {"first_k_dense_replace": len(list(dense)), "linear_attn_config": {
        "kda_layers": [number for number, kind in enumerate(kinds, 1) if kind == "linear_attention"],
        "full_attn_layers": [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"],
        "head_dim": config["linear_head_dim"], "num_heads": config["linear_num_heads"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    }}  # fmt: skip


def _lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"block_dim": config.get("block_dim", config["hidden_size"])}


def _mimo(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a sliding window have twice the heads for keys and values, and sinks."""
    kinds, rope = config["layer_types"], config["rope_parameters"]
    full, sliding = rope["full_attention"], rope["sliding_attention"]
    return _BIASED_SIGMOID | {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "sliding_window_size": config["sliding_window"], "layernorm_epsilon": config["rms_norm_eps"],
        "rope_theta": full["rope_theta"], "swa_rope_theta": sliding["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"], "n_shared_experts": None,
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"], "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }  # fmt: skip


def _step3p5(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds, heads = config["layer_types"], config["num_key_value_heads"]
    rope = [config["rope_parameters"][kind] for kind in kinds]
    sparse = [number for number, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"]
    return {
        "num_attention_groups": heads, "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"], "moe_layers_enum": ",".join(map(str, sparse)),
        "rope_theta": [of_layer["rope_theta"] for of_layer in rope], "yarn_only_types": ["full_attention"],
        "partial_rotary_factors": [of_layer.get("partial_rotary_factor", 1.0) for of_layer in rope],
        "attention_other_setting": {
            "num_attention_heads": config["num_sliding_attention_heads"], "num_attention_groups": heads,
        },
    }  # fmt: skip


def _minimax(config: Mapping[str, Any]) -> dict[str, Any]:
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    return {"rotary_dim": int(config["head_dim"] * share)}


MLX_DIFFERENCES: dict[str, MlxDifferences] = {
    "apertus": MlxDifferences(constants={"mlp_bias": False, "post_norm": False, "qk_norm": True}),
    "exaone_moe": MlxDifferences(computed=_exaone_moe),
    "falcon_h1": MlxDifferences(other_head_dim=True),
    "gemma3": MlxDifferences(vocabulary=262208),
    "gemma3n_text": MlxDifferences(module="gemma3n", layout=NESTED),
    "gemma4": MlxDifferences(vocabulary=262144),
    "gemma4_text": MlxDifferences(computed=_gemma4),
    "glm_moe_dsa": MlxDifferences(constants=_BIASED_SIGMOID | {"moe_layer_freq": 1}),
    "gpt2": MlxDifferences(layout=UNPREFIXED),
    "gpt_neox": MlxDifferences(rope_names={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}),
    "gpt_oss": MlxDifferences(layout=TRANSPOSED),
    "granitemoehybrid": MlxDifferences(computed=_granite_hybrid),
    "kimi_linear": MlxDifferences(constants={"rope_theta": 10000.0}, computed=_kimi_linear),  # it has no RoPE
    **dict.fromkeys(
        ("idefics3", "internvl", "lfm2_vl", "llava_onevision", "smolvlm", "step3p7"), MlxDifferences(layout=UNWRAPPED),
    ),
    "lfm2": MlxDifferences(computed=_lfm2),
    "mimo_v2_flash": MlxDifferences(computed=_mimo),
    "minimax_m2": MlxDifferences(constants={"shared_intermediate_size": 0}, computed=_minimax),
    "qwen2_5_vl": MlxDifferences(head_in_text=True, tied=True),
    "qwen2_vl": MlxDifferences(head_in_text=True, tied=True),
    "qwen3_5_moe": MlxDifferences(layout=STACKED),
    "qwen3_5_moe_text": MlxDifferences(module="qwen3_5_moe", layout=STACKED),
    "qwen3_5_text": MlxDifferences(module="qwen3_5"),
    "qwen3_vl": MlxDifferences(head_in_text=True),
    "qwen3_vl_moe": MlxDifferences(layout=AS_PUBLISHED, head_in_text=True),
    "qwen3_vl_moe_text": MlxDifferences(constants={"norm_topk_prob": True}),
    "step3p5": MlxDifferences(computed=_step3p5),
    "solar_open": MlxDifferences(
        constants={"first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
        computed=lambda config: {"intermediate_size": config.get("intermediate_size", config["moe_intermediate_size"])},
    ),
}  # fmt: skip
