"""Which tensors of a source are weights that other tools packed, by its configuration and by their names.

`X` is a weight. compressed-tensors: `X_packed` in I32 with `X_scale`, `X_shape` and perhaps `X_zero_point` (integers),
in U8 with `X_scale` (MXFP4), and also with `X_global_scale` (NVFP4); `X` in I8 with `X_scale`. ModelOpt's NVFP4: `X` in
U8 with `X_scale` and `X_scale_2`. DeepSeek-V4's experts in MXFP4: `X` in I8 with a scale (scales_of). Of the weight of
a module `M`: AutoGPTQ and AutoAWQ: `M.qweight`, `M.qzeros` and `M.scales`, and of the former `M.g_idx`. MLX: `M.weight`
in U32 with `M.scales` and perhaps `M.biases`. torchao: `M._weight_qdata`, `M._weight_scale` and perhaps
`M._weight_zero_point`. bitsandbytes: `X` in I8 with `M.SCB`, or `X` in bytes with `X.absmax`, `X.quant_map` and the
JSON of `X.quant_state.bitsandbytes__nf4`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.mlx_stacks import STACK, stacks_of
from pqweights.checkpoint.packed import DecodedTensor, NestedScales, PackedSourceTensor, TableTensor, TransposedTensor
from pqweights.checkpoint.storage import ByteReads
from pqweights.common.documents import Document, Number, Size, read_document
from pqweights.common.dtypes import PACKED_DTYPES
from pqweights.common.strict_json import MAX_ELEMENTS
from pqweights.errors import SourceError

Shape = tuple[int, ...]
SCALE_DTYPES = ("BF16", "F16", "F32")
# What the scales of a module's weight in FP8 are called: by DeepSeek V4, ComfyUI, Mistral AI and TensorRT-LLM.
SCALES = ("scale", "scale_weight", "qscale_weight", "weights_scaling_factor")
MODELOPT_ALGORITHMS = ("FP8", "NVFP4")
# Of compressed-tensors, those whose weights are decoded here or by quantized.py.
LAYOUTS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"),
)
# By GPTQ's checkpoint_format: the zero that is stored as 0.
GPTQ_FIRST_ZEROS = {"gptq": 1, "gptq_v2": 0}
# What AutoRound calls itself (https://github.com/intel/auto-round).
AUTO_ROUND = ("auto-round", "intel/auto-round", "auto_round", "autoround")
# Of MLX's modes, the bits of a code and the dtype of scales; affine has any bits, and scales that are floats.
MLX_MODES = {"affine": (4, None), "mxfp4": (4, "U8"), "mxfp8": (8, "U8"), "nvfp4": (4, "F8_E4M3")}
MLX_BITS = (1, 2, 3, 4, 5, 6, 8)
# What LLM.int8 of bitsandbytes multiplies by in place of a division by 127.
OF_127 = 7.874015718698502e-3
MOST_JSON_BYTES = 1 << 16
QUANT_STATE = ".quant_state.bitsandbytes__"
INTEGER_BITS = tuple(bits for dtype, (bits, _) in PACKED_DTYPES.items() if dtype.startswith("INT"))


# What a configuration says of some weights: the width of a code, and the size of a group; None for a whole row.
Scheme = tuple[int, int | None]


def why_not(settings: dict[str, Any]) -> str | None:
    """Return what a source in one of these formats has that is not decoded; None if all is."""
    if _method(settings) in ("fp8", "mlx", "torchao", "bitsandbytes"):
        return None
    if _method(settings) == "modelopt":
        nested = settings.get("quantization")
        algorithm = settings.get("quant_algo") or (nested.get("quant_algo") if isinstance(nested, dict) else None)
        return None if algorithm in MODELOPT_ALGORITHMS else f"ModelOpt {algorithm}"
    if _method(settings) in AUTO_ROUND:
        layout = settings.get("packing_format") or settings.get("backend")
        return f"AutoRound (packing_format {layout!r}, data_type {settings.get('data_type', 'int')!r})"
    if _method(settings) == "gptq":
        version, bits = str(settings.get("checkpoint_format", "gptq")), settings.get("bits")
        is_known = version in GPTQ_FIRST_ZEROS and _is_one_of(bits, INTEGER_BITS)
        return None if is_known else f"GPTQ (checkpoint_format {version!r}, bits {bits!r})"
    if _method(settings) == "awq":
        version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit"))
        return None if version == "gemm" and _is_one_of(bits, (4,)) else f"AWQ (version {version!r}, bits {bits!r})"
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


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of AutoRound as those of the tool whose layout it packed weights in; others as they are.

    `packing_format`, in old files `backend`, names the layout behind a colon: that of AutoAWQ, that of AutoGPTQ, whose
    zeros are stored less 1, or without either AutoRound's own, which is AutoGPTQ's with zeros as they are.
    """
    if _method(settings) not in AUTO_ROUND:
        return settings
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


