"""Locks of objects that are sent to other processes."""

from __future__ import annotations

import threading


class ProcessLock:
    """A lock between the threads of one process, to be used with `with`; a pickled one is a new one elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[()]]:
        return ProcessLock, ()
