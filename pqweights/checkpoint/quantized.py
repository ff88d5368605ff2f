"""Sources that are already quantized: FP8 and MXFP4 are decoded, all other formats are refused by name.

Formats: block FP8 of DeepSeek-V3 (`X_scale_inv`); FP8 of FBGEMM, ModelOpt and compressed-tensors float-quantized
(`X_scale`); MXFP4 of gpt-oss (`X_blocks` with `X_scales`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pqweights.checkpoint.float_formats import Float8Tensor, Mxfp4Tensor
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import LogicalTensor, PlainTensor
from pqweights.checkpoint.storage import Storage
from pqweights.codecs import CODECS
from pqweights.codecs.protocol import Part
from pqweights.common.dtypes import FLOAT8_DTYPES, FLOAT_DTYPES
from pqweights.errors import SourceError

GIVE_ORIGINAL = "it is already quantized with loss; give the original checkpoint"

# The names of tensors that mark a format that is not decoded here, even if no configuration says so.
FOREIGN_MARKS = {
    "_weight_qdata": "torchao",
    "weight_scale_2": "NVFP4 (ModelOpt)",
    "weight_global_scale": "NVFP4 (compressed-tensors)",
    "weight_packed": "integer compressed-tensors",
    "g_idx": "GPTQ",
    "qweight": "GPTQ or AWQ",
    "weight.absmax": "bitsandbytes",
    "weight.SCB": "bitsandbytes",
    "SCB": "bitsandbytes",
}


# What the scales of activations, and of keys and values in a cache, are called in a module: by transformers,
# compressed-tensors, ModelOpt, FBGEMM and vLLM. In some files the name of a weight and an underscore are before it.
ACTIVATION_SCALES = (
    *("activation_scale", "input_scale", "input_scale_ub", "input_zero_point", "output_scale", "prob_output_scale"),
    *("q_scale", "k_scale", "v_scale", "kv_scale", "q_zero_point", "k_zero_point", "v_zero_point"),
)
NOT_A_WEIGHT = "a scale for activations in 8 bits, which a model with decoded weights does not have"


class ModelTensors(NamedTuple):
    """The logical tensors of a source, and by name the reason why others are none."""

    tensors: list[LogicalTensor]
    left_out: dict[str, str]


def logical_tensors(storage: Storage, stored: dict[str, StoredTensor], config: dict[str, Any] | None) -> ModelTensors:
    """Return the logical tensors of a source checkpoint.

    Raises SourceError for a quantization that cannot be decoded, and for scales that are missing or have a wrong shape.
    """
    settings = quantization_settings(config)
    if config is None:
        _refuse_part_of_master(stored)
    _refuse_foreign(settings, stored)
    tensors: list[LogicalTensor] = [*_decoded(storage, stored, settings)]
    taken = {part.name for tensor in tensors for part in tensor.parts}
    left_out = dict.fromkeys(_activation_scales(stored, settings, decoded=tensors), NOT_A_WEIGHT)
    rest = [name for name in stored if name not in taken and name not in left_out]
    tensors += [PlainTensor.of(storage, stored[name]) for name in rest]
    _check_names([tensor.name for tensor in tensors])
    return ModelTensors(tensors, left_out)


def _activation_scales(
    stored: dict[str, StoredTensor], settings: dict[str, Any], *, decoded: Sequence[LogicalTensor]
) -> Iterator[str]:
    """Yield the names of the scales of activations in a quantized source, which no model has a place for."""
    if not settings and not any(len(tensor.parts) > 1 for tensor in decoded):
        return
    of_weights = {f"{tensor.name}_{suffix}" for tensor in decoded for suffix in ACTIVATION_SCALES}
    for name in stored:
        if name.rpartition(".")[2] in ACTIVATION_SCALES or name in of_weights:
            yield name


def _decoded(
    storage: Storage, stored: dict[str, StoredTensor], settings: dict[str, Any]
) -> Iterator[Float8Tensor | Mxfp4Tensor]:
    """Yield the tensors that are stored in FP8 or MXFP4."""
    default_block = _weight_block(settings)
    for name, tensor in stored.items():
        weight = name.removesuffix("_blocks")
        if weight != name and _is_mxfp4(tensor, stored.get(f"{weight}_scales"), settings):
            experts, rows, groups, _ = tensor.shape
            yield Mxfp4Tensor(
                storage=storage,
                name=weight,
                shape=(experts, 32 * groups, rows),
                dtype="MXFP4",
                parts=(tensor, stored[f"{weight}_scales"]),
            )
        elif tensor.dtype in FLOAT8_DTYPES:
            scales = stored.get(name + "_scale_inv") or stored.get(name + "_scale")
            if scales is None and settings:
                raise SourceError(
                    f"{tensor.file}: tensor {name!r} is {tensor.dtype} without its scales; expected "
                    f"{name + '_scale_inv'!r} or {name + '_scale'!r} in some shard, found neither"
                )
            yield Float8Tensor(
                storage=storage,
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                parts=(tensor, scales) if scales else (tensor,),
                scale_block=_scale_block(tensor, scales, default_block) if scales else (),
            )


def _check_names(names: list[str]) -> None:
    """Raise SourceError for a name that two tensors have, or that a master needs for a part of a weight."""
    distinct = set(names)
    suffixes = tuple(dict.fromkeys(suffix for codec in CODECS.values() for suffix in codec.suffixes))
    for name in names:
        if name.endswith(suffixes):
            weight = name.removesuffix(next(suffix for suffix in suffixes if name.endswith(suffix)))
            if weight in distinct:
                raise SourceError(
                    f"tensor {name!r}: a master needs this name for a part of {weight!r}; rename the tensor"
                )
    if len(distinct) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"tensor {twice!r} is there twice, once in a packed format and once plain")


def _refuse_part_of_master(stored: dict[str, StoredTensor]) -> None:
    """Raise SourceError for a shard of a master without the config.json that says how to read it."""
    for parts in {codec.coder(codec.rates[0]).sized(1).parts for codec in CODECS.values()}:
        first = "weight" + parts[0].suffix
        for name, tensor in stored.items():
            if name.endswith(first) and _has_parts(stored, name.removesuffix(parts[0].suffix), parts):
                raise SourceError(
                    f"{tensor.file}: tensor {name!r} belongs to a pqweights master, whose config.json is not here; "
                    "give the original checkpoint to quantize, or the whole folder of the master to export"
                )


def _has_parts(stored: dict[str, StoredTensor], weight: str, parts: tuple[Part, ...]) -> bool:
    """Whether all parts of an encoded weight are stored, in their dtypes."""
    tensors = (stored.get(weight + part.suffix) for part in parts)
    return all(tensor is not None and tensor.dtype == part.dtype for tensor, part in zip(tensors, parts, strict=True))


def quantization_settings(config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the quantization_config of a model, or of the text part of a multi-modal model; {} if there is none."""
    if config is None:
        return {}
    if "quantization" in config:  # MLX, which repeats the key as a quantization_config without a method
        return {"quant_method": "mlx"}
    for place in (config, config.get("text_config")):
        if isinstance(place, dict):
            for key in ("quantization_config", "compression_config"):
                if isinstance(place.get(key), dict):
                    settings: dict[str, Any] = place[key]
                    return settings
    return {}