def _is_one_of(bits: Any, widths: Sequence[int]) -> bool:
    """Whether a width in a configuration is one of these; for Python, 4.0 is 4 and true is 1."""
    return type(bits) is int and bits in widths


def scales_of(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the scales of a weight in FP8 or in DeepSeek-V4's FP4, by any of the names that they have in files."""
    module = name.removesuffix(".weight")
    names = (f"{name}_scale_inv", f"{name}_scale", *(f"{module}.{scale}" for scale in SCALES if module != name))
    return next((stored[scale] for scale in names if scale in stored), None)


def packed_tensors(
    storage: ByteReads, stored: Mapping[str, StoredTensor], settings: dict[str, Any]
) -> Iterator[DecodedTensor]:
    """Yield the weights that are packed.

    Raises SourceError, which names the stored tensor, for parts that are missing or do not fit.
    """
    find, source = _FINDERS.get(_method(settings)), _PackedSource(storage, stored, settings)
    if find is None:
        return
    for name, codes in stored.items():
        found = find(source, name, codes)
        if found is not None:
            yield found


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


Positive = Annotated[int, Meta(ge=1, le=MAX_ELEMENTS)]


class _QuantState(Document, frozen=True, kw_only=True):
    """What bitsandbytes states of a weight in 4 bits (functional.QuantState.as_dict)."""

    blocksize: Positive
    dtype: str
    shape: tuple[Size, ...]
    nested_blocksize: Positive = 1
    nested_offset: Number = 0.0


class _PackedSource:
    """The stored tensors of a source, in which the parts of weights are looked up."""

    def __init__(self, storage: ByteReads, stored: Mapping[str, StoredTensor], settings: dict[str, Any]) -> None:
        self._storage, self._stored, self._settings = storage, stored, settings

    def of_compressed_tensors(self, name: str, codes: StoredTensor) -> PackedSourceTensor | None:
        """Return the weight whose codes a stored tensor is; None if it is another tensor."""
        weight = name.removesuffix("_packed")
        if weight != name and codes.dtype == "U8":
            return self.floats(weight, codes, self._stored.get(f"{weight}_scale"), "_global_scale")
        if weight != name:
            return self.integers(weight, codes, _schemes(self._settings))
        return self.bytes(name, codes) if codes.dtype == "I8" and f"{name}_scale" in self._stored else None

    def of_modelopt(self, name: str, codes: StoredTensor) -> PackedSourceTensor | None:
        """Return the weight of modelopt whose codes a stored tensor is; None if it is another tensor."""
        scales = self._stored.get(f"{name}_scale") if codes.dtype == "U8" else None
        return None if scales is None else self.floats(name, codes, scales, "_scale_2")

    def of_deepseek(self, name: str, codes: StoredTensor) -> PackedSourceTensor | None:
        """Return the weight of four bits of DeepSeek whose codes a stored tensor is; None if it is another tensor."""
        scales = scales_of(name, self._stored) if codes.dtype == "I8" else None
        return None if scales is None else self.floats(name, codes, scales)

    def of_gptq(self, name: str, codes: StoredTensor) -> TransposedTensor | None:
        """Return the weight of GPTQ or AWQ whose codes a stored tensor is; None if it is another tensor."""
        module = name.removesuffix(".qweight")
        return None if module == name else self.transposed(module, codes, self._settings)

    def of_mlx(self, name: str, codes: StoredTensor) -> PackedSourceTensor | None:
        """Return the weight of MLX whose codes a stored tensor is; None if it is another tensor."""
        module = name.removesuffix(".weight")
        if module == name or codes.dtype != "U32":
            return None
        if STACK.fullmatch(name):
            raise SourceError(
                f"{codes.file}: tensor {name!r}: a stack of experts of MLX, in a model that mlx-lm changes in other "
                "ways, too; give the original checkpoint"
            )
        own = next((of for path in (module, *stacks_of(module)) if (of := self._settings.get(path))), None)
        how = {**self._settings, **own} if isinstance(own, dict) else self._settings
        mode, size = how.get("mode", "affine"), how.get("group_size")
        usual, dtype = MLX_MODES.get(mode, (0, None)) if isinstance(mode, str) else (0, None)
        bits = how.get("bits", usual) if mode == "affine" else usual
        if not _is_one_of(bits, MLX_BITS) or not isinstance(size, int) or size < 1:
            found = f"mode {mode!r}, bits {bits!r}, group_size {size!r}"
            raise SourceError(f"config.json: quantization of {module!r}: expected a mode of MLX, found {found}")
        rows, columns = codes.shape[:-1], codes.shape[-1] * 32 // bits if codes.shape else 0
        if (
            len(codes.shape) != 2
            or not math.prod(codes.shape)
            or columns * bits != codes.shape[-1] * 32
            or columns % size
        ):
            raise _unlike(codes, "codes", f"U32 [rows, words] of {bits} bits in groups of {size}")
        shape = (*rows, columns // size)
        scales = self._part(codes, f"{module}.scales", SCALE_DTYPES if dtype is None else ("U8",), shape)
        parts = [codes, scales]
        if dtype is None:
            parts.append(self._part(codes, f"{module}.biases", (scales.dtype,), shape))
        return PackedSourceTensor(
            storage=self._storage,
            name=name,
            shape=(*rows, columns),
            dtype=f"MLX{bits}" if dtype is None else {"mxfp8": "F8_E4M3"}.get(mode, mode.upper()),
            parts=tuple(parts),
            plain_dtype=scales.dtype if scales.dtype in ("F16", "F32") else "BF16",
            bits=bits,
            is_float=dtype is not None,
            group_size=size,
            scales=scales if dtype is None else scales._replace(dtype=dtype),
            biases=parts[2] if dtype is None else None,
        )

    def of_torchao(self, name: str, codes: StoredTensor) -> PackedSourceTensor | None:
        """Return the weight of torchao whose codes a stored tensor is; None if it is another tensor."""
        stem = name.removesuffix("_qdata")
        module = stem.removesuffix("._weight")
        if name in (stem, module) or stem == module:
            return None
        if codes.dtype not in ("I8", "U8", "F8_E4M3") or len(codes.shape) != 2 or 0 in codes.shape:
            found = f"{codes.dtype} {list(codes.shape)}"
            tiles = "; tiles for tinygemm are not read" if codes.dtype == "I32" else ""
            raise SourceError(
                f"{codes.file}: tensor {name!r}: expected the bytes of torchao's Int4Tensor, Int8Tensor or "
                f"Float8Tensor, found {found}{tiles}; give the original checkpoint"
            )
        unread = next((n for n in (f"{stem}_act_pre_scale", f"{stem}_act_quant_scale") if n in self._stored), None)
        if unread is not None:
            raise SourceError(
                f"{codes.file}: tensor {unread!r}: scaled inputs are not read; give the original checkpoint"
            )
        scales, zeros = self._part(codes, f"{stem}_scale", SCALE_DTYPES), self._stored.get(f"{stem}_zero_point")
        rows, lines = codes.shape
        is_int4 = zeros is not None and zeros.dtype in SCALE_DTYPES
        columns = 2 * lines if is_int4 else lines
        groups = scales.shape[0 if is_int4 else -1] if len(scales.shape) == 2 else 1
        if is_int4 and scales.shape != (groups, rows):
            raise _unlike(scales, "scales", f"[groups, {rows}]")
        if not is_int4:
            self._check_scales(scales, rows, groups)
        if groups == 0 or columns % groups:
            raise _unlike(scales, "scales", f"groups that divide {columns} columns")
        if zeros is not None and is_int4:
            zeros = self._part(codes, zeros.name, (scales.dtype,), scales.shape)
        elif zeros is not None:
            zeros = self._part(codes, zeros.name, ("I8",), scales.shape)
        is_float = codes.dtype == "F8_E4M3"
        return PackedSourceTensor(
            storage=self._storage,
            name=f"{module}.weight",
            shape=(rows, columns),
            dtype="F8_E4M3" if is_float else "AO4" if is_int4 else "AO8",
            parts=(codes, scales, *(() if zeros is None else (zeros,))),
            plain_dtype="F16" if scales.dtype == "F16" else "BF16",
            bits=4 if is_int4 else 8,
            is_float=is_float,
            group_size=columns // groups,
            scales=scales,
            zeros=None if is_int4 else zeros,
            zero=0 if is_float else 8 if is_int4 else 128,
            biases=zeros if is_int4 else None,
            is_transposed=is_int4,
        )

    def of_bitsandbytes(self, name: str, codes: StoredTensor) -> DecodedTensor | None:
        """Return the weight of bitsandbytes whose codes a stored tensor is; None if it is another tensor."""
        module = name.removesuffix(".weight")
        if module == name:
            return None
        if f"{module}.SCB" in self._stored:
            if codes.dtype != "I8" or len(codes.shape) != 2 or 0 in codes.shape:
                raise _unlike(codes, "codes", "I8 [rows, columns]")
            scales = self._part(codes, f"{module}.SCB", ("F32",), codes.shape[:1])
            layout = self._stored.get(f"{name}_format")
            parts = (codes, scales, *(() if layout is None else (layout,)))
            packed = self._tensor(name, codes.shape, "SCB8", (codes, scales, None), codes.shape[1])
            return replace(packed, parts=parts, factor=OF_127)
        state = next((of for kind in ("nf4", "fp4") if (of := self._stored.get(f"{name}{QUANT_STATE}{kind}"))), None)
        return None if state is None else self._table(name, codes, state)

    def _table(self, name: str, codes: StoredTensor, state: StoredTensor) -> TableTensor:
        """Return a weight of bitsandbytes in 4 bits. state: the bytes of a JSON object, which takes a request"""
        if state.byte_count > MOST_JSON_BYTES:
            raise _unlike(state, "JSON", f"at most {MOST_JSON_BYTES} bytes")
        raw = np.empty(state.byte_count, dtype=np.uint8)
        self._storage.read_into(state.file, state.offset, raw)
        place = f"{state.file}: tensor {state.name!r}"
        about = read_document(raw.tobytes(), _QuantState, lambda problem: SourceError(f"{place}: {problem}"))
        count = math.prod(about.shape)
        if not 0 < count <= MAX_ELEMENTS:
            raise SourceError(f"{place}: expected the shape of a weight, found {list(about.shape)}")
        if codes.byte_count != -(-count // 2):
            raise _unlike(codes, "codes", f"{-(-count // 2)} bytes for {list(about.shape)}")
        blocks = -(-count // about.blocksize)
        is_nested = f"{name}.nested_absmax" in self._stored
        scales = self._part(codes, f"{name}.absmax", ("U8",) if is_nested else ("F32",), (blocks,))
        table, nested = self._part(codes, f"{name}.quant_map", ("F32",), (16,)), None
        if is_nested:
            of_blocks = (-(-blocks // about.nested_blocksize),)
            nested = NestedScales(
                self._part(codes, f"{name}.nested_absmax", ("F32",), of_blocks),
                self._part(codes, f"{name}.nested_quant_map", ("F32",), (256,)),
                about.nested_blocksize,
                about.nested_offset,
            )
        return TableTensor(
            storage=self._storage,
            name=name,
            shape=about.shape,
            dtype=state.name.removeprefix(f"{name}{QUANT_STATE}").upper(),
            parts=(codes, scales, table, *(() if nested is None else nested[:2]), state),
            plain_dtype={"float16": "F16", "float32": "F32"}.get(about.dtype, "BF16"),
            table=table,
            block_size=about.blocksize,
            scales=scales,
            nested=nested,
        )

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
            raise _unlike(codes, "codes", "whole words of 2, 3, 4 or 8 bits in both directions")
        groups = scales.shape[0] if len(scales.shape) == 2 else 0
        size = own.get("group_size", settings.get("group_size", settings.get("q_group_size", 128)))
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
            zero=0 if is_float else 1 << (PACKED_DTYPES[dtype][0] - 1),
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


_FINDERS: dict[str, Callable[[_PackedSource, str, StoredTensor], DecodedTensor | None]] = {
    "compressed-tensors": _PackedSource.of_compressed_tensors,
    "modelopt": _PackedSource.of_modelopt,
    "fp8": _PackedSource.of_deepseek,
    "gptq": _PackedSource.of_gptq,
    "awq": _PackedSource.of_gptq,
    "mlx": _PackedSource.of_mlx,
    "torchao": _PackedSource.of_torchao,
    "bitsandbytes": _PackedSource.of_bitsandbytes,
}
PACKED_METHODS = (*_FINDERS, *AUTO_ROUND)


def _unlike(stored: StoredTensor, what: str, expected: str) -> SourceError:
    return SourceError(
        f"{stored.file}: {what} {stored.name!r}: expected {expected}, found {stored.dtype} {list(stored.shape)}"
    )
