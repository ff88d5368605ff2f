"""Rotary position embeddings: their base, the scaled kinds, and the factors of frequencies, which are tensors.

Their formulas are those of transformers (modeling_rope_utils.py); llama.cpp's are in ggml_rope_ext and
llama-context.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.positions import attention_factor, llama3_divisors, yarn_scale
from pqweights.errors import ExportError
from pqweights.models.llama_cpp import FULL, SLIDING, Architecture, Rope
from pqweights.models.rotary import DEFAULT_BASE
from pqweights.models.settings import Settings, is_positive, windowed_layers

# The numbers of rotations between which llama.cpp turns from interpolation to extrapolation, unless it is told others.
YARN_BETAS = {"beta_fast": 32, "beta_slow": 1}
LLAMA3_KEYS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

Factors = dict[str, npt.NDArray[np.float32]]


def rope_parameters(settings: Settings, layers: str = FULL) -> dict[str, Any]:
    """Return the parameters of a kind of layers as transformers has them: rope_type, rope_theta and so on.

    layers: FULL or SLIDING, for models in which these differ
    """
    stated = settings.get("rope_parameters") or {"rope_type": "default", "rope_theta": DEFAULT_BASE}
    own = stated if "rope_type" in stated else stated.get(layers) or next(iter(stated.values()), None)
    if not isinstance(own, dict) or "rope_type" not in own:
        raise settings.refusal(f"expected the parameters of its rotary embeddings, found {stated!r:.80}")
    return {"partial_rotary_factor": 1.0, **own}


def add_rope(settings: Settings, writer: Any) -> Factors:
    """Write the hyper-parameters of rotary embeddings, and return the tensors that belong to them, by name.

    writer: a GGUFWriter of the gguf package

    Raises ExportError for a kind that llama.cpp does not compute for this model.
    """
    rope = settings.architecture.rope
    if rope is None:
        return {}
    parameters = rope_parameters(settings)
    whole, rotated = _rotated_channels(settings, parameters, rope)
    is_proportional = parameters["rope_type"] == "proportional"  # of Gemma 4: frequencies are those of whole heads
    writer.add_rope_dimension_count(whole if rope.half_rotated or is_proportional else rotated)
    sections = parameters.get("mrope_section") or rope.sections
    if not isinstance(sections, list | tuple) or not all(isinstance(size, int) for size in sections):
        raise settings.refusal(f"expected a list of numbers as mrope_section, found {sections!r}")
    if sections:
        writer.add_rope_dimension_sections([*sections, 0][:4])
    base = _number(settings, parameters, "rope_theta")
    # Of HunYuan, with another base at once instead of one by the length of the text.
    if parameters["rope_type"] == "dynamic" and rotated > 2:
        base *= _number(settings, parameters, "alpha") ** (rotated / (rotated - 2))
    writer.add_rope_freq_base(base)
    if any(windowed_layers(settings)):
        _add_windowed(settings, writer)
    if rope.temperature:
        _add_temperature(settings, parameters, writer)
    return _add_scaling(settings, parameters, writer, whole=whole, rotated=rotated)


def _rotated_channels(settings: Settings, parameters: Mapping[str, Any], rope: Rope) -> tuple[int, int]:
    """Return how many channels of a head may be rotated, and how many are.

    Raises ExportError for a kind that llama.cpp does not compute for this model, and for other numbers than it takes.
    """
    if parameters["rope_type"] not in rope.kinds:
        taken = ", ".join(sorted(rope.kinds))
        found = parameters["rope_type"]
        raise settings.refusal(f"llama.cpp supports only rope_type {taken}, found {found!r}")
    whole = settings.number(rope.rotated)
    rotated = int(whole * _number(settings, parameters, "partial_rotary_factor"))
    if whole % 2 or rotated % 2 or rotated < 2:
        raise settings.refusal(f"expected an even number of rotated channels, found {rotated} of {whole}")
    if rope.half_rotated:
        _check_halves(settings, parameters)
    elif rotated != whole and not rope.partial and parameters["rope_type"] != "proportional":
        raise settings.refusal(
            f"llama.cpp rotates whole heads, but partial_rotary_factor is {parameters['partial_rotary_factor']}"
        )
    return whole, rotated


def _add_scaling(
    settings: Settings, parameters: Mapping[str, Any], writer: Any, *, whole: int, rotated: int
) -> Factors:
    """Write how frequencies are scaled, and return the factors by which they are divided, by the name of the tensor.

    whole, rotated: how many channels of a head may be rotated, and how many are
    """
    rope, rope_type = settings.architecture.rope, parameters["rope_type"]
    assert rope is not None
    if rope_type == "linear":
        writer.add_rope_scaling_type(gguf_package().RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(_number(settings, parameters, "factor"))
    elif rope_type == "yarn":
        _add_yarn(settings, parameters, rope, writer)
    elif rope_type == "longrope":
        return _add_longrope(settings, parameters, writer, rotated=rotated)
    elif rope_type == "proportional":
        writer.add_rope_dimension_count_swa(settings.number("head_dim"))
        return {"rope_freqs.weight": np.where(np.arange(whole // 2) < rotated // 2, 1, 1e30).astype(np.float32)}
    elif rope_type == "llama3":
        factors = np.ones(whole // 2 if rope.half_rotated else rotated // 2, dtype=np.float32)
        factors[: rotated // 2] = _llama3_factors(settings, parameters, rotated)
        return {"rope_freqs.weight": factors}
    return {}


def read_rope(
    value: Callable[[str], Any], architecture: Architecture, known: Mapping[str, Any], factors: Factors
) -> dict[str, Any]:
    """Return what a configuration says of rotary embeddings: the inverse of add_rope, which then checks it.

    value: returns a hyper-parameter by what its key has behind the architecture, None if it is absent
    known: the other keys of the configuration
    factors: the values of the tensors that follow from the configuration, by name

    Raises ExportError for a kind that add_rope does not write.
    """
    rope, windows = architecture.rope, architecture.windows
    if rope is None:
        return {}
    base, local, whole = value("rope.freq_base") or DEFAULT_BASE, value("rope.freq_base_swa"), known["rotated"]
    stated: dict[str, Any] = {"rope_theta": base}
    rotated = value("rope.dimension_count") or whole
    if rotated > whole or rotated % 2:
        raise ExportError(f"rope.dimension_count: expected an even number of at most {whole}, found {rotated}")
    if rope.half_rotated:
        rotated //= 2
    elif rotated != whole:
        stated["partial_rotary_factor"] = rotated / whole
    if local is not None and windows is not None and windows.own_base:
        stated["rope_local_base_freq"] = local
    kind = str(value("rope.scaling.type") or "none")
    if kind == "none" and "longrope" in rope.kinds and "rope_factors_long.weight" in factors:
        kind = "longrope"
    scaled: dict[str, Any] = {"rope_type": kind}
    if "rope_freqs.weight" in factors and "proportional" in rope.kinds:
        share = float(np.count_nonzero(factors["rope_freqs.weight"] == 1) * 2 / whole)
        full = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": base}
        return {"rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local or base}}}
    if "rope_freqs.weight" in factors:
        scaled = _read_llama3(factors["rope_freqs.weight"], base, rotated)
    elif kind in ("linear", "yarn"):
        if (factor := value("rope.scaling.factor")) is None:
            raise ExportError("the file does not say rope.scaling.factor")
        scaled["factor"] = factor
    elif kind not in ("none", "longrope"):
        raise ExportError(f"rope.scaling.type {kind!r:.40} is not known")
    if kind in ("yarn", "longrope"):
        if (original := value("rope.scaling.original_context_length")) is None:
            raise ExportError("the file does not say rope.scaling.original_context_length")
        scaled |= {
            key: of for key, usual in YARN_BETAS.items() if (of := value(f"rope.scaling.yarn_{key}") or usual) != usual
        }
        (stated if kind == "longrope" else scaled)["original_max_position_embeddings"] = original
        scaled |= _read_longrope(value, factors) if kind == "longrope" else _read_yarn(value, rope, scaled["factor"])
    if rope.temperature and (beta := value("attention.temperature_scale")) is not None:
        length = value("rope.scaling.original_context_length") or value("attention.temperature_length")
        scaled |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": length}
    elif rope.temperature and kind == "yarn":
        scaled["llama_4_scaling_beta"] = 0.0  # its class takes no model without it
    return stated if scaled == {"rope_type": "none"} else stated | {"rope_scaling": scaled}


def _read_longrope(value: Callable[[str], Any], factors: Factors) -> dict[str, Any]:
    """Return what a configuration says of LongRoPE: the inverse of _add_longrope."""
    if {"rope_factors_long.weight", "rope_factors_short.weight"} - factors.keys():
        raise ExportError("the tensors rope_factors_long.weight and rope_factors_short.weight are missing")
    scaled = {f"{name}_factor": factors[f"rope_factors_{name}.weight"].tolist() for name in ("long", "short")}
    attention = value("rope.scaling.attn_factor")
    return scaled | ({} if attention is None else {"attention_factor": attention})


def _read_yarn(value: Callable[[str], Any], rope: Rope, factor: float) -> dict[str, Any]:
    """Return what a configuration says of YaRN beside its factor: the inverse of _add_yarn."""
    scaled: dict[str, Any] = {"truncate": False} if rope.rounds_yarn else {}
    if rope.yarn_scales_attention and (mscale := value("rope.scaling.yarn_log_multiplier")) is not None:
        scaled |= dict.fromkeys(("mscale", "mscale_all_dim"), _times(mscale, 10.0))
    if (attention := value("rope.scaling.attn_factor")) is not None:
        scaled["attention_factor"] = attention and _times(attention, yarn_scale(factor, 1.0))
    return scaled


def _times(value: float, scale: float) -> float:
    """Return the shortest number that, divided by a scale, is a value in float32."""
    numbers = (float(f"{value * scale:.{digits}g}") for digits in range(3, 12))
    return next((n for n in numbers if np.float32(n / scale) == np.float32(value)), value * scale)


def _read_llama3(factors: npt.NDArray[np.float32], base: float, rotated: int) -> dict[str, Any]:
    """Return parameters from which the factors follow; of the bounds and the length, only the ratios matter.

    Raises ExportError if there are none.
    """
    if len(factors) < rotated // 2 or not np.isfinite(factors).all() or factors.min() < 1:
        raise ExportError("the tensor rope_freqs.weight differs from the factors of rope_type llama3")
    known: dict[str, Any] = {"rope_type": "llama3", "factor": float(np.round(factors.max(), 4)), "rope_theta": base}
    for low, high, length in _bounds(factors, known["factor"], base, rotated):
        llama3 = known | {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": length}
        if np.allclose(_llama3_values(llama3, rotated), factors[: rotated // 2], rtol=1e-4):
            return {key: value for key, value in llama3.items() if key != "rope_theta"}
    raise ExportError("the tensor rope_freqs.weight differs from the factors of rope_type llama3")


def _bounds(
    factors: npt.NDArray[np.float32], factor: float, base: float, rotated: int
) -> Iterator[tuple[float, float, int]]:
    """Yield what may be the bounds and the length: those of published models, then those that fit best."""
    yield from ((1.0, 4.0, 8192), (1.0, 1.0, 8192), (1.0, 4.0, 64))
    frequencies = base ** (-np.arange(0, rotated, 2) / rotated) / (2 * math.pi)
    between = (factors[: rotated // 2] > 1 + 1e-6) & (factors[: rotated // 2] < factor * (1 - 1e-6))
    if np.count_nonzero(between) > 1 and factor > 1 and np.ptp(frequencies[between]) > 0:
        share = (1 / factors[: rotated // 2][between] - 1 / factor) / (1 - 1 / factor)
        slope = (share[-1] - share[0]) / (frequencies[between][-1] - frequencies[between][0])
        offset = share[0] - slope * frequencies[between][0]
        if offset < -1e-6:
            high = 1 - 1 / offset
            yield 1.0, float(high), round(slope * (high - 1))
    divided = factors[: rotated // 2] > 1
    turns = 1 / frequencies[divided]  # no frequency lies between
    if divided.any() and not divided.all():
        yield 1.0, 1.0, 2 ** math.ceil(math.log2(1 / frequencies[~divided].min()))
    for length in turns:
        yield 1.0, 1.0, round(length)


def _check_halves(settings: Settings, parameters: Mapping[str, Any]) -> None:
    """Raise ExportError unless layers with full attention rotate half of a head, and those with a window all of it."""
    shares = [float(of["partial_rotary_factor"]) for of in (parameters, rope_parameters(settings, SLIDING))]
    if shares != [0.5, 1.0] or not any(windowed_layers(settings)):
        raise settings.refusal(
            "llama.cpp rotates half of a head, and whole heads in layers with a window, but partial_rotary_factor is "
            f"{shares[0]} and {shares[1]}"
        )


def _number(settings: Settings, parameters: Mapping[str, Any], key: str) -> float:
    """Return a positive number among the parameters."""
    return settings.positive(parameters.get(key), f"{key} of its rope parameters")


def _optional(settings: Settings, parameters: Mapping[str, Any], key: str) -> float | None:
    """Return a positive number among the parameters; None if it is absent or zero."""
    return _number(settings, parameters, key) if parameters.get(key) else None


def _add_windowed(settings: Settings, writer: Any) -> None:
    """The embeddings of layers with a sliding window, which are never scaled."""
    parameters, windows = rope_parameters(settings, SLIDING), settings.architecture.windows
    assert windows is not None
    if parameters["rope_type"] != "default" and not windows.scaled:
        raise settings.refusal(
            "llama.cpp supports only rope_type default in layers with a sliding window, found "
            f"{parameters['rope_type']!r}"
        )
    local = _number(settings, parameters, "rope_theta")
    base = rope_parameters(settings)["rope_theta"]
    if local != base and not windows.own_base:
        raise settings.refusal(f"llama.cpp uses rope_theta {base} in all layers, but {SLIDING} has {local}")
    writer.add_rope_freq_base_swa(float(local))


def _add_temperature(settings: Settings, parameters: Mapping[str, Any], writer: Any) -> None:
    """What queries are multiplied by beyond each multiple of the original length, whatever the kind is."""
    beta = _optional(settings, parameters, "llama_4_scaling_beta")
    if beta is not None:
        original = int(_number(settings, parameters, "original_max_position_embeddings"))
        writer.add_attn_temperature_scale(beta)
        writer.add_attn_temperature_length(original)
        if parameters["rope_type"] not in ("yarn", "longrope"):  # which state it, too; llama.cpp takes this one
            writer.add_rope_scaling_orig_ctx_len(original)


def _add_yarn(settings: Settings, parameters: Mapping[str, Any], rope: Rope, writer: Any) -> None:
    """YaRN (arXiv:2309.00071). llama.cpp multiplies the attention's factor by its own default."""
    for key, value in own_betas(settings, parameters).items():
        getattr(writer, f"add_rope_scaling_yarn_{key}")(value)
    if parameters.get("truncate") is False and not rope.rounds_yarn:
        raise settings.refusal("llama.cpp rounds the bounds of YaRN, but truncate is false")
    factor = _number(settings, parameters, "factor")
    writer.add_rope_scaling_type(gguf_package().RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(int(_number(settings, parameters, "original_max_position_embeddings")))
    attention = _optional(settings, parameters, "attention_factor")
    own, every = (_optional(settings, parameters, key) for key in ("mscale", "mscale_all_dim"))
    if rope.yarn_scales_attention:
        only = rope.yarn_mscale
        if attention is not None or own is None or own != every or own != (only or own):
            expected = f"mscale and mscale_all_dim {only}" if only else "equal mscale and mscale_all_dim"
            raise settings.refusal(f"llama.cpp supports YaRN only with {expected}, found {own} and {every}")
        writer.add_rope_scaling_yarn_log_mul(0.1 * every)  # a tenth, as in the files of DeepSeek V2
        return
    if attention is None and own and every:
        attention = yarn_scale(factor, own) / yarn_scale(factor, every)
    if attention is not None:
        writer.add_rope_scaling_attn_factors(float(attention) / yarn_scale(factor))


def own_betas(settings: Settings, parameters: Mapping[str, Any]) -> dict[str, float]:
    """Return those of YARN_BETAS that the model has otherwise, as Kimi K2 does.

    llama.cpp reads them from files of few architectures, and takes them as options.
    """
    stated = {key: _optional(settings, parameters, key) for key in YARN_BETAS}
    return {key: value for key, value in stated.items() if value is not None and value != YARN_BETAS[key]}


def _add_longrope(settings: Settings, parameters: Mapping[str, Any], writer: Any, *, rotated: int) -> Factors:
    """LongRoPE (arXiv:2402.13753): factors for short texts and for long ones."""
    original = _number(settings, parameters, "original_max_position_embeddings")
    if original <= 1:
        raise settings.refusal(f"expected more than 1 as original_max_position_embeddings, found {original}")
    numbers = {key: _optional(settings, parameters, key) for key in ("factor", "attention_factor")}
    known = {"rope_type": "longrope", "original_max_position_embeddings": original} | numbers
    writer.add_rope_scaling_type(gguf_package().RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(int(original))
    writer.add_rope_scaling_attn_factors(attention_factor(known, settings.number("max_position_embeddings")))
    factors = {}
    for name in ("long", "short"):
        listed = parameters.get(f"{name}_factor")
        if not isinstance(listed, list) or len(listed) != rotated // 2 or not all(map(is_positive, listed)):
            raise settings.refusal(f"expected {rotated // 2} numbers as {name}_factor of its rope parameters")
        factors[f"rope_factors_{name}.weight"] = np.array(listed, dtype=np.float32)
    return factors


def _llama3_factors(settings: Settings, parameters: Mapping[str, Any], rotated: int) -> npt.NDArray[np.float32]:
    """What Llama 3 divides each frequency by, [rotated / 2]: 1 for high ones, `factor` for low ones."""
    numbers = {key: _number(settings, parameters, key) for key in LLAMA3_KEYS}
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    if high < low:
        raise settings.refusal(f"high_freq_factor {high} of its rope parameters is below low_freq_factor {low}")
    return _llama3_values(numbers, rotated)


def _llama3_values(numbers: Mapping[str, Any], rotated: int) -> npt.NDArray[np.float32]:
    plain = numbers["rope_theta"] ** (-np.arange(0, rotated, 2) / rotated)
    return llama3_divisors(numbers, plain).astype(np.float32)
