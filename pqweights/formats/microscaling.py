"""Short floats with a scale for each 16 or 32 of a row: MXFP4, MXFP8 and NVFP4, as tools and runtimes store them.

Formats: the OCP microscaling formats specification 1.0; compressed-tensors (mxfp4-pack-quantized, mxfp8-quantized,
nvfp4-pack-quantized); NVFP4 of NVIDIA's Model-Optimizer (https://github.com/NVIDIA/Model-Optimizer), whose
hf_quant_config.json TensorRT-LLM reads; the stacks of experts of gpt-oss (https://huggingface.co/openai/gpt-oss-20b);
and DeepSeek-V4's experts. Those of MLX are in mlx.py, the arithmetic is in kernels/groups.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pqweights.checkpoint.header import StoredTensor
from pqweights.errors import SourceError
from pqweights.formats.fp8 import scales_of
from pqweights.formats.packed import QuantizedTensor, Source, unlike, weight_of
from pqweights.formats.packing import CODES, DIVISOR, ONE, SCALES, UNIT, PackedFormat, RoundingRule, StoredPart
from pqweights.kernels.groups import FLOAT_CODES, FloatRule

HEAD = "lm_head"
# As published by the makers of gpt-oss.
_EXCEPT_EXPERTS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", HEAD]
# Of groups.
SIZES = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}

# --- the layouts ---

_PACKED = StoredPart(CODES, "{weight}_packed", "U8")
# The unit of the scales of NVFP4 activations is 1 when nothing is known of them, for blocks whose largest number is up
# to 2688: what Model-Optimizer's recipes without data set by `constant_amax`.
MXFP4 = (_PACKED, StoredPart(SCALES, "{weight}_scale", "U8"))
MXFP8 = (StoredPart(CODES, "{weight}", "F8_E4M3"), StoredPart(SCALES, "{weight}_scale", "U8"))
NVFP4 = (
    _PACKED,
    StoredPart(SCALES, "{weight}_scale", "F8_E4M3"),
    StoredPart(DIVISOR, "{weight}_global_scale", "F32", shape=(1,)),
)
NVFP4_INPUTS = (*NVFP4, StoredPart(ONE, "{module}.input_global_scale", "F32", shape=(1,)))
MODELOPT = (
    StoredPart(CODES, "{weight}", "U8"),
    StoredPart(SCALES, "{weight}_scale", "F8_E4M3"),
    StoredPart(UNIT, "{weight}_scale_2", "F32"),
    StoredPart(ONE, "{module}.input_scale", "F32"),
)
# The stacks of experts of gpt-oss: 16 bytes for each group.
GPT_OSS = (StoredPart(CODES, "{weight}_blocks", "U8", by_tile=True), StoredPart(SCALES, "{weight}_scales", "U8"))
# The same as the model has them, [experts, in, out]: groups are parts of columns.
GPT_OSS_UPRIGHT = tuple(part._replace(across=True) for part in GPT_OSS)

# --- what configurations say ---


def gpt_oss_configuration(rule: RoundingRule, modules: Sequence[str], expressions: Iterable[str]) -> dict[str, Any]:
    """Return the quantization_config of gpt-oss, whose experts alone are quantized."""
    return {"quant_method": "mxfp4", "modules_to_not_convert": _EXCEPT_EXPERTS}


def modelopt_configuration(rule: RoundingRule, modules: Sequence[str], expressions: Iterable[str]) -> dict[str, Any]:
    """Return Model-Optimizer's quantization_config. modules: those that stay plain"""
    numbers = {"num_bits": rule.bits, "type": "float", "group_size": rule.group_size, "dynamic": False}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": rule.group_size,
        "config_groups": {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}},
        "ignore": list(modules),
        "producer": {"name": "pqweights"},
    }


