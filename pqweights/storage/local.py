"""Folders of this machine in which results are made: locks, what an earlier run left, and links, which none may be."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

from pqweights.checkpoint.writer import disk_errors
from pqweights.errors import OutputError

LOCK_FILE = "lock"
# How long processes of a run that was killed may take to end.
ENDING_SECONDS = 10.0

# What the system says of a path that is not there, that a link leads away from, or that cannot be one.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_TOP = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _TOP | os.O_NOFOLLOW


def make_private(folder: Path) -> None:
    """Make a folder that only the user may look into, or check that one is the user's own.

    Raises OutputError for one of somebody else, one to which others may write, and a link: what lies there is believed.
    """
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status, around = folder.lstat(), folder.parent.stat()
        # Whoever has the folder around it could replace it anyhow; so could those who may write there, as all may on
        # disks that know no users.
        shared = 0 if around.st_mode & stat.S_ISVTX else around.st_mode
        problems = (
            ("a link", stat.S_ISLNK(status.st_mode)),
            ("a file", not stat.S_ISDIR(status.st_mode)),
            ("one of another user", status.st_uid not in (os.geteuid(), around.st_uid)),
            ("one to which others may write", status.st_mode & ~shared & 0o022),
        )
        if problem := next((what for what, is_so in problems if is_so), None):
            raise OutputError(
                f"{folder}: expected a folder of your own, in which pqweights keeps unfinished work, found {problem}; "
                "remove it, or choose another place"
            )
        if status.st_mode & 0o077:
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


def remove_file(out: Path, name: str) -> None:
    """Remove a file of a folder, and the folders inside of it that this leaves empty.

    Nothing happens if it is not there, or behind a link: each folder on the way is opened without following one, and
    the file is removed from the folder that was opened.
    """
    parts = PurePosixPath(name).parts
    if not parts:
        return
    with contextlib.ExitStack() as opened:
        folders: list[int] = []
        try:
            for part in ("", *parts[:-1]):
                path, of = (part, folders[-1]) if folders else (out, None)
                folders.append(os.open(path, _FOLDER if folders else _TOP, dir_fd=of))
                opened.callback(os.close, folders[-1])
            os.unlink(parts[-1], dir_fd=folders[-1])
        except OSError as error:
            if error.errno not in (*_NOT_THERE, errno.EISDIR):
                raise
            if len(folders) < len(parts):
                return
        with contextlib.suppress(OSError):
            for folder, part in reversed(list(zip(folders, parts[:-1], strict=False))):
                os.rmdir(part, dir_fd=folder)
