"""Configurations with what earlier versions and single types of models state by other keys, as transformers 5 does."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from pqweights.checkpoint.positions import model_type_of, rope_parameters
from pqweights.models import text_config
from pqweights.models.llama_cpp import FULL, LINEAR_ATTENTION, SLIDING
from pqweights.models.rotary import DEFAULT_WINDOWS

# The letters of hybrid_override_pattern.
BLOCKS = {"M": LINEAR_ATTENTION, "*": FULL, "-": "mlp", "E": "moe"}
# Names of kinds of layers in configurations on the Hub, and those of transformers 5.
OLD_LAYER_TYPES = {"attention": FULL, "mamba": LINEAR_ATTENTION}


def restated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of its text_config, and with what is stated otherwise.

    Values of other types than transformers takes stay as they are, for others to refuse.
    """
    values = {**config, **text_config(config)}
    if config.get("tie_word_embeddings") is not None:  # the model around the text model has the head
        values["tie_word_embeddings"] = config["tie_word_embeddings"]
    _restate_positions(values, config)
    _restate_layers(values)
    if isinstance(pattern := values.get("sliding_window_pattern"), str) and "G" in pattern:  # of EXAONE 4: LLLG
        values["sliding_window_pattern"] = 1 + pattern.index("G")
    types = (_BY_TYPE.get(str(part.get("model_type"))) for part in (values, config))
    if (of_type := next(filter(None, types), None)) is not None:
        of_type(values)
    if isinstance(mlps := values.get("mlp_layer_types"), list):
        values.setdefault("first_k_dense_replace", mlps.index("sparse") if "sparse" in mlps else len(mlps))
    if values.get("num_global_key_value_heads") is not None:
        values["global_num_key_value_heads"] = values["num_global_key_value_heads"]
    vision = config.get("vision_config")
    if isinstance(vision, dict) and isinstance(layers := vision.get("deepstack_visual_indexes"), list):
        values["deepstack_layers"] = len(layers)
    if isinstance(linear := values.get("linear_attn_config"), dict):
        _restate_kimi_linear(values, linear)
    _restate_periods(values)
    if "laurel_rank" in values or values.get("model_type") in ("gemma3n", "gemma3n_text"):
        _restate_gemma3n(values)
    _restate_full_layers(values)
    named = first_class(config)
    values["ranks"] = named.endswith("ForSequenceClassification")
    if isinstance(every := values.get("global_attn_every_n_layers"), int) and every > 0:  # of ModernBERT
        layers = values.get("num_hidden_layers")
        number = min(layers, 512) if isinstance(layers, int) else 0
        values.setdefault("layer_types", [SLIDING if layer % every else FULL for layer in range(number)])
    if isinstance(width := values.get("d_model"), int) and width > 0:
        _restate_t5(values, width)
    values["encodes"] = named.endswith("EncoderModel")
    values["mlp_widening"] = 2 if values.get("use_double_wide_mlp") else 1
    return values


