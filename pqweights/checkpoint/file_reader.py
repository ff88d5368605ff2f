"""Positioned reads of files on this machine: from the page cache what is there, the rest around it and ahead of use.

A checkpoint is read once, and often is larger than the memory: in the page cache it would evict everything else, and on
its way there every byte is copied once more. Large reads that the cache cannot serve are made in blocks with direct
access, which two threads fetch before they are needed. Small reads are left to the system.

A file must still be what it was when it was listed (FileState) whenever it is opened, and when all is read.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqweights.common.buffers import whole_pages
from pqweights.errors import SourceChangedError, SourceReadError


@dataclass(frozen=True)
class FileState:
    """What a file was when it was listed.

    byte_count: its size
    stamp: changes with it: its modification time, or a hash of its content or version
    modified: when it was changed last, in nanoseconds since 1970; 0 if that is not known
    inode: its number in the file system; 0 if that is not known, as on another machine
    """

    byte_count: int
    stamp: int
    modified: int = 0
    inode: int = 0

    @staticmethod
    def of(status: os.stat_result) -> FileState:
        """Return the state of a file on this machine."""
        return FileState(status.st_size, status.st_mtime_ns, status.st_mtime_ns, status.st_ino)

    def check(self, file: str, now: FileState | None) -> None:
        """Raise SourceChangedError unless a file is still what it was.

        file: what the message calls it
        now: what it is now; None if it is gone
        """
        if now is None:
            difference = "it is no longer there"
        elif now.byte_count != self.byte_count:
            difference = f"expected {self.byte_count} bytes, found {now.byte_count}"
        elif now.stamp != self.stamp:
            difference = f"expected the version of {_time(self.modified)}, found that of {_time(now.modified)}"
        elif self.inode and now.inode and now.inode != self.inode:
            difference = "another file has its name, of the same size and time"
        else:
            return
        raise SourceChangedError(
            f"{file}: the source changed while it was being read ({difference}): leave its files as they are, and run "
            "the same command again"
        )


def state_at(path: Path, *, surely: bool = False) -> FileState | None:
    """Return the state of a file on this machine now; None if it is gone.

    surely: ask the server of a network file system, which answers as of now when a file is opened
    """
    try:
        if not surely:
            return FileState.of(os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return FileState.of(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _time(modified: int) -> str:
    if not modified:
        return "another time"
    seconds, rest = divmod(modified, 10**9)
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"


BLOCK_BYTES = 1 << 20
# Reads of fewer bytes are left to the system.
LARGE_READ_BYTES = 1 << 18
# Blocks that are fetched behind the one that is needed, and by how many threads.
BLOCKS_AHEAD = 3
FETCHING_THREADS = 2
# Blocks that are kept besides, and how many more for each thread that reads.
SPARE_BLOCKS = 1
BLOCKS_FOR_A_USER = 2
# A checkpoint may have more files than a process may hold open.
MOST_OPEN_FILES = 8

Bytes = npt.NDArray[np.uint8]


class FileReader:
    """Reads files, from any thread, which stay open for a while. A pickled one has opened nothing elsewhere.

    A file that is opened again must be the one that it was: what is known of it would be wrong for another.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, _OpenFile] = OrderedDict()  # the least recently used first
        self._states: dict[Path, FileState] = {}  # when each file was opened first
        self._blocks = _BlockCache()
        self._lock = threading.Lock()

    def read_into(
        self, path: Path, file: str, offset: int, buffer: Bytes, *, expected: FileState | None = None
    ) -> None:
        """Fill the buffer with bytes of a file from `offset` on.

        file: what messages call it
        expected: what it was when it was listed

        Raises SourceChangedError if it is not, or no longer, what it was, SourceReadError if it ends early.
        """
        opened, view = self._opened(path, file, expected), buffer.data
        done = 0
        if len(view) >= LARGE_READ_BYTES:
            done = opened.read_cached(offset, view)
            if done < len(view):
                done += self._blocks.read(opened, offset + done, buffer[done:])
        while done < len(view):
            count = os.preadv(opened.descriptor, [view[done:]], offset + done)
            if count == 0:
                opened.state.check(file, state_at(path, surely=True))
                raise SourceReadError(
                    f"{file}: expected {len(view)} bytes at offset {offset}, found the end of the file after {done}, "
                    f"although it has {opened.state.byte_count}: its disk or file server fails; run the same command "
                    "again"
                )
            done += count

    def __reduce__(self) -> tuple[type[FileReader], tuple[()]]:
        return FileReader, ()

    def forget(self, path: Path) -> None:
        """Close a file once nobody reads it any more."""
        with self._lock:
            opened = self._files.pop(path, None)
            self._states.pop(path, None)
        if opened is not None:
            self._blocks.forget(opened)

    def _opened(self, path: Path, file: str, expected: FileState | None) -> _OpenFile:
        with self._lock:
            opened = self._files.get(path)
            if opened is None:
                opened = self._files[path] = self._open(path, file, expected)
                if len(self._files) > MOST_OPEN_FILES:
                    self._files.popitem(last=False)
            elif expected is not None:
                expected.check(file, opened.state)
            self._files.move_to_end(path)
            return opened

    def _open(self, path: Path, file: str, expected: FileState | None) -> _OpenFile:
        known = [state for state in (expected, self._states.get(path)) if state is not None]
        try:
            opened = _OpenFile(path)
        except FileNotFoundError:
            for state in known:
                state.check(file, None)
            raise
        for state in known:
            opened.check(file, state)
        self._states[path] = opened.state
        return opened


