"""What the processes of one run share: folders that the first worker makes, and a flush that waits for no disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path


def run_folder(base: Path) -> Path:
    """Return the folder that all workers of a run share. base: tmp_path_factory.getbasetemp()."""
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`, which a process that ends gives back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return `folder` with what `make(folder)` writes; the first worker that asks makes it, the others wait."""
    finished = folder.with_name(f"{folder.name}.finished")
    if not finished.exists():
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not finished.exists():
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                finished.touch()
    return folder


FLUSH = os.fsync


def checked_flush(descriptor: int) -> None:
    """Do what os.fsync does, but leave the content of files and folders to the page cache.

    A killed process loses nothing of that, and no test cuts the power. A descriptor that cannot be flushed still raises
    OSError.
    """
    kind = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        FLUSH(descriptor)


def skip_flushes() -> None:
    """Let this process flush nothing to the disk: tests flush ten thousand files, at milliseconds each."""
    os.fsync = checked_flush
