"""What threads share: locks of objects that are sent to other processes, and notices of the slow steps of a call.

Of a slow step, such as looking at a Ray cluster first, only the library knows; the command line shows it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

# Called with what is done, how much there is in all, and the name of what is being done.
Progress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, name: str) -> None:
    """Show no progress."""


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # macOS has no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# How often a listener is told how far a slow step is.
TELL_SECONDS = 5.0
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


def told_steps(steps: range, name: str, unit: str, *, each: int = 1) -> Iterator[int]:
    """Yield the numbers of a slow step, and tell the listener every few seconds how far it is, and the time left.

    unit: what is counted, `each` of them in a step
    """
    begin = last = time.monotonic()
    for number in steps:
        now, done = time.monotonic(), number - steps.start
        if done and now - last >= TELL_SECONDS:
            last = now
            left = (now - begin) / done * (len(steps) - done)
            for tell in _listeners[-1:]:
                tell(f"{name}: {done * each} of {len(steps) * each} {unit}, {left:.0f} s left")
        yield number
