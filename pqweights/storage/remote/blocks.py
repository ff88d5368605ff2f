"""Large blocks of remote files: a bounded number in memory, fetched by a few threads before they are needed.

A weight is read by many threads in chunks that lie in a row. One request for each would wait for as many replies as
there are chunks; a connection reaches its rate with large requests alone, and a network with several of them.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from pqweights.storage.remote.failures import TransferStopped

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
