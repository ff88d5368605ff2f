"""Tensors that are put together from rows of others: a stack of experts, a part of a fused weight, a transposed matrix.

So a tensor that a runtime holds in another shape than the checkpoint can be read from the checkpoint in place, in
ranges.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import LogicalTensor, whole_blocks
from pqweights.common.dtypes import convert, item_bytes

# Matrices of at most this many bytes are kept while parts of them are transposed, and of all together twice as many:
# many chunks in a row need the same one. Threads share them.
KEPT_BYTES = 1 << 26
_kept: list[tuple[tuple[weakref.ref[MovedTensor], int, str], npt.NDArray[np.uint8]]] = []
_making = threading.RLock()  # a matrix may be made of one that is transposed, too
# How many elements are read at once from rows of which only some columns are used.
READ_ELEMENTS = 1 << 20


# Some rows of a tensor; a row runs along the last dimension.
Rows = tuple[LogicalTensor, range]


@runtime_checkable
class View(Protocol):
    """A tensor that is made of others."""

    @property
    def sources(self) -> tuple[LogicalTensor, ...]:
        """The tensors that it is made of, each once."""
        ...

    @property
    def transposed(self) -> bool:
        """Whether its matrices are transposed ones of the sources."""
        ...

    def runs_of_matrix(self, number: int) -> list[Rows] | None:
        """Return the rows of the sources that one of its matrices is made of; None if they are not whole rows."""
        ...


def sources_of(tensor: LogicalTensor) -> tuple[LogicalTensor, ...]:
    """Return the sources of a view; nothing for another tensor.

    To ask for the attribute takes a hundredth of the time of `isinstance`, which plans of many experts would notice.
    """
    sources: tuple[LogicalTensor, ...] = getattr(tensor, "sources", ())
    return sources


def made_of(tensor: LogicalTensor) -> tuple[LogicalTensor, ...]:
    """Return the tensors whose values a tensor moves or is computed from; nothing for one that is stored."""
    return tensor.made_of if isinstance(tensor, EvaluatedTensor) else sources_of(tensor)


@dataclass(frozen=True, eq=False, kw_only=True)
class MovedTensor:
    """A tensor that only moves values of others.

    name, shape: those of the tensor
    dtype: the dtype in which it is stored plainly
    segments: the rows that it holds
    columns: which columns of those rows
    transposed: whether it is [..., len(columns), R], and each of its matrices is the transpose of R rows
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    segments: tuple[Rows, ...]
    columns: range
    transposed: bool

    @classmethod
    def of(
        cls,
        name: str,
        shape: tuple[int, ...],
        segments: Iterable[Rows],
        *,
        columns: range | None = None,
        transposed: bool = False,
    ) -> Self:
        """Return a tensor of rows of others, in the dtype of the first. columns: by default all of a row of `shape`"""
        held = tuple(segments)
        return cls(
            name=name,
            shape=shape,
            dtype=held[0][0].plain_dtype,
            segments=held,
            columns=range(shape[-1]) if columns is None else columns,
            transposed=transposed,
        )

    @property
    def plain_dtype(self) -> str:
        """The dtype in which it is stored plainly."""
        return self.dtype

    @cached_property
    def sources(self) -> tuple[LogicalTensor, ...]:
        """The tensors that it is made of, each once."""
        return tuple({tensor.name: tensor for tensor, _ in self.segments}.values())

    @cached_property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors of all its sources."""
        return tuple(part for tensor in self.sources for part in tensor.parts)

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(len(rows) for _, rows in self.segments))

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read the rows that hold the elements, straight into `out` if they lie together."""
        if count == 0:
            return
        size, width = item_bytes(dtype), self.shape[-1] if self.shape else 1
        whole = not start % width and not count % width
        if whole and not self.transposed and self._read_whole(start // width, count // width, dtype, out):
            return
        first, last = start // width, -(-(start + count) // width)
        rows = (
            self._transposed_rows(first, last - first, dtype)
            if self.transposed
            else self._rows(first, last - first, dtype)
        )
        skip = start - first * width
        out[: count * size] = rows.reshape(-1)[skip * size : (skip + count) * size]

    def _read_whole(self, row: int, rows: int, dtype: str, out: npt.NDArray[np.uint8]) -> bool:
        """Read whole rows straight into `out` if they lie together in one tensor; return whether they do."""
        runs = list(self._runs(row, rows))
        tensor, held = runs[0]
        if len(runs) != 1 or held.step != 1 or not self._all_columns(tensor):
            return False
        width = len(self.columns)
        tensor.read(held.start * width, rows * width, dtype, out)
        return True

    def _all_columns(self, tensor: LogicalTensor) -> bool:
        return self.columns == range(tensor.shape[-1] if tensor.shape else 1)

    def runs_of_matrix(self, number: int) -> list[Rows] | None:
        """Return the rows of the sources that one of its matrices is made of.

        None if it holds only a part of each of them, or, transposed, if they are not one whole matrix.
        """
        height, width = self.shape[-2:]
        if not self.transposed:
            runs = list(self._runs(number * height, height))
            return runs if all(self._all_columns(tensor) for tensor, _ in runs) else None
        runs = list(self._runs(number * width, width))
        tensor, rows = runs[0]
        is_whole = len(runs) == 1 and rows.step == 1 and rows.start % width == 0 and tensor.shape[-2] == width
        return runs if is_whole else None

    def _runs(self, row: int, rows: int) -> Iterator[Rows]:
        """Yield the rows of the sources that are the rows [row, row + rows)."""
        index = bisect.bisect_right(self._ends, row)
        while rows:
            tensor, held = self.segments[index]
            skip = row - (self._ends[index] - len(held))
            run = held[skip : skip + rows]
            yield tensor, run
            row, rows, index = row + len(run), rows - len(run), index + 1

    def _rows(self, row: int, rows: int, dtype: str, *, columns: range | None = None) -> npt.NDArray[np.uint8]:
        """Read the columns of rows of the segments: [rows, bytes]."""
        columns = self.columns if columns is None else columns
        result = np.empty((rows, len(columns), item_bytes(dtype)), dtype=np.uint8)
        done = 0
        for tensor, run in self._runs(row, rows):
            into = result[done : done + len(run)]
            low, high = min(columns[0], columns[-1]), max(columns[0], columns[-1]) + 1
            width = tensor.shape[-1]
            # Where blocks are larger than rows, each row alone would decode most of what the next one needs.
            if (run.step == 1 and 2 * (high - low) > width) or 0 < run.step * width < whole_blocks(tensor, 1):
                _read_together(tensor, run, columns, dtype=dtype, into=into)
            else:
                _read_one_by_one(tensor, run, columns, dtype=dtype, into=into)
            done += len(run)
        return result.reshape(rows, -1)

    def _transposed_rows(self, row: int, rows: int, dtype: str) -> npt.NDArray[np.uint8]:
        """Read rows of the transposed matrices, which are numbered consecutively: [rows, bytes]."""
        size, width, height = item_bytes(dtype), self.shape[-1], len(self.columns)
        result = np.empty((rows, width, size), dtype=np.uint8)
        done = 0
        while done < rows:
            matrix, first = divmod(row + done, height)
            count = min(rows - done, height - first)
            if width * height * size <= KEPT_BYTES:
                strip = self._matrix(matrix, dtype).reshape(width, height, size)[:, first : first + count]
            else:
                columns = self.columns[first : first + count]
                strip = self._rows(matrix * width, width, dtype, columns=columns).reshape(width, count, size)
            result[done : done + count] = strip.transpose(1, 0, 2)
            done += count
        return result.reshape(rows, -1)

    def _matrix(self, matrix: int, dtype: str) -> npt.NDArray[np.uint8]:
        """Return one matrix before it is transposed, read by one thread at a time if it is not kept."""
        key, width = (weakref.ref(self, _forget), matrix, dtype), self.shape[-1]
        with _making:
            if (kept := next((of for known, of in _kept if known == key), None)) is not None:
                return kept
            made = self._rows(matrix * width, width, dtype)
            _kept.append((key, made))
            while sum(of.nbytes for _, of in _kept) > 2 * KEPT_BYTES:
                del _kept[:1]
            return made


def transposed_matrices(name: str, tensor: LogicalTensor) -> MovedTensor:
    """Return a tensor with its matrices transposed."""
    *stack, rows, columns = tensor.shape
    segments = [(tensor, range(math.prod(stack) * rows))]
    return MovedTensor.of(name, (*stack, columns, rows), segments, columns=range(columns), transposed=True)


def _forget(tensor: weakref.ref[MovedTensor]) -> None:
    """Let go of a matrix of a tensor that is no longer used.

    It may be called in the middle of anything, so it does not lock: what a thread adds meanwhile may be lost.
    """
    _kept[:] = [(key, matrix) for key, matrix in _kept if key[0] is not tensor]


class Values:
    """Tensors that are computed all at once, when the first is read; another process gets them computed."""

    def __init__(self, compute: Callable[[], dict[str, npt.NDArray[np.uint8]]]) -> None:
        """Know what computes the bytes of all of them, by name, each in its dtype."""
        self._compute, self._lock = compute, threading.Lock()

    def __reduce__(self) -> tuple[type[Values], tuple[Callable[[], dict[str, npt.NDArray[np.uint8]]]]]:
        return Values, (partial(dict, self._raw),)

    @cached_property
    def _raw(self) -> dict[str, npt.NDArray[np.uint8]]:
        return self._compute()

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor."""
        with self._lock:
            return self._raw[name]


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluatedTensor:
    """A tensor of values that are computed from those of others, such as a norm's weight plus one.

    Nothing is known of how; so it is no view, and `sources_of` returns nothing.

    made_of: the tensors that it is computed from
    values: has its values
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    made_of: tuple[LogicalTensor, ...]
    values: Values

    @property
    def plain_dtype(self) -> str:
        """The dtype in which it is computed."""
        return self.dtype

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors of all that it is computed from."""
        return tuple(part for tensor in sorted(self.made_of, key=lambda of: of.name) for part in tensor.parts)

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Copy elements."""
        size = item_bytes(self.dtype)
        raw = self.values.raw(self.name)[start * size : (start + count) * size]
        out[: count * item_bytes(dtype)] = raw if dtype == self.dtype else convert(raw, self.dtype, dtype)


@dataclass(frozen=True)
class ReadTogether:
    """A tensor with which others are read. parts: the stored tensors of all of them"""

    tensor: LogicalTensor
    parts: tuple[StoredTensor, ...]

    @property
    def name(self) -> str:
        """That of the tensor."""
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        """That of the tensor."""
        return self.tensor.dtype

    @property
    def plain_dtype(self) -> str:
        """That of the tensor."""
        return self.tensor.plain_dtype

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the tensor."""
        self.tensor.read(start, count, dtype, out)


def _read_together(
    tensor: LogicalTensor, rows: range, columns: range, *, dtype: str, into: npt.NDArray[np.uint8]
) -> None:
    """Read rows with those between them, many at a time, and keep their columns: into [rows, columns, bytes]."""
    width, size = tensor.shape[-1], item_bytes(dtype)
    at_once = max(1, READ_ELEMENTS // (width * rows.step))
    for first in range(0, len(rows), at_once):
        run = rows[first : first + at_once]
        height = run[-1] + 1 - run[0]
        block = np.empty(height * width * size, dtype=np.uint8)
        tensor.read(run[0] * width, height * width, dtype, block)
        kept = block.reshape(height, width, size)[:: run.step]
        into[first : first + len(run)] = kept[:, columns.start :: columns.step][:, : len(columns)]


def _read_one_by_one(
    tensor: LogicalTensor, rows: range, columns: range, *, dtype: str, into: npt.NDArray[np.uint8]
) -> None:
    """Read the part of each row that holds the columns: into [rows, columns, bytes]."""
    width, size = tensor.shape[-1], item_bytes(dtype)
    low, high = min(columns[0], columns[-1]), max(columns[0], columns[-1]) + 1
    strip = np.empty((high - low) * size, dtype=np.uint8)
    for number, row in enumerate(rows):
        tensor.read(row * width + low, high - low, dtype, strip)
        into[number] = strip.reshape(-1, size)[:: columns.step]
