"""Positioned reads of files on this machine, which must still be what they were when they were listed.

A file is compared with its FileState whenever it is opened, and when all is read. Threads read a tensor chunk by chunk,
so the system, which would not see an order, is told at large reads what comes next.
"""

from __future__ import annotations

import datetime
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqweights.errors import SourceChangedError, SourceReadError


@dataclass(frozen=True)
class FileState:
    """What a file was when it was listed.

    byte_count: its size
    stamp: changes with it: its modification time, a hash of its content, or what a storage calls its version
    modified: when it was changed last, in nanoseconds since 1970; 0 if that is not known
    inode: its number in the file system; 0 if that is not known, as on another machine
    """

    byte_count: int
    stamp: str
    modified: int = 0
    inode: int = 0

    @staticmethod
    def of(status: os.stat_result) -> FileState:
        """Return the state of a file on this machine."""
        return FileState(status.st_size, str(status.st_mtime_ns), status.st_mtime_ns, status.st_ino)

    def check(self, file: str, now: FileState | None) -> None:
        """Raise SourceChangedError unless a file is still what it was.

        file: what the message calls it
        now: what it is now; None if it is gone
        """
        if now is None:
            difference = "it is no longer there"
        elif now.byte_count != self.byte_count:
            difference = f"expected {self.byte_count} bytes, found {now.byte_count}"
        elif now.stamp != self.stamp:
            difference = f"expected the version of {_time(self.modified)}, found that of {_time(now.modified)}"
        elif self.inode and now.inode and now.inode != self.inode:
            difference = "another file has its name, of the same size and time"
        else:
            return
        raise SourceChangedError(
            f"{file}: the source changed while it was being read ({difference}): leave its files as they are, and run "
            "the same command again"
        )


def state_at(path: Path, *, surely: bool = False) -> FileState | None:
    """Return the state of a file on this machine now; None if it is gone.

    surely: ask the server of a network file system, which answers as of now when a file is opened
    """
    try:
        if not surely:
            return FileState.of(os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return FileState.of(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _time(modified: int) -> str:
    if not modified:
        return "another time"
    seconds, rest = divmod(modified, 10**9)
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"


# Before reads of at least so many bytes, the system is asked to fetch so many behind them.
LARGE_READ_BYTES = 1 << 18
BYTES_AHEAD = 4 << 20


class OpenFile:
    """An open file, closed when it is no longer referred to. state: what it was when it was opened"""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.state = FileState.of(os.fstat(self._descriptor))

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer with bytes from `offset` on, from any thread. file: what messages call it

        Raises SourceChangedError if the file is no longer what it was, SourceReadError if its disk fails.
        """
        view = buffer.data
        if len(view) >= LARGE_READ_BYTES and hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(self._descriptor, offset + len(view), BYTES_AHEAD, os.POSIX_FADV_WILLNEED)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise SourceReadError(
                    f"{file}: cannot be read ({error.strerror}): its disk or file server is failing; run the same "
                    "command again"
                ) from None
            if count == 0:
                self.state.check(file, state_at(self._path, surely=True))
                raise SourceReadError(
                    f"{file}: expected {len(view)} bytes at offset {offset}, found the end of the file after {done}, "
                    f"although it has {self.state.byte_count}: its disk or file server is failing; run the same "
                    "command again"
                )
            done += count