def modelopt_files(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON files that Model-Optimizer writes beside config.json, given its quantization_config."""
    settings = {
        "quant_algo": quantization["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": quantization["group_size"],
        "exclude_modules": quantization["ignore"],
    }
    return {"hf_quant_config.json": {"producer": quantization["producer"], "quantization": settings}}


# --- the weights of sources ---


def find_packed(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of `X_packed` of floats, of compressed-tensors."""
    weight = name.removesuffix("_packed")
    if weight == name or codes.dtype != "U8":
        return None
    return _floats(source, weight, codes, source.stored.get(f"{weight}_scale"), NVFP4)


def find_modelopt(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of `X` in U8 with `X_scale`, of Model-Optimizer."""
    scales = source.stored.get(f"{name}_scale") if codes.dtype == "U8" else None
    return None if scales is None else _floats(source, name, codes, scales, MODELOPT)


def find_deepseek(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of four bits in I8, of DeepSeek-V4."""
    scales = scales_of(name, source.stored) if codes.dtype == "I8" else None
    return None if scales is None else _floats(source, name, codes, scales, MXFP4)


def _floats(
    source: Source, weight: str, codes: StoredTensor, scales: StoredTensor | None, layout: tuple[StoredPart, ...]
) -> QuantizedTensor:
    """Return a weight of MXFP4 or, if its scales say so and the layout has a unit, NVFP4."""
    if len(codes.shape) not in (2, 3) or 0 in codes.shape:
        raise unlike(codes, "codes", "bytes [..., rows, columns / 2]")
    scale_name = f"{weight}_scale" if scales is None else scales.name
    unit = next((part for part in layout if part.holds in (UNIT, DIVISOR)), None)
    scales = source.part(codes, scale_name, ("U8", "F8_E8M0", *(("F8_E4M3",) if unit is not None else ())))
    kind = "nvfp4" if scales.dtype == "F8_E4M3" else "mxfp4"
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    scales = source.part(codes, scales.name, (scales.dtype,), (*shape[:-1], -(-shape[-1] // SIZES[kind])))
    stored: dict[str, StoredTensor | None] = {CODES: codes, SCALES: scales}
    if unit is not None and kind == "nvfp4":
        of_all = stored[unit.holds] = source.part(codes, unit.stored_name(weight), ("F32",))
        if math.prod(of_all.shape) != 1:
            raise unlike(of_all, "scale", "F32 [1]")
    how = PackedFormat(FloatRule(kind, 4, SIZES[kind]), layout)
    return weight_of(source, weight, shape, FLOAT_CODES[kind], how, stored)


def find_gpt_oss(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the stack of `X_blocks` with `X_scales`, as in the model: groups run over the stored last dimensions.

    Raises SourceError for blocks that should be some but are not: in a model whose configuration says mxfp4, or with
    scales in bytes.
    """
    weight = name.removesuffix("_blocks")
    if weight == name:
        return None
    scales = source.stored.get(f"{weight}_scales")
    is_meant = source.settings.get("quant_method") == "mxfp4" or (
        scales is not None and codes.dtype == scales.dtype == "U8"
    )
    if not is_meant:
        return None
    if scales is None:
        raise SourceError(
            f"{codes.file}: tensor {codes.name!r} is MXFP4 without its scales; expected {f'{weight}_scales'!r} in some "
            "shard, found none"
        )
    if codes.dtype != "U8" or len(codes.shape) != 4 or codes.shape[-1] != 16:
        raise SourceError(
            f"{codes.file}: tensor {codes.name!r}: expected MXFP4 blocks U8 [experts, rows, groups, 16], found "
            f"{codes.dtype} {list(codes.shape)}"
        )
    if scales.dtype != "U8" or scales.shape != codes.shape[:-1]:
        raise SourceError(
            f"{scales.file}: scales {scales.name!r}: expected U8 {list(codes.shape[:-1])}, found {scales.dtype} "
            f"{list(scales.shape)}"
        )
    experts, rows, groups, _ = codes.shape
    how = PackedFormat(FloatRule("mxfp4", 4, 1, rows=32), GPT_OSS_UPRIGHT)
    return weight_of(source, weight, (experts, 32 * groups, rows), "MXFP4", how, {CODES: codes, SCALES: scales})
