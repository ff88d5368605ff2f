"""LLVM vector code for numba's intrinsics: arithmetic on vectors, loads and stores, shuffles, loops.

lanes.py and vector.py write their kernels with it. Every operator emits one LLVM instruction, in the order in which
Python evaluates the expression: nothing is fused or reassociated. A vector has 16 lanes unless its type says
otherwise; on a machine with shorter vectors, LLVM splits each one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import make_array

LANES = 16

F32, F64 = ir.FloatType(), ir.DoubleType()
I64, I32, I16, I8 = (ir.IntType(width) for width in (64, 32, 16, 8))
FLOATS, DOUBLES, INTS, BYTES = (ir.VectorType(kind, LANES) for kind in (F32, F64, I32, I8))
# Addresses that numba's arrays promise to be divisible by: the size of an element, in bytes.
_ALIGNMENT = {F32: 4, F64: 8, I32: 4, I8: 1}


class Lanes:
    """A vector of float32, float64, int32, bytes or truth values whose operators emit LLVM code."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def of(self, number: float) -> Lanes:
        """A vector of this one's type with the same number in every lane."""
        return constant(self.builder, self.value.type, [number] * self.value.type.count)

    def _lift(self, other: Lanes | float) -> Lanes:
        return other if isinstance(other, Lanes) else self.of(other)

    def _emit(self, instruction: str, other: Lanes | float) -> Lanes:
        return Lanes(self.builder, getattr(self.builder, instruction)(self.value, self._lift(other).value))

    def _arithmetic(self, instruction: str, a: Lanes | float, b: Lanes | float) -> Lanes:
        prefix = "f" if self.value.type.element in (F32, F64) else ""
        return self._lift(a)._emit(prefix + instruction, self._lift(b))

    def __add__(self, other: Lanes | float) -> Lanes:
        return self._arithmetic("add", self, other)

    def __sub__(self, other: Lanes | float) -> Lanes:
        return self._arithmetic("sub", self, other)

    def __rsub__(self, other: float) -> Lanes:
        return self._arithmetic("sub", other, self)

    def __mul__(self, other: Lanes | float) -> Lanes:
        return self._arithmetic("mul", self, other)

    def __truediv__(self, other: Lanes | float) -> Lanes:
        return self._arithmetic("div", self, other)

    def __rtruediv__(self, other: float) -> Lanes:
        return self._arithmetic("div", other, self)

    def __neg__(self) -> Lanes:
        return self._arithmetic("sub", -0.0, self)

    def __and__(self, other: Lanes | float) -> Lanes:
        return self._emit("and_", other)

    def __or__(self, other: Lanes | float) -> Lanes:
        return self._emit("or_", other)

    def __xor__(self, other: Lanes | float) -> Lanes:
        return self._emit("xor", other)

    def __rshift__(self, count: int) -> Lanes:
        return self._emit("lshr", count)

    def __lshift__(self, count: int) -> Lanes:
        return self._emit("shl", count)

    def _compare(self, how: str, other: Lanes | float) -> Lanes:
        floating = self.value.type.element in (F32, F64)
        emit = self.builder.fcmp_ordered if floating else self.builder.icmp_signed
        return Lanes(self.builder, emit(how, self.value, self._lift(other).value))

    def __lt__(self, other: Lanes | float) -> Lanes:
        return self._compare("<", other)

    def __gt__(self, other: Lanes | float) -> Lanes:
        return self._compare(">", other)

    def __ge__(self, other: Lanes | float) -> Lanes:
        return self._compare(">=", other)

    def equals(self, other: Lanes | float) -> Lanes:
        """Whether each lane equals the other's (== would have to return a bool)."""
        return self._compare("==", other)

    def differs(self, other: Lanes | float) -> Lanes:
        """Whether each lane differs from the other's; for integers."""
        return self._compare("!=", other)

    def negated(self) -> Lanes:
        """The opposite of each truth value."""
        return Lanes(self.builder, self.builder.not_(self.value))

    def choose(self, yes: Lanes, no: Lanes | float) -> Lanes:
        """`yes` in the lanes where this truth value is true, `no` in the others."""
        return Lanes(self.builder, self.builder.select(self.value, yes.value, yes._lift(no).value))

    def minimum(self, other: Lanes | float) -> Lanes:
        """The smaller; of two zeros, or with a NaN, the other."""
        return (self < other).choose(self, other)

    def maximum(self, other: Lanes | float) -> Lanes:
        """The larger; of two zeros, or with a NaN, the other."""
        return (self > other).choose(self, other)

    def unsigned_minimum(self, other: Lanes) -> Lanes:
        """The smaller of integers without a sign."""
        smaller = Lanes(self.builder, self.builder.icmp_unsigned("<", self.value, other.value))
        return smaller.choose(self, other)

    def rint(self) -> Lanes:
        """The nearest integer to each float32, ties to even."""
        return call(self.builder, "llvm.rint.v16f32", FLOATS, self)

    def magnitude(self) -> Lanes:
        """Each float32 without its sign."""
        return (self.bits() & 0x7FFFFFFF).floats()

    def bits(self) -> Lanes:
        """The bit patterns of float32, as int32."""
        return Lanes(self.builder, self.builder.bitcast(self.value, INTS))

    def floats(self) -> Lanes:
        """The float32 that have these bit patterns; the inverse of `bits`."""
        return Lanes(self.builder, self.builder.bitcast(self.value, FLOATS))

    def wide(self) -> Lanes:
        """The float32 as float64."""
        return Lanes(self.builder, self.builder.fpext(self.value, DOUBLES))

    def whole(self) -> Lanes:
        """The float32, which must be whole numbers, as int32."""
        return Lanes(self.builder, self.builder.fptosi(self.value, INTS))

    def bytes(self) -> Lanes:
        """The lowest byte of each int32."""
        return Lanes(self.builder, self.builder.trunc(self.value, BYTES))

    def all_ones_where_negative(self) -> Lanes:
        """For each int32, -1 where it is negative and 0 elsewhere."""
        return Lanes(self.builder, self.builder.ashr(self.value, self.of(31).value))


