"""The settings of a model that llama.cpp runs as transformers does: read from its configuration, and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.positions import model_type_of, rope_parameters, windows
from pqweights.errors import ExportError
from pqweights.models import described, has_trait, text_config, text_model
from pqweights.models.llama_cpp import FULL, LINEAR_ATTENTION, SETTINGS, Architecture, Setting, first_class
from pqweights.models.rotary import DEFAULT_WINDOWS
from pqweights.models.settings import OTHER_NAMES, OTHERWISE, Settings, layer_kinds, sparse_layers
from pqweights.models.table import MODELS
from pqweights.models.traits import Trait

# Names of kinds of layers in configurations on the Hub, and those of transformers 5.
OLD_LAYER_TYPES = {"attention": FULL, "mamba": LINEAR_ATTENTION}


def read_settings(config: Mapping[str, Any] | None, *, pooling: str | None = None) -> Settings:
    """Return the settings of a model that llama.cpp runs as transformers does. pooling: see Settings

    Raises ExportError if the architecture is not covered, or a value of the configuration is not.
    """
    config = config or {}
    # The outer type decides, unless it is known to wrap others: a model of images and text may share the type of its
    # text model, and compute otherwise.
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ExportError(
            "it is missing, or has no model_type, which says what the model is",
            file=CONFIG_FILE,
            remedy="put that of the original beside the weights and quantize again",
        )
    model = text_model(config) if has_trait(model_type, Trait.WRAPS_TEXT) else described(model_type)
    if model.llama_cpp_differs:
        raise ExportError(
            f"GGUF cannot hold a model of type {model_type}: llama.cpp {model.llama_cpp_differs}",
            file=CONFIG_FILE,
            remedy="use another target",
        )
    if model.llama_cpp is None:
        covered = ", ".join(sorted(name for name, model in MODELS.items() if model.llama_cpp is not None))
        raise ExportError(
            f"GGUF cannot hold a model of type {model_type}; these can be written: {covered}",
            file=CONFIG_FILE,
            remedy=OTHERWISE,
        )
    values = restated(config)
    settings = Settings(model_type=model_type, model=model, architecture=model.llama_cpp, values=values)
    run = next((other for other in model.variants if other.when(settings)), model.llama_cpp)
    settings = replace(settings, architecture=run, pooling=run.pooling or pooling)
    _check_types(settings, config)
    _check_values(settings, config)
    values |= _sizes_of_heads(settings)
    values |= run.derived(settings)
    return settings


def restated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of its text_config, and as transformers 5 states what is stated otherwise.

    Values of other types than transformers takes stay as they are, for others to refuse.
    """
    values = {**config, **text_config(config)}
    if config.get("tie_word_embeddings") is not None:  # the model around the text model has the head
        values["tie_word_embeddings"] = config["tie_word_embeddings"]
    for key in ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"):
        values.pop(key, None)
    values["rope_parameters"] = rope_parameters(config)
    if (window := DEFAULT_WINDOWS.get(model_type_of(config))) is not None:
        values.setdefault("sliding_window", window)
    types = values.get("layer_types") or values.get("layers_block_type")
    if isinstance(types, list):
        types = [OLD_LAYER_TYPES.get(name, name) if isinstance(name, str) else name for name in types]
        values["layer_types"] = types
        values.setdefault("num_hidden_layers", len(types))
    model = text_model(config)
    if "num_hidden_layers" in model.defaults and not any(name in values for name in OTHER_NAMES["num_hidden_layers"]):
        values.setdefault("num_hidden_layers", model.defaults["num_hidden_layers"])
    model.restate(values)
    if isinstance(mlps := values.get("mlp_layer_types"), list):
        values.setdefault("first_k_dense_replace", mlps.index("sparse") if "sparse" in mlps else len(mlps))
    return values


def _sizes_of_heads(settings: Settings) -> dict[str, int]:
    """Return those that the configuration leaves out. Raises ExportError if llama.cpp takes no others than these."""
    heads = settings.number("num_attention_heads")
    width = settings.number("hidden_size") // heads
    computed = {"num_key_value_heads": heads, "head_dim": width}
    if not settings.architecture.free_head_dim and width * heads != settings.number("hidden_size"):
        raise settings.refusal(f"hidden_size {settings.number('hidden_size')} is not a multiple of the {heads} heads")
    if not settings.architecture.free_head_dim and settings.get("head_dim") not in (None, width):
        raise settings.refusal(f"llama.cpp supports only head_dim {width}, found {settings.get('head_dim')}")
    return {key: value for key, value in computed.items() if settings.get(key) is None}


