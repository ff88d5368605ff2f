"""Rows of a matrix as they are encoded: decoded when they are used, in chunks that the threads of the CPU share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import ColumnTensor, divide_scales
from pqweights.formats.lloyd_max import LloydMax
from pqweights.formats.master import BlockFormat, Bytes, DamagedBlock
from pqweights.formats.weight import block_count, damaged_error
from pqweights.kernels import BLOCK_SIZE, BlockCoding
from pqweights.kernels.openmp import map_in_threads
from pqweights.kernels.reference import TORCH_DTYPES
from pqweights.kernels.workers import scratch

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# How many weights a thread decodes before it multiplies them: few enough for the cache of its core.
CHUNK_WEIGHTS = 1 << 20
# The same on other devices, where a call costs more and memory is faster.
DEVICE_CHUNK_WEIGHTS = 1 << 24


@dataclass
class Factor:
    """The power of two by which decoded weights are multiplied; views of a weight share it, as they share a storage."""

    value: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedRows:
    """Rows of one matrix that were encoded in the same way.

    place: file and name of the weight that they belong to, for messages
    weights: how many elements that weight has
    rows, columns: how many there are
    format: how they are stored, sized for the whole weight
    parts: the parts of the format over the flattened rows, [blocks, bytes per block] u8 each
    offset: how many weights of the first block come before the first row
    first_block: the number of the first block in the weight; None if the blocks do not lie together there
    awq: the scales of the columns, [columns] f32; None if they are not scaled
    factor: what the rows were multiplied by since they were loaded
    """

    place: str
    weights: int
    rows: int
    columns: int
    format: BlockFormat
    parts: tuple[Tensor, ...]
    offset: int
    first_block: int | None
    awq: Tensor | None
    factor: Factor

    @torch.inference_mode()  # set for each thread: ours may write to tensors that the caller made in this mode
    def decode(self, start: int, stop: int, out: Tensor) -> None:
        """Decode rows [start, stop) into a contiguous tensor [stop - start, columns] on the same device.

        Raises MasterError if a block cannot be decoded.
        """
        block_size, begin = self.format.block_size, self.offset + start * self.columns
        first, last = begin // block_size, block_count(self.offset + stop * self.columns, block_size)
        skip, count = begin - first * block_size, (stop - start) * self.columns
        here = slice(skip, skip + count)
        try:
            if out.device.type == "cpu":
                self._decode_numpy(start, range(first, last), here=here, out=out.view(-1))
            else:
                self._decode_torch(range(first, last), here=here, out=out.view(-1))
        except DamagedBlock as damage:
            before = None if self.first_block is None else self.first_block + first
            raise damaged_error(self.place, damage, first=before) from None
        if self.factor.value != 1:
            out.mul_(self.factor.value)

    def _decode_numpy(self, row: int, blocks: range, *, here: slice, out: Tensor) -> None:
        """Decode blocks on the CPU, straight into `out` if they fill it and formats have its dtype.

        row: the row in which the first block begins
        here: the part of the blocks that belongs in `out`
        """
        whole = len(blocks) * self.format.block_size
        direct = self.awq is None and out.dtype in NAMES
        name = NAMES[out.dtype] if direct else "F32"
        in_place = direct and whole == len(out)
        values = out.view(torch.uint8).numpy() if in_place else scratch("packed", whole * TORCH_DTYPES[name].itemsize)
        parts = [part[blocks.start : blocks.stop].numpy() for part in self.parts]
        self.format.decode(parts, values, dtype=name)
        if in_place:
            return
        decoded = torch.from_numpy(values).view(TORCH_DTYPES[name])[here]
        if self.awq is not None:
            shape = (self.rows, self.columns)
            divide_scales(decoded.numpy(), self.awq.numpy(), start=row * self.columns, shape=shape)
        out.copy_(_saturated(decoded, out.dtype))

    def _decode_torch(self, blocks: range, *, here: slice, out: Tensor) -> None:
        """Decode blocks on another device; `here` is the part of them that belongs in `out`."""
        parts = [part[blocks.start : blocks.stop] for part in self.parts]
        decoded = self.format.decode_torch(parts).reshape(-1)[here]
        if self.awq is not None:
            decoded = (decoded.view(-1, self.columns) / self.awq).view(-1)
        out.copy_(_saturated(decoded, out.dtype))

    def selected(self, rows: Tensor) -> PackedRows | None:
        """Return the rows with these numbers; None if a block may hold parts of two rows."""
        if self.columns % self.format.block_size:
            return None
        parts = tuple(part.view(self.rows, -1).index_select(0, rows).view(-1, part.shape[1]) for part in self.parts)
        return replace(self, rows=len(rows), parts=parts, first_block=None)

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return self.parts[0].device

    @property
    def unit(self) -> int:
        """How many weights are decoded together."""
        return self.format.block_size

    @property
    def rows_of_whole_blocks(self) -> int:
        """The smallest number of rows that whole blocks fill."""
        return self.format.block_size // math.gcd(self.columns, self.format.block_size)

    def copied(self, device: torch.device) -> PackedRows:
        """Return the rows on a device, with a factor of their own; codes are shared where the device is the same."""
        awq = None if self.awq is None else self.awq.to(device)
        parts = tuple(part.to(device) for part in self.parts)
        return replace(self, parts=parts, awq=awq, factor=replace(self.factor))

    @property
    def coding(self) -> BlockCoding | None:
        """How blocks were coded, for products with the codes; None if a row is not so many blocks of a scalar codec."""
        if isinstance(self.format, LloydMax) and self.columns % BLOCK_SIZE == 0 and self.offset == 0:
            return self.format.coding
        return None

    @property
    def byte_count(self) -> int:
        """The size of parts and scales, in bytes; blocks that hold parts of two matrices of a stack count for both."""
        return sum(t.numel() * t.element_size() for t in (*self.parts, self.awq) if t is not None)


@dataclass(frozen=True, kw_only=True)
class MappedColumns(ColumnTensor):
    """A weight of columns whose stored tensors lie in memory. mapped: the bytes of each, u8, by name"""

    storage: Any = None
    mapped: dict[str, Tensor]

    def _read_items(self, stored: StoredTensor, first: int, out: Bytes) -> Bytes:
        return self.mapped[stored.name][first : first + len(out)].numpy()


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedColumns:
    """All rows of a matrix of hadamard-trellis-columns as the model has it; see PackedRows.

    tensor: the weight; its codes stay in the memory of the CPU, which decodes them
    matrix: the number in a stack
    device: where decoded rows are used
    factor: what the rows were multiplied by since they were loaded
    """

    tensor: MappedColumns
    matrix: int
    device: torch.device
    factor: Factor

    @staticmethod
    def of(tensor: ColumnTensor) -> list[PackedColumns]:
        """Map the matrices of a weight into memory as they are stored.

        Raises MasterError for lengths that no encoder writes.
        """
        names = [stored.name for stored in tensor.encoded]
        parts = [torch.from_numpy(part) for part in tensor.mapped_parts()]
        about = {name: getattr(tensor, name) for name in ("name", "shape", "dtype", "format", "encoded")}
        mapped = MappedColumns(**about, mapped=dict(zip(names, parts, strict=True)))
        assert mapped.ends is not None  # which are checked
        numbers, cpu = range(math.prod(mapped.cut.stack)), torch.device("cpu")
        return [PackedColumns(tensor=mapped, matrix=number, device=cpu, factor=Factor()) for number in numbers]

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.tensor.shape[-2]

    @property
    def columns(self) -> int:
        """How many there are."""
        return self.tensor.shape[-1]

    @property
    def unit(self) -> int:
        """How many weights are decoded together."""
        return self.tensor.unit

    @property
    def rows_of_whole_blocks(self) -> int:
        """How many rows are decoded together."""
        return self.tensor.unit_rows

    @property
    def byte_count(self) -> int:
        """The size of what is stored, in bytes."""
        cut, ends = self.tensor.cut, self.tensor.ends
        count = cut.strips * cut.superblocks
        return int(ends[(self.matrix + 1) * count] - ends[self.matrix * count]) + 4 * count + cut.rows + cut.columns

    @torch.inference_mode()
    def decode(self, start: int, stop: int, out: Tensor) -> None:
        """Decode rows [start, stop) into a contiguous tensor. Raises MasterError if they cannot be decoded."""
        begin, count = (self.matrix * self.rows + start) * self.columns, (stop - start) * self.columns
        if out.device.type == "cpu" and out.dtype in NAMES:
            self.tensor.read(begin, count, NAMES[out.dtype], out.view(-1).view(torch.uint8).numpy())
        else:
            decoded = scratch("packed", count * 4)
            self.tensor.read(begin, count, "F32", decoded)
            values = torch.from_numpy(decoded).view(torch.float32).view(out.shape)
            out.copy_(_saturated(values, out.dtype))
        if self.factor.value != 1:
            out.mul_(self.factor.value)

    def selected(self, rows: Tensor) -> None:
        """Return nothing: a strip holds parts of many rows."""

    def copied(self, device: torch.device) -> PackedColumns:
        """Return the rows for a device, with a factor of their own."""
        return replace(self, device=device, factor=replace(self.factor))


Rows = PackedRows | PackedColumns


def _saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp float32 to the range of a narrower dtype."""
    limit = torch.finfo(dtype).max
    return values if dtype.itemsize >= 4 else values.clamp(-limit, limit)


