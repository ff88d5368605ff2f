"""Threads that fetch files ahead of their readers, in the order in which they are read.

remote/blocks.py does so for blocks of object storage. Nothing of it is of use here: the Hub lists a hash of each whole
file, so a file must be on the disk and checked before a byte of it is used, and the caller says when it is needed no
more; a block is held in memory, checked by its version, and dropped when others are read.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from pqweights.errors import HubError, OutputError, SourceError
from pqweights.storage.remote.attempts import Stop, TransferStopped

STOP_SECONDS = 1.0  # how long to wait for a thread that is to stop


class Fetcher:
    """Fetches files in order, as many as there is room for. A file that a reader waits for comes first."""

    def __init__(
        self, fetch: Callable[[str, Stop], Path], files: Mapping[str, int], *, limit: int, threads: int, folder: Path
    ) -> None:
        """Start the threads.

        fetch: fetches a file and returns its path; asked to stop by its second argument
        files: for each file, how many files are needed together when it is first read
        limit: how many files are held at once, unless more are needed together
        threads: how many threads fetch
        folder: where `release` deletes files
        """
        self._fetch, self._limit, self._folder, self._together = fetch, limit, folder, dict(files)
        self._ahead = deque(files)
        self._held: set[str] = set()  # those being fetched, and those that are there
        self._found: dict[str, Path | BaseException] = {}
        self._retried: set[str] = set()
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
                if file not in self._together:  # not among the files that were announced
                    self._together[file] = len(self._held) + 1
                with contextlib.suppress(ValueError):
                    self._ahead.remove(file)
                self._fetch_next(file)
            while True:
                while file not in self._found:
                    if self._stopped:
                        raise TransferStopped
                    self._changed.wait()
                found = self._found[file]
                if not isinstance(found, BaseException):
                    return found
                if file in self._retried or not isinstance(found, HubError):
                    raise found
                # It failed before anybody needed it: the Hub may be well again.
                self._retried.add(file)
                del self._found[file]
                self._held.discard(file)
                self._fetch_next(file)

    def release(self, file: str, name: str | None) -> None:
        """Let go of a file that is no longer needed.

        name: the name in the folder under which it is deleted, even if an earlier run fetched it; None to keep it
        """
        with self._changed:
            if name is not None:
                self._held.discard(file)
                self._found.pop(file, None)
                (self._folder / name).unlink(missing_ok=True)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop fetching. What was fetched in part stays for the next run.

        A thread that waits for bytes that do not come is left behind; it writes nothing more.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(STOP_SECONDS)

    def _fetch_next(self, file: str) -> None:
        self._ahead.appendleft(file)
        self._changed.notify_all()

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
            found: Path | BaseException | None = None
            try:
                found = self._fetch(file, lambda: self._stopped)
            except (HubError, OutputError, SourceError, OSError, TransferStopped) as error:
                found = error
            finally:  # readers are told of any other exception too; it keeps its traceback
                with self._changed:
                    self._found[file] = found or sys.exception() or TransferStopped()
                    self._changed.notify_all()
