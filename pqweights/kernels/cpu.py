"""The CPU backend: one fused pass per block in numba, compiled once for every width and dtype.

Simple loops run over 128 contiguous elements and LLVM vectorises them; the butterflies, sums and table look-ups are
vector code of our own (kernels/vector.py). Nothing is fused or reassociated, so the bytes equal the reference's. The
kernels release the GIL; callers bring the threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from pqweights.codebook import Codebook
from pqweights.kernels import SIGNS, VALUE_DTYPES, EncodeStats
from pqweights.kernels.vector import (
    CELLS,
    hadamard,
    look_up_5,
    look_up_6,
    look_up_7,
    look_up_8,
    quantize_5,
    quantize_6,
    quantize_7,
    quantize_8,
    tree_sum,
)  # fmt: skip

# numba's cache looks at this file alone, so it must change with the other one that makes the code; a test compares.
VECTOR_SOURCE_SHA256 = "ca063702d34117c484e88d01c800744dd0a031d97e91bab4e96967f6c7beda13"


def _jit(function: Callable[..., Any]) -> Any:
    """Compile into whatever calls it, without the GIL."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def _cached_jit(function: Callable[..., Any]) -> Any:
    """Compile on first call and keep the machine code on disk where some cache folder is writable."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # numba found no writable place for its cache: a read-only installation without a home
        return _jit(function)


def _call(kernel: Any, *arguments: Any) -> Any:
    """Call a kernel; a cache that cannot be written (a full or broken disk) costs a compilation, not the run."""
    try:
        return kernel(*arguments)
    except OSError:  # raised after the compilation, which the second call uses
        return kernel(*arguments)


@functools.lru_cache(maxsize=32)
def _encode_table(
    levels: tuple[float, ...], thresholds: tuple[float, ...]
) -> tuple[npt.NDArray[np.float32], np.float32]:
    """The table of vector.quantize for symmetric levels, and cells per unit.

    Magnitudes are cut into uniform cells that are narrower than the smallest gap between thresholds, so that at most
    one threshold lies in a cell or so near to its ends that rounding could place a value on the wrong side of one.
    """
    half = len(levels) // 2
    positive = np.array(levels[half:], dtype=np.float32)
    limits = np.array(thresholds[half:], dtype=np.float64)
    assert np.array_equal(positive, -np.array(levels[:half], dtype=np.float32)[::-1]) and thresholds[half - 1] == 0
    bits = max(5, len(levels).bit_length() - 1)
    cells = CELLS[bits]
    width = float(limits[-1]) / (cells - 1.5)
    slack = width / 1000
    assert len(limits) == 1 or width + 2 * slack < np.diff(limits).min()
    below = np.searchsorted(limits, np.arange(cells) * width - slack, side="right").astype(np.int32)
    threshold_of = np.append(limits, np.inf).astype(np.float32)[below]
    padded = np.zeros(1 << (bits - 1), dtype=np.float32)
    padded[:half] = positive
    return np.concatenate([threshold_of, below.view(np.float32), padded]), np.float32(1 / width)


def _padded_levels(codebook: Codebook) -> npt.NDArray[np.float32]:
    """The levels, filled up to the 32 that the smallest look-up takes."""
    levels = np.zeros(max(32, len(codebook.levels)), dtype=np.float32)
    levels[: len(codebook.levels)] = codebook.levels
    return levels


@_jit
def _half_from_float(x):  # type: ignore[no-untyped-def]  # f32, non-negative and finite -> u16
    """The float16 bit pattern nearest to x, ties to even."""
    if x >= np.float32(65520.0):
        return np.uint16(0x7C00)
    if x < np.float32(2.0**-14):
        return np.uint16(np.rint(x * np.float32(2.0**24)))
    cell = np.empty(1, np.float32)
    cell[0] = x
    u = cell.view(np.uint32)[0]
    u = u + np.uint32(0xFFF) + ((u >> np.uint32(13)) & np.uint32(1))
    return np.uint16((u >> np.uint32(13)) - np.uint32((127 - 15) << 10))


@_jit
def _float_from_half(h):  # type: ignore[no-untyped-def]  # u16, non-negative -> f64
    """The value of a float16 bit pattern."""
    exponent = np.int64(h >> np.uint16(10)) & 31
    mantissa = np.int64(h) & 1023
    sign = -1.0 if h & np.uint16(0x8000) else 1.0
    if exponent == 31:
        return sign * np.inf if mantissa == 0 else np.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-24
    return sign * (1024 + mantissa) * 2.0 ** np.float64(exponent - 25)


@_jit
def _load(words16, words32, dtype, start, bits, x):  # type: ignore[no-untyped-def]
    """The 128 values from `start` as float32 bit patterns in `bits`; x is the same memory as float32."""
    if dtype == 0:
        for j in range(128):
            bits[j] = np.uint32(words16[start + j]) << np.uint32(16)
    elif dtype == 1:
        for j in range(128):
            h = np.uint32(words16[start + j])
            sign = (h & np.uint32(0x8000)) << np.uint32(16)
            magnitude = (h & np.uint32(0x7FFF)) << np.uint32(13)
            exponent = magnitude & np.uint32(0x0F800000)
            rebiased = magnitude + np.uint32(112 << 23)
            if exponent == np.uint32(0x0F800000):  # infinity and NaN stay what they are
                rebiased = magnitude + np.uint32(224 << 23)
            bits[j] = rebiased | sign
            if exponent == np.uint32(0):  # zero and subnormals: the mantissa counts 2**-24
                tiny = np.float32(np.int32(magnitude >> np.uint32(13))) * np.float32(2.0**-24)
                x[j] = -tiny if sign else tiny
    else:
        for j in range(128):
            bits[j] = words32[start + j]


@_jit
def _store(bits, x, dtype, start, words16, words32):  # type: ignore[no-untyped-def]
    """Saturate the 128 values of x, round them to nearest even and write them from `start`; x shares memory with bits."""
    if dtype == 0:
        limit = np.float32(3.3895313892515355e38)
        for j in range(128):
            x[j] = min(max(x[j], -limit), limit)
        for j in range(128):
            u = bits[j]
            words16[start + j] = np.uint16(
                (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            )
    elif dtype == 1:
        limit = np.float32(65504.0)
        for j in range(128):
            x[j] = min(max(x[j], -limit), limit)
        for j in range(128):
            u = bits[j]
            sign = (u >> np.uint32(16)) & np.uint32(0x8000)
            magnitude = u & np.uint32(0x7FFFFFFF)
            rounded = magnitude + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))
            half = (rounded >> np.uint32(13)) - np.uint32(112 << 10)
            if magnitude < np.uint32(113 << 23):  # below 2**-14: count steps of 2**-24
                half = np.uint32(np.int32(np.rint(abs(x[j]) * np.float32(2.0**24))))
            words16[start + j] = np.uint16(half | sign)
    else:
        limit = np.float32(3.4028234663852886e38)
        for j in range(128):
            x[j] = min(max(x[j], -limit), limit)
        for j in range(128):
            words32[start + j] = bits[j]


@_jit
def _prescale(x):  # type: ignore[no-untyped-def]
    """Multiply x by 2**-k, k the exponent of its largest magnitude; k, or -1000 where a value is not finite."""
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
    first = np.float32(2.0 ** np.float64(-half))
    second = np.float32(2.0 ** np.float64(half - k))
    for j in range(128):
        x[j] = x[j] * first * second
    return k


@_jit
def _pack(q, bits, row):  # type: ignore[no-untyped-def]
    """Fold the 128 codes of q into the 16 * bits bytes of row, one field per binary digit of the width."""
    shift = np.uint8(0)
    at = 0
    if bits & 8:
        for i in range(128):
            row[i] = q[i]
        return
    if bits & 4:
        for i in range(64):
            row[i] = (q[i] & np.uint8(15)) | ((q[i + 64] & np.uint8(15)) << np.uint8(4))
        at = 64
        shift = np.uint8(4)
    if bits & 2:
        for i in range(32):
            packed = (q[i] >> shift) & np.uint8(3)
            for m in range(1, 4):
                packed |= ((q[i + 32 * m] >> shift) & np.uint8(3)) << np.uint8(2 * m)
            row[at + i] = packed
        at += 32
        shift = np.uint8(shift + np.uint8(2))
    if bits & 1:
        for i in range(16):
            packed = (q[i] >> shift) & np.uint8(1)
            for m in range(1, 8):
                packed |= ((q[i + 16 * m] >> shift) & np.uint8(1)) << np.uint8(m)
            row[at + i] = packed


@_jit
def _unpack(row, bits, q):  # type: ignore[no-untyped-def]
    """The inverse of _pack."""
    if bits & 8:
        for i in range(128):
            q[i] = row[i]
        return
    shift = 0
    at = 0
    if bits & 4:
        for i in range(64):
            q[i] = row[i] & np.uint8(15)
            q[i + 64] = row[i] >> np.uint8(4)
        at = 64
        shift = 4
    else:
        for i in range(128):
            q[i] = 0
    # Selecting by mask instead of shifting: no instruction set has a shift of bytes by a variable count.
    zero = np.uint8(0)
    if bits & 2:
        low, high = np.uint8(1 << shift), np.uint8(2 << shift)
        for m in range(4):
            low_mask, high_mask = np.uint8(1 << (2 * m)), np.uint8(2 << (2 * m))
            for i in range(32):
                packed = row[at + i]
                q[i + 32 * m] |= (low if packed & low_mask else zero) | (high if packed & high_mask else zero)
        at += 32
        shift += 2
    if bits & 1:
        value = np.uint8(1 << shift)
        for m in range(8):
            mask = np.uint8(1 << m)
            for i in range(16):
                q[i + 16 * m] |= value if row[at + i] & mask else zero


@_cached_jit
def _encode(  # type: ignore[no-untyped-def]
    values, dtype, bits, table, cells_per_unit, signs, norm_exponent, codes, norms, energies, errors,
):  # fmt: skip
    words16 = values.view(np.uint16)
    words32 = values.view(np.uint32)
    blocks = codes.shape[0]
    raw = np.empty(128, np.uint32)
    x = raw.view(np.float32)
    z = np.empty(128, np.float32)
    c = np.empty(128, np.float32)
    p = np.empty(128, np.float32)
    p2 = np.empty(128, np.float32)
    p3 = np.empty(128, np.float32)
    q = np.empty(128, np.uint8)
    half = np.int32(1 << (bits - 1))
    to_stored = 2.0 ** np.float64(-norm_exponent)
    from_stored = 2.0 ** np.float64(norm_exponent)
    smallest, largest = np.inf, 0.0
    first_bad = -1
    for b in range(blocks):
        _load(words16, words32, dtype, b * 128, raw, x)
        for j in range(128):
            x[j] = x[j] * signs[j]
        for j in range(128):
            p[j] = x[j] * x[j]
        squares = tree_sum(p)
        two_to_k = 1.0
        if not (squares >= np.float32(2.0**-60) and squares <= np.float32(2.0**60)):
            k = _prescale(x)
            if k == -1000:
                if first_bad < 0:
                    first_bad = b
                continue
            two_to_k = 2.0 ** np.float64(k)
            for j in range(128):
                p[j] = x[j] * x[j]
            squares = tree_sum(p)
        radius = np.sqrt(squares)
        inverse = np.float32(1) / radius if radius > 0 else np.float32(0)
        hadamard(x, z)
        for j in range(128):
            z[j] = z[j] * inverse
        if bits <= 5:
            quantize_5(z, cells_per_unit, table, half, q, c)
        elif bits == 6:
            quantize_6(z, cells_per_unit, table, half, q, c)
        elif bits == 7:
            quantize_7(z, cells_per_unit, table, half, q, c)
        else:
            quantize_8(z, cells_per_unit, table, half, q, c)
        for j in range(128):
            p[j] = z[j] * c[j]
            p2[j] = c[j] * c[j]
            distance = z[j] - c[j]
            p3[j] = distance * distance
        projection = tree_sum(p)
        level_energy = tree_sum(p2)
        residual = tree_sum(p3)
        norm = radius * (projection / level_energy)

        exact = np.float64(norm) * two_to_k
        stored = _half_from_float(np.float32(exact * to_stored))
        norms[b] = stored
        energy = np.float64(squares) * two_to_k * two_to_k
        energies[b] = energy
        if radius > 0:
            if exact > 0:
                smallest = min(smallest, exact)
                largest = max(largest, exact)
            gain = _float_from_half(stored) * from_stored / (np.float64(radius) * two_to_k)
            short = 1.0 - gain
            per_block = np.float64(residual) + 2.0 * short * (np.float64(projection) - np.float64(level_energy))
            per_block = per_block + short * short * np.float64(level_energy)
            errors[b] = energy / 128.0 * max(per_block, 0.0)
        else:
            errors[b] = 0.0
        _pack(q, bits, codes[b])
    return smallest, largest, first_bad


@_cached_jit
def _decode(  # type: ignore[no-untyped-def]
    codes, norms, dtype, bits, levels, signs, norm_exponent, values,
):  # fmt: skip
    words16 = values.view(np.uint16)
    words32 = values.view(np.uint32)
    raw = np.empty(128, np.uint32)
    y = raw.view(np.float32)
    x = np.empty(128, np.float32)
    q = np.empty(128, np.uint8)
    from_stored = 2.0 ** np.float64(norm_exponent - 7)
    for b in range(codes.shape[0]):
        _unpack(codes[b], bits, q)
        if bits <= 5:
            look_up_5(q, levels, x)
        elif bits == 6:
            look_up_6(q, levels, x)
        elif bits == 7:
            look_up_7(q, levels, x)
        else:
            look_up_8(q, levels, x)
        hadamard(x, y)
        scale = np.float32(_float_from_half(norms[b]) * from_stored)
        for j in range(128):
            y[j] = y[j] * scale * signs[j]
        _store(raw, y, dtype, b * 128, words16, words32)


_NO_SIGNS = np.ones_like(SIGNS)


def encode(
    values: npt.NDArray[np.uint8],
    dtype: str,
    codebook: Codebook,
    signed: bool,
    norm_exponent: int,
    codes: npt.NDArray[np.uint8],
    norms: npt.NDArray[np.uint16],
    energies: npt.NDArray[np.float64],
    errors: npt.NDArray[np.float64],
) -> EncodeStats:
    """See `pqweights.kernels.Backend.encode`."""
    table, cells_per_unit = _encode_table(tuple(codebook.levels.tolist()), tuple(codebook.thresholds.tolist()))
    smallest, largest, first_bad = _call(
        _encode, values, VALUE_DTYPES[dtype], codebook.bits, table, cells_per_unit, SIGNS if signed else _NO_SIGNS, norm_exponent,
        codes, norms, energies, errors,
    )  # fmt: skip
    return EncodeStats(float(smallest), float(largest), int(first_bad))


def decode(
    codes: npt.NDArray[np.uint8],
    norms: npt.NDArray[np.uint16],
    dtype: str,
    codebook: Codebook,
    signed: bool,
    norm_exponent: int,
    values: npt.NDArray[np.uint8],
) -> None:
    """See `pqweights.kernels.Backend.decode`."""
    signs = SIGNS if signed else _NO_SIGNS
    _call(
        _decode,
        codes,
        norms,
        VALUE_DTYPES[dtype],
        codebook.bits,
        _padded_levels(codebook),
        signs,
        norm_exponent,
        values,
    )
