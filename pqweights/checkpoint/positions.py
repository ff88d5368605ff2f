"""How a model knows the positions of tokens, resolved from config.json as transformers does: rotary embeddings, and
which layers attend over a sliding window.

Configurations state these under keys of many versions, twice, or not at all. All targets read them here. The rules are
those of transformers' modeling_rope_utils.py and of its configuration classes; tests compare with both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.errors import ExportError
from pqweights.models import described, has_trait, text_config
from pqweights.models import rotary as known
from pqweights.models.llama_cpp import FULL, SLIDING
from pqweights.models.rotary import DEFAULT_BASE
from pqweights.models.traits import Trait

Doubles = npt.NDArray[np.float64]
# Names that older configurations have for kinds of scaling.
OLD_KINDS = {"su": "longrope", "none": "default", "mrope": "default"}
# More layers than any model has: what a configuration claims is not counted further.
MOST_LAYERS = 512
# Types whose configurations list the layers with rotary embeddings as no_rope_layers, those with them as 1.
LISTED = ("llama4_text", "smollm3")
# Layers of this kind attend to the tokens of their chunk: of Llama 4, all that have rotary embeddings.
CHUNKED = "chunked_attention"


def model_type_of(config: Mapping[str, Any] | None) -> str:
    """Return the type of the text model of a configuration; "" without any."""
    types = (part.get("model_type") for part in (text_config(config), config or {}))
    return next((name for name in types if isinstance(name, str)), "")


# --- rotary embeddings ---


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope_parameters of a configuration as transformers has them when it has read it.

    They are those of all layers, or by the kind of layers, for types whose kinds differ. Each has rope_type and
    rope_theta. {} for a type without rotary embeddings.

    Raises ExportError for what is not an object.
    """
    text, model_type = text_config(config), model_type_of(config)
    if model_type in known.WITHOUT:
        return {}
    if model_type in ("step3p5", "step3p7"):
        return _step(text, layer_types(config) or [])
    if model_type == "deepseek_v4":
        return _deepseek_v4(text)
    if model_type in known.BASES_BY_KIND:
        return {kind: _named(of, text, _share(text)) for kind, of in _by_kind(text, model_type).items()}
    absent = text.get("rope_parameters") is None
    stated = known.PARAMETERS.get(model_type, {}) if absent else _object(text, "rope_parameters")
    parameters = dict(_object(text, "rope_scaling") or stated)
    new_keys_alone = model_type in known.NEW_KEYS_ALONE
    kinds = parameters.keys() if new_keys_alone else parameters.keys() & (layer_types(config) or ())
    nested = {kind: value for kind, value in parameters.items() if kind in kinds and isinstance(value, dict)}
    if nested:
        defaults = _share(text) if new_keys_alone else _defaults(text, model_type)
        return {kind: _named(of, text, defaults) for kind, of in nested.items()}
    result = _named(parameters, text, _defaults(text, model_type))
    if model_type in known.FIRST_LENGTHS and result["rope_type"] in ("su", "yarn"):
        result["rope_type"] = "longrope"
    outer = text.get("original_max_position_embeddings", known.FIRST_LENGTHS.get(model_type))
    if outer is not None and result["rope_type"] in ("llama3", "yarn", "longrope"):
        result["original_max_position_embeddings"] = outer
    return result


def parameters_of(config: Mapping[str, Any], kind: str = FULL) -> dict[str, Any]:
    """Return the parameters of one kind of layers; {} if layers of that kind have no rotary embeddings."""
    parameters = rope_parameters(config)
    if "rope_type" in parameters:
        return parameters
    own: Mapping[str, Any] = parameters.get(kind) or next(iter(parameters.values()), {})
    return {**own}


def is_resolved(config: Mapping[str, Any]) -> bool:
    """Whether it is known how transformers resolves the positions of a model."""
    model_type = model_type_of(config)
    known_type = has_trait(model_type, Trait.EXAMINED) or described(model_type).llama_cpp is not None
    return known_type and model_type not in known.WITHOUT


