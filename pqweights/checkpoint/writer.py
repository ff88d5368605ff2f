"""Writing files: shards are preallocated and filled by positioned writes, small files are written whole.

The safetensors library can only write tensors that are all in memory, so shards are written here, and the tests read
them back with the library. No file has its final name before it is complete and on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

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


class ShardWriter:
    """One output file while it is being filled, in any order and from any thread."""

    def __init__(self, path: Path, header: bytes, file_bytes: int) -> None:
        """Open the partial file of `path`, which is created with its header and full size if it does not exist."""
        self.path, self.partial = path, partial_path(path)
        # The kernel lets one thread at a time write to a file, and threads that wait in the kernel keep a core busy.
        self._turn = threading.Lock()
        self.unflushed_bytes = 0
        with disk_errors(path):
            self._descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(self._descriptor).st_size != file_bytes:
                os.ftruncate(self._descriptor, 0)
                _allocate(self._descriptor, file_bytes)
            self.write(0, np.frombuffer(header, dtype=np.uint8))

    def write(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Write all of `data` at `offset`."""
        view = data.data.cast("B")
        with self._turn, disk_errors(self.path):
            while view:
                count = os.pwrite(self._descriptor, view, offset)
                offset, view = offset + count, view[count:]
            self.unflushed_bytes += data.nbytes

    def flush(self) -> None:
        """Flush to the disk what has been written so far, while other threads may write."""
        with self._turn:
            self.unflushed_bytes = 0
        self._sync(_sync_data)

    def _sync(self, sync: Callable[[int], None]) -> None:
        """Call `sync`; if the disk fails, remove the file and raise OutputError.

        The kernel forgets which bytes it could not write, so a run that is continued could not trust the file.
        """
        try:
            sync(self._descriptor)
        except OSError as error:
            self.partial.unlink(missing_ok=True)
            with disk_errors(self.path):
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
            raise OutputError(
                f"{self.path.name}: cannot be flushed to the disk ({error.strerror}), and was removed; check the disk "
                "and run the same command again"
            ) from None

    def sha256(self, offset: int, count: int) -> str:
        """Return the sha256 of bytes that were written earlier; "" if the file ends before them."""
        digest = hashlib.sha256()
        while count:
            data = os.pread(self._descriptor, min(count, COPY_BYTES), offset)
            if not data:
                return ""
            digest.update(data)
            offset, count = offset + len(data), count - len(data)
        return digest.hexdigest()

    def finish(self) -> None:
        """Flush the file to the disk, and give it its final name."""
        self._sync(os.fsync)
        with disk_errors(self.path):
            self.close()
            os.replace(self.partial, self.path)
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Close the file; a partial file stays as it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the blocks of a file, so that a full disk shows now; if the file system cannot, only set the size."""
    os.ftruncate(descriptor, size)
    if size and hasattr(os, "posix_fallocate"):  # macOS has none
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


# macOS has no fdatasync.
_sync_data = getattr(os, "fdatasync", os.fsync)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
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
        with open(partial, "wb") as stream:
            for data in pieces:
                digest.update(data)
                stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, final)
    return digest.hexdigest()


def sha256_of_file(path: Path, offset: int = 0, count: int | None = None) -> str:
    """Return the sha256 of a file, or of `count` bytes from `offset` on."""
    digest = hashlib.sha256()
    left = path.stat().st_size - offset if count is None else count
    with open(path, "rb", buffering=0) as stream:
        stream.seek(offset)
        while left > 0:
            data = stream.read(min(COPY_BYTES, left))
            if not data:
                break
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()