def _refuse_foreign(settings: dict[str, Any], stored: dict[str, StoredTensor]) -> None:
    """Raise SourceError if the configuration or a tensor shows a quantization that is not decoded here."""
    method = str(settings.get("quant_method", "")).lower()
    if settings:
        described = _unsupported_method(method, settings)
        if described:
            raise SourceError(f"config.json: the source is {described}: {GIVE_ORIGINAL}")
    marks = tuple(FOREIGN_MARKS)
    marked = [name for name in stored if name.endswith(marks)]
    for mark, format_name in FOREIGN_MARKS.items():
        for name in marked:
            if name == mark or name.endswith("." + mark):
                raise SourceError(f"{stored[name].file}: tensor {name!r} marks {format_name}: {GIVE_ORIGINAL}")
    for name, tensor in stored.items():
        if tensor.dtype == "U32" and name.endswith("weight"):
            scales = name.removesuffix("weight") + "scales"
            if scales in stored:
                raise SourceError(f"{tensor.file}: tensor {name!r} with {scales!r} marks MLX: {GIVE_ORIGINAL}")
        if tensor.dtype in ("I8", "I32") and name + "_scale" in stored:
            raise SourceError(
                f"{tensor.file}: tensor {name!r} with {name + '_scale'!r} marks integer compressed-tensors: "
                f"{GIVE_ORIGINAL}"
            )


