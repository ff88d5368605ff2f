"""The inner steps that LLVM does not vectorise well by itself, as LLVM vector code for numba.

A block is eight vectors of 16 floats. Butterflies below 16 and the last folds of a sum stay within a vector, by shuffles;
a table look-up is a permutation of registers where the machine has one (AVX-512), loads lane by lane elsewhere. Every operation is
one of docs/format.md in its order; on machines with shorter vectors LLVM splits each one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core import config as numba_config
from numba.extending import intrinsic

BLOCK = 128
LANES = 16
VECTORS = BLOCK // LANES
HALF = BLOCK // 2

_F32, _I64, _I32, _I8 = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)
_VF, _VI, _VB = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES), ir.VectorType(_I8, LANES)
_VHALF, _VHALF_I32 = ir.VectorType(_I8, HALF), ir.VectorType(_I32, HALF)

# Unless numba was told to compile for another machine (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES) or without its vectors.
_FOR_THIS_MACHINE = (
    getattr(numba_config, "CPU_NAME", None) is None
    and getattr(numba_config, "CPU_FEATURES", None) is None
    and bool(numba_config.ENABLE_AVX)
)
_FEATURES = llvm.get_host_cpu_features() if _FOR_THIS_MACHINE else {}
_HAS_PERMUTE = bool(_FEATURES.get("avx512f", False))
# Used only where it cannot show: with factors of 1 and -1, and to find a cell, where half an ulp more is allowed for.
_HAS_FMA = bool(_FEATURES.get("fma", False))
# Tables of more entries than this are read lane by lane: permuting so many registers costs more.
_MOST_PERMUTED = 256


@intrinsic(prefer_literal=True)
def stack(typingctx: Any, byte_count: Any) -> Any:
    """stack(byte_count): the address of so many bytes on the stack of the function; the count is a constant."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Not numba's alloca_once: it clears the memory, and LLVM takes seconds to see that nobody wants that.
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(_I8, byte_count.literal_value))
        memory.align = 64
        return builder.bitcast(memory, ir.PointerType(_I8))

    return types.voidptr(byte_count), codegen


@intrinsic
def sum_of_squares(typingctx: Any, x: Any, block: Any) -> Any:
    """sum_of_squares(x, block): over the 128 floats of a block, by folding the upper half onto the lower one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (source,) = _pointers(context, builder, signature, args, (_F32, None))
        values = _load_block(builder, source, args[1])
        folded = _fold_vectors(builder, [builder.fmul(v, v) for v in values])
        return builder.extract_element(_fold_lanes(builder, [folded]), _I32(0))

    return types.float32(x, block), codegen


@intrinsic
def rotate_block(typingctx: Any, x: Any, block: Any, factor: Any) -> Any:
    """Rotate the 128 floats of a block, in place, and multiply by `factor`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (target,) = _pointers(context, builder, signature, args, (_F32, None, None))
        factors, start = _splat(builder, args[2]), builder.mul(args[1], _I64(BLOCK))
        for i, v in enumerate(_butterflies(builder, _load_block(builder, target, args[1]))):
            _store(builder, builder.fmul(v, factors), builder.gep(target, [builder.add(start, _I64(i * LANES))]))
        return context.get_dummy_value()

    return types.void(x, block, factor), codegen


