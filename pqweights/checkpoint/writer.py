"""Writing small files whole, and what every file that is written has in common.

No file has its final name before it is complete and on the disk. shard_file.py writes those with tensors.
Before a run: whether there is room on the disks of this machine for all that it writes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pqweights.errors import OutputError

PARTIAL_SUFFIX = ".partial"
COPY_BYTES = 1 << 20
# What the system says of a full disk, of a name under which no file may be written, and of a disk that fails.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR)
FAILING = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ETIMEDOUT)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, one that may not be written to, and one that fails into an OutputError."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise OutputError(
                f"{path.name}: the disk is full ({error.strerror}); free some space and run the same command again"
            ) from None
        if error.errno in FORBIDDEN:
            raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another output folder") from None
        if error.errno in FAILING:
            raise OutputError(
                f"{path.name}: cannot be written to the disk ({error.strerror}); check the disk and run the same "
                "command again"
            ) from None
        raise


def partial_path(path: Path) -> Path:
    """Return where a file lies until it is complete."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    with disk_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(work: Path, final: Path, pieces: Iterable[bytes]) -> str:
    """Write a file piece by piece under a temporary name in `work`, rename it, and return its sha256."""
    partial = work / (final.name + PARTIAL_SUFFIX)
    digest = hashlib.sha256()
    with disk_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        try:
            with open(partial, "xb") as stream:  # which follows no link that somebody else has put there
                for data in pieces:
                    digest.update(data)
                    stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, final)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
    return digest.hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the sha256 of a file."""
    with open(path, "rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_of(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the sha256 of pieces, one after the other."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """What a run writes into a folder.

    folder: the folder, which may not exist yet
    byte_count: how many bytes it writes there at most
    present: how many of them an interrupted run has already taken
    what: whose they are, and what for, as messages begin
    remedy: what to do if there is no room, besides freeing some
    """

    folder: Path
    byte_count: int
    what: str
    remedy: str
    present: int = 0

    @property
    def missing(self) -> int:
        """How many bytes must be free."""
        return max(0, self.byte_count - self.present)


def free_bytes(folder: Path) -> int:
    """Return how many bytes are free on the disk on which a folder is, or will be made."""
    return shutil.disk_usage(_existing(folder)).free


def check_room(needs: Sequence[DiskNeed]) -> None:
    """Check that there is room for all needs together; several may be of one disk.

    Raises OutputError.
    """
    for need in needs:
        _check_disk([need])
    by_disk: dict[int, list[DiskNeed]] = {}
    for need in needs:
        by_disk.setdefault(os.stat(_existing(need.folder)).st_dev, []).append(need)
    for together in by_disk.values():
        _check_disk(together)


def _check_disk(needs: Sequence[DiskNeed]) -> None:
    free, missing = free_bytes(needs[0].folder), sum(need.missing for need in needs)
    if missing > free:
        same = " on the same disk" if len(needs) > 1 else ""
        raise OutputError(
            f"{', and '.join(need.what for need in needs)}{same}, but {free} are free; free {missing - free} bytes "
            f"more, or {', or '.join(need.remedy for need in needs)}"
        )


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest one around it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
