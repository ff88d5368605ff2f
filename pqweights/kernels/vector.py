"""The inner steps that LLVM does not vectorise well by itself, as LLVM vector code for numba.

A block is eight vectors of 16 floats here, and butterflies below 16 stay within a vector, by shuffles. (encoding.py has
another layout.) A table look-up is a permutation of registers where the machine has one (AVX-512), and loads lane by
lane elsewhere. Every operation is one of docs/format.md, in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import config as numba_config
from numba.extending import intrinsic

from pqweights.kernels.emit import (
    BYTES,
    F32,
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
    constant,
    load,
    shuffled,
    splat,
    store,
)

BLOCK = 128
VECTORS = BLOCK // LANES

# Unless numba was told to compile for another machine (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES) or without its vectors.
_FOR_THIS_MACHINE = (
    getattr(numba_config, "CPU_NAME", None) is None
    and getattr(numba_config, "CPU_FEATURES", None) is None
    and bool(numba_config.ENABLE_AVX)
)
_FEATURES = llvm.get_host_cpu_features() if _FOR_THIS_MACHINE else {}
_HAS_PERMUTE = bool(_FEATURES.get("avx512f", False))
_PERMUTES_EIGHTS = bool(_FEATURES.get("avx2", False))
_HAS_RANGE = bool(_FEATURES.get("avx512dq", False))
HAS_COMPRESS = bool(_FEATURES.get("avx512vbmi2", False)) and bool(_FEATURES.get("avx512vl", False))
# Fused operations are used only where they change no result: with factors of 1 and -1, and to estimate the number of a
# level, which may be off by one.
_HAS_FMA = bool(_FEATURES.get("fma", False))
# Tables of more entries than this are read lane by lane: permuting so many registers costs more.
_MOST_PERMUTED = 256
_EIGHT_FLOATS = ir.VectorType(F32, 8)


# The parameters of each intrinsic are the operands of the code that it emits, so they stay apart.


@intrinsic(prefer_literal=True)
def stack(typingctx: Any, byte_count: Any) -> Any:
    """The address of `byte_count` bytes, a constant, on the stack of the function that calls it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Not numba's alloca_once: it clears the memory, and LLVM takes seconds to see that nobody reads the zeros.
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(I8, byte_count.literal_value))
        memory.align = 64
        return builder.bitcast(memory, ir.PointerType(I8))

    return types.voidptr(byte_count), codegen


@intrinsic
def rotate_block(typingctx: Any, x: Any, block: Any, factor: Any) -> Any:
    """Rotate the 128 floats of a block, in place, and multiply them by `factor`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (target,) = array_pointers(context, builder, signature, args)
        factors = splat(builder, args[2])
        rotated = _butterflies(_load_block(builder, target, args[1]))
        for place, v in zip(_places(builder, args[1]), rotated, strict=True):
            store(v * factors, target, place)
        return context.get_dummy_value()

    return types.void(x, block, factor), codegen


def _make_look_up(entries: int) -> Any:
    @intrinsic
    def look_up(typingctx: Any, codes: Any, table: Any, block: Any, factor: Any, out: Any) -> Any:
        """Rotate table[code] for the 128 codes (u8) of a block and multiply by `factor`: 128 floats of out."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, table, target = array_pointers(context, builder, signature, args)
            levels_of, factors = Table(builder, table, 0, entries), splat(builder, args[3])
            places = _places(builder, args[2])
            levels = []
            for place in places:
                codes = load(builder, source, place, BYTES)
                levels.append(levels_of.look_up(Lanes(builder, builder.zext(codes.value, INTS))))
            for place, v in zip(places, _butterflies(levels), strict=True):
                store(v * factors, target, place)
            return context.get_dummy_value()

        return types.void(codes, table, block, factor, out), codegen

    return look_up


# Widths up to 5, then 6, 7 and 8.
look_up_5, look_up_6, look_up_7, look_up_8 = (_make_look_up(1 << bits) for bits in (5, 6, 7, 8))


