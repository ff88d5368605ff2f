"""Integers with a scale for each group of a row, and perhaps a zero or an offset: how tools and runtimes store them.

Formats: compressed-tensors (https://github.com/vllm-project/compressed-tensors, compressors/), AutoGPTQ and GPTQModel,
AutoAWQ's GEMM, AutoRound (which packs like one of those), and LLM.int8 of bitsandbytes. Those of MLX and torchao are in
mlx.py and torchao.py, the arithmetic is in kernels/groups.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pqweights.checkpoint.header import StoredTensor, read_stored
from pqweights.errors import SourceError
from pqweights.formats.compressed_tensors import schemes
from pqweights.formats.packed import SCALE_DTYPES, QuantizedTensor, Source, is_one_of, rows_for, unlike, weight_of
from pqweights.formats.packing import (
    AWQ_ORDER,
    CODES,
    GROUP_OF,
    SCALES,
    SHAPE,
    ZEROS,
    PackedFormat,
    RoundingRule,
    StoredPart,
)
from pqweights.kernels.groups import GroupRule

# The widths of codes.
INTEGER_BITS = (2, 3, 4, 8)
# By GPTQ's checkpoint_format: the zero that is stored as 0. Loaders of the first one differ on a zero of 0.
GPTQ_FIRST_ZEROS = {"gptq": 1, "gptq_v2": 0}
# What AutoRound calls itself (https://github.com/intel/auto-round).
AUTO_ROUND = ("auto-round", "intel/auto-round", "auto_round", "autoround")
# What LLM.int8 of bitsandbytes multiplies by in place of a division by 127.
OF_127 = 7.874015718698502e-3

# --- the layouts ---

# Of compressed-tensors, by its names; a weight q is the code q + 2**(bits - 1). Zeros of consecutive rows share words.
PACK_QUANTIZED = (
    StoredPart(CODES, "{weight}_packed", "I32"),
    StoredPart(SCALES, "{weight}_scale", "BF16"),
    StoredPart(SHAPE, "{weight}_shape", "I64", shape=(2,)),
)
PACK_QUANTIZED_ZEROS = (*PACK_QUANTIZED, StoredPart(ZEROS, "{weight}_zero_point", "I32", across=True, transposed=True))
# A weight q is stored as itself.
INT_QUANTIZED = (StoredPart(CODES, "{weight}", "I8", flipped=128), StoredPart(SCALES, "{weight}_scale", "BF16"))


def _gptq(first_zero: int) -> tuple[StoredPart, ...]:
    """Return AutoGPTQ's layout: codes follow each other in words along K, zeros along N; of 3 bits, 32 in three words.

    N is a multiple of 32 / bits.
    """
    return (
        StoredPart(CODES, "{module}.qweight", "I32", transposed=True),
        StoredPart(ZEROS, "{module}.qzeros", "I32", across=True, first=first_zero),
        StoredPart(SCALES, "{module}.scales", "F16", across=True),
        StoredPart(GROUP_OF, "{module}.g_idx", "I32"),
    )


# AutoGPTQ's first format, and that of GPTQModel.
GPTQ = {version: _gptq(first) for version, first in GPTQ_FIRST_ZEROS.items()}
# AutoAWQ's GEMM: eight consecutive rows of 4-bit codes and zeros share words, in an order of its own.
AWQ = (
    StoredPart(CODES, "{module}.qweight", "I32", across=True, order=AWQ_ORDER),
    StoredPart(ZEROS, "{module}.qzeros", "I32", across=True, order=AWQ_ORDER),
    StoredPart(SCALES, "{module}.scales", "F16", across=True),
)

# --- what configurations say ---


def awq_configuration(rule: RoundingRule, modules: Sequence[str], expressions: Iterable[str]) -> dict[str, Any]:
    """Return AutoAWQ's quantization_config. modules: those that stay plain"""
    return {
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": list(modules),
        "bits": rule.bits,
        "group_size": rule.group_size,
    }


def gptq_configuration(rule: RoundingRule, modules: Sequence[str], expressions: Iterable[str]) -> dict[str, Any]:
    """Return AutoGPTQ's quantization_config. expressions: of the modules that stay plain, and of no others"""
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "dynamic": {f"-:{expression}": {} for expression in expressions},
        "bits": rule.bits,
        "group_size": rule.group_size,
    }


def gptq_why_not(settings: Mapping[str, Any]) -> str | None:
    """Return what GPTQ has in a source that is not read; None if all is."""
    version, bits = str(settings.get("checkpoint_format", "gptq")), settings.get("bits")
    is_known = version in GPTQ_FIRST_ZEROS and is_one_of(bits, INTEGER_BITS)
    return None if is_known else f"GPTQ (checkpoint_format {version!r}, bits {bits!r})"


def awq_why_not(settings: Mapping[str, Any]) -> str | None:
    """Return what AWQ has in a source that is not read; None if all is."""
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit"))
    return None if version == "gemm" and is_one_of(bits, (4,)) else f"AWQ (version {version!r}, bits {bits!r})"


