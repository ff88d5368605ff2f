"""Logical tensors: a name, a shape, and values that can be read from any element on, however they are stored.

Everything above this package sees only `LogicalTensor`; FP8 with scales, MXFP4 and our own codes are decoded behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint import scales
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import Storage
from pqweights.codecs.protocol import VALUE_DTYPES, Basis, Coder, State
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
from pqweights.kernels.workers import scratch, worker


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

        def read() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
            _, rows, all_groups, _ = self.blocks.shape
            codes = self._read_columns(self.blocks, expert, rows, all_groups * 16, 0, all_groups * 16)
            exponents = self._read_columns(self.scales, expert, rows, all_groups, 0, all_groups)
            return codes, exponents

        return worker().kept("expert", (self.blocks, expert), read)

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


@dataclass(frozen=True, kw_only=True)
class EncodedTensor:
    """A weight of a master, decoded block by block.

    encoded: the stored tensors of the coder's parts. awq: the scales of the input channels, where they were scaled.
    """

    storage: Storage
    name: str
    shape: tuple[int, ...]
    dtype: str
    coder: Coder
    state: State
    encoded: tuple[StoredTensor, ...]
    awq: StoredTensor | None = None

    @property
    def plain_dtype(self) -> str:
        """The dtype of the source's weights; BF16 where that was a packed format."""
        return self.dtype if self.dtype in ("BF16", "F16", "F32", "F64") else "BF16"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """See LogicalTensor."""
        return self.encoded if self.awq is None else (*self.encoded, self.awq)

    @property
    def bases(self) -> frozenset[Basis]:
        """The bases in which `read_in` can give the weight; scales of input channels leave only its own."""
        return frozenset([Basis.PLAIN]) if self.awq is not None else self.coder.bases(self.state)

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """See LogicalTensor; whole blocks are decoded."""
        if self.awq is None and dtype in VALUE_DTYPES:
            self._decode(start, count, dtype, out)
            return
        decoded = out[: count * 4] if dtype == "F32" else scratch("decoded", count * 4)
        self._decode(start, count, "F32", decoded)
        if self.awq is not None:
            values = decoded.view(np.float32)
            rows = self.shape[-2]
            first, last = start // self.shape[-1] // rows, -(-(start + count) // (self.shape[-1] * rows))
            scales.divide(values, start - first * rows * self.shape[-1], self.shape, self.awq_scales(first, last))
            np.clip(values, *FINITE_RANGES.get(dtype, FINITE_RANGES["F32"]), out=values)
        if dtype != "F32":
            out[: count * item_bytes(dtype)] = convert(decoded, "F32", dtype)

    def read_in(self, basis: Basis, start: int, count: int, out: npt.NDArray[np.uint8]) -> None:
        """Elements in one of `bases`, as float32."""
        assert basis in self.bases
        self._decode(start, count, "F32", out, basis)

    def awq_scales(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.float32]:
        """The scales of the matrices [first, last), of all by default; only where there are some."""
        assert self.awq is not None
        row = self.shape[-1] * 2
        count = self.awq.byte_count if last is None else (last - first) * row
        raw = np.empty(count, dtype=np.uint8)
        self.storage.read_into(self.awq.file, self.awq.offset + first * row, raw)
        return to_float32(raw, "F16")

    def read_parts(self, first: int, last: int, into: Sequence[npt.NDArray[np.uint8]]) -> None:
        """The bytes of blocks [first, last) of each part, into arrays [blocks, bytes per block]."""
        for part, stored, array in zip(self.coder.parts, self.encoded, into, strict=True):
            self.storage.read_into(stored.file, stored.offset + first * part.bytes_per_block, array.reshape(-1))

    def _decode(
        self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8], basis: Basis = Basis.PLAIN
    ) -> None:
        block_size = self.coder.block_size
        first, last = start // block_size, -(-(start + count) // block_size)
        parts = [
            scratch(f"part {place}", (last - first) * part.bytes_per_block).reshape(-1, part.bytes_per_block)
            for place, part in enumerate(self.coder.parts)
        ]
        self.read_parts(first, last, parts)
        size = item_bytes(dtype)
        skip = (start - first * block_size) * size
        whole = (last - first) * block_size * size
        in_place = skip == 0 and len(out) >= whole
        values = out[:whole] if in_place else np.empty(whole, dtype=np.uint8)
        self.coder.decode(parts, self.state, dtype, values, basis)
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
