"""The inner steps that LLVM does not vectorise well by itself, as LLVM vector code for numba.

A block is eight vectors of 16 floats. Butterflies below 16 and the last folds of a sum stay within a vector, by shuffles;
a table look-up is a permutation of registers where the machine has one (AVX-512), a gather elsewhere. Every operation is
one of docs/format.md in its order; on machines with shorter vectors LLVM splits each one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core import config as numba_config
from numba.extending import intrinsic

LANES = 16
VECTORS = 128 // LANES

_F32, _I32, _I8 = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_VF, _VI, _VB = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES), ir.VectorType(_I8, LANES)
_VMASK = ir.VectorType(ir.IntType(1), LANES)

# Unless numba was told to compile for another machine (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES).
_HAS_PERMUTE = (
    getattr(numba_config, "CPU_NAME", None) is None
    and getattr(numba_config, "CPU_FEATURES", None) is None
    and bool(llvm.get_host_cpu_features().get("avx512f", False))
)
# Tables of more registers than this are gathered: permuting them costs more.
_MOST_PERMUTED = 256


@intrinsic
def hadamard(typingctx: Any, x: Any, out: Any) -> Any:
    """hadamard(x, out): the butterflies of 128 floats, stages 1 to 64; out may be x."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = _pointers(context, builder, signature, args, (_F32, _F32))
        for i, v in enumerate(_butterflies(builder, [_load(builder, source, _VF, i) for i in range(VECTORS)])):
            _store(builder, v, target, i)
        return context.get_dummy_value()

    return types.void(x, out), codegen


@intrinsic
def tree_sum(typingctx: Any, p: Any) -> Any:
    """tree_sum(p): the sum of 128 floats by folding the upper half onto the lower one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (source,) = _pointers(context, builder, signature, args, (_F32,))
        return _fold(builder, [_load(builder, source, _VF, i) for i in range(VECTORS)])

    return types.float32(p), codegen


def _make_quantize(cells: int, levels: int) -> Any:
    @intrinsic
    def quantize(typingctx: Any, z: Any, cells_per_unit: Any, table: Any, half: Any, codes: Any, chosen: Any) -> Any:
        """The codes (u8) and levels (f32) nearest to 128 values z, for levels that are symmetric about 0.

        table: f32 [threshold of each cell, codes below each cell (i32 bits), positive levels], lengths cells, cells and
        levels; half: the number of positive levels. Magnitudes are compared as integers, which orders floats alike; a
        negative value on a threshold belongs to the level nearer to 0, so its magnitude counts as one unit less.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, tables, code_target, level_target = _pointers(
                context, builder, signature, args, (_F32, None, _F32, None, _I8, _F32)
            )
            thresholds = _Table(builder, tables, 0, cells)
            bases = _Table(builder, tables, cells, cells)
            positive = _Table(builder, tables, 2 * cells, levels)
            scale, halves = _splat(builder, args[1], _VF), _splat(builder, args[3], _VI)
            last_cell = ir.Constant(_VF, [float(cells - 1)] * LANES)
            for i in range(VECTORS):
                # Adding 0 turns -0 into 0, which belongs to the upper level as every tie does.
                value = builder.fadd(_load(builder, source, _VF, i), ir.Constant(_VF, [0.0] * LANES))
                bits = builder.bitcast(value, _VI)
                magnitude = builder.and_(bits, _ints(0x7FFFFFFF))
                place = builder.fmul(builder.bitcast(magnitude, _VF), scale)
                place = builder.select(builder.fcmp_ordered("<", place, last_cell), place, last_cell)
                cell = builder.fptosi(place, _VI)
                compared = builder.sub(magnitude, builder.lshr(bits, _ints(31)))
                above = builder.icmp_signed(">=", compared, builder.bitcast(thresholds.look_up(cell), _VI))
                index = builder.add(builder.bitcast(bases.look_up(cell), _VI), builder.zext(above, _VI))
                sign = builder.and_(bits, _ints(-(2**31)))
                level = builder.or_(builder.bitcast(positive.look_up(index), _VI), sign)
                _store(builder, builder.bitcast(level, _VF), level_target, i)
                # half + index, or its mirror image half - 1 - index: all code bits flipped
                code_bits = builder.sub(builder.add(halves, halves), _ints(1))
                flip = builder.and_(builder.ashr(bits, _ints(31)), code_bits)
                code = builder.xor(builder.add(halves, index), flip)
                _store(builder, builder.trunc(code, _VB), code_target, i)
            return context.get_dummy_value()

        return types.void(z, cells_per_unit, table, half, codes, chosen), codegen

    return quantize


