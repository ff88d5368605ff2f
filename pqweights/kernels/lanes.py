"""Groups to integers with nearly the least squared error, in four passes over the weights, as LLVM vector code for numba.

Sixteen groups lie in the sixteen lanes of a vector, weight j of each in the j-th vector: nothing is summed across lanes,
any multiple of 16 will do as group size, and a group's result depends on no other. Every operation is one IEEE operation
in the order written; tests/groups_reference.py has them again in numpy. With h = 2**(bits - 1):

1. Load.    Transpose, find the smallest and the largest weight, scale by a power of two so that magnitudes end in [1, 4).
2. Fit.     Three chains start from three cuts of the range. A pass evaluates all of them at their (scale, zero): with
            t = (w - zero) / scale, r = rint(t) clipped to [-h, h - 1] and e = t - r, the sums of e, r, e^2, e r and r^2
            give the least-squares scale and zero for the codes r, and the error that is left. Each chain keeps its best
            and moves on by `relax` times the least-squares step. Going several times too far leaves the local minimum in
            which plain alternation (as in Lloyd's algorithm) stops at once; that is worth more than many starts.
3. Round.   What the chains found, min and max, and what the runtimes' own rules would choose, as they will be stored, in
            BF16.
4. Measure. The squared error of each as decoded from what is stored, in float64; the smallest wins.
5. Encode.  The codes of the winner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from pqweights.kernels.cpu_kernels import jit
from pqweights.kernels.vector import stack

LANES = 16
CHAINS = 3
PASSES = 4
MOST_GROUP_SIZE = 256
LARGEST_BF16 = 3.3895313892515355e38
SMALLEST_NORMAL = 2.0**-126

_F32, _F64, _I64, _I32, _I8 = ir.FloatType(), ir.DoubleType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)
_VF, _VD, _VI, _VB = (ir.VectorType(kind, LANES) for kind in (_F32, _F64, _I32, _I8))
# The perfect shuffle of two vectors, its lower and its upper half.
_SHUFFLES = [
    ir.Constant(_VI, [ir.Constant(_I32, start + k // 2 + (LANES if k % 2 else 0)) for k in range(LANES)])
    for start in (0, LANES // 2)
]


class _Lanes:
    """A vector of 16 lanes (float32, float64, int32, or truth values) whose operators emit LLVM code."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def of(self, number: float) -> _Lanes:
        """The same number in every lane."""
        element = self.value.type.element
        constant = int(number) & 0xFFFFFFFF if element is _I32 else float(np.float32(number))
        return _Lanes(self.builder, ir.Constant(self.value.type, [ir.Constant(element, constant)] * LANES))

    def _lift(self, other: _Lanes | float) -> _Lanes:
        return other if isinstance(other, _Lanes) else self.of(other)

    def _do(self, instruction: str, a: _Lanes | float, b: _Lanes | float) -> _Lanes:
        prefix = "f" if self.value.type.element in (_F32, _F64) else ""
        emit = getattr(self.builder, prefix + instruction)
        return _Lanes(self.builder, emit(self._lift(a).value, self._lift(b).value))

    def __add__(self, other: _Lanes | float) -> _Lanes:
        return self._do("add", self, other)

    def __sub__(self, other: _Lanes | float) -> _Lanes:
        return self._do("sub", self, other)

    def __rsub__(self, other: float) -> _Lanes:
        return self._do("sub", other, self)

    def __mul__(self, other: _Lanes | float) -> _Lanes:
        return self._do("mul", self, other)

    def __truediv__(self, other: _Lanes | float) -> _Lanes:
        return self._do("div", self, other)

    def __rtruediv__(self, other: float) -> _Lanes:
        return self._do("div", other, self)

    def __neg__(self) -> _Lanes:
        return self._do("sub", -0.0, self)

    def __and__(self, other: _Lanes | float) -> _Lanes:
        return _Lanes(self.builder, self.builder.and_(self.value, self._lift(other).value))

    def __rshift__(self, count: int) -> _Lanes:
        return _Lanes(self.builder, self.builder.lshr(self.value, self.of(count).value))

    def __lshift__(self, count: int) -> _Lanes:
        return _Lanes(self.builder, self.builder.shl(self.value, self.of(count).value))

    def _compare(self, how: str, other: _Lanes | float) -> _Lanes:
        emit = self.builder.icmp_signed if self.value.type.element is _I32 else self.builder.fcmp_ordered
        return _Lanes(self.builder, emit(how, self.value, self._lift(other).value))

    def __lt__(self, other: _Lanes | float) -> _Lanes:
        return self._compare("<", other)

    def __gt__(self, other: _Lanes | float) -> _Lanes:
        return self._compare(">", other)

    def __ge__(self, other: _Lanes | float) -> _Lanes:
        return self._compare(">=", other)

    def equals(self, other: _Lanes | float) -> _Lanes:
        """Lane by lane."""
        return self._compare("==", other)

    def both(self, other: _Lanes) -> _Lanes:
        """Of truth values: and."""
        return _Lanes(self.builder, self.builder.and_(self.value, other.value))

    def negated(self) -> _Lanes:
        """Of truth values: not."""
        return _Lanes(self.builder, self.builder.not_(self.value))

    def choose(self, yes: _Lanes, no: _Lanes | float) -> _Lanes:
        """Of truth values: one or the other."""
        return _Lanes(self.builder, self.builder.select(self.value, yes.value, yes._lift(no).value))

    def minimum(self, other: _Lanes | float) -> _Lanes:
        """The smaller; of two zeros, or with a NaN, the other."""
        return (self < other).choose(self, other)

    def maximum(self, other: _Lanes | float) -> _Lanes:
        """The larger; of two zeros, or with a NaN, the other."""
        return (self > other).choose(self, other)

    def rint(self) -> _Lanes:
        """To the nearest integer, ties to even."""
        function = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(_VF, [_VF]), "llvm.rint.v16f32")
        return _Lanes(self.builder, self.builder.call(function, [self.value]))

    def magnitude(self) -> _Lanes:
        """Without the sign."""
        return (self.bits() & 0x7FFFFFFF).floats()

    def bits(self) -> _Lanes:
        """Of float32, as int32."""
        return _Lanes(self.builder, self.builder.bitcast(self.value, _VI))

    def floats(self) -> _Lanes:
        """The inverse of bits."""
        return _Lanes(self.builder, self.builder.bitcast(self.value, _VF))

    def wide(self) -> _Lanes:
        """float32 as float64."""
        return _Lanes(self.builder, self.builder.fpext(self.value, _VD))

    def bytes(self) -> _Lanes:
        """Small whole float32 as bytes."""
        return _Lanes(self.builder, self.builder.trunc(self.builder.fptosi(self.value, _VI), _VB))


