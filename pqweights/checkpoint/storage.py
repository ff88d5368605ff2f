"""Where a checkpoint's files lie: names, sizes and positioned reads. The seam at which a Hub repository joins.

Reads are positioned reads into the caller's buffer, never memory maps: mapped pages would count as resident memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.errors import SourceError


@dataclass(frozen=True)
class FileState:
    """Size of a file, and a stamp that tells that it changed: its modification time, or what its content hashes to."""

    byte_count: int
    stamp: int


class Origin(NamedTuple):
    """Where files come from that are not on this machine: a repository of the Hub, and the commit."""

    id: str
    revision: str


class Storage(Protocol):
    """Read access to a folder of files."""

    bytes_read: int  # so far, by all threads

    @property
    def origin(self) -> Origin | None:
        """The repository and its commit; None for a local folder."""
        ...

    @property
    def frees(self) -> int:
        """How many files are held at once, as `release` deletes them; 0 where they stay."""
        ...

    def files(self) -> dict[str, FileState]:
        """Relative POSIX path -> state, for every regular file, in sorted order."""
        ...

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer from `offset`.

        Raises SourceError where the file ends early, HubError where it cannot be fetched.
        """
        ...

    def expect(self, files: Sequence[str]) -> None:
        """The headers of these files will be read next."""
        ...

    def fetching(self, folder: Path, files: Mapping[str, int]) -> contextlib.AbstractContextManager[None]:
        """Meanwhile these files are read, in this order: they are fetched ahead, into `folder` if not elsewhere.

        files: how many of them are needed together when the file is first read.
        """
        ...

    def release(self, file: str) -> None:
        """A file is no longer needed."""
        ...


def read_bytes(storage: Storage, file: str, offset: int, count: int) -> bytes:
    """`count` bytes from `offset`."""
    buffer = np.empty(count, dtype=np.uint8)
    storage.read_into(file, offset, buffer)
    return buffer.tobytes()


def read_file(storage: Storage, file: str, limit: int = 256_000_000) -> bytes:
    """A whole small file.

    Raises SourceError above `limit` bytes: no configuration or index is that large.
    """
    size = storage.files()[file].byte_count
    if size > limit:
        raise SourceError(f"{file}: expected at most {limit} bytes, found {size}")
    return read_bytes(storage, file, 0, size)


class LocalStorage:
    """A folder, or some files of it, on this machine. Hidden files and folders are not listed.

    origin: where the folder was fetched from.
    """

    def __init__(self, root: Path, only: Sequence[str] | None = None, origin: Origin | None = None) -> None:
        self.root = root
        self._origin = origin
        self.bytes_read = 0
        self._lock = threading.Lock()
        names = sorted(self._walk()) if only is None else only
        self._files = {}
        for name in names:
            status = os.stat(root / name)
            self._files[name] = FileState(status.st_size, status.st_mtime_ns)

    def _walk(self) -> list[str]:
        """Names of all files; links are followed, but never into a folder that was already seen."""
        found: list[str] = []
        seen = set()
        for folder, subfolders, names in os.walk(self.root, followlinks=True):
            real = os.path.realpath(folder)
            if real in seen:
                subfolders.clear()
                continue
            seen.add(real)
            subfolders[:] = sorted(s for s in subfolders if not s.startswith("."))
            for name in names:
                path = Path(folder) / name
                relative = path.relative_to(self.root).as_posix()
                if name.startswith("."):
                    continue
                if path.is_symlink() and not path.exists():
                    raise SourceError(f"{relative}: a link to a file that is not there: fetch it again")
                if path.is_file():
                    found.append(relative)
        return found

    @property
    def origin(self) -> Origin | None:
        """See Storage."""
        return self._origin

    @property
    def frees(self) -> int:
        """See Storage; the files are the user's."""
        return 0

    def files(self) -> dict[str, FileState]:
        """See Storage.files."""
        return self._files

    def expect(self, files: Sequence[str]) -> None:
        """See Storage; they are there."""

    def fetching(self, folder: Path, files: Mapping[str, int]) -> contextlib.AbstractContextManager[None]:
        """See Storage; they are there."""
        return contextlib.nullcontext()

    def release(self, file: str) -> None:
        """See Storage; they stay."""

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """See Storage.read_into."""
        read_at(self.root / file, file, offset, buffer)
        with self._lock:
            self.bytes_read += buffer.nbytes


def read_at(path: Path, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
    """Fill the buffer from `offset` of a file on this machine.

    Raises SourceError, which calls it `file`, where it ends early.
    """
    # Opened for each read: a checkpoint may have more files than a process may hold open.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        view = buffer.data
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count == 0:
                raise SourceError(
                    f"{file}: expected {len(view)} bytes at offset {offset}, found the end of the file after {done}; "
                    "it was cut while it was being read: fetch it again"
                )
            done += count
    finally:
        os.close(descriptor)
