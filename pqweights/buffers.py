"""Buffers that pass from thread to thread and are reused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

# The size of a cache line, in bytes: vector instructions are fastest on memory that begins at one.
ALIGNMENT = 64

Allocator = Callable[[int], npt.NDArray[np.uint8]]  # byte count -> memory, contents undefined


def pageable(byte_count: int) -> npt.NDArray[np.uint8]:
    """Return ordinary memory; pages that are never used cost nothing."""
    memory = np.empty(byte_count + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + byte_count]


class BufferPool:
    """Buffers of one capacity, shared by threads: the thread that uses a buffer last gives it back."""

    def __init__(self, capacity_bytes: int, allocate: Allocator = pageable) -> None:
        self._capacity_bytes = capacity_bytes
        self._allocate = allocate
        self._free: deque[npt.NDArray[np.uint8]] = deque()

    def take(self) -> npt.NDArray[np.uint8]:
        """Return a buffer of the full capacity, contents undefined."""
        try:
            return self._free.pop()
        except IndexError:
            return self._allocate(self._capacity_bytes)

    def give(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Take back a buffer that is no longer used."""
        self._free.append(buffer)