Body = Callable[[Any, list[_Lanes]], list[_Lanes]]


def _loop(builder: Any, count: Any, carried: Sequence[_Lanes], body: Body) -> list[_Lanes]:
    """For i in range(count), at least one: carried = body(i, carried)."""
    before, head, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(_I64)
    i.add_incoming(_I64(0), before)
    joined = [builder.phi(lanes.value.type) for lanes in carried]
    for phi, lanes in zip(joined, carried, strict=True):
        phi.add_incoming(lanes.value, before)
    results = body(i, [_Lanes(builder, phi) for phi in joined])
    following = builder.add(i, _I64(1))
    i.add_incoming(following, builder.block)
    for phi, lanes in zip(joined, results, strict=True):
        phi.add_incoming(lanes.value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), head, after)
    builder.position_at_end(after)
    return results


def _load(builder: Any, pointer: Any, index: Any, align: int) -> _Lanes:
    at = builder.bitcast(builder.gep(pointer, [index]), ir.PointerType(_VF))
    load = builder.load(at)
    load.align = align
    return _Lanes(builder, load)


def _store(lanes: _Lanes, pointer: Any, index: Any, align: int) -> None:
    builder = lanes.builder
    at = builder.bitcast(builder.gep(pointer, [index]), ir.PointerType(lanes.value.type))
    builder.store(lanes.value, at).align = align


def _splat(builder: Any, scalar: Any) -> _Lanes:
    kind = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
    return _Lanes(builder, builder.shuffle_vector(one, one, ir.Constant(_VI, [ir.Constant(_I32, 0)] * LANES)))


