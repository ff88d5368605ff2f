"""Sixteen blocks to codes, as LLVM vector code for numba: rotation, search for the nearest levels, sums, packing.

The blocks lie in the sixteen lanes of a vector. Weight 16 * g + j of each, with g < 8 and j < 16, is in vector
16 * g + j of the work. So no butterfly and no sum crosses lanes, and the numbers of which a block has one are vectors.

1. Load.      Transpose; the butterflies below 16, over j, for one g after another; sums of squares.
2. Quantize.  For one j after another: the other butterflies, over g; the nearest levels; their sums; and the codes
              of the eight weights, packed. What they share are the bytes j, 16 + j, 32 + j, ... of a row.
3. Store.     Transpose the packed codes, and write the rows.

Every operation is one of docs/format.md, in its order; what is summed by folding is folded over g and then over j.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pqweights.kernels.emit import (
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    Lanes,
    array_pointers,
    call,
    load,
    loop,
    prefetch,
    shuffled,
    splat,
    store,
    transposed,
    transposed_halves,
)
from pqweights.kernels.vector import BLOCK, VECTORS, Table, clipped, difference, fold_vectors, multiply_add

# Degrees of the polynomials of the level search for widths up to 5, then 6, 7 and 8.
DEGREES = {5: 2, 6: 2, 7: 4, 8: 4}
_PARTS = ir.VectorType(I8, 4 * LANES)


# --- 1. Load ---


@intrinsic
def load_words(typingctx: Any, words: Any, first: Any, table: Any, work: Any, terms: Any) -> Any:
    """Fill the work from sixteen blocks of BF16 (u16), of which the first begins at words[first].

    terms: out: f32 [8, 16, 16], the squares of the weights.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, table, work, terms = array_pointers(context, builder, signature, args)
        minus_one = splat(builder, builder.load(table))

        def two_sixteens(i: Any, nothing: tuple[()]) -> tuple[()]:
            start = builder.add(args[1], builder.mul(i, I64(2 * LANES)))
            places = [builder.add(start, I64(BLOCK * row)) for row in range(LANES)]
            pairs = load_columns(builder, source, places, INTS, 2)
            for half in range(2):
                eight = pairs[half * VECTORS : (half + 1) * VECTORS]
                # The first weight of a pair is in the lower half of the word.
                x = [word.floats() for pair in eight for word in (pair << 16, pair & -(2**16))]
                _rotate_sixteen(x, builder.add(builder.mul(i, I64(2)), I64(half)), minus_one, work, terms)
            return nothing

        loop(builder, I64(VECTORS // 2), (), two_sixteens)
        return context.get_dummy_value()

    return types.void(words, first, table, work, terms), codegen


@intrinsic
def load_floats(typingctx: Any, x: Any, table: Any, work: Any, terms: Any) -> Any:
    """Fill the work and the terms, as load_words does, from sixteen blocks of float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, table, work, terms = array_pointers(context, builder, signature, args)
        minus_one = splat(builder, builder.load(table))

        def sixteen(g: Any, nothing: tuple[()]) -> tuple[()]:
            start = builder.mul(g, I64(LANES))
            places = [builder.add(start, I64(BLOCK * row)) for row in range(LANES)]
            _rotate_sixteen(load_columns(builder, source, places, FLOATS), g, minus_one, work, terms)
            return nothing

        loop(builder, I64(VECTORS), (), sixteen)
        return context.get_dummy_value()

    return types.void(x, table, work, terms), codegen


def load_columns(builder: Any, pointer: Any, places: list[Any], kind: Any, items: int = 1) -> list[Lanes]:
    """Sixteen vectors that have a lane for each of the places, from which on `items` elements go to each vector."""
    half = ir.VectorType(kind.element, LANES // 2)

    def both(i: int, k: int, offset: int) -> Lanes:
        starts = (builder.add(places[row], I64(offset)) for row in (i, k))
        return shuffled(*(load(builder, pointer, start, half, align=4 // items) for start in starts), range(LANES))

    rows = [(i, i + 4) for i in (0, 1, 2, 3, 8, 9, 10, 11)]
    left, right = ([both(i, k, offset) for i, k in rows] for offset in (0, items * LANES // 2))
    return transposed_halves(left, right)


def _rotate_sixteen(x: list[Lanes], g: Any, minus_one: Lanes, work: Any, terms: Any) -> None:
    """Put the sixteen weights of one g into the work, with the butterflies over j, and their squares into the terms."""
    builder = minus_one.builder
    at = builder.mul(g, I64(LANES * LANES))
    places = [builder.add(at, I64(j * LANES)) for j in range(LANES)]
    for place, v in zip(places, x, strict=True):
        store(v * v, terms, place, align=64)
    for place, v in zip(places, rotated(x, minus_one), strict=True):
        store(v, work, place, align=64)


def rotated(values: list[Lanes], minus_one: Lanes) -> list[Lanes]:
    """The values after all butterflies between them."""
    values, step = list(values), 1
    while step < len(values):
        for i in range(len(values)):
            if not i & step:
                low, high = values[i], values[i + step]
                values[i], values[i + step] = low + high, difference(low, high, minus_one)
        step *= 2
    return values


@intrinsic
def sum_squares(typingctx: Any, terms: Any, squares: Any) -> Any:
    """Write the sum of squares of each block (f32), and return whether all are far enough from 0 and infinity."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        terms, squares = array_pointers(context, builder, signature, args)
        total = fold_vectors([fold_vectors(_terms_of(builder, terms, j, VECTORS)) for j in range(LANES)])
        store(total, squares, I64(0), align=64)
        safe = (total >= 2.0**-60) & (total > 2.0**60).negated()
        return builder.icmp_signed("==", builder.bitcast(safe.value, I16), I16(-1))

    return types.boolean(terms, squares), codegen


def _terms_of(builder: Any, terms: Any, j: int, count: int) -> list[Lanes]:
    """The terms [g, j], for all g < count."""
    return [load(builder, terms, I64((g * LANES + j) * LANES), align=64) for g in range(count)]


# --- 2. Quantize ---


class _Search(NamedTuple):
    """What the search for the nearest levels reads, in the order in which it lies in memory.

    minus_one, one: the numbers -1 (f32) and 1 (i32). LLVM does not know them: see difference, and a choice between m
        and m - 1 stays one operation.
    last: the last threshold.
    coefficients: of a polynomial without a constant, the highest power first. At the k-th of the thresholds that are
        not negative, it is nearer to k than to any other integer, and it grows up to the last of them.
    thresholds, levels: see _find and _find_by_magnitude. The first begins at 16.
    """

    minus_one: Lanes
    one: Lanes
    last: Lanes
    coefficients: list[Lanes]
    thresholds: Table
    levels: Table


class _Found(NamedTuple):
    """The nearest levels to a vector of z.

    code: i32. Its low bits, as many as the width, are the number of the level minus half the number of levels, and its
        upper three bytes are those of _base.
    value, level: z and the level, or the magnitudes of both. (The signs are the same, so that products and the square
        of the difference are, too.)
    """

    code: Lanes
    value: Lanes
    level: Lanes


def entries(bits: int) -> int:
    """Entries of a table of thresholds, and of one of levels: from 6 bits on they are only those of one sign."""
    return 16 if bits < 5 else 32 if bits == 5 else 1 << (bits - 1)


def _base(bits: int) -> float:
    """What a number is added to, as float, so that its low bits become the integer next to it.

    Above 2**23 floats are integers. Below 6 bits numbers may be negative, and 128 keeps them from borrowing.
    """
    return 2.0**23 + 2.0**22 + 128 if bits < 6 else 2.0**23


def _load_search(builder: Any, table: Any, bits: int) -> _Search:
    size, degree = entries(bits), DEGREES[max(bits, 5)]
    numbers = [splat(builder, builder.load(builder.gep(table, [I32(i)]))) for i in range(3 + degree)]
    return _Search(
        minus_one=numbers[0],
        one=numbers[1].bits(),
        last=numbers[2],
        coefficients=numbers[3:],
        thresholds=Table(builder, table, LANES, size),
        levels=Table(builder, table, LANES + size, size),
    )


def _find(search: _Search, z: Lanes, bits: int) -> _Found:
    """The tables are indexed by code, modulo their size; the threshold of a code is its upper end."""
    place = clipped(z, search.last)
    slope = _polynomial(search.coefficients, place.magnitude())
    # One less than the number of thresholds up to z, from the middle, or by chance that number.
    number = multiply_add(slope, place, z.of(_base(bits) - 1)).bits()
    code = (z >= search.thresholds.look_up(number)).choose(number + search.one, number)
    return _Found(code, z, search.levels.look_up(code))


def _find_by_magnitude(search: _Search, z: Lanes, bits: int) -> _Found:
    """The tables hold the thresholds that are not negative, and the positive levels."""
    one = search.one
    negative = z < 0.0  # not -0, which belongs to the upper level as every tie does
    length = z.magnitude()
    place = length.bits().minimum(search.last.bits()).floats()
    # The number of thresholds up to `length`, or by chance one more.
    number = multiply_add(_polynomial(search.coefficients, place), place, z.of(_base(bits))).bits()
    # Bit patterns of floats that are not negative are in the order of the floats. A tie of a negative z goes to the
    # level of smaller magnitude.
    reach = negative.choose(length.bits() - one, length.bits())
    number = (reach < search.thresholds.look_up(number).bits()).choose(number - one, number)
    return _Found(negative.choose(number ^ 255, number), length, search.levels.look_up(number))


def _square(x: Lanes) -> Lanes:
    return x * x


def _polynomial(coefficients: list[Lanes], x: Lanes) -> Lanes:
    value = coefficients[0]
    for coefficient in coefficients[1:]:
        value = multiply_add(value, x, coefficient)
    return value


def _make_quantize(bits: int) -> Any:
    @intrinsic
    def quantize(
        typingctx: Any,
        work: Any,
        squares: Any,
        table: Any,  # f32: see _Search
        radius: Any,  # out: f32, the root of the sum of squares of each block
        terms: Any,  # room: f32 [3, 16, 16], the three terms of the sums, for each j added over g
        packed: Any,  # out: i32 [2, 16, 16], for each j one or two words, as _packed returns them
        sums: Any,  # out: f32 [3, 16], of z * c, of c * c and of (z - c)**2
        words: Any,  # u16: from words[upcoming] on, 4 KiB are fetched meanwhile, for a later call
        upcoming: Any,
    ) -> Any:
        """Multiply the rotated blocks by 1 / radius to z, and find the nearest levels c."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            work, squares, table, radius, terms, packed, sums, words = array_pointers(context, builder, signature, args)
            upcoming = args[-1]
            root = call(builder, "llvm.sqrt.v16f32", FLOATS, load(builder, squares, I64(0), align=64))
            store(root, radius, I64(0), align=64)
            inverse = (root > 0.0).choose(1.0 / root, 0.0)
            search = _load_search(builder, table, bits)

            def eight_weights(j: Any, nothing: tuple[()]) -> tuple[()]:
                at = builder.mul(j, I64(LANES))
                line = builder.add(upcoming, builder.mul(j, I64(128)))
                for offset in range(0, 128, 32):  # 64 bytes each; few at a time, in the order of memory
                    prefetch(builder, words, builder.add(line, I64(offset)))
                places = [builder.add(at, I64(g * LANES * LANES)) for g in range(VECTORS)]
                x = rotated([load(builder, work, place, align=64) for place in places], search.minus_one)
                found = [(_find if bits < 6 else _find_by_magnitude)(search, v * inverse, bits) for v in x]
                products = [(f.value * f.level, f.level * f.level, _square(f.value - f.level)) for f in found]
                for i, eight in enumerate(zip(*products, strict=True)):
                    store(fold_vectors(list(eight)), terms, builder.add(at, I64(i * LANES * LANES)), align=64)
                for i, word in enumerate(_packed([f.code for f in found], bits)):
                    store(word, packed, builder.add(at, I64(i * LANES * LANES)), align=64)
                return nothing

            loop(builder, I64(LANES), (), eight_weights)
            for i, sixteen in enumerate(zip(*(_terms_of(builder, terms, j, 3) for j in range(LANES)), strict=True)):
                store(fold_vectors(list(sixteen)), sums, I64(i * LANES), align=64)
            return context.get_dummy_value()

        return types.void(work, squares, table, radius, terms, packed, sums, words, upcoming), codegen

    return quantize


def _packed(codes: list[Lanes], bits: int) -> list[Lanes]:
    """The bytes to which the codes of eight weights add in a row, in order, as one or two i32 with up to four each."""
    above = int(np.float32(_base(bits)).view(np.int32)) & -256
    known = above ^ (above << 8) ^ (above << 16) ^ (above << 24)
    flip = 0x01010101 << (bits - 1)  # adds half the number of levels
    low, high = (
        codes[g] ^ (codes[g + 1] << 8) ^ (codes[g + 2] << 16) ^ (codes[g + 3] << 24) ^ (known ^ flip) for g in (0, 4)
    )
    if bits == 8:
        return [low, high]
    words, shift, rest = [], 0, bits
    if rest & 4:
        words.append(_both(low, high, 4, 0))
        shift = 4
    pair = _both(low, high, 2, shift)
    single = _both(low, high, 1, shift + (rest & 2))
    pair, single = pair | (pair >> 14), single | (single >> 7) | (single >> 14) | (single >> 21)
    if rest & 3 == 3:
        words.append((pair & 0xFFFF) | ((single & 0xFF) << 16))
    elif rest & 3:
        words.append(pair if rest & 2 else single)
    return words


def _both(low: Lanes, high: Lanes, width: int, shift: int) -> Lanes:
    """The field at `shift` of the four codes in `low`, and above it, 4 bits higher, that of those in `high`."""
    mask = ((1 << width) - 1) * 0x01010101
    above = high << (4 - shift) if shift <= 4 else high >> (shift - 4)
    return ((low >> shift) & mask) | (above & (mask << 4))


quantize_2, quantize_3, quantize_4, quantize_5, quantize_6, quantize_7, quantize_8 = map(_make_quantize, range(2, 9))


# --- 3. Store ---


@intrinsic
def store_rows(typingctx: Any, packed: Any, first: Any, count: Any, rows: Any, start: Any, stride: Any) -> Any:
    """Write the lowest `count` bytes (1 to 4) of the words packed[first], ... of each block to its row (u8).

    start: where their first byte goes in the first row. stride: the bytes of a row.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed, rows = array_pointers(context, builder, signature, args)
        _, first, count, _, start, stride = args
        columns = [load(builder, packed, builder.add(first, I64(LANES * j)), INTS, align=64) for j in range(LANES)]
        order = [4 * j + k for k in range(4) for j in range(LANES)]
        parts = [Lanes(builder, builder.bitcast(row.value, _PARTS)) for row in transposed(columns)]
        ordered = [shuffled(part, part, order) for part in parts]
        for bytes_of_word in range(1, 5):
            with builder.if_then(builder.icmp_signed("==", count, I64(bytes_of_word))):
                for block, row in enumerate(ordered):
                    place = builder.add(start, builder.mul(stride, I64(block)))
                    store(shuffled(row, row, range(LANES * bytes_of_word)), rows, place, align=1)
        return context.get_dummy_value()

    return types.void(packed, first, count, rows, start, stride), codegen
