"""The CPU kernels in numba: one fused pass over groups of blocks that stay in L1, for every width and dtype at once.

Rotation, level search, their sums and packing are vector code written by hand (encoding.py, vector.py, packing.py). The
numbers of which a block has one are computed for a group at a time, in loops that LLVM vectorises. Nothing is
reassociated, and fused only where that changes no result, so the bytes equal the reference's. The kernels take
pointers, allocate nothing and raise nothing, so their machine code runs without numba (compiler.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, types

from pqweights.kernels.conversions import floats_from_halves, half_from_float, load_values, store_values
from pqweights.kernels.encoding import (
    load_floats,
    load_words,
    quantize_2,
    quantize_3,
    quantize_4,
    quantize_5,
    quantize_6,
    quantize_7,
    quantize_8,
    store_rows,
    sum_squares,
)
from pqweights.kernels.jit import inlined, jit
from pqweights.kernels.packing import unpack_1, unpack_2, unpack_4, unpack_8
from pqweights.kernels.prescaling import prescale_blocks
from pqweights.kernels.vector import look_up_5, look_up_6, look_up_7, look_up_8, stack

# Blocks that are encoded or decoded together, as many as a vector has lanes; the L1 cache holds their floats and sums.
GROUP = 16
# How far ahead weights are fetched into the cache. The processor does not foresee their order by itself.
_GROUPS_AHEAD = 2


@jit
def unpack_codes(row: Any, bits: Any, q: Any, block: Any) -> None:
    """Write the 128 codes of a row, which has one field per binary digit of the width, to a block of q."""
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

    Up to `rows`, see encoding.py; from `squares` on, they have an entry for each block.

    work, terms: f32.
    packed: i32.
    x: the weights, if they are not read from where they are (f32).
    bits: the same memory (u32).
    rows: the packed codes of a group that is not whole (u8).
    squares: the sum of squares of x (f32).
    radius: its square root (f32).
    sums: three for each block (f32).
    two_to_k: the power of two by which prescaling divided x (f64).
    exact: the norm of least squared error (f64).
    norm: that norm, scaled for storing (f32).
    norm_bits: the same memory (u32).
    stored: the norm as float16 keeps it (f32).
    stored_bits: the same memory (u32).
    halves: the float16 itself (u16).
    energies, errors: what is returned of each block (f64).
    smallest, largest: the smallest positive and the largest norm so far (f64).
    """

    work: Any
    terms: Any
    packed: Any
    x: Any
    bits: Any
    rows: Any
    squares: Any
    radius: Any
    sums: Any
    two_to_k: Any
    exact: Any
    norm: Any
    norm_bits: Any
    stored: Any
    stored_bits: Any
    halves: Any
    energies: Any
    errors: Any
    smallest: Any
    largest: Any


@inlined
def _flip(x: Any, count: Any, signs: Any) -> None:
    """Multiply the coordinates of `count` blocks by the signs."""
    for i in range(count):
        for j in range(128):
            x[i * 128 + j] = x[i * 128 + j] * signs[j]


