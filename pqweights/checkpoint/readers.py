"""Logical tensors: a name, a shape, and values that can be read from any element on, however they are stored.

Everything above this package sees only `LogicalTensor`; FP8 with scales, MXFP4 and our own codes are decoded behind it.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pqweights.buffers import scratch
from pqweights.checkpoint import scales
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import Storage
from pqweights.codecs import get_codec
from pqweights.codecs.protocol import HADAMARD
from pqweights.dtypes import (
    DTYPE_BITS,
    FINITE_RANGES,
    FLOAT4_VALUES,
    convert,
    float8_table,
    from_float32,
    item_bytes,
    to_float32,
)
from pqweights.kernels import BLOCK_SIZE, VALUE_DTYPES
from pqweights.kernels.codebook import Codebook


class LogicalTensor(Protocol):
    """One tensor of the model."""

    @property
    def name(self) -> str:
        """As the model calls it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model holds it."""
        ...

    @property
    def dtype(self) -> str:
        """What the source calls it."""
        ...

    @property
    def plain_dtype(self) -> str:
        """The dtype in which it is kept."""
        ...

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors that it is made of; the first one places it in the order of the source."""
        ...

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Elements [start, start + count) of the row-major tensor as raw bytes of `dtype`, at the start of `out`.

        What is behind them in a longer `out` is undefined. dtype is `plain_dtype` or a floating dtype. Raises SourceError where
        the source cannot deliver them.
        """
        ...


def element_count(tensor: LogicalTensor) -> int:
    """Number of elements."""
    return math.prod(tensor.shape)


@dataclass(frozen=True)
class PlainTensor:
    """Stored as it is."""

    storage: Storage
    stored: StoredTensor

    @property
    def name(self) -> str:
        """See LogicalTensor."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """See LogicalTensor."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """See LogicalTensor."""
        return self.stored.dtype

    @property
    def plain_dtype(self) -> str:
        """See LogicalTensor."""
        return self.stored.dtype

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """See LogicalTensor."""
        return (self.stored,)

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """See LogicalTensor; elements of less than a byte can only be read as they are, from a whole byte on."""
        bits = DTYPE_BITS[self.dtype]
        offset = self.stored.offset + start * bits // 8
        if dtype == self.dtype:
            self.storage.read_into(self.stored.file, offset, out[: count * bits // 8])
            return
        raw = scratch("raw", count * bits // 8)
        self.storage.read_into(self.stored.file, offset, raw)
        converted = convert(raw, self.dtype, dtype)
        out[: len(converted)] = converted


@dataclass(frozen=True)
class Float8Tensor:
    """FP8 values times scales: one for all, one per row, or one per block (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    scale_block: how many elements of each dimension share a scale; scales: the stored scale tensor, or None for 1.
    """

    storage: Storage
    stored: StoredTensor
    scales: StoredTensor | None
    scale_block: tuple[int, ...]

    @property
    def name(self) -> str:
        """See LogicalTensor."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """See LogicalTensor."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """See LogicalTensor."""
        return self.stored.dtype

    @property
    def plain_dtype(self) -> str:
        """BF16: the dtype in which models with FP8 weights compute."""
        return "BF16"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """See LogicalTensor."""
        return (self.stored,) if self.scales is None else (self.stored, self.scales)

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """See LogicalTensor: the float32 product of value and scale, rounded once."""
        raw = scratch("raw", count)
        self.storage.read_into(self.stored.file, self.stored.offset + start, raw)
        values = float8_table(self.dtype)[raw]
        if self.scales is not None:
            columns = self.shape[-1] if self.shape else 1
            done, index, scales = 0, -1, np.empty(0, dtype=np.float32)
            while done < count:
                row, column = divmod(start + done, columns)
                width = min(columns - column, count - done)
                if self._scale_row(row) != index:
                    index = self._scale_row(row)
                    scales = self._expanded_scales(index)
                values[done : done + width] *= scales[column : column + width]
                done += width
        converted = from_float32(values, dtype)
        out[: len(converted)] = converted

    def _scale_row(self, row: int) -> int:
        """Which row of scales holds for the row-th row of values (all leading dimensions counted through)."""
        index, stride = 0, 1
        for size, step in zip(reversed(self.shape[:-1]), reversed(self.scale_block[:-1]), strict=True):
            row, position = divmod(row, size)
            index += position // step * stride
            stride *= -(-size // step)
        return index

    def _expanded_scales(self, index: int) -> npt.NDArray[np.float32]:
        """One row of scales, each repeated for the elements that share it: [columns] f32."""
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


_last_expert = threading.local()


@dataclass(frozen=True)
class Mxfp4Tensor:
    """gpt-oss experts: [E, N, G, 16] bytes of two E2M1 codes (low nibble first) and [E, N, G] exponents (bias 127).

    The logical tensor is [E, 32 * G, N], as the model holds it: the contraction runs over the stored last dimensions.
    """

    storage: Storage
    blocks: StoredTensor
    scales: StoredTensor
    name: str

    # Elements decoded at once; a band of columns of one expert's stored matrix.
    BAND_ELEMENTS = 1 << 20
    # An expert of at most this many stored bytes is kept by each thread, instead of being read for every band.
    KEPT_BYTES = 1 << 25

    @property
    def shape(self) -> tuple[int, ...]:
        """See LogicalTensor."""
        experts, rows, groups, _ = self.blocks.shape
        return (experts, groups * 32, rows)

    @property
    def dtype(self) -> str:
        """The format's name: safetensors has none for it."""
        return "MXFP4"

    @property
    def plain_dtype(self) -> str:
        """BF16, which holds every value exactly (but for exponents at the ends of its range)."""
        return "BF16"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """See LogicalTensor."""
        return (self.blocks, self.scales)

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """See LogicalTensor; elements are gathered across the stored rows, a band of groups at a time."""
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
        """Groups [group, group + groups) of one expert: [32 * groups, N] f32."""
        _, rows, all_groups, _ = self.blocks.shape
        if rows * all_groups * 17 <= self.KEPT_BYTES:
            codes, exponents = self._whole_expert(expert)
            codes = codes[:, group * 16 : (group + groups) * 16]
            exponents = exponents[:, group : group + groups]
        else:
            codes = self._read_columns(self.blocks, expert, rows, all_groups * 16, group * 16, groups * 16)
            exponents = self._read_columns(self.scales, expert, rows, all_groups, group, groups)
        values = np.empty((rows, groups, 16, 2), dtype=np.float32)
        by_group = codes.reshape(rows, groups, 16)
        values[..., 0] = FLOAT4_VALUES[by_group & 15]
        values[..., 1] = FLOAT4_VALUES[by_group >> 4]
        values *= float8_table("F8_E8M0")[exponents][:, :, None, None]
        return np.ascontiguousarray(values.reshape(rows, groups * 32).T)

    def _whole_expert(self, expert: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """The stored bytes of one expert; each thread keeps the last, as many chunks in a row need the same."""
        key = (self.blocks, expert)
        if getattr(_last_expert, "key", None) != key:
            _, rows, all_groups, _ = self.blocks.shape
            codes = self._read_columns(self.blocks, expert, rows, all_groups * 16, 0, all_groups * 16)
            exponents = self._read_columns(self.scales, expert, rows, all_groups, 0, all_groups)
            _last_expert.key, _last_expert.value = key, (codes, exponents)
        value: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]] = _last_expert.value
        return value

    def _read_columns(
        self, stored: StoredTensor, expert: int, rows: int, row_bytes: int, column: int, columns: int
    ) -> npt.NDArray[np.uint8]:
        """Columns of one expert's byte matrix [rows, row_bytes], read in runs of whole rows: [rows, columns]."""
        start = stored.offset + expert * rows * row_bytes
        result = np.empty((rows, columns), dtype=np.uint8)
        step = max(1, self.BAND_ELEMENTS // row_bytes)
        for row in range(0, rows, step):
            run = np.empty((min(step, rows - row), row_bytes), dtype=np.uint8)
            self.storage.read_into(stored.file, start + row * row_bytes, run.reshape(-1))
            result[row : row + len(run)] = run[:, column : column + columns]
        return result


@dataclass(frozen=True)
class EncodedTensor:
    """A weight of a master: codes and norms, decoded block by block. awq: the scales of its input channels."""

    storage: Storage
    name: str
    shape: tuple[int, ...]
    dtype: str
    codec: str
    bits: int
    rotation: str
    norm_exponent: int
    codebook: Codebook
    codes: StoredTensor
    norms: StoredTensor
    awq: StoredTensor | None = None

    @property
    def plain_dtype(self) -> str:
        """The dtype of the source's weights; BF16 where that was a packed format."""
        return self.dtype if self.dtype in ("BF16", "F16", "F32", "F64") else "BF16"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """See LogicalTensor."""
        return (self.codes, self.norms) if self.awq is None else (self.codes, self.norms, self.awq)

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """See LogicalTensor; whole blocks are decoded."""
        if self.awq is None and dtype in VALUE_DTYPES:
            self._decode(start, count, dtype, self.rotation, out)
            return
        decoded = out[: count * 4] if dtype == "F32" else scratch("decoded", count * 4)
        self._decode(start, count, "F32", self.rotation, decoded)
        if self.awq is not None:
            values = decoded.view(np.float32)
            rows = self.shape[-2]
            first, last = start // self.shape[-1] // rows, -(-(start + count) // (self.shape[-1] * rows))
            scales.divide(values, start - first * rows * self.shape[-1], self.shape, self.awq_scales(first, last))
            np.clip(values, *FINITE_RANGES.get(dtype, FINITE_RANGES["F32"]), out=values)
        if dtype != "F32":
            out[: count * item_bytes(dtype)] = convert(decoded, "F32", dtype)

    def awq_scales(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.float32]:
        """The scales of the matrices [first, last), of all by default; only where there are some."""
        assert self.awq is not None
        row = self.shape[-1] * 2
        count = self.awq.byte_count if last is None else (last - first) * row
        raw = np.empty(count, dtype=np.uint8)
        self.storage.read_into(self.awq.file, self.awq.offset + first * row, raw)
        return to_float32(raw, "F16")

    @property
    def in_hadamard_basis(self) -> bool:
        """Whether the codes are of H b alone: no signs of a rescue, no scales, no codec without a rotation."""
        return self.rotation == HADAMARD and self.awq is None

    def read_rotated(self, start: int, count: int, out: npt.NDArray[np.uint8]) -> None:
        """Elements as they are coded: in the basis of the codec's default rotation (H b / sqrt(128)), as float32.

        Only for a weight that is in it, see `in_hadamard_basis`.
        """
        assert self.in_hadamard_basis
        self._decode(start, count, "F32", None, out)

    def _decode(self, start: int, count: int, dtype: str, rotation: str | None, out: npt.NDArray[np.uint8]) -> None:
        first, last = start // BLOCK_SIZE, -(-(start + count) // BLOCK_SIZE)
        code_bytes = get_codec(self.codec).code_bytes_per_block(self.bits)
        codes = scratch("codes", (last - first) * code_bytes).reshape(-1, code_bytes)
        norms = scratch("norms", (last - first) * 2).view(np.uint16)
        self.storage.read_into(self.codes.file, self.codes.offset + first * code_bytes, codes.reshape(-1))
        self.storage.read_into(self.norms.file, self.norms.offset + first * 2, norms.view(np.uint8))
        size = item_bytes(dtype)
        skip = (start - first * BLOCK_SIZE) * size
        whole = (last - first) * BLOCK_SIZE * size
        in_place = skip == 0 and len(out) >= whole
        values = out[:whole] if in_place else np.empty(whole, dtype=np.uint8)
        get_codec(self.codec).decode(codes, norms, dtype, self.codebook, rotation, self.norm_exponent, values)
        if not in_place:
            out[: count * size] = values[skip : skip + count * size]


@dataclass(frozen=True)
class OriginalTensor:
    """A weight of a master with the values that the master was made from."""

    encoded: EncodedTensor
    original: LogicalTensor

    @property
    def name(self) -> str:
        """See LogicalTensor."""
        return self.encoded.name

    @property
    def shape(self) -> tuple[int, ...]:
        """See LogicalTensor."""
        return self.encoded.shape

    @property
    def dtype(self) -> str:
        """See LogicalTensor."""
        return self.encoded.dtype

    @property
    def plain_dtype(self) -> str:
        """See LogicalTensor."""
        return self.encoded.plain_dtype

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Those of the master: its checkpoint is the one that is rewritten."""
        return self.encoded.parts

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """See LogicalTensor."""
        self.original.read(start, count, dtype, out)
