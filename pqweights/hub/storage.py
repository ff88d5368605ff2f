"""A repository on the Hub as a storage: headers by ranged requests, weight files fetched ahead of whoever reads them.

Before `fetching`, whatever is read is asked for: small files whole, of others the range. Within it files are fetched whole
and read from the disk: into the cache that users of the Hub share, or, with low_disk, into a folder of the caller, two at a
time, and deleted on `release`.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.storage import FileState, Origin, read_at
from pqweights.errors import HubError, OutputError, SourceError
from pqweights.hub.client import Hub, Interrupted, Repository

# Whole in one request: configurations, indices, cards.
SMALL_BYTES = 32_000_000
# The first request for a header; the next ones ask for what the longest needed so far.
HEADER_BYTES = 1 << 16
MOST_HEADER_BYTES = 1 << 20
REQUESTS_AT_ONCE = 8
LOW_DISK_FILES = 2
DOWNLOADS_AT_ONCE = 2
PATIENCE_SECONDS = 1.0  # with a thread that is to stop


class HubStorage:
    """See Storage. low_disk: files are not kept."""

    def __init__(self, hub: Hub, repository: Repository, low_disk: bool = False) -> None:
        """Raises SourceError for a repository that lists a name which is none of a file in it."""
        self.hub, self.repository, self.low_disk = hub, repository, low_disk
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._remote = {name: file for name, file in repository.files.items() if _is_listed(repository, name)}
        self._files = {
            name: FileState(file.byte_count, int(file.identity[:15] or "0", 16)) for name, file in self._remote.items()
        }
        self._expected: deque[str] = deque()  # files whose headers are to be read
        self._starts: dict[str, bytes] = {}  # of some of them, until they are
        self._header_bytes = HEADER_BYTES
        self._headers: dict[str, str] = {}  # sha256 of those, with the length before them
        self._small: dict[str, bytes] = {}
        self._fetcher: _Fetcher | None = None

    @property
    def origin(self) -> Origin:
        """See Storage."""
        return self.repository.origin

    @property
    def frees(self) -> int:
        """See Storage."""
        return LOW_DISK_FILES if self.low_disk else 0

    def check_room(self, files: Sequence[str]) -> None:
        """Refuse to fetch what the disk of the cache cannot hold.

        Raises OutputError.
        """
        needed = sum(
            self._files[f].byte_count for f in files if self.hub.cached(self.repository, self._remote[f]) is None
        )
        free = self.hub.cache_room()
        if not self.low_disk and needed > free:
            raise OutputError(
                f"{self.repository.id}: its weights need {needed} bytes in the Hub's cache, {free} are free there: pass --low-disk, free "
                "some, or set HF_HOME to another disk"
            )

    def files(self) -> dict[str, FileState]:
        """See Storage; hidden files are not listed, as in a local folder."""
        return self._files

    def expect(self, files: Sequence[str]) -> None:
        """See Storage: once one of them is read, the first bytes of some more are asked for, several at once."""
        self._expected = deque(files)

    def _fetch_starts(self) -> None:
        """Of the next files, so that few wait in memory. The first tells how long headers are here."""
        count = REQUESTS_AT_ONCE * 4 if self._headers else 1
        batch = [self._expected.popleft() for _ in range(min(count, len(self._expected)))]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "pqweights-headers") as pool:
            for file, start in zip(batch, pool.map(self._start, batch), strict=True):
                self._starts[file] = start

    def _start(self, file: str) -> bytes:
        count = min(self._header_bytes, self._files[file].byte_count)
        cached = self.hub.cached(self.repository, self._remote[file])
        if cached is None:
            return self.hub.read(self.repository, file, 0, count)
        start = np.empty(count, dtype=np.uint8)
        read_at(cached, file, 0, start)
        return start.tobytes()

    def _check_header(self, file: str, path: Path) -> None:
        """The plan was made by a header that came by itself, before the file could be checked as a whole.

        Raises SourceError where it was another: then nothing that was made by it can stay.
        """
        digest = self._headers.get(file)
        if digest is not None:
            with open(path, "rb") as stream:
                start = stream.read(8)
                if hashlib.sha256(start + stream.read(int.from_bytes(start, "little"))).hexdigest() != digest:
                    raise SourceError(
                        f"{self.repository.id}: {file}: its header was damaged when it was fetched for the plan; nothing was kept: run "
                        "the same command again"
                    )

    @contextlib.contextmanager
    def fetching(self, folder: Path, files: Mapping[str, int]) -> Iterator[None]:
        """See Storage."""

        def fetch(file: str, stop: Callable[[], bool]) -> Path:
            remote = self._remote[file]
            if not self.low_disk or self.hub.cached(self.repository, remote) is not None:
                path = self.hub.download_to_cache(self.repository, remote, stop=stop)
            else:
                path = folder / self._local_name(file)
                if not path.exists():
                    self.hub.download(self.repository, remote, path, stop=stop)
            self._check_header(file, path)
            return path

        limit = LOW_DISK_FILES if self.low_disk else len(self._files)
        self._fetcher = _Fetcher(fetch, files, limit, 1 if self.low_disk else DOWNLOADS_AT_ONCE, folder)
        try:
            yield
        finally:
            self._fetcher.close()  # and stays: whoever still reads gets what is there, or Interrupted

    def release(self, file: str) -> None:
        """See Storage."""
        self._small.pop(file, None)
        if self._fetcher is not None:
            self._fetcher.release(file, self._local_name(file) if self.low_disk else None)

    def _local_name(self, file: str) -> str:
        """Of a file that is not kept: none that the repository chose, and another for files of equal content."""
        return f"{self._remote[file].identity}-{hashlib.sha256(file.encode()).hexdigest()[:8]}"

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """See Storage."""
        count = buffer.nbytes
        if self._fetcher is not None and file not in self._small:
            read_at(self._fetcher.path(file), file, offset, buffer)
        else:
            data = self._bytes(file, offset, count)
            if len(data) != count:
                raise SourceError(
                    f"{file}: expected {count} bytes at offset {offset}, found {len(data)}: it is shorter"
                )
            buffer[:] = np.frombuffer(data, dtype=np.uint8)
        with self._lock:
            self.bytes_read += count

    def _bytes(self, file: str, offset: int, count: int) -> bytes:
        """A range of a file that was not fetched."""
        while file in self._expected:
            self._fetch_starts()
        start = self._starts.get(file)
        if start is not None:
            data = start[offset : offset + count]
            if len(data) < count:
                data = self._range(file, offset, count)
            if offset == 8:  # the header, which follows its length
                self._headers[file] = hashlib.sha256(start[:8] + data).hexdigest()
                self._header_bytes = min(max(self._header_bytes, (8 + count) * 9 // 8), MOST_HEADER_BYTES)
                del self._starts[file]
            return data
        remote = self._remote[file]
        if not file.endswith(".safetensors") and (remote.byte_count <= SMALL_BYTES or count == remote.byte_count):
            data = self._small.get(file) or self.hub.read_whole(self.repository, remote)
            if remote.byte_count <= SMALL_BYTES:
                self._small[file] = data
            return data[offset : offset + count]
        return self._range(file, offset, count)

    def _range(self, file: str, offset: int, count: int) -> bytes:
        remote = self._remote[file]
        cached = self.hub.cached(self.repository, remote)
        if cached is None:
            return self.hub.read(self.repository, file, offset, count)
        data = np.empty(count, dtype=np.uint8)
        read_at(cached, file, offset, data)
        return data.tobytes()


class _Fetcher:
    """Threads that fetch files in order, as many as there is room for; a file that somebody waits for comes first."""

    def __init__(
        self,
        fetch: Callable[[str, Callable[[], bool]], Path],
        files: Mapping[str, int],
        limit: int,
        threads: int,
        folder: Path,
    ) -> None:
        self._fetch, self._limit, self._folder, self._together = fetch, limit, folder, dict(files)
        self._ahead = deque(files)
        self._held: set[str] = set()  # being fetched, or there
        self._found: dict[str, Path | BaseException] = {}
        self._asked_again: set[str] = set()
        self._changed = threading.Condition()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"pqweights-fetch-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def path(self, file: str) -> Path:
        """Where a file is, once it is there.

        Raises what kept it from coming.
        """
        with self._changed:
            if file not in self._held:
                if file not in self._together:  # nobody foresaw it
                    self._together[file] = len(self._held) + 1
                with contextlib.suppress(ValueError):
                    self._ahead.remove(file)
                self._ahead.appendleft(file)
                self._changed.notify_all()
            while True:
                while file not in self._found:
                    if self._stopped:
                        raise Interrupted
                    self._changed.wait()
                found = self._found[file]
                if not isinstance(found, BaseException):
                    return found
                if file in self._asked_again or not isinstance(found, HubError):
                    raise found
                # It failed while nobody needed it: the Hub may be well again.
                self._asked_again.add(file)
                del self._found[file]
                self._held.discard(file)
                self._ahead.appendleft(file)
                self._changed.notify_all()

    def release(self, file: str, name: str | None) -> None:
        """Let a file go; name: under which it is deleted, where an earlier run or this one fetched it into the folder."""
        with self._changed:
            if name is not None:
                self._held.discard(file)
                self._found.pop(file, None)
                (self._folder / name).unlink(missing_ok=True)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop fetching; what was fetched in part stays for the next run.

        A thread that waits for bytes that do not come is left behind: it writes nothing any more.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def _next(self) -> str | None:
        with self._changed:
            while not self._stopped:
                if self._ahead and len(self._held) < max(self._limit, self._together[self._ahead[0]]):
                    file = self._ahead.popleft()
                    self._held.add(file)
                    return file
                self._changed.wait()
        return None

    def _work(self) -> None:
        while (file := self._next()) is not None:
            found: Path | BaseException | None = None
            try:
                found = self._fetch(file, lambda: self._stopped)
            except (HubError, OutputError, SourceError, OSError, Interrupted) as error:
                found = error
            finally:  # whoever waits hears of a bug, too, which keeps its traceback
                with self._changed:
                    self._found[file] = found or sys.exception() or Interrupted()
                    self._changed.notify_all()


def _is_listed(repository: Repository, name: str) -> bool:
    """Whether a file is one to be seen: hidden ones are not.

    Raises SourceError for a name that would lead out of a folder, or means something else than it says.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or ":" in parts[0] or not name.isprintable():
        raise SourceError(
            f"{repository.id}: lists a file {name[:80]!a}: expected the path of a file in it, in printable characters; do not use this repository"
        )
    return not any(part.startswith(".") for part in parts)