class _OpenFile:
    """An open file, closed when it is no longer referred to.

    descriptor: the file
    direct: the same with direct access; -1 if there is none
    state: what it was when it was opened
    last_block: the block that was needed last
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.direct = -1
        if hasattr(os, "O_DIRECT"):  # macOS has none
            with contextlib.suppress(OSError):  # nor have some file systems
                self.direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        self.state = FileState.of(os.fstat(self.descriptor))
        self.size = self.state.byte_count
        self.last_block = -1
        weakref.finalize(self, _close, [self.descriptor, self.direct])

    def check(self, file: str, expected: FileState) -> None:
        """Raise SourceChangedError if it is not what a file was, by either descriptor."""
        for descriptor in (self.descriptor, self.direct):
            if descriptor >= 0:
                expected.check(file, FileState.of(os.fstat(descriptor)))

    def read_cached(self, offset: int, view: memoryview) -> int:
        """Read what the page cache holds of the bytes from `offset` on, without a gap, and return how many."""
        done = 0
        with contextlib.suppress(AttributeError, OSError):  # the system cannot say, or the next byte is not there
            while done < len(view):
                count = os.preadv(self.descriptor, [view[done:]], offset + done, os.RWF_NOWAIT)
                if count == 0:
                    break
                done += count
        return done


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


class _FetchedBlock:
    """A part of a file in memory.

    fetched: how many bytes the file has there, once it is read
    unused: how many bytes nobody has asked for yet
    users: how many threads wait for it or copy from it
    """

    def __init__(self, memory: Bytes, fetched: Future[int]) -> None:
        self.memory, self.fetched = memory, fetched
        self.unused = len(memory)
        self.users = 0


class _BlockCache:
    """Blocks of files that are read with direct access, each of them once if the reads are in order."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[_OpenFile, int], _FetchedBlock] = OrderedDict()  # the oldest first
        self._free: deque[Bytes] = deque()
        self._most = BLOCKS_AHEAD + SPARE_BLOCKS
        self._most_users = 0  # at once, so far
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def read(self, file: _OpenFile, offset: int, buffer: Bytes) -> int:
        """Fill the buffer from `offset` on, as far as direct access goes, and return how many bytes were read."""
        done = 0
        while done < len(buffer) and file.direct >= 0:
            number, at = divmod(offset + done, BLOCK_BYTES)
            wanted = min(BLOCK_BYTES - at, len(buffer) - done)
            block, count = self._needed(file, number), 0
            try:
                count = max(0, min(wanted, block.fetched.result() - at))
                buffer[done : done + count] = block.memory[at : at + count]
            except OSError:  # the file system wants larger pages, or cannot after all
                file.direct = -1
            finally:
                self._used(file, number, block, count)
            done += count
            if count < wanted:
                break
        return done

    def _needed(self, file: _OpenFile, number: int) -> _FetchedBlock:
        """Return a block, and have those fetched that will be needed next if the file is read in order."""
        with self._lock:
            block = self._requested(file, number)
            block.users += 1
            self._most_users = max(self._most_users, sum(block.users for block in self._blocks.values()))
            self._most = BLOCKS_AHEAD + SPARE_BLOCKS + BLOCKS_FOR_A_USER * self._most_users
            if abs(number - file.last_block) <= BLOCKS_AHEAD:
                for ahead in range(number + 1, number + 1 + BLOCKS_AHEAD):
                    if ahead * BLOCK_BYTES < file.size:
                        self._requested(file, ahead)
            file.last_block = number
            return block

    def _requested(self, file: _OpenFile, number: int) -> _FetchedBlock:
        block = self._blocks.get((file, number))
        if block is None:
            while len(self._blocks) >= self._most and self._drop_oldest():
                pass
            if self._pool is None:
                self._pool = ThreadPoolExecutor(FETCHING_THREADS, thread_name_prefix="pqweights-read")
            memory = self._free.pop() if self._free else whole_pages(BLOCK_BYTES)
            fetched = self._pool.submit(_fetch, file, number * BLOCK_BYTES, memory)
            block = self._blocks[file, number] = _FetchedBlock(memory, fetched)
        return block

    def _drop_oldest(self) -> bool:
        """Drop the oldest block that nobody uses; return whether there was one."""
        for key, block in self._blocks.items():
            if block.users == 0 and block.fetched.done():
                del self._blocks[key]
                self._free.append(block.memory)
                return True
        return False

    def forget(self, file: _OpenFile) -> None:
        """Drop the blocks of a file that were fetched for nothing."""
        with self._lock:
            for key in [key for key, block in self._blocks.items() if key[0] is file and block.users == 0]:
                del self._blocks[key]

    def _used(self, file: _OpenFile, number: int, block: _FetchedBlock, count: int) -> None:
        """Note that `count` bytes of a block were copied, and drop it if they were the last."""
        with self._lock:
            block.users -= 1
            block.unused -= count
            at_end = number * BLOCK_BYTES + len(block.memory) - block.unused >= file.size
            if block.users == 0 and (block.unused <= 0 or at_end) and self._blocks.pop((file, number), None) is block:
                self._free.append(block.memory)


def _fetch(file: _OpenFile, offset: int, memory: Bytes) -> int:
    """Fill memory from a file, and return how many bytes there were before its end."""
    done = 0
    while done < len(memory):
        count = os.preadv(file.direct, [memory[done:].data], offset + done)
        done += count
        if count == 0 or count % 512:  # only the end of the file is not a whole sector
            break
    return done