def _transposed(rows: list[_Lanes]) -> list[_Lanes]:
    """Sixteen vectors of sixteen: four times the perfect shuffle."""
    builder = rows[0].builder
    for _ in range(4):
        rows = [
            _Lanes(builder, builder.shuffle_vector(rows[i].value, rows[i + LANES // 2].value, half))
            for i in range(LANES // 2)
            for half in _SHUFFLES
        ]
    return rows


def _bf16(x: _Lanes) -> _Lanes:
    """The nearest BF16, ties to even, saturated."""
    bits = x.bits()
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).floats()
    return nearest.minimum(LARGEST_BF16).maximum(-LARGEST_BF16)


def _stored_scale(x: _Lanes) -> _Lanes:
    """The nearest BF16 that is neither 0 nor so small that a runtime may take it for 0."""
    nearest = _bf16(x)
    least = (nearest < 0.0).choose(x.of(-SMALLEST_NORMAL), SMALLEST_NORMAL)
    return (nearest.magnitude() < SMALLEST_NORMAL).choose(least, nearest)


@intrinsic(prefer_literal=True)
def _fit_16(
    typingctx: Any,
    affine: Any,  # literal: with an offset, else symmetric
    values: Any,  # [16, size] f32
    size: Any,
    bits: Any,
    middle: Any,  # 1: w = (code - h) * scale + offset; 0: w = code * scale + offset
    settings: Any,  # CHAINS pairs: the shares of the range kept below and above its middle (symmetric: twice that of the
    # largest weight); then relax
    work: Any,  # [size, 16] f32, aligned to 64 bytes
    codes: Any,  # out: [16, size] u8
    numbers: Any,  # out: [2, 16] f32, scales and offsets
    sums: Any,  # out: [2, 16] f64, of squares of the weights and of their errors
) -> Any:
    """Sixteen groups to integers; see the module."""
    has_offset = bool(affine.literal_value)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        def pointer(place: int) -> Any:
            return make_array(signature.args[place])(context, b, args[place]).data

        values, settings, work, codes, numbers, sums = (pointer(place) for place in (1, 5, 6, 7, 8, 9))
        size, bits = args[2], args[3]
        zero = _Lanes(b, ir.Constant(_VF, [ir.Constant(_F32, 0.0)] * LANES))
        one, infinite = zero.of(1), zero.of(float("inf"))
        half = _splat(b, b.sitofp(b.shl(_I64(1), b.sub(bits, _I64(1))), _F32))
        last, count = half * 2.0 - 1.0, _splat(b, b.sitofp(size, _F32))
        from_zero = _splat(b, b.trunc(args[4], _I32)).equals(0)  # codes count from the offset, not from the middle
        sixteenth = b.sdiv(size, _I64(LANES))

        def setting(place: int) -> _Lanes:
            return _splat(b, b.load(b.gep(settings, [_I64(place)])))

        def weights(j: Any) -> _Lanes:
            return _load(b, work, b.mul(j, _I64(LANES)), 64)

        # 1. Load.
        def load(i: Any, extremes: list[_Lanes]) -> list[_Lanes]:
            at = b.mul(i, _I64(LANES))
            rows = [_load(b, values, b.add(b.mul(size, _I64(lane)), at), 4) for lane in range(LANES)]
            columns = _transposed(rows)
            for k, column in enumerate(columns):
                _store(column, work, b.add(b.mul(at, _I64(LANES)), _I64(LANES * k)), 64)
            smallest, largest = extremes
            return [
                smallest.minimum(reduce(_Lanes.minimum, columns)),
                largest.maximum(reduce(_Lanes.maximum, columns)),
            ]

        smallest, largest = _loop(b, sixteenth, [infinite, -infinite], load)
        most = largest.maximum(-smallest)
        exponent = (most.bits() >> 23) - 127  # of a subnormal number: -127
        exponent = (exponent < -126).choose(exponent.of(-126), exponent)
        exponent = (exponent > 126).choose(exponent.of(126), exponent)
        down, up = ((127 - exponent) << 23).floats(), ((exponent + 127) << 23).floats()
        constant = smallest.equals(largest) if has_offset else most.equals(0.0)
        # Decoding the largest float32 might overflow: they get min and max of a smaller range, and no fit.
        huge = exponent.equals(126)
        keep = huge.choose(zero.of(0.49 if has_offset else 63 / 64), one)
        if has_offset:
            keep = constant.choose(one, keep)
        smallest, largest = smallest * down * keep, largest * down * keep

        def scale_down(j: Any, _: list[_Lanes]) -> list[_Lanes]:
            _store(weights(j) * down, work, b.mul(j, _I64(LANES)), 64)
            return []

        _loop(b, size, [], scale_down)

        def stored(
            scale: _Lanes, at: _Lanes | None = None, start: _Lanes | None = None
        ) -> tuple[_Lanes, _Lanes, _Lanes, _Lanes]:
            """What is stored for a scale, and the same in the scale of the work. at: the weight of code h; start: of code 0."""
            kept = constant.choose(one, _stored_scale(scale * up))
            inner = kept * down
            if not has_offset:
                return kept, zero, inner, zero
            if start is not None:
                offset = from_zero.choose(start, start + half * inner)
            else:
                assert at is not None
                offset = from_zero.choose(at - half * inner, at)
            offset = _bf16(constant.choose(smallest, offset) * up)
            return kept, offset, inner, offset * down

        # 2. Fit.
        if has_offset:
            plain_scale = (largest - smallest) / last
        else:  # whatever is largest becomes -h, the code that has no mirror image: scales have signs
            plain_scale = -((-smallest >= largest).choose(smallest, largest) / half)
        # As runtimes do it: 0 becomes a code, from the end of larger magnitude on; without an offset, positive scales.
        if has_offset:
            below = -smallest > largest
            edge = below.choose(smallest, largest)
            step = below.choose(plain_scale, -plain_scale)
            steps = (edge / step).rint()
            snaps = steps < 0.0
            snapped_scale = snaps.choose(edge / snaps.choose(steps, -1.0), step)
            snapped_start = snaps.choose(edge, zero)
        else:
            snapped_scale, snapped_start = most * down * keep / (half - 0.5), zero
        relax = setting(2 * CHAINS)
        center = (largest + smallest) * 0.5
        scales, zeros = [], []
        for c in range(CHAINS):
            scale = plain_scale * setting(2 * c)
            if has_offset:
                begin = center + (smallest - center) * setting(2 * c)
                scale = (center + (largest - center) * setting(2 * c + 1) - begin) / last
                zeros.append(begin + half * scale)
            scales.append(constant.choose(one, scale))
        moments = 5 if has_offset else 3

        def improve(_: Any, state: list[_Lanes]) -> list[_Lanes]:
            scales, zeros = state[3 * CHAINS : 4 * CHAINS], state[4 * CHAINS :]
            inverses = [1.0 / scale for scale in scales]

            def evaluate(j: Any, totals: list[_Lanes]) -> list[_Lanes]:
                w, result = weights(j), []
                for c in range(CHAINS):
                    t = ((w - zeros[c]) if has_offset else w) * inverses[c]
                    r = t.rint().maximum(-half).minimum(half - 1.0)
                    e = t - r
                    own = totals[moments * c : moments * (c + 1)]
                    result += [own[0] + e * e, own[1] + e * r, own[2] + r * r]
                    if has_offset:
                        result += [own[3] + e, own[4] + r]
                return result

            totals = _loop(b, size, [zero] * (moments * CHAINS), evaluate)
            bests, new_scales, new_zeros = [], [], []
            for c in range(CHAINS):
                least, best_scale, best_zero = state[3 * c : 3 * c + 3]
                scale, (ee, er, rr, *rest) = scales[c], totals[moments * c : moments * (c + 1)]
                at, shift = (zeros[c], zero) if has_offset else (zero, zero)
                if has_offset:
                    se, sr = rest
                    spread = rr - sr * (sr / count)
                    slope = (spread > 0.5).choose((er - se * (sr / count)) / spread.maximum(0.5), zero)
                    shift = (se - slope * sr) / count
                    error = (ee - shift * se) - slope * er
                    new_zeros.append(at + scale * (relax * shift))
                else:
                    slope = er / rr.maximum(0.5)
                    error = ee - slope * er
                error, fitted = (error * scale) * scale, scale * (slope + 1.0)
                better = (error < least).both(fitted.magnitude() > scale.magnitude() * 0.25)
                bests += [better.choose(error, least), better.choose(fitted, best_scale)]
                bests.append(better.choose(at + scale * shift, best_zero) if has_offset else zero)
                new_scales.append(scale * ((relax * slope).maximum(-0.5).minimum(1.0) + 1.0))
            return bests + new_scales + new_zeros

        bests = _loop(b, _I64(PASSES), [infinite, plain_scale, zero] * CHAINS + scales + zeros, improve)

        # 3. Round. 4. Measure.
        candidates = [
            stored(plain_scale, start=smallest),
            stored(snapped_scale, start=snapped_start),
            *(stored(bests[3 * c + 1], at=bests[3 * c + 2]) for c in range(CHAINS)),
        ]
        low = from_zero.choose(zero, -half) if has_offset else -half
        high = from_zero.choose(last, half - 1.0) if has_offset else half - 1.0
        inverses = [1.0 / inner for _, _, inner, _ in candidates]

        def code(w: _Lanes, offset: _Lanes, inverse: _Lanes) -> _Lanes:
            return (((w - offset) if has_offset else w) * inverse).rint().maximum(low).minimum(high)

        def measure(j: Any, totals: list[_Lanes]) -> list[_Lanes]:
            w, result = weights(j), []
            for (_, _, inner, offset), inverse, total in zip(candidates, inverses, totals[1:], strict=True):
                decoded = code(w, offset, inverse) * inner
                e = (w - (decoded + offset if has_offset else decoded)).wide()
                result.append(total + e * e)
            return [totals[0] + w.wide() * w.wide(), *result]

        energy, *errors = _loop(b, size, [zero.wide()] * (1 + len(candidates)), measure)
        winner, error, inverse = candidates[0], errors[0], inverses[0]
        for candidate, its_error, its_inverse in zip(candidates[1:], errors[1:], inverses[1:], strict=True):
            wins = (its_error < error).both(huge.negated())
            winner = tuple(wins.choose(a, old) for a, old in zip(candidate, winner, strict=True))  # type: ignore[assignment]
            error, inverse = wins.choose(its_error, error), wins.choose(its_inverse, inverse)
        _store(winner[0], numbers, _I64(0), 4)
        _store(winner[1], numbers, _I64(LANES), 4)
        _store(energy * up.wide() * up.wide(), sums, _I64(0), 8)
        _store(error * up.wide() * up.wide(), sums, _I64(LANES), 8)

        # 5. Encode.
        def encode(i: Any, _: list[_Lanes]) -> list[_Lanes]:
            at = b.mul(i, _I64(LANES))
            found = [code(weights(b.add(at, _I64(k))), winner[3], inverse) - low for k in range(LANES)]
            for lane, row in enumerate(_transposed([q.bytes() for q in found])):
                _store(row, codes, b.add(b.mul(size, _I64(lane)), at), 1)
            return []

        _loop(b, sixteenth, [], encode)
        return context.get_dummy_value()

    return types.void(affine, values, size, bits, middle, settings, work, codes, numbers, sums), codegen


# values, settings, codes, scales, offsets, energies, errors; groups, size, bits, symmetric, middle
FIT = types.void(*[types.voidptr] * 7, *[types.int64] * 5)
# Bytes of the arrays on the stack: the weights of sixteen groups, in elements of 1 and 4 bytes; two numbers for each.
_WEIGHTS = MOST_GROUP_SIZE * LANES
_WEIGHTS_OF_4, _PAIRS_OF_4, _PAIRS_OF_8 = _WEIGHTS * 4, 2 * LANES * 4, 2 * LANES * 8


@jit
def _fit_some(symmetric, values, size, bits, middle, settings, work, codes, numbers, sums):  # type: ignore[no-untyped-def]
    if symmetric:
        _fit_16(0, values, size, bits, middle, settings, work, codes, numbers, sums)
    else:
        _fit_16(1, values, size, bits, middle, settings, work, codes, numbers, sums)


def fit(  # type: ignore[no-untyped-def]
    values_at, settings_at, codes_at, scales_at, offsets_at, energies_at, errors_at, groups, size, bits, symmetric, middle,
):  # fmt: skip
    """See the module; a size that 16 divides, of at most MOST_GROUP_SIZE."""
    values = carray(values_at, groups * size, np.float32)
    settings = carray(settings_at, 2 * CHAINS + 1, np.float32)
    codes = carray(codes_at, groups * size, np.uint8)
    scales = carray(scales_at, groups, np.float32)
    offsets = carray(offsets_at, groups, np.float32)
    energies = carray(energies_at, groups, np.float64)
    errors = carray(errors_at, groups, np.float64)
    work = carray(stack(_WEIGHTS_OF_4), _WEIGHTS, np.float32)
    rest = carray(stack(_WEIGHTS_OF_4), _WEIGHTS, np.float32)
    rest_codes = carray(stack(_WEIGHTS), _WEIGHTS, np.uint8)
    numbers = carray(stack(_PAIRS_OF_4), 2 * LANES, np.float32)
    sums = carray(stack(_PAIRS_OF_8), 2 * LANES, np.float64)
    for first in range(0, groups, LANES):
        count = min(LANES, groups - first)
        begin, end = first * size, (first + count) * size
        if count == LANES:
            _fit_some(symmetric, values[begin:end], size, bits, middle, settings, work, codes[begin:end], numbers, sums)
        else:
            for j in range(LANES * size):
                rest[j] = values[begin + j] if begin + j < end else np.float32(0)
            _fit_some(symmetric, rest, size, bits, middle, settings, work, rest_codes, numbers, sums)
            for j in range(end - begin):
                codes[begin + j] = rest_codes[j]
        for lane in range(count):
            scales[first + lane], offsets[first + lane] = numbers[lane], numbers[LANES + lane]
            energies[first + lane], errors[first + lane] = sums[lane], sums[LANES + lane]
