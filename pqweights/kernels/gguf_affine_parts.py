"""Parts of GGUF's affine blocks as LLVM vector code for numba: how they are loaded, fitted and summed up.

A block has parts of 16 or 32 weights, each with a scale and an offset of its own: w = scale * code - offset, where
neither is negative, but for the offsets of blocks that have only one part. Sixteen blocks lie in the sixteen lanes of a
vector, weight j of each in the j-th vector, as in lanes.py, whose fit this is but for the sign of the offset and for
importance, which weighs the squares.
gguf_affine_blocks.py goes on from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pqweights.kernels.emit import FLOATS, I64, LANES, Lanes, State, constant, load, loop, splat, store, transposed
from pqweights.kernels.gguf_affine_formats import (
    CHAINS,
    FIRST_START,
    PASSES,
    RELAX,
    STARTS,
    AffineFormat,
)

MOST_PARTS = 16
# Beyond these magnitudes, blocks are not scaled any further: below, F16 has nothing but 0 for their scales.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -40, 126
TINY = 2.0**-100

# What is kept of each part: the fields of the array `parts`.
SCALE, TOTAL, W, Q, QQ, WQ, SCALE_LEVEL, OFFSET_LEVEL, BEST_SCALE_LEVEL, BEST_OFFSET_LEVEL, OFFSET = range(11)
FIELDS = 11


@dataclass(frozen=True, kw_only=True, eq=False)
class AffineBlocks:
    """Where sixteen blocks are.

    builder: LLVM's
    format: known when the code is emitted
    weighted: whether importance counts; known when the code is emitted
    settings: pointer to f32, see gguf_affine_formats.py
    work: pointer to f32 [block size, 16], aligned to 64 bytes: the weights, scaled by a power of two per block
    importance: pointer to f32 [block size, 16], aligned to 64 bytes; unused unless `weighted`
    fields: pointer to f32 [FIELDS, MOST_PARTS, 16], aligned to 64 bytes
    """

    builder: Any
    format: AffineFormat
    weighted: bool
    settings: Any
    work: Any
    importance: Any
    fields: Any

    @property
    def zero(self) -> Lanes:
        """0 in every lane."""
        return constant(self.builder, FLOATS, [0.0] * LANES)

    def setting(self, place: Any) -> Lanes:
        """One of the settings, in every lane."""
        return splat(self.builder, self.builder.load(self.builder.gep(self.settings, [place])))

    def count(self, place: int) -> Any:
        """One of the settings as a count, i64."""
        return self.builder.fptosi(self.builder.load(self.builder.gep(self.settings, [I64(place)])), I64)

    def weights(self, j: Any) -> Lanes:
        """Weight j of the sixteen blocks."""
        return load(self.builder, self.work, self.builder.mul(j, I64(LANES)), align=64)

    def factors(self, j: Any) -> Lanes:
        """The importance of weight j of the sixteen blocks."""
        return load(self.builder, self.importance, self.builder.mul(j, I64(LANES)), align=64)

    def field(self, name: int, part: Any) -> Lanes:
        """A field of one part."""
        return load(self.builder, self.fields, self._place(name, part), align=64)

    def keep(self, value: Lanes, name: int, part: Any) -> None:
        """Write a field of one part."""
        store(value, self.fields, self._place(name, part), align=64)

    def _place(self, name: int, part: Any) -> Any:
        return self.builder.mul(self.builder.add(part, I64(name * MOST_PARTS)), I64(LANES))

    def over_part(self, part: Any, carried: State, body: Callable[[Any, State], State]) -> State:
        """Emit a loop over the weights of one part: body(index of the weight in its block, carried)."""
        b, size = self.builder, I64(self.format.part_size)
        first = b.mul(part, size)
        return loop(b, size, carried, lambda i, state: body(b.add(first, i), state))

    def over_parts(self, carried: State, body: Callable[[Any, State], State]) -> State:
        """Emit a loop over the parts: body(part, carried)."""
        return loop(self.builder, I64(self.format.parts), carried, body)


class AffineExtent(NamedTuple):
    """The powers of two that lead from the weights of each block to the work, and back."""

    down: Lanes
    up: Lanes


class PartFit(NamedTuple):
    """The best fit of a part so far; w = scale * code - offset."""

    error: Lanes
    scale: Lanes
    offset: Lanes


class _PartChain(NamedTuple):
    """Where a chain of fits is."""

    scale: Lanes
    offset: Lanes


class _PartMoments(NamedTuple):
    """Sums over the weights of a part, of products of codes r and what is left, e; in steps."""

    ee: Lanes
    er: Lanes
    rr: Lanes
    e: Lanes
    r: Lanes


class PartSums(NamedTuple):
    """Sums over the weights w of a part and their codes q."""

    w: Lanes
    q: Lanes
    qq: Lanes
    wq: Lanes


# --- load ---


def load_blocks(blocks: AffineBlocks, values: Any, importance: Any) -> AffineExtent:
    """Fill the work from weights f32 [16, block size], and importance from such; magnitudes end in [1, 4)."""
    _transpose_blocks(blocks, values, blocks.work)
    if blocks.weighted:
        _transpose_blocks(blocks, importance, blocks.importance)
    b = blocks.builder
    size = I64(blocks.format.block_size)
    most = loop(b, size, blocks.zero, lambda j, most: blocks.weights(j).magnitude().maximum(most))
    exponent = (most.bits() >> 23) - 127
    exponent = (exponent < LOWEST_EXPONENT).choose(exponent.of(LOWEST_EXPONENT), exponent)
    exponent = (exponent > HIGHEST_EXPONENT).choose(exponent.of(HIGHEST_EXPONENT), exponent)
    down, up = ((127 - exponent) << 23).floats(), ((exponent + 127) << 23).floats()

    def scale_down(j: Any, nothing: tuple[()]) -> tuple[()]:
        store(blocks.weights(j) * down, blocks.work, b.mul(j, I64(LANES)), align=64)
        return nothing

    loop(b, size, (), scale_down)
    return AffineExtent(down, up)


def _transpose_blocks(blocks: AffineBlocks, values: Any, target: Any) -> None:
    """Write f32 [16, block size] as [block size, 16]."""
    b, size = blocks.builder, blocks.format.block_size

    def transpose(i: Any, nothing: tuple[()]) -> tuple[()]:
        at = b.mul(i, I64(LANES))
        rows = [load(b, values, b.add(I64(size * lane), at)) for lane in range(LANES)]
        for k, column in enumerate(transposed(rows)):
            store(column, target, b.add(b.mul(at, I64(LANES)), I64(LANES * k)), align=64)
        return nothing

    loop(b, I64(size // LANES), (), transpose)


# --- fit ---


def fit_part(blocks: AffineBlocks, part: Any) -> PartFit:
    """The best scale and offset of a part, by least squares; its total importance is kept."""
    b, infinite = blocks.builder, blocks.zero.of(float("inf"))
    totals = blocks.zero if blocks.weighted else blocks.zero.of(blocks.format.part_size)

    def survey(j: Any, found: tuple[Lanes, Lanes, Lanes]) -> tuple[Lanes, Lanes, Lanes]:
        w, (smallest, largest, total) = blocks.weights(j), found
        total = total + blocks.factors(j) if blocks.weighted else total
        return w.minimum(smallest), w.maximum(largest), total

    smallest, largest, total = blocks.over_part(part, (infinite, -infinite, totals), survey)
    smallest = smallest if blocks.format.parts == 1 else smallest.minimum(blocks.zero)
    blocks.keep(total, TOTAL, part)
    plain = ((largest - smallest) / float(blocks.format.last_code)).maximum(blocks.zero.of(TINY))

    def start(i: Any, best: PartFit) -> PartFit:
        first = b.add(b.mul(i, I64(2 * CHAINS)), I64(FIRST_START))
        chains = tuple(_started(blocks, (smallest, largest), b.add(first, I64(2 * c))) for c in range(CHAINS))

        def improve(_: Any, state: tuple[PartFit, tuple[_PartChain, ...]]) -> tuple[PartFit, tuple[_PartChain, ...]]:
            best, chains = state
            return _improved(blocks, part, best, chains, total)

        return loop(b, blocks.count(PASSES), (best, chains), improve)[0]

    return loop(b, blocks.count(STARTS), PartFit(infinite, plain, -smallest), start)


def _started(blocks: AffineBlocks, extremes: tuple[Lanes, Lanes], place: Any) -> _PartChain:
    """A chain before its first pass: the range, of which the settings keep a share below and above the middle."""
    smallest, largest = extremes
    below, above = blocks.setting(place), blocks.setting(blocks.builder.add(place, I64(1)))
    center = (largest + smallest) * 0.5
    begin = center + (smallest - center) * below
    scale = (center + (largest - center) * above - begin) / float(blocks.format.last_code)
    return _PartChain(scale.maximum(scale.of(TINY)), _allowed(blocks, -begin))


def _allowed(blocks: AffineBlocks, offset: Lanes) -> Lanes:
    """The nearest offset that a part can have."""
    return offset if blocks.format.parts == 1 else offset.maximum(offset.of(0.0))


def _improved(
    blocks: AffineBlocks, part: Any, best: PartFit, chains: tuple[_PartChain, ...], total: Lanes
) -> tuple[PartFit, tuple[_PartChain, ...]]:
    """The best fit and the chains, after one pass over the weights for each."""
    moved = []
    for chain in chains:
        inverse = 1.0 / chain.scale
        moments = _moments_of_part(blocks, part, chain.offset, inverse)
        best, chain = _moved(blocks, best, chain, inverse, moments, total)
        moved.append(chain)
    return best, tuple(moved)


def _moments_of_part(blocks: AffineBlocks, part: Any, offset: Lanes, inverse: Lanes) -> _PartMoments:
    """The sums for one chain: without AVX-512 there are no registers for those of more in one loop."""

    def add(j: Any, sums: _PartMoments) -> _PartMoments:
        t = (blocks.weights(j) + offset) * inverse
        r = t.rint().maximum(t.of(0.0)).minimum(t.of(blocks.format.last_code))
        e = t - r
        fe, fr = (blocks.factors(j) * x for x in (e, r)) if blocks.weighted else (e, r)
        return _PartMoments(sums.ee + fe * e, sums.er + fe * r, sums.rr + fr * r, sums.e + fe, sums.r + fr)

    return blocks.over_part(part, _PartMoments(*[blocks.zero] * 5), add)


def _moved(
    blocks: AffineBlocks, best: PartFit, chain: _PartChain, inverse: Lanes, moments: _PartMoments, total: Lanes
) -> tuple[PartFit, _PartChain]:
    """The best fit and the chain, after the chain's step.

    With e = slope * r + shift: where the shift would make an offset negative that must not be, it becomes 0 instead.
    """
    ee, er, rr, e, r = moments
    scale, offset = chain
    spread = rr - r * (r / total)
    spreads = spread > rr * 1e-5
    slope = spreads.choose((er - e * (r / total)) / spreads.choose(spread, 1.0), blocks.zero)
    shift = (e - slope * r) / total
    error = (ee - shift * e) - slope * er
    fitted_offset = offset - scale * shift
    if blocks.format.parts > 1:
        limit = offset * inverse
        pinned, left = shift > limit, er - limit * r
        pinned_slope = left / rr.maximum(rr.of(TINY))
        pinned_error = ((ee - (limit * 2.0) * e) + (limit * limit) * total) - pinned_slope * left
        fitted_offset = pinned.choose(blocks.zero, offset - scale * pinned.choose(limit, shift))
        slope, shift = pinned.choose(pinned_slope, slope), pinned.choose(limit, shift)
        error = pinned.choose(pinned_error, error)
    error = (error * scale) * scale
    fitted = scale * (slope + 1.0)
    better = (error < best.error) & (fitted > scale * 0.25)
    best = PartFit(
        better.choose(error, best.error), better.choose(fitted, best.scale), better.choose(fitted_offset, best.offset)
    )
    relax = blocks.setting(I64(RELAX))
    scale_after = (scale * ((relax * slope).maximum(slope.of(-0.5)).minimum(slope.of(1.0)) + 1.0)).maximum(
        scale.of(TINY)
    )
    return best, _PartChain(scale_after, _allowed(blocks, offset - scale * (relax * shift)))


# --- sum up ---


def code_of(blocks: AffineBlocks, w: Lanes, inverse: Lanes, offset: Lanes) -> Lanes:
    """The nearest code to a weight, as f32."""
    t = ((w + offset) * inverse).rint()
    return t.maximum(t.of(0.0)).minimum(t.of(blocks.format.last_code))


def inverse_of(scale: Lanes) -> Lanes:
    """1 / scale; 0 where the scale is 0."""
    usable = scale > 0.0
    return usable.choose(1.0 / usable.choose(scale, 1.0), 0.0)


def measured(blocks: AffineBlocks, part: Any, pairs: list[tuple[Lanes, Lanes]]) -> tuple[Lanes, ...]:
    """The errors of a part, as it is decoded, for each of some scales and offsets."""
    inverses = [inverse_of(scale) for scale, _ in pairs]

    def measure(j: Any, errors: tuple[Lanes, ...]) -> tuple[Lanes, ...]:
        w, found = blocks.weights(j), []
        factor = blocks.factors(j) if blocks.weighted else None
        for (scale, offset), inverse, error in zip(pairs, inverses, errors, strict=True):
            e = w - (code_of(blocks, w, inverse, offset) * scale - offset)
            found.append(error + (e * e if factor is None else factor * e * e))
        return tuple(found)

    return blocks.over_part(part, (blocks.zero,) * len(pairs), measure)


def shortest(blocks: AffineBlocks, part: Any, scale: Lanes, offset: Lanes) -> Lanes:
    """The smallest scale that gives the same weights by multiples of the codes; 0 if all codes are 0.

    A part with one large weight may have codes 0 and 1 alone. As large a scale would leave few integers to the others.
    """
    inverse, last = inverse_of(scale), float(blocks.format.last_code)

    def widest(j: Any, most: Lanes) -> Lanes:
        return code_of(blocks, blocks.weights(j), inverse, offset).maximum(most)

    most = blocks.over_part(part, blocks.zero, widest)
    times = (last / most.maximum(1.0) - 0.499).rint()  # rounded down
    return (most > 0.0).choose(scale / times, 0.0)


def sum_up(blocks: AffineBlocks, part: Any, scale: Lanes, offset: Lanes) -> None:
    """Keep the sums over a part, and the scale that is best for its codes."""
    inverse = inverse_of(scale)

    def add(j: Any, sums: PartSums) -> PartSums:
        w = blocks.weights(j)
        q = code_of(blocks, w, inverse, offset)
        fw, fq = (blocks.factors(j) * x for x in (w, q)) if blocks.weighted else (w, q)
        return PartSums(sums.w + fw, sums.q + fq, sums.qq + fq * q, sums.wq + fw * q)

    sums = blocks.over_part(part, PartSums(*[blocks.zero] * 4), add)
    for name, value in ((W, sums.w), (Q, sums.q), (QQ, sums.qq), (WQ, sums.wq)):
        blocks.keep(value, name, part)
    mean = sums.q / blocks.field(TOTAL, part)
    spread = sums.qq - sums.q * mean
    spreads = spread > sums.qq * 1e-5
    fitted = (sums.wq - sums.w * mean) / spreads.choose(spread, 1.0)
    blocks.keep((spreads & (fitted > 0.0)).choose(fitted, scale), SCALE, part)
