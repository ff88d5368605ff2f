"""Large blocks of remote files: a bounded number in memory, fetched by a few threads before they are needed.

A weight is read by many threads in chunks that lie in a row. One request for each would wait for as many replies as
there are chunks; a connection reaches its rate with large requests alone, and a network with several of them.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from pqweights.storage.remote.attempts import TransferStopped

BLOCK_BYTES = 8 << 20
FETCHING_THREADS = 6
# Blocks that are fetched behind the one that is needed, and how many are held in all.
BLOCKS_AHEAD = 6
MOST_BLOCKS = 14
# After so many uses of others, the rest of a block is not expected to be read any more.
STALE_USES = 100
# Small reads from a block before it is fetched for them, and of how many blocks they are counted.
SMALL_READS_ALONE = 3
MOST_COUNTED = 10_000
# How often a reader that waits for a block looks whether it shall stop.
LOOK_SECONDS = 0.2

Bytes = npt.NDArray[np.uint8]
Key = tuple[str, int]  # a file, and the number of a block in it


class _Block:
    """Bytes of a file that were requested.

    fetched: resolves to the bytes
    users: how many readers need them now
    unused: how many of the bytes nobody has read yet
    last_use: the number of the use that was the last; 0 before the first
    """

    def __init__(self, fetched: Future[bytes], byte_count: int) -> None:
        self.fetched, self.unused, self.users, self.last_use = fetched, byte_count, 0, 0

    @property
    def is_idle(self) -> bool:
        """Whether it may be dropped."""
        return self.users == 0 and self.fetched.done()


class BlockCache:
    """Blocks of the files of one folder, for any number of reading threads."""

    def __init__(self, fetch: Callable[[str, int, int], bytes], size_of: Callable[[str], int]) -> None:
        """Take what makes requests.

        fetch: called with a file, a start and an end; returns the bytes
        size_of: returns the size of a file in bytes
        """
        self._fetch, self._size_of = fetch, size_of
        self._blocks: dict[Key, _Block] = {}  # in the order of the requests
        self._uses = 0
        self._last: dict[str, int] = {}  # the block of each file that was needed last
        self._ahead: dict[str, int] = {}  # the furthest one that was requested for the present readers
        self._small_reads: dict[Key, int] = {}  # how many were made of blocks that were not held
        self._pool: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        self._stopped = False

    @staticmethod
    def memory_bytes() -> int:
        """Return how many bytes it may hold; a reply under way is held in pieces as well."""
        return (MOST_BLOCKS + FETCHING_THREADS) * BLOCK_BYTES

    def read_into(self, file: str, offset: int, buffer: Bytes) -> None:
        """Fill the buffer with bytes of a file from `offset` on, all of which must lie inside of it.

        Raises what `fetch` raises, and TransferStopped after `stop`.
        """
        done = 0
        while done < len(buffer):
            number, at = divmod(offset + done, BLOCK_BYTES)
            count = min(BLOCK_BYTES - at, len(buffer) - done)
            block, copied = self._needed(file, number), None
            try:
                data = self._content(block)
                buffer[done : done + count] = np.frombuffer(data, dtype=np.uint8, count=count, offset=at)
                copied = count
            finally:
                self._used((file, number), block, copied)
            done += count

    def read_small(self, file: str, offset: int, buffer: Bytes) -> bool:
        """Fill the buffer, unless its bytes had better be requested alone; return whether it is filled.

        They are alone if no block with them is held, and few others of their block were asked for.
        """
        key = file, offset // BLOCK_BYTES
        with self._changed:
            if key not in self._blocks:
                if len(self._small_reads) > MOST_COUNTED:
                    self._small_reads.clear()
                self._small_reads[key] = self._small_reads.get(key, 0) + 1
                if self._small_reads[key] <= SMALL_READS_ALONE:
                    return False
        self.read_into(file, offset, buffer)
        return True

    def stop(self) -> None:
        """Have waiting readers give up."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def start(self) -> None:
        """Take readers again after `stop`."""
        with self._changed:
            self._stopped = False

    def _content(self, block: _Block) -> bytes:
        """Wait for the bytes of a block."""
        while not block.fetched.done():
            if self._stopped:
                raise TransferStopped
            concurrent.futures.wait([block.fetched], timeout=LOOK_SECONDS)
        return block.fetched.result()

    def _needed(self, file: str, number: int) -> _Block:
        """Return a block, and have those fetched that will be needed next if the file is read in order."""
        with self._changed:
            while (file, number) not in self._blocks and not self._room(for_ahead=False):
                if self._stopped:
                    raise TransferStopped
                self._changed.wait(LOOK_SECONDS)
            block = self._requested(file, number)
            block.users += 1
            self._uses += 1
            block.last_use = self._uses
            self._follow(file, number)
            return block

    def _follow(self, file: str, number: int) -> None:
        """Have the next blocks fetched if a file is read in order, each of them once however many readers there are."""
        step = number - self._last.get(file, -1)
        self._last[file] = number
        if step > BLOCKS_AHEAD or step < -MOST_BLOCKS:
            self._ahead[file] = number  # a reader begins elsewhere
        furthest = max(self._ahead.get(file, -1), number)
        if 0 < step <= BLOCKS_AHEAD:
            for ahead in range(furthest + 1, number + 1 + BLOCKS_AHEAD):
                is_there = ahead * BLOCK_BYTES < self._size_of(file) and self._room(for_ahead=True)
                if not is_there:
                    break
                self._requested(file, ahead)
                furthest = ahead
        self._ahead[file] = furthest

    def _room(self, *, for_ahead: bool) -> bool:
        """Make room for a block, and return whether there is any.

        for_ahead: only in place of blocks that were read long ago; other readers may still need the rest of the others
        """
        if len(self._blocks) < MOST_BLOCKS:
            return True
        idle = [(key, block) for key, block in self._blocks.items() if block.is_idle]
        read = sorted((block.last_use, key) for key, block in idle if block.last_use)
        if read and (not for_ahead or read[0][0] <= self._uses - STALE_USES):
            del self._blocks[read[0][1]]
        elif idle and not for_ahead:
            del self._blocks[idle[0][0]]
        return len(self._blocks) < MOST_BLOCKS

    def _bytes_of(self, key: Key) -> int:
        file, number = key
        return min(BLOCK_BYTES, self._size_of(file) - number * BLOCK_BYTES)

    def _requested(self, file: str, number: int) -> _Block:
        """Return a block, requested if it is not held."""
        key = file, number
        if key not in self._blocks:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(FETCHING_THREADS, "pqweights-blocks")
            start, count = number * BLOCK_BYTES, self._bytes_of(key)
            fetched = self._pool.submit(self._fetch, file, start, start + count)
            fetched.add_done_callback(self._notify)
            self._blocks[key] = _Block(fetched, count)
        return self._blocks[key]

    def _notify(self, fetched: Future[bytes]) -> None:
        """Wake readers that wait for room."""
        with self._changed:
            self._changed.notify_all()

    def _used(self, key: Key, block: _Block, count: int | None) -> None:
        """Note that bytes of a block were read; drop it if they were the last, or if it failed (None)."""
        with self._changed:
            block.users -= 1
            block.unused -= count or 0
            if (count is None or block.unused <= 0) and block.users == 0 and self._blocks.get(key) is block:
                del self._blocks[key]
            self._changed.notify_all()
