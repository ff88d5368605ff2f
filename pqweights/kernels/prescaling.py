"""Step 2 of section 5 of docs/format.md for the rare blocks that need it, in numba: scaling by a power of two."""

from __future__ import annotations

from typing import Any

import numpy as np

from pqweights.kernels.jit import jit


@jit
def prescale_blocks(x: Any, squares: Any, two_to_k: Any) -> Any:
    """Prescale the blocks that need it; those that are not finite become zero. Returns the first of these, or -1."""
    first_bad = -1
    for i in range(len(squares)):
        if not _is_safe(squares[i]):
            k = _prescale(x[i * 128 : (i + 1) * 128])
            if k != -1000:
                two_to_k[i] = power_of_two(k)
                continue
            x[i * 128 : (i + 1) * 128] = 0
            if first_bad < 0:
                first_bad = i
    return first_bad


@jit
def _is_safe(square: Any) -> Any:
    """Whether a sum of squares is far enough from 0 and infinity to need no prescaling."""
    return square >= np.float32(2.0**-60) and square <= np.float32(2.0**60)


@jit
def power_of_two(k: Any) -> Any:
    """2**k, exactly, in f64."""
    result = 1.0
    for _ in range(abs(k)):
        result = result * (2.0 if k > 0 else 0.5)
    return result


@jit
def _prescale(x: Any) -> Any:
    """Multiply a block by 2**-k, k being the exponent of its largest magnitude.

    Returns k, or -1000 if a value is not finite.
    """
    largest = np.float32(0)
    finite = True
    for j in range(128):
        if not np.isfinite(x[j]):
            finite = False
        largest = max(largest, abs(x[j]))
    if not finite:
        return np.int64(-1000)
    if largest == 0:
        return np.int64(0)
    k = np.int64(0)
    wide = np.float64(largest)
    while wide >= 2.0:
        wide *= 0.5
        k += 1
    while wide < 1.0:
        wide *= 2.0
        k -= 1
    half = np.int64(abs(k) // 2)
    if k < 0:
        half = -half
    first = np.float32(power_of_two(-half))
    second = np.float32(power_of_two(half - k))
    for j in range(128):
        x[j] = x[j] * first * second
    return k
