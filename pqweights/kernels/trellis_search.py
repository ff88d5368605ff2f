"""The trellis search for sixteen sequences at once, as LLVM vector code for numba: search, way back, numbers, errors.

The sequences lie in the sixteen lanes of a vector. A tile is a block of 128 weights of each; vector t of a tile has
weight t of its sixteen blocks. So the metrics of a state of the trellis are a vector, and its decisions sixteen bits.

The trellis is Ungerboeck's of rate 1/2 (IEEE Trans. Inf. Theory IT-28, 1982) over the integers, as in trellis-coded
quantization (Marcellin and Fischer, IEEE Trans. Commun. 38, 1990). The lowest bit of a state is the parity of the
number n that comes next; bit 1 of n, with it, chooses the state after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pqweights.kernels.emit import (
    FLOATS,
    I16,
    I32,
    I64,
    LANES,
    Lanes,
    array_pointers,
    load,
    loop,
    shuffled,
    splat,
    store,
)
from pqweights.kernels.trellis_codes import TRELLISES
from pqweights.kernels.vector import BLOCK

# Bits of a state, of the searches that there are.
_SEARCHES = (3, 6, 8)
# More than any path costs within a tile.
_UNREACHABLE = 1e9
_WORDS = ir.VectorType(I16, LANES)
_TRUTHS = ir.VectorType(ir.IntType(1), LANES)


def _make_search(state_bits: int) -> Any:
    states = 1 << state_bits

    @intrinsic
    def search(typingctx: Any, work: Any, tile: Any, factors: Any, penalties: Any, metrics: Any, decisions: Any) -> Any:
        """Extend the cheapest path to each state by a tile.

        work: f32 [tiles, 128, 16]
        factors: f32 [16], what the weights of each block are multiplied by
        penalties: f32 [16], what n other than 0 and 1 cost
        metrics: in and out: f32 [2, states, 16], of which the first half counts
        decisions: out: u16 [tiles, 128, states], bit 1 of the n that leads to each state
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            work, factors, penalties, metrics, decisions = array_pointers(context, builder, signature, args)
            factor, penalty = (load(builder, pointer, I64(0), align=64) for pointer in (factors, penalties))
            first = builder.mul(args[1], I64(BLOCK))

            def distances(t: Any) -> list[Lanes]:
                at = builder.mul(builder.add(first, t), I64(LANES))
                return _distances(load(builder, work, at, align=64) * factor, penalty)

            def decide(t: Any, state: int, truth: Any) -> None:
                at = builder.add(builder.mul(builder.add(first, t), I64(states)), I64(state))
                builder.store(builder.bitcast(truth, I16), builder.gep(decisions, [at])).align = 2

            if state_bits <= 3:
                _search_in_registers(builder, state_bits, metrics, distances, decide)
            else:
                _search_in_memory(builder, state_bits, metrics, distances, decide)
            return context.get_dummy_value()

        return types.void(work, tile, factors, penalties, metrics, decisions), codegen

    return search


def _distances(u: Lanes, penalty: Lanes) -> list[Lanes]:
    """The squared distances of u from the nearest integers that leave 0, 1, 2 and 3 when divided by 4."""
    # From the nearest multiple of 4: within [-2, 2].
    offset = u - (u * 0.25).rint() * 4.0
    above, below = (offset - 1.0).magnitude(), (offset + 1.0).magnitude()
    above, below = above.minimum(4.0 - above), below.minimum(4.0 - below)
    far = 2.0 - offset.magnitude()
    return [offset * offset, above * above, far * far + penalty, below * below + penalty]


def _extended(
    metric_of: Callable[[int], Lanes], distances: Sequence[Lanes], state: int, state_bits: int
) -> tuple[Lanes, Any]:
    """The cost of the cheapest path to a state, and the truth values of bit 1 of the last n on it."""
    by_parity, by_bit = TRELLISES[state_bits]
    parity = state >> (state_bits - 1)
    costs = []
    for bit in range(2):
        before = (state ^ (by_parity * parity) ^ (by_bit * bit)) << 1 | parity
        costs.append(metric_of(before) + distances[parity + 2 * bit])
    less = costs[1] < costs[0]
    return less.choose(costs[1], costs[0]), less.value


def _search_in_registers(builder: Any, state_bits: int, metrics: Any, distances: Any, decide: Any) -> None:
    states = 1 << state_bits

    def step(t: Any, before: tuple[Lanes, ...]) -> tuple[Lanes, ...]:
        apart, after = distances(t), []
        for state in range(states):
            cost, decision = _extended(before.__getitem__, apart, state, state_bits)
            decide(t, state, decision)
            after.append(cost)
        return tuple(after)

    start = tuple(load(builder, metrics, I64(state * LANES), align=64) for state in range(states))
    end = loop(builder, I64(BLOCK), start, step)
    for state, cost in enumerate(end):  # so that the metrics stay small
        store(cost - end[0], metrics, I64(state * LANES), align=64)


