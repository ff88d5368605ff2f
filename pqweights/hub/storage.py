"""A repository on the Hub as a storage: headers by ranged requests, weight files fetched ahead of whoever reads them.

Before `fetching`, whatever is read is asked for: small files whole, of others the range. Within it files are fetched whole
and read from the disk: into the cache that users of the Hub share, or, with low_disk, into a folder of the caller, two at a
time, and deleted on `release`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.storage import FileState, Origin, read_at
from pqweights.errors import HubError, OutputError, SourceError
from pqweights.hub.client import Hub, Interrupted, RemoteFile, Repository

# Whole in one request: configurations, indices, cards.
SMALL_BYTES = 32_000_000
# The first request for a header; the next ones ask for what the longest needed so far.
HEADER_BYTES = 1 << 16
MOST_AHEAD_OF_HEADER = 1 << 24
REQUESTS_AT_ONCE = 8
LOW_DISK_FILES = 2
DOWNLOADS_AT_ONCE = 2


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
        self._starts: dict[str, bytes] = {}  # of weight files, for their headers
        self._small: dict[str, bytes] = {}
        self._fetcher: _Fetcher | None = None

    @property
    def origin(self) -> Origin:
        """See Storage."""
        return self.repository.origin

    @property
    def frees(self) -> bool:
        """See Storage."""
        return self.low_disk

    def files(self) -> dict[str, FileState]:
        """See Storage; hidden files are not listed, as in a local folder."""
        return self._files

    def fetched_bytes(self, files: Sequence[str]) -> int:
        """See Storage."""
        return self.low_disk_bytes(files) if self.low_disk else 0

    def low_disk_bytes(self, files: Sequence[str]) -> int:
        """What they would take with low_disk."""
        return sum(sorted((self._files[file].byte_count for file in files), reverse=True)[:LOW_DISK_FILES])

    def expect(self, files: Sequence[str]) -> None:
        """See Storage: their first bytes are asked for, several at once."""
        most = HEADER_BYTES
        for file in files[:1]:
            self._start(file, most)
            most = min(max(most, _header_end(self._starts[file]) * 9 // 8), MOST_AHEAD_OF_HEADER)
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "pqweights-headers") as pool:
            for _ in pool.map(lambda file: self._start(file, most), files[1:]):
                pass

    def _start(self, file: str, most: int) -> None:
        count = min(most, self._files[file].byte_count)
        cached = self.hub.cached(self.repository, self._remote[file])
        if cached is None:
            self._starts[file] = self.hub.read(self.repository, file, 0, count)
        else:
            start = np.empty(count, dtype=np.uint8)
            read_at(cached, file, 0, start)
            self._starts[file] = start.tobytes()

    @contextlib.contextmanager
    def fetching(self, folder: Path, files: Sequence[str]) -> Iterator[None]:
        """See Storage."""
        self._starts.clear()

        def fetch(file: str, stop: Callable[[], bool]) -> Path:
            remote = self._remote[file]
            if not self.low_disk or self.hub.cached(self.repository, remote) is not None:
                return self.hub.download_to_cache(self.repository, remote, stop=stop)
            target = folder / remote.identity  # no name that the repository chose
            if not target.exists():
                self.hub.download(self.repository, remote, target, stop=stop)
            return target

        limit = LOW_DISK_FILES if self.low_disk else len(self._files)
        self._fetcher = _Fetcher(fetch, files, limit, 1 if self.low_disk else DOWNLOADS_AT_ONCE, folder)
        try:
            yield
        finally:
            self._fetcher.close()  # and stays: whoever still reads gets what is there, or Interrupted

    def release(self, file: str) -> None:
        """See Storage."""
        if self._fetcher is not None:
            self._fetcher.release(file, self._remote[file])

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
        start = self._starts.get(file)
        if start is not None and offset + count <= len(start):
            return start[offset : offset + count]
        remote = self._remote[file]
        if start is None and remote.byte_count <= SMALL_BYTES and not file.endswith(".safetensors"):
            if file not in self._small:
                self._small[file] = self.hub.read_whole(self.repository, remote)
            return self._small[file][offset : offset + count]
        cached = self.hub.cached(self.repository, remote)
        if cached is None:
            return self.hub.read(self.repository, file, offset, count)
        data = np.empty(count, dtype=np.uint8)
        read_at(cached, file, offset, data)
        return data.tobytes()


class _Fetcher:
    """Threads that fetch files in order, as many as the limit allows; a file that somebody waits for comes first."""

    def __init__(
        self,
        fetch: Callable[[str, Callable[[], bool]], Path],
        files: Sequence[str],
        limit: int,
        threads: int,
        folder: Path,
    ) -> None:
        self._fetch, self._limit, self._folder = fetch, limit, folder
        self._ahead = deque(files)
        self._urgent: deque[str] = deque()
        self._held: set[str] = set()  # being fetched, or there
        self._found: dict[str, Path | Exception] = {}
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
                with contextlib.suppress(ValueError):
                    self._ahead.remove(file)
                self._urgent.append(file)
                self._held.add(file)
                self._changed.notify_all()
            while file not in self._found:
                if self._stopped:
                    raise Interrupted
                self._changed.wait()
            found = self._found[file]
        if isinstance(found, Exception):
            raise found
        return found

    def release(self, file: str, remote: RemoteFile) -> None:
        """Let a file go, and delete it where it was fetched into the folder, now or by an earlier run."""
        with self._changed:
            self._held.discard(file)
            self._found.pop(file, None)
            (self._folder / remote.identity).unlink(missing_ok=True)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop fetching; what was fetched in part stays for the next run."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self) -> str | None:
        with self._changed:
            while not self._stopped:
                if self._urgent:
                    return self._urgent.popleft()
                if self._ahead and len(self._held) < self._limit:
                    file = self._ahead.popleft()
                    self._held.add(file)
                    return file
                self._changed.wait()
        return None

    def _work(self) -> None:
        while (file := self._next()) is not None:
            found: Path | Exception
            try:
                found = self._fetch(file, lambda: self._stopped)
            except (HubError, OutputError, OSError, Interrupted) as error:
                found = error
            with self._changed:
                self._found[file] = found
                self._changed.notify_all()


def _is_listed(repository: Repository, name: str) -> bool:
    """Whether a file is one to be seen: hidden ones are not.

    Raises SourceError for a name that would lead out of a folder, or means something else than it says.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(c in name for c in "\\\0") or ":" in parts[0]:
        raise SourceError(
            f"{repository.id}: lists a file {name[:80]!a}: expected a path inside the repository; do not use this repository"
        )
    return not any(part.startswith(".") for part in parts)


def _header_end(start: bytes) -> int:
    """Where the header of a safetensors file ends, by its first 8 bytes."""
    return 8 + int.from_bytes(start[:8], "little")
