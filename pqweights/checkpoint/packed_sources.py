"""Which tensors of a source are weights that other tools packed, by its configuration and by their names.

`X` is a weight. compressed-tensors: `X_packed` in I32 with `X_scale`, `X_shape` and perhaps `X_zero_point` (integers),
in U8 with `X_scale` (MXFP4), and also with `X_global_scale` (NVFP4); `X` in I8 with `X_scale`. ModelOpt's NVFP4: `X` in
U8 with `X_scale` and `X_scale_2`. DeepSeek-V4's experts in MXFP4: `X` in I8 with a scale (scales_of). AutoGPTQ and
AutoAWQ, of the weight of a module `M`: `M.qweight`, `M.qzeros` and `M.scales`, and of the former `M.g_idx`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.packed import PackedSourceTensor, TransposedTensor
from pqweights.checkpoint.storage import ByteReads
from pqweights.common.dtypes import PACKED_DTYPES
from pqweights.errors import SourceError

Shape = tuple[int, ...]
SCALE_DTYPES = ("BF16", "F16", "F32")
MODELOPT_ALGORITHMS = ("FP8", "NVFP4")
# Of compressed-tensors, those whose weights are decoded here or by quantized.py.
LAYOUTS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"),
)
# By GPTQ's checkpoint_format: the zero that is stored as 0.
GPTQ_FIRST_ZEROS = {"gptq": 1, "gptq_v2": 0}
INTEGER_BITS = tuple(bits for dtype, (bits, _) in PACKED_DTYPES.items() if dtype.startswith("INT"))


# What a configuration says of some weights: the width of a code, and the size of a group; None for a whole row.
Scheme = tuple[int, int | None]


def why_not(settings: dict[str, Any]) -> str | None:
    """Return what a source in one of these formats has that is not decoded; None if all is."""
    if _method(settings) == "modelopt":
        nested = settings.get("quantization")
        algorithm = settings.get("quant_algo") or (nested.get("quant_algo") if isinstance(nested, dict) else None)
        return None if algorithm in MODELOPT_ALGORITHMS else f"ModelOpt {algorithm}"
    if _method(settings) == "gptq":
        version, bits = str(settings.get("checkpoint_format", "gptq")), settings.get("bits")
        is_known = version in GPTQ_FIRST_ZEROS and bits in INTEGER_BITS
        return None if is_known else f"GPTQ (checkpoint_format {version!r}, bits {bits!r})"
    if _method(settings) == "awq":
        version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit"))
        return None if version == "gemm" and bits == 4 else f"AWQ (version {version!r}, bits {bits!r})"
    layouts = [settings.get("format"), *(group.get("format") for group in _groups(settings))]
    for layout in layouts:
        if layout is not None and layout not in LAYOUTS:
            return f"compressed-tensors ({layout})"
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        return f"compressed-tensors (sparsity_config: {sparsity['format']})"
    transforms = settings.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        return "compressed-tensors (transform_config: weights in another basis)"
    weights = [group.get("weights") for group in _groups(settings)]
    if not weights or not all(isinstance(w, dict) and isinstance(w.get("num_bits"), int) for w in weights):
        return f"compressed-tensors ({settings.get('format', 'unknown format')}, config_groups without num_bits)"
    return None


def scales_of(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the scales of a weight in FP8 or in DeepSeek-V4's FP4, by any of the names that they have in files."""
    module = name.removesuffix(".weight")
    names = (f"{name}_scale_inv", f"{name}_scale", *((f"{module}.scale",) if module != name else ()))
    return next((stored[scale] for scale in names if scale in stored), None)


def packed_tensors(
    storage: ByteReads, stored: Mapping[str, StoredTensor], settings: dict[str, Any]
) -> Iterator[PackedSourceTensor]:
    """Yield the weights that are packed.

    Raises SourceError, which names the stored tensor, for parts that are missing or do not fit.
    """
    method = _method(settings)
    source = _PackedSource(storage, stored)
    for name, codes in stored.items():
        weight = name.removesuffix("_packed")
        if method == "compressed-tensors" and weight != name and codes.dtype == "U8":
            yield source.floats(weight, codes, stored.get(f"{weight}_scale"), "_global_scale")
        elif method == "compressed-tensors" and weight != name:
            yield source.integers(weight, codes, _schemes(settings))
        elif method == "compressed-tensors" and codes.dtype == "I8" and f"{name}_scale" in stored:
            yield source.bytes(name, codes)
        elif method == "modelopt" and codes.dtype == "U8" and f"{name}_scale" in stored:
            yield source.floats(name, codes, stored[f"{name}_scale"], "_scale_2")
        elif method == "fp8" and codes.dtype == "I8" and (scales := scales_of(name, stored)) is not None:
            yield source.floats(name, codes, scales)
        elif method in ("gptq", "awq") and name.endswith(".qweight"):
            yield source.transposed(name.removesuffix(".qweight"), codes, settings)


