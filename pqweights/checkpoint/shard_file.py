"""A shard while it is written: its stored tensors, in any order, from any thread, around the page cache.

Bytes are hashed as they come, so that what the manifest states is what was made, and not what a disk gives back.

The page cache would copy every byte once more, and evict what others keep there, for files that are flushed to the disk
in the end. Direct access asks for whole pages of memory at whole pages of the file, so each thread makes its output in
memory that lies as its place in the file does: all pages but the first and the last then go to the disk from there.
Those two, and whatever is small, are gathered here until pages are whole: a write through the page cache would wait
for every direct write to the file that is under way, and these for it. The safetensors library can only write tensors
that are all in memory, so shards are written here, and the tests read them back with the library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.column_spool import ColumnSpool
from pqweights.checkpoint.digests import PieceHasher
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.writer import disk_errors
from pqweights.kernels.workers import scratch

PAGE_BYTES = 4096
# Less is gathered, as norms and biases are.
DIRECT_BYTES = 1 << 16
# So many whole pages are written together.
GATHERED_PAGES = 256
# Without direct access: a flush begins when this many bytes have been written since the last one.
FLUSH_BYTES = 1 << 27

Bytes = npt.NDArray[np.uint8]


def memory_for(purpose: str, offset: int, byte_count: int) -> Bytes:
    """Return memory of this thread from which bytes for `offset` in a file are written without a copy.

    Its contents are undefined; it is valid until the thread asks for the same purpose again.
    """
    memory = scratch(purpose, byte_count + PAGE_BYTES)
    start = (offset - memory.ctypes.data) % PAGE_BYTES
    return memory[start : start + byte_count]


class ShardFile:
    """One output file while it is being filled.

    A tensor is begun, written, by all of its bytes and from any thread, and finished; if it takes several passes, it is
    begun again for each.
    """

    def __init__(
        self,
        path: Path,
        header: bytes,
        stored: Sequence[StoredTensor],
        file_bytes: int,
        *,
        shown: Path,
        waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Create the file with its header, its full size, and zeros between its tensors.

        stored: its tensors, in their order
        shown: what messages call it
        waiting: entered while a thread waits for the disk, so that another may compute
        """
        self.path, self._shown, self._waiting = path, shown, waiting
        self._stored = {tensor.name: tensor for tensor in stored}
        self._hashers: dict[str, PieceHasher] = {}  # of tensors that are begun, by name
        self._columns: dict[str, ColumnSpool] = {}
        self._lock = threading.Lock()
        self._unflushed_bytes = 0
        # Pages that are gathered: the bytes of each, and which of them were given; those of which all were.
        self._pages: dict[int, tuple[Bytes, npt.NDArray[np.bool_]]] = {}
        self._whole: set[int] = set()
        self._writes_pages = threading.Lock()  # so that a page that is gathered twice is written in this order
        self._descriptor = self._direct = -1
        is_open = False
        try:
            self._create(file_bytes)
            self._write_at(0, np.frombuffer(header, dtype=np.uint8))
            starts = [*(tensor.offset for tensor in stored[1:]), file_bytes]
            for tensor, following in zip(stored, starts, strict=False):
                if gap := following - (end := tensor.offset + tensor.byte_count):
                    self._write_at(end, np.zeros(gap, dtype=np.uint8))
            is_open = True
        finally:
            if not is_open:
                self.close()

    def _create(self, file_bytes: int) -> None:
        with disk_errors(self._shown):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            _allocate(self._descriptor, file_bytes)
        if hasattr(os, "O_DIRECT"):  # macOS has none
            with contextlib.suppress(OSError):  # nor have some file systems
                self._direct = os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._takes_direct = self._direct >= 0

    def begin(self, names: Iterable[str]) -> None:
        """Begin stored tensors, or begin them again."""
        for name in names:
            self._columns.pop(name, None)
            self._hashers[name] = PieceHasher(self._stored[name].byte_count)

    def memory(self, purpose: str, name: str, offset: int, byte_count: int) -> Bytes:
        """Return memory from which `write` of the same bytes of a tensor makes no copy, contents undefined.

        It is valid until the thread asks for the same purpose again.
        """
        return memory_for(purpose, self._stored[name].offset + offset, byte_count)

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Write data at `offset` bytes from the start of a stored tensor.

        Each byte is written once. The caller may change `data` afterwards.
        """
        tensor = self._stored[name]
        assert offset + len(data) <= tensor.byte_count, name
        self._hashers[name].add(offset, data)
        with self._waiting():  # also for few bytes: a file system lets one writer wait for another
            self._write_at(tensor.offset + offset, data)

    def write_columns(self, name: str, offset: int, data: Bytes) -> None:
        """Write columns of a stored tensor, [its rows, bytes], at `offset` bytes from the start of each row.

        They are put together to rows when the tensor is finished.
        """
        with self._waiting():
            self._columns.setdefault(name, ColumnSpool(self.path.parent)).add(offset, data)

    def finish_tensors(self, names: Sequence[str]) -> dict[str, str]:
        """Write the rows of what came by columns; return the hash of each stored tensor, all of which are complete."""
        for name in names:
            if (spool := self._columns.pop(name, None)) is not None:
                for offset, rows in spool.take_rows():
                    self.write(name, offset, rows)
        return {name: self._hashers.pop(name).hexdigest() for name in names}

    def _write_at(self, offset: int, data: Bytes) -> None:
        """Write data at `offset` of the file."""
        with disk_errors(self._shown):
            if self._direct < 0:
                self._write_cached(offset, data)
                return
            first = -offset % PAGE_BYTES
            pages = max(0, len(data) - first) // PAGE_BYTES * PAGE_BYTES
            if pages < DIRECT_BYTES:
                self._gather(offset, data)
                return
            if (data.ctypes.data - offset) % PAGE_BYTES:
                memory = memory_for("written", offset, len(data))
                memory[:] = data
                data = memory
            self._write_direct(offset + first, data[first : first + pages])
            self._gather(offset, data[:first])
            self._gather(offset + first + pages, data[first + pages :])

    def _gather(self, offset: int, data: Bytes) -> None:
        """Gather bytes, and write the pages that are whole if they are many.

        Bytes may be given again, for a job with several passes; the last ones count.
        """
        with self._lock:
            done = 0
            while done < len(data):
                page, start = divmod(offset + done, PAGE_BYTES)
                count = min(len(data) - done, PAGE_BYTES - start)
                if page not in self._pages:
                    self._pages[page] = np.zeros(PAGE_BYTES, np.uint8), np.zeros(PAGE_BYTES, np.bool_)
                content, given = self._pages[page]
                content[start : start + count] = data[done : done + count]
                given[start : start + count] = True
                if given.all():
                    self._whole.add(page)
                done += count
            are_many = len(self._whole) >= GATHERED_PAGES
        if are_many:
            self._write_gathered()

    def _write_gathered(self) -> None:
        """Write the pages that are whole, each run of neighbours at once."""
        with self._writes_pages:
            with self._lock:
                whole = {page: self._pages.pop(page)[0] for page in sorted(self._whole)}
                self._whole.clear()
            pages = np.array([*whole], np.int64)
            for run in np.split(pages, np.nonzero(np.diff(pages) != 1)[0] + 1) if whole else ():
                offset = int(run[0]) * PAGE_BYTES
                memory = memory_for("gathered", offset, len(run) * PAGE_BYTES)
                for row, page in zip(memory.reshape(-1, PAGE_BYTES), run.tolist(), strict=True):
                    row[:] = whole[page]
                self._write_direct(offset, memory)

    def _write_rest(self) -> None:
        """Write what was given of the pages that are not whole."""
        for page, (content, given) in self._pages.items():
            ends = np.nonzero(np.diff(given, prepend=False, append=False))[0].tolist()
            for start, end in zip(ends[::2], ends[1::2], strict=True):
                self._write_cached(page * PAGE_BYTES + start, content[start:end])
        self._pages = {}

    def _write_direct(self, offset: int, pages: Bytes) -> None:
        """Write whole pages around the page cache, if the file system can."""
        done = 0
        while self._takes_direct and done < len(pages):
            try:
                done += os.pwrite(self._direct, pages[done:].data, offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:  # the file system wants larger pages, or cannot after all
                    raise
                self._takes_direct = False
        self._write_cached(offset + done, pages[done:])

    def _write_cached(self, offset: int, data: Bytes) -> None:
        view = data.data
        while view:
            count = os.pwrite(self._descriptor, view, offset)
            offset, view = offset + count, view[count:]
        with self._lock:
            self._unflushed_bytes += len(data)
            is_much = self._unflushed_bytes >= FLUSH_BYTES
            if is_much:
                self._unflushed_bytes = 0
        if is_much:
            os.fsync(self._descriptor)

    def finish(self) -> None:
        """Flush the file to the disk, and close it."""
        with disk_errors(self._shown):
            self._write_gathered()
            self._write_rest()
            os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close the file."""
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the blocks of a file, so that a full disk shows now; if the file system cannot, only set the size."""
    os.ftruncate(descriptor, size)
    if size and hasattr(os, "posix_fallocate"):  # macOS has none
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
