"""Writing small files whole, and what every file that is written has in common.

No file has its final name before it is complete and on the disk. shard_file.py writes those with tensors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pqweights.errors import OutputError

PARTIAL_SUFFIX = ".partial"
COPY_BYTES = 1 << 20


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a missing permission and a read-only file system into an OutputError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutputError(
                f"{path.name}: the disk is full ({error.strerror}); free some space and run the same command again"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another output folder") from None
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
        with open(partial, "xb") as stream:  # which follows no link that somebody else has put there
            for data in pieces:
                digest.update(data)
                stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, final)
    return digest.hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the sha256 of a file."""
    with open(path, "rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
