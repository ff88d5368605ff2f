"""Logical tensors that a source stores as small floats with scales: FP8 and MXFP4.

Formats: OCP 8-bit floating point specification 1.0, OCP microscaling formats specification 1.0.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import Storage
from pqweights.common.dtypes import FLOAT4_VALUES, float8_table, from_float32, item_bytes, to_float32
from pqweights.kernels.workers import kept, scratch


@dataclass(frozen=True, kw_only=True)
class SmallFloatTensor:
    """What the tensors below have in common; see LogicalTensor. Models with such weights compute in BF16.

    storage: where the stored tensors lie
    parts: the values, then their scales
    """

    storage: Storage
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredTensor, ...]
    plain_dtype: str = "BF16"


@dataclass(frozen=True, kw_only=True)
class Float8Tensor(SmallFloatTensor):
    """FP8 values times scales: one for all, one per row, or one per block (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    parts: without scales, they are 1
    scale_block: how many elements of each dimension share a scale
    """

    scale_block: tuple[int, ...]

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read the float32 products of value and scale, rounded once."""
        raw, stored = scratch("raw", count), self.parts[0]
        self.storage.read_into(stored.file, stored.offset + start, raw)
        values = float8_table(self.dtype)[raw]
        if len(self.parts) > 1:
            self._multiply(values, start)
        converted = from_float32(values, dtype)
        out[: len(converted)] = converted

    def _multiply(self, values: npt.NDArray[np.float32], start: int) -> None:
        """Multiply values, the first of which is element `start`, by their scales in place."""
        columns = self.shape[-1] if self.shape else 1
        done, index, scales = 0, -1, np.empty(0, dtype=np.float32)
        while done < len(values):
            row, column = divmod(start + done, columns)
            width = min(columns - column, len(values) - done)
            if self._scale_row(row) != index:
                index = self._scale_row(row)
                scales = self._expanded_scales(index)
            values[done : done + width] *= scales[column : column + width]
            done += width

    def _scale_row(self, row: int) -> int:
        """Return which row of scales belongs to a row of values; rows are numbered through all leading dimensions."""
        index, stride = 0, 1
        for size, step in zip(reversed(self.shape[:-1]), reversed(self.scale_block[:-1]), strict=True):
            row, position = divmod(row, size)
            index += position // step * stride
            stride *= -(-size // step)
        return index

    def _expanded_scales(self, index: int) -> npt.NDArray[np.float32]:
        """Return one row of scales, each repeated for the elements that share it: [columns] f32."""
        if not self.shape:
            return self._read_scales(0, 1)
        columns, block = self.shape[-1], self.scale_block[-1]
        scale_columns = -(-columns // block)
        return np.repeat(self._read_scales(index * scale_columns, scale_columns), block)[:columns]

    def _read_scales(self, start: int, count: int) -> npt.NDArray[np.float32]:
        scales = self.parts[1]
        size = item_bytes(scales.dtype)
        raw = np.empty(count * size, dtype=np.uint8)
        self.storage.read_into(scales.file, scales.offset + start * size, raw)
        return float8_table("F8_E8M0")[raw] if scales.dtype == "F8_E8M0" else to_float32(raw, scales.dtype)


@dataclass(frozen=True, kw_only=True)
class Mxfp4Tensor(SmallFloatTensor):
    """The experts of gpt-oss in MXFP4.

    shape: [E, 32 * G, N], as in the model: the contraction runs over the stored last dimensions
    parts: the blocks, [E, N, G, 16] u8, two E2M1 codes a byte, the low nibble first; the scales, [E, N, G] u8,
        exponents with a bias of 127
    """

    # Elements decoded at once: a band of columns of one expert's stored matrix.
    BAND_ELEMENTS = 1 << 20
    # Each thread keeps an expert of at most this many stored bytes, so that it is not read again for every band.
    KEPT_BYTES = 1 << 25

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Gather elements across the stored rows, and decode them a band of groups at a time."""
        _, depth, rows = self.shape
        size = item_bytes(dtype)
        band_groups = max(1, self.BAND_ELEMENTS // (32 * rows))
        done = 0
        while done < count:
            expert, within = divmod(start + done, depth * rows)
            first_group = within // rows // 32
            band = self._decode_band(expert, first_group, min(band_groups, depth // 32 - first_group))
            offset = within - first_group * 32 * rows
            part = band.reshape(-1)[offset : offset + count - done]
            out[done * size : (done + len(part)) * size] = from_float32(part, dtype)
            done += len(part)

    def _decode_band(self, expert: int, group: int, groups: int) -> npt.NDArray[np.float32]:
        """Decode groups [group, group + groups) of one expert: [32 * groups, N] f32."""
        blocks, _ = self.parts
        _, rows, all_groups, _ = blocks.shape
        in_blocks, in_scales = slice(group * 16, (group + groups) * 16), slice(group, group + groups)
        if rows * all_groups * 17 <= self.KEPT_BYTES:  # each thread keeps the last, which many chunks in a row need
            read = functools.partial(self._read_expert, expert, slice(None), slice(None))
            codes, exponents = kept("expert", (blocks, expert), read)
            codes, exponents = codes[:, in_blocks], exponents[:, in_scales]
        else:
            codes, exponents = self._read_expert(expert, in_blocks, in_scales)
        values = np.empty((rows, groups, 16, 2), dtype=np.float32)
        by_group = codes.reshape(rows, groups, 16)
        values[..., 0] = FLOAT4_VALUES[by_group & 15]
        values[..., 1] = FLOAT4_VALUES[by_group >> 4]
        values *= float8_table("F8_E8M0")[exponents][:, :, None, None]
        return np.ascontiguousarray(values.reshape(rows, groups * 32).T)

    def _read_expert(
        self, expert: int, in_blocks: slice, in_scales: slice
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Read columns of the codes and the exponents of one expert."""
        blocks, scales = self.parts
        return self._read_columns(blocks, expert, in_blocks), self._read_columns(scales, expert, in_scales)

    def _read_columns(self, stored: StoredTensor, expert: int, columns: slice) -> npt.NDArray[np.uint8]:
        """Read columns of one expert's byte matrix, in runs of whole rows: [rows, columns]."""
        rows, row_bytes = stored.shape[1], math.prod(stored.shape[2:])
        start = stored.offset + expert * rows * row_bytes
        result = np.empty((rows, len(range(row_bytes)[columns])), dtype=np.uint8)
        step = max(1, self.BAND_ELEMENTS // row_bytes)
        for row in range(0, rows, step):
            run = np.empty((min(step, rows - row), row_bytes), dtype=np.uint8)
            self.storage.read_into(stored.file, start + row * row_bytes, run.reshape(-1))
            result[row : row + len(run)] = run[:, columns]
        return result
