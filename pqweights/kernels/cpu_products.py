"""Products of packed weights with a few rows of inputs, in numba: y = W x without decoding W.

A block of W is norm * H levels[codes], and H is symmetric, so <H c, x> = <c, H x>: each block of 128 inputs is rotated
once for all rows of W, and what is left for a row are table look-ups, multiplications and additions.

For BF16 and F16 models, rotated inputs become integers of 15 bits with a scale for each block, and levels integers of
14 bits. Within a block their products are added up exactly, in i32; blocks are added up in float32, in 16 lanes. For
F32 models, inputs and levels are float32 throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pqweights.kernels.code_levels import CONVERTS_HALVES, ORDER, WORDS, LevelTable, add_products, block_levels
from pqweights.kernels.conversions import floats_from_halves, half_from_float, load_values
from pqweights.kernels.cpu_kernels import floats_and_bits, unpack_codes, words_of
from pqweights.kernels.emit import (
    BYTES,
    FLOATS,
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
    shuffled,
    splat,
    store,
)
from pqweights.kernels.jit import inlined, jit
from pqweights.kernels.product_task import MOST_INPUT, MOST_ROWS, TASK_SIZE, TILE_ROWS
from pqweights.kernels.vector import Table, fold_vectors, rotate_block, stack

BLOCK = 128
# Blocks whose norms are converted together.
GROUP = 16
# Bytes of the arrays on the stack.
_BLOCK_BYTES, _BLOCK_OF_4, _GROUP_OF_4, _ONE_OF_4 = BLOCK, BLOCK * 4, GROUP * 4, 4
_FACTORS, _SUMS, _TILE = MOST_ROWS * GROUP * 4, MOST_ROWS * LANES * 4, MOST_ROWS * TILE_ROWS * 4
_HALVES = ir.VectorType(ir.HalfType(), GROUP)

PREPARE = types.void(*[types.voidptr] * 5, *[types.int64] * 6)
PRODUCT = types.void(types.voidptr)


# --- inputs ---


def _prepare(
    values_at: Any,  # [rows, blocks * 128] of the dtype
    signs_at: Any,  # f32 [128]
    awq_at: Any,  # f32 [blocks * 128]
    out_at: Any,  # [blocks, rows, 128]: i16 in the order of ORDER, or f32
    scales_at: Any,  # out: f32 [blocks, rows], what an integer stands for; not written for f32
    rows: Any,
    blocks: Any,
    dtype: Any,  # a value of VALUE_DTYPES
    rotation: Any,  # 0: none; 1: Hadamard; 2: Hadamard with signs
    scaled: Any,  # whether inputs are divided by awq
    whole: Any,  # whether inputs become integers
) -> None:
    words16, words32 = words_of(values_at, rows * blocks * BLOCK)
    signs, awq = carray(signs_at, BLOCK, np.float32), carray(awq_at, blocks * BLOCK, np.float32)
    integers = carray(out_at, rows * blocks * BLOCK, np.int16)
    floats = carray(out_at, rows * blocks * BLOCK, np.float32)
    scales = carray(scales_at, rows * blocks, np.float32)
    x, bits = floats_and_bits(stack(_BLOCK_OF_4), BLOCK)
    for row in range(rows):
        for block in range(blocks):
            begin, place = (row * blocks + block) * BLOCK, block * rows + row
            load_values(words16[begin : begin + BLOCK], words32[begin : begin + BLOCK], dtype, bits, x)
            if scaled:
                for j in range(BLOCK):
                    x[j] = x[j] / awq[block * BLOCK + j]
            if rotation == 2:
                for j in range(BLOCK):
                    x[j] = x[j] * signs[j]
            if rotation:
                rotate_block(x, 0, np.float32(1))
            if whole:
                scales[place] = _to_integers(x, bits, integers, place * BLOCK)
            else:
                for j in range(BLOCK):
                    floats[place * BLOCK + j] = x[j]


@inlined
def _to_integers(x: Any, bits: Any, integers: Any, at: Any) -> Any:
    """Write the 128 floats as integers from `at`, in the order of ORDER; return what a one stands for, maybe NaN."""
    largest = np.uint32(0)
    for j in range(BLOCK):
        largest = max(largest, bits[j] & np.uint32(0x7FFFFFFF))  # bit patterns of magnitudes are in their order
    if largest >= np.uint32(0x7F800000):
        integers[at : at + BLOCK] = 0
        return np.float32(np.nan)
    bits_of_largest = carray(stack(_ONE_OF_4), 1, np.uint32)
    bits_of_largest[0] = largest
    most = bits_of_largest.view(np.float32)[0]
    if most < np.float32(2.0**-100):
        integers[at : at + BLOCK] = 0
        return np.float32(0)
    store_integers(x, np.float32(MOST_INPUT) / most, integers, at)
    return most / np.float32(MOST_INPUT)


@intrinsic
def store_integers(typingctx: Any, x: Any, factor: Any, integers: Any, at: Any) -> Any:
    """Write the nearest integers to x * factor (f32 [128]) from integers[at], in the order of ORDER."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, target = array_pointers(context, b, signature, args)
        factors, words = splat(b, args[1]), []
        for place in range(0, BLOCK, LANES):
            nearest = (load(b, source, I64(place)) * factors).rint().whole()
            words.append(Lanes(b, b.trunc(nearest.value, ir.VectorType(I16, LANES))))
        while len(words) > 1:
            lanes = 2 * words[0].value.type.count
            words = [shuffled(p, q, range(lanes)) for p, q in zip(words[::2], words[1::2], strict=True)]
        for place in range(0, BLOCK, 32):
            some = shuffled(words[0], words[0], ORDER[place : place + 32])
            store(some, target, b.add(args[3], I64(place)), 2)
        return context.get_dummy_value()

    return types.void(x, factor, integers, at), codegen


