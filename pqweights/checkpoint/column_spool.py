"""Columns of a stored tensor that become its rows, by way of the disk."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.writer import disk_errors

Bytes = npt.NDArray[np.uint8]
# Less is kept in memory.
SPOOLED_BYTES = 1 << 25
# Rows are put together in strips of this size.
STRIP_BYTES = 1 << 23


class ColumnSpool:
    """Columns of a stored tensor, in any order and from any thread, which become rows when all of them have come.

    Some layouts have the rows of a weight as columns, so every row of the tensor waits for the last rows of the weight.
    Meanwhile columns are appended to a temporary file on the disk of the result. Reading them back takes one piece of
    each for many rows at a time: writing columns to their places at once would be millions of writes of a few bytes,
    and the rows of a tensor of gigabytes do not fit in memory.
    """

    def __init__(self, folder: Path) -> None:
        """Begin with none. folder: where a file may be made, which no longer has a name once it is there."""
        self._folder = folder
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._parts: list[tuple[int, int, int]] = []  # offset in each row, bytes in each row, offset in the file
        self._rows = 0

    def __del__(self) -> None:
        """Let go of the file, also where an error has kept rows from being taken."""
        if self._file is not None:
            self._file.close()

    def add(self, offset: int, columns: Bytes) -> None:
        """Add columns [rows, bytes], which begin `offset` bytes from the start of each row; the caller may change them.

        Raises OutputError for a disk error.
        """
        with self._lock, disk_errors(self._folder):
            if self._file is None:
                self._file = tempfile.SpooledTemporaryFile(SPOOLED_BYTES, dir=str(self._folder))  # noqa: SIM115
            self._rows, width = columns.shape
            self._parts.append((offset, width, self._file.tell()))
            self._file.write(columns.data)

    def take_rows(self) -> Iterator[tuple[int, Bytes]]:
        """Return the rows: their offset in the tensor, in bytes, and their bytes. All columns must have come.

        Raises OutputError for a disk error.
        """
        if self._file is None:
            return
        parts, row_bytes = sorted(self._parts), sum(width for _, width, _ in self._parts)
        with self._file as file:
            step = max(1, STRIP_BYTES // row_bytes)
            for first in range(0, self._rows, step):
                rows = min(step, self._rows - first)
                strip = np.empty((rows, row_bytes), dtype=np.uint8)
                with disk_errors(self._folder):
                    for offset, width, begin in parts:
                        file.seek(begin + first * width)
                        columns = np.frombuffer(file.read(rows * width), dtype=np.uint8)
                        strip[:, offset : offset + width] = columns.reshape(rows, width)
                yield first * row_bytes, strip.reshape(-1)
