"""What threads share: locks of objects that are sent to other processes, and notices of the slow steps of a call.

Of a slow step, such as looking at a Ray cluster first, only the library knows; the command line shows it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

# Steps are taken in any thread, so all share the listeners. The last one is told.
_listeners: list[Callable[[str], None]] = []


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


@contextlib.contextmanager
def listening(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell`, from any thread, with the name of a slow step when it begins, and with "" when it ends."""
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)


@contextlib.contextmanager
def slow_step(name: str) -> Iterator[None]:
    """Tell the listener that a slow step begins, and that it ends."""
    told = _listeners[-1:]
    for tell in told:
        tell(name)
    try:
        yield
    finally:
        for tell in told:
            tell("")
