"""Products of queries with polar-rope keys by table look-up, in numba, without restoring the keys.

A pair of key coordinates is radius (cos angle, sin angle), and there are only 16 angles. So for a query and a pair,
16 numbers x cos angle + y sin angle are all that the product needs of the query (Wu et al., arXiv:2502.00527, Section
3.3): each key looks one up and multiplies it by its radius. Vectors run along the 32 tokens of a group.

With AVX-512 VBMI and VNNI, the entries are integers of 16 bits, looked up by permutations of bytes, higher and lower
bytes apart, for four pairs at once; their sums are exact, in i32. Elsewhere entries are float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pqweights.kernels.attention_task import (
    GROUP,
    MOST_ENTRY,
    MOST_ROWS,
    MOST_SIZE,
    POLAR_KERNELS,
    POLAR_TASK_SIZE,
    POLAR_WIDTHS,
)
from pqweights.kernels.code_levels import has
from pqweights.kernels.cpu_products import PRODUCT, fused, next_tile, pointer_in
from pqweights.kernels.emit import (
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    INTS,
    Lanes,
    array_pointers,
    call,
    constant,
    load,
    loop,
    shuffled,
    splat,
    store,
)
from pqweights.kernels.jit import inlined
from pqweights.kernels.vector import Table, stack

ANGLES = 16
# Pairs whose tables fill a vector of 64 bytes.
TOGETHER = 4
_BYTES_64 = ir.VectorType(I8, 64)
WHOLE = has("avx512f", "avx512bw", "avx512vbmi", "avx512vnni")
# Bytes of the arrays on the stack: tables of all rows, float32 tables of one, and what a one stands for.
_ENTRIES = MOST_SIZE // 2 * ANGLES
_TABLES, _ROW_OF_4, _FACTORS = MOST_ROWS * _ENTRIES * (2 if WHOLE else 4), _ENTRIES * 4, MOST_ROWS * 4


# --- tables ---


@intrinsic
def float_tables(typingctx: Any, query: Any, scales: Any, pairs: Any, step: Any, offset: Any, out: Any) -> Any:
    """Write scale (x cos angle + y sin angle) for all angles of each pair, f32 [pairs, 16]; return the largest.

    What is returned is the bit pattern (u32) of the largest magnitude, that of an infinity or more for a NaN.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        query, scales, target = array_pointers(context, b, signature, args)
        angles = [2 * math.pi * k / ANGLES - math.pi for k in range(ANGLES)]
        cosines, sines = (constant(b, FLOATS, [f(angle) for angle in angles]) for f in (math.cos, math.sin))

        def pair(j: Any, largest: Lanes) -> Lanes:
            scale, at = b.load(b.gep(scales, [j])), b.mul(j, args[3])
            x, y = (b.load(b.gep(query, [place])) for place in (at, b.add(at, args[4])))
            entries = fused(splat(b, b.fmul(x, scale)), cosines, splat(b, b.fmul(y, scale)) * sines)
            store(entries, target, b.mul(j, I64(ANGLES)))
            return (entries.bits() & 0x7FFFFFFF).maximum(largest)

        largest = loop(b, args[2], Lanes(b, ir.Constant(INTS, None)), pair)
        return call(b, "llvm.vector.reduce.umax.v16i32", I32, largest).value

    return types.uint32(query, scales, pairs, step, offset, out), codegen


