"""Rotary embeddings and windows of attention in mlx-lm: how its configurations state them, and what it computes.

mlx-lm reads older keys than transformers writes, ignores some silently, and has fewer windows. What its models really
compute is read off the model that it builds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from pqweights.checkpoint.positions import (
    Doubles,
    attention_factor,
    frequencies,
    is_resolved,
    layer_types,
    model_type_of,
    parameters_of,
    rope_parameters,
    rotated_layers,
    windows,
    yarn_scale,
)
from pqweights.errors import ExportError
from pqweights.models import described, has_trait, text_config
from pqweights.models.llama_cpp import FULL, SLIDING
from pqweights.models.rotary import DEFAULT_BASE
from pqweights.models.traits import Trait
from pqweights.targets.architectures import MLX, other_targets

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
TOWER = re.compile(r"vision|visual|audio")
# Longer than any text.
LONG = 2**40
# Frequencies that differ by less are the same, computed in half as many bits.
CLOSE = 1e-3


def state_positions(config: dict[str, Any]) -> None:
    """State the rotary embeddings of a configuration as transformers resolves them, under the keys that mlx-lm reads.

    rope_scaling has its kind as `type`, and as `rope_type`; mlx-lm's models want the one or the other.

    Raises ExportError for a configuration that states no object where one is expected.
    """
    if not is_resolved(config):
        return
    text: dict[str, Any] = config["text_config"] if text_config(config) is not config else config
    parameters, full, kinds = rope_parameters(config), parameters_of(config), layer_types(config)
    text["rope_parameters"] = parameters
    if kinds is not None and text.get("layer_types") is None:
        text["layer_types"] = kinds
    if not isinstance(text.get("rope_theta"), list):  # of Step 3.5, layer by layer
        text["rope_theta"] = full.get("rope_theta", DEFAULT_BASE)
    if "partial_rotary_factor" in full:
        text["partial_rotary_factor"] = full["partial_rotary_factor"]
    if FULL in parameters and SLIDING in parameters:
        text["rope_local_base_freq"] = parameters[SLIDING].get("rope_theta", DEFAULT_BASE)
    for old, new in described(model_type_of(config)).mlx.rope_names.items():
        text[old] = full[new]
    if full.get("rope_type") == "longrope" and "original_max_position_embeddings" in full:
        text["original_max_position_embeddings"] = full["original_max_position_embeddings"]
    if full.get("rope_type") != "default":
        text["rope_scaling"] = _scaling(full, _most(text))
    elif not (text.get("rope_scaling") or {}).get("mrope_section"):
        text["rope_scaling"] = None


def _scaling(parameters: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return rope_scaling for mlx-lm: it has no attention_factor for YaRN, but an mscale that gives the same."""
    result = {key: value for key, value in parameters.items() if value is not None}
    result |= {"type": parameters["rope_type"], "rope_type": parameters["rope_type"]}
    for key in ("factor", "rope_theta"):  # some of mlx-lm's models assert that it is real
        if isinstance(result.get(key), int):
            result[key] = float(result[key])
    if parameters["rope_type"] != "yarn" or parameters.get("mscale_all_dim"):
        return result
    if "factor" not in result:
        result["factor"] = most / parameters["original_max_position_embeddings"]
    unit = yarn_scale(result["factor"]) - 1
    result.pop("mscale", None)
    if (wanted := attention_factor(parameters, most)) != 1 + unit and unit > 0:
        result["mscale"] = (wanted - 1) / unit
    return result


def _most(text: Mapping[str, Any]) -> int:
    """Return max_position_embeddings."""
    most = text.get("max_position_embeddings")
    default = described(text.get("model_type")).defaults.get("max_position_embeddings", 0)
    return most if isinstance(most, int) and most > 0 else int(default)


# --- what mlx-lm computes ---


