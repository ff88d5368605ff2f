"""Kimi Linear: Kimi Delta Attention, and multi-head latent attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from itertools import takewhile
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.deepseek import DEEPSEEK2, MLA
from pqweights.models.description import LIKE_LLAMA, MlxDifferences, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import (
    FULL,
    GROUPS,
    LINEAR_ATTENTION,
    NORMED,
    ROUTER_BIAS,
    SHARED,
    SILU_ONLY,
    Setting,
    layer_count,
)
from pqweights.models.tensor_names import Names, below

# Both kinds of layers have these, in different sizes.
_ANY_SHAPE = ("ATTN_Q", "ATTN_K", "ATTN_V", "ATTN_OUT")
_CONV = (1, lambda n: n("linear_num_heads") * n("linear_head_dim"), 1, "linear_conv_kernel_dim")
_ARCHITECTURE = replace(
    DEEPSEEK2, name="KIMI_LINEAR",
    modules={
        **ROUTER_BIAS, r"self_attn\.dt_bias": "self_attn.dt_proj.bias",
        r"block_sparse_moe\.(gate|up|down)_proj": r"mlp.\1_proj",  # as transformers writes the layer without experts
    },
    settings=(
        *(setting for setting in DEEPSEEK2.settings if setting not in (*GROUPS, NORMED, SHARED)),
        Setting("head_count_kv", 1, only=f"{FULL}.*"), Setting("value_length", "kv_lora_rank", unread=True),
        Setting("expert_shared_count", "num_shared_experts"), Setting("ssm_conv_kernel", "linear_conv_kernel_dim"),
        Setting("kda_head_dim", "linear_head_dim"),
    ),
    shapes={"ATTN_KV_A_MQA": DEEPSEEK2.shapes["ATTN_KV_A_MQA"]} | dict.fromkeys(_ANY_SHAPE, (None, None)),
    reshaped=dict.fromkeys(("SSM_CONV1D_Q", "SSM_CONV1D_K", "SSM_CONV1D_V"), _CONV),
    layer_types=frozenset({FULL, LINEAR_ATTENTION}), drafts=None, checks=(),
    equal=(("linear_num_heads", "num_attention_heads"),),
    values={**SILU_ONLY, "moe_renormalize": (True,), "num_expert_group": (1, None), "q_lora_rank": (None,)},
)  # fmt: skip
# What linear_attn_config calls sizes.
_KEYS = {
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip


def _restate(values: dict[str, Any]) -> None:
    """State the kinds and sizes of layers, whose numbers begin with 1."""
    linear = values.get("linear_attn_config")
    if isinstance(linear, dict):
        full = linear.get("full_attn_layers")
        if isinstance(full, list) and isinstance(values.get("num_hidden_layers"), int):
            numbers = range(1, layer_count(values) + 1)
            values["layer_types"] = [FULL if number in full else LINEAR_ATTENTION for number in numbers]
        values |= {_KEYS[key]: value for key, value in linear.items() if key in _KEYS}


def _published(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {"kda_layers": LINEAR_ATTENTION, "full_attn_layers": FULL}
    numbers = {key: [n for n, of in enumerate(config["layer_types"], 1) if of == kind] for key, kind in kinds.items()}
    return numbers | {key: config[name] for key, name in _KEYS.items()}


def _publish(config: dict[str, Any], held: Set[str]) -> None:
    config["linear_attn_config"] = _published(config)
    for key in ("layer_types", *_KEYS.values()):
        del config[key]


def _mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    dense = takewhile("dense".__eq__, config["mlp_layer_types"])
    return {"first_k_dense_replace": len(list(dense)), "linear_attn_config": _published(config)}


ROWS: dict[str, Row] = {
    "kimi_k3": Row(
        llama_cpp_differs="knows it, but transformers up to 5.24 has no such model with which to compare its logits"
    ),
    "kimi_linear": Row(
        llama_cpp=_ARCHITECTURE, restate=_restate, publish=_publish,
        names=Names(
            class_name="KimiLinearForCausalLM",
            layers=parts.ATTENTION + parts.MLP + MLA + parts.W123
            + below("block_sparse_moe", "gate gate.e_score_correction_bias")
            + below("block_sparse_moe.shared_experts", parts.MATRICES)
            + below("self_attn", "A_log dt_bias b_proj f_a_proj f_b_proj g_a_proj g_b_proj o_norm")
            + below("self_attn", "q_conv1d k_conv1d v_conv1d"),
            keys={"num_experts_per_tok": "num_experts_per_token", "max_position_embeddings": "model_max_length"},
        ),
        mlx=MlxDifferences(constants={"rope_theta": 10000.0}, computed=_mlx),  # it has no RoPE
        in_memory={r"\.f_([ab])_proj\.": r".forget_gate.f_\1_proj.", r"\.block_sparse_moe\.": ".mlp."},
        defaults=sizes(2304, 9216, 27, 32, 1048576) | LIKE_LLAMA | {
            "linear_num_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446,
            "linear_conv_kernel_dim": 4, "linear_head_dim": 128,
        },
    ),
}  # fmt: skip
