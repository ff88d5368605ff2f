"""Where the passes over one tensor write: its stored tensors in a shard, which are hashed as their bytes come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.column_spool import ColumnSpool
from pqweights.checkpoint.digests import PieceHasher
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.shard_file import ShardFile, memory_for

Bytes = npt.NDArray[np.uint8]


class Sink:
    """Takes the bytes of the stored tensors of one tensor, in any order and from any thread."""

    def __init__(
        self, file: ShardFile, stored: tuple[StoredTensor, ...], waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Begin the stored tensors. waiting: entered while a thread waits for the disk, so that another may compute"""
        self._file, self._stored, self._waiting = file, stored, waiting
        self._columns = {tensor.name: ColumnSpool(file.path.parent) for tensor in stored}
        self._places = {tensor.name: (tensor.offset, PieceHasher(tensor.byte_count)) for tensor in stored}

    def memory(self, purpose: str, stored_name: str, offset: int, byte_count: int) -> Bytes:
        """Return memory from which `write` of the same place makes no copy, contents undefined.

        It is valid until the thread asks for the same purpose again.
        """
        return memory_for(purpose, self._places[stored_name][0] + offset, byte_count)

    def write(self, stored_name: str, offset: int, data: Bytes) -> None:
        """Write data at `offset` bytes from the start of a stored tensor.

        Each byte is written once. The caller may change `data` afterwards.
        """
        start, hasher = self._places[stored_name]
        assert offset + len(data) <= hasher.byte_count, stored_name
        hasher.add(offset, data)
        with self._waiting():  # also for few bytes: a file system lets one writer wait for another
            self._file.write(start + offset, data)

    def write_columns(self, stored_name: str, offset: int, data: Bytes) -> None:
        """Write columns of a stored tensor, [its rows, bytes], at `offset` bytes from the start of each row.

        They are put together to rows when the tensor is finished.
        """
        with self._waiting():
            self._columns[stored_name].add(offset, data)

    def again(self) -> Sink:
        """Return the sink of another pass over the tensor."""
        return Sink(self._file, self._stored, self._waiting)

    def finish(self) -> dict[str, str]:
        """Write the rows of what came by columns; return the hash of each stored tensor, all of which are complete."""
        for name, spool in self._columns.items():
            for offset, rows in spool.take_rows():
                self.write(name, offset, rows)
        return {name: hasher.hexdigest() for name, (_, hasher) in self._places.items()}
