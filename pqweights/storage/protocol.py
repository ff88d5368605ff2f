"""What a store of results can do, whichever machine it is on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pqweights.checkpoint.ahead import Stop
from pqweights.common.documents import Count
from pqweights.storage.addresses import Address

__all__ = ["CheckLock", "FileRecord", "Stop", "Store"]

# Raises OutputError if another process has taken the store over.
CheckLock = Callable[[], None]


@dataclass(frozen=True)
class FileRecord:
    """The size and sha256 of a file without tensors."""

    bytes: Count
    sha256: str


class Store(Protocol):
    """A folder in which a result is made. Its text names it in messages. It may be pickled.

    Files have names relative to it. Everything unfinished lies in its work folder, WORK_FOLDER, which readers of the
    result ignore. Every method raises OutputError for what this machine refuses, StorageError for what a server does.
    """

    @property
    def work(self) -> Path:
        """The folder on this machine in which files are made; for a store on this machine, its work folder."""
        ...

    @property
    def is_elsewhere(self) -> bool:
        """Whether files that are made in `work` are then sent to another machine."""
        ...

    def check_apart(self, source: Path | Address) -> None:
        """Raise OutputError if the store is, holds, or lies within the source."""
        ...

    def check_names(self, names: Collection[str]) -> None:
        """Raise OutputError or StorageError if files of these names cannot be written, so that no work is in vain."""
        ...

    def names(self) -> set[str]:
        """Return the names of the files and folders at its top. Raises OutputError if it is a file."""
        ...

    def sizes(self, below: str = "") -> Mapping[str, int]:
        """Return the sizes in bytes of all files by name, without hidden ones, but with those in the folder `below`.

        below: a folder in it, hidden or not, to which the list is limited
        """
        ...

    def modified(self, name: str) -> int:
        """Return when a file was written, in nanoseconds since 1970; a store that tells no times says: always later."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is not there."""
        ...

    def write(self, name: str, pieces: Iterable[bytes]) -> FileRecord:
        """Write a small file; it is there with all of its content, or not at all."""
        ...

    def put(self, name: str, path: Path, stop: Stop) -> None:
        """Move a complete file of this machine, which lies in `work`, to a name in the store.

        stop: asked while it is sent; raises TransferStopped once it returns True
        """
        ...

    def move(self, source: str, target: str) -> None:
        """Rename a file; nothing happens if that was done before."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and folders that this leaves empty; those that are not there are no problem."""
        ...

    def lock(self, may_take: Callable[[], None]) -> contextlib.AbstractContextManager[CheckLock]:
        """Make the work folder, and hold its lock. Raises OutputError if another process of this machine holds it.

        may_take: called when no other process of this machine can change the store, before one elsewhere is ended;
            raises if this one is not to have the lock

        A process on another machine that takes the lock of a store elsewhere ends this one at its next check.
        """
        ...

    def clear_work(self, keep: Collection[str] = ()) -> None:
        """Remove what lies in the work folder, here and there, but the lock and some names at its top.

        Without names to keep, the work folder itself goes, and the store if that leaves it empty.
        """
        ...

    def tidy(self, is_needed: Callable[[], bool] = lambda: False) -> None:
        """Remove the work folder that a killed run left beside its complete result, unless a run is using it.

        is_needed: whether a run is to be continued there; asked while none can begin. What is made on this machine and
            sent elsewhere goes in any case
        """
        ...
