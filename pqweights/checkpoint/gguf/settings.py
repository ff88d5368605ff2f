"""The configuration of a model as far as GGUF needs it: the text model's keys, by their old and new names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.restated import first_class, restated
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.positions import windows
from pqweights.errors import ExportError
from pqweights.models import described, has_trait, text_model
from pqweights.models.description import ModelDescription, stated_or_default
from pqweights.models.llama_cpp import FULL, LAYERS, SETTINGS, SLIDING, Architecture, Setting
from pqweights.models.table import MODELS
from pqweights.models.traits import Trait

# Other names of the same key, in other types and versions of transformers.
OTHER_NAMES = {
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k", "moe_topk", "moe_top_k", "top_k_experts", "num_experts_per_token"),
    "num_key_value_heads": ("num_attention_groups",),
    "max_position_embeddings": ("max_trained_positions", "n_positions", "model_max_length"),
    "rms_norm_eps": ("norm_eps", "layer_norm_epsilon", "layernorm_epsilon"),
    "layer_norm_eps": ("layer_norm_epsilon", "norm_eps"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "intermediate_size": ("n_inner", "d_ff", "hidden_dim"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "head_dim": ("d_kv",),
    "sliding_window": ("local_attention",),
}
OTHERWISE = "use --target bf16, and llama.cpp's convert_hf_to_gguf.py on its result if llama.cpp has this architecture"
# llama.cpp holds numbers in 32 bits, and has no room for more layers (LLAMA_MAX_LAYERS).
MOST_OF_ANY = 2**31 - 1
MOST = {"num_hidden_layers": 512}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of a text model.

    model_type: that of transformers
    model: what is known of the type
    architecture: how llama.cpp runs it
    values: config.json with the keys of its text_config, and block_count: all layers
    draft_layers: how many of these predict further tokens
    pooling: how the vectors of a text's tokens become one, of gguf.PoolingType; None if that is not known
    """

    model_type: str
    model: ModelDescription
    architecture: Architecture
    values: Mapping[str, Any]
    draft_layers: int = 0
    pooling: str | None = None

    @property
    def embeds(self) -> bool:
        """Whether the vectors of tokens are what is wanted of it, and it needs no head."""
        return self.architecture.encoder or self.pooling is not None

    def get(self, key: str) -> Any:
        """Return a value; the default of transformers, or else None, for a key that is absent."""
        names = () if key in self.values else OTHER_NAMES.get(key, ())
        other = next((self.values[name] for name in names if self.values.get(name) is not None), None)
        return stated_or_default(self.values, self.model, key) if other is None else other

    def number(self, expression: str) -> int:
        """Return the positive whole number of a key, or of an expression of keys as in Setting.key.

        Raises ExportError if there is none.
        """
        total = 0
        for term in expression.split(" + "):
            product, *divisors = term.split(" / ")
            value = math.prod(map(self._whole, product.split(" * ")))
            divisor = math.prod(map(self._whole, divisors))
            if value % divisor:
                raise self.refusal(f"expected a whole number as {term}, found {value} / {divisor}")
            total += value // divisor
        return total

    def _whole(self, key: str) -> int:
        if key.isdigit():
            return int(key)
        value, most = self.get(key), MOST.get(key, MOST_OF_ANY)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):  # one for each layer
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(f"expected a positive number as {key}, found {value!r}")
        if value > most:
            raise self.refusal(f"expected at most {most} as {key}, found {value}")
        return value

    def number_of(self, parameter: str, otherwise: int) -> int:
        """Return a hyper-parameter of the file, or `otherwise` if it is absent or 0.

        Raises ExportError if it is not a number.
        """
        key = next((setting.key for setting in self.architecture.settings if setting.parameter == parameter), "")
        return self.number(key) if self.get(key) else otherwise

    def real(self, key: str) -> float:
        """Return a positive number. Raises ExportError if there is none."""
        return self.positive(self.get(key), key)

    def numbers(self, key: str) -> list[float]:
        """Return a number for each layer, 0 for those without one. Raises ExportError for anything else."""
        values, layers = self.get(key), self.number("num_hidden_layers")
        fitting = isinstance(values, list) and len(values) >= layers  # those that predict further tokens may follow
        if not fitting or not all(value in (None, 0) or is_positive(value) for value in values):
            raise self.refusal(f"expected a number for each of {layers} layers as {key}, found {values!r:.80}")
        return [float(value or 0) for value in [*values, *[0] * self.draft_layers][: layers + self.draft_layers]]

    def product(self, expression: str) -> float:
        """Return the product of keys as in Scaled.by. Raises ExportError if one is no positive number."""
        result = 1.0
        for key in expression.split(" * "):
            name, _, place = key.partition(".")
            value = self.get(name)
            if place and isinstance(value, list | tuple) and len(value) > int(place):
                value = value[int(place)]
            result *= self.positive(value, key)
        return result

    def truth(self, expression: str) -> bool:
        """Return a truth value, or whether "key = text" holds. Raises ExportError if it is none."""
        key, equals, text = expression.partition(" = ")
        value = self.get(key)
        if equals:
            return bool(value == text)
        if not isinstance(value, bool):
            raise self.refusal(f"expected true or false as {key}, found {value!r}")
        return value

    def positive(self, value: Any, what: str) -> float:
        """Return a value that is a positive number. Raises ExportError if it is none."""
        if not is_positive(value):
            raise self.refusal(f"expected a positive number as {what}, found {value!r}")
        return float(value)

    def refusal(self, why: str) -> ExportError:
        """Return the error for a configuration that cannot be written."""
        reason = f"GGUF cannot hold this model of type {self.model_type}: {why}"
        return ExportError(reason, file=CONFIG_FILE, remedy=OTHERWISE)


