"""How tensors of a GGUF file are read from a checkpoint: renamed, reordered, shifted, multiplied, or constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf.mixes import INTEGERS
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import MovedTensor, ReadTogether, Rows, View, sources_of
from pqweights.common.dtypes import convert, item_bytes
from pqweights.kernels.workers import scratch

IN_FLOAT32 = {"dtype": "F32", "plain_dtype": "F32"}
WHOLE_NUMBERS = {"I64": np.int64, INTEGERS: np.int32}


@dataclass(frozen=True, eq=False, kw_only=True)
class RenamedTensor:
    """A tensor of the checkpoint under another name; its fields are those of LogicalTensor and View."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    plain_dtype: str
    source: LogicalTensor

    transposed = False

    @classmethod
    def of(cls, name: str, source: LogicalTensor, **fields: Any) -> Self:
        """Return a tensor under another name. fields: those that are not the source's"""
        same = {"shape": source.shape, "dtype": source.dtype, "plain_dtype": source.plain_dtype}
        return cls(name=name, source=source, **same | fields)

    @property
    def sources(self) -> tuple[LogicalTensor, ...]:
        """The source alone, or what it is made of."""
        return sources_of(self.source) or (self.source,)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors of the source."""
        return self.source.parts

    def runs_of_matrix(self, number: int) -> list[Rows] | None:
        """Return the rows of the source that one of its matrices is made of, in whatever order; see View."""
        if isinstance(self.source, View):
            return self.source.runs_of_matrix(number)
        height = self.shape[-2]
        return [(self.source, range(number * height, (number + 1) * height))]

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the source."""
        self.source.read(start, count, dtype, out)


def reading_of(tensor: LogicalTensor) -> object:
    """Return what tensors have in common of which the same elements are read in the same way."""
    if type(tensor) is RenamedTensor:
        return reading_of(tensor.source)
    if isinstance(tensor, ReadTogether):
        return reading_of(tensor.tensor)
    if isinstance(tensor, MovedTensor):
        rows = tuple((reading_of(of), held) for of, held in tensor.segments)
        return rows, tensor.columns, tensor.shape, tensor.transposed
    return id(tensor)


@dataclass(frozen=True, eq=False, kw_only=True)
class SourceTensor(RenamedTensor):
    """A tensor of a source in GGUF, under the name of transformers.

    What is made of it knows it by that name, not by those of llama.cpp: roles, weights, rules and inputs go by it.
    """

    @property
    def sources(self) -> tuple[LogicalTensor, ...]:
        """Nothing: it is a tensor of the checkpoint."""
        return ()

    def runs_of_matrix(self, number: int) -> list[Rows] | None:
        """Return its own rows; see View."""
        height = self.shape[-2]
        return [(self, range(number * height, (number + 1) * height))]


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


# Computes values in place, which are the elements of a tensor from a place on.
Computation = Callable[[npt.NDArray[np.float32], int], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class ComputedTensor(RenamedTensor):
    """A tensor of values that are computed from those of the source, in float32.

    compute: what computes them
    undo: what computes the source's from them
    """

    compute: Computation
    undo: Computation

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the source, and compute those of this tensor."""
        raw = np.empty(count * 4, dtype=np.uint8)
        self.source.read(start, count, "F32", raw)
        with np.errstate(all="ignore"):  # numbers that are none are refused where they are encoded
            self.compute(raw.view(np.float32), start)
        out[: count * item_bytes(dtype)] = raw if dtype == "F32" else convert(raw, "F32", dtype)


def one_added(name: str, source: LogicalTensor) -> ComputedTensor:
    """Return a tensor with 1 added to all its values, in float32."""
    return ComputedTensor.of(name, source, **IN_FLOAT32, compute=partial(_add, 1.0), undo=partial(_add, -1.0))


def _add(number: float, values: npt.NDArray[np.float32], start: int) -> None:
    values += np.float32(number)


def rows_scaled(name: str, source: LogicalTensor, factors: npt.NDArray[np.float32]) -> ComputedTensor:
    """Return a matrix with each row multiplied by a number. factors: [rows] f32"""
    width = source.shape[-1]
    undo = partial(_scale_rows, np.float32(1) / factors, width)
    return ComputedTensor.of(name, source, compute=partial(_scale_rows, factors, width), undo=undo)


def _scale_rows(factors: npt.NDArray[np.float32], width: int, values: npt.NDArray[np.float32], start: int) -> None:
    values *= factors[np.arange(start, start + len(values)) // width]


def decay_rates(name: str, source: LogicalTensor) -> ComputedTensor:
    """Return the rates of decay of a state space model, -exp(A), of which the checkpoint holds A."""
    return ComputedTensor.of(name, source, **IN_FLOAT32, compute=_rates, undo=_logarithms)


def _rates(values: npt.NDArray[np.float32], start: int) -> None:
    values[:] = -np.exp(values)


def _logarithms(values: npt.NDArray[np.float32], start: int) -> None:
    values[:] = np.log(-values)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReorderedTensor(RenamedTensor):
    """A tensor with its columns in another order, or some of them. order: which column of the source each one is"""

    order: npt.NDArray[np.int64]

    def runs_of_matrix(self, number: int) -> None:
        """Return nothing: it has no whole rows of the source."""
        return

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read the rows that hold the elements."""
        size, width = item_bytes(dtype), len(self.order)
        first, last = start // width, -(-(start + count) // width)
        raw = np.empty((last - first, self.source.shape[-1], size), dtype=np.uint8)
        self.source.read(first * self.source.shape[-1], raw.size // size, dtype, raw.reshape(-1))
        skip = start - first * width
        out[: count * size] = raw[:, self.order].reshape(-1)[skip * size : (skip + count) * size]


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedTensor(RenamedTensor):
    """A matrix with rows of zeros behind its own."""

    def runs_of_matrix(self, number: int) -> None:
        """Return nothing: some of its rows are not rows of the source."""
        return

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read what the source has of the elements."""
        size, there = item_bytes(dtype), max(0, min(count, math.prod(self.source.shape) - start))
        self.source.read(start, there, dtype, out)
        out[there * size : count * size] = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class NumbersTensor(RenamedTensor):
    """A tensor of whole numbers far below 2^31: what the checkpoint holds in 64 bits, in 32, or the other way round."""

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the source."""
        raw = np.empty(count * item_bytes(self.source.dtype), dtype=np.uint8)
        self.source.read(start, count, self.source.dtype, raw)
        numbers = raw.view(WHOLE_NUMBERS[self.source.dtype]).astype(WHOLE_NUMBERS[dtype])
        out[: count * item_bytes(dtype)] = numbers.view(np.uint8)


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
