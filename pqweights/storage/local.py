"""A folder on this machine as a store.

A folder whose result is replaced may come from anywhere, and so may the names in its manifest, and links among its
folders. What lies behind a link is not part of the result: nothing is written or removed through one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pqweights.checkpoint.names import WORK_FOLDER, is_inside
from pqweights.checkpoint.writer import disk_errors, sync_folder, write_whole
from pqweights.errors import OutputError
from pqweights.storage.addresses import Address
from pqweights.storage.protocol import CheckLock, FileRecord, Stop

LOCK_FILE = "lock"
# How long processes of a run that was killed may take to end.
ENDING_SECONDS = 10.0

# What the system says of a path that is not there, that a link leads away from, or that cannot be one.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class LocalStore:
    """A folder on this machine. See Store."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def work(self) -> Path:
        """The work folder in it."""
        return self.path / WORK_FOLDER

    @property
    def is_elsewhere(self) -> bool:
        """It is not."""
        return False

    def check_apart(self, source: Path | Address) -> None:
        """See Store."""
        if not isinstance(source, Path):
            return
        inner, outer = self.path.resolve(), source.resolve()
        if inner == outer or outer in inner.parents or inner in outer.parents:
            raise OutputError(
                f"{self}: the output folder and the source must not contain each other (the source is {source}); "
                "choose another folder"
            )

    def check_names(self, names: Collection[str]) -> None:
        """See Store. They would be written through a link."""
        refuse_linked_folders(self.path, names)

    def names(self) -> set[str]:
        """See Store."""
        if not self.path.exists():
            return set()
        if not self.path.is_dir():
            raise OutputError(f"{self}: expected a folder or nothing, found a file; choose another output folder")
        return {path.name for path in self.path.iterdir()}

    def sizes(self, below: str = "") -> Mapping[str, int]:
        """See Store."""
        sizes = {}
        for folder, folders, names in os.walk(self.path / below):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (Path(folder) / name for name in names if not name.startswith(".")):
                with contextlib.suppress(FileNotFoundError):
                    sizes[path.relative_to(self.path).as_posix()] = path.stat().st_size
        return sizes

    def modified(self, name: str) -> int:
        """See Store."""
        return (self.path / name).stat().st_mtime_ns

    def read(self, name: str) -> bytes | None:
        """See Store."""
        path = self.path / name
        return path.read_bytes() if path.is_file() else None

    def write(self, name: str, pieces: Iterable[bytes]) -> FileRecord:
        """See Store. It is durable afterwards."""
        path = self.path / name
        refuse_linked_folders(self.path, [name])
        digest = write_whole(self.work, path, pieces)
        sync_folder(path.parent)
        return FileRecord(path.stat().st_size, digest)

    def put(self, name: str, path: Path, stop: Stop) -> None:
        """See Store. Only the name changes, which is durable afterwards."""
        target = self.path / name
        with disk_errors(target):
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)
            sync_folder(target.parent)

    def move(self, source: str, target: str) -> None:
        """See Store."""
        refuse_linked_folders(self.path, [target])
        try:
            with disk_errors(self.path):
                os.replace(self.path / source, self.path / target)
        except FileNotFoundError:
            if not (self.path / target).exists():
                raise OutputError(f"{self.path / source}: was removed by another program; run it again") from None

    def remove(self, names: Iterable[str]) -> None:
        """See Store.

        Ignored are names that lead out of the folder, by themselves or through a link: each folder on the way is opened
        without following one, and the file is removed from the folder that was opened.
        """
        for name in names:
            parts = PurePosixPath(name).parts
            if is_inside(name) and parts:
                with _opened_folders(self.path, parts[:-1]) as folders:
                    if folders is not None:
                        _remove(parts, folders)
        if self.path.is_dir():
            sync_folder(self.path)

    @contextlib.contextmanager
    def lock(self, may_take: Callable[[], None]) -> Iterator[CheckLock]:
        """See Store. No other machine takes it over."""
        with locked(self.work, self):
            may_take()
            yield lambda: None

    def clear_work(self, keep: Collection[str] = ()) -> None:
        """See Store."""
        clear(self.work, keep)
        if not keep:
            sync_folder(self.path)
            with contextlib.suppress(OSError):  # the folder stays if it holds other files
                self.path.rmdir()

    def tidy(self, is_needed: Callable[[], bool] = lambda: False) -> None:
        """See Store."""
        if not is_needed() and self.work.exists():
            with locked(self.work, self):
                if not is_needed():
                    clear(self.work, ())