Matrix = tuple[Rows, ...]  # the rows of a matrix, from the top


def decode_rows(matrix: Matrix, start: int, stop: int, *, out: Tensor) -> None:
    """Decode rows [start, stop) of a matrix into [stop - start, columns]."""
    above = 0
    for piece in matrix:
        first, last = max(start - above, 0), min(stop - above, piece.rows)
        if first < last:
            piece.decode(first, last, out[first + above - start : last + above - start])
        above += piece.rows


def look_up(matrix: Matrix, rows: Tensor, *, out: Tensor) -> None:
    """Decode the rows with these numbers into [rows, columns], those whose blocks they share together."""
    distinct, inverse = torch.unique(rows, sorted=True, return_inverse=True)
    numbers, columns, unit = distinct.tolist(), out.shape[1], matrix[0].unit
    decoded, begin = out.new_empty(len(numbers), columns), 0
    while begin < len(numbers):
        first, end = numbers[begin], begin + 1
        while end < len(numbers) and (numbers[end] - first) * columns < CHUNK_WEIGHTS:
            if numbers[end] * columns // unit > ((numbers[end - 1] + 1) * columns - 1) // unit:
                break
            end += 1
        chunk = buffer(out.dtype, out.device, (numbers[end - 1] + 1 - first) * columns).view(-1, columns)
        decode_rows(matrix, first, numbers[end - 1] + 1, out=chunk)
        decoded[begin:end] = chunk[distinct[begin:end] - first]
        begin = end
    out.copy_(decoded[inverse])


