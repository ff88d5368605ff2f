"""Weights that other tools packed, decoded: integers and short floats with a scale for each group of a row, and NF4.

Formats: compressed-tensors (https://github.com/vllm-project/compressed-tensors, compressors/), NVFP4 of NVIDIA's
Model-Optimizer, AutoGPTQ and GPTQModel, AutoAWQ's GEMM, MLX (mlx.core.quantize), torchao's Int4Tensor, Int8Tensor and
Float8Tensor, and bitsandbytes (QLoRA: Dettmers et al., arXiv:2305.14314). packed_sources.py finds them in a source.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import ByteReads
from pqweights.common.dtypes import FLOAT4_VALUES, float8_table, from_float32, item_bytes, to_float32
from pqweights.errors import SourceError
from pqweights.kernels.groups import AWQ_ORDER, unpack_bits
from pqweights.kernels.workers import kept

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# So many numbers fill whole words, however wide they are.
WORD = 32
RUN_BYTES = 1 << 20


class Aspect(enum.Enum):
    """What is read of the elements of a tensor in the format of another tool, as float32.

    VALUES: the weights
    CODES: the number of each code, of FP8 its byte
    SCALES: the scale of each weight, without the unit of NVFP4
    ZEROS: the code that stands for 0; none of floats
    BIASES: what is added; only of formats with biases
    """

    VALUES = enum.auto()
    CODES = enum.auto()
    SCALES = enum.auto()
    ZEROS = enum.auto()
    BIASES = enum.auto()


@dataclass(frozen=True, kw_only=True)
class DecodedTensor:
    """What tensors in the formats of other tools have in common; see LogicalTensor. Most models compute in BF16.

    storage: where the stored tensors lie
    parts: all stored tensors, the values first
    aspect: what is read
    """

    storage: ByteReads
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredTensor, ...]
    plain_dtype: str = "BF16"
    aspect: Aspect = Aspect.VALUES

    def has(self, aspect: Aspect) -> bool:
        """Whether another aspect than the values can be read: weights are codes on a grid."""
        return aspect in (Aspect.CODES, Aspect.SCALES) and len(self.parts) > 1

    def read(self, start: int, count: int, dtype: str, out: Bytes) -> None:
        """Read elements [start, start + count) as raw bytes of `dtype` into the start of `out`."""
        raise NotImplementedError


def read_scales(storage: ByteReads, stored: StoredTensor, start: int, count: int) -> Floats:
    """Read scales of a floating dtype; those in U8 are E8M0 (OCP microscaling formats specification 1.0)."""
    size = item_bytes(stored.dtype)
    raw = np.empty(count * size, dtype=np.uint8)
    storage.read_into(stored.file, stored.offset + start * size, raw)
    return float8_table("F8_E8M0")[raw] if stored.dtype in ("U8", "F8_E8M0") else to_float32(raw, stored.dtype)


def read_columns(
    storage: ByteReads, stored: StoredTensor, columns: slice, *, rows: int, row_bytes: int, first_row: int = 0
) -> Bytes:
    """Read a column of bytes or several of a stored matrix, in runs of whole rows: u8 [rows, columns]."""
    result = np.empty((rows, len(range(row_bytes)[columns])), dtype=np.uint8)
    step = max(1, RUN_BYTES // row_bytes)
    for row in range(0, rows, step):
        run = np.empty((min(step, rows - row), row_bytes), dtype=np.uint8)
        storage.read_into(stored.file, stored.offset + (first_row + row) * row_bytes, run.reshape(-1))
        result[row : row + len(run)] = run[:, columns]
    return result


@dataclass(frozen=True, kw_only=True)
class PackedSourceTensor(DecodedTensor):
    """Rows of codes, which stand for (code - zero) * scale + bias, or for a short float times scale.

    bits: the width of a code; codes follow each other in a row from the lowest bits on
    is_float: whether a code is an E2M1 float or, of 8 bits, an E4M3 float
    group_size: how many elements of a row share a scale
    scales: [..., groups], or one for all
    zeros: the codes that stand for 0, [rows, groups] in I8, or packed in I32 as the codes are, but along the rows
    zero: the code that stands for 0 where there are no zeros
    unit: the number in F32 that NVFP4's scales are multiplied by or, in compressed-tensors, divided by
    biases: what is added, of the shape of the scales
    is_transposed: whether scales and biases are stored as [groups, rows]
    factor: what the products are multiplied by
    """

    # Elements decoded at once.
    BAND_ELEMENTS = 1 << 20

    bits: int
    is_float: bool
    group_size: int
    scales: StoredTensor
    zeros: StoredTensor | None = None
    zero: int = 0
    unit: StoredTensor | None = None
    biases: StoredTensor | None = None
    is_transposed: bool = False
    factor: float = 1.0

    def has(self, aspect: Aspect) -> bool:
        """Whether another aspect than the values can be read: weights are codes on a grid."""
        if aspect == Aspect.ZEROS:
            return not self.is_float
        return self.biases is not None if aspect == Aspect.BIASES else super().has(aspect)

    def read(self, start: int, count: int, dtype: str, out: Bytes) -> None:
        """Read the float32 products of value and scale, rounded once."""
        columns, size, done = self.shape[-1], item_bytes(dtype), 0
        while done < count:
            row, column = divmod(start + done, columns)
            left = count - done
            rows, last = 1, min(columns, column + left, column + self.BAND_ELEMENTS)
            if column == 0 and left >= columns:
                rows = max(1, min(left, self.BAND_ELEMENTS) // columns)
            part = self._decode(row, min(rows, self._rows_from(row)), column, last).reshape(-1)
            out[done * size : (done + len(part)) * size] = from_float32(part, dtype)
            done += len(part)

    def _rows_from(self, row: int) -> int:
        """Return how many rows from this one on can be decoded together."""
        return self.BAND_ELEMENTS

    def _decode(self, row: int, rows: int, first: int, last: int) -> Floats:
        """Decode columns [first, last) of some rows; of several rows, all columns."""
        codes = self._codes(row, rows, first, last)
        groups = self._groups(first, last)
        low = int(groups.min())
        among, high = groups - low, int(groups.max()) + 1
        if self.aspect != Aspect.VALUES:
            return self._aspect(row, codes, low, high)[:, among if self.aspect != Aspect.CODES else slice(None)]
        floats = FLOAT4_VALUES if self.bits == 4 else float8_table("F8_E4M3")
        values = floats[codes] if self.is_float else codes.astype(np.float32)
        if self.zeros is not None:
            values -= self._zeros(self.zeros, row, rows, low, high)[:, among]
        elif self.zero:
            values -= np.float32(self.zero)
        with np.errstate(all="ignore"):  # what is not finite is found where values are used
            values *= self._factors(row, rows, low, high)[:, among]
            if self.factor != 1:
                values *= np.float32(self.factor)
            if self.biases is not None:
                values += self._of_groups(self.biases, row, rows, low, high)[:, among]
        return values

    def _aspect(self, row: int, codes: Bytes, low: int, high: int) -> Floats:
        """Return the codes of some rows, or what is the same within groups [low, high)."""
        rows = len(codes)
        if self.aspect == Aspect.CODES:
            return codes.astype(np.float32)
        if self.aspect == Aspect.SCALES:
            return replace(self, unit=None)._factors(row, rows, low, high)
        if self.aspect == Aspect.BIASES and self.biases is not None:
            return self._of_groups(self.biases, row, rows, low, high)
        middle = np.full((rows, high - low), self.zero, dtype=np.float32)
        return middle if self.zeros is None else self._zeros(self.zeros, row, rows, low, high)

    def _groups(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return the group of each column."""
        return np.arange(first, last) // self.group_size

    def _codes(self, row: int, rows: int, first: int, last: int) -> Bytes:
        """Read codes: u8 [rows, last - first]."""
        codes = self.parts[0]
        row_bytes = codes.shape[-1] * item_bytes(codes.dtype)
        begin = first // WORD * self.bits * WORD // 8
        end = row_bytes if rows > 1 else min(row_bytes, -(-last // WORD) * self.bits * WORD // 8)
        raw = np.empty((rows, end - begin), dtype=np.uint8)
        self.storage.read_into(codes.file, codes.offset + row * row_bytes + begin, raw.reshape(-1))
        if codes.dtype == "I8" and not self.is_float:
            raw ^= np.uint8(0x80 if self.bits == 8 else 0x88)
        skipped = first % WORD
        return unpack_bits(raw, self.bits, skipped + last - first)[:, skipped:]

    def _factors(self, row: int, rows: int, low: int, high: int) -> Floats:
        """Return what codes of groups [low, high) are multiplied by: [rows, high - low]."""
        scales = self._of_groups(self.scales, row, rows, low, high)
        if self.unit is None:
            return scales
        unit = read_scales(self.storage, self.unit, 0, 1)
        return scales / unit if self.unit.name.endswith("_global_scale") else scales * unit

    def _of_groups(self, stored: StoredTensor, row: int, rows: int, low: int, high: int) -> Floats:
        """Return scales or biases of groups [low, high): [rows, high - low]."""
        if math.prod(stored.shape) == 1:
            return np.broadcast_to(read_scales(self.storage, stored, 0, 1), (rows, high - low))
        if self.is_transposed:
            make = functools.partial(read_scales, self.storage, stored, 0, math.prod(stored.shape))
            whole = kept(stored.name.rpartition("_")[2], (self.storage, stored), make)
            return whole.reshape(stored.shape)[low:high, row : row + rows].T
        start = row * self._group_count + low
        return read_scales(self.storage, stored, start, rows * (high - low)).reshape(rows, -1)

    def _zeros(self, zeros: StoredTensor, row: int, rows: int, low: int, high: int) -> Floats:
        """Return the codes that stand for 0 in groups [low, high): [rows, high - low]."""
        groups = self._group_count
        if zeros.dtype == "I8":
            raw = np.empty(rows * (high - low), dtype=np.int8)
            self.storage.read_into(zeros.file, zeros.offset + row * groups + low, raw.view(np.uint8))
            return raw.reshape(rows, -1).astype(np.float32) + np.float32(1 << (self.bits - 1))
        begin = row // WORD * self.bits
        end = min(zeros.shape[0], -(-(row + rows) // WORD) * self.bits)
        words = np.empty((end - begin, groups), dtype="<u4")
        self.storage.read_into(zeros.file, zeros.offset + 4 * begin * groups, words.view(np.uint8).reshape(-1))
        packed = np.ascontiguousarray(words[:, low:high].T).view(np.uint8)
        skipped = row % WORD
        return unpack_bits(packed, self.bits, skipped + rows)[:, skipped:].T.astype(np.float32)

    @property
    def _group_count(self) -> int:
        return -(-self.shape[-1] // self.group_size)


@dataclass(frozen=True, kw_only=True)
class TransposedTensor(PackedSourceTensor):
    """The weight [N, K] of AutoGPTQ or AutoAWQ, whose stored matrices have N columns: `scales` are [groups, N].

    parts: of GPTQ, codes [K / 32 * bits, N] whose words share a column, zeros [groups, N / 32 * bits]; of AWQ, codes
        [K, N / 8] and zeros [groups, N / 8], whose words share a row
    group_of: the group of each of K, [K] I32, which no order of columns needs
    is_awq: whether words are those of AutoAWQ
    first_zero: the zero that is stored as 0; beyond the largest code, zeros begin at 0 again, as in AutoGPTQ
    """

    # Each thread keeps the packed codes of so many columns, so that they are not gathered again for every read.
    KEPT_BYTES = 1 << 25

    group_of: StoredTensor | None
    is_awq: bool
    first_zero: int

    def _rows_from(self, row: int) -> int:
        return self._band_rows - row % self._band_rows

    @property
    def _band_rows(self) -> int:
        return max(1, self.KEPT_BYTES * 8 // (self.shape[1] * self.bits * WORD)) * WORD

    def _groups(self, first: int, last: int) -> npt.NDArray[np.int64]:
        if self.group_of is None:
            return super()._groups(first, last)
        stored, groups = self.group_of, self.scales.shape[0]
        raw = np.empty((last - first) * 4, dtype=np.uint8)
        self.storage.read_into(stored.file, stored.offset + first * 4, raw)
        group_of = raw.view("<i4").astype(np.int64)
        if group_of.min() < 0 or group_of.max() >= groups:
            raise SourceError(
                f"{stored.file}: tensor {stored.name!r}: expected groups from 0 to {groups - 1}, found "
                f"{group_of.min()} to {group_of.max()}; the file is damaged"
            )
        return group_of

    def _band(self, stored: StoredTensor, row: int, bits: int) -> Bytes:
        """Return `bits` for each of the columns of a stored matrix that are a band of rows here: u8 [lines, bytes]."""
        band, size = self._band_rows, self.shape[0]
        first = row // band * band
        columns = slice(first * bits // 8, min(first + band, size) * bits // 8)
        rows, row_bytes = stored.shape[0], stored.byte_count // stored.shape[0]
        make = functools.partial(read_columns, self.storage, stored, columns, rows=rows, row_bytes=row_bytes)
        return kept(stored.name.rpartition(".")[2], (self.storage, stored, first), make)

    def _codes(self, row: int, rows: int, first: int, last: int) -> Bytes:
        stored, within = self.parts[0], row % self._band_rows
        if self.is_awq:
            band = self._band(stored, row, self.bits)[first:last]
            return _awq_codes(band, within, rows).T
        low, high = first // WORD, -(-last // WORD)
        band = self._band(stored, row, 32)[low * self.bits : high * self.bits, within * 4 : (within + rows) * 4]
        packed = np.ascontiguousarray(np.ascontiguousarray(band).view("<u4").T).view(np.uint8)
        return unpack_bits(packed, self.bits)[:, first - low * WORD : last - low * WORD]

    def _factors(self, row: int, rows: int, low: int, high: int) -> Floats:
        size, within = item_bytes(self.scales.dtype), row % self._band_rows
        band = self._band(self.scales, row, 8 * size)[low:high, within * size : (within + rows) * size]
        return to_float32(np.ascontiguousarray(band).reshape(-1), self.scales.dtype).reshape(high - low, rows).T

    def _zeros(self, zeros: StoredTensor, row: int, rows: int, low: int, high: int) -> Floats:
        band, within = self._band(zeros, row, self.bits)[low:high], row % self._band_rows
        if self.is_awq:
            return _awq_codes(band, within, rows).T.astype(np.float32)
        begin = within // WORD * WORD * self.bits // 8
        end = -(-(within + rows) // WORD) * WORD * self.bits // 8
        codes = unpack_bits(np.ascontiguousarray(band[:, begin:end]), self.bits)[:, within % WORD :][:, :rows]
        return ((codes.T.astype(np.int32) + self.first_zero) & ((1 << self.bits) - 1)).astype(np.float32)


def _awq_codes(lines: Bytes, first: int, count: int) -> Bytes:
    """Return `count` codes of each line of AutoAWQ's words from the code `first` on."""
    low, high = first // 8, -(-(first + count) // 8)
    words = np.ascontiguousarray(lines[:, low * 4 : high * 4]).view("<u4")
    codes = np.empty((len(lines), high - low, 8), dtype=np.uint8)
    for place, column in enumerate(AWQ_ORDER):
        codes[..., column] = words >> np.uint32(4 * place) & np.uint32(15)
    return codes.reshape(len(lines), -1)[:, first - 8 * low :][:, :count]


class NestedScales(NamedTuple):
    """How scales are quantized themselves: table[code] * scale + offset, with a scale for each block of them.

    scales, table: F32 [blocks] and F32 [256]
    """

    scales: StoredTensor
    table: StoredTensor
    block_size: int
    offset: float


@dataclass(frozen=True, kw_only=True)
class TableTensor(DecodedTensor):
    """Weights of bitsandbytes in 4 bits: one after the other, in blocks that do not end with rows.

    parts: the codes, two in a byte, the first one in the upper bits
    table: the number of each code, F32 [16]
    scales: F32 [blocks], or U8 with `nested`
    """

    # Elements decoded at once.
    BAND_ELEMENTS = 1 << 20

    table: StoredTensor
    block_size: int
    scales: StoredTensor
    nested: NestedScales | None

    def has(self, aspect: Aspect) -> bool:
        """Whether another aspect than the values can be read: weights are codes on a grid.

        The numbers of a table are on no grid.
        """
        return False

    def read(self, start: int, count: int, dtype: str, out: Bytes) -> None:
        """Read the float32 products of number and scale, rounded once."""
        table, size, codes = read_scales(self.storage, self.table, 0, 16), item_bytes(dtype), self.parts[0]
        for first in range(start, start + count, self.BAND_ELEMENTS):
            last = min(first + self.BAND_ELEMENTS, start + count)
            raw = np.empty(-(-last // 2) - first // 2, dtype=np.uint8)
            self.storage.read_into(codes.file, codes.offset + first // 2, raw)
            values = table[np.stack([raw >> 4, raw & 15], axis=1).reshape(-1)[first % 2 :][: last - first]]
            low, high = first // self.block_size, -(-last // self.block_size)
            with np.errstate(all="ignore"):  # what is not finite is found where values are used
                values *= self._scales(low, high)[np.arange(first, last) // self.block_size - low]
            out[(first - start) * size : (last - start) * size] = from_float32(values, dtype)

    def _scales(self, low: int, high: int) -> Floats:
        """Return the scales of blocks [low, high)."""
        if self.nested is None:
            return read_scales(self.storage, self.scales, low, high - low)
        codes = np.empty(high - low, dtype=np.uint8)
        self.storage.read_into(self.scales.file, self.scales.offset + low, codes)
        block_of = np.arange(low, high) // self.nested.block_size
        scales = read_scales(self.storage, self.nested.scales, int(block_of[0]), int(block_of[-1] - block_of[0]) + 1)
        numbers: Floats = read_scales(self.storage, self.nested.table, 0, 256)[codes]
        numbers *= scales[block_of - block_of[0]]
        numbers += np.float32(self.nested.offset)
        return numbers