def _unsupported_method(method: str, settings: dict[str, Any]) -> str | None:
    """Return the name of a quantization that is not decoded here; None for FP8 and MXFP4."""
    if method in ("fp8", "fbgemm_fp8", "mxfp4"):
        return None
    if method == "modelopt":
        nested = settings.get("quantization")
        algorithm = settings.get("quant_algo") or (nested.get("quant_algo") if isinstance(nested, dict) else None)
        return None if algorithm == "FP8" else f"ModelOpt {algorithm}"
    if method == "compressed-tensors":
        groups = settings.get("config_groups")
        members = groups.values() if isinstance(groups, dict) else ()
        weights = [group.get("weights") if isinstance(group, dict) else None for group in members]
        if weights and all(
            isinstance(w, dict) and w.get("type") == "float" and w.get("num_bits") == 8 for w in weights
        ):
            return None
        return f"compressed-tensors ({settings.get('format', 'unknown format')})"
    names = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "mlx": "MLX", "torchao": "torchao"}
    return names.get(method, f"quantized by {method!r}" if method else "quantized by an unnamed method")


def _weight_block(settings: dict[str, Any]) -> tuple[int, int]:
    """Return how many rows and columns share a scale by the configuration, 128 by default."""
    block = settings.get("weight_block_size") or (128, 128)
    if isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        return (block[0], block[1])
    raise SourceError(f"config.json: weight_block_size: expected two positive integers, found {block!r}")


def _scale_block(tensor: StoredTensor, scales: StoredTensor, default: tuple[int, int]) -> tuple[int, ...]:
    """Return how many elements of each dimension share a scale, from the two shapes and the configured block."""
    if scales.dtype not in (*FLOAT_DTYPES, "F8_E8M0"):
        raise SourceError(f"{scales.file}: scales {scales.name!r}: expected a floating dtype, found {scales.dtype}")
    shape = tensor.shape
    if all(n == 1 for n in scales.shape):
        return tuple(max(n, 1) for n in shape)
    # One scale per row, with or without a last dimension of 1.
    counts = scales.shape
    if len(counts) == len(shape) - 1:
        counts = (*counts, 1)
    block = []
    configured = (1,) * (len(shape) - 2) + default
    if len(counts) == len(shape):
        for size, count, step in zip(shape, counts, configured, strict=True):
            if count == 1:
                block.append(max(size, 1))
            elif count == size:
                block.append(1)
            elif count == -(-size // step):
                block.append(step)
    if len(block) != len(shape):
        raise SourceError(
            f"{scales.file}: scales {scales.name!r}: expected one per tensor, per row or per {default[0]} x "
            f"{default[1]} block of {list(shape)}, found shape {list(scales.shape)}"
        )
    return tuple(block)


def _is_mxfp4(blocks: StoredTensor, scales: StoredTensor | None, settings: dict[str, Any]) -> bool:
    """Whether a tensor called X_blocks is MXFP4 with its scales.

    Raises SourceError if it should be but is not: in a model whose configuration says mxfp4, or with scales in bytes.
    """
    if settings.get("quant_method") != "mxfp4" and (scales is None or not blocks.dtype == scales.dtype == "U8"):
        return False
    expected = blocks.shape[:-1]
    if scales is None:
        raise SourceError(
            f"{blocks.file}: tensor {blocks.name!r} is MXFP4 without its scales; expected "
            f"{blocks.name.removesuffix('_blocks') + '_scales'!r} in some shard, found none"
        )
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != 16:
        raise SourceError(
            f"{blocks.file}: tensor {blocks.name!r}: expected MXFP4 blocks U8 [experts, rows, groups, 16], found "
            f"{blocks.dtype} {list(blocks.shape)}"
        )
    if scales.dtype != "U8" or scales.shape != expected:
        raise SourceError(
            f"{scales.file}: scales {scales.name!r}: expected U8 {list(expected)}, found {scales.dtype} "
            f"{list(scales.shape)}"
        )
    return True
