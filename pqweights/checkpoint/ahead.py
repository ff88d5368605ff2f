"""Bytes of other machines, fetched ahead of the threads that read them: whole files, or ranges of files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
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


# The first bytes of a weight file that are requested for its header, and how many files at once, few, so that little
# waits in memory.
HEADER_BYTES = 1 << 16
MOST_HEADER_BYTES = 1 << 20
HEADERS_AT_ONCE = 32
# Files without tensors up to this size come whole.
SMALL_BYTES = 32_000_000
# Larger reads are of whole blocks. So many are fetched behind the one that is needed if a file is read in order.
LARGE_READ_BYTES = 1 << 18
BLOCK_BYTES = 8 << 20
BLOCKS_AHEAD = 4
MOST_HELD_BYTES = SMALL_BYTES + 10 * BLOCK_BYTES
REQUESTS_AT_ONCE = 8
READERS_AT_ONCE = 8
# How often a reader that waits for a range looks whether it shall stop.
LOOK_SECONDS = 0.2

Range = tuple[str, int, int]  # a file, and where the range starts and ends


class RangeCache:
    """Ranges of files elsewhere, which many threads read: starts of weight files, whole small files, and blocks.

    One request for each chunk that is read would wait for as many replies as there are chunks; a connection reaches its
    rate with large requests alone, and a network with several of them.
    """

    def __init__(self, request: Callable[[str, int, int], bytes], size_of: Callable[[str], int]) -> None:
        """Take what makes requests.

        request: called with a file, a start and an end; returns the bytes
        size_of: returns the size of a file in bytes
        """
        self._request, self._size_of = request, size_of
        self._held: OrderedDict[Range, Future[bytes]] = OrderedDict()  # the least recently used first
        self._expected: deque[str] = deque()  # files whose headers are read next
        self._starts: dict[str, Range] = {}  # that were requested for headers
        self._header_bytes = 0  # the longest header so far, with some room
        self._last: dict[str, int] = {}  # the block of each file that was needed last
        self._pool: ThreadPoolExecutor | None = None
        self._readers = threading.Semaphore(READERS_AT_ONCE)
        self._lock = threading.Lock()
        self.stopped = False  # readers that wait give up

    @staticmethod
    def memory_bytes() -> int:
        """Return how many bytes it may hold; a reply under way is held in pieces as well."""
        return MOST_HELD_BYTES + (READERS_AT_ONCE + REQUESTS_AT_ONCE) * BLOCK_BYTES

    def expect(self, files: Sequence[str]) -> None:
        """Note the weight files whose headers are read next, in this order: the starts of several are requested."""
        self._expected = deque(files)

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer with bytes of a file from `offset` on, all of which must lie inside of it.

        Raises what `request` raises, TransferStopped while `stopped`.
        """
        done = 0
        if not self._size_of(file):
            self._request(file, 0, 0)  # which checks that it is there, and empty
        while file in self._expected:
            self._request_starts()
        while done < len(buffer):
            at, left = offset + done, len(buffer) - done
            with self._readers:
                wanted = self._range_at(file, at, left)
                start = at if wanted is None else wanted[1]
                data = self._request(file, at, at + left) if wanted is None else self._content(wanted)
                count = min(start + len(data) - at, left)
                buffer[done : done + count] = np.frombuffer(data, dtype=np.uint8, count=count, offset=at - start)
            done += count
        if offset == 8 and self._starts.pop(file, None) is not None:  # the header follows 8 bytes of length
            self._header_bytes = min(max(self._header_bytes, (8 + done) * 9 // 8), MOST_HEADER_BYTES)

    def _request_starts(self) -> None:
        """Request the starts of the next files. The first file comes alone; it shows how long headers are here."""
        count = HEADERS_AT_ONCE if self._header_bytes else 1
        with self._lock:
            for file in [self._expected.popleft() for _ in range(min(count, len(self._expected)))]:
                end = min(max(HEADER_BYTES, self._header_bytes), self._size_of(file))
                self._starts[file] = file, 0, end
                self._requested(self._starts[file])

    def _range_at(self, file: str, offset: int, count: int) -> Range | None:
        """Return the range with a byte that is held for a read of so many bytes; None for a read by itself."""
        size = self._size_of(file)
        if (start := self._starts.get(file)) is not None:
            return start if offset < start[2] else None
        if not file.endswith(".safetensors") and (size <= SMALL_BYTES or count == size):
            return file, 0, size
        block = self._block(file, offset // BLOCK_BYTES)
        if count < LARGE_READ_BYTES and block not in self._held:
            return None
        with self._lock:
            self._requested(block)
            number = block[1] // BLOCK_BYTES
            if 0 < number - self._last.get(file, -1) <= BLOCKS_AHEAD:  # the file is read in order
                for ahead in range(number + 1, min(number + BLOCKS_AHEAD, (size - 1) // BLOCK_BYTES) + 1):
                    self._requested(self._block(file, ahead))
            self._last[file] = number
        return block

    def _block(self, file: str, number: int) -> Range:
        return file, number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self._size_of(file))

    def _requested(self, wanted: Range) -> Future[bytes]:
        """Return a range, which takes the place of those that were not used for the longest time if it is new."""
        requested = self._held.pop(wanted, None)
        if requested is None:
            self._pool = self._pool or ThreadPoolExecutor(REQUESTS_AT_ONCE, "pqweights-ranges")
            requested = self._pool.submit(self._request, *wanted)
        self._held[wanted] = requested
        while sum(end - start for _, start, end in self._held) > MOST_HELD_BYTES:
            self._held.popitem(last=False)  # its readers keep it
        return requested

    def _content(self, wanted: Range) -> bytes:
        """Wait for the bytes of a range."""
        with self._lock:
            requested = self._requested(wanted)
        while not requested.done():
            if self.stopped:
                raise TransferStopped
            concurrent.futures.wait([requested], timeout=LOOK_SECONDS)
        if requested.exception() is not None:
            with self._lock:  # it is requested again when it is needed again
                if self._held.get(wanted) is requested:
                    del self._held[wanted]
        return requested.result()
