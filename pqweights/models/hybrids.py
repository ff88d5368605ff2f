"""Types of which some layers have short convolutions or states: LFM2, Jamba, Nemotron-H and Falcon-H1.

Those of Qwen, Granite and Kimi are in the files of their families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from fractions import Fraction
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.description import LIKE_LLAMA, OWN_HEAD, SILU, TIED, MlxDifferences, head_width, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import (
    DEFAULT,
    EXPERT_WIDTH,
    EXPERTS,
    FULL,
    GROUPS,
    LINEAR_ATTENTION,
    NORMED,
    ROUTER_BIAS,
    SCALED,
    SHARED,
    SIGMOID,
    SILU_ONLY,
    SOME_HEADS,
    Architecture,
    Factor,
    Numbers,
    Rope,
    Scaled,
    Setting,
    layer_count,
    real,
)
from pqweights.models.settings import Settings
from pqweights.models.tensor_names import ROUTED, Names, below


# LFM2: short convolutions.
def _lfm2_width(settings: Settings) -> dict[str, int]:
    """Return the width of the MLP, of which the configuration may state 3/2, before it is rounded up."""
    if not settings.get("block_auto_adjust_ff_dim"):
        return {}
    stated = settings.number("block_ff_dim" if settings.get("block_ff_dim") else "intermediate_size")
    multiple = settings.number("block_multiple_of")
    width = int(settings.real("block_ffn_dim_multiplier") * int(2 * stated / 3))
    return {"intermediate_size": -(-width // multiple) * multiple}


_LFM2 = Architecture(
    name="LFM2", settings=(SOME_HEADS, Setting("shortconv_l_cache", "conv_L_cache")),
    needed=("token_embd_norm.weight",), layer_types=frozenset({FULL, "conv"}), free_head_dim=False,
    derived=_lfm2_width, values={"conv_bias": (False, None)},
)  # fmt: skip
_LFM2_MOE = replace(
    _LFM2, name="LFM2MOE",
    modules={r"feed_forward\.expert_bias": "feed_forward.expert_bias.bias"} | {
        rf"feed_forward\.experts\.(\d+)\.w{number}": rf"mlp.experts.\1.{name}_proj"
        for number, name in enumerate(("gate", "down", "up"), 1)
    },
    settings=(
        *_LFM2.settings, *EXPERTS, EXPERT_WIDTH, SIGMOID, Setting("leading_dense_block_count", "num_dense_layers"),
    ),
    values={**_LFM2.values, "use_expert_bias": (True,), "norm_topk_prob": (True,), "routed_scaling_factor": (1.0,)},
)  # fmt: skip
_LFM2_NAMES = Names(
    class_name="Lfm2ForCausalLM", keys={"rms_norm_eps": "norm_eps"},
    layers="ffn_norm operator_norm" + below("conv", "conv in_proj out_proj")
    + below("feed_forward", "w1 w2 w3 gate expert_bias") + below("feed_forward.experts.{}", "w1 w2 w3")
    + below("self_attn", "k_layernorm q_layernorm q_proj k_proj v_proj out_proj"),
    outside="model.embed_tokens model.embedding_norm lm_head",
)  # fmt: skip


def _publish_lfm2(config: dict[str, Any], held: Set[str]) -> None:
    """The file states the width that the model has computed."""
    config["block_auto_adjust_ff_dim"] = False


def _lfm2_mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"block_dim": config.get("block_dim", config["hidden_size"])}


# Jamba: Mamba 1, and experts in some layers.
_JAMBA = Architecture(
    name="JAMBA", modules={r"feed_forward\.experts\.(\d+)\.(gate|up|down)_proj": r"mlp.experts.\1.\2_proj"},
    settings=(
        SOME_HEADS, *EXPERTS, Setting("ssm_conv_kernel", "mamba_d_conv"),
        Setting("ssm_inner_size", lambda n: n("mamba_expand") * n("hidden_size")),
        Setting("ssm_state_size", "mamba_d_state"), Setting("ssm_time_step_rank", "mamba_dt_rank"),
    ),
    layer_types=frozenset(f"{kind}{moe}" for kind in (FULL, LINEAR_ATTENTION) for moe in ("", " moe")),
    rope=Rope(DEFAULT), free_head_dim=False, biases=frozenset({"SSM_CONV1D"}),
    values=SILU_ONLY | {"mamba_conv_bias": (True,), "mamba_proj_bias": (False,)},
)  # fmt: skip


def _restate_jamba(values: dict[str, Any]) -> None:
    """State the kinds of layers, which come in periods, and the rank of time steps."""
    keys = [f"{of}_layer_{part}" for of in ("attn", "expert") for part in ("period", "offset")]
    numbers = [values.get(key, default) for key, default in zip(keys, (8, 4, 2, 1), strict=True)]
    width = values.get("hidden_size", 4096)
    if not all(isinstance(n, int) for n in (*numbers, width, values.get("num_hidden_layers"))):
        return
    period, offset, experts, first = numbers
    if period < 1 or experts < 1:
        return
    values["layer_types"] = [
        f"{FULL if n % period == offset else LINEAR_ATTENTION}{' moe' if n % experts == first else ''}"
        for n in range(layer_count(values))
    ]
    if values.get("mamba_dt_rank", "auto") == "auto":
        values["mamba_dt_rank"] = -(-width // 16)


def _publish_jamba(config: dict[str, Any], held: Set[str]) -> None:
    """State the kinds of layers by their periods. Others are found as the configuration is checked."""
    types = config.pop("layer_types")
    for name, of in (("attn", [kind.startswith(FULL) for kind in types]), ("expert", [" moe" in t for t in types])):
        first = of.index(True) if True in of else len(of)
        second = of.index(True, first + 1) if True in of[first + 1 :] else first + len(of)
        config |= {f"{name}_layer_period": max(second - first, first + 1), f"{name}_layer_offset": first}


def _jamba_differs(config: Mapping[str, Any]) -> str:
    experts, chosen = config.get("num_experts", 16), config.get("num_experts_per_tok", 2)
    if not isinstance(experts, int) or experts < 2 or experts == chosen:
        return ""
    return (
        "mlx-lm weighs the experts of a jamba by a softmax over those that are chosen, and the model over all "
        f"{experts}"
    )


# Nemotron-H: attention, Mamba 2, and MLPs or experts, each a layer.
def _nemotron_width(n: Numbers) -> int:
    return n("mamba_num_heads") * n("mamba_head_dim")


def _nemotron_group(n: Numbers) -> Fraction:
    return Fraction(_nemotron_width(n), n("n_groups"))


def _has_no_experts(settings: Settings) -> bool:
    types = settings.get("layer_types")
    return not isinstance(types, list) or "moe" not in types


_DENSE_NEMOTRON_H = Architecture(
    name="NEMOTRON_H", when=_has_no_experts,
    modules={
        r"mixer\.dt_bias": "mixer.dt_proj.bias",
        r"mixer\.experts\.(\d+)\.(up|down)_proj": r"mlp.experts.\1.\2_proj", **ROUTER_BIAS,
    },
    settings=(
        SOME_HEADS, Setting("feed_forward_length", "intermediate_size", only="mlp.*"),
        real("layer_norm_eps", "rms_norm_eps"), Setting("ssm_conv_kernel", "conv_kernel"),
        Setting("ssm_inner_size", _nemotron_width), Setting("ssm_state_size", "ssm_state_size"),
        Setting("ssm_time_step_rank", "mamba_num_heads"), Setting("ssm_group_count", "n_groups"),
    ),
    reshaped={
        "SSM_A": ("mamba_num_heads", 1), "SSM_D": ("mamba_num_heads", 1), "SSM_NORM": ("n_groups", _nemotron_group),
    },
    layer_types=frozenset({FULL, LINEAR_ATTENTION, "mlp"}), biases=frozenset({"SSM_CONV1D"}),
    values={"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",)},
)  # fmt: skip
_NEMOTRON_H = replace(
    _DENSE_NEMOTRON_H, name="NEMOTRON_H_MOE", layer_types=frozenset({FULL, LINEAR_ATTENTION, "moe"}),
    settings=(
        *_DENSE_NEMOTRON_H.settings, *EXPERTS, *GROUPS, EXPERT_WIDTH, SHARED, SIGMOID, SCALED, NORMED,
        Setting("head_count_kv", "num_key_value_heads", only=f"{FULL}.*|draft"),
        Setting("feed_forward_length", "moe_intermediate_size", only="moe.*|draft"),
        Setting("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
        Setting("moe_latent_size", "moe_latent_size", optional=True),
    ),
    # Attention, and experts with the last norm: llama.cpp takes two layers for one.
    drafts={
        r"mtp\.layers\.1\.norm(\..*)": r"second_norm\1",
        r"mtp\.layers\.1\.final_layernorm(\..*)": r"shared_head.norm\1",
        r"mtp\.layers\.[01]\.(.*)": r"\1",
    },
)  # fmt: skip
# The letters of hybrid_override_pattern.
_BLOCKS = {"M": LINEAR_ATTENTION, "*": FULL, "-": "mlp", "E": "moe"}


def _restate_nemotron(values: dict[str, Any]) -> None:
    if isinstance(pattern := values.get("hybrid_override_pattern"), str):
        values["layer_types"] = [_BLOCKS.get(letter, letter) for letter in pattern]
        values["num_hidden_layers"] = len(pattern)


def _publish_nemotron(config: dict[str, Any], held: Set[str]) -> None:
    config["layers_block_type"] = config.pop("layer_types")


_OF_EXPERTS = "gate gate.e_score_correction_bias fc1_latent_proj fc2_latent_proj"
_EXPERTS = below("mixer", _OF_EXPERTS) + below("mixer.experts.{}", "up_proj down_proj") + below(
    "mixer.shared_experts", "up_proj down_proj"
)  # fmt: skip


# Falcon-H1: attention and Mamba 2 side by side.
def _states(n: Numbers) -> int:
    return n("mamba_n_groups") * n("mamba_d_state")


def _into_mamba(part: int) -> Factor:
    return lambda of: of("ssm_in_multiplier") * of("ssm_multipliers", part)


_FALCON_H1 = Architecture(
    name="FALCON_H1", modules={r"mamba\.dt_bias": "mamba.dt_proj.bias"},
    scaled={
        "model.embed_tokens": Scaled(("embedding_multiplier",)), "lm_head": Scaled(("lm_head_multiplier",)),
        r"self_attn\.[qv]_proj": Scaled(("attention_in_multiplier",)),
        r"self_attn\.k_proj": Scaled((lambda of: of("attention_in_multiplier") * of("key_multiplier"),)),
        r"self_attn\.o_proj": Scaled(("attention_out_multiplier",)),
        r"feed_forward\.gate_proj": Scaled((lambda of: of("mlp_multipliers", 0),)),
        r"feed_forward\.down_proj": Scaled((lambda of: of("mlp_multipliers", 1),)),
        r"mamba\.out_proj": Scaled(("ssm_out_multiplier",)),
        r"mamba\.in_proj": Scaled(
            tuple(_into_mamba(part) for part in range(5)),
            ("mamba_d_ssm", "mamba_d_ssm", _states, _states, "mamba_n_heads"),
        ),
    },
    settings=(
        Setting("ssm_conv_kernel", "mamba_d_conv"), Setting("ssm_inner_size", "mamba_d_ssm"),
        Setting("ssm_state_size", "mamba_d_state"), Setting("ssm_time_step_rank", "mamba_n_heads"),
        Setting("ssm_group_count", "mamba_n_groups"),
    ),
    reshaped={"SSM_A": ("mamba_n_heads", 1), "SSM_D": ("mamba_n_heads", 1)}, biases=frozenset({"SSM_CONV1D"}),
    values={**SILU_ONLY, "mamba_rms_norm": (False,), "tie_word_embeddings": (False,)},
)  # fmt: skip
_FINAL_NORM = "model.embed_tokens model.final_layernorm lm_head"
_BIASES = ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
_MULTIPLIERS = (
    "key_multiplier", "attention_in_multiplier", "ssm_out_multiplier", "lm_head_multiplier", "attention_out_multiplier",
    "ssm_in_multiplier", "embedding_multiplier",
)  # fmt: skip


def _falcon_h1_mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    """mlx-lm multiplies weights by these: queries and keys by the first, and neither keys nor values by their own."""
    inputs, keys = config["attention_in_multiplier"], config["key_multiplier"]
    return {
        "attention_in_multiplier": inputs * math.sqrt(keys),
        "attention_out_multiplier": inputs * config["attention_out_multiplier"],
        "mamba_d_head": head_width(config, config["mamba_d_ssm"]),
    }


def _falcon_h1_differs(config: Mapping[str, Any]) -> str:
    scaled = [key for key in _MULTIPLIERS if config.get(key, 1.0) != 1.0]
    scaled += [key for key in ("mlp_multipliers", "ssm_multipliers") if set(config.get(key, [])) - {1.0}]
    biased = [key for key in _BIASES if config.get(key)]
    if scaled and biased:
        return f"mlx-lm does not multiply the biases of a falcon_h1 ({biased[0]}) by {scaled[0]}"
    if config.get("mamba_rms_norm") and config.get("mamba_n_groups", 1) != 1:
        return "mlx-lm has one norm over all mamba_n_groups of a falcon_h1, and the model one of each"
    return "mlx-lm takes no key_multiplier below 0" if config.get("key_multiplier", 1.0) < 0 else ""


ROWS: dict[str, Row] = {
    "lfm2": Row(
        llama_cpp=_LFM2, publish=_publish_lfm2, names=_LFM2_NAMES, mlx=MlxDifferences(computed=_lfm2_mlx),
        defaults=sizes(2560, 12288, 32, 32, 128000) | TIED | {
            "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_auto_adjust_ff_dim": True,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "conv_L_cache": 3, "conv_bias": False,
        },
    ),
    "lfm2_moe": Row(
        llama_cpp=_LFM2_MOE, names=replace(_LFM2_NAMES, class_name="Lfm2MoeForCausalLM"),
        defaults=sizes(2048, 7168, 32, 32, 128000) | TIED | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "conv_L_cache": 3, "num_experts": 32,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2, "conv_bias": False,
            "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        },
    ),
    "jamba": Row(
        llama_cpp=_JAMBA, restate=_restate_jamba, publish=_publish_jamba, mlx=MlxDifferences(differs=_jamba_differs),
        names=Names(
            class_name="JambaForCausalLM", outside=_FINAL_NORM,
            layers=parts.ATTENTION + parts.FEED_FORWARD + " pre_ff_layernorm feed_forward.router"
            + below("mamba", "A_log D conv1d dt_bias in_proj out_proj dt_proj x_proj")
            + below("mamba", "b_layernorm c_layernorm dt_layernorm")
            + below("feed_forward.experts.{}", parts.MATRICES),
        ),
        defaults=sizes(4096, 14336, 32, 32, 262144) | OWN_HEAD | SILU | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "num_experts": 16, "num_experts_per_tok": 2,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
            "mamba_proj_bias": False, "mamba_dt_rank": "auto",
        },
    ),
    "nemotron_h": Row(
        llama_cpp=_NEMOTRON_H, variants=(_DENSE_NEMOTRON_H,), restate=_restate_nemotron, publish=_publish_nemotron,
        names=Names(
            class_name="NemotronHForCausalLM", keys={**ROUTED, "rms_norm_eps": "layer_norm_epsilon"},
            before="backbone.layers.#.", outside="backbone.embeddings backbone.norm_f lm_head",
            layers="norm" + below("mixer", "A_log D conv1d dt_bias in_proj norm out_proj q_proj k_proj v_proj o_proj")
            + below("mixer", "up_proj down_proj") + _EXPERTS,
            drafts=below("mtp.layers.0", "norm eh_proj enorm hnorm")
            + below("mtp.layers.0.mixer", "q_proj k_proj v_proj o_proj")
            + below("mtp.layers.1", "norm final_layernorm" + _EXPERTS),
        ),
        defaults=OWN_HEAD | {
            "num_attention_heads": 32, "max_position_embeddings": 4096, "hidden_size": 4096, "num_key_value_heads": 8,
            "head_dim": 128, "rms_norm_eps": 1e-05, "intermediate_size": 21504, "conv_kernel": 4, "mamba_head_dim": 64,
            "mamba_num_heads": 128, "ssm_state_size": 128, "n_groups": 8, "num_experts": 8, "num_experts_per_tok": 2,
            "n_group": 1, "topk_group": 1, "moe_intermediate_size": 7688, "n_shared_experts": 1,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True, "moe_shared_expert_intermediate_size": 7688,
            "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_conv_bias": True,
            **dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias"), False),
        },
    ),
    "falcon_h1": Row(
        llama_cpp=_FALCON_H1,
        mlx=MlxDifferences(computed=_falcon_h1_mlx, folds=True, differs=_falcon_h1_differs),
        names=Names(
            class_name="FalconH1ForCausalLM", outside=_FINAL_NORM,
            layers=parts.ATTENTION + parts.FEED_FORWARD + parts.MAMBA + " pre_ff_layernorm",
        ),
        defaults=sizes(4096, 14336, 32, 32, 8192) | LIKE_LLAMA | dict.fromkeys(_MULTIPLIERS, 1.0) | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "mamba_d_conv": 4, "mamba_d_ssm": 1024,
            "mamba_d_state": 256, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_rms_norm": False,
        },
    ),
}  # fmt: skip