def is_positive(value: Any) -> TypeGuard[float]:
    """Whether a value of a configuration is a finite number above zero."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def read_settings(config: Mapping[str, Any] | None, *, pooling: str | None = None) -> Settings:
    """Return the settings of a model that llama.cpp runs as transformers does. pooling: see Settings

    Raises ExportError if the architecture is not covered, or a value of the configuration is not.
    """
    config = config or {}
    values = restated(config)
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
    variants = model.llama_cpp.variants
    run = next((other for key, other in variants.items() if values.get(key) is True), model.llama_cpp)
    pooling = run.pooling or pooling
    settings = Settings(model_type=str(model_type), model=model, architecture=run, values=values, pooling=pooling)
    dense = run.dense
    if dense is not None and not _has_experts(settings):
        settings = replace(settings, architecture=dense)
    if (key := settings.architecture.period_key) and settings.get(key) is None:
        values[key] = settings.architecture.window_period
    _check_types(settings, config)
    _check_values(settings, config)
    _check_layers(settings)
    values |= _sizes_of_heads(settings)
    if settings.get("block_auto_adjust_ff_dim"):
        values["intermediate_size"] = _adjusted_width(settings)
    if run.first_position:
        values["max_position_embeddings"] = settings.number("max_position_embeddings") - unused_positions(settings)
    return settings


def unused_positions(settings: Settings) -> int:
    """Return how many rows of the embeddings of positions come before that of the first token."""
    return 1 + settings.number(settings.architecture.first_position)


def _has_experts(settings: Settings) -> bool:
    types = settings.get("layer_types")
    if "moe" in settings.architecture.layer_types:  # layers of experts and nothing else
        return isinstance(types, list) and "moe" in types
    return bool(settings.get("num_experts"))


def _sizes_of_heads(settings: Settings) -> dict[str, int]:
    """Return those that the configuration leaves out. Raises ExportError if llama.cpp takes no others than these."""
    heads = settings.number("num_attention_heads")
    width = settings.number("hidden_size") // heads
    computed = {"num_key_value_heads": heads, "head_dim": width}
    computed |= {f"global_{key}": settings.get(key) or value for key, value in computed.items()}
    if not settings.architecture.free_head_dim and width * heads != settings.number("hidden_size"):
        raise settings.refusal(f"hidden_size {settings.number('hidden_size')} is not a multiple of the {heads} heads")
    if not settings.architecture.free_head_dim and settings.get("head_dim") not in (None, width):
        raise settings.refusal(f"llama.cpp computes it with head_dim {width} only, found {settings.get('head_dim')}")
    return {key: value for key, value in computed.items() if settings.get(key) is None}


def _adjusted_width(settings: Settings) -> int:
    """Return the width of LFM 2's MLP, of which the configuration states 3/2, before it is rounded up."""
    stated = settings.number("block_ff_dim" if settings.get("block_ff_dim") else "intermediate_size")
    multiple = settings.number("block_multiple_of")
    width = int(settings.real("block_ffn_dim_multiplier") * int(2 * stated / 3))
    return -(-width // multiple) * multiple


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
    _check_layer_types(settings)
    if not isinstance(settings.get("no_rope_layers"), list | None):
        raise settings.refusal(f"expected a list as no_rope_layers, found {settings.get('no_rope_layers')!r}")


def _check_layer_types(settings: Settings) -> None:
    layers, known = settings.number("num_hidden_layers"), settings.architecture.layer_types
    types = settings.get("layer_types")
    fitting = isinstance(types, list) and len(types) == layers and all(layer in [*known] for layer in types)
    if types is not None and not fitting:
        expected = " or ".join(sorted(known))
        raise settings.refusal(f"expected {expected} for each of {layers} layers as layer_types, found {types!r:.80}")
    if missing := settings.architecture.needed_types.difference(types or ()):
        raise settings.refusal(f"llama.cpp stops without any layer of the kind {' and '.join(sorted(missing))}")
    key = settings.architecture.period_key
    if key and layer_types(settings) != layer_types(replace(settings, values={**settings.values, "layer_types": None})):
        raise settings.refusal(f"llama.cpp has full attention in every {settings.number(key)}th layer only")
    kind, first = settings.architecture.with_experts, settings.number_of("leading_dense_block_count", 0)
    if kind and [of == kind for of in layer_types(settings)] != sparse_layers(settings):
        raise settings.refusal(f"llama.cpp has {kind} in all layers behind the first {first}, and no others")
    mlps = settings.get("mlp_layer_types")
    if mlps is not None and mlps != ["sparse" if sparse else "dense" for sparse in sparse_layers(settings)]:
        raise settings.refusal(
            f"llama.cpp has experts in all layers behind the first few, and mlp_layer_types is {mlps!r:.80}"
        )
    stated = settings.get("moe_layers")
    if stated is not None and stated != [layer for layer, sparse in enumerate(sparse_layers(settings)) if sparse]:
        raise settings.refusal(
            f"llama.cpp has experts in every interleave_moe_layer_step-th layer, and moe_layers is {stated!r:.80}"
        )


def layer_types(settings: Settings) -> list[str]:
    """Return the kind of each layer, as transformers names it."""
    types = settings.get("layer_types")
    if types:
        return list(types)
    architecture = settings.architecture
    if architecture.period_key:
        (other,) = architecture.layer_types - {FULL, SLIDING}
        return [other if keeps else FULL for keeps in _all_but_each(settings, settings.number(architecture.period_key))]
    return [SLIDING if windowed else FULL for windowed in windowed_layers(settings)]


def layer_kinds(settings: Settings) -> list[str]:
    """Return what distinguishes the tensors of layers: their types, experts, and whether keys are those of others."""
    layers = settings.number("num_hidden_layers")
    own = layers - (settings.number("num_kv_shared_layers") if settings.get("num_kv_shared_layers") else 0)
    kinds = [
        f"{kind}{' sparse' if sparse else ''}{'' if layer < own else ' shared'}"
        for layer, (kind, sparse) in enumerate(zip(layer_types(settings), sparse_layers(settings), strict=True))
    ]
    return kinds + ["draft"] * settings.draft_layers


def sparse_layers(settings: Settings) -> list[bool]:
    """Return for each layer whether it has experts, of a model in which some have."""
    first = settings.number_of("leading_dense_block_count", 0)
    step = settings.number_of("interleave_moe_layer_step", 1)
    return [layer >= first and (layer + 1) % step == 0 for layer in range(settings.number("num_hidden_layers"))]


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
            raise settings.refusal(f"llama.cpp computes it with {key} {expected} only, found {value!r}")
    for one, other in architecture.equal:
        if settings.number(one) != settings.number(other):
            raise settings.refusal(
                f"llama.cpp computes it with equal {one} and {other} only, found {settings.number(one)} and "
                f"{settings.number(other)}"
            )
    for key, factor in architecture.multiples.items():
        if settings.number(key) % factor:
            raise settings.refusal(f"llama.cpp needs a multiple of {factor} as {key}, found {settings.number(key)}")
    scalar = settings.get("query_pre_attn_scalar")
    if scalar is not None and scalar != (divisor := _scalar(settings)):
        raise settings.refusal(f"llama.cpp computes it with query_pre_attn_scalar {divisor} only, found {scalar}")


def _check_layers(settings: Settings) -> None:
    """Raise ExportError if llama.cpp would compute some layers otherwise."""
    architecture, layers = settings.architecture, settings.number("num_hidden_layers")
    for key, without in architecture.layers_without.items():
        if (settings.get(key) is None) != (layers in without):
            but = " or ".join(map(str, without))
            raise settings.refusal(
                f"llama.cpp expects {key} of all models but those of {but} layers, found {settings.get(key)} with "
                f"{layers}"
            )
    known = architecture.layers_with_windows
    if known is not None and any(windowed_layers(settings)) and layers != known:
        raise settings.refusal(f"llama.cpp has sliding windows for {known} layers only, and it has {layers}")
    windows_only = Trait.ROTATES_WINDOWS_ONLY in settings.model.traits
    if architecture.windows == LAYERS and windows_only and known is None and not any(windowed_layers(settings)):
        raise settings.refusal("llama.cpp computes it with a sliding window in some layers only, found none")
    period = architecture.unrotated_period
    if period and _rotated_layers(settings) != _all_but_each(settings, period):
        raise settings.refusal(f"llama.cpp computes every {period}th layer without rotary embeddings")


def _scalar(settings: Settings) -> int:
    """The number by whose root llama.cpp divides the queries of Gemma."""
    if settings.get("num_hidden_layers") == settings.architecture.layers_of_27b:
        return settings.number("hidden_size") // settings.number("num_attention_heads")
    return settings.number("head_dim")


def _all_but_each(settings: Settings, period: int) -> list[bool]:
    """True for all layers but the last of each period."""
    return [(layer + 1) % period != 0 for layer in range(settings.number("num_hidden_layers"))]


def _rotated_layers(settings: Settings) -> list[bool]:
    """Whether each layer has rotary embeddings, in the configurations of SmolLM 3."""
    listed = settings.get("no_rope_layers")
    if listed:
        return [bool(entry) for entry in listed]
    return _all_but_each(settings, settings.get("no_rope_layer_interval") or settings.architecture.unrotated_period)


def ignored_window(settings: Settings) -> int | None:
    """Return the least window of attention of a model for which llama.cpp has none; None if texts are never longer."""
    if settings.architecture.windows == LAYERS or settings.architecture.encoder:
        return None
    least = min((window for window in windows(settings.values) if window is not None), default=None)
    return least if least is not None and least < settings.number("max_position_embeddings") else None


def windowed_layers(settings: Settings) -> list[bool]:
    """Return for each layer whether its attention is over a sliding window, of the architectures that have both."""
    if settings.architecture.windows != LAYERS:
        return [False] * settings.number("num_hidden_layers")
    types = settings.get("layer_types")
    period = settings.get("sliding_window_pattern") or settings.architecture.window_period
    if not types and not period:
        raise settings.refusal("expected the kind of each layer as layer_types, found none")
    windowed = [layer == SLIDING for layer in types] if types else _all_but_each(settings, period)
    if any(windowed) and not settings.get("sliding_window"):
        raise settings.refusal(
            f"some of its layers have a window, and sliding_window is {settings.get('sliding_window')}"
        )
    return windowed


def settings_of(architecture: Architecture) -> list[Setting]:
    """Return the hyper-parameters of a file."""
    stated = (*SETTINGS, architecture.norm, *architecture.settings)
    return list({setting.parameter: setting for setting in stated}.values())


def value_of(setting: Setting, settings: Settings) -> Any:
    """Return the value of a hyper-parameter: one, or one for each layer."""
    if setting.truth:
        return settings.truth(setting.key)
    if setting.listed:
        return [value if setting.real else int(value) for value in settings.numbers(setting.key)]
    value = settings.real(setting.key) if setting.real else settings.number(setting.key)
    if setting.of:
        return getattr(gguf_package(), setting.of)(value)
    if not setting.only:
        return value
    other = settings.number(setting.other) if setting.other else 0
    return [value if re.fullmatch(setting.only, kind) else other for kind in layer_kinds(settings)]
