"""What a model keeps of the tokens that it has read, from its configuration: keys and values, latents, states.

docs/memory.md has the formulas; tests compare them with the caches of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pqweights.checkpoint.models import described
from pqweights.checkpoint.models.description import stated_or_default
from pqweights.checkpoint.positions import kept_tokens

# What the parts of models call the configuration of the part that generates text.
_TEXT = ("thinker_config", "text_config", "llm_config", "language_config", "decoder", "attn_config")
# Names of the same number, in the configurations of different models; the first that is there counts.
_LAYER_COUNT = ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "decoder_attention_heads", "n_head", "n_heads", "num_heads")
_SHARED_HEADS = ("num_key_value_heads", "kv_n_heads", "num_kv_heads", "multi_query_group_num")
_HEAD_SIZE = ("attention_head_dim", "head_dim", "d_kv", "kv_channels")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_INNER = ("intermediate_size", "decoder_ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_VOCABULARY = ("vocab_size",)
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "model_max_length")

ATTENTION, STATE, BOTH, NOTHING = "attention", "state", "state and attention", "nothing"
# What configurations call kinds of layers; any other kind is counted as one with attention.
KINDS = {
    "linear_attention": STATE, "mamba": STATE, "M": STATE, "conv": STATE, "recurrent": STATE, "hybrid": BOTH,
    "moe": NOTHING, "mlp": NOTHING, "E": NOTHING, "-": NOTHING,
}  # fmt: skip
_LISTS = ("layer_types", "layers_block_type", "layer_block_type", "hybrid_override_pattern")
STATES_ALONE = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"})
# What class names of models end with that generate text.
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForImageTextToText")

VALUE_BYTES = 2  # keys and values, in BF16 or F16
STATE_BYTES = 4  # states, in F32
# A number in a configuration that is larger is none, and a list of layers is no longer.
_MOST, _MOST_LAYERS = 1 << 32, 4096
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class TextSizes:
    """The sizes of the part of a model that generates text; 0 for one that is not known.

    width: of the vectors between layers, or of all heads together if that is more
    inner: of the vectors within a layer
    vocabulary: the number of logits
    most_context: the longest context, in tokens
    """

    width: int
    inner: int
    vocabulary: int
    most_context: int


@dataclass(frozen=True, kw_only=True)
class ContextMemory:
    """What a model keeps of its context.

    per_token: the values for each token of the layers that see the whole context
    windows: for other layers, the values for each token, and the most tokens
    state: the values that do not depend on the context
    notes: what could not be counted
    """

    per_token: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    state: int = 0
    notes: tuple[str, ...] = ()

    def bytes(self, context: int, ahead: int = 0) -> int:
        """Return its size for a context. ahead: the tokens that are read at a time, which a window holds as well"""
        kept = self.per_token * context + sum(size * min(context, most + ahead) for size, most in self.windows)
        return VALUE_BYTES * kept + STATE_BYTES * self.state


def text_sizes(config: Mapping[str, Any] | None) -> TextSizes:
    """Return the sizes of the part of a model that generates text."""
    values = _text_values(config or {})
    heads, width = _number(values, _HEADS), _number(values, _WIDTH)
    inner = _number(values, _INNER) or 4 * width
    experts = _number(values, ("moe_intermediate_size",)) * _number(values, ("num_experts_per_tok", "moe_top_k"))
    return TextSizes(
        width=max(width, heads * _number(values, _HEAD_SIZE)),
        inner=max(inner, experts),
        vocabulary=_number(values, _VOCABULARY),
        most_context=_number(values, _CONTEXT),
    )


def context_memory(config: Mapping[str, Any] | None) -> ContextMemory:
    """Return what a model of a configuration keeps; nothing, with a note, if it does not say enough."""
    config = config or {}
    named, own_code = config.get("architectures"), config.get("auto_map")
    generates = isinstance(own_code, dict) and "AutoModelForCausalLM" in own_code
    if isinstance(named, list) and named and not generates and not str(named[0]).endswith(_GENERATES):
        return ContextMemory(notes=(f"{named[0]} does not generate text: it keeps nothing of its context",))
    values = _text_values(config)
    kinds, per_token, kept = _kinds(values), _per_token(values), dict(enumerate(kept_tokens(values)))
    if not kinds:
        return ContextMemory(notes=("config.json does not say how many layers it has: its cache is not counted",))
    full, state, windows, notes = 0, 0, [], []
    # The last layers of Gemma 3n and 4 use the keys and values of earlier ones.
    for layer, kind in enumerate(kinds[: len(kinds) - _number(values, ("num_kv_shared_layers",))]):
        window = kept.get(layer) if kind == ATTENTION else None
        size = _per_token({**values, **_of_layer(values, layer, window)}) if kind != STATE else 0
        if window is not None:
            windows.append((size, window))
        elif kind in (ATTENTION, BOTH):
            full += size
        if kind in (STATE, BOTH):
            state += _state(values)
    if not per_token and {*kinds} - {STATE, NOTHING}:
        notes.append("config.json does not say how wide its keys and values are: they are not counted")
    if not state and {*kinds} & {STATE, BOTH}:
        notes.append("the state of its layers without attention is not counted")
    return ContextMemory(per_token=full, windows=tuple(windows), state=state, notes=tuple(notes))


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
    sides = 2 if values.get("is_encoder_decoder") is True else 1  # also those of the encoder's outputs
    return sides * shared * (size + (_number(values, ("v_head_dim",)) or size))


def _kinds(values: Mapping[str, Any]) -> list[str]:
    """Return what each layer keeps; an empty list if it is not known how many there are."""
    listed = next((values[key] for key in _LISTS if isinstance(values.get(key), list | str) and values[key]), ())
    layers = _number(values, _LAYER_COUNT) or len(listed)
    if layers > _MOST_LAYERS:
        return []
    if len(listed) == layers:
        return [KINDS.get(str(kind), ATTENTION) for kind in listed]
    numbers = range(layers)
    if values.get("model_type") in STATES_ALONE:
        return [STATE] * layers
    if "mamba_d_ssm" in values:  # Falcon H1 has both in each layer
        return [BOTH] * layers
    if isinstance(cycle := values.get("block_types"), list) and cycle:  # Recurrent Gemma
        return [ATTENTION if cycle[layer % len(cycle)] == "attention" else STATE for layer in numbers]
    if isinstance(indices := values.get("attn_layer_indices"), list):
        return [ATTENTION if layer in indices else STATE for layer in numbers]
    if period := _number(values, ("attn_layer_period", "full_attention_interval")):
        offset = values.get("attn_layer_offset", period - 1)
        return [ATTENTION if layer % period == offset else STATE for layer in numbers]
    return [ATTENTION] * layers


def _of_layer(values: Mapping[str, Any], layer: int, window: int | None) -> dict[str, Any]:
    """Return the sizes in which a layer differs from others: those of Gemma 4 that see the whole context."""
    stated = values.get("per_layer_config")
    own = stated.get(str(layer)) if isinstance(stated, dict) else None
    if isinstance(own, dict) or window is not None:
        return own if isinstance(own, dict) else {}
    of_all = {
        "head_dim": values.get("global_head_dim"),
        "num_key_value_heads": values.get("num_global_key_value_heads"),
    }
    return {name: size for name, size in of_all.items() if size is not None}


def _state(values: Mapping[str, Any]) -> int:
    """Return how many values a layer without attention keeps, whatever the context; 0 if that is not known."""
    width = _number(values, _WIDTH)
    kernel = _number(values, ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv1d_width"))
    if heads := _number(values, ("linear_num_value_heads", "linear_num_heads")):  # gated delta net
        size = _number(values, ("linear_value_head_dim", "linear_head_dim"))
        keys = _number(values, ("linear_num_key_heads", "linear_num_heads"))
        key_size = _number(values, ("linear_key_head_dim", "linear_head_dim"))
        return heads * size * key_size + (2 * keys * key_size + heads * size) * kernel
    if (taps := _number(values, ("conv_L_cache",))) or _number(values, ("lru_width",)):  # LFM 2, Recurrent Gemma
        return width * taps or _number(values, ("lru_width",)) * kernel
    if size := _number(values, ("mamba_d_state", "ssm_state_size", "state_size")):  # Mamba, Mamba 2
        heads = _number(values, ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"))
        inner = heads * _number(values, ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"))
        inner = _number(values, ("mamba_d_ssm",)) or inner or (_number(values, ("mamba_expand", "expand")) or 2) * width
        groups = _number(values, ("mamba_n_groups", "mamba_ngroups", "n_groups")) if heads else 0
        return inner * size + (inner + 2 * groups * size) * kernel
    if values.get("model_type") == "minimax":  # lightning attention
        return _number(values, _HEADS) * _number(values, _HEAD_SIZE) ** 2
    return 0
