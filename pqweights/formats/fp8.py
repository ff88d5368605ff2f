"""FP8 with a scale for a row, a tile or a whole tensor: how tools and runtimes store it.

Formats: block FP8 of DeepSeek-V3 (`X_scale_inv`; arXiv:2412.19437, section 3.3) and V4 (`M.scale` of a module `M`); FP8
of FBGEMM, ModelOpt and compressed-tensors float-quantized (`X_scale`), and MXFP8 (`X_scale` in bytes). That of torchao
is in torchao.py. Numbers are those of the OCP 8-bit floating point specification 1.0. The arithmetic is in
kernels/groups.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pqweights.checkpoint.header import StoredTensor
from pqweights.common.dtypes import FLOAT8_DTYPES, FLOAT_DTYPES
from pqweights.errors import SourceError
from pqweights.formats.compressed_tensors import float_tiles
from pqweights.formats.packed import QuantizedTensor, Source, weight_of
from pqweights.formats.packing import CODES, SCALES, UNIT, PackedFormat, RoundingRule, Shape, StoredPart
from pqweights.kernels.groups import FloatRule

# What the scales of a module's weight in FP8 are called: by DeepSeek V4, ComfyUI, Mistral AI and TensorRT-LLM.
SCALE_NAMES = ("scale", "scale_weight", "qscale_weight", "weights_scaling_factor")
# What the scales of activations, and of keys and values in a cache, are called in a module: by transformers,
# compressed-tensors, ModelOpt, FBGEMM and vLLM. In some files the name of a weight and an underscore are before it.
ACTIVATION_SCALES = (
    *("activation_scale", "input_scale", "input_scale_ub", "input_global_scale", "input_zero_point"),
    *("output_scale", "prob_output_scale", "scale_input", "qscale_act", "activation_scaling_factor"),
    *("scaled_fp8", "comfy_quant"),  # what ComfyUI says of the format
    *("q_scale", "k_scale", "v_scale", "kv_scale", "q_zero_point", "k_zero_point", "v_zero_point"),
)
# What scales are called, whatever they belong to.
SCALE = re.compile(r"scal|inv(?!_freq)", re.IGNORECASE)
# How many rows and columns share a scale if no configuration says it.
TILE = (128, 128)

# --- the layouts ---

FLOAT_QUANTIZED = (StoredPart(CODES, "{weight}", "F8_E4M3"), StoredPart(SCALES, "{weight}_scale", "BF16"))
DEEPSEEK = (StoredPart(CODES, "{weight}", "F8_E4M3"), StoredPart(SCALES, "{weight}_scale_inv", "F32"))
# One scale for the whole weight.
COMFYUI = (StoredPart(CODES, "{weight}", "F8_E4M3"), StoredPart(UNIT, "{weight}_scale", "F32"))

# --- what configurations say ---


def deepseek_configuration(rule: RoundingRule, modules: Sequence[str], expressions: Iterable[str]) -> dict[str, Any]:
    """Return DeepSeek's quantization_config. modules: those that stay plain"""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [rule.rows, rule.group_size],
        "modules_to_not_convert": list(modules),
    }


