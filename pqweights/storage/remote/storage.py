"""A folder in object storage as a storage: large reads in blocks that are fetched ahead, small files as a whole.

A weight is read by many threads in chunks that lie in a row. One request for each would wait for as many replies as
there are chunks; a connection reaches its rate with large requests alone, and a network with several of them.
Nothing is stored on this machine. Every reply is checked to be of the version that was listed, where the storage tells.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.companions import NOT_GIVEN, WEIGHT_SUFFIXES
from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.header import HeaderStarts
from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER
from pqweights.checkpoint.source import Checkpoint, open_checkpoint, open_folder, others_of_model
from pqweights.checkpoint.storage import Storage, WorkFolder, check_not_interrupted
from pqweights.common.threads import ProcessLock
from pqweights.errors import SourceError
from pqweights.storage.addresses import Address, is_inside
from pqweights.storage.remote.failures import TransferStopped
from pqweights.storage.remote.folder import RemoteFolder

# Reads of fewer bytes are requested by themselves, unless a block holds them anyhow.
LARGE_READ_BYTES = 1 << 18
# Files up to this size come whole in one request, if they do not hold tensors; one of them is kept.
SMALL_BYTES = 32_000_000
# Of the first line of a journal.
MOST_FIRST_LINE_BYTES = 1 << 20


class RemoteStorage(Storage):
    """A folder in object storage, see Storage. Threads may share it, and other processes get it pickled.

    folder: what is read
    bytes_read: how many bytes were read so far
    """

    def __init__(self, folder: RemoteFolder, *, below: bool = True, only: Sequence[str] | None = None) -> None:
        """List the files of a folder.

        below: whether the files in folders inside of it are listed, too
        only: the names of the files to list; by default all

        Raises StorageError, and SourceError for a name that cannot be that of a file inside of a folder.
        """
        self.folder = folder
        self.bytes_read = 0
        self._below, self._only = below, only
        self._files = self._listed()
        self._read: set[str] = set()
        for name in self._files:
            _check_name(folder, name)
        self._open()

    @property
    def address(self) -> Address:
        """See Storage."""
        return self.folder.address

    def _listed(self) -> dict[str, FileState]:
        if self._only is None:
            return self.folder.files(recursive=self._below)
        states = {name: self.folder.state(name) for name in self._only}
        return {name: state for name, state in states.items() if state is not None}

    def _open(self) -> None:
        self._lock = ProcessLock()
        self._small: tuple[str, bytes] = ("", b"")
        self._blocks = BlockCache(self._range_between, self._size_of)
        self._starts = HeaderStarts(self._range, self._size_of)

    def __getstate__(self) -> dict[str, Any]:
        opened = {"_lock", "_small", "_blocks", "_starts"}
        return {name: value for name, value in vars(self).items() if name not in opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    @property
    def memory_bytes(self) -> int:
        """The blocks that are held and fetched, and a small file."""
        return BlockCache.memory_bytes() + SMALL_BYTES

    def work_folder(self) -> WorkFolder | None:
        """Look for what an unfinished run into this folder left."""
        found = self.folder.files(WORK_FOLDER)
        if not found:
            return None
        journal = f"{WORK_FOLDER}/{JOURNAL_FILE}"
        if journal not in found:
            return WorkFolder(has_journal=False)
        start = self.folder.read(journal, 0, min(found[journal].byte_count, MOST_FIRST_LINE_BYTES))
        return WorkFolder(has_journal=True, first_line=start.partition(b"\n")[0])

    def __str__(self) -> str:
        return str(self.folder.address)

    def files(self) -> dict[str, FileState]:
        """Return the state of every file by its path, in sorted order; without hidden files, as in a local folder."""
        return self._files

    def expect(self, files: Sequence[str]) -> None:
        """Prepare to read the headers of these files: once one is read, the first bytes of more are requested."""
        self._starts.expect(files)

    @contextlib.contextmanager
    def fetching(self, folder: Path, files: Mapping[str, int]) -> Iterator[None]:
        """Have threads that wait for bytes give up if the context ends with an error. Files are not fetched whole."""
        self._blocks.start()
        has_ended = False
        try:
            yield
            has_ended = True
        finally:
            if not has_ended:
                self._blocks.stop()

    def release(self, file: str) -> None:
        """Note that a file is no longer needed."""
        with self._lock:
            if self._small[0] == file:
                self._small = ("", b"")

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer with bytes of a file from `offset` on, see Storage.

        Raises StorageError, and SourceChangedError if the file was replaced.
        """
        count, size = buffer.nbytes, self._size_of(file)
        if offset + count > size:
            raise SourceError(
                f"{file}: expected {count} bytes at offset {offset}, found {max(0, size - offset)}: it is shorter"
            )
        if not self._read_small(file, offset, buffer):
            start = self._starts.read(file, offset, count)
            if start is not None:
                buffer[:] = np.frombuffer(start, dtype=np.uint8)
            elif count >= LARGE_READ_BYTES or self._blocks.holds(file, offset):
                self._blocks.read_into(file, offset, buffer)
            else:
                buffer[:] = np.frombuffer(self._range(file, offset, count), dtype=np.uint8)
        with self._lock:
            self.bytes_read += count
            self._read.add(file)

    def check_read(self) -> None:
        """See Storage. Replies of S3 are checked one by one; another storage would have to be asked each time."""

    def check_unchanged(self, files: Iterable[str] = ()) -> None:
        """See Storage. The folder is listed once more."""
        there = self._listed()
        for file in sorted({*self._read, *files}):
            self._files[file].check(str(self.folder.address / file), there.get(file))

    def _read_small(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> bool:
        """Fill the buffer if the file is small and does not hold tensors; return whether it is."""
        size = self._size_of(file)
        if size > SMALL_BYTES or file.endswith(".safetensors"):
            return False
        name, data = self._small
        if name != file:
            data = self._range(file, 0, size)
            with self._lock:
                self._small = file, data
        buffer[:] = np.frombuffer(data, dtype=np.uint8)[offset : offset + buffer.nbytes]
        return True

    def _range(self, file: str, offset: int, count: int) -> bytes:
        return self._range_between(file, offset, offset + count)

    def _range_between(self, file: str, start: int, end: int) -> bytes:
        return self.folder.read(file, start, end, expected=self._files[file])

    def _size_of(self, file: str) -> int:
        return self._files[file].byte_count


def _check_name(folder: RemoteFolder, name: str) -> None:
    """Raise SourceError for a name that would lead out of a folder, or that does not mean what it displays."""
    if not is_inside(name):
        raise SourceError(
            f"{folder.address}: holds a file {name[:80]!a}: expected a path inside of it, in printable characters; "
            "rename or remove it"
        )


def open_address(address: Address, allow_pickle: bool = False, *, include: Sequence[str] = ()) -> Checkpoint:
    """Open the checkpoint in a folder in object storage, or in a single file; only its headers are read.

    allow_pickle: also open pickled weights
    include: patterns of files to copy, see checkpoint/companions.py

    Raises StorageError, SourceError also if there is nothing; MasterError for a damaged master or an unfinished one.
    """
    folder = RemoteFolder(address)
    storage = RemoteStorage(folder)
    if storage.files():
        return open_folder(storage, allow_pickle, include=include)
    check_not_interrupted(storage)
    single = _single_file(address)
    if single is None:
        raise SourceError(
            f"{address}: no such file or folder, or nothing in it; give the address of a checkpoint folder or of a "
            ".safetensors file"
        )
    opened = open_checkpoint(single, allow_pickle, single_file=True)
    beside: tuple[str, ...] = ()
    if address.name.lower().endswith(WEIGHT_SUFFIXES):
        beside = others_of_model(RemoteStorage(single.folder, below=False), address.name)
    return replace(opened, left_out=dict.fromkeys(beside, NOT_GIVEN))


def _single_file(address: Address) -> RemoteStorage | None:
    """Return the folder around a file with that file alone; None if there is no such file."""
    if not address.path:
        return None
    found = RemoteStorage(RemoteFolder(address.parent), only=[address.name])
    return found if found.files() else None


BLOCK_BYTES = 8 << 20
FETCHING_THREADS = 6
# Blocks that are fetched behind the one that is needed, how many are held in all, and how many more are waited for.
BLOCKS_AHEAD = 4
MOST_BLOCKS = 10
READERS_AT_ONCE = 8
# How often a reader that waits for a block looks whether it shall stop.
LOOK_SECONDS = 0.2

Bytes = npt.NDArray[np.uint8]
Key = tuple[str, int]  # a file, and the number of a block in it


class BlockCache:
    """Blocks of the files of one folder, for any number of reading threads."""

    def __init__(self, fetch: Callable[[str, int, int], bytes], size_of: Callable[[str], int]) -> None:
        """Take what makes requests.

        fetch: called with a file, a start and an end; returns the bytes
        size_of: returns the size of a file in bytes
        """
        self._fetch, self._size_of = fetch, size_of
        self._blocks: OrderedDict[Key, Future[bytes]] = OrderedDict()  # the least recently used first
        self._last: dict[str, int] = {}  # the block of each file that was needed last
        self._pool: ThreadPoolExecutor | None = None
        self._readers = threading.Semaphore(READERS_AT_ONCE)
        self._lock = threading.Lock()
        self._stopped = False

    @staticmethod
    def memory_bytes() -> int:
        """Return how many bytes it may hold; a reply under way is held in pieces as well."""
        return (MOST_BLOCKS + READERS_AT_ONCE + FETCHING_THREADS) * BLOCK_BYTES

    def read_into(self, file: str, offset: int, buffer: Bytes) -> None:
        """Fill the buffer with bytes of a file from `offset` on, all of which must lie inside of it.

        Raises what `fetch` raises, and TransferStopped after `stop`.
        """
        done = 0
        while done < len(buffer):
            number, at = divmod(offset + done, BLOCK_BYTES)
            count = min(BLOCK_BYTES - at, len(buffer) - done)
            with self._readers:
                data = self._content((file, number))
                buffer[done : done + count] = np.frombuffer(data, dtype=np.uint8, count=count, offset=at)
            done += count

    def holds(self, file: str, offset: int) -> bool:
        """Whether the block with a byte is held or was requested."""
        return (file, offset // BLOCK_BYTES) in self._blocks

    def stop(self) -> None:
        """Have waiting readers give up, until `start`."""
        self._stopped = True

    def start(self) -> None:
        """Take readers again after `stop`."""
        self._stopped = False

    def _content(self, key: Key) -> bytes:
        """Return the bytes of a block, and have those fetched that follow it if the file is read in order."""
        file, number = key
        with self._lock:
            block = self._requested(key)
            is_next = 0 < number - self._last.get(file, -1) <= BLOCKS_AHEAD
            self._last[file] = number
            for ahead in range(number + 1, number + 1 + BLOCKS_AHEAD) if is_next else ():
                if ahead * BLOCK_BYTES < self._size_of(file):
                    self._requested((file, ahead))
        while not block.done():
            if self._stopped:
                raise TransferStopped
            concurrent.futures.wait([block], timeout=LOOK_SECONDS)
        if block.exception() is not None:
            with self._lock:  # it is requested again when it is needed again
                if self._blocks.get(key) is block:
                    del self._blocks[key]
        return block.result()

    def _requested(self, key: Key) -> Future[bytes]:
        """Return a block, which takes the place of the one that was not used for the longest time if it is new."""
        if key not in self._blocks:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(FETCHING_THREADS, "pqweights-blocks")
            file, start = key[0], key[1] * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, self._size_of(file))
            self._blocks[key] = self._pool.submit(self._fetch, file, start, end)
            if len(self._blocks) > MOST_BLOCKS:
                self._blocks.popitem(last=False)  # its readers keep it
        self._blocks.move_to_end(key)
        return self._blocks[key]