# --- products ---


@intrinsic
def pointer_in(typingctx: Any, task: Any, place: Any) -> Any:
    """Return the address that the i64 at task[place] holds."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        (words,) = array_pointers(context, b, signature, args)
        return b.inttoptr(b.load(b.gep(words, [args[1]])), ir.PointerType(ir.IntType(8)))

    return types.voidptr(task, place), codegen


@intrinsic
def next_tile(typingctx: Any, task: Any) -> Any:
    """Return task[0] and add 1 to it, as one step among all threads."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        (words,) = array_pointers(context, b, signature, args)
        return b.atomic_rmw("add", words, I64(1), "monotonic")

    return types.int64(task), codegen


@intrinsic
def sixteen_norms(typingctx: Any, norms: Any, at: Any, out: Any) -> Any:
    """Convert sixteen float16 bit patterns (u16) from norms[at] to f32."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, target = array_pointers(context, b, signature, args)
        halves = load(b, source, args[1], ir.VectorType(I16, GROUP), 2)
        store(Lanes(b, b.fpext(b.bitcast(halves.value, _HALVES), FLOATS)), target, I64(0))
        return context.get_dummy_value()

    return types.void(norms, at, out), codegen


def fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Return a * b + c, rounded once where that is faster."""
    return call(a.builder, "llvm.fmuladd.v16f32", FLOATS, a, b, c)