def first_class(config: Mapping[str, Any]) -> str:
    """Return the first of the classes that config.json names; "" if it names none."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def _restate_positions(values: dict[str, Any], config: Mapping[str, Any]) -> None:
    """State rotary embeddings as transformers 5 does, and nothing else of them; the window that a type takes itself."""
    for key in ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"):
        values.pop(key, None)
    values["rope_parameters"] = rope_parameters(config)
    if (window := DEFAULT_WINDOWS.get(model_type_of(config))) is not None:
        values.setdefault("sliding_window", window)


def _restate_t5(values: dict[str, Any], width: int) -> None:
    """State the layers of the decoder, and how the head is scaled: the original T5 has it tied and scaled.

    Later versions of transformers always write that it is tied: what is stored decides. They scale that of every UMT5.
    """
    tied = values.get("tie_word_embeddings")
    scaled = values.get("scale_decoder_outputs", tied is not False or values.get("model_type") == "umt5")
    values["decoder_scale"] = width**-0.5 if scaled else 1.0
    values["tie_word_embeddings"] = None if tied else tied
    values.setdefault("num_decoder_layers", values.get("num_layers"))


def _restate_layers(values: dict[str, Any]) -> None:
    types = values.get("layer_types") or values.get("layers_block_type")
    if isinstance(pattern := values.get("hybrid_override_pattern"), str):  # of Nemotron H
        types = [BLOCKS.get(letter, letter) for letter in pattern]
        values["num_hidden_layers"] = len(types)
    if isinstance(types, list):
        types = [OLD_LAYER_TYPES.get(name, name) if isinstance(name, str) else name for name in types]
        values["layer_types"] = types
        values.setdefault("full_attention_interval", 1 + types.index(FULL) if FULL in types else len(types) + 1)
        values.setdefault("num_hidden_layers", len(types))


def _restate_full_layers(values: dict[str, Any]) -> None:
    """State the sizes of the layers of Gemma 4 with full attention, which it may list layer by layer."""
    types, listed = values.get("layer_types"), values.get("per_layer_config")
    if not isinstance(types, list) or not isinstance(listed, dict):
        return
    for layer, kind in enumerate(types):
        own = listed.get(str(layer))
        if kind == FULL and isinstance(own, dict):
            for key in ("head_dim", "num_key_value_heads"):
                values.setdefault(f"global_{key}", own.get(key))


def _restate_periods(values: dict[str, Any]) -> None:
    """State the kinds of layers of Jamba, which come in periods, and the rank of its time steps."""
    keys = [f"{of}_layer_{part}" for of in ("attn", "expert") for part in ("period", "offset")]
    numbers = [values.get(key, default) for key, default in zip(keys, (8, 4, 2, 1), strict=True)]
    layers, width = values.get("num_hidden_layers", 32), values.get("hidden_size", 4096)
    if values.get("model_type") != "jamba" or not all(isinstance(n, int) for n in (*numbers, layers, width)):
        return
    period, offset, experts, first = numbers
    if period < 1 or experts < 1:
        return
    values["layer_types"] = [
        f"{FULL if n % period == offset else LINEAR_ATTENTION}{' moe' if n % experts == first else ''}"
        for n in range(min(layers, 512))
    ]
    if values.get("mamba_dt_rank", "auto") == "auto":
        values["mamba_dt_rank"] = -(-width // 16)


def _restate_gemma3n(values: dict[str, Any]) -> None:
    """State how many layers of Gemma 3n have keys and values of their own, and how many have sparse activations."""
    layers, shared = values.get("num_hidden_layers", 35), values.get("num_kv_shared_layers", 15)
    if isinstance(layers, int) and isinstance(shared, int):
        values |= {"own_layers": layers - shared, "shared_kv_layers": shared, "num_kv_shared_layers": 0}
    pattern = values.get("activation_sparsity_pattern") or [0.95] * 10
    if isinstance(pattern, list) and all(share == (0.95 if n < 10 else 0) for n, share in enumerate(pattern)):
        values["sparse_layers"] = 10
    if (
        isinstance(widths := values.get("intermediate_size"), list)
        and widths
        and widths.count(widths[0]) == len(widths)
    ):
        values["intermediate_size"] = widths[0]


# What linear_attn_config of Kimi Linear calls sizes.
LINEAR_KEYS = {
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip


def _restate_kimi_linear(values: dict[str, Any], linear: Mapping[str, Any]) -> None:
    """State the kinds and sizes of the layers of Kimi Linear, whose numbers begin with 1."""
    layers, number = linear.get("full_attn_layers"), values.get("num_hidden_layers")
    if isinstance(layers, list) and isinstance(number, int):
        values["layer_types"] = [FULL if 1 + n in layers else LINEAR_ATTENTION for n in range(min(number, 512))]
    values |= {LINEAR_KEYS[key]: value for key, value in linear.items() if key in LINEAR_KEYS}


def name_kimi_linear(config: dict[str, Any], held: Set[str]) -> None:
    """State the layers of Kimi Linear as published configurations do."""
    types = [*enumerate(config.pop("layer_types"), 1)]
    kinds = {"full_attn_layers": FULL, "kda_layers": LINEAR_ATTENTION}
    config["linear_attn_config"] = {
        **{key: [number for number, of in types if of == kind] for key, kind in kinds.items()},
        **{key: config.pop(name) for key, name in LINEAR_KEYS.items()},
    }


def _restate_mimo(values: dict[str, Any]) -> None:
    """State the layers of MiMo V2, of which published configurations list the kinds as 0 and 1."""
    layers = values.get("num_hidden_layers", 48)
    numbers = range(min(layers, 512) if isinstance(layers, int) else 0)
    windowed = values.get("hybrid_layer_pattern") or [n > 0 and (n + 1) % 6 != 0 for n in numbers]
    sparse = values.get("moe_layer_freq") or [n > 0 for n in numbers]
    if isinstance(windowed, list) and isinstance(sparse, list):
        values.setdefault("layer_types", [SLIDING if of else FULL for of in windowed])
        values.setdefault("mlp_layer_types", ["sparse" if of else "dense" for of in sparse])
    for key, default in {"head_dim": 192, "v_head_dim": 128, "num_attention_heads": 64}.items():
        values.setdefault(f"swa_{key}", values.get(key, default))
    if isinstance(heads := values.get("num_key_value_heads", 4), int):
        values.setdefault("swa_num_key_value_heads", 2 * heads)
    if isinstance(window := values.get("sliding_window_size"), int):  # without the token itself
        values["sliding_window"] = 1 + window


def _restate_step(values: dict[str, Any]) -> None:
    """State the kinds of layers of Step 3.5, of which published configurations list bases of rotary embeddings."""
    layers, experts = values.get("num_hidden_layers", 45), values.get("moe_layers_enum")
    layers = min(layers, 512) if isinstance(layers, int) else 0
    types = values.get("layer_types")
    values["draft_layer_types"] = values.get("mtp_layer_types") or (types[layers:] if isinstance(types, list) else None)
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


def name_step(config: dict[str, Any], held: Set[str]) -> None:
    """State the layers of Step 3.5 one by one, as published configurations do."""
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


def _restate_minimax_m3(values: dict[str, Any]) -> None:
    """State the kinds of layers of MiniMax M3, which published configurations list as 0 and 1, and its indexer."""
    sparse = values.get("sparse_attention_config")
    sparse = sparse if isinstance(sparse, dict) else {}
    names = {"num_index_heads": "n_heads", "index_dim": "head_dim", "block_size": "block_size"}
    names |= {"topk_blocks": "topk_blocks", "local_block": "local_blocks"}
    values |= {f"index_{name}": sparse[f"sparse_{old}"] for old, name in names.items() if f"sparse_{old}" in sparse}
    if isinstance(chosen := sparse.get("sparse_attention_freq"), list):
        values.setdefault("layer_types", ["minimax_m3_sparse" if of else FULL for of in chosen])
    if isinstance(experts := values.get("moe_layer_freq"), list):
        values.setdefault("mlp_layer_types", ["sparse" if of else "dense" for of in experts])


# The layers of DeepSeek V4, and how many tokens become one in them.
COMPRESSED = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _restate_deepseek_v4(values: dict[str, Any]) -> None:
    """State the layers of DeepSeek V4 by how much they compress, and the rotary embeddings that are scaled in some."""
    layers, types = values.get("num_hidden_layers", 43), values.get("layer_types")
    layers = min(layers, 512) if isinstance(layers, int) else 0
    ratios = values.get("compress_ratios") or [4 if n > 1 and n % 2 else 128 for n in range(layers)]
    if isinstance(types, list):
        ratios = [COMPRESSED.get(name) if isinstance(name, str) else name for name in types]
    if isinstance(ratios, list):  # layers that predict further tokens are listed, too
        values["compress_ratios"] = ratios[:layers]
        values["layer_types"] = [f"compressed {ratio}" for ratio in ratios[:layers]]
    experts = values.get("mlp_layer_types")
    hashed = experts.count("hash_moe") if isinstance(experts, list) else values.get("num_hash_layers", 3)
    values["num_hash_layers"] = hashed
    if isinstance(experts, list) and experts[:hashed] == ["hash_moe"] * hashed:
        del values["mlp_layer_types"]
    values["swiglu_limits"] = [values.get("swiglu_limit", 10.0)] * layers
    rope = values.get("rope_parameters") or {}
    if not all(isinstance(rope.get(kind), dict) and "rope_theta" in rope[kind] for kind in ("main", "compress")):
        return
    values["compress_rope_theta"] = rope["compress"]["rope_theta"]
    # llama.cpp does not scale queries and keys by the factor of YaRN, as the model does not.
    scaled = {key: value for key, value in rope["compress"].items() if key != "attention_factor"}
    values["rope_parameters"] = scaled | {"rope_theta": rope["main"]["rope_theta"]}


def name_deepseek_v4(config: dict[str, Any], held: Set[str]) -> None:
    """State the layers of DeepSeek V4 as published configurations do."""
    config.pop("layer_types", None)
    config["compress_ratios"] = config["compress_ratios"][: config["num_hidden_layers"]]
    config["qk_rope_head_dim"] = int(config["head_dim"] * config.pop("partial_rotary_factor", 1.0))
    config["swiglu_limit"] = next(iter(config.pop("swiglu_limits", ())), 0.0)


_BY_TYPE = {"mimo_v2_flash": _restate_mimo, "step3p5": _restate_step, "step3p7": _restate_step}
_BY_TYPE["deepseek_v4"] = _restate_deepseek_v4
_BY_TYPE |= dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), _restate_minimax_m3)
