"""Codes of a source that was quantized already, for formats that hold the same numbers: no second rounding.

The source itself has its codes and scales, and so has a master without loss (checkpoint/native.py). Where a format has
codes of the same kind, and its groups lie within those of the source, they become its groups. Whether these are the
same numbers is checked of every weight, by what the rule of the format decodes; otherwise the weights are rounded like
any others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf.views import InterleavedTensor, RenamedTensor, SourceTensor
from pqweights.checkpoint.native import NativeTensor
from pqweights.checkpoint.packed import Aspect, DecodedTensor, PackedSourceTensor, read_scales
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor
from pqweights.checkpoint.views import MatrixCache, MovedTensor
from pqweights.common.dtypes import PACKED_DTYPES, float8_table, from_float32, to_float32
from pqweights.kernels.compensation import sums_of_squares
from pqweights.kernels.groups import FloatRule, GroupRule, Groups
from pqweights.kernels.workers import scratch
from pqweights.targets.formats import BlockRule, Rounding, Rule, TileRule
from pqweights.targets.units import ReadTogether

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
# The dtype of scales that are floats, by layout; of GroupRule it is in the rule.
_SCALE_DTYPES = {"float-tiles-inverse": "F32", "fp8-rows": "F32"}
# The dtypes of scales that are small floats, by the kind of a FloatRule, and the sources that have such codes.
_SMALL_SCALES = {"mxfp4": "F8_E8M0", "mxfp8": "F8_E8M0", "nvfp4": "F8_E4M3"}
_FLOAT_SOURCES = {"mxfp4": "MXFP4", "mxfp8": "F8_E4M3", "nvfp4": "NVFP4", "fp8": "F8_E4M3"}
# Layouts of NVFP4 whose readers divide scales by a number.
DIVIDING = ("nvfp4-pack-quantized", "nvfp4-pack-quantized-inputs")
# Types of GGUF that hold integers: the bits of a code, and whether a number is added to the products.
_INTEGER_BLOCKS = {"Q4_0": (4, False), "Q4_1": (4, True), "Q8_0": (8, False)}


@dataclass(frozen=True, eq=False, kw_only=True)
class SourceGrid:
    """The codes of a weight, and the grid on which they lie.

    dtype: the format of the source, of all that the weight is made of
    unit: that of NVFP4
    codes, scales, zeros, biases: the same weight with these in place of the values; see Aspect
    """

    dtype: str
    codes: LogicalTensor
    scales: LogicalTensor
    zeros: LogicalTensor | None
    biases: LogicalTensor | None
    unit: SourceUnit | None

    @staticmethod
    def of(tensor: LogicalTensor) -> SourceGrid | None:
        """Return the grid of a weight, as a runtime holds it; None if it is not made of codes of one format."""
        dtypes: set[str | None] = set()
        units: set[SourceUnit | None] = set()

        def of_aspect(aspect: Aspect) -> LogicalTensor | None:
            def leaf(native: LogicalTensor) -> LogicalTensor | None:
                of = native.carried if isinstance(native, NativeTensor) else native
                decoded = of if isinstance(of, DecodedTensor) and of.has(Aspect.CODES) else None
                dtypes.add(None if decoded is None else decoded.dtype)
                units.add(SourceUnit.of(of) if isinstance(of, PackedSourceTensor) else None)
                return None if decoded is None or not decoded.has(aspect) else replace(decoded, aspect=aspect)

            return _with_leaves(tensor, leaf)

        codes, scales, zeros, biases = map(of_aspect, (Aspect.CODES, Aspect.SCALES, Aspect.ZEROS, Aspect.BIASES))
        (dtype, *others) = dtypes or {None}
        if codes is None or scales is None or dtype is None or others or len(units) != 1:
            return None
        return SourceGrid(dtype=dtype, codes=codes, scales=scales, zeros=zeros, biases=biases, unit=units.pop())

    def groups(self, rounding: Rounding, row: int, values: Floats) -> Groups | None:
        """Return whole rows on the grid as groups of a format; None if these would be other numbers.

        row: the first of the rows
        values: their weights
        """
        rule, width = rounding.rule, self.codes.shape[-1]
        if not isinstance(rule, TileRule) and width % rule.group_size:
            return None

        def read(tensor: LogicalTensor, purpose: str) -> Floats:
            raw = scratch(purpose, len(values) * 4)
            tensor.read(row * width, len(values), "F32", raw)
            return raw.view(np.float32)

        rows = _CarriedRows(
            dtype=self.dtype,
            codes=read(self.codes, "grid codes").astype(np.uint8),
            scales=read(self.scales, "grid scales"),
            zeros=None if self.zeros is None else read(self.zeros, "grid zeros"),
            biases=None if self.biases is None else read(self.biases, "grid biases"),
            scale_dtype=_SCALE_DTYPES.get(rounding.layout, "BF16"),
        )
        groups = rows.groups(rule)
        if groups is None:
            return None
        if not self._has_divisor(rounding) and not np.array_equal(rule.decode(groups).reshape(-1), values):
            return None
        return replace(groups, energies=sums_of_squares(values.reshape(len(groups.energies), -1)))

    def _has_divisor(self, rounding: Rounding) -> bool:
        """Whether source and format divide the scales by the same number, so that codes and scales say all.

        The rule multiplies by its inverse, which may give other values in the last place.
        """
        unit, rule = self.unit, rounding.rule
        if unit is None or not unit.divides or rounding.layout not in DIVIDING:
            return False
        return isinstance(rule, FloatRule) and rule.unit == unit.factor


class SourceUnit(NamedTuple):
    """What the scales of NVFP4 are multiplied by. divides: whether the source has its inverse, by which it divides"""

    factor: float
    divides: bool

    @staticmethod
    def of(tensor: PackedSourceTensor) -> SourceUnit | None:
        """Return that of a weight; None without one."""
        if tensor.unit is None:
            return None
        (number,) = read_scales(tensor.storage, tensor.unit, 0, 1).tolist()
        divides = tensor.unit.name.endswith("_global_scale")
        return SourceUnit(1 / number if divides else number, divides) if number else None


def plain_beside_codes(tensors: Sequence[LogicalTensor], rule: Rule) -> set[str]:
    """Return the weights that the source keeps plain beside others whose codes are those of a format.

    A format that takes over the codes of a source should leave plain what the source does.
    """
    sources = {
        tensor.name: tensor.carried if isinstance(tensor, NativeTensor) else tensor
        for tensor in tensors
        if isinstance(tensor, NativeTensor) or not isinstance(tensor, EncodedTensor)
    }
    if not any(isinstance(of, DecodedTensor) and _has_codes_of(of.dtype, rule) for of in sources.values()):
        return set()
    return {name for name, of in sources.items() if not isinstance(of, DecodedTensor)}


def _has_codes_of(dtype: str, rule: Rule) -> bool:
    """Whether codes of a source may be those of a rule."""
    if isinstance(rule, GroupRule):
        return dtype in PACKED_DTYPES and dtype not in _FLOAT_SOURCES.values() and PACKED_DTYPES[dtype][0] == rule.bits
    return (
        not isinstance(rule, BlockRule) and dtype == _FLOAT_SOURCES["fp8" if isinstance(rule, TileRule) else rule.kind]
    )


def carried_unit(tensors: Sequence[LogicalTensor]) -> float | None:
    """Return the unit that the sources of some weights have in common; None if they have none, or several."""
    grids = [SourceGrid.of(tensor) for tensor in tensors]
    factors = {None if grid is None or grid.unit is None else grid.unit.factor for grid in grids}
    return factors.pop() if len(factors) == 1 else None


def _with_leaves(tensor: LogicalTensor, leaf: Callable[[LogicalTensor], LogicalTensor | None]) -> LogicalTensor | None:
    """Return a view with other tensors in place of those that it is made of; None if one of these has none."""
    if isinstance(tensor, MovedTensor):
        made = {source.name: _with_leaves(source, leaf) for source in tensor.sources}
        sources = {name: source for name, source in made.items() if source is not None}
        if len(sources) < len(made):
            return None
        segments: Any = tuple(replace(segment, tensor=sources[segment.tensor.name]) for segment in tensor.segments)
        return replace(tensor, segments=segments, cache=MatrixCache())
    if type(tensor) in (RenamedTensor, InterleavedTensor, SourceTensor) and is_dataclass(tensor):
        source = _with_leaves(tensor.source, leaf)
        return None if source is None else replace(tensor, source=source)
    return _with_leaves(tensor.tensor, leaf) if isinstance(tensor, ReadTogether) else leaf(tensor)


@dataclass(frozen=True, eq=False, kw_only=True)
class _CarriedRows:
    """Whole rows of a weight on its grid: for each weight its code, scale, and bias, and the code that stands for 0.

    scale_dtype: in which a format stores scales that are floats
    """

    dtype: str
    codes: Bytes
    scales: Floats
    zeros: Floats | None
    biases: Floats | None
    scale_dtype: str

    def groups(self, rule: Rule) -> Groups | None:
        """Return groups of a rule, which may decode to other numbers; None if there are none."""
        if isinstance(rule, TileRule):
            return self._tiles(rule)
        numbers = [
            None if of is None else _common(of, rule.group_size) for of in (self.scales, self.zeros, self.biases)
        ]
        scales, zeros, biases = numbers
        if scales is None or (self.zeros is not None and zeros is None) or (self.biases is not None and biases is None):
            return None
        if isinstance(rule, FloatRule):
            return self._floats(rule, scales)
        if isinstance(rule, BlockRule):
            return self._blocks(rule, scales, zeros, biases)
        return self._integers(rule, scales, zeros, biases)

    def _integers(self, rule: GroupRule, scales: Floats, zeros: Floats | None, biases: Floats | None) -> Groups | None:
        """Return groups of integers."""
        if zeros is None or PACKED_DTYPES[self.dtype][0] != rule.bits or not _is_exact(scales, rule.scale_dtype):
            return None
        if rule.zeros:
            return None if biases is not None else _groups_of(self.codes.reshape(-1, rule.group_size), scales, zeros)
        middle = 2 ** (rule.bits - 1) if rule.middle else 0
        offsets = (np.float32(middle) - zeros) * scales
        if biases is not None:
            offsets += biases
        if not _is_exact(offsets, rule.scale_dtype) or (rule.symmetric and offsets.any()):
            return None
        return _groups_of(self.codes.reshape(-1, rule.group_size), scales, offsets)

    def _floats(self, rule: FloatRule, scales: Floats) -> Groups | None:
        """Return groups of short floats, whose scales are bytes or numbers."""
        if self.dtype != _FLOAT_SOURCES[rule.kind]:
            return None
        if rule.kind == "fp8":
            numbers = scales if _is_exact(scales, self.scale_dtype) else None
        else:
            numbers = _bytes_of(scales, _SMALL_SCALES[rule.kind])
        return None if numbers is None else _groups_of(self.codes.reshape(-1, rule.group_size), numbers)

    def _tiles(self, rule: TileRule) -> Groups | None:
        """Return tiles of FP8."""
        if self.dtype != "F8_E4M3":
            return None
        scales = self.scales.reshape(-1, rule.row_length)
        of_tiles = np.ascontiguousarray(scales[:: rule.rows, :: rule.group_size])
        spread = of_tiles.repeat(rule.rows, axis=0)[: len(scales)].repeat(rule.group_size, axis=1)
        if not np.array_equal(spread[:, : rule.row_length], scales) or not _is_exact(of_tiles, self.scale_dtype):
            return None
        return _groups_of(self.codes.reshape(scales.shape), of_tiles)

    def _blocks(self, rule: BlockRule, scales: Floats, zeros: Floats | None, biases: Floats | None) -> Groups | None:
        """Return blocks of GGUF (ggml-common.h): scales, then codes, of which two of 4 bits are half a block apart."""
        codes = self.codes.reshape(-1, rule.group_size)
        if rule.kind == "MXFP4" and self.dtype == "MXFP4":
            numbers = _bytes_of(scales, "F8_E8M0")
            heads = None if numbers is None else [numbers.astype(np.uint8)[:, None]]
        elif rule.kind in _INTEGER_BLOCKS and zeros is not None:
            bits, is_added = _INTEGER_BLOCKS[rule.kind]
            lows = (0 if biases is None else biases) - zeros * scales if is_added else scales
            is_symmetric = biases is None and bool((zeros == 2 ** (bits - 1)).all())
            fits = PACKED_DTYPES[self.dtype][0] == bits and (is_added or is_symmetric)
            is_exact = fits and _is_exact(scales, "F16") and _is_exact(lows, "F16")
            floats = (scales, lows) if is_added else (scales,)
            heads = [from_float32(of, "F16").reshape(-1, 2) for of in floats] if is_exact else None
            codes = codes ^ np.uint8(0x80) if bits == 8 else codes
        else:
            heads = None
        if heads is None:
            return None
        half = rule.group_size // 2
        packed = codes if rule.kind == "Q8_0" else codes[:, :half] | codes[:, half:] << 4
        return _groups_of(np.concatenate([*heads, packed], axis=1), np.zeros(len(codes), dtype=np.float32))


def _groups_of(codes: Bytes, scales: Floats, offsets: Floats | None = None) -> Groups:
    """Return groups without an error, whose energies are still to be found."""
    none = np.zeros(len(codes))
    offsets = np.zeros_like(scales) if offsets is None else offsets
    return Groups(codes=codes, scales=scales, offsets=offsets, energies=none, errors=none)


def _common(numbers: Floats, size: int) -> Floats | None:
    """Return what the weights of each group have in common; None if it is not the same."""
    groups = numbers.reshape(-1, size)
    return np.ascontiguousarray(groups[:, 0]) if (groups == groups[:, :1]).all() else None


def _is_exact(numbers: Floats, dtype: str) -> bool:
    """Whether a dtype holds numbers as they are."""
    flat = np.ascontiguousarray(numbers).reshape(-1)
    return np.array_equal(to_float32(from_float32(flat, dtype), dtype), flat)


def _bytes_of(scales: Floats, dtype: str) -> Floats | None:
    """Return the bytes of scales that are small floats, as numbers; None if one is no such float."""
    table = float8_table(dtype)
    ascending = table[: int(np.argmax(~np.isfinite(table)))]  # the positive ones, which begin with byte 0
    numbers = np.searchsorted(ascending, scales).clip(max=len(ascending) - 1)
    return numbers.astype(np.float32) if np.array_equal(ascending[numbers], scales) else None
