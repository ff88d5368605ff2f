"""Conversions between float32 and shorter floats, in numba, operation by operation as docs/format.md has them.

Most are loops without branches over many values, which LLVM vectorises. Where a function takes `x` (f32) and `bits`
(u32), the two share memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pqweights.kernels.jit import jit


@jit
def half_from_float(u: Any, x: Any) -> Any:
    """The float16 bit pattern (u16) nearest to x, ties to even. x: not negative, finite (f32). u: its bits."""
    rounded = u + np.uint32(0xFFF) + ((u >> np.uint32(13)) & np.uint32(1))
    normal = (rounded >> np.uint32(13)) - np.uint32((127 - 15) << 10)
    tiny = np.uint32(np.int32(np.rint(min(x, np.float32(1)) * np.float32(2.0**24))))
    half = tiny if x < np.float32(2.0**-14) else normal
    return np.uint16(0x7C00) if x >= np.float32(65520.0) else np.uint16(half)


@jit
def _bits_from_half(h: Any) -> Any:
    """The float32 bit pattern (u32) of a float16's value. Subnormals give 0; infinity and NaN stay what they are."""
    h = np.uint32(h)
    magnitude = (h & np.uint32(0x7FFF)) << np.uint32(13)
    exponent = magnitude & np.uint32(0x0F800000)
    up = np.uint32(224 << 23) if exponent == np.uint32(0x0F800000) else np.uint32(112 << 23)
    rebiased = np.uint32(0) if exponent == np.uint32(0) else magnitude + up
    return rebiased | ((h & np.uint32(0x8000)) << np.uint32(16))


@jit
def floats_from_halves(halves: Any, bits: Any, x: Any) -> None:
    """Write the values of float16 bit patterns to x."""
    for i in range(len(halves)):
        bits[i] = _bits_from_half(halves[i])
    for i in range(len(halves)):
        h = np.int32(halves[i])
        if h & np.int32(0x7C00) == 0:  # zero and subnormals: the mantissa counts 2**-24
            tiny = np.float32(h & np.int32(0x3FF)) * np.float32(2.0**-24)
            x[i] = -tiny if h & np.int32(0x8000) else tiny


@jit
def load_values(words16: Any, words32: Any, dtype: Any, bits: Any, x: Any) -> None:
    """Write values of a dtype (a value of VALUE_DTYPES) to x; F32 values come in words32, others in words16."""
    if dtype == 0:
        for j in range(len(words16)):
            bits[j] = np.uint32(words16[j]) << np.uint32(16)
    elif dtype == 1:
        floats_from_halves(words16, bits, x)
    else:
        for j in range(len(words32)):
            bits[j] = words32[j]


@jit
def store_values(bits: Any, x: Any, dtype: Any, words16: Any, words32: Any) -> None:
    """The inverse of load_values, rounded to nearest even and saturated; x is overwritten."""
    if dtype == 0:
        limit = np.float32(3.3895313892515355e38)
        for j in range(len(x)):
            x[j] = min(max(x[j], -limit), limit)
        for j in range(len(x)):
            u = bits[j]
            words16[j] = np.uint16((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    elif dtype == 1:
        limit = np.float32(65504.0)
        for j in range(len(x)):
            x[j] = min(max(x[j], -limit), limit)
        for j in range(len(x)):
            u = bits[j]
            sign = (u >> np.uint32(16)) & np.uint32(0x8000)
            magnitude = u & np.uint32(0x7FFFFFFF)
            rounded = magnitude + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))
            half = (rounded >> np.uint32(13)) - np.uint32(112 << 10)
            if magnitude < np.uint32(113 << 23):  # below 2**-14: count steps of 2**-24
                half = np.uint32(np.int32(np.rint(abs(x[j]) * np.float32(2.0**24))))
            words16[j] = np.uint16(half | sign)
    else:
        limit = np.float32(3.4028234663852886e38)
        for j in range(len(x)):
            x[j] = min(max(x[j], -limit), limit)
        for j in range(len(x)):
            words32[j] = bits[j]


@jit
def bf16(x: Any, bits: Any) -> Any:
    """The BF16 nearest to x (f32), as f32, ties to even. bits: u32 [1], overwritten."""
    both = bits.view(np.float32)
    both[0] = x
    u = bits[0]
    bits[0] = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return both[0]


@jit
def to_e4m3(x: Any, bits: Any, codes: Any) -> None:
    """Write the F8_E4M3 nearest to each x, which is not negative: bytes 0 to 126, ties to even, saturated."""
    for j in range(len(codes)):
        small = np.int32(np.rint(min(x[j], np.float32(1)) * np.float32(512)))  # below 2**-6: steps of 2**-9
        u = bits[j]
        rounded = (u + np.uint32(0x7FFFF) + ((u >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
        normal = np.int32(min(rounded, np.uint32(0x87F))) - np.int32((127 - 7) << 3)
        codes[j] = np.uint8(min(small if x[j] < np.float32(2.0**-6) else normal, np.int32(126)))


@jit
def from_e4m3(codes: Any, x: Any, bits: Any) -> None:
    """The inverse of to_e4m3, for bytes 0 to 126."""
    for j in range(len(codes)):
        bits[j] = (np.uint32(codes[j]) << np.uint32(20)) + np.uint32((127 - 7) << 23)
    for j in range(len(codes)):
        x[j] = np.float32(codes[j]) * np.float32(2.0**-9) if codes[j] < 8 else x[j]


@jit
def to_e2m1(x: Any, codes: Any) -> None:
    """Write the F4_E2M1 nearest to each x, which is not negative: codes 0 to 7, ties down, saturated."""
    for j in range(len(codes)):
        v = x[j]
        low = np.int32(v > np.float32(0.25)) + np.int32(v > np.float32(0.75)) + np.int32(v > np.float32(1.25))
        high = np.int32(v > np.float32(2.5)) + np.int32(v > np.float32(3.5)) + np.int32(v > np.float32(5))
        codes[j] = np.uint8(low + np.int32(v > np.float32(1.75)) + high)


@jit
def from_e2m1(codes: Any, x: Any) -> None:
    """The inverse of to_e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    for j in range(len(codes)):
        c = np.float32(codes[j])
        x[j] = max(c * np.float32(0.5), max(c - np.float32(2), c + c - np.float32(8)))
