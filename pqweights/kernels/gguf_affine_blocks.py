"""GGUF's affine blocks as LLVM vector code for numba: the search for what a block stores, and its bytes.

A part's scale is d times a small integer, and its offset is dmin times another; d and dmin, in F16, are the block's.

1. Fit.     Each part gets its scale and offset by least squares (gguf_affine_parts.py), and the sums over its codes.
2. Guess.   The sums give the error of any scale and offset for the same codes. Pairs of d and dmin around those of
            which the largest scale and offset are the largest multiples are rounded to F16; each part takes the best of
            two integers for its scale, the best one for its offset; and the least-squares d and dmin for these are the
            next pair to try.
3. Round.   From the best pair on: make codes anew from what is stored, for the integers of each part and for their
            neighbours, and measure; sum up for the best ones, and move to the least-squares d and dmin.
4. Encode.  Make the codes of the best, sum the squared errors in float64, and pack (gguf_affine_packing.py).

A block of one part stores its scale and offset themselves, in F16: gguf_affine_alone.py takes the place of 2 and 3.

Every operation is one IEEE operation in the order written; tests/support/gguf_affine_reference.py repeats them.
Format: https://github.com/ggml-org/llama.cpp (ggml/src/ggml-common.h, block_q2_K, block_q4_K, block_q5_K, block_q4_1
and block_q5_1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types
from numba.extending import intrinsic

from pqweights.kernels.emit import I64, LANES, Lanes, array_pointers, loop, store
from pqweights.kernels.gguf_affine_alone import rounded_alone
from pqweights.kernels.gguf_affine_formats import (
    CHAINS,
    FIRST_START,
    MOST_BLOCK,
    PAIRS,
    ROUNDS,
    STARTS,
    STEPS,
    AffineFormat,
)
from pqweights.kernels.gguf_affine_packing import pack_words
from pqweights.kernels.gguf_affine_parts import (
    BEST_OFFSET_LEVEL,
    BEST_SCALE_LEVEL,
    OFFSET,
    OFFSET_LEVEL,
    QQ,
    SCALE,
    SCALE_LEVEL,
    TINY,
    TOTAL,
    WQ,
    AffineBlocks,
    AffineExtent,
    Q,
    W,
    code_of,
    fit_part,
    inverse_of,
    load_blocks,
    measured,
    shortest,
    sum_up,
)
from pqweights.kernels.gguf_halves import LARGEST_HALF, SMALLEST_NORMAL_HALF

SMALLEST_HALF = 2.0**-24


class _Factors(NamedTuple):
    """d and dmin in the scale of the work."""

    scale: Lanes
    offset: Lanes


class _Guess(NamedTuple):
    """The best pair so far, as it is stored, and its error."""

    error: Lanes
    pair: _Factors


class _Normal(NamedTuple):
    """The normal equations of d and dmin: products of the integers of scales (a) and offsets (b) with the sums."""

    aa: Lanes
    ab: Lanes
    bb: Lanes
    a: Lanes
    b: Lanes


# --- guess ---


def _half(x: Lanes) -> Lanes:
    """The nearest F16 to numbers that are not negative, ties to even, saturated, as f32.

    Numbers that are too small become the smallest F16 above 0, unless no integer can make up for that.
    """
    bits = x.bits()
    nearest = ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).floats().minimum(LARGEST_HALF)
    tiny = (x.minimum(1.0) * 2.0**24).rint() * SMALLEST_HALF
    tiny = (x > SMALLEST_HALF / 128).choose(tiny.maximum(SMALLEST_HALF), tiny)
    return (x < SMALLEST_NORMAL_HALF).choose(tiny, nearest)


def _stored(extent: AffineExtent, pair: _Factors) -> _Factors:
    """A pair as it is stored, in the scale of the work."""
    return _Factors(_half(pair.scale * extent.up) * extent.down, _half(pair.offset * extent.up) * extent.down)


def _choose_levels(blocks: AffineBlocks, pair: _Factors) -> tuple[Lanes, _Normal]:
    """Give each part the integers that its sums say are best; the error they say, and the normal equations."""
    scale_inverse, offset_inverse = inverse_of(pair.scale), inverse_of(pair.offset)
    last = float(blocks.format.last_level)

    def choose(part: Any, state: tuple[Lanes, _Normal]) -> tuple[Lanes, _Normal]:
        error, normal = state
        w, q, qq, wq, total = (blocks.field(name, part) for name in (W, Q, QQ, WQ, TOTAL))
        below = (blocks.field(SCALE, part) * scale_inverse - 0.5).rint().maximum(0.0).minimum(last)
        found = []
        for level in (below, (below + 1.0).minimum(last)):
            scale = level * pair.scale
            wanted = (scale * q - w) / total
            offset_level = (wanted * offset_inverse).rint().maximum(0.0).minimum(last)
            offset = offset_level * pair.offset
            own = offset * ((w + w) + total * offset - (scale + scale) * q) + scale * (scale * qq - (wq + wq))
            found.append((own, level, offset_level))
        (lower, a, b), (upper, higher_a, higher_b) = found
        wins = upper < lower
        a, b = wins.choose(higher_a, a), wins.choose(higher_b, b)
        blocks.keep(a, SCALE_LEVEL, part)
        blocks.keep(b, OFFSET_LEVEL, part)
        normal = _with_part(blocks, normal, part, (a, b))
        return error + wins.choose(upper, lower), normal

    return blocks.over_parts((blocks.zero, _Normal(*[blocks.zero] * 5)), choose)


def _with_part(blocks: AffineBlocks, normal: _Normal, part: Any, levels: tuple[Lanes, Lanes]) -> _Normal:
    """The normal equations with what a part of these integers adds."""
    a, b = levels
    w, q, qq, wq, total = (blocks.field(name, part) for name in (W, Q, QQ, WQ, TOTAL))
    return _Normal(
        normal.aa + a * a * qq,
        normal.ab + a * b * q,
        normal.bb + b * b * total,
        normal.a + a * wq,
        normal.b - b * w,
    )


def _solved(pair: _Factors, normal: _Normal) -> _Factors:
    """The pair that solves the normal equations.

    Where that is no pair that can be stored, as without offsets, each is the best for the other as it is.
    """
    aa, ab, bb, a, b = normal
    determinant = aa * bb - ab * ab
    divisor = (determinant > (aa * bb) * 1e-5).choose(determinant, float("inf"))
    scale, offset = (a * bb + ab * b) / divisor, (aa * b + ab * a) / divisor
    usable = (scale > 0.0) & (offset > 0.0)
    alone = _Factors((a + ab * pair.offset) / aa.maximum(TINY), (b + ab * pair.scale) / bb.maximum(TINY))
    kept = [(own > 0.0).choose(own, old) for own, old in zip(alone, pair, strict=True)]
    return _Factors(usable.choose(scale, kept[0]), usable.choose(offset, kept[1]))


def _guessed(blocks: AffineBlocks, extent: AffineExtent) -> _Factors:
    """The pair, as stored, of which the sums say that its error is the smallest."""
    builder, last = blocks.builder, float(blocks.format.last_level)

    def widest(part: Any, most: _Factors) -> _Factors:
        return _Factors(blocks.field(SCALE, part).maximum(most.scale), blocks.field(OFFSET, part).maximum(most.offset))

    most = blocks.over_parts(_Factors(blocks.zero, blocks.zero), widest)
    plain = _Factors(most.scale / last, most.offset / last)
    first_pair = builder.add(builder.mul(blocks.count(STARTS), I64(2 * CHAINS)), I64(FIRST_START))

    def try_pair(i: Any, best: _Guess) -> _Guess:
        place = builder.add(first_pair, builder.mul(i, I64(2)))
        scale, offset = (blocks.setting(builder.add(place, I64(k))) for k in (0, 1))

        def step(_: Any, state: tuple[_Factors, _Guess]) -> tuple[_Factors, _Guess]:
            pair, best = state
            pair = _stored(extent, pair)
            error, normal = _choose_levels(blocks, pair)
            better = error < best.error
            kept = _Factors(*(better.choose(new, old) for new, old in zip(pair, best.pair, strict=True)))
            return _solved(pair, normal), _Guess(better.choose(error, best.error), kept)

        start = (_Factors(plain.scale * scale, plain.offset * offset), best)
        return loop(builder, blocks.count(STEPS), start, step)[1]

    infinite = blocks.zero.of(float("inf"))
    return loop(builder, blocks.count(PAIRS), _Guess(infinite, _stored(extent, plain)), try_pair).pair


# --- round ---


def _rounded(blocks: AffineBlocks, extent: AffineExtent, pair: _Factors) -> _Factors:
    """The best pair; the integers of its parts are kept as the best."""

    def measure(_: Any, state: tuple[_Factors, _Guess]) -> tuple[_Factors, _Guess]:
        pair, best = state
        pair = _stored(extent, pair)
        _choose_levels(blocks, pair)
        slant = (pair.scale * (blocks.format.last_code / 2)) * inverse_of(pair.offset)

        def search(part: Any, sums: tuple[Lanes, _Normal]) -> tuple[Lanes, _Normal]:
            error, normal = sums
            least, levels = _searched(blocks, part, pair, slant)
            sum_up(blocks, part, levels[0] * pair.scale, levels[1] * pair.offset)
            return error + least, _with_part(blocks, normal, part, levels)

        error, normal = blocks.over_parts((blocks.zero, _Normal(*[blocks.zero] * 5)), search)
        better = error < best.error
        _keep_levels(blocks, better)
        kept = _Factors(*(better.choose(new, old) for new, old in zip(pair, best.pair, strict=True)))
        return _solved(pair, normal), _Guess(better.choose(error, best.error), kept)

    start = (pair, _Guess(blocks.zero.of(float("inf")), pair))
    return loop(blocks.builder, blocks.count(ROUNDS), start, measure)[1].pair


def _searched(blocks: AffineBlocks, part: Any, pair: _Factors, slant: Lanes) -> tuple[Lanes, tuple[Lanes, Lanes]]:
    """The least error of a part with its integers or their neighbours, and these, which are kept.

    slant: by how much the integer of the offset has to grow with that of the scale for the middle code to stay.
    """
    last = float(blocks.format.last_level)
    a, b = (blocks.field(name, part) for name in (SCALE_LEVEL, OFFSET_LEVEL))
    candidates = [(a, b), (a, (b + 1.0).minimum(last)), (a, (b - 1.0).maximum(0.0))]
    for scale_level in ((a + 1.0).minimum(last), (a - 1.0).maximum(0.0)):
        moved = (b + (scale_level - a) * slant).rint().maximum(0.0).minimum(last)
        candidates.append((scale_level, moved))
    pairs = [(scale_level * pair.scale, offset_level * pair.offset) for scale_level, offset_level in candidates]
    errors = measured(blocks, part, pairs)
    least, levels = errors[0], candidates[0]
    for error, candidate in zip(errors[1:], candidates[1:], strict=True):
        wins = error < least
        least = wins.choose(error, least)
        levels = (wins.choose(candidate[0], levels[0]), wins.choose(candidate[1], levels[1]))
    blocks.keep(levels[0], SCALE_LEVEL, part)
    blocks.keep(levels[1], OFFSET_LEVEL, part)
    return least, levels


def _keep_levels(blocks: AffineBlocks, better: Lanes) -> None:
    """Keep the integers of the parts as the best, in the lanes where they are better."""

    def keep(part: Any, nothing: tuple[()]) -> tuple[()]:
        for now, best in ((SCALE_LEVEL, BEST_SCALE_LEVEL), (OFFSET_LEVEL, BEST_OFFSET_LEVEL)):
            blocks.keep(better.choose(blocks.field(now, part), blocks.field(best, part)), best, part)
        return nothing

    blocks.over_parts((), keep)


# --- encode ---


def _encode(blocks: AffineBlocks, extent: AffineExtent, pair: _Factors, sums: Any) -> None:
    """Replace the work by the codes, i32, and write the sums of squares of the weights and of their errors."""

    def encode_part(part: Any, totals: tuple[Lanes, Lanes]) -> tuple[Lanes, Lanes]:
        scale = blocks.field(BEST_SCALE_LEVEL, part) * pair.scale
        offset = blocks.field(BEST_OFFSET_LEVEL, part) * pair.offset
        inverse = inverse_of(scale)

        def encode(j: Any, totals: tuple[Lanes, Lanes]) -> tuple[Lanes, Lanes]:
            w, (energy, error) = blocks.weights(j), totals
            q = code_of(blocks, w, inverse, offset)
            e, wide = (w - (q * scale - offset)).wide(), w.wide()
            store(q.whole().floats(), blocks.work, blocks.builder.mul(j, I64(LANES)), align=64)
            return energy + wide * wide, error + e * e

        return blocks.over_part(part, totals, encode)

    zero, up = blocks.zero.wide(), extent.up.wide()
    for place, total in enumerate(blocks.over_parts((zero, zero), encode_part)):
        store(total * up * up, sums, I64(place * LANES))


def _found(blocks: AffineBlocks, extent: AffineExtent) -> _Factors:
    """The best pair; the integers of the parts are kept as the best."""
    if blocks.format.parts == 1:
        only = I64(0)
        for name in (BEST_SCALE_LEVEL, BEST_OFFSET_LEVEL):
            blocks.keep(blocks.zero.of(1.0), name, only)
        return _Factors(*rounded_alone(blocks, extent, fit_part(blocks, only)))

    def fit(part: Any, nothing: tuple[()]) -> tuple[()]:
        found = fit_part(blocks, part)
        blocks.keep(found.offset, OFFSET, part)
        sum_up(blocks, part, shortest(blocks, part, found.scale, found.offset), found.offset)
        return nothing

    blocks.over_parts((), fit)
    return _rounded(blocks, extent, _guessed(blocks, extent))


def make_encode(form: AffineFormat) -> Any:
    """An intrinsic that encodes sixteen blocks."""

    # The parameters of an intrinsic are the operands of the code that it emits, so they stay apart.
    @intrinsic(prefer_literal=True)
    def encode_16(
        typingctx: Any,
        weighted: Any,  # literal: whether importance counts
        values: Any,  # [16, block size] f32
        importance: Any,  # [16, block size] f32, above 0; read only if weighted
        settings: Any,  # f32
        memory: Any,  # f32 [2 * MOST_BLOCK * 16 + FIELDS * MOST_PARTS * 16], aligned to 64 bytes
        words: Any,  # out: [words of a block, 16] i32
        sums: Any,  # out: [2, 16] f64, of squares of the weights and of their errors
    ) -> Any:
        counts = bool(weighted.literal_value)

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            values, importance, settings, memory, words, sums = array_pointers(context, b, signature, args)
            blocks = AffineBlocks(
                builder=b,
                format=form,
                weighted=counts,
                settings=settings,
                work=memory,
                importance=b.gep(memory, [I64(MOST_BLOCK * LANES)]),
                fields=b.gep(memory, [I64(2 * MOST_BLOCK * LANES)]),
            )
            extent = load_blocks(blocks, values, importance)
            pair = _found(blocks, extent)
            _encode(blocks, extent, pair, sums)
            pack_words(blocks, pair.scale * extent.up, pair.offset * extent.up, words)
            return context.get_dummy_value()

        return types.void(weighted, values, importance, settings, memory, words, sums), codegen

    return encode_16
