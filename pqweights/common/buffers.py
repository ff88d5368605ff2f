"""Memory for arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# The size of a cache line, in bytes: vector instructions are fastest on memory that begins at one.
ALIGNMENT = 64


def pageable(byte_count: int) -> npt.NDArray[np.uint8]:
    """Return ordinary memory; pages that are never used cost nothing."""
    memory = np.empty(byte_count + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + byte_count]
