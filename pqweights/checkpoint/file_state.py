"""What a file of a source was when it was listed: it must still be that whenever it is opened, and when all is read."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from pqweights.errors import SourceChangedError


@dataclass(frozen=True)
class FileState:
    """What a file was when it was listed.

    byte_count: its size
    stamp: changes with it: its modification time, or a hash of its content or version
    modified: when it was changed last, in nanoseconds since 1970; 0 if that is not known
    inode: its number in the file system; 0 if that is not known, as on another machine
    """

    byte_count: int
    stamp: int
    modified: int = 0
    inode: int = 0

    @staticmethod
    def of(status: os.stat_result) -> FileState:
        """Return the state of a file on this machine."""
        return FileState(status.st_size, status.st_mtime_ns, status.st_mtime_ns, status.st_ino)

    def check(self, file: str, found: FileState | None) -> None:
        """Raise SourceChangedError unless a file is still what it was.

        file: what the message calls it
        found: what it is now; None if it is gone
        """
        if found is None:
            difference = "it is no longer there"
        elif found.byte_count != self.byte_count:
            difference = f"expected {self.byte_count} bytes, found {found.byte_count}"
        elif found.stamp != self.stamp:
            difference = f"expected the version of {_time(self.modified)}, found that of {_time(found.modified)}"
        elif self.inode and found.inode and found.inode != self.inode:
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