def position_warnings(model: Any, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what mlx-lm's model computes otherwise than transformers in long texts, or in short ones.

    model: as mlx-lm built it
    config: config.json as the source has it

    Raises ExportError if it computes otherwise whatever the length of the text.
    """
    if not is_resolved(config):
        return ()
    said = [*_windows_otherwise(model, config), *_rotary_otherwise(model, config)]
    return tuple(dict.fromkeys(said))


def _windows_otherwise(model: Any, config: Mapping[str, Any]) -> Iterator[str]:
    most = _most(text_config(config)) or LONG
    pairs = [pair for pair in zip(_windows_of(model), windows(config), strict=False) if pair[0] != pair[1]]
    sizes = [size for pair in pairs for size in pair if size is not None and size < most]
    model_type = model_type_of(config)
    if pairs and has_trait(model_type, Trait.ROTATES_WINDOWS_ONLY):  # layers with full attention do not know positions
        raise ExportError(
            f"config.json: mlx-lm has sliding windows and rotary embeddings in other layers of this model "
            f"({model_type}) than transformers; {other_targets(MLX, config)}"
        )
    if not sizes:
        return
    all_of_it, window = "the whole context", f"a window of {min(sizes)} tokens"
    has_windows = any(expected is not None for _, expected in pairs)
    own, expected = (all_of_it, window) if has_windows else (window, all_of_it)
    yield (
        f"mlx-lm attends to {own} in {len(pairs)} layers in which the model attends to {expected}: with texts of more "
        f"than {min(sizes)} tokens it computes something different from transformers"
    )


def _windows_of(model: Any) -> list[int | None]:
    """Return the window of each layer of a model of mlx-lm, as its caches or its layers have them."""
    if not hasattr(model, "make_cache"):
        window = getattr(getattr(model, "model", None), "sliding_window", None)
        return [window if getattr(layer, "use_sliding", False) else None for layer in model.layers]
    return [getattr(cache, "max_size", None) for cache in model.make_cache()]


def _rotary_otherwise(model: Any, config: Mapping[str, Any]) -> Iterator[str]:
    kinds, of_mlx = layer_types(config), list(_rotary_of(model))
    _check_rotated(config, {layer for layer, _ in of_mlx})
    for layer, module in of_mlx:
        kind = kinds[layer] if kinds is not None and layer < len(kinds) else FULL
        parameters = parameters_of(config, kind)
        rotated = _rotated(config, kind, parameters) if parameters else 0
        if not rotated:  # its sizes are stated elsewhere
            continue
        try:
            yield from _layer_otherwise(module, parameters, rotated, config)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ExportError(
                f"config.json: the rope parameters of this model ({model_type_of(config)}) are not complete: "
                f"{type(error).__name__}: {error}"
            ) from error


def _layer_otherwise(
    module: nn.Module, parameters: Mapping[str, Any], rotated: int, config: Mapping[str, Any]
) -> Iterator[str]:
    """Compare the rotary embeddings of a layer of mlx-lm with those of transformers, in short and in long texts."""
    computed, scale = _computed(module, config)
    most, kind = _most(text_config(config)) or LONG, parameters["rope_type"]
    original = parameters.get("original_max_position_embeddings")

    def same(length: int = 1, **others: Any) -> bool:
        expected = frequencies({**parameters, **others}, rotated, length=length, most=most)
        return (
            computed.shape == expected.shape
            and bool(np.allclose(computed, expected, rtol=CLOSE, atol=1e-12))
            and abs(scale - attention_factor({**parameters, **others}, most)) <= CLOSE
        )

    as_short, as_long = same(), same(LONG)
    rounded = parameters.get("truncate") is False and same(truncate=True)
    if kind == "longrope" and as_short != as_long:
        takes, instead, these = (
            ("short", "long", f"texts of more than {original} tokens")
            if as_short
            else ("long", "short", f"texts of at most {original} tokens")
        )
        yield (
            f"mlx-lm uses the {takes} factors of LongRoPE for every text, but transformers uses the {instead} ones for "
            f"{these}: results differ for these"
        )
    elif kind == "dynamic" and as_short and not (as_long or _grows(module)):
        yield (
            "mlx-lm does not scale the rotary embeddings of this model by the length of the text (dynamic): results "
            f"differ from those of transformers for texts of more than {most} tokens"
        )
    elif rounded and not as_short:
        yield (
            "mlx-lm rounds the bounds between which YaRN interpolates, and transformers does not: some frequencies are "
            "a little different"
        )
    elif not as_short and same(rope_type="default"):
        yield (
            f"mlx-lm ignores the scaling of this model's rotary embeddings ({kind}): it computes something different "
            "from transformers for texts of any length"
        )
    elif not as_short:
        raise ExportError(
            f"config.json: mlx-lm computes the rotary embeddings of this model ({model_type_of(config)}) differently "
            f"from transformers, which has rope_type {kind}, rope_theta {parameters['rope_theta']} and {rotated} "
            f"rotated channels; {other_targets(MLX, config)}"
        )


def _check_rotated(config: Mapping[str, Any], rotated: set[int]) -> None:
    """Raise ExportError if mlx-lm rotates other layers than transformers. rotated: those with a module for it"""
    expected = rotated_layers(config)
    if expected is None or model_type_of(config) == "cohere2":  # whose modules are there in any case
        return
    if {layer for layer, turned in enumerate(expected) if turned} != rotated:
        raise ExportError(
            f"config.json: mlx-lm has rotary embeddings in other layers of this model ({model_type_of(config)}) than "
            f"transformers; {other_targets(MLX, config)}"
        )


def _rotated(config: Mapping[str, Any], kind: str, parameters: Mapping[str, Any]) -> int:
    """Return how many channels of a head are rotated; 0 if the configuration does not say how wide heads are."""
    text, model_type = text_config(config), model_type_of(config)
    defaults = described(model_type).defaults

    def number(key: str) -> int:
        value = text.get(key, defaults.get(key))
        return value if isinstance(value, int) else 0

    if rotated := number("qk_rope_head_dim"):  # of latent attention
        return rotated
    size = number("head_dim") or number("hidden_size") // (number("num_attention_heads") or 1)
    if kind == FULL and model_type.startswith("gemma4"):
        stated = dict(text)  # which may say it layer by layer
        described("gemma4_text").restate(stated)
        size = stated.get("global_head_dim") or 512
    if parameters["rope_type"] == "proportional":
        return size
    return int(size * parameters.get("partial_rotary_factor", 1.0))


def _rotary_of(model: Any) -> Iterator[tuple[int, nn.Module]]:
    """Yield the rotary embeddings of a model of mlx-lm, each with the number of its layer."""
    for path, module in model.named_modules():
        layer, has_own = LAYER.search(path), getattr(module, "_freqs", None) is not None
        if layer is not None and not TOWER.search(path) and (has_own or isinstance(module, nn.RoPE) or _grows(module)):
            yield int(layer[1]), module


def _grows(module: nn.Module) -> bool:
    """Whether longer texts have another base."""
    return type(module).__name__ == "DynamicNTKScalingRoPE"


def _computed(module: nn.Module, config: Mapping[str, Any]) -> tuple[Doubles, float]:
    """Return the frequencies of rotary embeddings of mlx-lm, and what it multiplies queries and keys by."""
    if (periods := getattr(module, "_freqs", None)) is not None:
        inverse = 1 / np.array(periods.astype(mx.float32), dtype=np.float64)
        return inverse, float(getattr(module, "mscale", getattr(module, "_scale", 1.0)))
    if getattr(module, "max_position_embeddings", 0) is None:
        raise ExportError(
            f"config.json: mlx-lm's model of type {model_type_of(config)} fails with rope_type dynamic, as it does not "
            f"pass max_position_embeddings on; {other_targets(MLX, config)}"
        )
    base: float = module.base if hasattr(module, "base") else module.original_base
    scale = module.scale if isinstance(module, nn.RoPE) else 1.0
    return scale * base ** (-np.arange(0, module.dims, 2) / module.dims), 1.0
