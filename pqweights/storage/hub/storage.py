"""A repository on the Hub as a storage: headers by requests for ranges, weight files fetched ahead of their readers.

Outside `fetching`, each read is a request: small files come whole, of others only the range. Inside it, files are
fetched whole and read from the disk. They go into the shared cache; or, with low_disk, into a folder of the caller, two
at a time, and `release` deletes them. (Blocks, as object storage is read in, are of no use here: the Hub lists a hash
of each whole file, so a file must be on the disk and checked before a byte of it is used.)
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.file_reader import FileReader, FileState, state_at
from pqweights.checkpoint.header import HeaderStarts
from pqweights.checkpoint.storage import Origin, Storage
from pqweights.checkpoint.writer import DiskNeed, free_bytes
from pqweights.common.threads import ProcessLock
from pqweights.errors import HubError, OutputError, SourceError
from pqweights.storage.addresses import is_inside
from pqweights.storage.hub.client import Hub
from pqweights.storage.hub.repository import RemoteFile, Repository
from pqweights.storage.hub.transfers import (
    cache_folder,
    cached,
    fetch_to,
    fetch_to_cache,
    read_range,
    read_whole,
    refuse_offline,
)
from pqweights.storage.remote.failures import Stop, TransferStopped

# Files up to this size come whole in one request: configurations, indices, cards.
SMALL_BYTES = 32_000_000
LOW_DISK_FILES = 2
DOWNLOADS_AT_ONCE = 2
STOP_SECONDS = 1.0  # how long to wait for a thread that is to stop


class HubStorage(Storage):
    """A repository at one commit, see Storage.

    hub: sends the requests
    repository: what is read
    low_disk: whether fetched files are deleted when they are no longer needed
    bytes_read: how many bytes were read so far
    """

    def __init__(self, hub: Hub, repository: Repository, low_disk: bool = False) -> None:
        """Raises SourceError if the repository lists a name that cannot be that of a file in it."""
        self.hub, self.repository, self.low_disk = hub, repository, low_disk
        self.bytes_read = 0
        self._lock = ProcessLock()
        self._remote = {name: file for name, file in repository.files.items() if _is_listed(repository, name)}
        self._files = {
            name: FileState(file.byte_count, int(file.content_hash[:15] or "0", 16))
            for name, file in self._remote.items()
        }
        self._starts = HeaderStarts(self._range, self._size_of)
        self._small: dict[str, bytes] = {}
        self._fetcher: _Fetcher | None = None
        self._folder = Path()  # where files are fetched to
        self._reader = FileReader()
        self._fetched: dict[str, tuple[Path, FileState]] = {}  # where files lie, and what they were when checked
        self._unchecked: set[str] = set()  # those that were read since `check_read`

    def __getstate__(self) -> dict[str, Any]:
        of_this_process: dict[str, Any] = {"_fetcher": None, "_folder": Path(), "_fetched": {}, "_unchecked": set()}
        return vars(self) | of_this_process

    @property
    def origin(self) -> Origin:
        """The repository and its commit."""
        return self.repository.origin

    @property
    def frees(self) -> int:
        """How many fetched files are held at once; 0 if they stay."""
        return LOW_DISK_FILES if self.low_disk else 0

    def __str__(self) -> str:
        return self.repository.id

    def files(self) -> dict[str, FileState]:
        """Return the state of every file by its path, in sorted order; without hidden files, as in a local folder."""
        return self._files

    def disk_need(self, files: Sequence[str]) -> DiskNeed | None:
        """Return what these files will take in the Hub's cache, as far as they are not there; see Storage."""
        if self.low_disk:
            return None
        needed = sum(self._files[file].byte_count for file in files if self._cached(file) is None)
        return DiskNeed(
            folder=cache_folder(self.hub),
            byte_count=needed,
            what=f"{self.repository.id}: its weights need {needed} bytes in the Hub's cache",
            remedy="pass `low_disk`, or set HF_HOME to a folder on another disk",
        )

    def keep(self, files: Sequence[str], progress: Callable[[int, int, str], None]) -> None:
        """Fetch files into the Hub's cache, unless `low_disk` leaves none there; see Storage."""
        need, done = self.disk_need(files), 0
        if need is None or need.missing > free_bytes(need.folder):
            return
        for file in files:

            def show(count: int, file: str = file, byte_count: int = need.byte_count) -> None:
                nonlocal done
                done += count
                progress(done, byte_count, file)

            if self._cached(file) is None:
                fetch_to_cache(self.hub, self.repository, self._remote[file], show=show)

    def expect(self, files: Sequence[str]) -> None:
        """Prepare to read the headers of these files: once one is read, the first bytes of more are requested."""
        self._starts.expect(files)

    @contextlib.contextmanager
    def fetching(self, folder: Path, files: Mapping[str, int]) -> Iterator[None]:
        """Fetch files ahead while the context is open, see Storage."""
        self._folder = folder
        self._fetcher = _Fetcher(
            self._fetch,
            files,
            limit=LOW_DISK_FILES if self.low_disk else len(self._files),
            threads=1 if self.low_disk else DOWNLOADS_AT_ONCE,
        )
        try:
            yield
        finally:
            # The attribute stays: threads that still read get what is there, or TransferStopped.
            self._fetcher.close()

    def release(self, file: str) -> None:
        """Note that a file is no longer needed."""
        self._small.pop(file, None)
        if self._fetcher is not None and self.low_disk:
            with self._lock:
                self._fetched.pop(file, None)
            path = self._own_path(file)
            self._reader.forget(path)
            path.unlink(missing_ok=True)  # even if an earlier run fetched it
            self._fetcher.release(file)

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer with bytes of a file from `offset` on, see Storage."""
        count = buffer.nbytes
        if self._fetcher is not None and file not in self._small:
            path = self._fetcher.path(file)
            self._reader.read_into(path, file, offset, buffer, expected=self._fetched[file][1])
        else:
            data = self._requested(file, offset, count)
            if len(data) != count:
                raise SourceError(
                    f"{file}: expected {count} bytes at offset {offset}, found {len(data)}: it is shorter"
                )
            buffer[:] = np.frombuffer(data, dtype=np.uint8)
        with self._lock:
            self.bytes_read += count
            self._unchecked.add(file)

    def check_read(self) -> None:
        """See Storage. Fetched files lie on this machine; what was requested is of the commit."""
        with self._lock:  # no file is released meanwhile
            for file in sorted(self._unchecked & self._fetched.keys()):
                path, state = self._fetched[file]
                state.check(file, state_at(path))
            self._unchecked.clear()

    def check_unchanged(self, files: Iterable[str] = ()) -> None:
        """See Storage. Of fetched files, those that are not released are checked; the commit does not change."""
        with self._lock:
            for file, (path, state) in sorted(self._fetched.items()):
                state.check(file, state_at(path, surely=True))

    def _fetch(self, file: str, stop: Stop) -> Path:
        """Fetch a whole file and return its path."""
        remote = self._remote[file]
        if not self.low_disk or self._cached(file) is not None:
            path = fetch_to_cache(self.hub, self.repository, remote, stop=stop)
        else:
            path = self._own_path(file)
            if not path.exists():
                fetch_to(self.hub, self.repository, remote, path, stop=stop)
        self._reader.forget(path)  # headers may have been read of a damaged file that was there before
        self._check_header(file, path)
        with self._lock:
            self._fetched[file] = path, FileState.of(path.stat())
        return path

    def _own_path(self, file: str) -> Path:
        """Where a file lies until `release`. The name is not chosen by the repository, and unique."""
        name = f"{self._remote[file].content_hash}-{hashlib.sha256(file.encode()).hexdigest()[:8]}"
        return self._folder / name

    def _check_header(self, file: str, path: Path) -> None:
        """Check the header that the plan was made from, which came by itself, before the whole file could be checked.

        Raises SourceError if it was another one; no result of such a plan may stay.
        """
        digest = self._starts.digests.get(file)
        if digest is not None:
            with open(path, "rb") as stream:
                start = stream.read(8)
                if hashlib.sha256(start + stream.read(int.from_bytes(start, "little"))).hexdigest() != digest:
                    raise SourceError(
                        f"{self.repository.id}: {file}: its header was damaged when it was fetched for the plan: run "
                        "the same command again"
                    )

    def _requested(self, file: str, offset: int, count: int) -> bytes:
        """Return bytes of a file that is not fetched as a whole; fewer if the file is shorter."""
        start = self._starts.read(file, offset, count)
        if start is not None:
            return start
        remote = self._remote[file]
        if not file.endswith(".safetensors") and (remote.byte_count <= SMALL_BYTES or count == remote.byte_count):
            data = self._small.get(file) or self._cached_whole(remote)
            data = data or read_whole(self.hub, self.repository, remote)
            if remote.byte_count <= SMALL_BYTES:
                self._small[file] = data
            return data[offset : offset + count]
        return self._range(file, offset, count)

    def _size_of(self, file: str) -> int:
        return self._files[file].byte_count

    def _range(self, file: str, offset: int, count: int) -> bytes:
        path = self._cached(file)
        if path is None:
            return read_range(self.hub, self.repository, file, start=offset, count=count)
        data = np.empty(count, dtype=np.uint8)
        self._reader.read_into(path, file, offset, data)
        return data.tobytes()

    def _cached_whole(self, remote: RemoteFile) -> bytes | None:
        """Return a whole file from the cache; None if it is not there, or damaged."""
        path = self._cached(remote.name)
        data = None if path is None else path.read_bytes()
        return data if data is not None and remote.has_content([data]) else None

    def check_cached(self, files: Iterable[str]) -> None:
        """Raise HubError for the first of some files that cannot be had, because the Hub is switched off."""
        if self.hub.is_offline:
            for file in files:
                if self._cached(file) is None:
                    refuse_offline(self.hub, self.repository, file)

    def _cached(self, file: str) -> Path | None:
        return cached(self.hub, self.repository, self._remote[file])


def _is_listed(repository: Repository, name: str) -> bool:
    """Return whether a file is visible: hidden files are not listed, as in a local folder.

    Raises SourceError for a name that would lead out of a folder, or that does not mean what it displays.
    """
    if not is_inside(name):
        raise SourceError(
            f"{repository.id}: lists a file {name[:80]!a}: expected a path inside the repository, in printable "
            "characters; do not use this repository"
        )
    return not any(part.startswith(".") for part in name.split("/"))


class _Fetcher:
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
            except (HubError, OutputError, SourceError, OSError, TransferStopped) as error:
                outcome = error
            finally:  # readers are told of any other exception too; it keeps its traceback
                with self._changed:
                    self._outcomes[file] = outcome or sys.exception() or TransferStopped()
                    self._changed.notify_all()
