"""Files in an output folder: they are written and removed there, never through a link to somewhere else.

A folder whose result is replaced may come from anywhere, and so may the names in its manifest, and links among its
folders. What lies behind a link is not part of the result.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from pqweights.checkpoint.names import is_inside
from pqweights.errors import OutputError

# What the system says of a path that is not there, that a link leads away from, or that cannot be one.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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


def remove_files(out: Path, names: Iterable[str]) -> None:
    """Remove files of a result, and folders that this leaves empty.

    Ignored are names that lead out of the folder, by themselves or through a link: each folder on the way is opened
    without following one, and the file is removed from the folder that was opened.
    """
    for name in names:
        parts = PurePosixPath(name).parts
        if is_inside(name) and parts:
            with _opened_folders(out, parts[:-1]) as folders:
                if folders is not None:
                    _remove(parts, folders)


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
