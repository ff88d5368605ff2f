"""Bytes of other machines, fetched ahead of the threads that read them: whole files, or blocks of files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqweights.errors import PqweightsError

STOP_SECONDS = 1.0  # how long to wait for a thread that is to stop

Stop = Callable[[], bool]  # whether to stop


class TransferStopped(Exception):
    """A transfer was stopped by this program, because something else failed or the user asked for it."""


class FileFetcher:
    """Fetches files in order, as many as there is room for. A file that a reader waits for comes first."""

    def __init__(
        self, fetch: Callable[[str, Stop], Path], files: Mapping[str, int], *, limit: int, threads: int
    ) -> None:
        """Start the threads.

        fetch: fetches a file and returns its path; asked to stop by its second argument
        files: for each file, how many files are needed together when it is first read
        limit: how many files are held at once, unless more are needed together
        threads: how many threads fetch
        """
        self._fetch, self._limit, self._together = fetch, limit, dict(files)
        self._ahead = deque(files)
        self._held: set[str] = set()  # those being fetched, and those that are there
        self._outcomes: dict[str, Path | BaseException] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"pqweights-fetch-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def path(self, file: str) -> Path:
        """Wait for a file and return its path.

        Raises the error with which fetching it failed, TransferStopped after `close`.
        """
        with self._changed:
            if file not in self._held:
                self._together.setdefault(file, len(self._held) + 1)  # if it was not announced
                with contextlib.suppress(ValueError):
                    self._ahead.remove(file)
                self._ahead.appendleft(file)
                self._changed.notify_all()
            while file not in self._outcomes:
                if self._stopped:
                    raise TransferStopped
                self._changed.wait()
            outcome = self._outcomes[file]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def release(self, file: str) -> None:
        """Let go of a file that was deleted."""
        with self._changed:
            self._held.discard(file)
            self._outcomes.pop(file, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop fetching. A thread that waits for bytes that do not come is left behind; it writes nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(STOP_SECONDS)

    def _take(self) -> str | None:
        """Wait for room and take the next file; None after `close`."""
        with self._changed:
            while not self._stopped:
                if self._ahead and len(self._held) < max(self._limit, self._together[self._ahead[0]]):
                    file = self._ahead.popleft()
                    self._held.add(file)
                    return file
                self._changed.wait()
        return None

    def _work(self) -> None:
        while (file := self._take()) is not None:
            outcome: Path | BaseException | None = None
            try:
                outcome = self._fetch(file, lambda: self._stopped)
            except (PqweightsError, OSError, TransferStopped) as error:
                outcome = error
            finally:  # readers are told of any other exception too; it keeps its traceback
                with self._changed:
                    self._outcomes[file] = outcome or sys.exception() or TransferStopped()
                    self._changed.notify_all()


BLOCK_BYTES = 8 << 20
FETCHING_THREADS = 6
# Blocks that are fetched behind the one that is needed, how many are held in all, and how many more are waited for.
BLOCKS_AHEAD = 4
MOST_BLOCKS = 10
READERS_AT_ONCE = 8
# How often a reader that waits for a block looks whether it shall stop.
LOOK_SECONDS = 0.2


class BlockCache:
    """Blocks of files that are read by many threads in chunks that lie in a row.

    One request for each chunk would wait for as many replies as there are chunks; a connection reaches its rate with
    large requests alone, and a network with several of them.
    """

    def __init__(self, fetch: Callable[[str, int, int], bytes], size_of: Callable[[str], int]) -> None:
        """Take what makes requests.

        fetch: called with a file, a start and an end; returns the bytes
        size_of: returns the size of a file in bytes
        """
        self._fetch, self._size_of = fetch, size_of
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()  # the least recently used first
        self._last: dict[str, int] = {}  # the block of each file that was needed last
        self._pool: ThreadPoolExecutor | None = None
        self._readers = threading.Semaphore(READERS_AT_ONCE)
        self._lock = threading.Lock()
        self.stopped = False  # readers that wait give up

    @staticmethod
    def memory_bytes() -> int:
        """Return how many bytes it may hold; a reply under way is held in pieces as well."""
        return (MOST_BLOCKS + READERS_AT_ONCE + FETCHING_THREADS) * BLOCK_BYTES

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer with bytes of a file from `offset` on, all of which must lie inside of it.

        Raises what `fetch` raises, TransferStopped while `stopped`.
        """
        done = 0
        while done < len(buffer):
            number, at = divmod(offset + done, BLOCK_BYTES)
            count = min(BLOCK_BYTES - at, len(buffer) - done)
            with self._readers:
                data = self._content(file, number)
                buffer[done : done + count] = np.frombuffer(data, dtype=np.uint8, count=count, offset=at)
            done += count

    def holds(self, file: str, offset: int) -> bool:
        """Whether the block with a byte is held or was requested."""
        return (file, offset // BLOCK_BYTES) in self._blocks

    def _content(self, file: str, number: int) -> bytes:
        """Return the bytes of a block, and have those fetched that follow it if the file is read in order."""
        with self._lock:
            block = self._requested(file, number)
            is_next = 0 < number - self._last.get(file, -1) <= BLOCKS_AHEAD
            self._last[file] = number
            for ahead in range(number + 1, number + 1 + BLOCKS_AHEAD) if is_next else ():
                if ahead * BLOCK_BYTES < self._size_of(file):
                    self._requested(file, ahead)
        while not block.done():
            if self.stopped:
                raise TransferStopped
            concurrent.futures.wait([block], timeout=LOOK_SECONDS)
        if block.exception() is not None:
            with self._lock:  # it is requested again when it is needed again
                if self._blocks.get((file, number)) is block:
                    del self._blocks[file, number]
        return block.result()

    def _requested(self, file: str, number: int) -> Future[bytes]:
        """Return a block, which takes the place of the one that was not used for the longest time if it is new."""
        if (file, number) not in self._blocks:
            self._pool = self._pool or ThreadPoolExecutor(FETCHING_THREADS, "pqweights-blocks")
            start, size = number * BLOCK_BYTES, self._size_of(file)
            self._blocks[file, number] = self._pool.submit(self._fetch, file, start, min(start + BLOCK_BYTES, size))
            if len(self._blocks) > MOST_BLOCKS:
                self._blocks.popitem(last=False)  # its readers keep it
        self._blocks.move_to_end((file, number))
        return self._blocks[file, number]
