"""Locks between processes: a file that one of them holds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from pqweights.errors import OutputError

# How often a lock that another process holds is tried again.
POLL_SECONDS = 0.05


class LockedError(OutputError):
    """Another process holds a lock."""


def take_lock(path: Path, out: object, *, wait_seconds: float = 0.0, make_folder: bool = True) -> int:
    """Take the lock, and return its descriptor; closing it releases the lock.

    path: the file, which is made if it is not there
    out: where the result is written, for messages
    wait_seconds: how long to wait for another process to release it
    make_folder: whether to make its folder, too

    Raises LockedError if another run holds it, FileNotFoundError if its folder is not there and shall not be made.
    """
    until = time.monotonic() + wait_seconds
    while True:
        try:
            if make_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            if make_folder:  # a run that ends has just removed it
                continue
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() < until:
                time.sleep(POLL_SECONDS)
                continue
            raise LockedError(f"{out}: another run is writing there; wait for it, or choose another folder") from None
        # The run that held the lock may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)