def stated_once(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a configuration whose older and newer keys say the same of rotary embeddings: what transformers 5 reads.

    Other versions and runtimes read the one or the other. A configuration that does not contradict itself stays as it
    is, and one without an original length for its scaling gets it.
    """
    if config is None or not is_resolved(config):
        return config
    text, parameters = dict(text_config(config)), rope_parameters(config)
    new, old = _object(text, "rope_parameters"), _object(text, "rope_scaling")
    if "rope_type" not in parameters or not (new or old):  # by kinds of layers, which older versions do not know
        return config
    others = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if text.get(key) is not None}
    length = parameters.get("original_max_position_embeddings")
    lacks_length = length is not None and (old or new).get("original_max_position_embeddings") != length
    if not (new and old) and all(parameters.get(key) == value for key, value in others.items()) and not lacks_length:
        return config
    scaled = parameters["rope_type"] != "default" or "mrope_section" in parameters
    text |= {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    text |= {"rope_parameters": parameters, "rope_scaling": parameters if scaled else None}
    return {**config, "text_config": text} if text_config(config) is not config else text


def _object(text: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = text.get(key)
    if not isinstance(value, dict | None):
        raise ExportError(f"config.json: expected an object as {key}, found {value!r:.80}")
    return value or {}


def _defaults(text: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the base, and the rotated share of heads, that hold where the parameters do not state them."""
    base_key = known.OTHER_BASE_KEYS.get(model_type, "rope_theta")
    share_key = known.OTHER_SHARE_KEYS.get(model_type, "partial_rotary_factor")
    base, share = text.get(base_key), text.get(share_key, known.ROTATED_SHARES.get(model_type))
    head, rotated = _whole(text, "head_dim", 128), _whole(text, "rotary_dim", 0)
    if model_type == "minimax_m2" and head and rotated:
        share = rotated / head
    rotary, plain = _whole(text, "qk_rope_head_dim", 64), _whole(text, "qk_nope_head_dim", 64)
    if model_type == "mistral4" and not _object(text, "rope_scaling") and rotary:
        share = rotary / (rotary + plain)
    result = {"rope_theta": known.BASES.get(model_type, DEFAULT_BASE) if base is None else base}
    return result if share is None else result | {"partial_rotary_factor": share}


def _share(text: Mapping[str, Any]) -> dict[str, Any]:
    share = text.get("partial_rotary_factor")
    return {} if share is None else {"partial_rotary_factor": share}


def _named(parameters: Mapping[str, Any], text: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with what transformers adds to them: rope_type, and what is a matter of the model."""
    result = {**parameters}
    for key, value in defaults.items():
        result.setdefault(key, value)
    kind = str(result.get("rope_type") or result.get("type") or "default").lower()
    result["rope_type"] = OLD_KINDS.get(kind, kind)
    if result["rope_type"] in ("llama3", "yarn", "longrope"):
        length = text.get("max_position_embeddings")
        default = described(text.get("model_type")).defaults.get("max_position_embeddings")
        if result.get("original_max_position_embeddings") is None and (length or default) is not None:
            result["original_max_position_embeddings"] = length or default
    return result


def _by_kind(text: Mapping[str, Any], model_type: str) -> dict[str, dict[str, Any]]:
    """Return the parameters of types whose kinds of layers always differ."""
    stated, scaling = _object(text, "rope_parameters"), _object(text, "rope_scaling")
    result: dict[str, dict[str, Any]] = {}
    for kind, (key, base) in known.BASES_BY_KIND[model_type].items():
        own = {**(_object(stated, kind) or {"rope_type": "default"})}
        if kind == FULL or model_type in known.SCALED_ALIKE:
            own |= scaling
        outer = text.get(key) if key else None
        result[kind] = {"rope_theta": base if outer is None else outer} | own
    return result


def _deepseek_v4(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of layers that see single tokens, `main`, and of layers that see compressed ones, `compress`."""
    stated = _object(text, "rope_scaling") or _object(text, "rope_parameters")
    if all(isinstance(stated.get(kind), dict) for kind in ("main", "compress")):
        return {kind: _named(stated[kind], text, {}) for kind in ("main", "compress")}
    size, head = _whole(text, "qk_rope_head_dim", 64), _whole(text, "head_dim", 512)
    share = _share(text) or {"partial_rotary_factor": size / head if head and "qk_rope_head_dim" in text else 0.125}
    main = {"rope_type": "default", "rope_theta": text.get("rope_theta", DEFAULT_BASE)} | share
    compress = {**stated, "rope_theta": text.get("compress_rope_theta", 160000.0)} | share
    compress = _named(compress, text, {})
    if compress["rope_type"] == "yarn":
        compress.setdefault("attention_factor", 1.0)
    return {"main": main, "compress": compress}


def _step(text: Mapping[str, Any], types: list[str]) -> dict[str, Any]:
    """Return those of Step 3.5, which published configurations list layer by layer."""
    stated = _object(text, "rope_parameters")
    if stated and all(isinstance(stated.get(kind), dict) for kind in types):
        return {kind: _named(stated[kind], text, {"rope_theta": DEFAULT_BASE}) for kind in dict.fromkeys(types)}
    bases, shares = text.get("rope_theta", DEFAULT_BASE), text.get("partial_rotary_factors")
    result = {}
    for kind in dict.fromkeys(types):
        layer = types.index(kind)
        own: dict[str, Any] = {"rope_type": "default", "rope_theta": _entry(bases, layer)}
        if shares:
            own["partial_rotary_factor"] = _entry(shares, layer)
        scaling = _object(text, "rope_scaling") if kind == FULL else {}
        result[kind] = _named({**own, **scaling}, text, {})
    return result


def _entry(values: Any, layer: int) -> Any:
    """Return the value of a layer, of a list or of one for all."""
    if isinstance(values, list):
        return values[layer] if layer < len(values) else DEFAULT_BASE
    return values


# --- what the parameters mean ---


def frequencies(parameters: Mapping[str, Any], rotated: int, *, length: int, most: int) -> Doubles:
    """Return the frequencies of rotary embeddings: what transformers multiplies positions by, [rotated / 2].

    parameters: those of one kind of layers, resolved
    rotated: how many channels of a head are rotated; of proportional ones, all
    length: that of the text
    most: max_position_embeddings

    Raises ValueError, KeyError or TypeError for parameters with which transformers fails, too.
    """
    kind, base = parameters["rope_type"], float(parameters["rope_theta"])
    if kind == "dynamic":
        growth = parameters.get("alpha") or 1.0  # of HunYuan: fixed
        if not parameters.get("alpha") and length > most:
            growth = parameters["factor"] * length / most - (parameters["factor"] - 1)
        base *= growth ** (rotated / (rotated - 2))
    plain = base ** (-np.arange(0, rotated, 2) / rotated)
    if kind == "linear":
        factor: float = parameters["factor"]
        return plain / factor
    if kind == "yarn":
        return _yarn(parameters, plain, base, most)
    if kind == "longrope":  # LongRoPE (arXiv:2402.13753): factors for short texts and for long ones
        name = "long_factor" if length > parameters["original_max_position_embeddings"] else "short_factor"
        return plain / np.array(parameters[name], dtype=np.float64)
    if kind == "llama3":
        return plain / llama3_divisors(parameters, plain)
    if kind == "proportional":
        kept = int(parameters.get("partial_rotary_factor", 1.0) * rotated // 2)
        factor = parameters.get("factor", 1.0)
        return np.where(np.arange(rotated // 2) < kept, plain, 0) / factor
    return plain


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return what YaRN multiplies attention by. factor: that of the length. weight: mscale"""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def attention_factor(parameters: Mapping[str, Any], most: int) -> float:
    """Return what queries and keys are multiplied by: 1 but for YaRN and LongRoPE. most: max_position_embeddings"""
    if parameters["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or most / original
    if (stated := parameters.get("attention_factor")) is not None:
        return float(stated)
    if parameters["rope_type"] == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    own, every = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return yarn_scale(factor, own) / yarn_scale(factor, every) if own and every else yarn_scale(factor)


def _yarn(parameters: Mapping[str, Any], plain: Doubles, base: float, most: int) -> Doubles:
    """YaRN (arXiv:2309.00071)."""
    original, size = parameters["original_max_position_embeddings"], 2 * len(plain)
    factor: float = parameters.get("factor") or most / original
    bounds = [
        size * math.log(original / ((parameters.get(key) or turns) * 2 * math.pi)) / (2 * math.log(base))
        for key, turns in (("beta_fast", 32), ("beta_slow", 1))
    ]
    if parameters.get("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], size - 1)
    high += 0.001 if low == high else 0
    interpolated = np.clip((np.arange(len(plain)) - low) / (high - low), 0, 1)
    frequencies: Doubles = plain / factor * interpolated + plain * (1 - interpolated)
    return frequencies


def llama3_divisors(parameters: Mapping[str, Any], plain: Doubles) -> Doubles:
    """Return what Llama 3 divides each frequency by: 1 for high ones, `factor` for low ones."""
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, context = (float(parameters[key]) for key in keys)
    rotations = context * plain / (2 * math.pi)
    # The share of the frequency that stays; of Llama 4 both bounds are 1, and there is nothing between them.
    share = np.clip((rotations - low) / (high - low), 0, 1) if high > low else (rotations > high).astype(float)
    divisors: Doubles = 1 / ((1 - share) / factor + share)
    return divisors


# --- which layers see how much ---


def layer_types(config: Mapping[str, Any]) -> list[str] | None:
    """Return the kinds of attention of a model's layers as transformers names them; None if it has one kind alone."""
    text, model_type = text_config(config), model_type_of(config)
    count = _count(text, model_type)
    stated = text.get("layer_types")
    if isinstance(stated, list):
        kinds = [known.LEGACY_LAYER_TYPES.get(kind, kind) if isinstance(kind, str) else "" for kind in stated][:count]
        if model_type == "qwen4_exp_text":  # whose layers with full attention have an indexer
            return ["indexed_attention" if kind == FULL else kind for kind in kinds]
        return [*kinds[:-1], FULL] if model_type.startswith("gemma4") and kinds else kinds
    if model_type in known.UPPER_WINDOWS:
        first = _whole(text, "max_window_layers", known.UPPER_WINDOWS[model_type])
        window = _window(text, model_type)
        return [SLIDING if window is not None and n >= first else FULL for n in range(count)]
    if model_type == "qwen2_moe":
        first, window = _whole(text, "max_window_layers", 28), _window(text, model_type)
        return [SLIDING if window and (n + 1) % 2 and n < first else FULL for n in range(count)]
    if model_type == "smollm3":  # layers without rotary embeddings have the window
        window = _window(text, model_type)
        return [SLIDING if window is not None and not has_rope else FULL for has_rope in _rope_of_layers(text, count)]
    if model_type == "llama4_text":
        return [CHUNKED if has_rope else FULL for has_rope in _rope_of_layers(text, count)]
    if model_type in ("modernbert", "modernbert-decoder"):
        period = _whole(text, "global_attn_every_n_layers", 3)
        return [SLIDING if n % period else FULL for n in range(count)] if period else None
    if model_type in ("muse_glimmer_text", "muse_spark_text"):
        return [SLIDING if (count - 1 - n) % 4 else FULL for n in range(count)]
    if model_type == "mimo_v2_flash":
        return [FULL if n == 0 or (n + 1) % 6 == 0 else SLIDING for n in range(count)]
    if model_type in ("step3p5", "step3p7", "laguna", "mellum"):
        return [FULL] * count
    if model_type not in known.WINDOW_PERIODS:
        return None
    key = known.PERIOD_KEYS.get(model_type, "")
    pattern = text.get(key)
    period = _whole(text, key, known.WINDOW_PERIODS[model_type])
    if isinstance(pattern, str) and "G" in pattern:  # of EXAONE 4: LLLG
        period = 1 + pattern.index("G")
    if not period:
        return None
    kinds = [SLIDING if (n + 1) % period else FULL for n in range(count)]
    return [*kinds[:-1], FULL] if model_type.startswith("gemma4") and kinds else kinds


def windows(config: Mapping[str, Any]) -> list[int | None]:
    """Return for each layer how many tokens it attends to, itself included; None for all that come before it."""
    text, model_type = text_config(config), model_type_of(config)
    window = _window(text, model_type)
    if model_type in known.WINDOWS_EVERYWHERE:
        return [window] * _count(text, model_type)
    if model_type == "recurrent_gemma":
        return _recurrent_gemma(text, _count(text, model_type))
    kinds = layer_types(config)
    if kinds is None or (is_resolved(config) and model_type not in known.WINDOWS_BY_KIND):
        return [None] * _count(text, model_type)
    return [window if kind == SLIDING else None for kind in kinds]


def kept_tokens(config: Mapping[str, Any]) -> list[int | None]:
    """Return for each layer how many tokens its cache keeps, those of its window or of its chunk; None for all."""
    kept, chunk = windows(config), _whole(text_config(config), "attention_chunk_size", 8192)
    for layer, kind in enumerate(layer_types(config) or ()):
        if kind == CHUNKED and chunk:
            kept[layer] = chunk
    return kept


def _window(text: Mapping[str, Any], model_type: str) -> int | None:
    window = text.get("sliding_window", known.DEFAULT_WINDOWS.get(model_type))
    if model_type in known.OPTIONAL_WINDOWS and text.get("use_sliding_window") is not True:
        return None
    if model_type == "mimo_v2_flash" and isinstance(own := text.get("sliding_window_size"), int):
        window = 1 + own  # the token itself is not counted
    return window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None


def _whole(text: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number; 0 for what is none."""
    value = text.get(key, default)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _count(text: Mapping[str, Any], model_type: str) -> int:
    defaults = described(model_type).defaults
    keys = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    key = next((key for key in keys if text.get(key) is not None), keys[0])
    return min(_whole(text, key, defaults.get("num_hidden_layers", 0)), MOST_LAYERS)


def _recurrent_gemma(text: Mapping[str, Any], count: int) -> list[int | None]:
    """Layers with attention have a window, in a cycle with recurrent ones."""
    cycle = text.get("block_types", ["recurrent", "recurrent", "attention"])
    if not isinstance(cycle, list) or not cycle:
        return [None] * count
    window = _whole(text, "sliding_window" if text.get("sliding_window") else "attention_window_size", 2048)
    return [window if cycle[n % len(cycle)] == "attention" else None for n in range(count)]


def rotated_layers(config: Mapping[str, Any]) -> list[bool] | None:
    """Return for each layer whether it has rotary embeddings; None for types whose layers do not differ in it."""
    text, model_type = text_config(config), model_type_of(config)
    if model_type in LISTED:
        return [bool(has_rope) for has_rope in _rope_of_layers(text, _count(text, model_type))]
    kinds = layer_types(config)
    if kinds is None or not has_trait(model_type, Trait.ROTATES_WINDOWS_ONLY):
        return None
    every = model_type.startswith("exaone") and _window(text, model_type) is None
    return [every or kind == SLIDING for kind in kinds]


def _rope_of_layers(text: Mapping[str, Any], count: int) -> list[Any]:
    """Return which layers have rotary embeddings, where not all have."""
    every, stated = _whole(text, "no_rope_layer_interval", 4), text.get("no_rope_layers")
    if not isinstance(stated, list) or len(stated) < count:
        return [(n + 1) % every if every else 1 for n in range(count)]
    return stated[:count]
