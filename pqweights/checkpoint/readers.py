"""Logical tensors: a name, a shape, and values that can be read from any element on, however they are stored.

Everything above this package sees only `LogicalTensor`. Here are those that are stored as they are, and the encoded
weights of a master; formats/packed.py has those of other tools, views.py tensors that are put together from
others. At the end: which files are needed when tensors are read in order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.digests import Reads
from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.header import ByteReads, StoredTensor
from pqweights.common.dtypes import DTYPE_BITS, FINITE_RANGES, convert, item_bytes, to_float32
from pqweights.errors import SourceError
from pqweights.formats.columns import ColumnCodes, ColumnCut, TrellisColumns, decode_codes
from pqweights.formats.master import VALUE_DTYPES, BlockFormat, DamagedBlock, MasterFormat
from pqweights.formats.weight import damaged_error, damaged_master
from pqweights.kernels import BLOCK_SIZE
from pqweights.kernels.workers import scratch

Floats = npt.NDArray[np.float32]


class LogicalTensor(Protocol):
    """One tensor of a model."""

    @property
    def name(self) -> str:
        """The name that the model gives it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that it has in the model."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype in the source: one of safetensors, or the name of a packed format."""
        ...

    @property
    def plain_dtype(self) -> str:
        """The dtype that it gets if it is stored plainly."""
        ...

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors that it is made of; the place of the first is its place in the order of the source."""
        ...

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements [start, start + count) of the row-major tensor as raw bytes of `dtype` into the start of `out`.

        dtype: `plain_dtype`, or a floating dtype
        out: may be longer; what is behind the elements is undefined afterwards

        Raises SourceError if the source cannot deliver them.
        """
        ...


def element_count(tensor: LogicalTensor) -> int:
    """Return the number of elements."""
    return math.prod(tensor.shape)


