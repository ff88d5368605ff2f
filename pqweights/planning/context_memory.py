"""What a model keeps of the tokens that it has read, by its configuration: keys and values, or latents.

States of layers without attention do not grow with the context, and are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqweights.checkpoint.positions import kept_tokens
from pqweights.models import described
from pqweights.models.description import stated_or_default

# What the parts of models call the configuration of the part that generates text.
_TEXT = ("thinker_config", "text_config", "llm_config", "language_config", "decoder", "attn_config")
# Names of the same number, in the configurations of different models; the first that is there counts.
_LAYER_COUNT = ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "decoder_attention_heads", "n_head", "n_heads", "num_heads")
_SHARED_HEADS = ("num_key_value_heads", "kv_n_heads", "num_kv_heads", "multi_query_group_num")
_HEAD_SIZE = ("attention_head_dim", "head_dim", "d_kv", "kv_channels")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "model_max_length")
_LISTS = ("layer_types", "layers_block_type", "layer_block_type", "hybrid_override_pattern")
# Kinds of layers that keep no keys and values.
_WITHOUT = frozenset({"linear_attention", "mamba", "M", "conv", "recurrent", "moe", "mlp", "E", "-"})

_STATES_ALONE = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")

VALUE_BYTES = 2  # keys and values, in BF16 or F16
# A number in a configuration that is larger is none, and a list of layers is no longer.
_MOST, _MOST_LAYERS = 1 << 32, 4096
DEFAULT_CONTEXT = 8192


def context_bytes(config: Mapping[str, Any] | None, context: int) -> int:
    """Return the size of the keys and values of a context, in tokens; 0 if the configuration does not tell."""
    values = _text_values(config or {})
    kinds, kept = _kinds(values), dict(enumerate(kept_tokens(values)))
    # The last layers of Gemma 3n and 4 use the keys and values of earlier ones.
    layers = range(len(kinds) - _number(values, ("num_kv_shared_layers",)))
    tokens = sum(min(context, kept.get(n) or context) for n in layers if kinds[n] not in _WITHOUT)
    return VALUE_BYTES * tokens * _per_token(values)


def _kinds(values: Mapping[str, Any]) -> list[str]:
    """Return what configurations call the kind of each layer, "" for one with attention; nothing if that is unknown."""
    listed = next((values[key] for key in _LISTS if isinstance(values.get(key), list | str) and values[key]), ())
    layers = _number(values, _LAYER_COUNT) or len(listed)
    if layers > _MOST_LAYERS or values.get("model_type") in _STATES_ALONE:
        return []
    if len(listed) == layers:
        return list(map(str, listed))
    chosen = values.get("attn_layer_indices")
    if period := _number(values, ("attn_layer_period", "full_attention_interval")):
        first = values.get("attn_layer_offset")
        chosen = range(layers)[first if first in range(period) else period - 1 :: period]
    return ["" if not isinstance(chosen, list | range) or n in chosen else "mamba" for n in range(layers)]


def most_context(config: Mapping[str, Any] | None) -> int:
    """Return the longest context that a model takes, in tokens; 0 if that is not known."""
    return _number(_text_values(config or {}), _CONTEXT)


def layers_and_width(config: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the number of layers of the part that generates text, and the width of its hidden states; 0 if unknown."""
    values = _text_values(config or {})
    return _number(values, _LAYER_COUNT), _number(values, _WIDTH)


def _text_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration, with those of the part that generates text in front."""
    values = dict(config)
    for key in _TEXT:
        if isinstance(config.get(key), dict):
            inner = _text_values(config[key])
            values |= {name: value for name, value in inner.items() if value not in (None, "")}
    return values


def _number(values: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the first number of these names, or a default of transformers that is known; 0 if there is none."""
    model = described(values.get("model_type"))
    for name in sorted(names, key=lambda name: name not in values):  # what is stated comes before defaults
        value = stated_or_default(values, model, name)
        if isinstance(value, list) and value:  # a number for each layer
            value = max((item for item in value if isinstance(item, int)), default=None)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST:
            return value
    return 0


def _per_token(values: Mapping[str, Any]) -> int:
    """Return how many values a layer with attention keeps of a token: a key and a value for each head, or a latent."""
    if latent := _number(values, ("kv_lora_rank",)):
        # Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); an indexer of sparse attention has keys as well.
        return latent + _number(values, ("qk_rope_head_dim",)) + _number(values, ("index_head_dim",))
    heads = _number(values, _HEADS)
    size = _number(values, _HEAD_SIZE) or (_number(values, _WIDTH) // heads if heads else 0)
    shared = _number(values, _SHARED_HEADS) or heads
    if values.get("multi_query") is True and not values.get("new_decoder_architecture"):
        shared = 1
    return 2 * shared * size