def _make_quantize(cells: int, levels: int) -> Any:
    @intrinsic
    def quantize(
        typingctx: Any,
        x: Any,
        block: Any,
        factor: Any,
        cells_per_unit: Any,
        most: Any,
        table: Any,
        codes: Any,
        sums: Any,
    ) -> Any:
        """Rotate the 128 floats of a block, multiply by `factor`, and find the nearest levels, symmetric about 0.

        codes (u8, 128 for each block): the nearest level's number minus half the number of levels. sums (f32, 4 for each
        block): of z * c, of c * c and of (z - c)**2, z being the products and c the levels. table: f32 [threshold of each
        cell, levels below each cell (i32 bits), levels by the code modulo their number], lengths cells, cells, levels. most:
        the magnitude (f32) from which on the last cell counts; cells are places rounded to whole numbers.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, tables, code_target, sum_target = _pointers(
                context, builder, signature, args, (_F32, None, None, None, None, _F32, _I8, _F32)
            )
            thresholds = _Table(builder, tables, 0, cells)
            bases = _Table(builder, tables, cells, cells)
            level_of = _Table(builder, tables, 2 * cells, levels)
            factors, scale, most = (_splat(builder, args[i]) for i in (2, 3, 4))
            products, energies, residuals = [], [], []
            for i, v in enumerate(_butterflies(builder, _load_block(builder, source, args[1]))):
                # Adding 0 turns -0 into 0, which belongs to the upper level as every tie does. (Not fused: a product that
                # underflows from below would stay -0.)
                z = builder.fadd(builder.fmul(v, factors), _floats(0.0))
                bits = builder.bitcast(z, _VI)
                magnitude = builder.bitcast(builder.and_(bits, _ints(0x7FFFFFFF)), _VF)
                magnitude = builder.select(builder.fcmp_ordered("<", magnitude, most), magnitude, most)
                # Above 2**23 floats are integers: the low bits of the sum are the number of the cell.
                cell = builder.bitcast(_multiply_add(builder, magnitude, scale, _floats(2.0**23)), _VI)
                sign = builder.and_(bits, _ints(-(2**31)))
                threshold = builder.bitcast(thresholds.look_up(cell), _VI)
                # z >= threshold counts up from the level below it; the mirror image of a negative cell lies one lower.
                above = builder.fcmp_ordered(">=", z, builder.bitcast(builder.or_(threshold, sign), _VF))
                negative = builder.ashr(bits, _ints(31))
                base = builder.bitcast(bases.look_up(cell), _VI)
                code = builder.add(builder.xor(base, negative), negative)
                code = builder.select(above, builder.add(code, _ints(1)), code)
                c = level_of.look_up(code)
                at = builder.add(builder.mul(args[1], _I64(BLOCK)), _I64(i * LANES))
                _store(builder, builder.trunc(code, _VB), builder.gep(code_target, [at]))
                products.append(builder.fmul(z, c))
                energies.append(builder.fmul(c, c))
                distance = builder.fsub(z, c)
                residuals.append(builder.fmul(distance, distance))
            folded = _fold_lanes(builder, [_fold_vectors(builder, p) for p in (products, energies, residuals)])
            four = builder.shuffle_vector(folded, folded, ir.Constant(ir.VectorType(_I32, 4), [0, 4, 8, 12]))
            _store(builder, four, builder.gep(sum_target, [builder.mul(args[1], _I64(4))]))
            return context.get_dummy_value()

        return types.void(x, block, factor, cells_per_unit, most, table, codes, sums), codegen

    return quantize


def _make_look_up(entries: int) -> Any:
    @intrinsic
    def look_up(typingctx: Any, codes: Any, table: Any, block: Any, factor: Any, out: Any) -> Any:
        """Rotate table[code] for the 128 codes (u8) of a block and multiply by `factor`: 128 floats of out."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, floats, target = _pointers(context, builder, signature, args, (_I8, _F32, None, None, _F32))
            table_of, factors = _Table(builder, floats, 0, entries), _splat(builder, args[3])
            start = builder.mul(args[2], _I64(BLOCK))
            levels = []
            for i in range(VECTORS):
                loaded = _load(builder, builder.gep(source, [builder.add(start, _I64(i * LANES))]), _VB)
                levels.append(table_of.look_up(builder.zext(loaded, _VI)))
            for i, v in enumerate(_butterflies(builder, levels)):
                at = builder.gep(target, [builder.add(start, _I64(i * LANES))])
                _store(builder, builder.fmul(v, factors), at)
            return context.get_dummy_value()

        return types.void(codes, table, block, factor, out), codegen

    return look_up


