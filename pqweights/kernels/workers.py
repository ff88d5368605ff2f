"""What each thread keeps for itself: memory that it uses again and again, and the last value of a kind.

Fresh megabytes for every chunk would cost more in page faults than the work that is done on them. Nothing else in the
library belongs to a thread. The alternative is a parameter of every function between a thread pool and the innermost
reader, which would say no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Value = TypeVar("Value")

# The size of a cache line, in bytes: vector instructions are fastest on memory that begins at one.
ALIGNMENT = 64


class _OfThread(threading.local):
    """What one thread keeps, by purpose; each thread finds both empty."""

    def __init__(self) -> None:
        self.scratch: dict[str, npt.NDArray[np.uint8]] = {}
        self.kept: dict[str, tuple[Hashable, Any]] = {}


_of_thread = _OfThread()


def pageable(byte_count: int) -> npt.NDArray[np.uint8]:
    """Return ordinary memory; pages that are never used cost nothing."""
    memory = np.empty(byte_count + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + byte_count]


def scratch(purpose: str, byte_count: int) -> npt.NDArray[np.uint8]:
    """Memory for one purpose, contents undefined, valid until the thread asks for the same purpose again."""
    buffer = _of_thread.scratch.get(purpose)
    if buffer is None or len(buffer) < byte_count:
        buffer = _of_thread.scratch[purpose] = pageable(byte_count)
    return buffer[:byte_count]


def kept(purpose: str, key: Hashable, make: Callable[[], Value]) -> Value:
    """The thread's last value of a purpose if it had this key, else the one that `make` returns."""
    held = _of_thread.kept.get(purpose)
    if held is None or held[0] != key:
        held = _of_thread.kept[purpose] = key, make()
    value: Value = held[1]
    return value
