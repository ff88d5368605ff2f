"""Weights that other tools packed, decoded: integers and 4-bit floats with a scale for each group of a row.

Formats: compressed-tensors (https://github.com/vllm-project/compressed-tensors, compressors/), and NVFP4 of NVIDIA's
Model-Optimizer. packed_sources.py finds them in a source.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import Storage
from pqweights.common.dtypes import FLOAT4_VALUES, float8_table, from_float32, item_bytes, to_float32
from pqweights.kernels.groups import unpack_bits

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# So many numbers fill whole words, however wide they are.
WORD = 32


@dataclass(frozen=True, kw_only=True)
class DecodedTensor:
    """What tensors in the formats of other tools have in common; see LogicalTensor. Most models compute in BF16.

    storage: where the stored tensors lie
    parts: all stored tensors, the values first
    """

    storage: Storage
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredTensor, ...]
    plain_dtype: str = "BF16"


def read_scales(storage: Storage, stored: StoredTensor, start: int, count: int) -> Floats:
    """Read scales of a floating dtype; those in U8 are E8M0 (OCP microscaling formats specification 1.0)."""
    size = item_bytes(stored.dtype)
    raw = np.empty(count * size, dtype=np.uint8)
    storage.read_into(stored.file, stored.offset + start * size, raw)
    return float8_table("F8_E8M0")[raw] if stored.dtype in ("U8", "F8_E8M0") else to_float32(raw, stored.dtype)


@dataclass(frozen=True, kw_only=True)
class PackedTensor(DecodedTensor):
    """Rows of codes, which stand for (code - zero) * scale, or for an E2M1 float times scale.

    bits: the width of a code; codes follow each other in a row from the lowest bits on
    is_float: whether a code is an E2M1 float
    group_size: how many elements of a row share a scale
    scales: [..., groups], or one for all
    zeros: the codes that stand for 0, [rows, groups] in I8, or packed in I32 as the codes are, but along the rows; None
        for the middle code
    unit: the number in F32 that NVFP4's scales are multiplied by or, in compressed-tensors, divided by
    """

    # Elements decoded at once.
    BAND_ELEMENTS = 1 << 20

    bits: int
    is_float: bool
    group_size: int
    scales: StoredTensor
    zeros: StoredTensor | None = None
    unit: StoredTensor | None = None

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
        values = FLOAT4_VALUES[codes] if self.is_float else codes.astype(np.float32)
        if self.zeros is not None:
            values -= self._zeros(self.zeros, row, rows, low, high)[:, among]
        elif not self.is_float:
            values -= np.float32(1 << (self.bits - 1))
        with np.errstate(all="ignore"):  # what is not finite is found where values are used
            values *= self._factors(row, rows, low, high)[:, among]
        return values

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
        if codes.dtype == "I8":
            raw ^= np.uint8(0x80)
        skipped = first % WORD
        return unpack_bits(raw, self.bits, skipped + last - first)[:, skipped:]

    def _factors(self, row: int, rows: int, low: int, high: int) -> Floats:
        """Return what codes of groups [low, high) are multiplied by: [rows, high - low]."""
        if np.prod(self.scales.shape) == 1:
            scales = np.broadcast_to(read_scales(self.storage, self.scales, 0, 1), (rows, high - low))
        else:
            start = row * self._group_count + low
            scales = read_scales(self.storage, self.scales, start, rows * (high - low)).reshape(rows, -1)
        if self.unit is None:
            return scales
        unit = read_scales(self.storage, self.unit, 0, 1)
        return scales / unit if self.unit.name.endswith("_global_scale") else scales * unit

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
