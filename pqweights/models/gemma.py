"""Gemma 1 to 4, and EmbeddingGemma, a Gemma 3 that attends both ways."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.description import NESTED, TIED, MlxDifferences, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import (
    DEFAULT,
    EXPERT_WIDTH,
    EXPERTS,
    FULL,
    JOINED,
    LINEAR,
    TANH_GELU,
    Architecture,
    Check,
    Rope,
    Setting,
    Windows,
    real,
)
from pqweights.models.settings import Settings
from pqweights.models.tensor_names import BIASED, Names
from pqweights.models.traits import Trait

# The layers of the 27B models, by which llama.cpp recognizes them: only these scale queries by the width of the model
# over its heads.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
_FORWARDS = {"use_bidirectional_attention": (False, None)}


def _divides_queries(layers_of_27b: int | None) -> Check:
    """Return a check of the number by whose root llama.cpp divides queries."""

    def check(settings: Settings) -> str:
        stated, divisor = settings.get("query_pre_attn_scalar"), settings.number("head_dim")
        if settings.get("num_hidden_layers") == layers_of_27b:
            divisor = settings.number("hidden_size") // settings.number("num_attention_heads")
        alike = stated is None or stated == divisor
        return "" if alike else f"llama.cpp supports only query_pre_attn_scalar {divisor}, found {stated}"

    return check


def _publish_queries(config: dict[str, Any], held: Set[str]) -> None:
    """State the inverse of that."""
    of_27b = config["num_hidden_layers"] == _LAYERS_OF_27B[config["model_type"]]
    of_27b = of_27b and config.get("use_bidirectional_attention") is not True
    width = config["hidden_size"] // config["num_attention_heads"] if of_27b else config["head_dim"]
    config["query_pre_attn_scalar"] = width


_GEMMA2 = Architecture(
    name="GEMMA2", settings=(real("attn_logit_softcapping"), real("final_logit_softcapping")), rope=Rope(LINEAR),
    windows=Windows(period=2), no_window="max_position_embeddings", values={"hidden_activation": TANH_GELU} | _FORWARDS,
    checks=(_divides_queries(_LAYERS_OF_27B["gemma2"]),),
)  # fmt: skip
_GEMMA3 = Architecture(
    name="GEMMA3", settings=(real("final_logit_softcapping", optional=True),), rope=Rope(LINEAR),
    windows=Windows(period=6), checks=(_divides_queries(_LAYERS_OF_27B["gemma3_text"]),),
    values={"hidden_activation": TANH_GELU, "attn_logit_softcapping": (None,)} | _FORWARDS,
)  # fmt: skip
_EMBEDDING = replace(
    _GEMMA3, name="GEMMA_EMBEDDING", when=lambda settings: settings.get("use_bidirectional_attention") is True,
    classes=("TextModel",), encoder=True, checks=(_divides_queries(None),),
    values={**_GEMMA3.values, "use_bidirectional_attention": (True,)},
)  # fmt: skip


def _full_layers(settings: Settings) -> dict[str, Any]:
    keys = ("num_key_value_heads", "head_dim")
    return {f"global_{key}": settings.get(key) for key in keys if settings.get(f"global_{key}") is None}


# Keys and values of layers with full attention have sizes of their own; the last layers take those of others.
_GEMMA4 = Architecture(
    name="GEMMA4",
    modules={
        "layer_scalar": "layer_scalar.weight", r"router\.scale": "router.proj.scale",
        r"router\.per_expert_scale": "experts.down_proj.scale",
    },
    settings=(
        Setting("head_count_kv", "global_num_key_value_heads", only=f"{FULL}.*", other="num_key_value_heads"),
        Setting("key_length", "global_head_dim"), Setting("value_length", "global_head_dim"),
        Setting("key_length_swa", "head_dim"), Setting("value_length_swa", "head_dim"),
        Setting(
            "feed_forward_length", lambda n: n("intermediate_size") * n("mlp_widening"), only=".*shared",
            other="intermediate_size",
        ),
        Setting("shared_kv_layers", "num_kv_shared_layers", zero=True),
        Setting("embedding_length_per_layer_input", "hidden_size_per_layer_input", zero=True),
        *(setting._replace(optional=True) for setting in (*EXPERTS, EXPERT_WIDTH)),
        real("final_logit_softcapping", zero=True),
    ),
    shapes=dict.fromkeys(("ATTN_Q", "ATTN_K", "ATTN_V", "ATTN_OUT", "FFN_GATE", "FFN_UP", "FFN_DOWN"), (None, None)),
    rope=Rope(frozenset({"proportional"}), rotated="global_head_dim", partial=True),
    windows=Windows(period=6, listed=True), gate_and_up=JOINED, derived=_full_layers,
    values={"hidden_activation": TANH_GELU, "use_bidirectional_attention": (None, False, "vision")},
)  # fmt: skip
# llama.cpp uses the keys and values of 20 layers, but wants those of all, as published files have them. The first 10
# layers have sparse activations.
_GEMMA3N = Architecture(
    name="GEMMA3N", modules={r"altup\.correct_output_scale": "altup.correct_output_scale.weight"},
    settings=(
        Setting("altup_active_idx", "altup_active_idx", zero=True), Setting("altup_num_inputs", "altup_num_inputs"),
        Setting("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        Setting("shared_kv_layers", "shared_kv_layers", zero=True), real("final_logit_softcapping", optional=True),
    ),
    rope=Rope(DEFAULT), windows=Windows(period=5, listed=True),
    values={
        "hidden_activation": TANH_GELU, "laurel_rank": (64,), "hidden_size_per_layer_input": (256,),
        "altup_num_inputs": (4,), "altup_active_idx": (0,), "altup_correct_scale": (True,), "own_layers": (20,),
        "sparse_layers": (10,), "final_logit_softcapping": (30.0,),
    },
)  # fmt: skip


def _restate_gemma3n(values: dict[str, Any]) -> None:
    """State how many layers have keys and values of their own, and how many have sparse activations."""
    layers, shared = values.get("num_hidden_layers"), values.get("num_kv_shared_layers", 15)
    if isinstance(layers, int) and isinstance(shared, int):
        values |= {"own_layers": layers - shared, "shared_kv_layers": shared, "num_kv_shared_layers": 0}
    pattern = values.get("activation_sparsity_pattern") or [0.95] * 10
    if isinstance(pattern, list) and all(share == (0.95 if n < 10 else 0) for n, share in enumerate(pattern)):
        values["sparse_layers"] = 10
    widths = values.get("intermediate_size")
    if isinstance(widths, list) and widths and widths.count(widths[0]) == len(widths):
        values["intermediate_size"] = widths[0]


def _publish_gemma3n(config: dict[str, Any], held: Set[str]) -> None:
    """State the inverse of that."""
    sparse, layers = config.pop("sparse_layers"), config["num_hidden_layers"]
    config["num_kv_shared_layers"] = config.pop("shared_kv_layers", 0)
    config["activation_sparsity_pattern"] = [0.95 if n < sparse else 0.0 for n in range(layers)]
    del config["own_layers"]


def _restate_gemma4(values: dict[str, Any]) -> None:
    """State the sizes of the layers with full attention, which may be listed layer by layer, and their widening."""
    if values.get("num_global_key_value_heads") is not None:
        values["global_num_key_value_heads"] = values["num_global_key_value_heads"]
    types, listed = values.get("layer_types"), values.get("per_layer_config")
    for layer, kind in enumerate(types if isinstance(types, list) and isinstance(listed, dict) else ()):
        own = listed.get(str(layer)) if isinstance(listed, dict) else None
        if kind == FULL and isinstance(own, dict):
            for key in ("head_dim", "num_key_value_heads"):
                values.setdefault(f"global_{key}", own.get(key))
    values["mlp_widening"] = 2 if values.get("use_double_wide_mlp") else 1


def _publish_gemma4(config: dict[str, Any], held: Set[str]) -> None:
    """State what follows from the widths of layers."""
    config["use_double_wide_mlp"] = config.pop("mlp_widening", 1) == 2
    keys = {name for name in held if name.endswith(".attn_k.weight")}
    config["attention_k_eq_v"] = any(name.replace("attn_k", "attn_v") not in held for name in keys)
    config["enable_moe_block"] = bool(config.get("num_experts"))
    config.setdefault("vocab_size_per_layer_input", config["vocab_size"])


def _gemma4_mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with full attention have sizes of their own, which transformers 5 lists layer by layer."""
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    listed = zip(config["layer_types"], map(str, range(len(config["layer_types"]))), strict=True)
    own = next((config["per_layer_config"].get(layer) for kind, layer in listed if kind == FULL), None)
    return {names[key]: value for key, value in (own or {}).items() if key in names}