@inlined
def _load_rows(room: Any, words16: Any, words32: Any, dtype: Any, signed: Any, signs: Any) -> None:
    """Convert up to GROUP blocks of any dtype to float32."""
    size = len(words16)
    room.x[size:] = 0
    load_values(words16, words32, dtype, room.bits[:size], room.x[:size])
    if signed:
        _flip(room.x, size // 128, signs)


@inlined
def _quantize(room: Any, bits: Any, table: Any, rows: Any, words: Any, upcoming: Any) -> None:
    """Find the nearest levels, pack their codes into rows, and compute the sums that norms and errors need."""
    work, squares, radius = room.work, room.squares, room.radius
    terms, packed, sums = room.terms, room.packed, room.sums
    if bits == 2:
        quantize_2(work, squares, table, radius, terms, packed, sums, words, upcoming)
    elif bits == 3:
        quantize_3(work, squares, table, radius, terms, packed, sums, words, upcoming)
    elif bits == 4:
        quantize_4(work, squares, table, radius, terms, packed, sums, words, upcoming)
    elif bits == 5:
        quantize_5(work, squares, table, radius, terms, packed, sums, words, upcoming)
    elif bits == 6:
        quantize_6(work, squares, table, radius, terms, packed, sums, words, upcoming)
    elif bits == 7:
        quantize_7(work, squares, table, radius, terms, packed, sums, words, upcoming)
    else:
        quantize_8(work, squares, table, radius, terms, packed, sums, words, upcoming)
    for word in range(1 if bits <= 4 else 2):
        store_rows(packed, word * GROUP * 16, min(4, bits - 4 * word), rows, word * 64, bits * 16)


@inlined
def _fit_norms(room: Any, to_stored: Any) -> None:
    """Find the norms of least squared error."""
    for i in range(GROUP):
        quotient = room.sums[i] / room.sums[GROUP + i]
        room.exact[i] = np.float64(room.radius[i] * quotient) * room.two_to_k[i]
        room.norm[i] = np.float32(room.exact[i] * to_stored)
    for i in range(GROUP):
        room.halves[i] = half_from_float(room.norm_bits[i], room.norm[i])
        room.smallest[i] = min(room.smallest[i], room.exact[i] if room.exact[i] > 0 else np.inf)
        room.largest[i] = max(room.largest[i], room.exact[i])
    floats_from_halves(room.halves, room.stored_bits, room.stored)


@inlined
def _measure_errors(room: Any, from_stored: Any) -> None:
    """Find the sum of squares of each block, and that of its errors once decoded with the stored norm."""
    for i in range(GROUP):
        energy = np.float64(room.squares[i]) * room.two_to_k[i] * room.two_to_k[i]
        length = np.float64(room.radius[i]) * room.two_to_k[i]
        gain = np.float64(room.stored[i]) * from_stored / (length if length > 0 else 1.0)
        short = 1.0 - gain
        projection, level_energy = np.float64(room.sums[i]), np.float64(room.sums[GROUP + i])
        per_block = np.float64(room.sums[2 * GROUP + i]) + 2.0 * short * (projection - level_energy)
        per_block = per_block + short * short * level_energy
        room.energies[i] = energy
        room.errors[i] = energy / 128.0 * max(per_block, 0.0)


# Bytes of the arrays on the stack: an element of 1, 4 or 8 bytes for each weight or each block of a group.
_WEIGHTS_OF_1, _WEIGHTS_OF_4 = GROUP * 128, GROUP * 128 * 4
_BLOCKS_OF_2, _BLOCKS_OF_4, _BLOCKS_OF_8 = GROUP * 2, GROUP * 4, GROUP * 8
_PACKED, _THREE_SUMS = 2 * GROUP * 16 * 4, 3 * GROUP * 4


@jit
def floats_and_bits(address: Any, count: Any) -> Any:
    """The same memory as float32 and as bit patterns."""
    return carray(address, count, np.float32), carray(address, count, np.uint32)


@jit
def words_of(address: Any, count: Any) -> Any:
    """The same memory as words of 16 bits, to be used for BF16 and F16, and of 32 bits, to be used for F32."""
    return carray(address, count, np.uint16), carray(address, count, np.uint32)


# ctypes calls the kernels, so their parameters are plain pointers and numbers. They are longer than other functions
# because that is where arrays get their shapes, and because memory on the stack ends with the function that asks for
# it.
ENCODE = types.void(*[types.voidptr] * 8, *[types.int64] * 4, *[types.float64] * 2)
DECODE = types.void(*[types.voidptr] * 5, *[types.int64] * 5, types.float64)


def _encode(
    values_at: Any,
    table_at: Any,  # see encoding._Search
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
    words16, words32 = words_of(values_at, blocks * 128)
    table = carray(table_at, 1, np.float32)
    signs = carray(signs_at, 128, np.float32)
    codes = carray(codes_at, blocks * 16 * bits, np.uint8)
    norms = carray(norms_at, blocks, np.uint16)
    energies = carray(energies_at, blocks, np.float64)
    errors = carray(errors_at, blocks, np.float64)
    stats = carray(stats_at, 3, np.float64)
    x, x_bits = floats_and_bits(stack(_WEIGHTS_OF_4), GROUP * 128)
    norm, norm_bits = floats_and_bits(stack(_BLOCKS_OF_4), GROUP)
    stored, stored_bits = floats_and_bits(stack(_BLOCKS_OF_4), GROUP)
    room = _Room(
        work=carray(stack(_WEIGHTS_OF_4), GROUP * 128, np.float32),
        terms=carray(stack(_WEIGHTS_OF_4), GROUP * 128, np.float32),
        packed=carray(stack(_PACKED), 2 * GROUP * 16, np.int32),
        x=x,
        bits=x_bits,
        rows=carray(stack(_WEIGHTS_OF_1), GROUP * 128, np.uint8),
        squares=carray(stack(_BLOCKS_OF_4), GROUP, np.float32),
        radius=carray(stack(_BLOCKS_OF_4), GROUP, np.float32),
        sums=carray(stack(_THREE_SUMS), 3 * GROUP, np.float32),
        two_to_k=carray(stack(_BLOCKS_OF_8), GROUP, np.float64),
        exact=carray(stack(_BLOCKS_OF_8), GROUP, np.float64),
        norm=norm,
        norm_bits=norm_bits,
        stored=stored,
        stored_bits=stored_bits,
        halves=carray(stack(_BLOCKS_OF_2), GROUP, np.uint16),
        energies=carray(stack(_BLOCKS_OF_8), GROUP, np.float64),
        errors=carray(stack(_BLOCKS_OF_8), GROUP, np.float64),
        smallest=carray(stack(_BLOCKS_OF_8), GROUP, np.float64),
        largest=carray(stack(_BLOCKS_OF_8), GROUP, np.float64),
    )
    first_bad = -1
    room.smallest[:] = np.inf
    room.largest[:] = 0
    for first in range(0, blocks, GROUP):
        end = min(first + GROUP, blocks)
        count, scaled = end - first, False
        room.two_to_k[:] = 1
        plain = count == GROUP and dtype == 0 and not signed
        part16, part32 = words16[first * 128 : end * 128], words32[first * 128 : end * 128]
        if not plain:
            _load_rows(room, part16, part32, dtype, signed, signs)
        while True:
            if plain:
                load_words(words16, first * 128, table, room.work, room.terms)
            else:
                load_floats(room.x, table, room.work, room.terms)
            if sum_squares(room.terms, room.squares) or scaled:
                break
            if plain:
                load_values(part16, part32, dtype, room.bits, room.x)
            bad = prescale_blocks(room.x, room.squares, room.two_to_k)
            if bad >= 0 and first_bad < 0:
                first_bad = first + bad
            plain, scaled = False, True
        part = codes[first * 16 * bits : end * 16 * bits]
        upcoming = (first + _GROUPS_AHEAD * GROUP) * 128 * (2 if dtype == 2 else 1)
        _quantize(room, bits, table, part if count == GROUP else room.rows, words16, upcoming)
        _fit_norms(room, to_stored)
        _measure_errors(room, from_stored)
        if count == GROUP:
            for i in range(GROUP):
                norms[first + i] = room.halves[i]
                energies[first + i] = room.energies[i]
                errors[first + i] = room.errors[i]
        else:
            for i in range(len(part)):
                part[i] = room.rows[i]
            for i in range(count):
                norms[first + i] = room.halves[i]
                energies[first + i] = room.energies[i]
                errors[first + i] = room.errors[i]
    smallest, largest = np.inf, 0.0
    for i in range(GROUP):
        smallest, largest = min(smallest, room.smallest[i]), max(largest, room.largest[i])
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
    words16, words32 = words_of(values_at, blocks * 128)

    y, bit_patterns = floats_and_bits(stack(_WEIGHTS_OF_4), GROUP * 128)
    q = carray(stack(_WEIGHTS_OF_1), GROUP * 128, np.uint8)
    norm, norm_bits = floats_and_bits(stack(_BLOCKS_OF_4), GROUP)

    for first in range(0, blocks, GROUP):
        count = min(GROUP, blocks - first)
        floats_from_halves(norms[first : first + count], norm_bits, norm)
        for i in range(count):
            norm[i] = np.float32(np.float64(norm[i]) * from_stored)
        for i in range(count):
            unpack_codes(codes[first + i], bits, q, i)
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