def _make_pack(width: int) -> Any:
    @intrinsic
    def pack(typingctx: Any, codes: Any, block: Any, added: Any, lowest: Any, row: Any, at: Any) -> Any:
        """Fold one field of the 128 codes (u8) of a block, plus `added`, into 16 * width bytes of row from `at`.

        lowest: the value of the field's lowest bit in a code (u8), 1 for widths 4 and 8.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target = _pointers(context, builder, signature, args, (_I8, None, None, None, _I8, None))
            halves = [
                builder.add(_load(builder, place, _VHALF), _splat(builder, args[2], _VHALF))
                for place in _half_places(builder, source, args[1])
            ]
            if width == 8:
                packed = _concatenated(builder, *halves)
            elif width == 4:
                low = builder.and_(halves[0], _bytes([15] * HALF))
                packed = builder.or_(low, builder.shl(halves[1], _bytes([4] * HALF)))
            else:
                parts = []
                for half, masks in zip(halves, _bit_masks(width), strict=True):
                    for place, mask in enumerate(masks):
                        bit = _splat(builder, builder.shl(args[3], _I8(place)), _VHALF)
                        parts.append(_where_set(builder, half, bit, _bytes(mask)))
                packed = functools.reduce(builder.or_, parts)
                lanes = HALF
                while lanes > 16 * width:
                    lanes //= 2
                    low, high = (ir.Constant(ir.VectorType(_I32, lanes), list(range(a, a + lanes))) for a in (0, lanes))
                    packed = builder.or_(*(builder.shuffle_vector(packed, packed, which) for which in (low, high)))
            _store(builder, packed, builder.gep(target, [args[5]]))
            return context.get_dummy_value()

        return types.void(codes, block, added, lowest, row, at), codegen

    return pack


def _make_unpack(width: int) -> Any:
    @intrinsic
    def unpack(typingctx: Any, row: Any, at: Any, lowest: Any, codes: Any, block: Any) -> Any:
        """The inverse of pack. Widths 8 and 4 set the 128 codes of a block, 2 and 1 add their bits to them."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target = _pointers(context, builder, signature, args, (_I8, None, None, _I8, None))
            packed = _load(builder, builder.gep(source, [args[1]]), ir.VectorType(_I8, 16 * width))
            places = _half_places(builder, target, args[4])
            if width == 8:
                halves = [
                    builder.shuffle_vector(packed, packed, ir.Constant(_VHALF_I32, list(range(a, a + HALF))))
                    for a in (0, HALF)
                ]
            elif width == 4:
                halves = [builder.and_(packed, _bytes([15] * HALF)), builder.lshr(packed, _bytes([4] * HALF))]
            else:
                lanes = ir.Constant(_VHALF_I32, [lane % (16 * width) for lane in range(HALF)])
                repeated = builder.shuffle_vector(packed, packed, lanes)
                halves = []
                for where, masks in zip(places, _bit_masks(width), strict=True):
                    half = _load(builder, where, _VHALF)
                    for place, mask in enumerate(masks):
                        bit = _splat(builder, builder.shl(args[2], _I8(place)), _VHALF)
                        half = builder.or_(half, _where_set(builder, repeated, _bytes(mask), bit))
                    halves.append(half)
            for where, half in zip(places, halves, strict=True):
                _store(builder, half, where)
            return context.get_dummy_value()

        return types.void(row, at, lowest, codes, block), codegen

    return unpack


pack_8, pack_4, pack_2, pack_1 = (_make_pack(width) for width in (8, 4, 2, 1))
unpack_8, unpack_4, unpack_2, unpack_1 = (_make_unpack(width) for width in (8, 4, 2, 1))

# By cells and levels: widths up to 5, then 6, 7 and 8.
CELLS = {5: 32, 6: 64, 7: 128, 8: 512}
quantize_5, quantize_6, quantize_7, quantize_8 = (_make_quantize(CELLS[bits], 1 << bits) for bits in CELLS)
look_up_5, look_up_6, look_up_7, look_up_8 = (_make_look_up(1 << bits) for bits in CELLS)


