"""torchao's tensors of linear layers, in 4 or 8 bits: how they are stored, and from what torchao rebuilds them.

Formats: torchao 0.18, quantization/quantize_/workflows, and its prototype/safetensors. Tiles for tinygemm are only
written.
"""

from __future__ import annotations

from typing import Any

from pqweights.checkpoint.header import StoredTensor
from pqweights.errors import SourceError
from pqweights.formats.integer_groups import check_scales, integers
from pqweights.formats.packed import SCALE_DTYPES, QuantizedTensor, Source, rows_for, unlike, weight_of
from pqweights.formats.packing import CODES, OFFSETS, SCALES, TILE_ROWS, ZEROS, PackedFormat, StoredPart
from pqweights.kernels.groups import FloatRule, GroupRule

TILE, UNTILED = "tile_packed_to_4d", "plain"
BF16 = {"_type": "torch.dtype", "_data": "bfloat16"}
PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
SYMMETRIC = {"_type": "MappingType", "_data": "SYMMETRIC"}

_NAME = "{module}._{parameter}_"
# torchao's Int8Tensor, with a scale for each row.
INT8_ROWS = (
    StoredPart(CODES, _NAME + "qdata", "I8", flipped=128),
    StoredPart(SCALES, _NAME + "scale", "F32"),
    StoredPart(ZEROS, _NAME + "zero_point", "I8", first=128),
)
# torchao's Int4Tensor: codes minus 8 as nibbles, the even column low.
INT4_PLAIN = (
    StoredPart(CODES, _NAME + "qdata", "I8", flipped=0x88),
    StoredPart(SCALES, _NAME + "scale", "BF16", across=True),
    StoredPart(OFFSETS, _NAME + "zero_point", "BF16", across=True),
)
# torchao's Int4TilePackedTo4dTensor: tiles of 8 rows by 128 columns, of which the padding is read back as 0; the second
# tensor has pairs of scales and offsets.
INT4_TILES = (
    StoredPart(CODES, _NAME + "qdata", "I32", tiled=True),
    StoredPart(SCALES, _NAME + "scale_and_zero", "BF16", tiled=True),
)
# torchao's Float8Tensor, with a scale for each row.
FP8_ROWS = (StoredPart(CODES, _NAME + "qdata", "F8_E4M3"), StoredPart(SCALES, _NAME + "scale", "F32"))


def rebuilt(layout: tuple[StoredPart, ...], shape: tuple[int, ...], size: int, *, activations: bool) -> dict[str, Any]:
    """Return what torchao rebuilds the tensor of a weight from: an entry of the metadata of safetensors files.

    size: of groups
    activations: whether the runtime also rounds what layers read
    """
    data: dict[str, Any] = {"block_size": [1, size], "shape": list(shape)}
    if layout == INT4_TILES:
        return _tensor("Int4TilePackedTo4dTensor", data, "qdata", "scale_and_zero")
    if layout == INT4_PLAIN:
        return _tensor("Int4Tensor", data | {"activation_dtype": BF16}, "qdata", "scale", "zero_point")
    data = {"block_size": [1, shape[1]], "dtype": BF16, "act_quant_kwargs": None}
    if layout == FP8_ROWS:
        data |= {"mm_config": None, "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"}}
        return _tensor("Float8Tensor", data, "qdata", "scale")
    if activations:
        by_token = {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}, "mapping_type": SYMMETRIC}
        data["act_quant_kwargs"] = {
            "_type": "QuantizeTensorToInt8Kwargs",
            "_data": by_token | {"reduce_range": False},
        }
    return _tensor("Int8Tensor", data | {"reduce_range": False}, "zero_point", "qdata", "scale")


def _tensor(name: str, data: dict[str, Any], *parts: str) -> dict[str, Any]:
    return {"_type": name, "_data": data, "_tensor_data_names": list(parts)}


def configuration(layout: tuple[StoredPart, ...], size: int, *, activations: bool) -> dict[str, Any]:
    """Return what torchao's config_to_dict returns of layers in a format; see `rebuilt`."""
    if layout in (INT4_TILES, INT4_PLAIN):
        packing = TILE if layout == INT4_TILES else UNTILED
        settings: dict[str, Any] = {
            "group_size": size,
            "set_inductor_config": True,
            "int4_packing_format": {"_type": "Int4PackingFormat", "_data": packing.upper()},
            "int4_choose_qparams_algorithm": {"_type": "Int4ChooseQParamsAlgorithm", "_data": "TINYGEMM"},
            "int4_tile_packed_ntile": TILE_ROWS,
        }
        return {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": settings}
    settings = {"granularity": PER_ROW, "set_inductor_config": True}
    if layout == FP8_ROWS:
        dtype = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
        return {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": settings | {"weight_dtype": dtype}}
    if not activations:
        return {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": settings | {"group_size": None}}
    settings |= {"act_mapping_type": SYMMETRIC, "weight_only_decode": False, "reduce_range": False}
    return {"_type": "Int8DynamicActivationInt8WeightConfig", "_version": 2, "_data": settings}


def find(source: Source, name: str, codes: StoredTensor) -> QuantizedTensor | None:
    """Return the weight of `M._weight_qdata`."""
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
    unread = next((n for n in (f"{stem}_act_pre_scale", f"{stem}_act_quant_scale") if n in source.stored), None)
    if unread is not None:
        raise SourceError(
            f"{codes.file}: tensor {unread!r}: pqweights does not read scaled inputs; give the original checkpoint"
        )
    scales, zeros = source.part(codes, f"{stem}_scale", SCALE_DTYPES), source.stored.get(f"{stem}_zero_point")
    rows, lines = codes.shape
    is_int4 = zeros is not None and zeros.dtype in SCALE_DTYPES
    columns = 2 * lines if is_int4 else lines
    groups = scales.shape[0 if is_int4 else -1] if len(scales.shape) == 2 else 1
    if is_int4 and scales.shape != (groups, rows):
        raise unlike(scales, "scales", f"[groups, {rows}]")
    if not is_int4:
        check_scales(scales, rows, groups)
    if groups == 0 or columns % groups:
        raise unlike(scales, "scales", f"groups that divide {columns} columns")
    if zeros is not None:
        zeros = source.part(codes, zeros.name, (scales.dtype,) if is_int4 else ("I8",), scales.shape)
    stored = {CODES: codes, SCALES: scales, OFFSETS if is_int4 else ZEROS: zeros}
    if codes.dtype == "F8_E4M3":
        how = PackedFormat(FloatRule("fp8", 8, columns // groups, rows=rows_for(scales, rows)), FP8_ROWS)
        return weight_of(source, f"{module}.weight", (rows, columns), codes.dtype, how, stored)
    if is_int4:
        rule = GroupRule(bits=4, group_size=columns // groups, symmetric=False, middle=True, scale_dtype=scales.dtype)
        return weight_of(source, f"{module}.weight", (rows, columns), "AO4", PackedFormat(rule, INT4_PLAIN), stored)
    how = integers(8, columns // groups, scales, INT8_ROWS, zeros=zeros, rows=rows_for(scales, rows))
    return weight_of(source, f"{module}.weight", (rows, columns), "AO8", how, stored)