def constant(builder: Any, kind: Any, numbers: Sequence[float]) -> Lanes:
    """A vector of these numbers; floats are rounded to float32, integers may be given signed or unsigned."""
    element = kind.element
    whole = isinstance(element, ir.IntType)
    rounded = [int(n) & ((1 << element.width) - 1) if whole else float(np.float32(n)) for n in numbers]
    return Lanes(builder, ir.Constant(kind, [ir.Constant(element, n) for n in rounded]))


def splat(builder: Any, scalar: Any, count: int = LANES) -> Lanes:
    """A vector of `count` lanes that all hold one number, known only when the kernel runs."""
    kind = ir.VectorType(scalar.type, count)
    one = Lanes(builder, builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0)))
    return shuffled(one, one, [0] * count)


def shuffled(a: Lanes, b: Lanes, order: Sequence[int]) -> Lanes:
    """The lanes of a and b in another order; those of b count from the number of lanes of a."""
    places = ir.Constant(ir.VectorType(I32, len(order)), [ir.Constant(I32, place) for place in order])
    return Lanes(a.builder, a.builder.shuffle_vector(a.value, b.value, places))


def transposed(rows: list[Lanes]) -> list[Lanes]:
    """Sixteen vectors of sixteen lanes as the columns of what they are the rows of."""
    rows = _transposed_quarters(rows)
    for distance in (4, 8):
        rows = _in_pairs(rows, distance, _ALTERNATE_QUARTERS)
    return rows


def transposed_halves(left: list[Lanes], right: list[Lanes]) -> list[Lanes]:
    """The columns of sixteen rows of sixteen lanes, of which the left and the right halves were loaded apart.

    Each vector holds the halves of two rows, i and i + 4, in the order of i. That leaves fewer shuffles, which few
    units can do, and more loads.
    """
    columns = []
    for halves in (left, right):
        columns += _in_pairs(_transposed_quarters(halves), 4, _ALTERNATE_QUARTERS)
    return columns


_QUARTERS = range(0, LANES, 4)
_ALTERNATE_QUARTERS = [[4 * q + lane for q in range(start, 8, 2) for lane in range(4)] for start in (0, 1)]