class _Table:
    """A table of floats in memory, held in registers where look-ups are permutations."""

    def __init__(self, builder: Any, pointer: Any, start: int, entries: int) -> None:
        self._builder, self._entries = builder, entries
        self._pointer = builder.gep(pointer, [_I32(start)])
        self._permuted = _HAS_PERMUTE and entries <= _MOST_PERMUTED
        if self._permuted:
            places = [builder.gep(self._pointer, [_I32(i)]) for i in range(0, entries, LANES)]
            self._registers = [_load(builder, place, _VF) for place in places]

    def look_up(self, index: Any) -> Any:
        """table[index modulo entries], a vector of floats for a vector of i32."""
        return self._permute(index) if self._permuted else self._gather(index)

    def _permute(self, index: Any) -> Any:
        builder, registers = self._builder, self._registers
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VF, [_VF, _VI, _VF]), "llvm.x86.avx512.vpermi2var.ps.512"
        )
        if len(registers) == 1:
            return builder.call(function, [registers[0], index, registers[0]])
        parts = [builder.call(function, [a, index, b]) for a, b in zip(registers[::2], registers[1::2], strict=True)]
        bit = 2 * LANES  # each call looked at the index bits below this one
        while len(parts) > 1:
            upper = builder.icmp_signed("!=", builder.and_(index, _ints(bit)), _ints(0))
            parts = [builder.select(upper, b, a) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            bit *= 2
        return parts[0]

    def _gather(self, index: Any) -> Any:
        # Loads lane by lane: LLVM's gather costs more on most machines.
        builder = self._builder
        index = builder.and_(index, _ints(self._entries - 1))
        result = ir.Constant(_VF, ir.Undefined)
        for lane in range(LANES):
            at = builder.gep(self._pointer, [builder.extract_element(index, _I32(lane))])
            result = builder.insert_element(result, builder.load(at), _I32(lane))
        return result


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c: fused where the machine can, so only where that cannot show."""
    if not _HAS_FMA:
        return builder.fadd(builder.fmul(a, b), c)
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VF, [_VF] * 3), "llvm.fma.v16f32")
    return builder.call(fused, [a, b, c])


def _butterflies(builder: Any, x: Sequence[Any]) -> list[Any]:
    values = list(x)
    h = 1
    while h < LANES:
        partner = ir.Constant(_VI, [lane ^ h for lane in range(LANES)])
        signs = ir.Constant(_VF, [-1.0 if lane & h else 1.0 for lane in range(LANES)])
        for i, v in enumerate(values):
            # Low lane: x + partner. High lane: -x + partner, which is the float partner - x.
            values[i] = _multiply_add(builder, v, signs, builder.shuffle_vector(v, v, partner))
        h *= 2
    step = 1
    while step < VECTORS:
        for i in range(VECTORS):
            if not i & step:
                low, high = values[i], values[i + step]
                values[i], values[i + step] = builder.fadd(low, high), builder.fsub(low, high)
        step *= 2
    return values


def _fold_vectors(builder: Any, values: list[Any]) -> Any:
    """Eight vectors to one: the first three folds of a sum."""
    while len(values) > 1:
        half = len(values) // 2
        values = [builder.fadd(values[i], values[i + half]) for i in range(half)]
    return values[0]


def _fold_lanes(builder: Any, values: list[Any]) -> Any:
    """The last four folds of up to four sums: sum i is in lane 4 * i of the result.

    Lanes are halved for two vectors at once, whose halves then share one vector, twice.
    """
    a, b, c, d = (values * 4)[:4]
    first = _join(builder, a, b, 8)
    v = _join(builder, first, first if len(values) <= 2 else _join(builder, c, d, 8), 4)
    for h in (2, 1):
        partner = ir.Constant(_VI, [lane // 4 * 4 + (lane + h) % 4 for lane in range(LANES)])
        v = builder.fadd(v, builder.shuffle_vector(v, v, partner))
    return v


def _join(builder: Any, u: Any, v: Any, h: int) -> Any:
    """Add lane + h to each lane whose number has no bit h, and close the gaps: the results of u, then those of v."""
    lower = [lane for lane in range(2 * LANES) if not lane & h]
    parts = [builder.shuffle_vector(u, v, ir.Constant(_VI, [lane + up for lane in lower])) for up in (0, h)]
    return builder.fadd(*parts)


def _bit_masks(width: int) -> list[list[list[int]]]:
    """For the codes of each half block, for each bit of a folded field: the bit of the packed byte in which it stands."""
    return [
        [[1 << (bit + (start + lane) // (16 * width) * width) for lane in range(HALF)] for bit in range(width)]
        for start in (0, HALF)
    ]


def _where_set(builder: Any, tested: Any, mask: Any, value: Any) -> Any:
    """`value` in the lanes where `tested` has the bit of `mask`, 0 in the others."""
    zero = _bytes([0] * HALF)
    return builder.select(builder.icmp_unsigned("!=", builder.and_(tested, mask), zero), value, zero)


def _half_places(builder: Any, pointer: Any, block: Any) -> list[Any]:
    """Where the two halves of a block of bytes begin."""
    start = builder.mul(block, _I64(BLOCK))
    return [builder.gep(pointer, [builder.add(start, _I64(offset))]) for offset in (0, HALF)]


def _concatenated(builder: Any, a: Any, b: Any) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, 2 * HALF), list(range(2 * HALF))))


def _pointers(context: Any, builder: Any, signature: Any, args: Any, elements: Sequence[Any]) -> list[Any]:
    """The data pointers of the array arguments; None in `elements` marks a scalar."""
    return [
        builder.bitcast(context.make_array(kind)(context, builder, value).data, ir.PointerType(element))
        for kind, value, element in zip(signature.args, args, elements, strict=True)
        if element is not None
    ]


def _load_block(builder: Any, pointer: Any, block: Any) -> list[Any]:
    """The eight vectors of a block of floats."""
    start = builder.mul(block, _I64(BLOCK))
    places = [builder.gep(pointer, [builder.add(start, _I64(i * LANES))]) for i in range(VECTORS)]
    return [_load(builder, place, _VF) for place in places]


def _load(builder: Any, pointer: Any, vector_type: Any) -> Any:
    load = builder.load(builder.bitcast(pointer, ir.PointerType(vector_type)))
    load.align = 1 if vector_type.element == _I8 else 4  # numba's arrays promise no more
    return load


def _store(builder: Any, value: Any, pointer: Any) -> None:
    at = builder.bitcast(pointer, ir.PointerType(value.type))
    builder.store(value, at).align = 1 if value.type.element == _I8 else 4


def _ints(value: int) -> Any:
    return ir.Constant(_VI, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(_VF, [value] * LANES)


def _bytes(values: list[int]) -> Any:
    return ir.Constant(_VHALF, values)


def _splat(builder: Any, scalar: Any, vector_type: Any = _VF) -> Any:
    undefined = ir.Constant(vector_type, ir.Undefined)
    one = builder.insert_element(undefined, scalar, _I32(0))
    lanes = ir.Constant(ir.VectorType(_I32, vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(one, undefined, lanes)