def share(work: Callable[[int, int], None], matrix: Matrix, *, device: torch.device, rows: int | None = None) -> None:
    """Call work(start, stop) for runs that cover the rows: on the CPU in several threads, in runs that fit a cache.

    rows: how many there are; by default those of the matrix

    Where few rows are whole blocks, no block lies in two runs.
    """
    rows, first = sum(piece.rows for piece in matrix) if rows is None else rows, matrix[0]
    step = max(1, (CHUNK_WEIGHTS if device.type == "cpu" else DEVICE_CHUNK_WEIGHTS) // first.columns)
    whole = first.rows_of_whole_blocks
    if step > whole or whole <= BLOCK_SIZE or isinstance(first, PackedColumns):
        step = max(1, step // whole) * whole
    starts = range(0, rows, step)
    if device.type != "cpu" or len(starts) == 1:
        for start in starts:
            work(start, min(rows, start + step))
    else:
        threads = min(torch.get_num_threads(), len(starts))
        map_in_threads(lambda start: work(start, min(rows, start + step)), starts, threads)


def buffer(dtype: torch.dtype, device: torch.device, count: int) -> Tensor:
    """Return memory of the calling thread, contents undefined, valid until it asks again."""
    if device.type != "cpu":  # torch itself reuses the memory of other devices
        return torch.empty(count, dtype=dtype, device=device)
    return torch.from_numpy(scratch("packed rows", count * dtype.itemsize)).view(dtype)