def _transposed_quarters(rows: list[Lanes]) -> list[Lanes]:
    """Transpose each four by four lanes of four adjacent rows."""
    for distance, first, second in ((1, (0, 16, 1, 17), (2, 18, 3, 19)), (2, (0, 1, 16, 17), (2, 3, 18, 19))):
        rows = _in_pairs(rows, distance, [[q + lane for q in _QUARTERS for lane in order] for order in (first, second)])
    return [rows[i + k] for i in range(0, len(rows), 4) for k in (0, 2, 1, 3)]


def _in_pairs(rows: list[Lanes], distance: int, orders: list[list[int]]) -> list[Lanes]:
    """Replace the rows i and i + distance by their lanes in the first and in the second order."""
    result = list(rows)
    for i in range(len(rows)):
        if not i & distance:
            result[i], result[i + distance] = (shuffled(rows[i], rows[i + distance], order) for order in orders)
    return result


def call(builder: Any, name: str, kind: Any, *arguments: Lanes) -> Lanes:
    """The result, of type `kind`, of one of LLVM's own functions."""
    signature = ir.FunctionType(kind, [argument.value.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return Lanes(builder, builder.call(function, [argument.value for argument in arguments]))


def array_pointers(context: Any, builder: Any, signature: Any, args: Any) -> list[Any]:
    """Where the elements of each argument that is an array begin."""
    return [
        make_array(kind)(context, builder, value).data
        for kind, value in zip(signature.args, args, strict=True)
        if isinstance(kind, types.Array)
    ]


def load(builder: Any, pointer: Any, index: Any, kind: Any = FLOATS, align: int | None = None) -> Lanes:
    """A vector of type `kind` from pointer[index] on. align: of its address in bytes, by default one element's."""
    at = builder.bitcast(builder.gep(pointer, [index]), ir.PointerType(kind))
    loaded = builder.load(at)
    loaded.align = align or _ALIGNMENT[kind.element]
    return Lanes(builder, loaded)


def store(lanes: Lanes, pointer: Any, index: Any, align: int | None = None) -> None:
    """The inverse of `load`."""
    builder, kind = lanes.builder, lanes.value.type
    at = builder.bitcast(builder.gep(pointer, [index]), ir.PointerType(kind))
    builder.store(lanes.value, at).align = align or _ALIGNMENT[kind.element]


def prefetch(builder: Any, pointer: Any, index: Any) -> None:
    """Ask for the cache line of pointer[index], which may lie beyond the array."""
    at = builder.bitcast(builder.gep(pointer, [index]), ir.PointerType(I8))
    signature = ir.FunctionType(ir.VoidType(), [at.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [at, I32(0), I32(3), I32(1)])  # to read, into the nearest cache, data


# What a loop carries from one turn to the next: vectors, or tuples and NamedTuples of such, nested to any depth.
State = TypeVar("State")


def loop(builder: Any, count: Any, carried: State, body: Callable[[Any, State], State]) -> State:
    """Emit `for i in range(count): carried = body(i, carried)` and return the last `carried`."""
    before, head, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", count, I64(0)), head, after)
    builder.position_at_end(head)
    i = builder.phi(I64)
    i.add_incoming(I64(0), before)
    joined = _mapped(lambda lanes: Lanes(builder, builder.phi(lanes.value.type)), carried)
    results = body(i, joined)
    following = builder.add(i, I64(1))
    i.add_incoming(following, builder.block)
    for phi, start, result in zip(*(_leaves(state) for state in (joined, carried, results)), strict=True):
        phi.value.add_incoming(start.value, before)
        phi.value.add_incoming(result.value, builder.block)
    end = builder.block
    builder.cbranch(builder.icmp_signed("<", following, count), head, after)
    builder.position_at_end(after)
    last: State = _mapped(lambda lanes: Lanes(builder, builder.phi(lanes.value.type)), results)
    for phi, start, result in zip(*(_leaves(state) for state in (last, carried, results)), strict=True):
        phi.value.add_incoming(start.value, before)
        phi.value.add_incoming(result.value, end)
    return last


def _mapped(function: Callable[[Lanes], Lanes], state: Any) -> Any:
    """The same nesting of tuples with the function applied to each vector."""
    if isinstance(state, Lanes):
        return function(state)
    parts = (_mapped(function, part) for part in state)
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def _leaves(state: Any) -> Iterator[Lanes]:
    """The vectors of a nesting of tuples, in order."""
    if isinstance(state, Lanes):
        yield state
    else:
        for part in state:
            yield from _leaves(part)