def _search_in_memory(builder: Any, state_bits: int, metrics: Any, distances: Any, decide: Any) -> None:
    states = 1 << state_bits

    def step(t: Any, nothing: tuple[()]) -> tuple[()]:
        # The halves of the metrics take turns.
        odd = builder.and_(t, I64(1))
        source, target = (builder.mul(half, I64(states * LANES)) for half in (odd, builder.xor(odd, I64(1))))
        apart = distances(t)

        def before(state: int) -> Lanes:
            return load(builder, metrics, builder.add(source, I64(state * LANES)), align=64)

        for state in range(states):
            cost, decision = _extended(before, apart, state, state_bits)
            decide(t, state, decision)
            store(cost, metrics, builder.add(target, I64(state * LANES)), align=64)
        return nothing

    loop(builder, I64(BLOCK), (), step)
    least = load(builder, metrics, I64(0), align=64)
    for state in range(states):
        place = I64(state * LANES)
        store(load(builder, metrics, place, align=64) - least, metrics, place, align=64)


def _make_start(state_bits: int) -> Any:
    @intrinsic
    def start(typingctx: Any, metrics: Any) -> Any:
        """Set the metrics, f32 [states, 16], to those of sequences that begin in state 0."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (metrics,) = array_pointers(context, builder, signature, args)
            for state in range(1 << state_bits):
                cost = Lanes(builder, ir.Constant(FLOATS, None)).of(_UNREACHABLE if state else 0.0)
                store(cost, metrics, I64(state * LANES), align=64)
            return context.get_dummy_value()

        return types.void(metrics), codegen

    return start


# --- the way back ---


def _make_finish(state_bits: int) -> Any:
    @intrinsic
    def finish(typingctx: Any, metrics: Any, planes: Any) -> Any:
        """Write the last states of the cheapest paths, of equals the lowest.

        metrics: f32 [states, 16]
        planes: out: u16 [state bits]: bit i of the states of the sixteen sequences, for each i
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            metrics, planes = array_pointers(context, builder, signature, args)
            least = load(builder, metrics, I64(0), align=64)
            best = least.whole().of(0)
            for state in range(1, 1 << state_bits):
                cost = load(builder, metrics, I64(state * LANES), align=64)
                less = cost < least
                least, best = less.choose(cost, least), less.choose(best.of(state), best)
            for i in range(state_bits):
                word = builder.bitcast((best & (1 << i)).differs(0).value, I16)
                builder.store(word, builder.gep(planes, [I64(i)]))
            return context.get_dummy_value()

        return types.void(metrics, planes), codegen

    return finish


def _make_trace(state_bits: int) -> Any:
    states = 1 << state_bits
    by_parity, by_bit = TRELLISES[state_bits]

    @intrinsic
    def trace(typingctx: Any, decisions: Any, tile: Any, planes: Any, residues: Any) -> Any:
        """Follow the cheapest paths back through a tile.

        decisions: u16 [tiles, 128, states]
        planes: in and out: u16 [state bits]: the states behind the tile, and then those before it
        residues: out: u16 [tiles, 128, 2]: the parities and the bits 1 of the n of sixteen sequences
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            decisions, planes, residues = array_pointers(context, builder, signature, args)
            last = builder.add(builder.mul(args[1], I64(BLOCK)), I64(BLOCK - 1))

            def step(i: Any, after: tuple[Lanes, ...]) -> tuple[Lanes, ...]:
                t = builder.sub(last, i)
                parity = after[-1].value
                bit = _chosen(builder, decisions, builder.mul(t, I64(states)), [plane.value for plane in after])
                at = builder.mul(t, I64(2))
                for place, word in enumerate((parity, bit)):
                    builder.store(word, builder.gep(residues, [builder.add(at, I64(place))])).align = 2
                before = [parity]
                for k in range(state_bits - 1):
                    plane = after[k].value
                    plane = builder.xor(plane, parity) if by_parity >> k & 1 else plane
                    before.append(builder.xor(plane, bit) if by_bit >> k & 1 else plane)
                return tuple(Lanes(builder, plane) for plane in before)

            places = [builder.gep(planes, [I64(i)]) for i in range(state_bits)]
            end = loop(builder, I64(BLOCK), tuple(Lanes(builder, builder.load(place)) for place in places), step)
            for place, plane in zip(places, end, strict=True):
                builder.store(plane.value, place)
            return context.get_dummy_value()

        return types.void(decisions, tile, planes, residues), codegen

    return trace


def _chosen(builder: Any, decisions: Any, start: Any, planes: list[Any]) -> Any:
    """The decision of each sequence's state: sixteen bits, of the words from decisions[start] on."""
    remaining = list(planes)
    count = 1 << len(planes)
    if count > 8:
        words = load(builder, decisions, start, ir.VectorType(I16, count), align=2)
        while count > 8:
            count //= 2
            low, high = (shuffled(words, words, range(half, half + count)) for half in (0, count))
            words = low ^ ((low ^ high) & splat(builder, remaining.pop(), count))
        chosen = [builder.extract_element(words.value, I32(i)) for i in range(count)]
    else:
        loads = (builder.load(builder.gep(decisions, [builder.add(start, I64(i))])) for i in range(count))
        chosen = list(loads)
    while len(chosen) > 1:
        plane, half = remaining.pop(), len(chosen) // 2
        pairs = zip(chosen[:half], chosen[half:], strict=True)
        chosen = [builder.xor(a, builder.and_(builder.xor(a, b), plane)) for a, b in pairs]
    return chosen[0]


