"""Reused memory. Fresh megabytes for every chunk cost more in page faults than the work that is done on them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Allocator = Callable[[int], npt.NDArray[np.uint8]]  # byte count -> memory, contents undefined

_scratch = threading.local()
_of_thread = threading.local()


def pageable(byte_count: int) -> npt.NDArray[np.uint8]:
    """Ordinary memory; pages that are never touched cost nothing."""
    return np.empty(byte_count, dtype=np.uint8)


def allocate_with(allocator: Allocator) -> None:
    """New buffers of the calling thread come from `allocator`; buffers that exist stay what they are."""
    _of_thread.allocate = allocator


def _allocate(byte_count: int) -> npt.NDArray[np.uint8]:
    allocator: Allocator = getattr(_of_thread, "allocate", pageable)
    return allocator(byte_count)


def scratch(purpose: str, byte_count: int) -> npt.NDArray[np.uint8]:
    """Memory of the calling thread for one purpose, contents undefined; valid until the thread asks for it again."""
    buffer: npt.NDArray[np.uint8] | None = getattr(_scratch, purpose, None)
    if buffer is None or len(buffer) < byte_count:
        buffer = _allocate(byte_count)
        setattr(_scratch, purpose, buffer)
    return buffer[:byte_count]


class BufferPool:
    """Buffers of one capacity that pass from thread to thread: whoever is done with one gives it back."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._free: deque[npt.NDArray[np.uint8]] = deque()

    def take(self) -> npt.NDArray[np.uint8]:
        """A buffer of the full capacity, contents undefined."""
        try:
            return self._free.pop()
        except IndexError:
            return _allocate(self._capacity_bytes)

    def give(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Take a buffer back; its last user must be done with it."""
        self._free.append(buffer)
