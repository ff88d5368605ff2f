"""Hadamard matrices along the rows or the columns of a weight, in blocks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.writer import disk_errors
from pqweights.kernels import HADAMARD_SIZE
from pqweights.locks import ProcessLock

Floats = npt.NDArray[np.float32]

# Blocks of rows with more weights than this are turned once and kept in a file, because every chunk needs all of them.
MOST_WEIGHTS = 1 << 22
STRIP_WEIGHTS = 1 << 22
KEPT_FILES = 2
CACHED_COLUMNS = 32
_TURNED = Path("temporary file in the output folder")  # the name of such a file in messages


@dataclass(frozen=True, kw_only=True)
class RowBlocks:
    """Blocks of rows. size: rows of a block. first, count: which rows are turned, from a multiple of the size on."""

    size: int
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """By what the factors of a tensor are followed.

    columns: the size of the blocks of columns, or None
    rows: the blocks of rows, or None
    """

    columns: int | None = None
    rows: RowBlocks | None = None

    @property
    def height(self) -> int:
        """The number of rows that must be read together."""
        return 1 if self.rows is None else self.rows.size

    def apply(self, values: Floats, first_row: int) -> None:
        """Multiply values [rows, columns], whole blocks of the rows from `first_row` on, in place."""
        if self.columns is not None:
            hadamard(values.reshape(-1, self.columns), axis=1)
        rows = self.rows
        if rows is not None:
            low = max(rows.first, first_row) - first_row
            high = min(rows.first + rows.count, first_row + len(values)) - first_row
            for start in range(low, high, rows.size):
                for column in range(0, values.shape[1], CACHED_COLUMNS):
                    # A few columns at a time, which stay in the cache through all stages.
                    part = values[start : start + rows.size, column : column + CACHED_COLUMNS].copy()
                    hadamard(part, axis=0)
                    values[start : start + rows.size, column : column + CACHED_COLUMNS] = part


def hadamard(values: Floats, axis: int) -> None:
    """Multiply by the Walsh-Hadamard matrix along one axis of a matrix in place, without dividing by anything.

    The order of additions is fixed: stages of 1, 2, 4, ... in float32.
    """
    size, step = values.shape[axis], 1
    if axis == 1 and size % HADAMARD_SIZE == 0:
        from pqweights.kernels.groups import turn_runs

        turn_runs(values.reshape(-1))
        step = HADAMARD_SIZE
    while step < size:
        if axis == 1:
            pairs = values.reshape(len(values), -1, 2, step)
            low, high = pairs[:, :, 0], pairs[:, :, 1]
        else:
            pairs = values.reshape(-1, 2, step, values.shape[1])
            low, high = pairs[:, 0], pairs[:, 1]
        difference = low - high
        np.add(low, high, out=low)
        high[:] = difference
        step *= 2


def signs(count: int) -> Floats:
    """Return signs that look random and are the same everywhere, [count]: they spread the mean of a row."""
    stream = hashlib.shake_256(b"pqweights rotation").digest(-(-count // 8))
    bits = np.unpackbits(np.frombuffer(stream, dtype=np.uint8))[:count]
    return 1 - 2 * bits.astype(np.float32)


class TurnedFiles:
    """Turned tensors in temporary files, which no name in the folder outlives. folder: where they lie."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: OrderedDict[str, int] = OrderedDict()
        self._making = ProcessLock()

    def __reduce__(self) -> tuple[type[TurnedFiles], tuple[Path]]:
        return TurnedFiles, (self._folder,)

    def close(self) -> None:
        """Free the room of the files."""
        with self._making:
            while self._files:
                os.close(self._files.popitem()[1])

    def read(self, name: str, make: Callable[[int], None], start: int, out: Floats) -> None:
        """Fill `out` with elements of a tensor from `start` on. make: writes all of them to a descriptor."""
        with self._making:
            descriptor = self._files.get(name)
            if descriptor is None:
                if len(self._files) == KEPT_FILES:
                    os.close(self._files.popitem(last=False)[1])
                with disk_errors(self._folder):
                    descriptor, path = tempfile.mkstemp(dir=self._folder)
                    os.unlink(path)
                with contextlib.ExitStack() as failed:
                    failed.callback(os.close, descriptor)
                    make(descriptor)
                    failed.pop_all()
                self._files[name] = descriptor
            descriptor = os.dup(descriptor)
        try:
            view, at = out.data.cast("B"), start * 4
            while view:
                count = os.preadv(descriptor, [view], at)
                assert count, "the file of a turned tensor was cut"
                view, at = view[count:], at + count
        finally:
            os.close(descriptor)


def write_at(file: int, values: Floats, at: int) -> None:
    """Write values to a descriptor, `at` bytes from its start."""
    view = values.data.cast("B")
    with disk_errors(_TURNED):
        while view:
            count = os.pwrite(file, view, at)
            view, at = view[count:], at + count