_GEMMA = TIED | {"rms_norm_eps": 1e-6, "head_dim": 256}
_LATER = _GEMMA | {
    "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
}  # fmt: skip
_ZERO_CENTRED = frozenset({Trait.ZERO_CENTRED_NORMS})
_PARTS = parts.LLAMA + parts.FEED_FORWARD_NORMS
_PER_LAYER = " per_layer_input_gate per_layer_projection post_per_layer_input_norm"
_OUTSIDE = parts.OUTSIDE + parts.below(
    "model",
    "embed_tokens_per_layer per_layer_model_projection per_layer_projection_norm altup_projections.{} "
    "altup_unembed_projections.{}",
)
_GEMMA3_ROW = Row(
    llama_cpp=_GEMMA3, variants=(_EMBEDDING,), traits=_ZERO_CENTRED, publish=_publish_queries,
    always=_PARTS + parts.HEAD_NORMS, names=Names(class_name="Gemma3ForCausalLM"),
    defaults=sizes(2304, 9216, 26, 8, 131072) | _LATER | {"use_bidirectional_attention": False},
)  # fmt: skip

ROWS: dict[str, Row] = {
    "gemma": Row(
        llama_cpp=Architecture(name="GEMMA", values={"hidden_act": (*TANH_GELU, "gelu")} | _FORWARDS),
        traits=_ZERO_CENTRED, always=parts.LLAMA, names=Names(class_name="GemmaForCausalLM", present=BIASED),
        defaults=sizes(3072, 24576, 28, 16, 8192) | _GEMMA | {
            "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "gemma2": Row(
        llama_cpp=_GEMMA2, traits=_ZERO_CENTRED, publish=_publish_queries, always=_PARTS,
        names=Names(class_name="Gemma2ForCausalLM"),
        defaults=sizes(2304, 9216, 26, 8, 8192) | _LATER | {
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": replace(_GEMMA3_ROW, names=None, always="", mlx=MlxDifferences(vocabulary=262208)),
    "gemma3_text": _GEMMA3_ROW,
    "gemma3n_text": Row(
        llama_cpp=_GEMMA3N, restate=_restate_gemma3n, publish=_publish_gemma3n,
        names=Names(
            class_name="Gemma3nForCausalLM", outside=_OUTSIDE,
            layers=parts.ATTENTION + parts.MLP + parts.FEED_FORWARD_NORMS + _PER_LAYER
            + parts.below("altup", "correct_output_scale correction_coefs modality_router prediction_coefs router_norm")
            + parts.below("laurel", "linear_left linear_right post_laurel_norm"),
        ),
        mlx=MlxDifferences(module="gemma3n", layout=NESTED),
        defaults=sizes(2048, 16384, 35, 8, 32768) | TIED | {
            "num_key_value_heads": 2, "head_dim": 256, "rms_norm_eps": 1e-06, "hidden_size_per_layer_input": 256,
            "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "laurel_rank": 64,
            "altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True,
        },
    ),
    "gemma4": Row(mlx=MlxDifferences(vocabulary=262144)),
    "gemma4_text": Row(
        llama_cpp=_GEMMA4, restate=_restate_gemma4, publish=_publish_gemma4,
        # Layers that share keys and values store neither, and some take the keys for values.
        always=_PARTS.replace("self_attn.v_proj ", "") + parts.HEAD_NORMS,
        names=Names(
            class_name="Gemma4ForCausalLM", outside=_OUTSIDE,
            layers=parts.ATTENTION + parts.MLP + parts.FEED_FORWARD_NORMS + _PER_LAYER
            + " layer_scalar experts.gate_up_proj experts.down_proj router.proj router.scale router.per_expert_scale "
            "post_feedforward_layernorm_1 post_feedforward_layernorm_2 pre_feedforward_layernorm_2",
            keys={
                "num_experts_per_tok": "top_k_experts", "global_num_key_value_heads": "num_global_key_value_heads",
            },
        ),
        mlx=MlxDifferences(computed=_gemma4_mlx),
        defaults=sizes(2304, 9216, 30, 8, 131072) | TIED | {
            "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-06, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 256, "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
}  # fmt: skip