def make_private(folder: Path) -> None:
    """Make a folder that only the user may look into, or check that one is the user's own.

    Raises OutputError for one of somebody else, one to which others may write, and a link: what lies there is believed.
    """
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found, around = folder.lstat(), folder.parent.stat()
        # Whoever has the folder around it could replace it anyhow; so could those who may write there, as all may on
        # disks that know no users.
        shared = 0 if around.st_mode & stat.S_ISVTX else around.st_mode
        problems = (
            ("a link", stat.S_ISLNK(found.st_mode)),
            ("a file", not stat.S_ISDIR(found.st_mode)),
            ("one of another user", found.st_uid not in (os.geteuid(), around.st_uid)),
            ("one to which others may write", found.st_mode & ~shared & 0o022),
        )
        if problem := next((what for what, is_so in problems if is_so), None):
            raise OutputError(
                f"{folder}: expected a folder of your own, in which pqweights keeps unfinished work, found {problem}; "
                "remove it, or choose another place"
            )
        if found.st_mode & 0o077:
            folder.chmod(0o700)


@contextlib.contextmanager
def locked(work: Path, store: object) -> Iterator[None]:
    """Make a work folder, and hold its lock.

    store: what messages name

    Raises OutputError if another process holds it.
    """
    refuse_links_in(work)
    with disk_errors(work.parent):
        descriptor = _take_lock(work / LOCK_FILE, store)
    try:
        yield
    finally:
        os.close(descriptor)


def _take_lock(path: Path, store: object) -> int:
    """Take a lock, and return its descriptor; closing it releases the lock."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # a run that ends has just removed it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(f"{store}: another run is writing there; wait for it, or choose another folder") from None
        # The run that held the lock may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def clear(work: Path, keep: Collection[str]) -> None:
    """Remove everything in a locked work folder but some names; with none of them, the lock goes last, with it.

    What marks shards as finished goes first: a mark without its shard would say that the shard has its final name.

    Raises OutputError if another process goes on writing there.
    """
    if not work.exists():  # somebody has removed it
        return
    for path in work.iterdir():
        if path.name == LOCK_FILE or path.name in keep:
            continue
        if path.is_dir():
            _remove_folder(path)
        else:
            path.unlink(missing_ok=True)
    if not keep:
        (work / LOCK_FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another run has just opened the lock
            work.rmdir()


def _remove_folder(folder: Path) -> None:
    """Remove a folder in which processes of a run that was killed may still be writing for a moment."""
    for mark in folder.glob("*.json"):
        mark.unlink(missing_ok=True)
    until = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > until:
                raise OutputError(
                    f"{folder}: cannot be removed ({error.strerror}): processes of an earlier run may still be ending; "
                    "run the same command again"
                ) from None
            time.sleep(0.1)
        else:
            return


def refuse_linked_folders(out: Path, names: Iterable[str]) -> None:
    """Raise OutputError if a file of the result would be written through a link.

    names: the paths of the files in the folder
    """
    for folder in {parent for name in names for parent in PurePosixPath(name).parents}:
        path = out / folder
        if path != out and path.is_symlink():
            raise OutputError(f"{path}: expected a folder, found a link; remove it, or choose another output folder")


def refuse_links_in(work: Path) -> None:
    """Raise OutputError if a work folder is a link or holds one: pqweights makes none there."""
    paths = (Path(folder) / name for folder, folders, files in os.walk(work) for name in (*folders, *files))
    for path in (work, *paths):
        if path.is_symlink():
            raise OutputError(f"{path}: a link, which pqweights did not make; remove it, or choose another folder")


@contextlib.contextmanager
def _opened_folders(out: Path, parts: tuple[str, ...]) -> Iterator[list[int] | None]:
    """Open the output folder, and one in the other those below it; None if one is missing, or is not a folder."""
    folders: list[int] | None = [os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    with contextlib.ExitStack() as opened:
        assert folders is not None
        opened.callback(os.close, folders[0])
        try:
            for part in parts:
                folders.append(os.open(part, _FOLDER, dir_fd=folders[-1]))
                opened.callback(os.close, folders[-1])
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
            folders = None
        yield folders


def _remove(parts: tuple[str, ...], folders: list[int]) -> None:
    """Remove a file from the last of these folders, and folders that this leaves empty from those that hold them."""
    try:
        os.unlink(parts[-1], dir_fd=folders[-1])
    except OSError as error:
        if error.errno not in (*_NOT_THERE, errno.EISDIR):
            raise
    for holder, part in reversed(list(zip(folders, parts[:-1], strict=False))):
        try:
            os.rmdir(part, dir_fd=holder)
        except OSError:
            return
