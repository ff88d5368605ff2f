"""A weight of a source in the packed format of another tool, of which any elements are decoded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import ByteReads, StoredTensor, read_stored
from pqweights.common.dtypes import FLOAT_DTYPES, from_float32, item_bytes
from pqweights.errors import SourceError
from pqweights.formats.packing import (
    CODES,
    DIVISOR,
    GROUP_OF,
    OFFSETS,
    SCALES,
    TABLE,
    UNIT,
    WORD,
    ZEROS,
    Bytes,
    Floats,
    PackedFormat,
    Shape,
    StoredPart,
)
from pqweights.kernels.groups import GroupRule
from pqweights.kernels.workers import kept

VALUES = "values"
RUN_BYTES = 1 << 20
SCALE_DTYPES = ("BF16", "F16", "F32")
# In which order the stored tensors of a weight are listed.
_LISTED = (CODES, SCALES, TABLE, ZEROS, UNIT, DIVISOR, OFFSETS)


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A weight that is made of codes; see LogicalTensor.

    storage: where the stored tensors lie
    format: how it is stored; each part has the dtype that it has here
    stored: the stored tensors of the layout, in its order
    others: stored tensors that also belong to the weight
    matrix: the rows and columns of its matrices, if those are not the last two dimensions of its shape
    reads: what is read of each element in place of its value: codes, scales (without the unit of NVFP4), zeros, offsets
    nested: the scales, if they are packed themselves
    """

    # Elements decoded at once.
    BAND_ELEMENTS = 1 << 20
    # Where rows are columns of stored tensors, each thread keeps the packed codes of so many rows, so that they are not
    # gathered again for every read.
    KEPT_BYTES = 1 << 25

    storage: ByteReads
    name: str
    shape: Shape
    dtype: str
    format: PackedFormat
    stored: tuple[StoredTensor, ...]
    others: tuple[StoredTensor, ...] = ()
    plain_dtype: str = "BF16"
    matrix: tuple[int, int] | None = None
    reads: str = VALUES
    nested: QuantizedTensor | None = None

    @functools.cached_property
    def parts(self) -> tuple[StoredTensor, ...]:
        """All stored tensors, the codes first."""
        pairs = zip(self.format.layout, self.stored, strict=True)
        listed = sorted(pairs, key=lambda of: _LISTED.index(of[0].holds) if of[0].holds in _LISTED else len(_LISTED))
        return (*(stored for _, stored in listed), *self.others)

    def holds(self, what: str) -> StoredTensor | None:
        """Return the stored tensor of a part of the layout."""
        pairs = zip(self.format.layout, self.stored, strict=True)
        return next((stored for part, stored in pairs if part.holds == what), None)

    def has(self, reads: str) -> bool:
        """Whether something else than the values can be read: whether they lie on a grid."""
        if reads == ZEROS:
            return isinstance(self.format.rule, GroupRule)
        needed = OFFSETS if reads == OFFSETS else SCALES
        return self.holds(needed) is not None and self.holds(TABLE) is None

    @property
    def unit(self) -> float | None:
        """The number that scales are multiplied by, of NVFP4; None for 0, and without one."""
        if (stored := self.holds(UNIT)) is not None:
            return float(self._floats(stored)[0]) or None
        if (stored := self.holds(DIVISOR)) is not None:
            number = float(self._floats(stored)[0])
            return 1 / number if number else None
        return None

    def read(self, start: int, count: int, dtype: str, out: Bytes) -> None:
        """Read elements [start, start + count) as raw bytes of `dtype` into the start of `out`.

        Values are the float32 products of number and scale, rounded once.
        """
        rows, columns = self._matrix
        size, done = item_bytes(dtype), 0
        while done < count:
            row, column = divmod(start + done, columns)
            at_once, last = 1, min(columns, column + count - done, column + self.BAND_ELEMENTS)
            if column == 0 and count - done >= columns:
                at_once = max(1, min(count - done, self.BAND_ELEMENTS) // columns)
            number, row = divmod(row, rows)
            at_once = min(at_once, rows - row)
            if any(part.by_columns for part in self.format.layout):
                at_once = min(at_once, self._band_rows - row % self._band_rows)
            region = _Region(number, row, row + at_once, column, last)
            elements = self._decode(region).reshape(-1)
            out[done * size : (done + len(elements)) * size] = from_float32(elements, dtype)
            done += len(elements)

    @property
    def _matrix(self) -> tuple[int, int]:
        if self.matrix is not None:
            return self.matrix
        rows, columns = self.shape[-2:]
        return rows, columns

    def _decode(self, region: _Region) -> Floats:
        """Decode some columns of a row, or several whole rows."""
        rule, groups = self.format.rule, self._groups(region)
        if self.reads in (SCALES, ZEROS, OFFSETS):
            elements = np.empty((region.last - region.row, region.end - region.column), dtype=np.float32)
            numbers = self._of_tiles(self.reads, region, groups)
            if numbers is None:  # without zeros of their own, that of the rule
                numbers = np.abs(rule.numbers(np.zeros((1, 1), dtype=np.uint8)))
                elements[...] = numbers
                return elements
            return self._combined(_take, elements, numbers, region, groups)
        codes = self._numbers(CODES, region)
        assert codes is not None and codes.dtype == np.uint8
        if self.reads == CODES:
            return codes.astype(np.float32)
        table = self.holds(TABLE)
        values = rule.numbers(codes.view(np.uint8)) if table is None else self._floats(table)[codes]
        if (zeros := self._of_tiles(ZEROS, region, groups)) is not None:
            values = self._combined(np.subtract, values, zeros, region, groups)
        with np.errstate(all="ignore"):
            if (scales := self._of_tiles(SCALES, region, groups)) is not None:
                values = self._combined(np.multiply, values, self._with_unit(scales), region, groups)
            if self.format.factor != 1:
                values *= np.float32(self.format.factor)
            if (offsets := self._of_tiles(OFFSETS, region, groups)) is not None:
                values = self._combined(np.add, values, offsets, region, groups)
            if self.format.offset:
                values += np.float32(self.format.offset)
        check_decoded(values, self.name, self.parts[0])
        return values

    def check_scales(self) -> None:
        """Raise SourceError for numbers beside the codes that are not finite, for who takes them over undecoded."""
        if self.nested is not None:
            self.nested.check_scales()
        for part, stored in zip(self.format.layout, self.stored, strict=True):
            is_float = stored.dtype in FLOAT_DTYPES or (part.holds == SCALES and self.nested is None)
            for start in range(0, stored.byte_count if is_float and part.holds != CODES else 0, RUN_BYTES):
                count = min(RUN_BYTES, stored.byte_count - start)
                numbers = part.unpack(self._read(stored, start, 1, count), self.format.rule)
                check_decoded(numbers, self.name, stored)

    def _floats(self, stored: StoredTensor) -> Floats:
        """Return a small stored tensor in F32."""
        return read_stored(self.storage, stored).view(np.float32)

    def _with_unit(self, scales: Floats) -> Floats:
        if (stored := self.holds(UNIT)) is not None:
            return scales * self._floats(stored)
        return scales if (stored := self.holds(DIVISOR)) is None else scales / self._floats(stored)

    def _groups(self, region: _Region) -> npt.NDArray[np.int64] | None:
        """Return the group of each column, if the weight has an order of columns."""
        stored = self.holds(GROUP_OF)
        if stored is None:
            return None
        raw, scales = np.empty((region.end - region.column) * 4, dtype=np.uint8), self.holds(SCALES)
        assert scales is not None
        groups = scales.shape[0]
        self.storage.read_into(stored.file, stored.offset + region.column * 4, raw)
        group_of = raw.view("<i4").astype(np.int64)
        if group_of.min() < 0 or group_of.max() >= groups:
            raise SourceError(
                f"{stored.file}: tensor {stored.name!r}: expected groups from 0 to {groups - 1}, found "
                f"{group_of.min()} to {group_of.max()}; the file is damaged"
            )
        return group_of

    @property
    def _size(self) -> int:
        return self.format.rule.group_size

    def _of_tiles(self, what: str, region: _Region, groups: npt.NDArray[np.int64] | None) -> Floats | None:
        """Return the numbers of the tiles of a region, [tiles down, tiles across] f32; None if it has none."""
        tall, wide = self.format.rule.rows, self._size
        low, high = (region.column // wide, -(-region.end // wide))
        if groups is not None:
            low, high = int(groups.min()), int(groups.max()) + 1
        tiles = _Region(region.number, region.row // tall, -(-region.last // tall), low, high)
        if what == SCALES and self.nested is not None:
            raw = np.empty((high - low) * 4, dtype=np.uint8)
            replace(self.nested, storage=self.storage).read(low, high - low, "F32", raw)
            return raw.view(np.float32).reshape(1, -1)
        numbers = self._numbers(what, tiles)
        return None if numbers is None else numbers.astype(np.float32, copy=False)

    def _combined(
        self,
        operation: Callable[..., object],
        values: Floats,
        numbers: Floats,
        region: _Region,
        groups: npt.NDArray[np.int64] | None,
    ) -> Floats:
        """Combine each value with the number of its tile, in place."""
        tall, wide = self.format.rule.rows, self._size
        rows, columns = values.shape
        if groups is not None:
            operation(values, numbers[:, groups - groups.min()], out=values)
            return values
        if region.row % tall or rows % tall:
            numbers, tall = numbers[np.arange(region.row, region.last) // tall - region.row // tall], 1
        if numbers.shape[1] == 1:
            wide = columns
        elif region.column % wide or columns % wide:
            among = np.arange(region.column, region.end) // wide - region.column // wide
            numbers, wide = numbers[:, among], 1
        tiles = values.reshape(rows // tall, tall, columns // wide, wide)
        operation(tiles, numbers[:, None, :, None], out=tiles)
        return values

    # --- reading the numbers of a region ---

    @property
    def _band_rows(self) -> int:
        return max(1, self.KEPT_BYTES * 8 // (self._matrix[1] * self.format.rule.bits * WORD)) * WORD

    def _numbers(self, what: str, region: _Region) -> Bytes | Floats | None:
        """Return what a part holds of a region of its own matrix: [rows, columns]; None without that part."""
        pairs = zip(self.format.layout, self.stored, strict=True)
        part, stored = next((pair for pair in pairs if pair[0].holds == what), (None, None))
        if part is None or stored is None:
            return None
        rule, word = self.format.rule, item_bytes(part.dtype)
        down, across = part.matrix(*self._matrix, rule)
        lines, count = (across, down) if part.across else (down, across)
        words = part.words(count, rule)
        size = lines * words * word
        offset = stored.offset + region.number % (stored.byte_count // size) * size
        matrix = stored._replace(offset=offset, byte_count=size)
        if part.by_columns:
            return self._by_columns(part, matrix, region, down=down, words=words)
        if part.across:  # words of several rows
            first, last = part.run_of(region.row, region.last, words, rule)
            raw = self._read(matrix, first * lines * word, last - first, lines * word)
            packed = part.transpose(raw[:, region.column * word : region.end * word])
            rows = part.unpack(packed, rule)[:, region.row % WORD :]
            return rows[:, : region.last - region.row].T
        first, last = (0, words)
        if region.last - region.row == 1:
            first, last = part.run_of(region.column, region.end, words, rule)
        raw = self._read(matrix, (region.row * words + first) * word, region.last - region.row, (last - first) * word)
        skipped = region.column - first * word * 8 // part.bits(rule)
        return part.unpack(raw, rule)[:, skipped : skipped + region.end - region.column]

    def _by_columns(
        self, part: StoredPart, matrix: StoredTensor, region: _Region, *, down: int, words: int
    ) -> Bytes | Floats:
        """Return a region whose rows are columns of the stored matrix, out of a band of rows that is kept.

        down: the rows of the region's matrix
        words: of a line of packed numbers
        """
        rule, word = self.format.rule, item_bytes(part.dtype)
        band = -(-self._band_rows // (1 if part.holds == CODES else rule.rows))
        first = region.row // band * band
        last, row_bytes = min(first + band, down), (words if part.across else down) * word
        bits = part.bits(rule) if part.across else 8 * word
        columns = slice(first * bits // 8, last * bits // 8 if last < down else row_bytes)
        raw: Bytes = kept(
            part.holds, (self.storage, matrix, first), lambda: self._read_columns(matrix, columns, row_bytes)
        )
        row, end = region.row - first, region.last - first
        if part.across:
            begin, stop = row // WORD * WORD * bits // 8, -(-end // WORD) * WORD * bits // 8
            numbers = part.unpack(raw[region.column : region.end, begin:stop], rule)
            return numbers[:, row % WORD :][:, : end - row].T
        low, high = part.run_of(region.column, region.end, words, rule)
        packed = part.transpose(raw[low:high, row * word : end * word])
        return part.unpack(packed, rule)[:, region.column % WORD :][:, : region.end - region.column]

    def _read(self, matrix: StoredTensor, first: int, rows: int, row_bytes: int) -> Bytes:
        """Read rows of bytes from a byte of a stored matrix on: u8 [rows, bytes]."""
        raw = np.empty((rows, row_bytes), dtype=np.uint8)
        self.storage.read_into(matrix.file, matrix.offset + first, raw.reshape(-1))
        return raw

    def _read_columns(self, matrix: StoredTensor, columns: slice, row_bytes: int) -> Bytes:
        """Read some columns of bytes of a stored matrix, in runs of whole rows: u8 [rows, columns]."""
        rows, step = matrix.byte_count // row_bytes, max(1, RUN_BYTES // row_bytes)
        result = np.empty((rows, len(range(row_bytes)[columns])), dtype=np.uint8)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            result[row : row + count] = self._read(matrix, row * row_bytes, count, row_bytes)[:, columns]
        return result


def _take(values: Floats, numbers: Floats, out: Floats) -> None:
    """Put numbers in the place of values."""
    out[...] = numbers


class _Region(NamedTuple):
    """Rows [row, last) and columns [column, end) of a matrix. number: of the matrix"""

    number: int
    row: int
    last: int
    column: int
    end: int


# --- how the weights of a source are found ---


@dataclass(frozen=True, eq=False)
class Source:
    """The stored tensors of a source, in which the parts of weights are looked up.

    stored: by name
    settings: the quantization_config
    """

    storage: ByteReads
    stored: Mapping[str, StoredTensor]
    settings: Mapping[str, Any]

    @functools.cached_property
    def modules(self) -> Mapping[str, list[str]]:
        """The names of the stored tensors of each module."""
        modules: dict[str, list[str]] = {}
        for name in self.stored:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        return modules

    def part(self, codes: StoredTensor, name: str, dtypes: tuple[str, ...], *shapes: Shape) -> StoredTensor:
        """Return a stored tensor that codes need. Raises SourceError if it is missing or another one."""
        part = self.stored.get(name)
        if part is None:
            raise SourceError(
                f"{codes.file}: tensor {codes.name!r} is quantized, but not all that decodes it is there; expected "
                f"{name!r} in some shard, found none"
            )
        if part.dtype not in dtypes or (shapes and part.shape not in shapes):
            expected = " or ".join(dtypes) + ("" if not shapes else f" {list(shapes[0])}")
            raise unlike(part, "part of a quantized weight", expected)
        return part


def check_decoded(values: Bytes | Floats, weight: str, stored: StoredTensor) -> None:
    """Raise SourceError if a weight, or what it is decoded with, is not finite. stored: where that lies"""
    if not np.isfinite(values).all():
        of_weight = "" if weight == stored.name else f" of {weight!r}"
        raise SourceError(
            f"{stored.file}: tensor {stored.name!r}{of_weight}: expected finite weights and scales, found a NaN or an "
            "infinity; fetch the file again, or make it again from the original"
        )


Finder = Callable[[Source, str, StoredTensor], QuantizedTensor | None]


def unlike(stored: StoredTensor, what: str, expected: str) -> SourceError:
    """Return the error for a stored tensor that is not what a format has."""
    return SourceError(
        f"{stored.file}: {what} {stored.name!r}: expected {expected}, found {stored.dtype} {list(stored.shape)}"
    )


def rows_for(scales: StoredTensor, rows: int) -> int:
    """Return how many rows share a scale: one, unless there is one scale for all."""
    return rows if math.prod(scales.shape) == 1 else 1


def weight_of(
    source: Source,
    name: str,
    shape: Shape,
    dtype: str,
    format: PackedFormat,
    stored: Mapping[str, StoredTensor | None],
    **about: Any,
) -> QuantizedTensor:
    """Return a weight. stored: its stored tensors, by what they hold; the layout keeps those that are there"""
    there = {holds: of for holds, of in stored.items() if of is not None}
    layout = tuple(part._replace(dtype=there[part.holds].dtype) for part in format.layout if part.holds in there)
    scales = there.get(SCALES)
    about.setdefault("plain_dtype", "F16" if scales is not None and scales.dtype == "F16" else "BF16")
    return QuantizedTensor(
        storage=source.storage,
        name=name,
        shape=shape,
        dtype=dtype,
        format=replace(format, layout=layout),
        stored=tuple(there[part.holds] for part in layout),
        **about,
    )


def is_one_of(bits: Any, widths: tuple[int, ...]) -> bool:
    """Whether a width in a configuration is one of these; for Python, 4.0 is 4 and true is 1."""
    return type(bits) is int and bits in widths