def _method(settings: dict[str, Any]) -> str:
    return str(settings.get("quant_method", "")).lower()


def _groups(settings: dict[str, Any]) -> list[dict[str, Any]]:
    groups = settings.get("config_groups")
    members = groups.values() if isinstance(groups, dict) else ()
    return [group if isinstance(group, dict) else {} for group in members]


def _schemes(settings: dict[str, Any]) -> list[Scheme]:
    """Return the schemes of integer weights, each once."""
    found = []
    for weights in (group["weights"] for group in _groups(settings)):
        size = weights.get("group_size")
        if weights.get("type", "int") == "int":
            found.append((weights["num_bits"], size if isinstance(size, int) and size > 0 else None))
    return list(dict.fromkeys(found))


class _PackedSource:
    """The stored tensors of a source, in which the parts of weights are looked up."""

    def __init__(self, storage: ByteReads, stored: Mapping[str, StoredTensor]) -> None:
        self._storage, self._stored = storage, stored

    def integers(self, weight: str, codes: StoredTensor, schemes: list[Scheme]) -> PackedSourceTensor:
        """Return a weight of pack-quantized. The same tensors may fit several schemes, of which one must be right."""
        if codes.dtype != "I32" or len(codes.shape) != 2:
            raise _unlike(codes, "codes", "I32 [rows, words] or U8")
        rows, words = codes.shape
        scales = self._part(codes, f"{weight}_scale", SCALE_DTYPES)
        groups = scales.shape[-1] if len(scales.shape) == 2 else 1
        shape = self._part(codes, f"{weight}_shape", ("I64", "I32"), (2,))
        fitting = {}
        for bits, size in schemes:
            # Groups are whole ones, unless there is one alone: then the shape is read, which takes a request.
            columns = groups * size if size is not None and groups > 1 else self._columns(shape)
            group = columns if size is None else size
            if columns > 0 and -(-columns * bits // 32) == words and -(-columns // group) == groups:
                fitting[bits, columns] = group
        if len(fitting) != 1 or next(iter(fitting))[0] not in INTEGER_BITS:
            raise SourceError(
                f"{codes.file}: tensor {codes.name!r}: expected I32 [rows, words] of 2, 3, 4 or 8 bits as one of "
                f"config_groups says, found {list(codes.shape)} with scales {list(scales.shape)}"
            )
        ((bits, columns), group), *_ = fitting.items()
        self._check_scales(scales, rows, groups)
        zeros = self._stored.get(f"{weight}_zero_point")
        if zeros is not None:
            dtype, lines = ("I8", rows) if zeros.dtype == "I8" else ("I32", -(-rows * bits // 32))
            zeros = self._part(codes, zeros.name, (dtype,), (lines, groups))
        return self._tensor(weight, (rows, columns), f"INT{bits}", (codes, scales, zeros, shape), group)

    def bytes(self, weight: str, codes: StoredTensor) -> PackedSourceTensor:
        """Return a weight of int-quantized."""
        if len(codes.shape) != 2 or 0 in codes.shape:
            raise _unlike(codes, "codes", "I8 [rows, columns]")
        rows, columns = codes.shape
        scales = self._part(codes, f"{weight}_scale", SCALE_DTYPES)
        groups = scales.shape[-1] if len(scales.shape) == 2 else 1
        self._check_scales(scales, rows, groups)
        if groups == 0 or columns % groups:
            raise _unlike(scales, "scales", f"a number of columns that divides {columns}")
        zeros = self._stored.get(f"{weight}_zero_point")
        if zeros is not None and math.prod(scales.shape) > 1:
            zeros = self._part(codes, zeros.name, ("I8",), (rows, groups))
        elif zeros is not None:
            raise _unlike(zeros, "zero points", "none beside one scale for all")
        return self._tensor(weight, codes.shape, "INT8", (codes, scales, zeros), columns // groups)

    def floats(
        self, weight: str, codes: StoredTensor, scales: StoredTensor | None, unit: str | None = None
    ) -> PackedSourceTensor:
        """Return a weight of MXFP4 or NVFP4.

        unit: the end of the name of what the scales of NVFP4 are measured in; None if it has to be MXFP4
        """
        if len(codes.shape) not in (2, 3) or 0 in codes.shape:
            raise _unlike(codes, "codes", "bytes [..., rows, columns / 2]")
        scale_name = f"{weight}_scale" if scales is None else scales.name
        scales = self._part(codes, scale_name, ("U8", "F8_E8M0", *(("F8_E4M3",) if unit is not None else ())))
        dtype, size = ("NVFP4", 16) if scales.dtype == "F8_E4M3" else ("MXFP4", 32)
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        scales = self._part(codes, scales.name, (scales.dtype,), (*shape[:-1], -(-shape[-1] // size)))
        of_all = self._part(codes, f"{weight}{unit}", ("F32",)) if dtype == "NVFP4" else None
        if of_all is not None and math.prod(of_all.shape) != 1:
            raise _unlike(of_all, "scale", "F32 [1]")
        return self._tensor(weight, shape, dtype, (codes, scales, of_all), size)

    def transposed(self, module: str, codes: StoredTensor, settings: dict[str, Any]) -> TransposedTensor:
        """Return the weight of a module in the format of AutoGPTQ or AutoAWQ."""
        is_awq = _method(settings) == "awq"
        if codes.dtype != "I32" or len(codes.shape) != 2 or 0 in codes.shape:
            raise _unlike(codes, "codes", "I32 of two dimensions")
        scales = self._part(codes, f"{module}.scales", SCALE_DTYPES)
        order = None if is_awq else self._stored.get(f"{module}.g_idx")
        lines, bits = codes.shape[0], 4 if is_awq else settings["bits"]
        if order is not None and len(order.shape) == 1 and order.shape[0] > 0:
            bits = lines * 32 // order.shape[0]  # some modules may have other widths than most
        columns, rows = (lines, codes.shape[1] * 8) if is_awq else (lines * 32 // bits if bits else 0, codes.shape[1])
        if bits not in INTEGER_BITS or rows * bits % 32 or (not is_awq and columns * bits != lines * 32):
            raise _unlike(codes, "codes", "whole words of 2, 3, 4 or 8 bits in both directions")
        groups = scales.shape[0] if len(scales.shape) == 2 else 0
        size = settings.get("group_size", settings.get("q_group_size", 128))
        size = size if isinstance(size, int) and size > 0 else columns
        if groups == 0 or scales.shape[1] != rows or (order is None and groups != -(-columns // size)):
            raise _unlike(scales, "scales", f"{[-(-columns // size), rows]}")
        zeros = self._part(codes, f"{module}.qzeros", ("I32",), (groups, rows * bits // 32))
        if order is not None:
            order = self._part(codes, order.name, ("I32",), (columns,))
        return TransposedTensor(
            storage=self._storage,
            name=f"{module}.weight",
            shape=(rows, columns),
            dtype="AWQ4" if is_awq else f"GPTQ{bits}",
            parts=(codes, scales, zeros, *(() if order is None else (order,))),
            plain_dtype="F16" if scales.dtype == "F16" else "BF16",
            bits=bits,
            is_float=False,
            group_size=size,
            scales=scales,
            zeros=zeros,
            group_of=order,
            is_awq=is_awq,
            first_zero=0 if is_awq else GPTQ_FIRST_ZEROS[settings.get("checkpoint_format", "gptq")],
        )

    def _tensor(
        self, weight: str, shape: Shape, dtype: str, parts: tuple[StoredTensor | None, ...], group_size: int
    ) -> PackedSourceTensor:
        codes, scales, third, *_ = parts
        assert codes is not None and scales is not None
        is_float = dtype in ("NVFP4", "MXFP4")
        return PackedSourceTensor(
            storage=self._storage,
            name=weight,
            shape=shape,
            dtype=dtype,
            parts=tuple(part for part in parts if part is not None),
            plain_dtype="F16" if scales.dtype == "F16" else "BF16",
            bits=PACKED_DTYPES[dtype][0],
            is_float=is_float,
            group_size=group_size,
            scales=scales,
            zeros=None if is_float else third,
            unit=third if is_float else None,
        )

    def _part(
        self, codes: StoredTensor, name: str, dtypes: tuple[str, ...], shape: Shape | None = None
    ) -> StoredTensor:
        """Return a stored tensor that codes need. Raises SourceError if it is missing or another one."""
        part = self._stored.get(name)
        if part is None:
            raise SourceError(
                f"{codes.file}: tensor {codes.name!r} is quantized, without all that it is decoded with; expected "
                f"{name!r} in some shard, found none"
            )
        if part.dtype not in dtypes or (shape is not None and part.shape != shape):
            expected = " or ".join(dtypes) + ("" if shape is None else f" {list(shape)}")
            raise _unlike(part, "part of a quantized weight", expected)
        return part

    def _check_scales(self, scales: StoredTensor, rows: int, groups: int) -> None:
        """Raise SourceError for scales of integers that are neither [rows, groups] nor [rows] nor one for all."""
        if scales.shape not in ((rows, groups), (rows,), (1,), ()):
            raise _unlike(scales, "scales", f"one for each of {rows} rows, or for groups of them")

    def _columns(self, shape: StoredTensor) -> int:
        """Read the number of columns of a weight."""
        raw = np.empty(shape.byte_count, dtype=np.uint8)
        self._storage.read_into(shape.file, shape.offset, raw)
        return int(raw.view({"I64": "<i8", "I32": "<i4"}[shape.dtype])[1])


def _unlike(stored: StoredTensor, what: str, expected: str) -> SourceError:
    return SourceError(
        f"{stored.file}: {what} {stored.name!r}: expected {expected}, found {stored.dtype} {list(stored.shape)}"
    )
