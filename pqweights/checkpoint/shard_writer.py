"""Shards while they are written: collected in blocks by any thread, written around the page cache by one.

The page cache would copy every byte once more, and evict what others keep there, for files that are flushed to the disk
in the end. The safetensors library can only write tensors that are all in memory, so shards are written here, and the
tests read them back with the library.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqweights.buffers import whole_pages
from pqweights.checkpoint.writer import disk_errors, partial_path, sync_folder
from pqweights.errors import OutputError

# What is written at once: enough that a fast disk is busy, and whole pages on every machine.
BLOCK_BYTES = 1 << 20
# At most this many blocks and other tasks wait for the disk; the threads that bring more wait, too.
MOST_WAITING = 2
# Without direct access: a flush begins when this many bytes have been written since the last one.
FLUSH_BYTES = 1 << 27

Bytes = npt.NDArray[np.uint8]


class Disk:
    """The thread that writes, in the order in which it is told to. After a failure every task fails alike."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pqweights-disk")
        self._room = threading.Semaphore(MOST_WAITING)
        self._free: deque[Bytes] = deque()
        self._failure: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a task has raised."""
        return self._failure is not None

    def do(self, task: Callable[[], None], *, always: bool = False) -> Future[None]:
        """Have something done after everything before it. Raises what an earlier task raised.

        always: do it even after a failure
        """
        self._room.acquire()
        submitted = False
        try:
            if self._failure is not None and not always:
                raise self._failure
            future = self._thread.submit(self._run, task, always)
            submitted = True
            return future
        finally:
            if not submitted:
                self._room.release()

    def _run(self, task: Callable[[], None], always: bool) -> None:
        failed = True
        try:
            if self._failure is not None and not always:
                raise self._failure
            task()
            failed = False
        finally:
            if failed and self._failure is None:
                self._failure = sys.exception()
            self._room.release()

    def wait(self) -> None:
        """Return when everything is done. Raises what a task raised."""
        self.do(lambda: None).result()

    def take(self) -> Bytes:
        """Return memory for a block, contents undefined; direct access asks for whole pages."""
        try:
            return self._free.pop()
        except IndexError:
            return whole_pages(BLOCK_BYTES)

    def give(self, memory: Bytes) -> None:
        """Take back the memory of a block."""
        self._free.append(memory)

    def close(self) -> None:
        """End the thread when everything is done."""
        self._thread.shutdown(wait=True)


class _ShardBlock:
    """A part of a file that is not written yet.

    held: the runs of bytes that have come, in order, never touching
    comers: how many threads are bringing bytes; a second pass over a tensor brings them again
    """

    def __init__(self, memory: Bytes, size: int) -> None:
        self.memory, self.size = memory, size
        self.held: list[tuple[int, int]] = []
        self.comers = 0

    def hold(self, begin: int, end: int) -> None:
        """Note that bytes [begin, end) have come, perhaps for the second time."""
        first = bisect_left(self.held, begin, key=lambda run: run[1])
        last = first
        while last < len(self.held) and self.held[last][0] <= end:
            begin, end = min(begin, self.held[last][0]), max(end, self.held[last][1])
            last += 1
        self.held[first:last] = [(begin, end)]

    @property
    def is_complete(self) -> bool:
        """Whether every byte has come, and no thread brings some of them again."""
        return self.comers == 0 and self.held == [(0, self.size)]


class ShardWriter:
    """One output file while it is being filled, in any order and from any thread."""

    def __init__(self, path: Path, header: bytes, file_bytes: int, disk: Disk) -> None:
        """Open the partial file of `path`, which is created with its header and full size if it does not exist."""
        self.path, self.partial = path, partial_path(path)
        self._file_bytes, self._disk = file_bytes, disk
        self._blocks: dict[int, _ShardBlock] = {}
        self._complete: deque[tuple[int, _ShardBlock]] = deque()  # not yet written
        self._written: set[int] = set()
        self._lock = threading.Lock()
        self._unflushed_bytes = 0
        self._direct = -1
        with disk_errors(path):
            self.descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(self.descriptor).st_size != file_bytes:
                os.ftruncate(self.descriptor, 0)
                _allocate(self.descriptor, file_bytes)
        if file_bytes >= BLOCK_BYTES and hasattr(os, "O_DIRECT"):  # macOS has none
            with contextlib.suppress(OSError):  # nor have some file systems
                self._direct = os.open(self.partial, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        self.write(0, np.frombuffer(header, dtype=np.uint8))

    def write(self, offset: int, data: Bytes) -> None:
        """Take `data` for the place `offset`; the caller may change it afterwards."""
        done = 0
        while done < len(data):
            number, at = divmod(offset + done, BLOCK_BYTES)
            part = data[done : done + BLOCK_BYTES - at]
            block = self._entered(number)
            if block is None:
                self._disk.do(functools.partial(self._write_out, offset + done, part.copy(), direct=False))
            else:
                block.memory[at : at + len(part)] = part
                self._left(number, block, at, at + len(part))
            done += len(part)

    def _entered(self, number: int) -> _ShardBlock | None:
        """Return the block to which the caller brings bytes; None for one that was written, which stays as it is.

        Bytes of a second pass would wait in it for those of its neighbours, which do not come again.
        """
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                if number in self._written:
                    return None
                size = min(BLOCK_BYTES, self._file_bytes - number * BLOCK_BYTES)
                block = self._blocks[number] = _ShardBlock(self._disk.take(), size)
            block.comers += 1
            return block

    def _left(self, number: int, block: _ShardBlock, begin: int, end: int) -> None:
        """Note that the caller has brought bytes [begin, end) of a block, and have the block written if it is whole."""
        with self._lock:
            block.comers -= 1
            block.hold(begin, end)
            complete = block.is_complete
            if complete:
                del self._blocks[number]
                self._complete.append((number, block))
        if complete:
            self._disk.do(functools.partial(self._write_block, number, block))

    def keep(self, offset: int, count: int) -> None:
        """Keep bytes that an earlier run wrote. Those in a block with others are written again."""
        end = offset + count
        for number in range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            start = number * BLOCK_BYTES
            first, last = max(start, offset), min(start + BLOCK_BYTES, end)
            if last - first < min(BLOCK_BYTES, self._file_bytes - start):
                self.write(first, np.frombuffer(os.pread(self.descriptor, last - first, first), dtype=np.uint8))

    def _write_block(self, number: int, block: _ShardBlock) -> None:
        """Write a complete block; the last one of a file may not be whole pages."""
        self._write_out(number * BLOCK_BYTES, block.memory[: block.size], direct=block.size == BLOCK_BYTES)
        with self._lock:
            self._complete.remove((number, block))
            self._written.add(number)
        self._disk.give(block.memory)

    def _write_out(self, offset: int, data: Bytes, *, direct: bool) -> None:
        view = data.data
        with disk_errors(self.path):
            while view:
                count = self._write_some(offset, view, direct=direct)
                offset, view = offset + count, view[count:]
        if not direct or self._direct < 0:
            self._unflushed_bytes += len(data)
        if self._unflushed_bytes >= FLUSH_BYTES:
            self.flush()

    def _write_some(self, offset: int, view: memoryview, *, direct: bool) -> int:
        """Write the first bytes, around the page cache if possible, and return how many."""
        if direct and self._direct >= 0:
            try:
                return os.pwrite(self._direct, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # the file system wants larger pages, or cannot after all
                    raise
                os.close(self._direct)
                self._direct = -1
        return os.pwrite(self.descriptor, view, offset)

    def save(self) -> None:
        """Give the system everything that has come, so that it outlives this process. Called by the disk's thread.

        That includes complete blocks which other threads are still about to hand over.
        """
        with self._lock:
            runs = [
                (number * BLOCK_BYTES, block.memory, begin, end)
                for number, block in (*self._complete, *self._blocks.items())
                for begin, end in block.held
            ]
        for offset, memory, begin, end in runs:
            self._write_out(offset + begin, memory[begin:end], direct=False)

    def flush(self) -> None:
        """Flush what was written to the disk. Called by the disk's thread."""
        self._unflushed_bytes = 0
        self._sync(_sync_data)

    def _sync(self, sync: Callable[[int], None]) -> None:
        """Call `sync`; if the disk fails, empty the file and raise OutputError.

        The kernel forgets which bytes it could not write, so a run that is continued could not trust the file. The
        empty file stays: without it, the shard of an older result would be taken for this one.
        """
        try:
            sync(self.descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, 0)
            with disk_errors(self.path):
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
            raise OutputError(
                f"{self.path.name}: cannot be flushed to the disk ({error.strerror}), and was emptied; check the disk "
                "and run the same command again"
            ) from None

    def finish(self) -> None:
        """Flush the file to the disk, and give it its final name. Called by the disk's thread."""
        self.save()
        self._sync(os.fsync)
        with disk_errors(self.path):
            self.close()
            os.replace(self.partial, self.path)
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Close the file; a partial file stays as it is."""
        for descriptor in (self.descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self._direct = -1
        while self._blocks:
            self._disk.give(self._blocks.popitem()[1].memory)


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the blocks of a file, so that a full disk shows now; if the file system cannot, only set the size."""
    os.ftruncate(descriptor, size)
    if size and hasattr(os, "posix_fallocate"):  # macOS has none
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


# macOS has no fdatasync.
_sync_data = getattr(os, "fdatasync", os.fsync)
