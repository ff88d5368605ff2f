"""Codes of a source that was quantized already, for formats that hold the same numbers: no second rounding.

Some sources have lost their codes: a checkpoint in BF16 that was decoded from few bits, or trained for them, holds
numbers of a grid all the same, and a format with that grid finds codes and scales again (kernels/recovery.py).

The source itself has its codes and scales, and so has a master without loss (checkpoint/native.py). Where the formats
of source and export have the same codes, and the groups of one lie within those of the other, they become its groups.
Whether these are the same numbers is checked of every weight, by what the rule of the format decodes; otherwise the
weights are rounded like any others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.blocks import BlocksTensor
from pqweights.checkpoint.gguf.views import ComputedTensor, InterleavedTensor, RenamedTensor, SourceTensor
from pqweights.checkpoint.native import NativeTensor
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, PlainTensor
from pqweights.checkpoint.views import MovedTensor, ReadTogether
from pqweights.common.dtypes import float8_table, from_float32, to_float32
from pqweights.formats.gguf_blocks import half_floats
from pqweights.formats.packed import QuantizedTensor
from pqweights.formats.packing import CODES, DIVISOR, OFFSETS, SCALES, ZEROS, PackedFormat, RoundingRule
from pqweights.kernels import VALUE_DTYPES
from pqweights.kernels.gguf_codes import with_codes
from pqweights.kernels.gguf_encoding import INTEGER_TYPES, BlockRule
from pqweights.kernels.groups import MOST_WEIGHTS, FloatRule, GroupRule, Groups, sums_of_squares
from pqweights.kernels.recovery import RECOVERED_TYPES, recover_blocks, recover_groups
from pqweights.kernels.workers import scratch

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Truths = npt.NDArray[np.bool_]

# So many groups of some rows, if at least half of them are on a grid, have all others looked at.
SAMPLED_GROUPS = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class SourceGrid:
    """The codes of a weight, and the grid on which they lie.

    codes_are: what the codes are in the format of the source; see RoundingRule
    unit: what scales are multiplied by, of NVFP4
    divides: whether the source has the inverse of that, by which it divides
    codes, scales, zeros, offsets: the same weight with these in place of the values
    """

    codes_are: str
    unit: float | None
    divides: bool
    codes: LogicalTensor
    scales: LogicalTensor
    zeros: LogicalTensor | None
    offsets: LogicalTensor | None

    @staticmethod
    def of(tensor: LogicalTensor) -> SourceGrid | None:
        """Return the grid of a weight, as a runtime holds it; None if it is not made of codes of one format."""
        formats: set[tuple[str, float | None, bool] | None] = set()

        def reading(what: str) -> LogicalTensor | None:
            def leaf(native: LogicalTensor) -> LogicalTensor | None:
                of = native.carried if isinstance(native, NativeTensor) else native
                if not isinstance(of, QuantizedTensor) or not of.has(CODES):
                    formats.add(None)
                    return None
                formats.add((of.format.rule.codes, of.unit, of.format.part(DIVISOR) is not None))
                return replace(of, reads=what) if of.has(what) else None

            return _with_leaves(tensor, leaf)

        codes, scales, zeros, offsets = map(reading, (CODES, SCALES, ZEROS, OFFSETS))
        (form, *others) = formats or {None}
        if codes is None or scales is None or form is None or others:
            return None
        codes_are, unit, divides = form
        return SourceGrid(
            codes_are=codes_are,
            unit=unit,
            divides=divides,
            codes=codes,
            scales=scales,
            zeros=zeros,
            offsets=offsets,
        )

    def groups(self, how: PackedFormat, row: int, values: Floats) -> Groups | None:
        """Return whole rows on the grid as groups of a format; None if these would be other numbers.

        row: the first of the rows
        values: their weights
        """
        rule, width = how.rule, self.codes.shape[-1]
        if self.codes_are != rule.codes or (rule.rows == 1 and width % rule.group_size):
            return None

        def read(tensor: LogicalTensor | None, purpose: str) -> Floats | None:
            if tensor is None:
                return None
            raw = scratch(purpose, len(values) * 4)
            tensor.read(row * width, len(values), "F32", raw)
            return raw.view(np.float32)

        codes, scales = read(self.codes, "grid codes"), read(self.scales, "grid scales")
        assert codes is not None and scales is not None
        zeros, offsets = read(self.zeros, "grid zeros"), read(self.offsets, "grid offsets")
        groups = _groups_on_grid(how, width, codes, scales, zeros, offsets)
        if groups is None:
            return None
        if not self._has_divisor(how) and not np.array_equal(rule.decode(groups).reshape(-1), values):
            return None
        return replace(groups, energies=sums_of_squares(values.reshape(len(groups.energies), -1)))

    def _has_divisor(self, how: PackedFormat) -> bool:
        """Whether source and format divide the scales by the same number, so that codes and scales say all.

        The rule multiplies by its inverse, which may give other values in the last place.
        """
        is_same = isinstance(how.rule, FloatRule) and how.rule.unit == self.unit
        return self.unit is not None and self.divides and how.part(DIVISOR) is not None and is_same


def stored_dtype(tensor: LogicalTensor) -> str:
    """Return the dtype to which the values of a weight were rounded where they are stored; F32 for computed ones."""
    if isinstance(tensor, ReadTogether):
        return stored_dtype(tensor.tensor)
    if isinstance(tensor, NativeTensor):
        return stored_dtype(tensor.carried)
    if isinstance(tensor, RenamedTensor) and not isinstance(tensor, ComputedTensor):
        return stored_dtype(tensor.source)
    if isinstance(tensor, MovedTensor):
        (dtype, *others) = {stored_dtype(source) for source in tensor.sources}
        return "F32" if others else dtype
    is_stored = isinstance(tensor, PlainTensor | BlocksTensor)
    return tensor.dtype if is_stored and tensor.dtype in VALUE_DTYPES else "F32"


def recovered_groups(rule: RoundingRule, values: Floats, dtype: str) -> tuple[Groups, Truths] | None:
    """Return the groups that whole rows were decoded from, and of which they were found; None if that is a few at most.

    A sample of groups decides whether the others are looked at. What is found decodes to the very values, rounded as
    these are stored; its errors are 0. Groups of zeros are not found: they are rounded without an error.

    values: the weights, which are numbers of the dtype
    """
    is_known = isinstance(rule, GroupRule) and rule.rows == 1 and rule.group_size <= MOST_WEIGHTS
    if not is_known and not (isinstance(rule, BlockRule) and rule.kind in RECOVERED_TYPES):
        return None
    of_groups = values.reshape(-1, rule.group_size)
    sample = of_groups[_places(len(of_groups))]
    _, is_found = _recovered(rule, sample, dtype)
    if 2 * is_found.sum() < np.count_nonzero(sample.any(axis=1)) or not is_found.any():
        return None
    groups, is_found = _recovered(rule, of_groups, dtype)
    decoded = to_float32(from_float32(rule.decode(groups).reshape(-1), dtype), dtype)
    is_found &= (decoded.reshape(of_groups.shape) == of_groups).all(axis=1)
    return replace(groups, energies=sums_of_squares(of_groups)), is_found


@functools.lru_cache(maxsize=256)
def _places(groups: int) -> npt.NDArray[np.int64]:
    """Return which of some groups are the sample."""
    return np.linspace(0, groups - 1, min(SAMPLED_GROUPS, groups), dtype=np.int64)


def _recovered(rule: RoundingRule, of_groups: Floats, dtype: str) -> tuple[Groups, Truths]:
    """Find the groups that weights were decoded from. of_groups: [groups, group size]"""
    flat = np.ascontiguousarray(of_groups).reshape(-1)
    if isinstance(rule, GroupRule):
        return recover_groups(rule, flat, dtype)
    blocks, is_found = recover_blocks(rule.kind, flat, dtype)
    return _groups_of(blocks, np.zeros(len(blocks), dtype=np.float32)), is_found


def plain_beside_codes(tensors: Sequence[LogicalTensor], rule: RoundingRule) -> set[str]:
    """Return the weights that the source keeps plain beside others whose codes are those of a format.

    A format that takes over the codes of a source should leave plain what the source does.
    """
    sources = {
        tensor.name: tensor.carried if isinstance(tensor, NativeTensor) else tensor
        for tensor in tensors
        if isinstance(tensor, NativeTensor) or not isinstance(tensor, EncodedTensor)
    }
    packed = {name for name, of in sources.items() if isinstance(of, QuantizedTensor)}
    of_source = {of.format.rule.codes for of in sources.values() if isinstance(of, QuantizedTensor)}
    return sources.keys() - packed if rule.codes in of_source else set()


def carried_unit(rule: RoundingRule, tensors: Sequence[LogicalTensor]) -> float | None:
    """Return the unit that the sources of some weights have in common; None if they have none, or several.

    rule: of the weights in the export; of FP8 the unit is the one scale of a weight in the source
    """
    if rule.kind == "fp8-tensor":
        units = {_scale_of_all(tensor) for tensor in tensors}
    else:
        grids = [SourceGrid.of(tensor) for tensor in tensors]
        units = {None if grid is None else grid.unit for grid in grids}
    return units.pop() if len(units) == 1 else None


def _scale_of_all(tensor: LogicalTensor) -> float | None:
    """Return the scale that all weights of a tensor in E4M3 share, 1 of a plain cast; None if there is no such one."""
    leaves: list[LogicalTensor] = []

    def leaf(native: LogicalTensor) -> LogicalTensor:
        leaves.append(native.carried if isinstance(native, NativeTensor) else native)
        return native

    _with_leaves(tensor, leaf)
    of, *others = leaves
    if others or not isinstance(of, QuantizedTensor) or of.format.rule.codes != "F8_E4M3":
        return None
    scales = of.holds(SCALES)
    if scales is None:
        return 1.0
    if scales.shape not in ((), (1,), (1, 1)):
        return None
    scale = np.empty(1, dtype=np.float32)
    replace(of, reads=SCALES).read(0, 1, "F32", scale.view(np.uint8))
    return float(scale[0])


def _with_leaves(tensor: LogicalTensor, leaf: Callable[[LogicalTensor], LogicalTensor | None]) -> LogicalTensor | None:
    """Return a view with other tensors in place of those that it is made of; None if one of these has none."""
    if isinstance(tensor, MovedTensor):
        made = {source.name: _with_leaves(source, leaf) for source in tensor.sources}
        sources = {name: source for name, source in made.items() if source is not None}
        if len(sources) < len(made):
            return None
        segments = tuple((sources[source.name], rows) for source, rows in tensor.segments)
        return replace(tensor, segments=segments)
    if type(tensor) in (RenamedTensor, InterleavedTensor, SourceTensor) and is_dataclass(tensor):
        source = _with_leaves(tensor.source, leaf)
        return None if source is None else replace(tensor, source=source)
    return _with_leaves(tensor.tensor, leaf) if isinstance(tensor, ReadTogether) else leaf(tensor)


def _groups_on_grid(
    how: PackedFormat,
    width: int,
    codes: Floats,
    scales: Floats,
    zeros: Floats | None,
    offsets: Floats | None,
) -> Groups | None:
    """Return groups of a format, which may decode to other numbers; None if there are none.

    width: of a row
    codes, scales, zeros, offsets: of each weight of some rows
    """
    rule, in_bytes = how.rule, codes.astype(np.uint8)
    part = how.part(SCALES)
    dtype = "BF16" if part is None else part.dtype
    if rule.rows > 1:
        return _tiles(rule, in_bytes, scales.reshape(-1, width), dtype)
    numbers = [None if of is None else _common(of, rule.group_size) for of in (scales, zeros, offsets)]
    if any(of is None and given is not None for of, given in zip(numbers, (scales, zeros, offsets), strict=True)):
        return None
    of_groups, of_zeros, of_offsets = numbers
    assert of_groups is not None
    grouped = in_bytes.reshape(-1, rule.group_size)
    if isinstance(rule, BlockRule):
        return _blocks(rule, grouped, of_groups, of_zeros, of_offsets)
    if isinstance(rule, GroupRule):
        return _integers(rule, grouped, of_groups, of_zeros, of_offsets)
    if isinstance(rule, FloatRule) and rule.kind == "fp8-tensor":
        return _groups_of(grouped, np.ones_like(of_groups)) if (of_groups == np.float32(rule.unit)).all() else None
    if rule.kind != "fp8":
        small = _bytes_of(of_groups, "F8_E4M3" if rule.kind == "nvfp4" else "F8_E8M0")
        return None if small is None else _groups_of(grouped, small)
    return _groups_of(grouped, of_groups) if _is_exact(of_groups, dtype) else None


def _integers(
    rule: GroupRule, codes: Bytes, scales: Floats, zeros: Floats | None, offsets: Floats | None
) -> Groups | None:
    """Return groups of integers."""
    if zeros is None or not _is_exact(scales, rule.scale_dtype):
        return None
    if rule.zeros:
        return None if offsets is not None else _groups_of(codes, scales, zeros)
    added = (np.float32(2 ** (rule.bits - 1) if rule.middle else 0) - zeros) * scales
    if offsets is not None:
        added += offsets
    if not _is_exact(added, rule.scale_dtype) or (rule.symmetric and added.any()):
        return None
    return _groups_of(codes, scales, added)


def _tiles(rule: RoundingRule, codes: Bytes, scales: Floats, dtype: str) -> Groups | None:
    """Return tiles of FP8. scales: of each weight, [rows, width]; dtype: in which the format stores them"""
    of_tiles = np.ascontiguousarray(scales[:: rule.rows, :: rule.group_size])
    spread = of_tiles.repeat(rule.rows, axis=0)[: len(scales)].repeat(rule.group_size, axis=1)
    if not np.array_equal(spread[:, : scales.shape[1]], scales) or not _is_exact(of_tiles, dtype):
        return None
    return _groups_of(codes.reshape(scales.shape), of_tiles)


def _blocks(
    rule: BlockRule, codes: Bytes, scales: Floats, zeros: Floats | None, offsets: Floats | None
) -> Groups | None:
    """Return blocks of GGUF."""
    heads = None
    if rule.kind == "MXFP4":
        numbers = _bytes_of(scales, "F8_E8M0")
        heads = None if numbers is None else [numbers.astype(np.uint8)[:, None]]
    elif rule.kind in INTEGER_TYPES and zeros is not None:
        is_added = INTEGER_TYPES[rule.kind][1]
        lows = (0 if offsets is None else offsets) - zeros * scales if is_added else scales
        is_symmetric = offsets is None and bool((zeros == 2 ** (rule.bits - 1)).all())
        is_exact = (is_added or is_symmetric) and _is_exact(scales, "F16") and _is_exact(lows, "F16")
        heads = [half_floats(of) for of in ((scales, lows) if is_added else (scales,))] if is_exact else None
    if heads is None:
        return None
    blocks = np.zeros((len(codes), rule.block_bytes), dtype=np.uint8)
    blocks[:, : sum(head.shape[1] for head in heads)] = np.concatenate(heads, axis=1)
    if rule.bits == 8:  # two's complement
        codes = codes ^ np.uint8(0x80)
    return _groups_of(with_codes(rule.kind, blocks, codes), np.zeros(len(codes), dtype=np.float32))


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
