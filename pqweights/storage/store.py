"""Where results are made: a folder on this machine, or one in object storage. `open_store` opens either.

A folder whose result is replaced may come from anywhere, and so may the names in its manifest, and links among its
folders. What lies behind a link is not part of the result: nothing is written or removed through one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pqweights.checkpoint.ahead import Stop
from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER, is_inside
from pqweights.checkpoint.writer import disk_errors, sync_folder, write_whole
from pqweights.common.documents import Count
from pqweights.errors import OptionError, OutputError
from pqweights.storage.addresses import Address, RepositoryName, parse_location
from pqweights.storage.bucket import RemoteFolder
from pqweights.storage.local import LOCK_FILE, clear, locked, make_private, refuse_linked_folders, remove_file

if TYPE_CHECKING:
    from pqweights.storage.repository import Sending

SCRATCH_VARIABLE = "PQWEIGHTS_SCRATCH"
# In the work folder of a bucket: a random text of the process that writes to the store.
OWNER_FILE = f"{WORK_FOLDER}/{LOCK_FILE}"
PROBE_FILE = f"{WORK_FOLDER}/probe"

# Raises OutputError if another process has taken the store over.
CheckLock = Callable[[], None]


def open_store(where: str | Path | Store) -> Store:
    """Return the store that a path or an address names; a store is returned as it is.

    Raises OptionError for an address to which no result can be written.
    """
    if not isinstance(where, str | Path):
        return where
    location = parse_location(where)
    if isinstance(location, RepositoryName) and "://" in str(where):
        raise OptionError(
            f"{where}: expected a folder, or an address in object storage: write the result to a folder, then send it "
            "to the Hub with pqweights push"
        )
    if isinstance(location, Address):
        return Store(RemoteFolder(location))
    return Store(Path(where) if isinstance(location, RepositoryName) else location)


@dataclass(frozen=True)
class FileRecord:
    """The size and sha256 of a file without tensors."""

    bytes: Count
    sha256: str


@dataclass(frozen=True)
class Store:
    """A folder in which a result is made, on this machine or in object storage. Its text names it. It may be pickled.

    Files have names relative to it. Everything unfinished lies in its work folder, WORK_FOLDER, which readers of the
    result ignore. What is sent to object storage is made in a scratch folder on this machine. Every method raises
    OutputError for what this machine refuses, StorageError for what a server does.

    sending: where files with tensors go, instead of staying in a folder on this machine
    """

    folder: Path | RemoteFolder
    sending: Sending | None = None

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def path(self) -> Path:
        """The folder, which is on this machine."""
        assert isinstance(self.folder, Path)
        return self.folder

    @property
    def remote(self) -> RemoteFolder | None:
        """The folder in object storage."""
        return None if isinstance(self.folder, Path) else self.folder

    @property
    def is_elsewhere(self) -> bool:
        """Whether files that are made in `work` are then sent to another machine."""
        return self.remote is not None

    @property
    def work(self) -> Path:
        """The folder on this machine in which files are made: the work folder, or the scratch folder.

        Runs that follow one another use the same scratch folder, runs into other folders another.
        """
        if self.remote is None:
            return self.path / WORK_FOLDER
        return default_scratch() / hashlib.sha256(self.remote.address.url.encode()).hexdigest()[:16]

    def check_apart(self, source: Path | Address) -> None:
        """Raise OutputError if the store is, holds, or lies within the source."""
        if self.remote is not None:
            overlaps = isinstance(source, Address) and self.remote.address.overlaps(source)
        else:
            inner, outer = self.path.resolve(), source.resolve() if isinstance(source, Path) else None
            overlaps = outer is not None and (inner == outer or outer in inner.parents or inner in outer.parents)
        if overlaps:
            raise OutputError(
                f"{self}: the output folder and the source must not contain each other (the source is {source}); "
                "choose another folder"
            )

    def check_names(self, names: Collection[str]) -> None:
        """Raise OutputError or StorageError if files of these names cannot be written, so that no work is in vain.

        Object storage is tried: it may refuse to write files, or to delete them.
        """
        if self.remote is None:
            refuse_linked_folders(self.path, names)
        else:
            self.remote.write(PROBE_FILE, b"")
            self.remote.remove([PROBE_FILE])

    def names(self) -> set[str]:
        """Return the names of the files and folders at its top. Raises OutputError if it is a file."""
        if self.remote is not None:
            return {name.partition("/")[0] for name in self.remote.files()}
        if not self.path.exists():
            return set()
        if not self.path.is_dir():
            raise OutputError(f"{self}: expected a folder or nothing, found a file; choose another output folder")
        return {path.name for path in self.path.iterdir()}

    def files(self, below: str = "") -> dict[str, FileState]:
        """Return the states of all files by name, without hidden ones, but with those in the folder `below`.

        below: a folder in it, hidden or not, to which the list is limited
        """
        if self.remote is not None:
            return self.remote.files(below)
        states = {}
        for folder, folders, names in os.walk(self.path / below):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (Path(folder) / name for name in names if not name.startswith(".")):
                with contextlib.suppress(FileNotFoundError):
                    states[path.relative_to(self.path).as_posix()] = FileState.of(path.stat())
        return states

    def finished_files(self) -> dict[str, FileState]:
        """Return the states of its files, and of those where it sends files."""
        return ({} if self.sending is None else self.sending.files) | self.files()

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is not there."""
        if self.remote is not None:
            return self.remote.read_whole(name)
        path = self.path / name
        return path.read_bytes() if path.is_file() else None

    def write(self, name: str, pieces: Iterable[bytes]) -> FileRecord:
        """Write a small file; it is there with all of its content, or not at all, and durable afterwards."""
        if self.remote is None:
            path = self.path / name
            refuse_linked_folders(self.path, [name])
            digest = write_whole(self.work, path, pieces)
            sync_folder(path.parent)
            return FileRecord(path.stat().st_size, digest)
        make_scratch(self.work)
        with tempfile.TemporaryDirectory(prefix="sent-", dir=self.work) as temporary:
            path = Path(temporary) / "file"
            digest = write_whole(path.parent, path, pieces)
            self.remote.upload(name, path)
            return FileRecord(path.stat().st_size, digest)

    def put(self, name: str, path: Path, stop: Stop) -> None:
        """Move a complete file of this machine, which lies in `work`, to a name in the store, where it is durable.

        stop: asked while it is sent; raises TransferStopped once it returns True
        """
        if self.remote is not None:
            self.remote.upload(name, path, stop=stop)
            path.unlink()
            return
        target = self.path / name
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            sync_folder(target.parent)

    def move(self, source: str, target: str) -> None:
        """Rename a file; nothing happens if that was done before."""
        if self.remote is not None:
            self.remote.move(source, target)
            return
        refuse_linked_folders(self.path, [target])
        try:
            with disk_errors(self.path):
                (self.path / target).parent.mkdir(exist_ok=True)
                os.replace(self.path / source, self.path / target)
        except FileNotFoundError:
            if not (self.path / target).exists():
                raise OutputError(f"{self.path / source}: was removed by another program; run it again") from None

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and folders that this leaves empty; those that are not there are no problem.

        Ignored are names that lead out of the folder, by themselves or through a link.
        """
        inside = [name for name in names if is_inside(name)]
        if self.remote is not None:
            self.remote.remove(inside)
            return
        for name in inside:
            remove_file(self.path, name)
        if self.path.is_dir():
            sync_folder(self.path)

    @contextlib.contextmanager
    def lock(self, may_take: Callable[[], None]) -> Iterator[CheckLock]:
        """Make the folder `work`, and hold its lock. Raises OutputError if another process of this machine holds it.

        may_take: called when no other process of this machine can change the store, before one elsewhere is ended;
            raises if this one is not to have the lock

        A process on another machine that takes the lock of a store elsewhere ends this one at its next check: the
        store names its owner.
        """
        if self.is_elsewhere:
            make_scratch(self.work)
        with locked(self.work, self):
            may_take()
            owner = secrets.token_hex(8).encode()
            if self.remote is not None:
                self.remote.write(OWNER_FILE, owner)

            def check() -> None:
                if self.remote is not None and self.remote.read_whole(OWNER_FILE) != owner:
                    raise OutputError(f"{self}: another run is writing there; wait for it, or choose another folder")

            yield check

    def clear_work(self, keep: Collection[str] = ()) -> None:
        """Remove what lies in the work folder, there and here, but the lock and some names at its top.

        Without names to keep, the work folder itself goes, and the store if that leaves it empty.
        """
        try:
            if self.remote is not None:
                kept = {*keep, LOCK_FILE} if keep else set()
                below = [name for name in self.remote.files(WORK_FOLDER) if name.split("/")[1] not in kept]
                # Marks first: one without its shard would say that the shard has its final name.
                self.remote.remove(sorted(below, key=lambda name: not name.endswith(".json")))
        finally:
            clear(self.work, keep)
        if self.remote is None and not keep:
            sync_folder(self.path)
            with contextlib.suppress(OSError):  # the folder stays if it holds other files
                self.path.rmdir()

    def tidy(self, is_needed: Callable[[], bool] = lambda: False) -> None:
        """Remove the work folder that a killed run left beside its complete result, unless a run is using it.

        is_needed: whether a run is to be continued there; asked while none can begin. What is made on this machine and
            sent elsewhere goes in any case
        """
        if self.remote is None:
            if not is_needed() and self.work.exists():
                with locked(self.work, self):
                    if not is_needed():
                        clear(self.work, ())
            return
        if not is_needed():
            journal = f"{WORK_FOLDER}/{JOURNAL_FILE}"  # if there is one by now, a run has begun
            self.remote.remove(name for name in self.remote.files(WORK_FOLDER) if name != journal)
        with contextlib.suppress(OutputError, OSError):
            if self.work.exists():
                with locked(self.work, self):
                    clear(self.work, ())


def default_scratch() -> Path:
    """Return the folder in which files are made that are sent elsewhere.

    It is PQWEIGHTS_SCRATCH if set, else in the user's cache: PQWEIGHTS_CACHE, or below XDG_CACHE_HOME or ~/.cache.
    Raises OutputError without one, as in a process without a home.
    """
    chosen = os.environ.get(SCRATCH_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.environ.get("PQWEIGHTS_CACHE") or (os.path.isabs(users) and os.path.join(users, "pqweights"))
    if not cache:  # without a home, ~ stays ~
        raise OutputError(f"no home folder, in which shards could be made: set {SCRATCH_VARIABLE} to a folder for them")
    return Path(cache, "scratch")


def make_scratch(scratch: Path) -> None:
    """Make a scratch folder, or check that it is the user's own. Raises OutputError if it is not, or cannot be made."""
    try:
        make_private(scratch)
    except OSError as error:
        raise OutputError(
            f"{scratch}: cannot be made ({error.strerror}), and shards are made there: set {SCRATCH_VARIABLE} to "
            "another folder"
        ) from None