def _make_add_blocks(bits: int, together: int) -> Any:
    """Return the intrinsic that adds the products of some blocks of a row of W with all rows of inputs."""

    @intrinsic
    def add_blocks(
        typingctx: Any,
        codes: Any,  # u8
        begin: Any,  # of the first block in codes
        levels: Any,  # i16
        inputs: Any,  # i16 [.., rows, 128]
        first: Any,  # the number of the first block in inputs
        factors: Any,  # f32 [rows, GROUP]
        count: Any,  # of blocks
        rows: Any,  # of inputs
        from_row: Any,  # the first of the rows of inputs that are multiplied
        sums: Any,  # in and out: f32 [rows, 16]
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            codes, levels, inputs, factors, sums = array_pointers(context, b, signature, args)
            begin, first, count, rows, from_row = args[1], args[4], args[6], args[7], args[8]
            table = LevelTable(b, levels, bits)

            def product(vectors: list[Lanes], row_of_inputs: Any) -> Lanes:
                at = b.mul(row_of_inputs, I64(BLOCK))
                # In a chain, each addition waits for the one before. Several rows of inputs are chains enough.
                chains = [Lanes(b, ir.Constant(INTS, None))] * (2 if together == 1 else 1)
                for k, vector in enumerate(vectors):
                    x = load(b, inputs, b.add(at, I64(32 * k)), WORDS, 2)
                    chains[k % len(chains)] = add_products(chains[k % len(chains)], vector, x)
                return Lanes(b, b.sitofp(fold_vectors(chains).value, FLOATS))

            places = [b.add(from_row, I64(k)) for k in range(together)]

            def add_block(i: Any, totals: tuple[Lanes, ...]) -> tuple[Lanes, ...]:
                vectors = block_levels(table, codes, b.add(begin, b.mul(i, I64(16 * bits))), bits)
                start, result = b.mul(b.add(first, i), rows), []
                for place, total in zip(places, totals, strict=True):
                    factor = splat(b, b.load(b.gep(factors, [b.add(b.mul(place, I64(GROUP)), i)])))
                    result.append(fused(product(vectors, b.add(start, place)), factor, total))
                return tuple(result)

            at = [b.mul(place, I64(LANES)) for place in places]
            totals = loop(b, count, tuple(load(b, sums, each) for each in at), add_block)
            for total, each in zip(totals, at, strict=True):
                store(total, sums, each)
            return context.get_dummy_value()

        return types.void(codes, begin, levels, inputs, first, factors, count, rows, from_row, sums), codegen

    return add_blocks


def _make_add_floats(entries: int) -> Any:
    """Return the intrinsic that adds the products of one block of a row of W with all rows of inputs, in f32."""

    @intrinsic
    def add_floats(
        typingctx: Any,
        codes: Any,  # u8 [128]
        levels: Any,  # f32
        inputs: Any,  # f32 [.., rows, 128]
        first: Any,  # the number of the block in inputs
        norm: Any,  # f32
        rows: Any,  # of inputs
        sums: Any,  # in and out: f32 [rows, 16]
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            codes, levels, inputs, sums = array_pointers(context, b, signature, args)
            first, norm, rows = args[3], splat(b, args[4]), args[5]
            table, vectors = Table(b, levels, 0, entries), []
            for place in range(0, BLOCK, LANES):
                index = load(b, codes, I64(place), BYTES)
                vectors.append(table.look_up(Lanes(b, b.zext(index.value, INTS))))

            def row(j: Any, nothing: tuple[()]) -> tuple[()]:
                at, place = b.mul(b.add(b.mul(first, rows), j), I64(BLOCK)), b.mul(j, I64(LANES))
                halves = [Lanes(b, ir.Constant(FLOATS, None))] * 2
                for k, vector in enumerate(vectors):
                    halves[k % 2] = fused(vector, load(b, inputs, b.add(at, I64(LANES * k))), halves[k % 2])
                store(fused(halves[0] + halves[1], norm, load(b, sums, place)), sums, place)
                return nothing

            loop(b, rows, (), row)
            return context.get_dummy_value()

        return types.void(codes, levels, inputs, first, norm, rows, sums), codegen

    return add_floats


@intrinsic
def lane_sum(typingctx: Any, sums: Any, at: Any) -> Any:
    """Return the sum of sums[at] to sums[at + 15], the upper half added to the lower one until one is left."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        (source,) = array_pointers(context, b, signature, args)
        total, lanes = load(b, source, args[1]), LANES
        while lanes > 1:
            lanes //= 2
            total = shuffled(total, total, range(lanes)) + shuffled(total, total, range(lanes, 2 * lanes))
        return b.extract_element(total.value, I32(0))

    return types.float32(sums, at), codegen


@inlined
def norms_to_floats(norms: Any, at: Any, count: Any, bits: Any, out: Any) -> None:
    """Convert `count` float16 bit patterns, GROUP at most, from norms[at] to f32; bits: u32, the memory of out."""
    if CONVERTS_HALVES and count == GROUP:
        sixteen_norms(norms, at, out)
    else:
        floats_from_halves(norms[at : at + count], bits, out)


@jit
def _stored(value: Any, bits: Any, dtype: Any) -> Any:
    """Return the bit pattern (u32) of a float32 in a dtype, rounded to nearest even; bits: u32 [1], overwritten."""
    both = bits.view(np.float32)
    both[0] = value
    u = bits[0]
    if dtype == 2:
        return u
    sign, magnitude = u & np.uint32(0x80000000), u & np.uint32(0x7FFFFFFF)
    if magnitude > np.uint32(0x7F800000):
        return np.uint32(0x7FC0 if dtype == 0 else 0x7E00)
    if dtype == 0:
        return np.uint32((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    return np.uint32(half_from_float(magnitude, abs(value))) | (sign >> np.uint32(16))


@inlined
def _add_float_block(q: Any, levels: Any, bits: Any, inputs: Any, first: Any, norm: Any, rows: Any, sums: Any) -> None:
    """Add the products of a block, of which q has the codes, in f32."""
    if bits <= 5:
        add_floats_5(q, levels, inputs, first, norm, rows, sums)
    elif bits == 6:
        add_floats_6(q, levels, inputs, first, norm, rows, sums)
    elif bits == 7:
        add_floats_7(q, levels, inputs, first, norm, rows, sums)
    else:
        add_floats_8(q, levels, inputs, first, norm, rows, sums)


# Widths up to 5, then 6, 7 and 8.
add_floats_5, add_floats_6, add_floats_7, add_floats_8 = (_make_add_floats(1 << bits) for bits in (5, 6, 7, 8))


def _make_product(width: int) -> Any:
    """Return the kernel for a bit width with integers, or for all widths in f32; threads may share a task."""
    whole = width > 0
    add_1, add_4 = (_make_add_blocks(width, together) for together in (1, 4))

    def product(task_at: Any) -> None:
        task = carray(task_at, TASK_SIZE, np.int64)
        bits = width if whole else task[15]
        outputs, tile_rows, blocks, rows = task[1], task[2], task[3], task[4]
        codes = carray(pointer_in(task, 5), outputs * blocks * 16 * bits, np.uint8)
        norms = carray(pointer_in(task, 6), outputs * blocks, np.uint16)
        levels = carray(pointer_in(task, 7), 1, np.int16 if whole else np.float32)
        inputs = carray(pointer_in(task, 8), rows * blocks * BLOCK, np.int16 if whole else np.float32)
        scales = carray(pointer_in(task, 9), rows * blocks, np.float32)
        bias = carray(pointer_in(task, 10), outputs, np.float32)
        dtype, stride, has_bias = task[12], task[13], task[14]
        out16 = carray(pointer_in(task, 11), rows * stride, np.uint16)
        out32 = carray(pointer_in(task, 11), rows * stride, np.uint32)
        factor = task[16:17].view(np.float64)[0]

        norm, norm_bits = floats_and_bits(stack(_GROUP_OF_4), GROUP)
        factors = carray(stack(_FACTORS), MOST_ROWS * GROUP, np.float32)
        sums = carray(stack(_SUMS), MOST_ROWS * LANES, np.float32)
        found = carray(stack(_TILE), MOST_ROWS * TILE_ROWS, np.float32)
        pattern_of = carray(stack(_ONE_OF_4), 1, np.uint32)
        q = carray(stack(_BLOCK_BYTES), BLOCK, np.uint8)
        while True:
            start = next_tile(task) * tile_rows
            if start >= outputs:
                break
            end = min(outputs, start + tile_rows)
            for r in range(start, end):
                for k in range(rows * LANES):
                    sums[k] = np.float32(0)
                for first in range(0, blocks, GROUP):
                    count, at = min(GROUP, blocks - first), r * blocks + first
                    norms_to_floats(norms, at, count, norm_bits, norm)
                    if whole:
                        for j in range(rows):
                            for i in range(count):
                                factors[j * GROUP + i] = norm[i] * scales[(first + i) * rows + j]
                        begin, j = at * 16 * bits, 0
                        while rows - j >= 4:
                            add_4(codes, begin, levels, inputs, first, factors, count, rows, j, sums)
                            j += 4
                        while j < rows:
                            add_1(codes, begin, levels, inputs, first, factors, count, rows, j, sums)
                            j += 1
                    else:
                        for i in range(count):
                            begin = (at + i) * 16 * bits
                            unpack_codes(codes[begin : begin + 16 * bits], bits, q, 0)
                            _add_float_block(q, levels, bits, inputs, first + i, norm[i], rows, sums)
                for j in range(rows):
                    y = np.float32(np.float64(lane_sum(sums, j * LANES)) * factor)
                    found[j * TILE_ROWS + r - start] = y + bias[r] if has_bias else y
            for j in range(rows):
                for r in range(end - start):
                    pattern = _stored(found[j * TILE_ROWS + r], pattern_of, dtype)
                    if dtype == 2:
                        out32[j * stride + start + r] = pattern
                    else:
                        out16[j * stride + start + r] = np.uint16(pattern)

    return product


KERNELS = {
    "prepare": (_prepare, PREPARE),
    **{f"product_{bits}": (_make_product(bits), PRODUCT) for bits in range(2, 9)},
    "product_f32": (_make_product(0), PRODUCT),
}
