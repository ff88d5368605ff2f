"""MiMo V2: layers with a sliding window have other heads of keys and values, and sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.description import BIASED_SIGMOID, LIKE_LLAMA, MlxDifferences, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import (
    DEFAULT,
    DENSE_FIRST,
    EXPERT_WIDTH,
    EXPERTS,
    FULL,
    GROUPS,
    NO_BIAS,
    ROUTER_BIAS,
    SILU_ONLY,
    SLIDING,
    Architecture,
    Rope,
    Setting,
    Windows,
    layer_count,
    list_experts,
    real,
)
from pqweights.models.settings import needs_kinds
from pqweights.models.tensor_names import ROUTED, Names

_ALIKE = ("head_dim", "v_head_dim", "num_attention_heads")
_ARCHITECTURE = Architecture(
    name="MIMO2", modules={**ROUTER_BIAS, r"self_attn\.(attention_sink_bias)": r"self_attn.\1.weight"},
    settings=(
        *EXPERTS, *GROUPS, EXPERT_WIDTH, DENSE_FIRST,
        Setting("head_count_kv", "swa_num_key_value_heads", only=f"{SLIDING}.*", other="num_key_value_heads"),
        Setting("value_length", "v_head_dim"), real(".attention.value_scale", "attention_value_scale", optional=True),
    ),
    shapes={
        "ATTN_K": (None, "hidden_size"), "ATTN_V": (None, "hidden_size"),
        "ATTN_OUT": ("hidden_size", lambda n: n("num_attention_heads") * n("v_head_dim")),
    },
    rope=Rope(DEFAULT, partial=True), windows=Windows(listed=True), checks=(needs_kinds(frozenset({SLIDING})),),
    equal=tuple((f"swa_{key}", key) for key in _ALIKE),
    values=SILU_ONLY | {"routed_scaling_factor": (1.0, None), "norm_topk_prob": (True,)} | NO_BIAS,
)  # fmt: skip
_DEFAULTS = sizes(4096, 16384, 48, 64, 131072) | LIKE_LLAMA | {
    "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 2048, "rms_norm_eps": 1e-5, "attention_value_scale": 0.707,
    "routed_scaling_factor": 1.0, "norm_topk_prob": True, "attention_bias": False,
}  # fmt: skip


def _restate(values: dict[str, Any]) -> None:
    """State the kinds of layers, which published configurations list as 0 and 1."""
    numbers = range(layer_count(values))
    windowed = values.get("hybrid_layer_pattern") or [n > 0 and (n + 1) % 6 != 0 for n in numbers]
    sparse = values.get("moe_layer_freq") or [n > 0 for n in numbers]
    if isinstance(windowed, list) and isinstance(sparse, list):
        values.setdefault("layer_types", [SLIDING if of else FULL for of in windowed])
        values.setdefault("mlp_layer_types", ["sparse" if of else "dense" for of in sparse])
    for key in _ALIKE:
        values.setdefault(f"swa_{key}", values.get(key, _DEFAULTS[key]))
    if isinstance(heads := values.get("num_key_value_heads", 4), int):
        values.setdefault("swa_num_key_value_heads", 2 * heads)
    if isinstance(window := values.get("sliding_window_size"), int):  # without the token itself
        values["sliding_window"] = 1 + window


def _mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds, rope = config["layer_types"], config["rope_parameters"]
    full, sliding = rope[FULL], rope[SLIDING]
    return BIASED_SIGMOID | {
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "sliding_window_size": config["sliding_window"], "layernorm_epsilon": config["rms_norm_eps"],
        "rope_theta": full["rope_theta"], "swa_rope_theta": sliding["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"], "n_shared_experts": None,
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"], "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }  # fmt: skip


ROWS: dict[str, Row] = {
    "mimo_v2_flash": Row(
        llama_cpp=_ARCHITECTURE, restate=_restate, publish=list_experts, mlx=MlxDifferences(computed=_mlx),
        defaults=_DEFAULTS,
        names=Names(
            class_name="MiMoV2FlashForCausalLM", keys=ROUTED,
            layers=parts.SHARED + parts.ROUTER_BIAS + " self_attn.attention_sink_bias",
        ),
    ),
}  # fmt: skip