def _check_types(settings: Settings, config: Mapping[str, Any]) -> None:
    """Raise ExportError for an optional value of another type than transformers takes."""
    named = config.get("architectures")
    if not isinstance(named, list | None) or not all(isinstance(name, str) for name in named or []):
        raise settings.refusal(f"expected a list of names as architectures, found {named!r}")
    tied = settings.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        raise settings.refusal(f"expected true or false as tie_word_embeddings, found {tied!r}")
    for key in ("sliding_window", "sliding_window_pattern", "no_rope_layer_interval"):
        if settings.get(key) not in (None, 0):
            settings.number(key)
    if not isinstance(settings.get("no_rope_layers"), list | None):
        raise settings.refusal(f"expected a list as no_rope_layers, found {settings.get('no_rope_layers')!r}")
    _check_layer_types(settings)


def _check_layer_types(settings: Settings) -> None:
    layers, known = settings.number("num_hidden_layers"), settings.architecture.layer_types
    types = settings.get("layer_types")
    fitting = isinstance(types, list) and len(types) == layers and all(layer in [*known] for layer in types)
    if types is not None and not fitting:
        expected = " or ".join(sorted(known))
        raise settings.refusal(f"expected {expected} for each of {layers} layers as layer_types, found {types!r:.80}")
    mlps = settings.get("mlp_layer_types")
    if mlps is not None and mlps != ["sparse" if sparse else "dense" for sparse in sparse_layers(settings)]:
        raise settings.refusal(
            f"llama.cpp has experts in all layers after the first few, but mlp_layer_types is {mlps!r:.80}"
        )
    stated = settings.get("moe_layers")
    if stated is not None and stated != [layer for layer, sparse in enumerate(sparse_layers(settings)) if sparse]:
        raise settings.refusal(
            f"llama.cpp has experts in every interleave_moe_layer_step-th layer, but moe_layers is {stated!r:.80}"
        )


def _check_values(settings: Settings, config: Mapping[str, Any]) -> None:
    """Raise ExportError for a value with which llama.cpp would compute something else."""
    named = first_class(config)
    architecture = settings.architecture
    if named and not named.endswith((*architecture.classes, "Model") if settings.embeds else architecture.classes):
        raise settings.refusal(f"llama.cpp does not compute what {named} does")
    for key, taken in architecture.values.items():
        value = settings.get(key)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # the same for each layer
        if value not in taken:
            expected = " or ".join(repr(value) for value in taken)
            raise settings.refusal(f"llama.cpp supports only {key} {expected}, found {value!r}")
    if reason := next(filter(None, (check(settings) for check in architecture.checks)), ""):
        raise settings.refusal(reason)
    for one, other in architecture.equal:
        if settings.number(one) != settings.number(other):
            raise settings.refusal(
                f"llama.cpp supports only equal {one} and {other}, found {settings.number(one)} and "
                f"{settings.number(other)}"
            )


def ignored_window(settings: Settings) -> int | None:
    """Return the least window of attention of a model for which llama.cpp has none; None if texts are never longer."""
    if settings.architecture.windows is not None or settings.architecture.encoder:
        return None
    least = min((window for window in windows(settings.values) if window is not None), default=None)
    return least if least is not None and least < settings.number("max_position_embeddings") else None


def settings_of(architecture: Architecture) -> list[Setting]:
    """Return the hyper-parameters of a file."""
    stated = (*SETTINGS, architecture.norm, *architecture.settings)
    return list({setting.parameter: setting for setting in stated}.values())


def value_of(setting: Setting, settings: Settings) -> Any:
    """Return the value of a hyper-parameter: one, or one for each layer."""
    if setting.truth:
        return settings.truth(setting.name)
    if setting.items:
        return settings.get(setting.name)
    if setting.listed:
        return [value if setting.real else int(value) for value in settings.numbers(setting.name)]
    value = settings.real(setting.name) if setting.real else settings.number(setting.key)
    if setting.of:
        return getattr(gguf_package(), setting.of)(value)
    if not setting.only:
        return value
    other = settings.number(setting.other) if setting.other else 0
    return [value if re.fullmatch(setting.only, kind) else other for kind in layer_kinds(settings)]