def of_auto_round(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of AutoRound as those of the tool whose layout it packed weights in, if that is known.

    `packing_format`, in old files `backend`, names the layout behind a colon: that of AutoAWQ, that of AutoGPTQ, whose
    zeros are stored less 1, or without either AutoRound's own, which is AutoGPTQ's with zeros as they are.
    """
    layout = str(settings.get("packing_format") or settings.get("backend") or "").lower()
    kind, _, rest = layout.partition(":")
    names = {"gptq", "auto_gptq"}, {"awq", "auto_awq"}, {"", "exllamav2", "triton", "tritonv2"}
    first = rest.partition(":")[0] if kind in ("auto_round", "auto-round") else kind
    if first not in set().union(*names) or str(settings.get("data_type", "int")) != "int":
        return settings
    if first in names[1]:
        return {**settings, "quant_method": "awq", "version": "gemm"}
    version = "gptq" if first in names[0] else "gptq_v2"
    return {**settings, "quant_method": "gptq", "checkpoint_format": version}


def auto_round_why_not(settings: Mapping[str, Any]) -> str | None:
    """Return what AutoRound has in a source in a layout that no other tool has."""
    layout = settings.get("packing_format") or settings.get("backend")
    return f"AutoRound (packing_format {layout!r}, data_type {settings.get('data_type', 'int')!r})"


# --- the weights of sources ---


def find_pack_quantized(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of `X_packed` of integers. The same tensors may fit several schemes: one must be right."""
    weight = name.removesuffix("_packed")
    if weight == name or codes.dtype == "U8":
        return None
    if codes.dtype != "I32" or len(codes.shape) != 2:
        raise unlike(codes, "codes", "I32 [rows, words] or U8")
    rows, words = codes.shape
    scales = source.part(codes, f"{weight}_scale", SCALE_DTYPES)
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    shape = source.part(codes, f"{weight}_shape", ("I64", "I32"), (2,))
    fitting = {}
    for bits, size in schemes(source.settings):
        # Groups are whole ones, unless there is one alone: then the shape is read, which takes a request.
        columns = groups * size if size is not None and groups > 1 else _columns(source, shape)
        group = columns if size is None else size
        if columns > 0 and -(-columns * bits // 32) == words and -(-columns // group) == groups:
            fitting[bits, columns] = group
    if len(fitting) > 1:
        stated = _columns(source, shape)
        fitting = {found: group for found, group in fitting.items() if found[1] == stated}
    if len(fitting) != 1 or next(iter(fitting))[0] not in INTEGER_BITS:
        raise SourceError(
            f"{codes.file}: tensor {codes.name!r}: expected I32 [rows, words] of 2, 3, 4 or 8 bits as one of "
            f"config_groups says, found {list(codes.shape)} with scales {list(scales.shape)}"
        )
    ((bits, columns), group), *_ = fitting.items()
    check_scales(scales, rows, groups)
    zeros, layout = source.stored.get(f"{weight}_zero_point"), PACK_QUANTIZED_ZEROS
    if zeros is not None:
        whole = ("I8", rows) if zeros.dtype == "I8" else ("I32", -(-rows * bits // 32))
        zeros = source.part(codes, zeros.name, whole[:1], (whole[1], groups))
        if zeros.dtype == "I8":
            layout = (*PACK_QUANTIZED, StoredPart(ZEROS, zeros.name, "I8", first=1 << (bits - 1)))
    stored = {CODES: codes, SCALES: scales, ZEROS: zeros, SHAPE: shape}
    how = integers(bits, group, scales, layout, zeros=zeros, rows=rows_for(scales, rows))
    return weight_of(source, weight, (rows, columns), f"INT{bits}", how, stored)


def find_int_quantized(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of `X` in I8 with `X_scale`."""
    if codes.dtype != "I8" or f"{name}_scale" not in source.stored or name.endswith("_packed"):
        return None
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise unlike(codes, "codes", "I8 [rows, columns]")
    rows, columns = codes.shape
    scales = source.part(codes, f"{name}_scale", SCALE_DTYPES)
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    check_scales(scales, rows, groups)
    if groups == 0 or columns % groups:
        raise unlike(scales, "scales", f"a number of columns that divides {columns}")
    sizes = [size for _, size in schemes(source.settings) if size is not None]
    if groups > 1 and columns // groups not in sizes:
        raise unlike(scales, "scales", f"one for each group of {' or '.join(map(str, sizes)) or columns} columns")
    zeros = source.stored.get(f"{name}_zero_point")
    if zeros is not None and math.prod(scales.shape) > 1:
        zeros = source.part(codes, zeros.name, ("I8",), (rows, groups))
    elif zeros is not None:
        raise unlike(zeros, "zero points", "none beside one scale for all")
    layout = INT_QUANTIZED if zeros is None else (*INT_QUANTIZED, StoredPart(ZEROS, zeros.name, "I8", first=128))
    how = integers(8, columns // groups, scales, layout, zeros=zeros, rows=rows_for(scales, rows))
    return weight_of(source, name, codes.shape, "INT8", how, {CODES: codes, SCALES: scales, ZEROS: zeros})


def find_gptq(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of `M.qweight` of AutoGPTQ or AutoAWQ, whose stored matrices have N columns."""
    module, settings = name.removesuffix(".qweight"), source.settings
    if module == name:
        return None
    is_awq = str(settings.get("quant_method", "")).lower() == "awq"
    if codes.dtype != "I32" or len(codes.shape) != 2 or 0 in codes.shape:
        raise unlike(codes, "codes", "I32 of two dimensions")
    scales = source.part(codes, f"{module}.scales", SCALE_DTYPES)
    order = None if is_awq else source.stored.get(f"{module}.g_idx")
    others = settings.get("extra_config")  # of modules that AutoRound packs in another way
    own = others.get(module) if isinstance(others, dict) else None
    own = own if isinstance(own, dict) else {}
    lines, bits = codes.shape[0], 4 if is_awq else settings["bits"]
    if order is not None and len(order.shape) == 1 and order.shape[0] > 0:
        bits = lines * 32 // order.shape[0]  # some modules may have other widths than most
    elif not is_awq and isinstance(own.get("bits"), int):
        bits = own["bits"]
    columns, rows = (lines, codes.shape[1] * 8) if is_awq else (lines * 32 // bits if bits else 0, codes.shape[1])
    if bits not in INTEGER_BITS or rows * bits % 32 or (not is_awq and columns * bits != lines * 32):
        raise unlike(codes, "codes", "whole words of 2, 3, 4 or 8 bits in both directions")
    groups = scales.shape[0] if len(scales.shape) == 2 else 0
    size = own.get("group_size", settings.get("group_size", settings.get("q_group_size", 128)))
    size = size if isinstance(size, int) and size > 0 else columns
    if order is not None and groups != -(-columns // size) and groups and columns % groups == 0:
        size = columns // groups  # and other groups
    if groups == 0 or scales.shape[1] != rows or groups != -(-columns // size):
        raise unlike(scales, "scales", f"{[-(-columns // size), rows]}")
    zeros = source.part(codes, f"{module}.qzeros", ("I32",), (groups, rows * bits // 32))
    if order is not None:
        order = source.part(codes, order.name, ("I32",), (columns,))
    layout = AWQ if is_awq else GPTQ[settings.get("checkpoint_format", "gptq")]
    stored = {CODES: codes, SCALES: scales, ZEROS: zeros, GROUP_OF: order}
    how = integers(bits, size, scales, layout, zeros=zeros)
    dtype = "AWQ4" if is_awq else f"GPTQ{bits}"
    return weight_of(source, f"{module}.weight", (rows, columns), dtype, how, stored)


def find_llm_int8(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of `M.weight` in I8 with `M.SCB`, of bitsandbytes."""
    module = name.removesuffix(".weight")
    if module == name or f"{module}.SCB" not in source.stored:
        return None
    if codes.dtype != "I8" or len(codes.shape) != 2 or 0 in codes.shape:
        raise unlike(codes, "codes", "I8 [rows, columns]")
    scales = source.part(codes, f"{module}.SCB", ("F32",), codes.shape[:1])
    of_layout = source.stored.get(f"{name}_format")
    if of_layout is not None and any(number := read_stored(source.storage, of_layout)):
        raise SourceError(
            f"{of_layout.file}: {of_layout.name!r}: expected 0, for codes in rows, found {number[0]}, one of the "
            "layouts that old versions of bitsandbytes made for GPUs"
        )
    rule = GroupRule(bits=8, group_size=codes.shape[1], symmetric=True, middle=True, scale_dtype="F32")
    how, others = PackedFormat(rule, INT_QUANTIZED, OF_127), () if of_layout is None else (of_layout,)
    return weight_of(source, name, codes.shape, "SCB8", how, {CODES: codes, SCALES: scales}, others=others)


def integers(
    bits: int,
    size: int,
    scales: StoredTensor,
    layout: tuple[StoredPart, ...],
    *,
    zeros: StoredTensor | None,
    rows: int = 1,
) -> PackedFormat:
    """Return the format of codes that stand for (code - zero) * scale; without zeros, the middle code stands for 0."""
    is_symmetric = zeros is None
    rule = GroupRule(
        bits=bits,
        group_size=size,
        symmetric=is_symmetric,
        middle=is_symmetric,
        zeros=not is_symmetric,
        scale_dtype=scales.dtype,
        rows=rows,
    )
    return PackedFormat(rule, layout)


def check_scales(scales: StoredTensor, rows: int, groups: int) -> None:
    """Raise SourceError for scales of integers that are neither [rows, groups] nor [rows] nor one for all."""
    if scales.shape not in ((rows, groups), (rows,), (1,), ()):
        raise unlike(scales, "scales", f"one for each of {rows} rows, or for groups of them")


def _columns(source: Source, shape: StoredTensor) -> int:
    """Read the number of columns of a weight."""
    return int(read_stored(source.storage, shape).view({"I64": "<i8", "I32": "<i4"}[shape.dtype])[1])