# --- numbers and errors ---


@intrinsic
def find_numbers(
    typingctx: Any, work: Any, tile: Any, factors: Any, residues: Any, numbers: Any, products: Any, lengths: Any
) -> Any:
    """Write the numbers n of a tile, i16 [tiles, 128, 16], the nearest with the residues that were found.

    work, factors, residues: see the search and `trace`
    products, lengths: out: f32 [tiles, 16]: for each block the sums of weight * n and of n * n
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = array_pointers(context, builder, signature, args)
        work, factors, residues, numbers, products, lengths = pointers
        factor = load(builder, factors, I64(0), align=64)
        zero, first = factor.of(0), builder.mul(args[1], I64(BLOCK))

        def step(i: Any, sums: tuple[Lanes, Lanes]) -> tuple[Lanes, Lanes]:
            t = builder.add(first, i)
            residue = zero
            for place, weight in enumerate((1.0, 2.0)):
                at = builder.add(builder.mul(t, I64(2)), I64(place))
                word = builder.load(builder.gep(residues, [at]))
                word.align = 2
                residue = residue + Lanes(builder, builder.bitcast(word, _TRUTHS)).choose(zero.of(weight), 0.0)
            at = builder.mul(t, I64(LANES))
            x = load(builder, work, at, align=64)
            n = residue + ((x * factor - residue) * 0.25).rint() * 4.0
            store(Lanes(builder, builder.trunc(n.whole().value, _WORDS)), numbers, at, align=32)
            return sums[0] + x * n, sums[1] + n * n

        product, length = loop(builder, I64(BLOCK), (zero, zero), step)
        block = builder.mul(args[1], I64(LANES))
        store(product, products, block, align=64)
        store(length, lengths, block, align=64)
        return context.get_dummy_value()

    return types.void(work, tile, factors, residues, numbers, products, lengths), codegen


@intrinsic
def measure_errors(typingctx: Any, work: Any, tile: Any, numbers: Any, scales: Any, errors: Any) -> Any:
    """Write the sum of (weight - n * scale)**2 of each block, f32 [tiles, 16]. scales: f32 [16]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        work, numbers, scales, errors = array_pointers(context, builder, signature, args)
        scale, first = load(builder, scales, I64(0), align=64), builder.mul(args[1], I64(BLOCK))

        def step(i: Any, total: Lanes) -> Lanes:
            at = builder.mul(builder.add(first, i), I64(LANES))
            apart = load(builder, work, at, align=64) - floats_of(load(builder, numbers, at, _WORDS, align=32)) * scale
            return total + apart * apart

        total = loop(builder, I64(BLOCK), scale.of(0), step)
        store(total, errors, builder.mul(args[1], I64(LANES)), align=64)
        return context.get_dummy_value()

    return types.void(work, tile, numbers, scales, errors), codegen


def floats_of(numbers: Lanes) -> Lanes:
    """Integers as float32."""
    return Lanes(numbers.builder, numbers.builder.sitofp(numbers.value, FLOATS))


search_8, search_64, search_256 = (_make_search(bits) for bits in _SEARCHES)
start_8, start_64, start_256 = (_make_start(bits) for bits in _SEARCHES)
finish_8, finish_64, finish_256 = (_make_finish(bits) for bits in _SEARCHES)
trace_8, trace_64, trace_256 = (_make_trace(bits) for bits in _SEARCHES)
