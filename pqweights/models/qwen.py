"""Qwen 2 to 3.5, their mixtures of experts, and the text models of those for images."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.description import AS_PUBLISHED, LIKE_LLAMA, SILU, STACKED, TIED, MlxDifferences, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import (
    ALL_SPARSE,
    EXPERT_WIDTH,
    EXPERTS,
    FULL,
    LINEAR_ATTENTION,
    NO_BIAS,
    QKV,
    SHARED_WIDTH,
    SILU_ONLY,
    Architecture,
    Cut,
    Numbers,
    Rope,
    Setting,
    Tiled,
    layer_count,
)
from pqweights.models.settings import Settings, all_but_each
from pqweights.models.tensor_names import BIASED, MTP, Names, below
from pqweights.models.traits import Trait

# Models of images and text whose files hold the text model alone, and those that compute the same of texts: positions
# in time, height and width are equal there. The keys are of images alone.
TEXT_PARTS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
OF_IMAGES = ("rope.dimension_sections", "n_deepstack_layers")

# In radians.
_NOTICEABLE = 0.1


def _left_over(settings: Settings) -> str:
    """Return the note on channels that no section covers: time, height and width take turns until each is full."""
    rope, usual = settings.get("rope_parameters") or {}, (settings.architecture.rope or Rope()).sections
    if "rope_type" not in rope:  # by kinds of layers, of which models of images have one
        return ""
    sections = rope.get("mrope_section") or usual
    rotated = int(settings.number("head_dim") * rope.get("partial_rotary_factor", 1.0))
    left = [n for n in range(rotated // 2) if n >= 3 * [*sections, 0, 0][n % 3]]
    length = math.ceil(_NOTICEABLE * rope["rope_theta"] ** (2 * left[0] / rotated)) if left else 0
    if not left or length >= settings.number("max_position_embeddings"):
        return ""
    return (
        f"llama.cpp does not rotate the {len(left)} pairs of channels that mrope_section does not cover, but "
        f"transformers does: results differ for texts of more than {length} tokens"
    )


_QWEN2 = Architecture(name="QWEN2", free_head_dim=False, biases=QKV, values=SILU_ONLY)
_QWEN2_MOE = Architecture(
    name="QWEN2MOE", settings=(*EXPERTS, EXPERT_WIDTH, SHARED_WIDTH), free_head_dim=False, own_head=True, biases=QKV,
    values=SILU_ONLY | ALL_SPARSE | {"norm_topk_prob": (False,)},
)  # fmt: skip
_QWEN3 = Architecture(name="QWEN3", biases=QKV, values=SILU_ONLY)
_QWEN3_MOE = replace(
    _QWEN3, name="QWEN3MOE", settings=(*EXPERTS, EXPERT_WIDTH),
    values=SILU_ONLY | ALL_SPARSE | {"norm_topk_prob": (True,)},
)  # fmt: skip
_DEEPSTACK = Setting("num_deepstack_layers", "deepstack_layers", optional=True)
_QWEN3_VL = replace(
    _QWEN3, name="QWEN3VL", settings=(_DEEPSTACK,), rope=Rope(sections=(24, 20, 20)), notes=(_left_over,)
)
_QWEN3_VL_MOE = replace(
    _QWEN3_VL, name="QWEN3VLMOE", settings=(*EXPERTS, EXPERT_WIDTH, _DEEPSTACK), values=SILU_ONLY | ALL_SPARSE
)


def _restate_images(values: dict[str, Any]) -> None:
    vision = values.get("vision_config")
    if isinstance(vision, dict) and isinstance(layers := vision.get("deepstack_visual_indexes"), list):
        values["deepstack_layers"] = len(layers)


# Gated DeltaNet in three of four layers. Queries have a gate beside them.
def restate_linear(values: dict[str, Any]) -> None:
    """State the kinds of layers, and the period in which one has full attention, each from the other."""
    types, every = values.get("layer_types"), values.get("full_attention_interval")
    if every is None:
        every = 4
        if isinstance(types, list):
            every = types.index(FULL) + 1 if FULL in types else len(types) + 1
        values["full_attention_interval"] = every
    if not types and isinstance(every, int) and every > 0:
        numbers = range(1, layer_count(values) + 1)
        values["layer_types"] = [LINEAR_ATTENTION if number % every else FULL for number in numbers]


def _has_period(settings: Settings) -> str:
    every = settings.number("full_attention_interval")
    linear = [kind == LINEAR_ATTENTION for kind in settings.get("layer_types") or ()]
    alike = linear == all_but_each(settings, every)
    return "" if alike else f"llama.cpp has full attention in every {every}th layer only"


def _keys(n: Numbers) -> int:
    return 2 * n("linear_num_key_heads") * n("linear_key_head_dim")


def _values(n: Numbers) -> int:
    return n("linear_num_value_heads") * n("linear_value_head_dim")


def _values_of_key(n: Numbers) -> Fraction:
    return Fraction(_values(n), n("linear_num_key_heads"))


_QWEN3_NEXT = Architecture(
    name="QWEN3NEXT", modules={r"linear_attn\.dt_bias": "linear_attn.dt_proj.bias"},
    cuts={
        r"linear_attn\.in_proj_qkvz": Cut(
            parts={"linear_attn.in_proj_qkv": (0, 1, 2), "linear_attn.in_proj_z": (3,)},
            blocks=("linear_key_head_dim", "linear_key_head_dim", _values_of_key, _values_of_key),
            times="linear_num_key_heads",
        ),
    },
    settings=(
        *EXPERTS, EXPERT_WIDTH, SHARED_WIDTH, Setting("ssm_conv_kernel", "linear_conv_kernel_dim"),
        Setting("ssm_state_size", "linear_key_head_dim"), Setting("ssm_group_count", "linear_num_key_heads"),
        Setting("ssm_time_step_rank", "linear_num_value_heads"), Setting("ssm_inner_size", _values),
        Setting("full_attention_interval", "full_attention_interval"),
    ),
    shapes={
        "ATTN_Q": (lambda n: 2 * n("num_attention_heads") * n("head_dim"), "hidden_size"),
        "ATTN_QKV": (lambda n: _keys(n) + _values(n), "hidden_size"), "ATTN_GATE": (_values, "hidden_size"),
        "SSM_OUT": ("hidden_size", _values),
    },
    layer_types=frozenset({FULL, LINEAR_ATTENTION}), rope=Rope(partial=True), drafts={},
    equal=(("linear_value_head_dim", "linear_key_head_dim"),), checks=(_has_period,),
    values=SILU_ONLY | ALL_SPARSE | {"norm_topk_prob": (True,)} | NO_BIAS,
)  # fmt: skip
QWEN3_5_MOE = replace(
    _QWEN3_NEXT, name="QWEN35MOE", cuts={}, rope=Rope(partial=True, sections=(11, 11, 10)), values=SILU_ONLY | NO_BIAS,
    notes=(_left_over,),
    settings=(*_QWEN3_NEXT.settings, Setting("feed_forward_length", "moe_intermediate_size")),
    tiled={
        r"linear_attn\.(in_proj_qkv|conv1d)": Tiled("linear_value_head_dim", before=_keys),
        r"linear_attn\.in_proj_z": Tiled("linear_value_head_dim"),
        r"linear_attn\.(in_proj_[ab]|A_log|dt_proj\.bias)": Tiled(1),
        r"linear_attn\.out_proj": Tiled("linear_value_head_dim", columns=True),
    },
)  # fmt: skip
_QWEN3_5 = replace(QWEN3_5_MOE, name="QWEN35", settings=_QWEN3_NEXT.settings[4:])  # without those of experts

_LINEAR_NAMES = below("linear_attn", "A_log conv1d dt_bias norm out_proj")
DELTA_NET = _LINEAR_NAMES + below("linear_attn", "in_proj_a in_proj_b in_proj_qkv in_proj_z")
_NEXT_NAMES = Names(
    class_name="Qwen3NextForCausalLM", drafts=MTP,
    layers=parts.USUAL + _LINEAR_NAMES + below("linear_attn", "in_proj_ba in_proj_qkvz"),
)  # fmt: skip
_3_5_NAMES = replace(
    _NEXT_NAMES, class_name="Qwen3_5ForCausalLM", keys={"num_nextn_predict_layers": "mtp_num_hidden_layers"},
    layers=parts.USUAL + DELTA_NET,
)  # fmt: skip
_QWEN3_PARTS = parts.LLAMA + parts.HEAD_NORMS
_MOE_PARTS = parts.NORMS + parts.HEADS + " mlp.gate mlp.experts"
_SHARED_PARTS = " mlp.shared_expert mlp.shared_expert_gate"
_LINEAR_PARTS = below("linear_attn", "conv1d norm out_proj")
_ZERO_CENTRED = frozenset({Trait.ZERO_CENTRED_NORMS})
_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False}
LINEAR = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "attention_bias": False, "head_dim": 256,
}  # fmt: skip
_QWEN2_VL = Row(
    llama_cpp=replace(_QWEN2, name="QWEN2VL", rope=Rope(sections=(16, 24, 24))),
    defaults=sizes(8192, 29568, 80, 64, 32768) | SILU | {"num_key_value_heads": 8, "rms_norm_eps": 1e-05},
)
_QWEN3_VL_ROW = Row(
    llama_cpp=_QWEN3_VL, restate=_restate_images, defaults=sizes(4096, 22016, 32, 32, 128000) | SILU | {
        "num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-06,
    },
)  # fmt: skip
_QWEN3_VL_MOE_ROW = Row(
    llama_cpp=_QWEN3_VL_MOE, restate=_restate_images, defaults=sizes(2048, 5632, 24, 16, 128000) | TIED | SILU | {
        "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
    },
)  # fmt: skip
_HEAD_OF_2 = MlxDifferences(head_in_text=True, tied=True)

ROWS: dict[str, Row] = {
    "qwen2": Row(
        llama_cpp=_QWEN2, defaults=sizes(4096, 22016, 32, 32, 32768) | LIKE_LLAMA | {"num_key_value_heads": 32},
        always=parts.LLAMA, names=Names(class_name="Qwen2ForCausalLM"),
    ),
    "qwen2_moe": Row(
        llama_cpp=_QWEN2_MOE, always=_MOE_PARTS + _SHARED_PARTS, names=Names(class_name="Qwen2MoeForCausalLM"),
        defaults=sizes(2048, 5632, 24, 16, 32768) | LIKE_LLAMA | _SPARSE | {
            "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen2_vl": replace(_QWEN2_VL, mlx=_HEAD_OF_2),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": replace(_QWEN2_VL, mlx=_HEAD_OF_2),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": Row(
        llama_cpp=_QWEN3, always=_QWEN3_PARTS, names=Names(class_name="Qwen3ForCausalLM", present=BIASED),
        defaults=sizes(4096, 22016, 32, 32, 32768) | LIKE_LLAMA | {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_moe": Row(
        llama_cpp=_QWEN3_MOE, always=_MOE_PARTS + parts.HEAD_NORMS,
        names=Names(class_name="Qwen3MoeForCausalLM", present=BIASED),
        defaults=sizes(2048, 6144, 24, 32, 32768) | LIKE_LLAMA | _SPARSE | {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
    ),
    "qwen3_vl": replace(_QWEN3_VL_ROW, mlx=MlxDifferences(head_in_text=True)),
    "qwen3_vl_text": _QWEN3_VL_ROW,
    "qwen3_vl_moe": replace(_QWEN3_VL_MOE_ROW, mlx=MlxDifferences(layout=AS_PUBLISHED, head_in_text=True)),
    "qwen3_vl_moe_text": replace(_QWEN3_VL_MOE_ROW, mlx=MlxDifferences(constants={"norm_topk_prob": True})),
    "qwen3_next": Row(
        traits=_ZERO_CENTRED, llama_cpp=_QWEN3_NEXT, restate=restate_linear,
        always=_MOE_PARTS + parts.HEAD_NORMS + _SHARED_PARTS + _LINEAR_PARTS, names=_NEXT_NAMES,
        defaults=sizes(2048, 5632, 48, 16, 32768) | LIKE_LLAMA | LINEAR | {
            "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, **_SPARSE, "norm_topk_prob": True,
        },
    ),
    "qwen3_5": Row(defaults=sizes(4096, 16, 4, 256), traits=_ZERO_CENTRED),
    "qwen3_5_text": Row(
        traits=_ZERO_CENTRED, llama_cpp=_QWEN3_5, restate=restate_linear,
        always=_QWEN3_PARTS + _LINEAR_PARTS, names=_3_5_NAMES, mlx=MlxDifferences(module="qwen3_5"),
        defaults=sizes(4096, 12288, 32, 16, 32768) | LIKE_LLAMA | LINEAR | {"num_key_value_heads": 4},
    ),
    "qwen3_5_moe": Row(
        defaults=sizes(2048, 16, 2, 256), traits=_ZERO_CENTRED, mlx=MlxDifferences(layout=STACKED),
    ),
    "qwen3_5_moe_text": Row(
        traits=_ZERO_CENTRED, llama_cpp=QWEN3_5_MOE, restate=restate_linear,
        always=_MOE_PARTS + parts.HEAD_NORMS + _SHARED_PARTS + _LINEAR_PARTS,
        names=replace(_3_5_NAMES, class_name="Qwen3_5MoeForCausalLM"),
        mlx=MlxDifferences(module="qwen3_5_moe", layout=STACKED),
        defaults=LIKE_LLAMA | LINEAR | {
            "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "max_position_embeddings": 32768,
            "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
}  # fmt: skip
