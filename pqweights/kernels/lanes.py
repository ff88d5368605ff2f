"""Groups to integers with nearly the least squared error, as LLVM vector code for numba.

Sixteen groups lie in the sixteen lanes of a vector, weight j of each in the j-th vector. So nothing is summed across
lanes, any multiple of 16 will do as group size, and a group's result depends on no other group. Every operation is one
IEEE operation in the order written; tests/support/groups_reference.py repeats them in numpy. Below, h = 2**(bits - 1).

1. Load.    Transpose, find the smallest and the largest weight, scale by a power of two so that magnitudes end in
            [1, 4).
2. Fit.     Three chains start from three cuts of the range. Each of four passes over the weights evaluates all of them
            at their (scale, zero): with t = (w - zero) / scale, r = rint(t) clipped to [-h, h - 1] and e = t - r, the
            sums of e, r, e^2, e r and r^2 give the least-squares scale and zero for the codes r, and the error that is
            left. Each chain keeps its best and moves on by `relax` times the least-squares step. Going several times
            too far leaves the local minimum in which plain alternation (as in Lloyd's algorithm) stops at once; that is
            worth more than many starts.
3. Round.   The results of the chains, the range itself and what the runtimes' own rules would choose become candidates,
            rounded to BF16 as they will be stored.
4. Measure. Decode each candidate as stored and sum its squared error in float64; the smallest error wins.
5. Encode.  Write the codes of the winner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types
from numba.extending import intrinsic

from pqweights.kernels.emit import F32, I32, I64, LANES, Lanes, array_pointers, loop, splat, store, transposed
from pqweights.kernels.sixteen import Extent, Sixteen, load_groups

CHAINS = 3
PASSES = 4
MOST_GROUP_SIZE = 256
LARGEST_BF16 = 3.3895313892515355e38
SMALLEST_NORMAL = 2.0**-126


class _Best(NamedTuple):
    """The best fit that a chain has found; zero: the weight that code h stands for."""

    error: Lanes
    scale: Lanes
    zero: Lanes


class _Chain(NamedTuple):
    """Where a chain is, and its best fit; without an offset, zeros stay 0."""

    best: _Best
    scale: Lanes
    zero: Lanes


class _Moments(NamedTuple):
    """Sums over the weights of a group, of products of e and r; those of e and r alone serve only the offset."""

    ee: Lanes
    er: Lanes
    rr: Lanes
    e: Lanes
    r: Lanes


class _Candidate(NamedTuple):
    """A scale and an offset as they would be stored, the same in the scale of the work, and 1 / inner_scale."""

    scale: Lanes
    offset: Lanes
    inner_scale: Lanes
    inner_offset: Lanes
    inverse: Lanes


# --- 2. Fit ---


def _plain_scale(groups: Sixteen, extent: Extent) -> Lanes:
    """The scale of the whole range; without an offset, the weight of largest magnitude becomes -h.

    -h is the code that has no mirror image, so scales have signs.
    """
    if groups.has_offset:
        return (extent.largest - extent.smallest) / groups.last
    return -((-extent.smallest >= extent.largest).choose(extent.smallest, extent.largest) / groups.half)


def _runtimes_choice(groups: Sixteen, extent: Extent, plain_scale: Lanes) -> tuple[Lanes, Lanes]:
    """The scale that runtimes would choose, and the weight that code 0 then stands for.

    With an offset, 0 becomes a code, counted from the end of larger magnitude; without one, scales are positive.
    """
    if not groups.has_offset:
        return extent.most / (groups.half - 0.5), groups.zero
    below = -extent.smallest > extent.largest
    edge = below.choose(extent.smallest, extent.largest)
    step = below.choose(plain_scale, -plain_scale)
    steps = (edge / step).rint()
    snaps = steps < 0.0
    return snaps.choose(edge / snaps.choose(steps, -1.0), step), snaps.choose(edge, groups.zero)


def _started(groups: Sixteen, extent: Extent, plain_scale: Lanes) -> tuple[_Chain, ...]:
    """The chains before the first pass; the best of each is so far the plain scale, with an infinite error."""
    center = (extent.largest + extent.smallest) * 0.5
    best = _Best(groups.zero.of(float("inf")), plain_scale, groups.zero)
    chains = []
    for c in range(CHAINS):
        below = groups.setting(2 * c)
        if groups.has_offset:
            begin = center + (extent.smallest - center) * below
            scale = (center + (extent.largest - center) * groups.setting(2 * c + 1) - begin) / groups.last
            zero = begin + groups.half * scale
        else:
            scale, zero = plain_scale * below, groups.zero
        chains.append(_Chain(best, extent.constant.choose(scale.of(1), scale), zero))
    return tuple(chains)


def _fitted(groups: Sixteen, chains: tuple[_Chain, ...]) -> tuple[_Chain, ...]:
    """The chains after all passes."""
    relax = groups.setting(2 * CHAINS)

    def improve(_: Any, chains: tuple[_Chain, ...]) -> tuple[_Chain, ...]:
        found = _evaluated(groups, chains)
        return tuple(_moved(groups, relax, chain, moments) for chain, moments in zip(chains, found, strict=True))

    return loop(groups.builder, I64(PASSES), chains, improve)


def _evaluated(groups: Sixteen, chains: tuple[_Chain, ...]) -> tuple[_Moments, ...]:
    """The moments of each chain, by one pass over the weights."""
    inverses = [1.0 / chain.scale for chain in chains]

    def evaluate(j: Any, totals: tuple[_Moments, ...]) -> tuple[_Moments, ...]:
        w, result = groups.weights(j), []
        for chain, inverse, own in zip(chains, inverses, totals, strict=True):
            t = ((w - chain.zero) if groups.has_offset else w) * inverse
            r = t.rint().maximum(-groups.half).minimum(groups.half - 1.0)
            e = t - r
            own = own._replace(ee=own.ee + e * e, er=own.er + e * r, rr=own.rr + r * r)
            result.append(own._replace(e=own.e + e, r=own.r + r) if groups.has_offset else own)
        return tuple(result)

    return loop(groups.builder, groups.size, (_Moments(*[groups.zero] * 5),) * CHAINS, evaluate)


def _moved(groups: Sixteen, relax: Lanes, chain: _Chain, moments: _Moments) -> _Chain:
    """A chain after its step, having kept the least-squares fit if it is the best so far."""
    best, scale, zero = chain
    slope, shift, error = _least_squares(groups, moments)
    error, fitted = (error * scale) * scale, scale * (slope + 1.0)
    better = (error < best.error) & (fitted.magnitude() > scale.magnitude() * 0.25)
    kept = _Best(better.choose(error, best.error), better.choose(fitted, best.scale), best.zero)
    if groups.has_offset:
        kept = kept._replace(zero=better.choose(zero + scale * shift, best.zero))
        zero = zero + scale * (relax * shift)
    return _Chain(kept, scale * ((relax * slope).maximum(-0.5).minimum(1.0) + 1.0), zero)


def _least_squares(groups: Sixteen, moments: _Moments) -> tuple[Lanes, Lanes, Lanes]:
    """For e = slope * r + shift: slope, shift, and the squared error that is left."""
    ee, er, rr, e, r = moments
    if not groups.has_offset:
        slope = er / rr.maximum(0.5)
        return slope, groups.zero, ee - slope * er
    spread = rr - r * (r / groups.count)
    slope = (spread > 0.5).choose((er - e * (r / groups.count)) / spread.maximum(0.5), groups.zero)
    shift = (e - slope * r) / groups.count
    return slope, shift, (ee - shift * e) - slope * er


# --- 3. Round ---


def _stored(
    groups: Sixteen, extent: Extent, scale: Lanes, *, at: Lanes | None = None, start: Lanes | None = None
) -> _Candidate:
    """A scale and its offset, rounded as they are stored.

    Given is one of the two: `at`, the weight of code h, or `start`, the weight of code 0.
    """
    kept = extent.constant.choose(scale.of(1), _stored_scale(scale * extent.up))
    inner = kept * extent.down
    if not groups.has_offset:
        return _Candidate(kept, groups.zero, inner, groups.zero, 1.0 / inner)
    if at is not None:
        offset = groups.from_zero.choose(at - groups.half * inner, at)
    else:
        assert start is not None
        offset = groups.from_zero.choose(start, start + groups.half * inner)
    offset = _bf16(extent.constant.choose(extent.smallest, offset) * extent.up)
    return _Candidate(kept, offset, inner, offset * extent.down, 1.0 / inner)


def _bf16(x: Lanes) -> Lanes:
    """The nearest BF16, ties to even, saturated."""
    bits = x.bits()
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).floats()
    return nearest.minimum(LARGEST_BF16).maximum(-LARGEST_BF16)


def _stored_scale(x: Lanes) -> Lanes:
    """The nearest BF16 that is neither 0 nor so small that a runtime may take it for 0."""
    nearest = _bf16(x)
    least = (nearest < 0.0).choose(x.of(-SMALLEST_NORMAL), SMALLEST_NORMAL)
    return (nearest.magnitude() < SMALLEST_NORMAL).choose(least, nearest)


# --- 4. Measure ---


def _lowest(groups: Sixteen) -> Lanes:
    """The lowest code, as the rule counts them."""
    return groups.from_zero.choose(groups.zero, -groups.half) if groups.has_offset else -groups.half


def _code(groups: Sixteen, w: Lanes, candidate: _Candidate) -> Lanes:
    """The nearest code to a weight, as f32."""
    highest = groups.from_zero.choose(groups.last, groups.half - 1.0) if groups.has_offset else groups.half - 1.0
    from_offset = (w - candidate.inner_offset) if groups.has_offset else w
    return (from_offset * candidate.inverse).rint().maximum(_lowest(groups)).minimum(highest)


def _measured(groups: Sixteen, candidates: list[_Candidate]) -> tuple[Lanes, tuple[Lanes, ...]]:
    """The sum of squares of the weights, and that of the errors of each candidate: f64, in the scale of the work."""

    def measure(j: Any, totals: tuple[Lanes, tuple[Lanes, ...]]) -> tuple[Lanes, tuple[Lanes, ...]]:
        w, (energy, errors) = groups.weights(j), totals
        result = []
        for candidate, total in zip(candidates, errors, strict=True):
            decoded = _code(groups, w, candidate) * candidate.inner_scale
            e = (w - (decoded + candidate.inner_offset if groups.has_offset else decoded)).wide()
            result.append(total + e * e)
        return energy + w.wide() * w.wide(), tuple(result)

    zero = groups.zero.wide()
    return loop(groups.builder, groups.size, (zero, (zero,) * len(candidates)), measure)


def _winner(extent: Extent, candidates: list[_Candidate], errors: tuple[Lanes, ...]) -> tuple[_Candidate, Lanes]:
    """The candidate of the smallest error, the earlier one on a tie, and its error; huge groups take the first."""
    winner, least = candidates[0], errors[0]
    for candidate, error in zip(candidates[1:], errors[1:], strict=True):
        wins = (error < least) & extent.huge.negated()
        winner = _Candidate(*(wins.choose(a, old) for a, old in zip(candidate, winner, strict=True)))
        least = wins.choose(error, least)
    return winner, least


# --- 5. Encode ---


def _encode(groups: Sixteen, winner: _Candidate, codes: Any) -> None:
    """Write the codes, u8 [16, size], counted from 0."""
    b = groups.builder

    def encode(i: Any, nothing: tuple[()]) -> tuple[()]:
        at = b.mul(i, I64(LANES))
        found = [_code(groups, groups.weights(b.add(at, I64(k))), winner) - _lowest(groups) for k in range(LANES)]
        for lane, row in enumerate(transposed([code.whole().bytes() for code in found])):
            store(row, codes, b.add(b.mul(groups.size, I64(lane)), at))
        return nothing

    loop(b, b.sdiv(groups.size, I64(LANES)), (), encode)


def _emit_fit(groups: Sixteen, values: Any, *, codes: Any, numbers: Any, sums: Any) -> None:
    """Emit the five steps; the arrays are those of fit_16."""
    extent = load_groups(groups, values)
    plain_scale = _plain_scale(groups, extent)
    runtimes_scale, runtimes_start = _runtimes_choice(groups, extent, plain_scale)
    chains = _fitted(groups, _started(groups, extent, plain_scale))
    candidates = [
        _stored(groups, extent, plain_scale, start=extent.smallest),
        _stored(groups, extent, runtimes_scale, start=runtimes_start),
        *(_stored(groups, extent, chain.best.scale, at=chain.best.zero) for chain in chains),
    ]
    energy, errors = _measured(groups, candidates)
    winner, error = _winner(extent, candidates, errors)
    for place, number in enumerate((winner.scale, winner.offset)):
        store(number, numbers, I64(place * LANES))
    for place, total in enumerate((energy, error)):
        store(total * extent.up.wide() * extent.up.wide(), sums, I64(place * LANES))
    _encode(groups, winner, codes)


# The parameters of an intrinsic are the operands of the code that it emits, so they stay apart.
@intrinsic(prefer_literal=True)
def fit_16(
    typingctx: Any,
    affine: Any,  # literal: with an offset, else symmetric
    values: Any,  # [16, size] f32
    size: Any,
    bits: Any,
    middle: Any,  # 1: w = (code - h) * scale + offset; 0: w = code * scale + offset
    settings: Any,  # f32, see Sixteen
    work: Any,  # [size, 16] f32, aligned to 64 bytes
    codes: Any,  # out: [16, size] u8
    numbers: Any,  # out: [2, 16] f32, scales and offsets
    sums: Any,  # out: [2, 16] f64, of squares of the weights and of their errors
) -> Any:
    """Turn sixteen groups into integers."""
    has_offset = bool(affine.literal_value)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values, settings, work, codes, numbers, sums = array_pointers(context, b, signature, args)
        size, bits, middle = args[2:5]
        half = splat(b, b.sitofp(b.shl(I64(1), b.sub(bits, I64(1))), F32))
        groups = Sixteen(
            builder=b,
            has_offset=has_offset,
            size=size,
            settings=settings,
            work=work,
            half=half,
            last=half * 2.0 - 1.0,
            count=splat(b, b.sitofp(size, F32)),
            from_zero=splat(b, b.trunc(middle, I32)).equals(0),
        )
        _emit_fit(groups, values, codes=codes, numbers=numbers, sums=sums)
        return context.get_dummy_value()

    return types.void(affine, values, size, bits, middle, settings, work, codes, numbers, sums), codegen