class PlainTensor(NamedTuple):
    """A tensor that is stored as it is.

    storage, stored: where it is stored
    name, shape, dtype: those of the stored tensor; as fields, because a plan reads them a dozen times
    """

    storage: ByteReads
    stored: StoredTensor
    name: str
    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(storage: ByteReads, stored: StoredTensor) -> PlainTensor:
        """Return a stored tensor as a logical one."""
        return PlainTensor(storage, stored, stored.name, stored.shape, stored.dtype)

    @property
    def plain_dtype(self) -> str:
        """The dtype of the stored tensor."""
        return self.dtype

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensor alone."""
        return (self.stored,)

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements; those of less than a byte only in their own dtype, and from a whole byte on."""
        bits = DTYPE_BITS[self.dtype]
        offset = self.stored.offset + start * bits // 8
        if dtype == self.dtype:
            self.storage.read_into(self.stored.file, offset, out[: count * bits // 8])
            return
        raw = scratch("raw", count * bits // 8)
        self.storage.read_into(self.stored.file, offset, raw)
        converted = convert(raw, self.dtype, dtype)
        out[: len(converted)] = converted


@dataclass(frozen=True, kw_only=True)
class EncodedTensor:
    """A weight of a master, of which any elements are decoded. It is a BlockTensor or a ColumnTensor.

    storage: where the stored tensors lie
    name, shape, dtype: those of the weight in the source
    format: how it is stored
    encoded: the stored tensors of its format, in the order of the suffixes
    """

    storage: Reads
    name: str
    shape: tuple[int, ...]
    dtype: str
    format: MasterFormat
    encoded: tuple[StoredTensor, ...]

    @property
    def plain_dtype(self) -> str:
        """The dtype in the source; BF16 if that was a packed format."""
        return self.dtype if self.dtype in ("BF16", "F16", "F32", "F64") else "BF16"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Everything that is stored for it."""
        return self.encoded

    @property
    def place(self) -> str:
        """File and name of the weight, for messages."""
        return f"{self.encoded[0].file}: tensor {self.name!r}"

    @property
    def unit(self) -> int:
        """How many elements, from a multiple of this number on, are decoded together."""
        raise NotImplementedError

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Decode elements. Raises MasterError if they cannot be decoded."""
        if dtype in VALUE_DTYPES:
            self._decode(start, count, dtype, out)
            return
        decoded = scratch("decoded", count * 4)
        self._decode(start, count, "F32", decoded)
        out[: count * item_bytes(dtype)] = convert(decoded, "F32", dtype)

    def _decode(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Decode elements [start, start + count) to one of VALUE_DTYPES."""
        raise NotImplementedError

    def mapped_parts(self) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of each of `encoded` as they lie in a file of a local folder.

        They are used without being read: CheckedReads.check checks them.
        """
        mapped = []
        for stored in self.encoded:
            raw = self.storage.mapped(stored.file)[stored.offset : stored.offset + stored.byte_count]
            if len(raw) < stored.byte_count:
                raise SourceError(f"{stored.file}: tensor {stored.name!r}: the file has become shorter")
            mapped.append(raw)
        return mapped

    def _read_items(self, stored: StoredTensor, first: int, out: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return bytes of a stored tensor from `first` on, which may be read into `out`."""
        self.storage.read_into(stored.file, stored.offset + first, out)
        return out


@dataclass(frozen=True, kw_only=True)
class BlockTensor(EncodedTensor):
    """A weight that is decoded block by block.

    format: what decodes it, sized for it
    awq: the scales by which the input channels were multiplied, if they were
    """

    format: BlockFormat
    awq: StoredTensor | None = None

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The encoded parts, then the scales if there are any."""
        return self.encoded if self.awq is None else (*self.encoded, self.awq)

    @property
    def unit(self) -> int:
        """How many elements, from a multiple of this number on, are decoded together."""
        return self.format.block_size

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Decode the blocks that hold the elements, and undo the scales of the input channels.

        Raises MasterError if a block cannot be decoded.
        """
        if self.awq is None and dtype in VALUE_DTYPES:
            self._decode(start, count, dtype, out)
            return
        if self.awq is None:
            super().read(start, count, dtype, out)
            return
        decoded = out[: count * 4] if dtype == "F32" else scratch("decoded", count * 4)
        self._decode(start, count, "F32", decoded)
        values = decoded.view(np.float32)
        rows, columns = self.shape[-2:]
        first, last = start // columns // rows, -(-(start + count) // (columns * rows))
        offset = start - first * rows * columns
        divide_scales(values, self.awq_scales(first, last), start=offset, shape=self.shape)
        np.clip(values, *FINITE_RANGES.get(dtype, FINITE_RANGES["F32"]), out=values)
        if dtype != "F32":
            out[: count * item_bytes(dtype)] = convert(decoded, "F32", dtype)

    def awq_scales(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.float32]:
        """Read the scales of the matrices [first, last), by default of all; the weight must have some.

        Raises MasterError for scales that no run writes.
        """
        assert self.awq is not None
        row = self.shape[-1] * 2
        count = self.awq.byte_count if last is None else (last - first) * row
        values = to_float32(self._read_items(self.awq, first * row, np.empty(count, dtype=np.uint8)), "F16")
        if len(values) and not SMALLEST_SCALE <= values.min() <= values.max() < np.inf:
            raise damaged_master(
                f"{self.awq.file}: tensor {self.awq.name!r}: expected finite scales from {SMALLEST_SCALE} on"
            )
        return values

    def read_parts(self, first: int, last: int, into: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Read the bytes of blocks [first, last) of each part into arrays [blocks, bytes per block]."""
        for part, stored, array in zip(self.format.parts, self.encoded, into, strict=True):
            self._read_items(stored, first * part.bytes_per_block, array.reshape(-1))

    def _decode(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Decode elements [start, start + count), straight into `out` if it holds their whole blocks."""
        block_size = self.format.block_size
        first, last = start // block_size, -(-(start + count) // block_size)
        parts = [
            scratch(f"part {index}", (last - first) * part.bytes_per_block).reshape(-1, part.bytes_per_block)
            for index, part in enumerate(self.format.parts)
        ]
        self.read_parts(first, last, parts)
        size = item_bytes(dtype)
        skip = (start - first * block_size) * size
        whole = (last - first) * block_size * size
        in_place = skip == 0 and len(out) >= whole
        values = out[:whole] if in_place else np.empty(whole, dtype=np.uint8)
        try:
            self.format.decode(parts, values, dtype=dtype)
        except DamagedBlock as damaged:
            raise damaged_error(self.place, damaged, first=first) from None
        if not in_place:
            out[: count * size] = values[skip : skip + count * size]


@dataclass(frozen=True, kw_only=True)
class ColumnTensor(EncodedTensor):
    """A weight of hadamard-trellis-columns, of which the superblocks are decoded that hold elements."""

    # Elements of a transposed weight that are decoded at once, before they are put in their places.
    BAND_ELEMENTS = 1 << 22

    format: TrellisColumns

    @functools.cached_property
    def cut(self) -> ColumnCut:
        """How it is cut."""
        return ColumnCut.of(self.shape, transposed=self.format.transposed)

    @functools.cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where superblocks end in their stored tensor, from 0 on: [1 + superblocks].

        Raises MasterError for lengths that no encoder writes.
        """
        trellis, stored = self.encoded[:2]
        lengths = self._read_items(stored, 0, np.empty(stored.byte_count, dtype=np.uint8)).view("<i4")
        problem = self.cut.length_problem(lengths.reshape(stored.shape), trellis.byte_count)
        if problem is not None:
            raise damaged_master(f"{stored.file}: tensor {stored.name!r}: {problem}")
        return np.append(0, np.cumsum(lengths, dtype=np.int64))

    @property
    def unit(self) -> int:
        """How many elements, from a multiple of this number on, are decoded together.

        A strip, or of a transposed weight a superblock of each strip.
        """
        return self.unit_rows * self.shape[-1]

    @property
    def unit_rows(self) -> int:
        """How many rows of the weight, as it is stored, are decoded together."""
        return self.cut.blocks if self.format.transposed else BLOCK_SIZE

    def _decode(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Decode elements, a unit or two strips at a time, straight into `out` if they are rows from its start on."""
        (height, width), size, end = self.shape[-2:], item_bytes(dtype), start + count
        while start < end:
            matrix, row = divmod(start // width, height)
            first = row // self.unit_rows * self.unit_rows
            units = 1 if self.format.transposed or start > (matrix * height + first) * width else 2
            rows, columns = range(first, min(first + units * self.unit_rows, height)), range(width)
            stop = min(end, (matrix * height + rows.stop) * width)
            if not self.format.transposed:
                rows = range(first, -(-stop // width) - matrix * height)
                if row == rows.stop - 1:
                    begin, last = (self.cut.columns_of(at % width // self.cut.blocks) for at in (start, stop - 1))
                    columns = range(begin.start, last.stop)
            skip = (row - first) * len(columns) + start % width - columns.start
            byte_count, whole = (stop - start) * size, len(rows) * len(columns) * size
            values = out[:byte_count] if byte_count == whole else np.empty(whole, dtype=np.uint8)
            self._decode_part(matrix, rows, columns, dtype=dtype, out=values)
            if byte_count != whole:
                out[:byte_count] = values[skip * size : skip * size + byte_count]
            start, out = stop, out[byte_count:]

    def _decode_part(self, matrix: int, rows: range, columns: range, *, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Decode rows of a unit or two, from the first one on, to one of VALUE_DTYPES: bytes of [rows, columns].

        rows, columns: of the weight as it is stored; whole superblocks

        Raises MasterError if they cannot be decoded.
        """
        cut, items = self.cut, f"u{item_bytes(dtype)}"
        if not cut.transposed:
            self._decode_superblocks(matrix, rows, columns, dtype=dtype, out=out)
            return
        transposed = out.view(items).reshape(len(rows), -1)
        step = max(1, self.BAND_ELEMENTS // (len(rows) * BLOCK_SIZE)) * BLOCK_SIZE
        for start in range(0, cut.rows, step):
            band = range(start, min(start + step, cut.rows))
            values = scratch("transposed", len(band) * len(rows) * item_bytes(dtype))
            self._decode_superblocks(matrix, band, rows, dtype=dtype, out=values)
            transposed[:, band.start : band.stop] = values.view(items).reshape(len(band), -1).T

    def _decode_superblocks(
        self, matrix: int, rows: range, columns: range, *, dtype: str, out: npt.NDArray[np.uint8]
    ) -> None:
        """Decode rows and columns of a matrix, whole superblocks: of a transposed weight, neighbours in one column."""
        cut = self.cut
        first, count, strip = columns.start // cut.blocks, -(-len(columns) // cut.blocks), rows.start // BLOCK_SIZE
        at = matrix * cut.strips * cut.superblocks
        at += first * cut.strips + strip if cut.transposed else strip * cut.superblocks + first
        ends = self.ends[at : at + 1 + -(-len(rows) // BLOCK_SIZE) * count]
        trellis, _, row_scales, column_scales = self.encoded
        codes = ColumnCodes(
            self._read_items(trellis, int(ends[0]), scratch("trellis", int(ends[-1] - ends[0]))),
            np.diff(ends).astype(np.int32).reshape(-1, count),
            self._scales(row_scales, matrix * cut.rows, rows),
            self._scales(column_scales, matrix * cut.columns, columns),
        )
        try:
            decode_codes(codes, cut.blocks, dtype, out)
        except DamagedBlock as damaged:
            raise damaged_error(self.place, damaged, first=at) from None

    def _scales(self, stored: StoredTensor, first: int, numbers: range) -> npt.NDArray[np.uint8]:
        return self._read_items(stored, first + numbers.start, np.empty(len(numbers), dtype=np.uint8))


def whole_blocks(tensor: LogicalTensor, weights: int) -> int:
    """Return how many weights of a tensor to read at a time, about `weights`, so that no block is decoded twice."""
    return max(1, weights // tensor.unit) * tensor.unit if isinstance(tensor, EncodedTensor) else weights


# --- activation-aware scales (AWQ: Lin et al., arXiv:2306.00978) ---

# A weight [..., N, K] multiplies inputs of K channels and has scales [..., K]. The encoder multiplies by the stored
# float16 scale, and the decoder divides by it, both in float32. (In a weight that is stored as [..., K, N], a block
# lies within one channel, and its norm absorbs any factor of the channel: no scale could change its codes.)

# Scales are normal numbers of float16.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-14, 2.0**15


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a weight's scales: [..., K]."""
    return (*shape[:-2], shape[-1])


def multiply_scales(values: Floats, scales: Floats, *, start: int, shape: tuple[int, ...]) -> None:
    """Multiply elements of a row-major weight by their scales, in place.

    values: the elements from `start` on
    scales: those of all its matrices, in order
    start: the index of the first element
    shape: that of the weight
    """
    for part, of_part in _scaled_parts(values, scales, start=start, shape=shape):
        part *= of_part


def divide_scales(values: Floats, scales: Floats, *, start: int, shape: tuple[int, ...]) -> None:
    """Divide elements of a row-major weight by their scales, in place: the inverse of `multiply_scales`."""
    for part, of_part in _scaled_parts(values, scales, start=start, shape=shape):
        part /= of_part


def _scaled_parts(
    values: Floats, scales: Floats, *, start: int, shape: tuple[int, ...]
) -> Iterator[tuple[Floats, Floats]]:
    """Yield views of the values with the scales that broadcast over each.

    The views are the rest of a row, whole rows of one matrix, or the beginning of a row.
    """
    rows, columns = shape[-2], shape[-1]
    by_matrix = scales.reshape(-1, columns)
    done = 0
    while done < len(values):
        row, column = divmod(start + done, columns)
        matrix, row = divmod(row, rows)
        left = len(values) - done
        if column or left < columns:
            count = min(columns - column, left)
            yield values[done : done + count], by_matrix[matrix, column : column + count]
        else:
            whole = min(rows - row, left // columns)
            count = whole * columns
            yield values[done : done + count].reshape(whole, columns), by_matrix[matrix]
        done += count


# --- which files are needed ---


@dataclass(frozen=True)
class FileUse:
    """When a file is needed while tensors are read in order.

    first, last: the places of the first and the last tensor that need the file
    together: how many files are needed at the first place, or both before and after it
    """

    first: int
    last: int
    together: int


def file_uses(tensors: Sequence[LogicalTensor]) -> dict[str, FileUse]:
    """Return when each file is needed, by file, in the order in which they are needed."""
    spans: dict[str, tuple[int, int]] = {}
    for index, tensor in enumerate(tensors):
        for part in tensor.parts:
            spans[part.file] = (spans.get(part.file, (index, index))[0], index)
    return {
        file: FileUse(first, last, sum(begin <= first <= end for begin, end in spans.values()))
        for file, (first, last) in spans.items()
    }


def most_fetched(uses: dict[str, FileUse], files: dict[str, FileState], at_once: int) -> int:
    """Return the most bytes of files that are held together, if each is deleted after its last use.

    at_once: how many files are held, because later ones are fetched ahead; more if more are needed together
    """
    most, order = 0, list(uses)
    for number, file in enumerate(order):
        held = [f for f in order[: number + 1] if uses[f].last >= uses[file].first]
        held += order[number + 1 : number + 1 + max(0, at_once - len(held))]
        most = max(most, sum(files[f].byte_count for f in held))
    return most
