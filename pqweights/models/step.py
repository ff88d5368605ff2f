"""Step 3.5, and the text model of Step 3.7, which is one."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.description import LIKE_LLAMA, UNWRAPPED, MlxDifferences, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import (
    DENSE_FIRST,
    EXPERT_WIDTH,
    EXPERTS,
    FULL,
    LLAMA3,
    NO_BIAS,
    NORMED,
    SCALED,
    SIGMOID,
    SILU_ONLY,
    SLIDING,
    Architecture,
    Rope,
    Setting,
    Windows,
    layer_count,
)
from pqweights.models.tensor_names import Names, below
from pqweights.models.traits import Trait

_ARCHITECTURE = Architecture(
    name="STEP35",
    modules={
        r"moe\.router_bias": "moe.router_bias.bias",
        r"transformer\.shared_head\.norm": "shared_head.norm", r"transformer\.shared_head\.output": "shared_head.head",
    },
    settings=(
        *EXPERTS, EXPERT_WIDTH, DENSE_FIRST, SIGMOID, SCALED._replace(key="moe_router_scaling_factor"),
        NORMED._replace(key="norm_expert_weight"),
        Setting("head_count", "num_sliding_attention_heads", only=f"({SLIDING}|draft).*", other="num_attention_heads"),
        Setting("expert_shared_feed_forward_length", "share_expert_dim"),
        Setting("swiglu_clamp_exp", "swiglu_limits", real=True, listed=True, optional=True),
        Setting("swiglu_clamp_shexp", "swiglu_limits_shared", real=True, listed=True, optional=True),
    ),
    shapes={"ATTN_Q": (None, "hidden_size"), "ATTN_OUT": ("hidden_size", None)},
    rope=Rope(LLAMA3, half_rotated=True), windows=Windows(listed=True), own_head=True, drafts={},
    values=SILU_ONLY | NO_BIAS | {
        "use_bidirectional_attention": (False, None), "use_head_wise_attn_gate": (True, None),
        "moe_router_activation": ("sigmoid", None),
    },
)  # fmt: skip


def _restate(values: dict[str, Any]) -> None:
    """State the kinds of layers, of which published configurations list bases of rotary embeddings."""
    layers, experts, types = layer_count(values), values.get("moe_layers_enum"), values.get("layer_types")
    values["draft_layer_types"] = values.get("mtp_layer_types") or (types[layers:] if isinstance(types, list) else [])
    if isinstance(types, list):
        values["layer_types"] = types[:layers]
    sparse = experts.split(",") if isinstance(experts, str) else experts or range(3, layers)
    if isinstance(sparse, list | range):
        numbers = {str(number).strip() for number in sparse}
        values.setdefault("mlp_layer_types", ["sparse" if str(n) in numbers else "dense" for n in range(layers)])
    other = values.get("attention_other_setting")
    heads = other.get("num_attention_heads") if isinstance(other, dict) else None
    if values.get("num_sliding_attention_heads") is None:
        values["num_sliding_attention_heads"] = heads or values.get("num_attention_heads", 64)


def _publish(config: dict[str, Any], held: Set[str]) -> None:
    """State layers one by one, as published configurations do."""
    windowed = [kind == SLIDING for kind in config["layer_types"]]
    base = config["rope_theta"]
    config["rope_theta"] = [config.get("rope_local_base_freq", base) if of else base for of in windowed]
    config["partial_rotary_factors"] = [1.0 if of else 0.5 for of in windowed]
    config["attention_other_setting"] = {"num_attention_heads": config.pop("num_sliding_attention_heads")}
    sparse = range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"])
    config["moe_layers_enum"] = ",".join(map(str, sparse))
    if "rope_scaling" in config:
        config["yarn_only_types"] = [FULL]  # for MLX, whatever its type
    if config["pad_token_id"] is None:  # which its class does not take
        del config["pad_token_id"]


def _mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds, heads = config["layer_types"], config["num_key_value_heads"]
    rope = [config["rope_parameters"][kind] for kind in kinds]
    sparse = [number for number, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"]
    return {
        "num_attention_groups": heads, "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"], "moe_layers_enum": ",".join(map(str, sparse)),
        "rope_theta": [of_layer["rope_theta"] for of_layer in rope], "yarn_only_types": [FULL],
        "partial_rotary_factors": [of_layer.get("partial_rotary_factor", 1.0) for of_layer in rope],
        "attention_other_setting": {
            "num_attention_heads": config["num_sliding_attention_heads"], "num_attention_groups": heads,
        },
    }  # fmt: skip


_STEP = Row(
    traits=frozenset({Trait.ZERO_CENTRED_NORMS}), llama_cpp=_ARCHITECTURE, restate=_restate,
    defaults=sizes(4096, 11264, 45, 64, 128000) | LIKE_LLAMA | {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "num_experts": 288, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_router_scaling_factor": 1.0,
        "norm_expert_weight": True, "attention_bias": False,
    },
)  # fmt: skip

ROWS: dict[str, Row] = {
    "step3p5": replace(
        _STEP, publish=_publish, mlx=MlxDifferences(computed=_mlx),
        names=Names(
            class_name="Step3p5ForCausalLM",
            layers=parts.ATTENTION + parts.MLP + " self_attn.g_proj"
            + below("moe", "gate router_bias gate_proj up_proj down_proj") + below("share_expert", parts.MATRICES),
            keys={
                "num_experts": "moe_num_experts", "num_experts_per_tok": "moe_top_k",
                "num_key_value_heads": "num_attention_groups",
            },
        ),
    ),
    "step3p7": replace(
        _STEP, mlx=MlxDifferences(layout=UNWRAPPED),
        in_memory={
            r"^model\.layers\.": "model.language_model.layers.", r"\.share_expert\.": ".mlp.shared_experts.",
        },
    ),
}  # fmt: skip
