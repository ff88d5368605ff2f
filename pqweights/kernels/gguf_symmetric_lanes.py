"""Blocks of GGUF without offsets, with nearly the least weighted squared error, as LLVM vector code for numba.

The same block of sixteen rows lies in the sixteen lanes of a vector, weight j of each in the j-th vector (compare
lanes.py). A block has parts with a scale each: either one part, and its scale is the F16 number d, or 8 or 16, and
their scales are d times whole numbers. Every operation is one IEEE operation in the order written;
tests/support/gguf_symmetric_reference.py repeats them in numpy.

1. Load.    Transpose, find the weight of largest magnitude of each part, and scale the block by a power of two so that
            magnitudes end in [1, 4).
2. Search.  For each part, that weight is put at many places (`starts`, in units of codes, of both signs: the lowest
            code has no mirror image). With t = w / scale, r the value of the nearest code and e = t - r, the sums of
            e^2 and e r, weighted by importance, give the least-squares scale for those codes and the error that is
            left. The least error wins.
3. Factors. For some candidates of d, each part tries the whole numbers around its scale divided by d.
            Then d moves to the least-squares fit of all codes and factors, and both of its neighbours in F16 are tried
            with the factors nearby. Errors are those of the weights as decoded in float32. One part: no factors.
4. Encode.  Write the codes of the winner, and sum the squares of its errors in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from numba import types
from numba.extending import intrinsic

from pqweights.kernels.emit import F32, I64, LANES, Lanes, array_pointers, loop, splat, store, transposed
from pqweights.kernels.gguf_halves import half_bits, half_neighbours
from pqweights.kernels.gguf_symmetric_formats import MULTIPLIERS, STARTS, SymmetricFormat
from pqweights.kernels.gguf_symmetric_tiles import EXTREMES, FACTORS, SCALES, TRIED, Codes, Scaling, Tile, load_tile

AT_ONCE = 4  # candidates that one pass over the weights evaluates


class _Products(NamedTuple):
    """Sums over the weights of a part, of importance times products of e and r."""

    ee: Lanes
    er: Lanes


class _PartFit(NamedTuple):
    """The least error so far, and the number that gave it."""

    error: Lanes
    number: Lanes

    def or_better(self, error: Lanes, number: Lanes) -> _PartFit:
        """This, or the other where its error is smaller."""
        better = error < self.error
        return _PartFit(better.choose(error, self.error), better.choose(number, self.number))


def _nothing_found(tile: Tile) -> _PartFit:
    return _PartFit(tile.zero.of(float("inf")), tile.zero)


def _inverse(scale: Lanes) -> Lanes:
    """1 / scale, and 0 for 0."""
    is_zero = scale.equals(0.0)
    return is_zero.choose(scale.of(0.0), 1.0 / is_zero.choose(scale.of(1.0), scale))


# --- 2. Search ---


def _searched(tile: Tile, codes: Codes, part: Any) -> Lanes:
    """The best scale of a part, as a float."""
    b, form, extreme = tile.builder, tile.format, tile.of_part(EXTREMES, part)
    is_zero = extreme.equals(0.0)
    reference = is_zero.choose(extreme.of(1.0), extreme)
    inverse_reference = 1.0 / reference
    energy = tile.over_part(part, tile.zero, lambda w, factor, total: total + factor * (w * w))

    def try_starts(first: int, clips: bool, turn: Any, found: _PartFit) -> _PartFit:
        at = b.add(I64(STARTS + first), b.mul(turn, I64(AT_ONCE)))
        starts = [tile.setting(b.add(at, I64(c))) for c in range(AT_ONCE)]
        inverses = [start * inverse_reference for start in starts]
        for start, inverse, (ee, er) in zip(
            starts, inverses, _moments(tile, codes, part, inverses, clips), strict=True
        ):
            scale = reference / start
            # From t = e + r: the sum of r^2, which is not negative. A smaller slope than the best one overestimates
            # the error.
            rr = ((energy * inverse) * inverse - er) - (er + ee)
            slope = er / rr.maximum(ee * 2.0**-10).maximum(2.0**-100)
            found = found.or_better(((ee - slope * er) * scale) * scale, scale * (slope + 1.0))
        return found

    found = _nothing_found(tile)
    if form.inner_starts:
        found = loop(b, I64(form.inner_starts // AT_ONCE), found, partial(try_starts, 0, False))
    found = loop(b, tile.outer_turns, found, partial(try_starts, form.inner_starts, True))
    return is_zero.choose(tile.zero, found.number)


def _moments(tile: Tile, codes: Codes, part: Any, inverses: list[Lanes], clips: bool) -> tuple[_Products, ...]:
    """The moments of a part for each of some scales, given inverted; clips: whether any code might be out of range."""

    def add(w: Lanes, factor: Lanes, totals: tuple[_Products, ...]) -> tuple[_Products, ...]:
        result = []
        for inverse, own in zip(inverses, totals, strict=True):
            t = w * inverse
            r = codes.value(t) if clips else t.rint()
            e = t - r
            fe = factor * e
            result.append(_Products(own.ee + fe * e, own.er + fe * r))
        return tuple(result)

    return tile.over_part(part, (_Products(tile.zero, tile.zero),) * len(inverses), add)


def _errors(tile: Tile, codes: Codes, part: Any, scales: list[Lanes]) -> tuple[Lanes, ...]:
    """The weighted squared errors of a part for each of some scales."""
    inverses = [_inverse(scale) for scale in scales]

    def add(w: Lanes, factor: Lanes, totals: tuple[Lanes, ...]) -> tuple[Lanes, ...]:
        result = []
        for scale, inverse, total in zip(scales, inverses, totals, strict=True):
            e = w - codes.value(w * inverse) * scale
            result.append(total + factor * (e * e))
        return tuple(result)

    return tile.over_part(part, (tile.zero,) * len(scales), add)


# --- 3. Factors ---


def _refitted(tile: Tile, codes: Codes, d: Lanes) -> Lanes:
    """The least-squares d for the present factors and the codes that they give with the present d."""

    def add_part(part: Any, sums: tuple[Lanes, Lanes]) -> tuple[Lanes, Lanes]:
        factor_of_part = tile.of_part(FACTORS, part)
        inverse = _inverse(d * factor_of_part)

        def add(w: Lanes, factor: Lanes, sums: tuple[Lanes, Lanes]) -> tuple[Lanes, Lanes]:
            v = codes.value(w * inverse) * factor_of_part
            fv = factor * v
            return sums[0] + fv * w, sums[1] + fv * v

        return tile.over_part(part, sums, add)

    wv, vv = tile.over_parts((tile.zero, tile.zero), add_part)
    return wv / vv.maximum(2.0**-100)


def _tried(tile: Tile, codes: Codes, d: Lanes, width: int) -> Lanes:
    """The error of the sixteen blocks for a d; the factors, the best of `width` around each scale, go to TRIED."""
    b, inverse, form = tile.builder, _inverse(d), tile.format

    def try_part(part: Any, total: Lanes) -> Lanes:
        middle = (tile.of_part(SCALES, part) * inverse - 0.5).rint() - (width / 2 - 1.0)

        def try_factors(turn: Any, found: _PartFit) -> _PartFit:
            first = middle + splat(b, b.sitofp(b.mul(turn, I64(AT_ONCE)), F32))
            factors = [(first + float(c)).maximum(form.least_factor).minimum(form.most_factor) for c in range(AT_ONCE)]
            for factor, error in zip(factors, _errors(tile, codes, part, [d * f for f in factors]), strict=True):
                found = found.or_better(error, factor)
            return found

        found = loop(b, I64(width // AT_ONCE), _nothing_found(tile), try_factors)
        tile.keep(TRIED, part, found.number)
        return total + found.error

    return tile.over_parts(tile.zero, try_part)


def _kept(tile: Tile, codes: Codes, best: _PartFit, d: Lanes, width: int) -> _PartFit:
    """The best d, which is the new one where its error is smaller; its factors are kept likewise."""
    error = _tried(tile, codes, d, width)
    better = error < best.error

    def keep_part(part: Any, nothing: tuple[()]) -> tuple[()]:
        tile.keep(FACTORS, part, better.choose(tile.of_part(TRIED, part), tile.of_part(FACTORS, part)))
        return nothing

    tile.over_parts((), keep_part)
    return best.or_better(error, d)


def _fit_super_blocks(tile: Tile, codes: Codes, scaling: Scaling) -> Lanes:
    """d of blocks of several parts; their factors go to FACTORS."""
    b, form = tile.builder, tile.format

    def search_part(part: Any, most: Lanes) -> Lanes:
        scale = _searched(tile, codes, part)
        tile.keep(SCALES, part, scale)
        tile.keep(FACTORS, part, tile.zero)
        return (scale.magnitude() > most.magnitude()).choose(scale, most)

    largest = tile.over_parts(tile.zero, search_part)

    def try_multiplier(turn: Any, best: _PartFit) -> _PartFit:
        nearest, _ = half_neighbours(largest * tile.setting(b.add(I64(MULTIPLIERS), turn)), scaling.up, scaling.down)
        return _kept(tile, codes, best, nearest, form.factors_tried)

    best = loop(b, I64(len(form.multipliers)), _nothing_found(tile), try_multiplier)

    def use_parts_scales(part: Any, nothing: tuple[()]) -> tuple[()]:
        tile.keep(SCALES, part, best.number * tile.of_part(FACTORS, part))
        return nothing

    refitted = half_neighbours(_refitted(tile, codes, best.number), scaling.up, scaling.down)
    tile.over_parts((), use_parts_scales)
    for kind, d in zip((EXTREMES, EXTREMES + LANES), refitted, strict=True):
        store(d, tile.parts, I64(kind), align=64)
    return loop(
        b, I64(2), best, lambda turn, best: _kept(tile, codes, best, tile.of_part(EXTREMES, turn), AT_ONCE)
    ).number


def _fit_blocks(tile: Tile, codes: Codes, scaling: Scaling) -> Lanes:
    """d of blocks of one part."""
    b, only, one = tile.builder, I64(0), tile.zero.of(1.0)
    tile.keep(FACTORS, only, one)
    tile.keep(SCALES, only, _searched(tile, codes, only))

    def improve(_: Any, best: _PartFit) -> _PartFit:
        candidates = list(half_neighbours(tile.of_part(SCALES, only), scaling.up, scaling.down))
        for d, error in zip(candidates, _errors(tile, codes, only, candidates), strict=True):
            best = best.or_better(error, d)
        tile.keep(SCALES, only, _refitted(tile, codes, best.number))
        return best

    return loop(b, I64(2), _nothing_found(tile), improve).number


# --- 4. Encode ---


def _encode(tile: Tile, codes: Codes, d: Lanes, out: Any) -> tuple[Lanes, Lanes]:
    """Write the codes, u8 [16, weights of a block]; returns sums of squares, of weights and of errors, f64."""
    b, form = tile.builder, tile.format

    def encode_part(part: Any, sums: tuple[Lanes, Lanes]) -> tuple[Lanes, Lanes]:
        scale, (energy, error) = d * tile.of_part(FACTORS, part), sums
        inverse, first = _inverse(scale), b.mul(part, I64(form.part_size))
        for sixteen in range(0, form.part_size, LANES):
            at, indices = b.add(first, I64(sixteen)), []
            for k in range(LANES):
                w = tile.weights(b.add(at, I64(k)))
                index, value = codes.index_and_value(w * inverse)
                e = w.wide() - (value * scale).wide()
                energy, error = energy + w.wide() * w.wide(), error + e * e
                indices.append(index.bytes())
            for lane, row in enumerate(transposed(indices)):
                store(row, out, b.add(I64(lane * form.block_size), at))
        return energy, error

    zero = tile.zero.wide()
    return tile.over_parts((zero, zero), encode_part)


def make_fit(form: SymmetricFormat) -> Any:
    """An intrinsic that encodes the same block of sixteen rows."""

    # The parameters of an intrinsic are the operands of the code that it emits, so they stay apart.
    @intrinsic
    def fit_blocks(
        typingctx: Any,
        values: Any,  # f32
        places: Any,  # i64 [16], where in the values each of the blocks begins
        importance: Any,  # f32 [weights of a block]
        work: Any,  # f32 [weights of a block, 16], aligned to 64 bytes
        outer_turns: Any,
        settings: Any,  # f32, see Tile
        parts: Any,  # f32 [4 * MOST_PARTS, 16], aligned likewise; out: from FACTORS on the factors of d
        codes: Any,  # out: u8 [16, weights of a block]
        halves: Any,  # out: i32 [16], the bits of d
        sums: Any,  # out: f64 [2, 16], of squares of the weights and of their errors
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            values, places, importance, work, settings, parts, codes_out, halves, sums = array_pointers(
                context, b, signature, args
            )
            memory = {"importance": importance, "work": work, "settings": settings, "parts": parts}
            tile = Tile(builder=b, format=form, outer_turns=args[4], **memory)
            codes = Codes(tile)
            scaling = load_tile(tile, values, [b.load(b.gep(places, [I64(lane)])) for lane in range(LANES)])
            d = (_fit_super_blocks if form.parts > 1 else _fit_blocks)(tile, codes, scaling)
            for k, total in enumerate(_encode(tile, codes, d, codes_out)):
                store(total * scaling.up.wide() * scaling.up.wide(), sums, I64(k * LANES))
            store(half_bits(scaling.empty.choose(d.of(0.0), d * scaling.up)), halves, I64(0))
            return context.get_dummy_value()

        return types.void(values, places, importance, work, outer_turns, settings, parts, codes, halves, sums), codegen

    return fit_blocks
