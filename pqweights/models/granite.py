"""Granite, its mixtures of experts, and Granite 4, of which most layers are Mamba 2."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from fractions import Fraction
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.description import LIKE_LLAMA, MlxDifferences, head_width, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama import LLAMA
from pqweights.models.llama_cpp import (
    EXPERTS,
    FULL,
    LINEAR_ATTENTION,
    SOME_HEADS,
    Numbers,
    Setting,
    halved,
    mlp_shapes,
    real,
)
from pqweights.models.tensor_names import BIASED, LOCAL, MLP_BIASED, Names, below

_GRANITE = replace(
    LLAMA, name="GRANITE",
    settings=(
        *(real(f"{part}_scale", f"{part}_multiplier") for part in ("attention", "embedding", "residual")),
        real("logit_scale", "logits_scaling"),
    ),
)  # fmt: skip
_MOE = replace(
    _GRANITE, name="GRANITE_MOE", modules={r"shared_mlp\.output_linear": "mlp.shared_expert.down_proj"},
    cuts=halved(
        r"block_sparse_moe\.input_linear", "mlp.experts", "intermediate_size", times="num_experts", stacked=True
    ) | halved(r"shared_mlp\.input_linear", "mlp.shared_expert", "shared_intermediate_size"),
    settings=(
        *_GRANITE.settings, *EXPERTS,
        Setting("expert_shared_feed_forward_length", "shared_intermediate_size", optional=True),
    ),
)  # fmt: skip


def _mamba_width(n: Numbers) -> int:
    return n("mamba_expand") * n("hidden_size")


def _mamba_group(n: Numbers) -> Fraction:
    return Fraction(_mamba_width(n), n("mamba_n_groups"))


_MAMBA = (
    SOME_HEADS, Setting("ssm_conv_kernel", "mamba_d_conv"), Setting("ssm_inner_size", _mamba_width),
    Setting("ssm_state_size", "mamba_d_state"), Setting("ssm_time_step_rank", "mamba_n_heads"),
    Setting("ssm_group_count", "mamba_n_groups"), Setting("rope_scaling_finetuned", "rotates", truth=True),
)  # fmt: skip
_HYBRID = replace(
    _MOE, name="GRANITE_HYBRID", modules={**_MOE.modules, r"mamba\.dt_bias": "mamba.dt_proj.bias"},
    settings=(*_MOE.settings, *_MAMBA), biases=frozenset({"SSM_CONV1D"}),
    reshaped={
        "SSM_A": ("mamba_n_heads", 1), "SSM_D": ("mamba_n_heads", 1), "SSM_NORM": ("mamba_n_groups", _mamba_group),
    },
    layer_types=frozenset({FULL, LINEAR_ATTENTION}), values={**_GRANITE.values, "mamba_expand": (2,)},
)  # fmt: skip
_DENSE_HYBRID = replace(
    _HYBRID, when=lambda settings: not settings.get("num_experts"),
    modules={**_HYBRID.modules, r"shared_mlp\.output_linear": "mlp.down_proj"},
    cuts=halved(r"shared_mlp\.input_linear", "mlp", "shared_intermediate_size"),
    settings=(*_GRANITE.settings, *_MAMBA, Setting("feed_forward_length", "shared_intermediate_size")),
    shapes=mlp_shapes("shared_intermediate_size"),
)  # fmt: skip


def _restate(values: dict[str, Any]) -> None:
    values["rotates"] = values.get("position_embedding_type") == "rope"


def _publish(config: dict[str, Any], held: Set[str]) -> None:
    if config.pop("rotates", False):
        config["position_embedding_type"] = "rope"


def _mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    names = {LINEAR_ATTENTION: "mamba", FULL: "attention"}
    return {
        "layer_types": [names.get(kind, kind) for kind in config["layer_types"]],
        "position_embedding_type": "rope" if config.get("position_embedding_type") == "rope" else "nope",
        "mamba_d_head": head_width(config, config["mamba_expand"] * config["hidden_size"]),
    }


def _mlx_differs(config: Mapping[str, Any]) -> str:
    if config.get("mamba_n_groups", 1) == 1 or "mamba" not in str(config.get("layer_types")).replace("linear", "mamba"):
        return ""
    return "mlx-lm has one norm over all mamba_n_groups of a granitemoehybrid, and the model one of each"


_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
_DEFAULTS = sizes(4096, 11008, 32, 32, 2048) | LIKE_LLAMA | dict.fromkeys(_MULTIPLIERS, 1.0)
_OF_EXPERTS = _DEFAULTS | {"num_experts": 8, "num_experts_per_tok": 2}
_NAMES = Names(
    class_name="GraniteMoeForCausalLM", keys=LOCAL,
    layers=parts.ATTENTION + below("block_sparse_moe", "input_linear output_linear router.layer"),
)  # fmt: skip
_SHARED = replace(
    _NAMES, class_name="GraniteMoeSharedForCausalLM",
    layers=_NAMES.layers + below("shared_mlp", "input_linear output_linear"),
)  # fmt: skip

ROWS: dict[str, Row] = {
    "granite": Row(
        llama_cpp=_GRANITE, defaults=_DEFAULTS, always=parts.LLAMA,
        names=Names(class_name="GraniteForCausalLM", present=BIASED + MLP_BIASED),
    ),
    "granitemoe": Row(llama_cpp=_MOE, defaults=_OF_EXPERTS, names=_NAMES),
    "granitemoeshared": Row(llama_cpp=_MOE, defaults=_OF_EXPERTS | {"shared_intermediate_size": 0}, names=_SHARED),
    "granitemoehybrid": Row(
        llama_cpp=_HYBRID, variants=(_DENSE_HYBRID,), restate=_restate, publish=_publish,
        names=replace(_SHARED, class_name="GraniteMoeHybridForCausalLM", layers=_SHARED.layers + parts.MAMBA),
        mlx=MlxDifferences(computed=_mlx, differs=_mlx_differs),
        defaults=_OF_EXPERTS | {
            "shared_intermediate_size": 1024, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_state": 256,
            "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_conv_bias": True, "mamba_proj_bias": False,
        },
    ),
}  # fmt: skip
