"""Logical tensors that a source stores as small floats with scales: FP8 and MXFP4.

Formats: OCP 8-bit floating point specification 1.0, OCP microscaling formats specification 1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import Storage
from pqweights.common.dtypes import FLOAT4_VALUES, float8_table, from_float32, item_bytes, to_float32
from pqweights.kernels.workers import kept, scratch


@dataclass(frozen=True, kw_only=True)
class Float8Tensor:
    """FP8 values times scales: one for all, one per row, or one per block (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    storage: where the stored tensors lie
    stored: the values
    scales: the scales; None for a scale of 1
    scale_block: how many elements of each dimension share a scale
    """

    storage: Storage
    stored: StoredTensor
    scales: StoredTensor | None
    scale_block: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the stored tensor."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """The dtype of the stored tensor."""
        return self.stored.dtype

    @property
    def plain_dtype(self) -> str:
        """BF16, the dtype in which models with FP8 weights compute."""
        return "BF16"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The values, then the scales if there are any."""
        return (self.stored,) if self.scales is None else (self.stored, self.scales)

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read the float32 products of value and scale, rounded once."""
        raw = scratch("raw", count)
        self.storage.read_into(self.stored.file, self.stored.offset + start, raw)
        values = float8_table(self.dtype)[raw]
        if self.scales is not None:
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
        assert self.scales is not None
        size = item_bytes(self.scales.dtype)
        raw = np.empty(count * size, dtype=np.uint8)
        self.storage.read_into(self.scales.file, self.scales.offset + start * size, raw)
        if self.scales.dtype == "F8_E8M0":
            return float8_table("F8_E8M0")[raw]
        return to_float32(raw, self.scales.dtype)


@dataclass(frozen=True, kw_only=True)
class Mxfp4Tensor:
    """The experts of gpt-oss in MXFP4.

    storage: where the stored tensors lie
    blocks: [E, N, G, 16] u8, two E2M1 codes a byte, the low nibble first
    scales: [E, N, G] u8, exponents with a bias of 127
    name: that of the tensor in the model

    In the model the tensor is [E, 32 * G, N]: the contraction runs over the stored last dimensions.
    """

    storage: Storage
    blocks: StoredTensor
    scales: StoredTensor
    name: str

    # Elements decoded at once: a band of columns of one expert's stored matrix.
    BAND_ELEMENTS = 1 << 20
    # Each thread keeps an expert of at most this many stored bytes, so that it is not read again for every band.
    KEPT_BYTES = 1 << 25

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the model: [E, 32 * G, N]."""
        experts, rows, groups, _ = self.blocks.shape
        return (experts, groups * 32, rows)

    @property
    def dtype(self) -> str:
        """The name of the format; safetensors has none for it."""
        return "MXFP4"

    @property
    def plain_dtype(self) -> str:
        """BF16, which holds every value exactly, except with exponents at the ends of its range."""
        return "BF16"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The blocks, then the scales."""
        return (self.blocks, self.scales)

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
        _, rows, all_groups, _ = self.blocks.shape
        in_blocks, in_scales = slice(group * 16, (group + groups) * 16), slice(group, group + groups)
        if rows * all_groups * 17 <= self.KEPT_BYTES:
            codes, exponents = self._whole_expert(expert)
            codes, exponents = codes[:, in_blocks], exponents[:, in_scales]
        else:
            codes = self._read_columns(self.blocks, expert, in_blocks)
            exponents = self._read_columns(self.scales, expert, in_scales)
        values = np.empty((rows, groups, 16, 2), dtype=np.float32)
        by_group = codes.reshape(rows, groups, 16)
        values[..., 0] = FLOAT4_VALUES[by_group & 15]
        values[..., 1] = FLOAT4_VALUES[by_group >> 4]
        values *= float8_table("F8_E8M0")[exponents][:, :, None, None]
        return np.ascontiguousarray(values.reshape(rows, groups * 32).T)

    def _whole_expert(self, expert: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Read the codes and exponents of one expert; each thread keeps the last, which many chunks in a row need."""

        def read() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
            everything = slice(None)
            return (
                self._read_columns(self.blocks, expert, everything),
                self._read_columns(self.scales, expert, everything),
            )

        return kept("expert", (self.blocks, expert), read)

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
