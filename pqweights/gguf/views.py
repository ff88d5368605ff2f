"""Tensors of a GGUF file that differ from those of the checkpoint: rows reordered, gains with an offset, constants.

They are read in ranges from the checkpoint, like those in checkpoint/views.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import Segment
from pqweights.common.dtypes import convert, item_bytes
from pqweights.kernels.workers import scratch


@dataclass(frozen=True, eq=False, kw_only=True)
class RenamedTensor:
    """A tensor of the checkpoint under another name; its fields are those of LogicalTensor and View."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    plain_dtype: str
    source: LogicalTensor

    transposed = False

    @property
    def sources(self) -> tuple[LogicalTensor, ...]:
        """The source alone."""
        return (self.source,)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors of the source."""
        return self.source.parts

    def runs_of_matrix(self, number: int) -> list[Segment] | None:
        """Return the rows of the source that one of its matrices is made of, in whatever order; see View."""
        height = self.shape[-2]
        return [Segment(tensor=self.source, first=number * height, step=1, count=height)]

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the source."""
        self.source.read(start, count, dtype, out)


def renamed(name: str, source: LogicalTensor) -> RenamedTensor:
    """Return a tensor under another name."""
    return RenamedTensor(
        name=name, shape=source.shape, dtype=source.dtype, plain_dtype=source.plain_dtype, source=source
    )


def flat(name: str, source: LogicalTensor) -> RenamedTensor:
    """Return a matrix of one row as a vector."""
    return replace(renamed(name, source), shape=source.shape[-1:])


def interleaved(name: str, source: LogicalTensor, *, head_rows: int) -> InterleavedTensor:
    """Return the rotated rows of heads in llama.cpp's order. head_rows: the rows of a head"""
    return InterleavedTensor(**vars(renamed(name, source)), head_rows=head_rows)


def with_offset(name: str, source: LogicalTensor, offset: float) -> OffsetTensor:
    """Return a tensor with a number added to all its values, as float32: as exact as the model's own sum."""
    fields = {**vars(renamed(name, source)), "dtype": "F32", "plain_dtype": "F32"}
    return OffsetTensor(**fields, offset=offset)


@dataclass(frozen=True, eq=False, kw_only=True)
class InterleavedTensor(RenamedTensor):
    """A matrix or a bias whose rows are those of heads, with the rows of the two halves of each head alternating.

    transformers rotates channel i of a head with channel i + size / 2; llama.cpp, for some models, 2 i with 2 i + 1.
    Rows of both halves are read together, so that each block of an encoded weight is decoded about once.

    head_rows: the rows of a head
    """

    head_rows: int

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read the rows that hold the elements."""
        width = self.shape[1] if len(self.shape) > 1 else 1
        size = item_bytes(dtype)
        # Rows are written in pairs, one of each half.
        pair = 2 * width
        first, last = start // pair, -(-(start + count) // pair)
        skip = start - first * pair
        whole = skip == 0 and count == (last - first) * pair
        raw = out[: count * size] if whole else np.empty((last - first) * pair * size, dtype=np.uint8)
        rows = raw.reshape(last - first, 2, width * size)
        done = 0
        while done < last - first:
            done += self._read_pairs(first + done, dtype, rows[done:])
        if not whole:
            out[: count * size] = raw[skip * size : (skip + count) * size]

    def _read_pairs(self, pair: int, dtype: str, into: npt.NDArray[np.uint8]) -> int:
        """Read whole heads, or a part of one, from a pair on, into [pairs, 2, bytes]; return how many pairs."""
        half = self.head_rows // 2
        head, within = divmod(pair, half)
        heads = 0 if within else len(into) // half
        width = into.shape[-1] // item_bytes(dtype)
        if heads:
            raw = scratch("heads", heads * self.head_rows * into.shape[-1])
            self.source.read(head * self.head_rows * width, heads * self.head_rows * width, dtype, raw)
            moved = raw.reshape(heads, 2, half, -1).swapaxes(1, 2)
            into[: heads * half].reshape(heads, half, 2, -1)[:] = moved
            return heads * half
        pairs = min(half - within, len(into))
        raw = scratch("heads", pairs * into.shape[-1])
        for side in range(2):
            row = head * self.head_rows + side * half + within
            self.source.read(row * width, pairs * width, dtype, raw)
            into[:pairs, side] = raw.reshape(pairs, -1)
        return pairs


@dataclass(frozen=True, eq=False, kw_only=True)
class OffsetTensor(RenamedTensor):
    """A tensor with a number added to all its values, in float32."""

    offset: float

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the source, and add the number."""
        raw = np.empty(count * 4, dtype=np.uint8)
        self.source.read(start, count, "F32", raw)
        values = raw.view(np.float32)
        values += np.float32(self.offset)
        out[: count * item_bytes(dtype)] = raw if dtype == "F32" else convert(raw, "F32", dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class ConstantTensor:
    """A small tensor that is computed from the configuration: no part of it is stored in the checkpoint.

    values: [...] f32
    """

    name: str
    shape: tuple[int, ...]
    values: npt.NDArray[np.float32]

    dtype = plain_dtype = "F32"
    sources: tuple[LogicalTensor, ...] = ()
    parts: tuple[StoredTensor, ...] = ()
    transposed = False

    def runs_of_matrix(self, number: int) -> None:
        """Return nothing: no weight is a part of it."""
        return

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Copy elements."""
        raw = self.values.reshape(-1)[start : start + count].copy().view(np.uint8)
        out[: count * item_bytes(dtype)] = raw if dtype == "F32" else convert(raw, "F32", dtype)