@intrinsic
def split_tables(typingctx: Any, entries: Any, factor: Any, pairs: Any, out: Any, at: Any) -> Any:
    """Write the nearest integers to entries * factor as bytes from out[at]: [pairs / 4, higher and lower, 4, 16]."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, target = array_pointers(context, b, signature, args)
        factors = splat(b, args[1])

        def four(j: Any, nothing: tuple[()]) -> tuple[()]:
            for k in range(TOGETHER):
                start = b.add(b.mul(j, I64(TOGETHER * ANGLES)), I64(k * ANGLES))
                whole = (load(b, source, start) * factors).rint().whole()
                rounded = whole + 128
                higher = Lanes(b, b.ashr(rounded.value, rounded.of(8).value))
                to = b.add(args[4], b.add(b.mul(j, I64(2 * TOGETHER * ANGLES)), I64(k * ANGLES)))
                store(higher.bytes(), target, to)
                store(whole.bytes(), target, b.add(to, I64(TOGETHER * ANGLES)))  # whole - 256 * higher, as a byte
            return nothing

        loop(b, b.sdiv(args[2], I64(TOGETHER)), (), four)
        return context.get_dummy_value()

    return types.void(entries, factor, pairs, out, at), codegen


# --- scores ---


def _four_pairs(b: Any, codes: Any, at: Any, width: int) -> list[Lanes]:
    """Return the codes of four pairs for tokens 0 to 15 and 16 to 31: byte 4 t + k is of pair k; junk above them."""
    count = GROUP * width // 8  # bytes of a pair
    packed = load(b, codes, at, ir.VectorType(I8, TOGETHER * count))
    by_token = shuffled(packed, packed, [k * count + t % count for t in range(16) for k in range(TOGETHER)])
    words = Lanes(b, b.bitcast(by_token.value, INTS))
    shifts = [[width * (t // count) for t in range(start, start + 16)] for start in (0, 16)]
    moved = [Lanes(b, b.lshr(words.value, constant(b, INTS, each).value)) if any(each) else words for each in shifts]
    return [Lanes(b, b.bitcast(half.value, _BYTES_64)) for half in moved]


def _make_whole_scores(angle_bits: int, radius_bits: int, together: int) -> Any:
    """Return the intrinsic that writes the products of some rows with the keys of a group, from integer tables."""

    @intrinsic
    def whole_scores(
        typingctx: Any,
        angles: Any,  # u8
        angle_at: Any,  # the first byte of the group
        radii: Any,  # u8
        radius_at: Any,
        tables: Any,  # u8 [rows, pairs / 4, 2, 4, 16]
        pairs: Any,
        row: Any,  # the first of the rows
        factors: Any,  # f32 [rows]
        out: Any,  # f32
        out_at: Any,  # the score of that row with the first key
        stride: Any,  # scores of a row
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            angles, radii, tables, factors, out = array_pointers(context, b, signature, args)
            angle_at, radius_at, pairs, row, out_at, stride = (args[k] for k in (1, 3, 5, 6, 9, 10))
            of_pair = constant(b, _BYTES_64, [k * ANGLES for _ in range(16) for k in range(TOGETHER)])
            rows = [b.add(row, I64(k)) for k in range(together)]
            starts = [b.mul(each, b.mul(pairs, I64(2 * ANGLES))) for each in rows]

            def four(j: Any, sums: tuple[Lanes, ...]) -> tuple[Lanes, ...]:
                a_at = b.add(angle_at, b.mul(j, I64(TOGETHER * GROUP * angle_bits // 8)))
                r_at = b.add(radius_at, b.mul(j, I64(TOGETHER * GROUP * radius_bits // 8)))
                places = [(half & (2**angle_bits - 1)) | of_pair for half in _four_pairs(b, angles, a_at, angle_bits)]
                lengths = [half & (2**radius_bits - 1) for half in _four_pairs(b, radii, r_at, radius_bits)]
                result = []
                for number, start in enumerate(starts):
                    for plane in (0, 1):
                        at = b.add(start, b.add(b.mul(j, I64(128)), I64(64 * plane)))
                        table = load(b, tables, at, _BYTES_64)
                        for half in (0, 1):
                            found = call(b, "llvm.x86.avx512.permvar.qi.512", _BYTES_64, table, places[half])
                            total = sums[4 * number + 2 * plane + half]
                            result.append(_dot(total, lengths[half], found))
                return tuple(result)

            zeros = (Lanes(b, ir.Constant(INTS, None)),) * (4 * together)
            sums = loop(b, b.sdiv(pairs, I64(TOGETHER)), zeros, four)
            for number, each in enumerate(rows):
                factor = splat(b, b.load(b.gep(factors, [each])))
                to = b.add(out_at, b.mul(stride, I64(number)))
                for half in (0, 1):
                    exact = (sums[4 * number + half] << 8) + sums[4 * number + 2 + half]
                    score = Lanes(b, b.sitofp(exact.value, FLOATS)) * factor
                    store(score, out, b.add(to, I64(16 * half)))
            return context.get_dummy_value()

        kinds = (angles, angle_at, radii, radius_at, tables, pairs, row, factors, out, out_at, stride)
        return types.void(*kinds), codegen

    return whole_scores


def _dot(total: Lanes, unsigned: Lanes, signed: Lanes) -> Lanes:
    """Return sixteen i32, to each of which the products of four adjacent bytes were added."""
    b = total.builder
    words = [Lanes(b, b.bitcast(each.value, INTS)) for each in (unsigned, signed)]
    return call(b, "llvm.x86.avx512.vpdpbusd.512", INTS, total, *words)


def _pair_codes(b: Any, codes: Any, at: Any, width: int) -> list[Lanes]:
    """Return the codes of a pair for tokens 0 to 15 and 16 to 31, as i32."""
    count = GROUP * width // 8
    packed = load(b, codes, at, ir.VectorType(I8, count))
    repeated = shuffled(packed, packed, [t % count for t in range(16)])
    words, halves = Lanes(b, b.zext(repeated.value, INTS)), []
    for start in (0, 16):
        shifts = constant(b, INTS, [width * (t // count) for t in range(start, start + 16)])
        halves.append(Lanes(b, b.lshr(words.value, shifts.value)) & (2**width - 1))
    return halves


def _make_float_scores(angle_bits: int, radius_bits: int, together: int) -> Any:
    """Return the intrinsic that writes the products of some rows with the keys of a group, from float tables."""

    @intrinsic
    def float_scores(
        typingctx: Any,
        angles: Any,  # u8
        angle_at: Any,  # the first byte of the group
        radii: Any,  # u8
        radius_at: Any,
        tables: Any,  # f32 [rows, pairs, 16]
        pairs: Any,
        row: Any,  # the first of the rows
        factors: Any,  # f32 [rows]
        out: Any,  # f32
        out_at: Any,  # the score of that row with the first key
        stride: Any,  # scores of a row
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            angles, radii, tables, _, out = array_pointers(context, b, signature, args)
            angle_at, radius_at, pairs, row, out_at, stride = (args[k] for k in (1, 3, 5, 6, 9, 10))
            starts = [b.mul(b.add(row, I64(k)), b.mul(pairs, I64(ANGLES))) for k in range(together)]

            def one(j: Any, sums: tuple[Lanes, ...]) -> tuple[Lanes, ...]:
                a_at = b.add(angle_at, b.mul(j, I64(GROUP * angle_bits // 8)))
                r_at = b.add(radius_at, b.mul(j, I64(GROUP * radius_bits // 8)))
                places = _pair_codes(b, angles, a_at, angle_bits)
                lengths = [Lanes(b, b.sitofp(half.value, FLOATS)) for half in _pair_codes(b, radii, r_at, radius_bits)]
                result: list[Lanes] = []
                for number, start in enumerate(starts):
                    entries = b.gep(tables, [b.add(start, b.mul(j, I64(ANGLES)))])
                    look_up = Table(b, entries, 0, ANGLES).look_up
                    totals = sums[2 * number : 2 * number + 2]
                    result += [fused(look_up(a), r, s) for a, r, s in zip(places, lengths, totals, strict=True)]
                return tuple(result)

            sums = loop(b, pairs, (Lanes(b, ir.Constant(FLOATS, None)),) * (2 * together), one)
            for number in range(together):
                to = b.add(out_at, b.mul(stride, I64(number)))
                for half in (0, 1):
                    store(sums[2 * number + half], out, b.add(to, I64(16 * half)))
            return context.get_dummy_value()

        kinds = (angles, angle_at, radii, radius_at, tables, pairs, row, factors, out, out_at, stride)
        return types.void(*kinds), codegen

    return float_scores


@intrinsic
def _float_of(typingctx: Any, pattern: Any) -> Any:
    """Return the float32 of a bit pattern (u32)."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], F32)

    return types.float32(pattern), codegen


