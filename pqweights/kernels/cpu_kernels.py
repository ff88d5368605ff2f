"""The CPU kernels in numba: one fused pass over groups of blocks that stay in L1, for every width and dtype at once.

Rotation, level search, their sums and packing are vector code written by hand (vector.py, packing.py). The numbers of
which a block has one are computed for a group at a time, in loops that LLVM vectorises: square root and division
would stall a single block. Nothing is fused or reassociated, so the bytes equal the reference's. The kernels take
pointers, allocate nothing and raise nothing, so their machine code runs without numba (compiler.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, types

from pqweights.kernels.conversions import floats_from_halves, half_from_float, load_values, store_values
from pqweights.kernels.jit import inlined, jit
from pqweights.kernels.packing import pack_1, pack_2, pack_4, pack_8, unpack_1, unpack_2, unpack_4, unpack_8
from pqweights.kernels.vector import (
    look_up_5,
    look_up_6,
    look_up_7,
    look_up_8,
    quantize_5,
    quantize_6,
    quantize_7,
    quantize_8,
    stack,
    sum_of_squares,
)

# Blocks whose floats, codes and sums the L1 cache holds together.
GROUP = 16


@jit
def _power_of_two(k: Any) -> Any:
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
    first = np.float32(_power_of_two(-half))
    second = np.float32(_power_of_two(half - k))
    for j in range(128):
        x[j] = x[j] * first * second
    return k


@jit
def _pack(q: Any, block: Any, bits: Any, row: Any) -> None:
    """Fold the 128 codes of a block into the 16 * bits bytes of row, one field per binary digit of the width.

    The codes come as vector.quantize leaves them: half the number of levels is added here.
    """
    added = np.uint8(1 << (bits - 1))
    lowest = np.uint8(1)
    at = 0
    if bits & 8:
        pack_8(q, block, added, lowest, row, at)
    if bits & 4:
        pack_4(q, block, added, lowest, row, at)
        at, lowest = 64, np.uint8(16)
    if bits & 2:
        pack_2(q, block, added, lowest, row, at)
        at, lowest = at + 32, np.uint8(lowest << np.uint8(2))
    if bits & 1:
        pack_1(q, block, added, lowest, row, at)


@jit
def _unpack(row: Any, bits: Any, q: Any, block: Any) -> None:
    """The inverse of _pack, but the codes count from 0."""
    lowest = np.uint8(1)
    at = 0
    if bits & 8:
        unpack_8(row, at, lowest, q, block)
    elif bits & 4:
        unpack_4(row, at, lowest, q, block)
        at, lowest = 64, np.uint8(16)
    else:
        q[block * 128 : (block + 1) * 128] = 0
    if bits & 2:
        unpack_2(row, at, lowest, q, block)
        at, lowest = at + 32, np.uint8(lowest << np.uint8(2))
    if bits & 1:
        unpack_1(row, at, lowest, q, block)


class _Room(NamedTuple):
    """The arrays on the stack in which a group of blocks is encoded.

    They have an entry for each weight or, from `sums` on, for each block.

    x: the weights (f32).
    bits: the same memory (u32).
    codes: as vector.quantize leaves them (u8).
    sums: four for each block, as vector.quantize leaves them (f32).
    squares: the sum of squares of x (f32).
    radius: its square root (f32).
    inverse: 1 / radius, or 0 (f32).
    two_to_k: the power of two by which prescaling divided x (f64).
    exact: the norm of least squared error (f64).
    norm: that norm, scaled for storing (f32).
    norm_bits: the same memory (u32).
    stored: the norm as float16 keeps it (f32).
    stored_bits: the same memory (u32).
    """

    x: Any
    bits: Any
    codes: Any
    sums: Any
    squares: Any
    radius: Any
    inverse: Any
    two_to_k: Any
    exact: Any
    norm: Any
    norm_bits: Any
    stored: Any
    stored_bits: Any


@inlined
def _flip(x: Any, count: Any, signs: Any) -> None:
    """Multiply the coordinates of `count` blocks by the signs."""
    for i in range(count):
        for j in range(128):
            x[i * 128 + j] = x[i * 128 + j] * signs[j]


@inlined
def _is_safe(square: Any) -> Any:
    """Whether a sum of squares is far enough from 0 and infinity to need no prescaling."""
    return square >= np.float32(2.0**-60) and square <= np.float32(2.0**60)


@inlined
def _measure_lengths(room: Any, count: Any) -> Any:
    """Prescale the blocks that need it, and find their lengths. Returns the first block that is not finite, or -1."""
    first_bad = -1
    for i in range(count):
        room.squares[i] = sum_of_squares(room.x, i)
    safe = True
    for i in range(count):
        room.two_to_k[i] = 1.0
        safe = safe and _is_safe(room.squares[i])
    if not safe:
        for i in range(count):
            if not _is_safe(room.squares[i]):
                k = _prescale(room.x[i * 128 : (i + 1) * 128])
                room.squares[i] = sum_of_squares(room.x, i)
                if k == -1000:
                    room.squares[i] = np.float32(0)
                    if first_bad < 0:
                        first_bad = i
                else:
                    room.two_to_k[i] = _power_of_two(k)
    for i in range(count):
        room.radius[i] = np.sqrt(room.squares[i])
        room.inverse[i] = np.float32(1) / room.radius[i] if room.radius[i] > 0 else np.float32(0)
    return first_bad


@inlined
def _quantize(room: Any, count: Any, bits: Any, table: Any) -> None:
    """Rotate the blocks, find the nearest levels, and compute the sums that norms and errors need."""
    x, inverse, codes, sums = room.x, room.inverse, room.codes, room.sums
    for i in range(count):
        if bits <= 5:
            quantize_5(x, i, inverse[i], table, codes, sums)
        elif bits == 6:
            quantize_6(x, i, inverse[i], table, codes, sums)
        elif bits == 7:
            quantize_7(x, i, inverse[i], table, codes, sums)
        else:
            quantize_8(x, i, inverse[i], table, codes, sums)


@inlined
def _fit_norms(room: Any, to_stored: Any, norms: Any, smallest: Any, largest: Any) -> Any:
    """Write the norms of least squared error. Returns the smallest positive and the largest norm so far."""
    for i in range(len(norms)):
        room.exact[i] = np.float64(room.radius[i] * (room.sums[4 * i] / room.sums[4 * i + 1])) * room.two_to_k[i]
        room.norm[i] = np.float32(room.exact[i] * to_stored)
    for i in range(len(norms)):
        norms[i] = half_from_float(room.norm_bits[i], room.norm[i])
        smallest = min(smallest, room.exact[i] if room.exact[i] > 0 else np.inf)
        largest = max(largest, room.exact[i])
    floats_from_halves(norms, room.stored_bits, room.stored)
    return smallest, largest


@inlined
def _measure_errors(room: Any, from_stored: Any, energies: Any, errors: Any) -> None:
    """Write the sum of squares of each block, and that of its errors once decoded with the stored norm."""
    for i in range(len(energies)):
        energy = np.float64(room.squares[i]) * room.two_to_k[i] * room.two_to_k[i]
        length = np.float64(room.radius[i]) * room.two_to_k[i]
        gain = np.float64(room.stored[i]) * from_stored / (length if length > 0 else 1.0)
        short = 1.0 - gain
        projection, level_energy = np.float64(room.sums[4 * i]), np.float64(room.sums[4 * i + 1])
        per_block = np.float64(room.sums[4 * i + 2]) + 2.0 * short * (projection - level_energy)
        per_block = per_block + short * short * level_energy
        energies[i] = energy
        errors[i] = energy / 128.0 * max(per_block, 0.0)


# Bytes of the arrays on the stack: an element of 1, 4 or 8 bytes for each weight or each block of a group.
_WEIGHTS_OF_1, _WEIGHTS_OF_4 = GROUP * 128, GROUP * 128 * 4
_BLOCKS_OF_4, _BLOCKS_OF_8 = GROUP * 4, GROUP * 8
_FOUR_SUMS = GROUP * 4 * 4


@jit
def _floats_and_bits(address: Any, count: Any) -> Any:
    """The same memory as float32 and as bit patterns."""
    return carray(address, count, np.float32), carray(address, count, np.uint32)


@jit
def _words(address: Any, count: Any) -> Any:
    """The same memory as words of 16 bits, to be used for BF16 and F16, and of 32 bits, to be used for F32."""
    return carray(address, count, np.uint16), carray(address, count, np.uint32)


# ctypes calls the kernels, so their parameters are plain pointers and numbers. They are longer than other functions
# because that is where arrays get their shapes, and because memory on the stack ends with the function that asks for
# it.
ENCODE = types.void(*[types.voidptr] * 8, *[types.int64] * 4, *[types.float64] * 2)
DECODE = types.void(*[types.voidptr] * 5, *[types.int64] * 5, types.float64)


def _encode(
    values_at: Any,
    table_at: Any,  # see vector.quantize
    signs_at: Any,
    codes_at: Any,
    norms_at: Any,
    energies_at: Any,
    errors_at: Any,
    stats_at: Any,  # out: smallest norm, largest norm, first bad block
    blocks: Any,
    dtype: Any,  # a value of VALUE_DTYPES
    bits: Any,
    signed: Any,
    to_stored: Any,  # 2**-norm_exponent
    from_stored: Any,  # 2**norm_exponent
) -> None:
    words16, words32 = _words(values_at, blocks * 128)
    table = carray(table_at, 1, np.float32)
    signs = carray(signs_at, 128, np.float32)
    codes = carray(codes_at, (blocks, 16 * bits), np.uint8)
    norms = carray(norms_at, blocks, np.uint16)
    energies = carray(energies_at, blocks, np.float64)
    errors = carray(errors_at, blocks, np.float64)
    stats = carray(stats_at, 3, np.float64)
    x, x_bits = _floats_and_bits(stack(_WEIGHTS_OF_4), GROUP * 128)
    norm, norm_bits = _floats_and_bits(stack(_BLOCKS_OF_4), GROUP)
    stored, stored_bits = _floats_and_bits(stack(_BLOCKS_OF_4), GROUP)
    room = _Room(
        x=x,
        bits=x_bits,
        codes=carray(stack(_WEIGHTS_OF_1), GROUP * 128, np.uint8),
        sums=carray(stack(_FOUR_SUMS), GROUP * 4, np.float32),
        squares=carray(stack(_BLOCKS_OF_4), GROUP, np.float32),
        radius=carray(stack(_BLOCKS_OF_4), GROUP, np.float32),
        inverse=carray(stack(_BLOCKS_OF_4), GROUP, np.float32),
        two_to_k=carray(stack(_BLOCKS_OF_8), GROUP, np.float64),
        exact=carray(stack(_BLOCKS_OF_8), GROUP, np.float64),
        norm=norm,
        norm_bits=norm_bits,
        stored=stored,
        stored_bits=stored_bits,
    )
    smallest, largest, first_bad = np.inf, 0.0, -1
    for first in range(0, blocks, GROUP):
        end = min(first + GROUP, blocks)
        count = end - first
        load_values(words16[first * 128 : end * 128], words32[first * 128 : end * 128], dtype, room.bits, room.x)
        if signed:
            _flip(room.x, count, signs)
        bad = _measure_lengths(room, count)
        if bad >= 0 and first_bad < 0:
            first_bad = first + bad
        _quantize(room, count, bits, table)
        smallest, largest = _fit_norms(room, to_stored, norms[first:end], smallest, largest)
        _measure_errors(room, from_stored, energies[first:end], errors[first:end])
        for i in range(count):
            _pack(room.codes, i, bits, codes[first + i])
    stats[0], stats[1], stats[2] = smallest, largest, first_bad


def _decode(
    codes_at: Any,
    norms_at: Any,
    levels_at: Any,
    signs_at: Any,
    values_at: Any,
    blocks: Any,
    dtype: Any,
    bits: Any,
    signed: Any,
    rotate: Any,
    from_stored: Any,  # what a stored norm is multiplied by
) -> None:
    codes = carray(codes_at, (blocks, 16 * bits), np.uint8)
    norms = carray(norms_at, blocks, np.uint16)
    levels = carray(levels_at, 1, np.float32)
    signs = carray(signs_at, 128, np.float32)
    words16, words32 = _words(values_at, blocks * 128)

    y, bit_patterns = _floats_and_bits(stack(_WEIGHTS_OF_4), GROUP * 128)
    q = carray(stack(_WEIGHTS_OF_1), GROUP * 128, np.uint8)
    norm, norm_bits = _floats_and_bits(stack(_BLOCKS_OF_4), GROUP)

    for first in range(0, blocks, GROUP):
        count = min(GROUP, blocks - first)
        floats_from_halves(norms[first : first + count], norm_bits, norm)
        for i in range(count):
            norm[i] = np.float32(np.float64(norm[i]) * from_stored)
        for i in range(count):
            _unpack(codes[first + i], bits, q, i)
        for i in range(count if not rotate else 0):
            for j in range(128):
                y[i * 128 + j] = levels[q[i * 128 + j]] * norm[i]
        for i in range(count if rotate else 0):
            _look_up(q, levels, bits, i, norm[i], y)
        if signed:
            _flip(y, count, signs)
        begin, end = first * 128, (first + count) * 128
        store_values(bit_patterns[: count * 128], y[: count * 128], dtype, words16[begin:end], words32[begin:end])


@inlined
def _look_up(q: Any, levels: Any, bits: Any, block: Any, norm: Any, y: Any) -> None:
    """Rotate the levels that the codes of a block stand for, and multiply them by its norm."""
    if bits <= 5:
        look_up_5(q, levels, block, norm, y)
    elif bits == 6:
        look_up_6(q, levels, block, norm, y)
    elif bits == 7:
        look_up_7(q, levels, block, norm, y)
    else:
        look_up_8(q, levels, block, norm, y)


KERNELS = {"encode": (_encode, ENCODE), "decode": (_decode, DECODE)}