def _configured_tiles(settings: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return how many rows and columns share a scale in some weights by the configuration, 128 if it says nothing."""
    said = [("weight_block_size", settings["weight_block_size"])] if settings.get("weight_block_size") else []
    said += [("block_structure or group_size", tile) for tile in float_tiles(settings)]
    for where, block in said:
        is_pair = isinstance(block, list | tuple) and len(block) == 2
        if not is_pair or not all(isinstance(n, int) and n > 0 for n in block):
            raise SourceError(f"config.json: {where}: expected two positive integers, found {block!r}")
    return list(dict.fromkeys((block[0], block[1]) for _, block in said)) or [TILE]


# --- the weights of sources ---


def scales_of(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the scales of a weight in FP8 or in DeepSeek-V4's FP4, by any of the names that they have in files."""
    module = name.removesuffix(".weight")
    names = (f"{name}_scale_inv", f"{name}_scale", *(f"{module}.{scale}" for scale in SCALE_NAMES if module != name))
    return next((stored[scale] for scale in names if scale in stored), None)


def find_scaled(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return a weight in FP8 with its scales; without them, it is a plain cast.

    Raises SourceError for scales that are no known ones, and if they should be there.
    """
    if codes.dtype not in FLOAT8_DTYPES or name.rpartition(".")[2] in ACTIVATION_SCALES:
        return None
    tiles, scales = _configured_tiles(source.settings), scales_of(name, source.stored)
    matrix = (math.prod(codes.shape[:-1]), codes.shape[-1]) if codes.shape else (1, 1)
    size: Shape = (1, 1)
    if scales is None:
        _check_unscaled(codes, source)
    else:
        matrix, size = _tiled(codes, scales, tiles)
    kind = "fp8" if codes.dtype == "F8_E4M3" else "fp8-e5m2"
    kind = "mxfp8" if kind == "fp8" and scales is not None and scales.dtype in ("U8", "F8_E8M0") else kind
    how = PackedFormat(FloatRule(kind, 8, size[1], rows=size[0]), FLOAT_QUANTIZED)
    stored = {CODES: codes, SCALES: scales}
    return weight_of(source, name, codes.shape, codes.dtype, how, stored, matrix=matrix, plain_dtype="BF16")


def _tiled(
    codes: StoredTensor, scales: StoredTensor, tiles: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], Shape]:
    """Return the rows and columns of matrices, and of the tiles that share a scale, from shapes and configuration."""
    if scales.dtype not in (*FLOAT_DTYPES, "F8_E8M0", "U8"):
        raise SourceError(f"{scales.file}: scales {scales.name!r}: expected a floating dtype, found {scales.dtype}")
    shape, counts = codes.shape or (1,), scales.shape
    if all(n == 1 for n in counts):
        whole = (math.prod(shape[:-1]), shape[-1])
        return whole, (max(whole[0], 1), max(whole[1], 1))
    if len(counts) == len(shape) - 1:  # one scale per row, with or without a last dimension of 1
        counts = (*counts, 1)
    tiles = [(1, 32)] if scales.dtype == "U8" else tiles  # OCP's MXFP8
    fitting = {of for tile in tiles if (of := _block(shape, counts, tile)) is not None}
    if len(fitting) != 1:
        each = " or ".join(f"{rows} x {columns}" for rows, columns in tiles)
        raise SourceError(
            f"{scales.file}: scales {scales.name!r}: expected one per tensor, per row or per {each} block of "
            f"{list(codes.shape)}{', and one of these alone' if fitting else ''}, found shape {list(scales.shape)}"
        )
    block, sizes = list(fitting.pop()), list(shape)
    while len(sizes) > 2 and block[-2:] == sizes[-2:]:  # whole matrices are rows
        block[-2:] = [block[-2] * block[-1]]
        sizes[-2:] = [sizes[-2] * sizes[-1]]
    rows, columns = (1, *sizes)[-2:]
    tall, wide = (1, *block)[-2:]
    return (rows, columns), (tall, wide)


def _block(shape: Shape, counts: Shape, tile: tuple[int, int]) -> Shape | None:
    """Return the elements of a shape along each axis that share a scale; None if tiles give other counts of scales."""
    if len(counts) != len(shape):
        return None
    block = []
    for size, count, step in zip(shape, counts, ((1,) * (len(shape) - 2) + tile)[-len(shape) :], strict=True):
        if count not in (1, size, -(-size // step)):
            return None
        block.append(max(size, 1) if count == 1 else 1 if count == size else step)
    return tuple(block)


def _check_unscaled(tensor: StoredTensor, source: Source) -> None:
    """Raise SourceError if a tensor in FP8 that no known scale belongs to may have one under another name."""
    name, module = tensor.name, tensor.name.removesuffix(".weight")
    known = (name, f"{module}.bias", f"{module}_bias")
    others = itertools.chain(source.modules[name.rpartition(".")[0]], _scale_names(source))
    unknown = (of for of in others if module in of and of not in known and not is_of_activations(of, [name]))
    beside = name if module == name else f"{module}."
    scale = next((of for of in unknown if of.startswith(beside) or SCALE.search(of)), None)
    if source.settings or scale is not None:
        expected = " or ".join(repr(scale) for scale in (f"{name}_scale_inv", f"{name}_scale"))
        raise SourceError(
            f"{tensor.file}: tensor {name!r} is {tensor.dtype} without its scales; expected {expected} in some shard, "
            f"found {'neither' if scale is None else f'{scale!r}, which is not known as one'}"
        )


def is_of_activations(name: str, weights: Collection[str]) -> bool:
    """Whether a stored tensor is a scale of activations, of one of some weights if it is named by that."""
    return name.rpartition(".")[2] in ACTIVATION_SCALES or any(
        name == f"{weight}_{suffix}" for suffix in ACTIVATION_SCALES for weight in weights
    )


def _scale_names(source: Source) -> Iterator[str]:
    """Yield the names of stored tensors that may be scales of weights, whatever they belong to."""
    return (name for name in source.stored if SCALE.search(name) and name.rpartition(".")[2] not in ACTIVATION_SCALES)