def _make_look_up(entries: int) -> Any:
    @intrinsic
    def look_up(typingctx: Any, codes: Any, table: Any, out: Any) -> Any:
        """out[j] = table[codes[j]] for 128 codes (u8) and a table of floats."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, floats, target = _pointers(context, builder, signature, args, (_I8, _F32, _F32))
            table_of = _Table(builder, floats, 0, entries)
            for i in range(VECTORS):
                index = builder.zext(_load(builder, source, _VB, i), _VI)
                _store(builder, table_of.look_up(index), target, i)
            return context.get_dummy_value()

        return types.void(codes, table, out), codegen

    return look_up


# By cells and positive levels: widths up to 5, then 6, 7 and 8.
CELLS = {5: 32, 6: 64, 7: 128, 8: 512}
quantize_5, quantize_6, quantize_7, quantize_8 = (
    _make_quantize(CELLS[5], 16), _make_quantize(CELLS[6], 32), _make_quantize(CELLS[7], 64), _make_quantize(CELLS[8], 128),
)  # fmt: skip
look_up_5, look_up_6, look_up_7, look_up_8 = (_make_look_up(n) for n in (32, 64, 128, 256))


class _Table:
    """A table of floats in memory, held in registers where look-ups are permutations."""

    def __init__(self, builder: Any, pointer: Any, start: int, entries: int) -> None:
        self._builder, self._entries = builder, entries
        self._pointer = builder.gep(pointer, [_I32(start)])
        self._permuted = _HAS_PERMUTE and entries <= _MOST_PERMUTED
        if self._permuted:
            self._registers = [_load(builder, self._pointer, _VF, i) for i in range(entries // LANES)]

    def look_up(self, index: Any) -> Any:
        """table[index], a vector of floats for a vector of i32."""
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
        result = ir.Constant(_VF, ir.Undefined)
        for lane in range(LANES):
            at = builder.gep(self._pointer, [builder.extract_element(index, _I32(lane))])
            result = builder.insert_element(result, builder.load(at), _I32(lane))
        return result


def _butterflies(builder: Any, x: Sequence[Any]) -> list[Any]:
    values = list(x)
    h = 1
    while h < LANES:
        partner = ir.Constant(_VI, [lane ^ h for lane in range(LANES)])
        negated = ir.Constant(_VI, [-(2**31) if lane & h else 0 for lane in range(LANES)])
        for i, v in enumerate(values):
            # Low lane: partner + x. High lane: partner + (-x), which is the float partner - x.
            own = builder.bitcast(builder.xor(builder.bitcast(v, _VI), negated), _VF)
            values[i] = builder.fadd(builder.shuffle_vector(v, v, partner), own)
        h *= 2
    step = 1
    while step < VECTORS:
        for i in range(VECTORS):
            if not i & step:
                low, high = values[i], values[i + step]
                values[i], values[i + step] = builder.fadd(low, high), builder.fsub(low, high)
        step *= 2
    return values


def _fold(builder: Any, values: list[Any]) -> Any:
    while len(values) > 1:
        half = len(values) // 2
        values = [builder.fadd(values[i], values[i + half]) for i in range(half)]
    (v,) = values
    h = LANES // 2
    while h:
        rotated = ir.Constant(_VI, [(lane + h) % LANES for lane in range(LANES)])
        v = builder.fadd(v, builder.shuffle_vector(v, v, rotated))
        h //= 2
    return builder.extract_element(v, _I32(0))


def _pointers(context: Any, builder: Any, signature: Any, args: Any, elements: Sequence[Any]) -> list[Any]:
    """The data pointers of the array arguments; None in `elements` marks a scalar."""
    return [
        builder.bitcast(context.make_array(kind)(context, builder, value).data, ir.PointerType(element))
        for kind, value, element in zip(signature.args, args, elements, strict=True)
        if element is not None
    ]


def _load(builder: Any, pointer: Any, vector_type: Any, number: int) -> Any:
    at = builder.bitcast(builder.gep(pointer, [_I32(number * LANES)]), ir.PointerType(vector_type))
    load = builder.load(at)
    load.align = 1 if vector_type is _VB else 4  # numba's arrays promise no more
    return load


def _store(builder: Any, value: Any, pointer: Any, number: int) -> None:
    at = builder.bitcast(builder.gep(pointer, [_I32(number * LANES)]), ir.PointerType(value.type))
    builder.store(value, at).align = 1 if value.type == _VB else 4


def _ints(value: int) -> Any:
    return ir.Constant(_VI, [value] * LANES)


def _splat(builder: Any, scalar: Any, vector_type: Any) -> Any:
    undefined = ir.Constant(vector_type, ir.Undefined)
    one = builder.insert_element(undefined, scalar, _I32(0))
    return builder.shuffle_vector(one, undefined, _ints(0))