@inlined
def _unit(largest: Any) -> Any:
    """Return what a one stands for in integers of which the largest has this bit pattern; NaN for no number."""
    if largest >= np.uint32(0x7F800000):
        return np.float32(np.nan)
    unit = _float_of(largest) / np.float32(MOST_ENTRY)
    return unit if unit > np.float32(2.0**-100) else np.float32(0)


def _make_polar_scores(angle_bits: int, radius_bits: int) -> Any:
    """Return the kernel for two widths; threads may share a task."""
    make = _make_whole_scores if WHOLE else _make_float_scores
    scores_1, scores_2, scores_4 = (make(angle_bits, radius_bits, together) for together in (1, 2, 4))
    whole = WHOLE

    def polar_scores(task_at: Any) -> None:
        task = carray(task_at, POLAR_TASK_SIZE, np.int64)
        heads, rows, groups, pairs, tile_groups = task[1], task[2], task[3], task[4], task[5]
        angle_bytes, radius_bytes = pairs * 4 * angle_bits, pairs * 4 * radius_bits
        queries = carray(pointer_in(task, 6), heads * rows * 2 * pairs, np.float32)
        angles = carray(pointer_in(task, 7), heads * groups * angle_bytes, np.uint8)
        radii = carray(pointer_in(task, 8), heads * groups * radius_bytes, np.uint8)
        chunk_groups = task[13]
        chunks = (groups + chunk_groups - 1) // chunk_groups
        scales = carray(pointer_in(task, 9), heads * chunks * pairs, np.float32)
        out = carray(pointer_in(task, 10), heads * rows * groups * GROUP, np.float32)
        step, offset = task[11], task[12]

        memory = stack(_TABLES)
        tables = carray(memory, MOST_ROWS * _ENTRIES * 2, np.uint8)
        floats = carray(memory, MOST_ROWS * _ENTRIES, np.float32)
        row_floats = carray(stack(_ROW_OF_4), _ENTRIES, np.float32)
        factors = carray(stack(_FACTORS), MOST_ROWS, np.float32)
        tiles, stride = (groups + tile_groups - 1) // tile_groups, groups * GROUP
        while True:
            tile = next_tile(task)
            if tile >= heads * tiles:
                break
            head, start = tile // tiles, tile % tiles * tile_groups
            scales_of = np.int64(-1)  # the chunk that the tables are made for
            for group in range(start, min(groups, start + tile_groups)):
                if group // chunk_groups != scales_of:
                    scales_of = group // chunk_groups
                    of_chunk = scales[(head * chunks + scales_of) * pairs :]
                    for row in range(rows):
                        query, at = queries[(head * rows + row) * 2 * pairs :], row * pairs * ANGLES
                        if whole:
                            largest = float_tables(query, of_chunk, pairs, step, offset, row_floats)
                            factors[row] = _unit(largest)
                            factor = np.float32(1) / factors[row] if factors[row] > 0 else np.float32(0)
                            split_tables(row_floats, factor, pairs, tables, 2 * at)
                        else:
                            float_tables(query, of_chunk, pairs, step, offset, floats[at:])
                angle_at, radius_at = (head * groups + group) * angle_bytes, (head * groups + group) * radius_bytes
                row, to = 0, head * rows * stride + group * GROUP
                places = tables if whole else floats
                while rows - row >= 4:
                    scores_4(angles, angle_at, radii, radius_at, places, pairs, row, factors, out, to, stride)
                    row, to = row + 4, to + 4 * stride
                if rows - row >= 2:
                    scores_2(angles, angle_at, radii, radius_at, places, pairs, row, factors, out, to, stride)
                    row, to = row + 2, to + 2 * stride
                if rows > row:
                    scores_1(angles, angle_at, radii, radius_at, places, pairs, row, factors, out, to, stride)

    return polar_scores


KERNELS = {
    name: (_make_polar_scores(*widths), PRODUCT) for name, widths in zip(POLAR_KERNELS, POLAR_WIDTHS, strict=True)
}
