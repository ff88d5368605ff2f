"""What each thread keeps for itself: memory that it uses again and again, and the last value of a kind.

Fresh megabytes for every chunk would cost more in page faults than the work that is done on them. Nothing else in the
library belongs to a thread. The alternative is a parameter of every function between a thread pool and the innermost
reader, which would say no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Value = TypeVar("Value")

# The size of a cache line, in bytes: vector instructions are fastest on memory that begins at one.
ALIGNMENT = 64
# What one thread keeps, as its attributes; each thread finds none.
_of_thread = threading.local()


def pageable(byte_count: int) -> npt.NDArray[np.uint8]:
    """Return ordinary memory; pages that are never used cost nothing."""
    memory = np.empty(byte_count + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + byte_count]


def scratch(purpose: str, byte_count: int) -> npt.NDArray[np.uint8]:
    """Memory for one purpose, contents undefined, valid until the thread asks for the same purpose again."""
    buffers: dict[str, npt.NDArray[np.uint8]] = vars(_of_thread).setdefault("scratch", {})
    if len(buffers.get(purpose, ())) < max(byte_count, 1):
        buffers[purpose] = pageable(byte_count)
    return buffers[purpose][:byte_count]


def kept(purpose: str, key: Hashable, make: Callable[[], Value]) -> Value:
    """The thread's last value of a purpose if it had this key, else the one that `make` returns."""
    values: dict[str, tuple[Hashable, Value]] = vars(_of_thread).setdefault("kept", {})
    if purpose not in values or values[purpose][0] != key:
        values[purpose] = key, make()
    return values[purpose][1]