class Table:
    """A table of floats in memory, held in registers where look-ups are permutations."""

    def __init__(self, builder: Any, pointer: Any, start: int, entries: int) -> None:
        self._builder, self._entries = builder, entries
        self._pointer = builder.gep(pointer, [I32(start)])
        self._permuted = _HAS_PERMUTE and entries <= _MOST_PERMUTED
        self._eights = _PERMUTES_EIGHTS and not self._permuted and entries == LANES
        if self._permuted:
            self._registers = [load(builder, self._pointer, I32(i)) for i in range(0, entries, LANES)]
        elif self._eights:
            self._registers = [load(builder, self._pointer, I32(i), _EIGHT_FLOATS) for i in (0, 8)]

    def look_up(self, index: Lanes) -> Lanes:
        """table[index modulo entries], a vector of floats for a vector of i32."""
        if self._eights:
            return self._permute_eights(index)
        return self._permute(index) if self._permuted else self._gather(index)

    def _permute(self, index: Lanes) -> Lanes:
        def permuted(a: Lanes, b: Lanes) -> Lanes:
            return call(self._builder, "llvm.x86.avx512.vpermi2var.ps.512", FLOATS, a, index, b)

        registers = self._registers
        if len(registers) == 1:
            return call(self._builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, registers[0], index)
        parts = [permuted(a, b) for a, b in zip(registers[::2], registers[1::2], strict=True)]
        bit = 2 * LANES  # each call looked at the index bits below this one
        while len(parts) > 1:
            upper = (index & bit).differs(0)
            parts = [upper.choose(b, a) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            bit *= 2
        return parts[0]

    def _permute_eights(self, index: Lanes) -> Lanes:
        found = []
        for start in (0, 8):
            eight = shuffled(index, index, range(start, start + 8))
            name = "llvm.x86.avx2.permps"
            low, high = (call(self._builder, name, _EIGHT_FLOATS, half, eight) for half in self._registers)
            found.append(((eight << 28) < 0).choose(high, low))  # by bit 3
        return shuffled(found[0], found[1], range(LANES))

    def _gather(self, index: Lanes) -> Lanes:
        # Loads lane by lane: LLVM's gather costs more on most machines.
        builder = self._builder
        index = index & (self._entries - 1)
        result = ir.Constant(FLOATS, ir.Undefined)
        for lane in range(LANES):
            at = builder.gep(self._pointer, [builder.extract_element(index.value, I32(lane))])
            result = builder.insert_element(result, builder.load(at), I32(lane))
        return Lanes(builder, result)


def multiply_add(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a * b + c, fused where the machine can; only for uses in which fusing changes no result."""
    return call(a.builder, "llvm.fma.v16f32", FLOATS, a, b, c) if _HAS_FMA else a * b + c


def clipped(x: Lanes, most: Lanes) -> Lanes:
    """x where its magnitude is at most `most`, which is positive, and `most` with the sign of x elsewhere."""
    if _HAS_RANGE:
        smaller_magnitude, every_lane = Lanes(x.builder, I32(0b0010)), Lanes(x.builder, I16(-1))
        as_always = Lanes(x.builder, I32(4))  # the rounding mode, which does not matter here
        operands = (x, most, smaller_magnitude, x, every_lane, as_always)
        return call(x.builder, "llvm.x86.avx512.mask.range.ps.512", FLOATS, *operands)
    # Bit patterns of positive floats are in the order of the floats, and those of negative ones, without sign, too.
    return x.bits().minimum(most.bits()).unsigned_minimum(most.bits() | -(2**31)).floats()


def difference(a: Lanes, b: Lanes, minus_one: Lanes) -> Lanes:
    """a - b, as b * -1 + a where the machine can fuse: some can then add and subtract side by side.

    minus_one: -1, which LLVM must not know, because it would subtract.
    """
    return multiply_add(b, minus_one, a) if _HAS_FMA else a - b


def _butterflies(x: Sequence[Lanes]) -> list[Lanes]:
    """The eight vectors of a block, rotated."""
    values = list(x)
    h = 1
    while h < LANES:
        signs = constant(values[0].builder, FLOATS, [-1.0 if lane & h else 1.0 for lane in range(LANES)])
        for i, v in enumerate(values):
            # Low lane: x + partner. High lane: -x + partner, which is the float partner - x.
            values[i] = multiply_add(v, signs, shuffled(v, v, [lane ^ h for lane in range(LANES)]))
        h *= 2
    step = 1
    while step < VECTORS:
        for i in range(VECTORS):
            if not i & step:
                low, high = values[i], values[i + step]
                values[i], values[i + step] = low + high, low - high
        step *= 2
    return values


def fold_vectors(values: list[Lanes]) -> Lanes:
    """Vectors to one, by folding the upper half onto the lower one."""
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] + values[i + half] for i in range(half)]
    return values[0]


def _places(builder: Any, block: Any) -> list[Any]:
    """The indices at which the eight vectors of a block begin."""
    start = builder.mul(block, I64(BLOCK))
    return [builder.add(start, I64(i * LANES)) for i in range(VECTORS)]


def _load_block(builder: Any, pointer: Any, block: Any) -> list[Lanes]:
    """The eight vectors of a block of floats."""
    return [load(builder, pointer, place) for place in _places(builder, block)]
