"""The configuration of a text model, read with the defaults of its type, and the kinds of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from pqweights.errors import ExportError
from pqweights.models.description import ModelDescription, stated_or_default
from pqweights.models.llama_cpp import FULL, SLIDING, Architecture, Check, Factor, Size

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

    def number(self, size: Size) -> int:
        """Return the whole number of a key, which must be positive, or what is computed from such numbers.

        Raises ExportError if there is none.
        """
        if isinstance(size, int):
            return size
        if isinstance(size, str):
            return self._whole(size)
        value = size(self._whole)
        if not isinstance(value, int) and value.denominator > 1:
            raise self.refusal(f"expected a whole number, found {value} as a size")
        return int(value)

    def _whole(self, key: str) -> int:
        value, most = self.get(key), MOST.get(key, MOST_OF_ANY)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):  # one for each layer
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(f"expected a positive number as {key}, found {value!r}")
        if value > most:
            raise self.refusal(f"expected at most {most} as {key}, found {value}")
        return value

    def number_of(self, parameter: str, otherwise: int) -> int:
        """Return a hyper-parameter of the file that is a key, or `otherwise` if it is absent or 0.

        Raises ExportError if it is not a number.
        """
        key = next((setting.name for setting in self.architecture.settings if setting.parameter == parameter), "")
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

    def factor(self, factor: Factor) -> float:
        """Return a multiplier. Raises ExportError if it comes from anything but positive numbers."""
        return self._item(factor) if isinstance(factor, str) else factor(self._item)

    def _item(self, key: str, index: int | None = None) -> float:
        value = self.get(key)
        if index is not None and isinstance(value, list | tuple) and len(value) > index:
            value = value[index]
        return self.positive(value, key)

    def truth(self, key: str) -> bool:
        """Return a truth value. Raises ExportError if it is none."""
        value = self.get(key)
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
        return ExportError(reason, file="config.json", remedy=OTHERWISE)


def is_positive(value: Any) -> TypeGuard[float]:
    """Whether a value of a configuration is a finite number above zero."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def unused_positions(settings: Settings) -> int:
    """Return how many rows of the embeddings of positions come before that of the first token."""
    return 1 + settings.number(settings.architecture.first_position)


def all_but_each(settings: Settings, period: int) -> list[bool]:
    """True for all layers but the last of each period."""
    return [(layer + 1) % period != 0 for layer in range(settings.number("num_hidden_layers"))]


def windowed_layers(settings: Settings) -> list[bool]:
    """Return for each layer whether its attention is over a sliding window, of the architectures that have both."""
    windows = settings.architecture.windows
    if windows is None:
        return [False] * settings.number("num_hidden_layers")
    types = settings.get("layer_types")
    period = settings.get("sliding_window_pattern") or windows.period
    if not types and not period:
        raise settings.refusal("expected the kind of each layer as layer_types, found none")
    windowed = [layer == SLIDING for layer in types] if types else all_but_each(settings, period)
    if any(windowed) and not settings.get("sliding_window"):
        raise settings.refusal(
            f"some of its layers have a window, and sliding_window is {settings.get('sliding_window')}"
        )
    return windowed


def layer_types(settings: Settings) -> list[str]:
    """Return the kind of each layer, as transformers names it."""
    types = settings.get("layer_types")
    return list(types) if types else [SLIDING if windowed else FULL for windowed in windowed_layers(settings)]


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


def needs_windows(settings: Settings) -> str:
    """Check a type of which layers with full attention have no rotary embeddings if others have a window."""
    if any(windowed_layers(settings)):
        return ""
    return "llama.cpp computes it with a sliding window in some layers only, found none"


def each_fourth_unrotated(settings: Settings) -> str:
    """Check that one layer in four has no rotary embeddings."""
    listed, every = settings.get("no_rope_layers"), settings.get("no_rope_layer_interval") or 4
    rotated = [bool(entry) for entry in listed] if listed else all_but_each(settings, every)
    return (
        "" if rotated == all_but_each(settings, 4) else "llama.cpp computes every 4th layer without rotary embeddings"
    )


def multiple_of(factor: int, key: str) -> Check:
    """Return a check of a number."""

    def check(settings: Settings) -> str:
        number = settings.number(key)
        return f"llama.cpp needs a multiple of {factor} as {key}, found {number}" if number % factor else ""

    return check


def needs_kinds(kinds: frozenset[str]) -> Check:
    """Return a check that there are layers of some kinds."""

    def check(settings: Settings) -> str:
        missing = sorted(kinds.difference(settings.get("layer_types") or ()))
        return f"llama.cpp stops without any layer of the kind {' and '.join(missing)}" if missing else ""

    return check


def chooses(tokens: Size, otherwise: str = "") -> Callable[[Settings], str]:
    """Return the note on layers that attend to some tokens, which are chosen by scores. tokens: how many"""

    def note(settings: Settings) -> str:
        return (
            f"results are those of transformers for texts of at most {settings.number(tokens)} tokens. In longer ones, "
            "each layer attends to that many tokens with the highest scores; llama.cpp compares these scores in half "
            f"precision, so it may choose other tokens{otherwise}"
        )

    return note
