"""A numpy reference for GGUF's blocks of scales and offsets: the rule of pqweights/kernels/native/gguf_affine.cpp.

Every line is an operation of that rule on all blocks at once, in float32 and in the same order, so the results are the
same bits. The code is independent: it shares no table and no helper with the kernels, and is told where searches begin.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.kernels.gguf_searches import Points, Search

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

f32 = np.float32
TINY = f32(2.0**-100)
RELAX, PASSES, STEPS = f32(3), 4, 2


class Format(NamedTuple):
    """Weights of a block and of a part, the largest code, the largest integer of scales and offsets, and rounds."""

    block_size: int
    part_size: int
    last_code: int
    last_level: int
    rounds: int

    @property
    def parts(self) -> int:
        """Parts of a block."""
        return self.block_size // self.part_size


FORMATS = {
    "Q4_K": Format(256, 32, 15, 63, 2),
    "Q5_K": Format(256, 32, 31, 63, 2),
    "Q2_K": Format(256, 16, 3, 15, 3),
    "Q5_1": Format(32, 32, 31, 1, 2),
    "Q4_1": Format(32, 32, 15, 1, 2),
}


class Encoded(NamedTuple):
    """Bytes [blocks, block bytes], and sums of squares [blocks] of the weights and of their errors."""

    data: Bytes
    energies: Doubles
    errors: Doubles


class _Form(NamedTuple):
    """A format: the largest code, the largest integer, how many rounds, and whether blocks have one part."""

    code: np.float32
    level: np.float32
    rounds: int
    alone: bool


class _Sums(NamedTuple):
    """Of each part, [parts, blocks]: sums of weights and codes, and the best scale for these codes."""

    w: Floats
    q: Floats
    qq: Floats
    wq: Floats
    total: Floats
    scale: Floats


class _Choice(NamedTuple):
    """What blocks store: d and dmin in the scale of the work, [blocks], and the integers, [parts, blocks]."""

    error: Floats
    d: Floats
    dmin: Floats
    a: Floats
    b: Floats


def encode(kind: str, values: Floats, search: Search, importance: Floats | None) -> Encoded:
    """Weights [rows, columns] in a format of FORMATS. importance: likewise, above 0, as the kernel takes it."""
    size, part_size, code, level, rounds = FORMATS[kind]
    values = values.reshape(-1, size)
    form = _Form(f32(code), f32(level), rounds, size == part_size)
    with np.errstate(all="ignore"):
        shape = (size // part_size, part_size, len(values))
        x = np.ascontiguousarray(values.T).reshape(shape)
        most = np.zeros(len(values), dtype=np.float32)
        for row in np.abs(values.T):
            most = _maximum(row, most)
        exponent = np.clip((most.view(np.uint32) >> 23).astype(np.int32) - 127, -40, 126)
        down, up = (np.ldexp(f32(1), power).astype(np.float32) for power in (-exponent, exponent))
        w = x * down
        factors = None if importance is None else np.ascontiguousarray(importance.reshape(-1, size).T).reshape(shape)
        starts = search.starts if importance is None else search.weighted_starts
        *fits, totals = _fitted(w, factors, starts, form)
        if form.alone:
            choice = _rounded_alone(w, factors, totals, fits, form, up, down)
        else:
            sums = _summed(w, factors, totals, (fits[0], fits[1]), form)
            d, dmin = _guessed(sums, (fits[0], fits[1]), search.factors, form, up, down)
            choice = _rounded(w, factors, sums, (d, dmin), form, up, down)
        scale, offset = choice.a * choice.d, choice.b * choice.dmin
        q = _codes(w, scale, offset, form)
        e = (w - (q * scale[:, None] - offset[:, None])).astype(np.float64)
        wide = up.astype(np.float64)
        energies, errors = (_in_order((y * y).reshape(size, -1)) * wide * wide for y in (w.astype(np.float64), e))
        halves = [(each * up).astype(np.float16) for each in (choice.d, choice.dmin)]
        pack = {"Q2_K": _packed_q2, "Q5_1": _packed_alone, "Q4_1": _packed_alone}.get(kind, _packed_q4_or_q5)
        codes = q.reshape(size, -1).T.astype(np.uint8)
        levels = [np.ascontiguousarray(each.T).astype(np.uint8) for each in (choice.a, choice.b)]
    return Encoded(pack(halves, levels, codes, high=code == 31), energies, errors)


# --- fit ---


def _fitted(w: Floats, factors: Floats | None, starts: Points, form: _Form) -> tuple[Floats, Floats, Floats]:
    """Scales, offsets and total importance [parts, blocks]."""
    smallest, largest = w.min(axis=1), w.max(axis=1)
    smallest = smallest if form.alone else _minimum(smallest, f32(0))
    totals = np.full_like(largest, w.shape[1]) if factors is None else _in_order(factors)
    best = (
        np.full_like(largest, np.inf),
        _maximum((largest - smallest) / form.code, TINY),
        -smallest,
    )
    center = (largest + smallest) * f32(0.5)
    for start in range(0, len(starts), 3):
        chains = []
        for below, above in starts[start : start + 3]:
            begin = center + (smallest - center) * f32(below)
            scale = (center + (largest - center) * f32(above) - begin) / form.code
            chains.append((_maximum(scale, TINY), _allowed(-begin, form)))
        for _ in range(PASSES):
            moved = [_moments(w, factors, *chain, form) for chain in chains]
            for c, moments in enumerate(moved):
                best, chains[c] = _moved(best, *chains[c], moments, totals, form)
    if form.alone:
        return best[1], best[2], totals
    most = _codes(w, best[1], best[2], form).max(axis=1)
    return np.where(most > 0, best[1] / np.floor(form.code / _maximum(most, f32(1))), f32(0)), best[2], totals


def _moments(w: Floats, factors: Floats | None, scale: Floats, offset: Floats, form: _Form) -> list[Floats]:
    """Sums of e^2, e r, r^2, e and r."""
    t = (w + offset[:, None]) * (f32(1) / scale)[:, None]
    r = _clipped(np.rint(t), form.code)
    e = t - r
    fe, fr = (e, r) if factors is None else (factors * e, factors * r)
    return [_in_order(terms) for terms in (fe * e, fe * r, fr * r, fe, fr)]


def _moved(
    best: tuple[Floats, Floats, Floats],
    scale: Floats,
    offset: Floats,
    moments: list[Floats],
    total: Floats,
    form: _Form,
) -> tuple[tuple[Floats, Floats, Floats], tuple[Floats, Floats]]:
    ee, er, rr, e, r = moments
    spread = rr - r * (r / total)
    spreads = spread > rr * f32(1e-5)
    slope = np.where(spreads, (er - e * (r / total)) / np.where(spreads, spread, f32(1)), f32(0))
    shift = (e - slope * r) / total
    error = (ee - shift * e) - slope * er
    limit = offset * (f32(1) / scale)
    pinned, left = (shift > limit) & (not form.alone), er - limit * r
    pinned_slope = left / _maximum(rr, TINY)
    pinned_error = ((ee - (limit * f32(2)) * e) + (limit * limit) * total) - pinned_slope * left
    slope, shift = np.where(pinned, pinned_slope, slope), np.where(pinned, limit, shift)
    error = (np.where(pinned, pinned_error, error) * scale) * scale
    fitted = scale * (slope + f32(1))
    fitted_offset = np.where(pinned, f32(0), offset - scale * shift)
    better = (error < best[0]) & (fitted > scale * f32(0.25))
    kept = tuple(np.where(better, new, old) for new, old in zip((error, fitted, fitted_offset), best, strict=True))
    step = _minimum(_maximum(RELAX * slope, f32(-0.5)), f32(1))
    after = (_maximum(scale * (step + f32(1)), TINY), _allowed(offset - scale * (RELAX * shift), form))
    return (kept[0], kept[1], kept[2]), after


def _allowed(offset: Floats, form: _Form) -> Floats:
    return offset if form.alone else _maximum(offset, f32(0))


# --- sums, guesses, rounds ---


def _codes(w: Floats, scale: Floats, offset: Floats, form: _Form) -> Floats:
    return _clipped(np.rint((w + offset[:, None]) * _inverse(scale)[:, None]), form.code)


def _summed(w: Floats, factors: Floats | None, totals: Floats, numbers: tuple[Floats, Floats], form: _Form) -> _Sums:
    scale, offset = numbers
    q = _codes(w, scale, offset, form)
    fw, fq = (w, q) if factors is None else (factors * w, factors * q)
    sw, sq, qq, wq = (_in_order(terms) for terms in (fw, fq, fq * q, fw * q))
    mean = sq / totals
    spread = qq - sq * mean
    spreads = spread > qq * f32(1e-5)
    fitted = (wq - sw * mean) / np.where(spreads, spread, f32(1))
    return _Sums(sw, sq, qq, wq, totals, np.where(spreads & (fitted > 0), fitted, scale))


def _searched(
    w: Floats, factors: Floats | None, numbers: tuple[Floats, Floats], levels: tuple[Floats, Floats], form: _Form
) -> tuple[Floats, Floats, Floats]:
    """The least errors of parts, with their integers or the neighbours of these, and the integers."""
    (d, dmin), (a, b) = numbers, levels
    slant = (d * (form.code / f32(2))) * _inverse(dmin)
    candidates = [(a, b), (a, _minimum(b + f32(1), form.level)), (a, _maximum(b - f32(1), f32(0)))]
    neighbours = (_minimum(a + f32(1), form.level), _maximum(a - f32(1), f32(0)))
    candidates += [(level, _clipped(np.rint(b + (level - a) * slant), form.level)) for level in neighbours]
    least, best = np.full_like(a, np.inf), (a, b)
    for candidate in candidates:
        scale, offset = candidate[0] * d, candidate[1] * dmin
        e = w - (_codes(w, scale, offset, form) * scale[:, None] - offset[:, None])
        error = _in_order(e * e if factors is None else factors * e * e)
        wins = error < least
        least = np.where(wins, error, least)
        best = (np.where(wins, candidate[0], best[0]), np.where(wins, candidate[1], best[1]))
    return least, *best


def _levels(sums: _Sums, d: Floats, dmin: Floats, form: _Form) -> tuple[Floats, Floats, Floats]:
    """The error that the sums say, [blocks], and the integers."""
    below = _clipped(np.rint(sums.scale * _inverse(d) - f32(0.5)), form.level)
    found = []
    for a in (below, _minimum(below + f32(1), form.level)):
        scale = a * d
        b = _clipped(np.rint(((scale * sums.q - sums.w) / sums.total) * _inverse(dmin)), form.level)
        offset = b * dmin
        error = offset * ((sums.w + sums.w) + sums.total * offset - (scale + scale) * sums.q) + scale * (
            scale * sums.qq - (sums.wq + sums.wq)
        )
        found.append((error, a, b))
    wins = found[1][0] < found[0][0]
    error, a, b = (np.where(wins, upper, lower) for lower, upper in zip(*found, strict=True))
    return _in_order(error), a, b


def _solved(sums: _Sums, d: Floats, dmin: Floats, a: Floats, b: Floats) -> tuple[Floats, Floats]:
    aa, ab, bb, x = (_in_order(terms) for terms in (a * a * sums.qq, a * b * sums.q, b * b * sums.total, a * sums.wq))
    y = _in_order(-(b * sums.w))
    determinant = aa * bb - ab * ab
    divisor = np.where(determinant > (aa * bb) * f32(1e-5), determinant, f32(np.inf))
    scale, offset = (x * bb + ab * y) / divisor, (aa * y + ab * x) / divisor
    usable = (scale > 0) & (offset > 0)
    scale_alone, offset_alone = (x + ab * dmin) / _maximum(aa, TINY), (y + ab * d) / _maximum(bb, TINY)
    return (
        np.where(usable, scale, np.where(scale_alone > 0, scale_alone, d)),
        np.where(usable, offset, np.where(offset_alone > 0, offset_alone, dmin)),
    )


def _half(x: Floats) -> Floats:
    """The nearest F16, saturated; never 0 if 127 times the number rounds to another."""
    nearest = _minimum(x, f32(65504)).astype(np.float16).astype(np.float32)
    return np.where(x > f32(2.0**-31), _maximum(nearest, f32(2.0**-24)), nearest)


def _guessed(
    sums: _Sums, fits: tuple[Floats, Floats], pairs: Points, form: _Form, up: Floats, down: Floats
) -> tuple[Floats, Floats]:
    d0, dmin0 = (_maximum(each, f32(0)).max(axis=0) / form.level for each in (sums.scale, fits[1]))
    least = np.full_like(d0, np.inf)
    best = (_half(d0 * up) * down, _half(dmin0 * up) * down)
    for scale, offset in pairs:
        d, dmin = d0 * f32(scale), dmin0 * f32(offset)
        for _ in range(STEPS):
            d, dmin = _half(d * up) * down, _half(dmin * up) * down
            error, a, b = _levels(sums, d, dmin, form)
            better = error < least
            least = np.where(better, error, least)
            best = (np.where(better, d, best[0]), np.where(better, dmin, best[1]))
            d, dmin = _solved(sums, d, dmin, a, b)
    return best


def _rounded(
    w: Floats,
    factors: Floats | None,
    sums: _Sums,
    pair: tuple[Floats, Floats],
    form: _Form,
    up: Floats,
    down: Floats,
) -> _Choice:
    d, dmin = pair
    best = _Choice(np.full_like(d, np.inf), d, dmin, np.zeros_like(sums.w), np.zeros_like(sums.w))
    for _ in range(form.rounds):
        d, dmin = _half(d * up) * down, _half(dmin * up) * down
        _, a, b = _levels(sums, d, dmin, form)
        errors, a, b = _searched(w, factors, (d, dmin), (a, b), form)
        sums = _summed(w, factors, sums.total, (a * d, b * dmin), form)
        error = _in_order(errors)
        better = error < best.error
        now = _Choice(error, d, dmin, a, b)
        best = _Choice(*(np.where(better, new, old) for new, old in zip(now, best, strict=True)))
        d, dmin = _solved(sums, d, dmin, a, b)
    return best


# --- blocks of one part ---


def _rounded_alone(
    w: Floats,
    factors: Floats | None,
    total: Floats,
    fits: list[Floats],
    form: _Form,
    up: Floats,
    down: Any,
) -> _Choice:
    (scale, offset), least = fits, np.full_like(total, np.inf)
    for turn in range(form.rounds):
        q = _codes(w, scale, offset, form)
        e = (w + offset[:, None]) * _inverse(scale)[:, None] - q
        fe, fq = (e, q) if factors is None else (factors * e, factors * q)
        eq, qq, se, sq = (_in_order(terms) for terms in (fe * q, fq * q, fe, fq))
        spread = qq - sq * (sq / total)
        spreads = spread > qq * f32(1e-5)
        slope = np.where(spreads, (eq - se * (sq / total)) / np.where(spreads, spread, f32(1)), f32(0))
        candidates = []
        for dmin in _neighbours(offset - scale * ((se - slope * sq) / total), up, down):
            moved = dmin - offset
            fitted = scale + (scale * eq + moved * sq) / np.where(qq > 0, qq, f32(1))
            fitted = _maximum(np.where(qq > 0, fitted, moved / form.code), f32(0))
            candidates += [(d, dmin) for d in _neighbours(fitted, up, down)]
        if turn == 0:
            scale, offset = np.zeros_like(scale), np.zeros_like(offset)
        for d, dmin in candidates:
            e = w - (_codes(w, d, dmin, form) * d[:, None] - dmin[:, None])
            error = _in_order(e * e if factors is None else factors * e * e)
            better = error < least
            least, scale, offset = (
                np.where(better, new, old) for new, old in ((error, least), (d, scale), (dmin, offset))
            )
    one = np.ones_like(scale)
    return _Choice(least[0], scale[0], offset[0], one, one)


def _neighbours(x: Floats, up: Floats, down: Floats) -> list[Floats]:
    """The nearest F16, saturated, and the one on the other side."""
    x = _maximum(_minimum(x * up, f32(65504)), f32(-65504))
    size = np.abs(x)
    step = np.ldexp(f32(1), np.maximum(np.frexp(size)[1] - 1, -14) - 10).astype(np.float32)
    nearest = np.rint(size / step) * step
    other = _maximum(_minimum(np.where(size > nearest, nearest + step, nearest - step), f32(65504)), f32(0))
    return [np.where(x < 0, -near, near) * down for near in (nearest, other)]


# --- bytes ---


def _packed_q4_or_q5(halves: list[Any], levels: list[Bytes], codes: Bytes, *, high: bool) -> Bytes:
    """d, dmin; four scales, then four offsets, above them two bits of the others; the others' low 4 bits; codes."""
    head = np.stack(halves, axis=1).view(np.uint8)
    first = [own[:, :4] | ((own[:, 4:] >> 4) << 6) for own in levels]
    rest = (levels[0][:, 4:] & 15) | ((levels[1][:, 4:] & 15) << 4)
    parts = codes.reshape(-1, 8, 32)
    bits = [np.packbits(parts >> 4, axis=1, bitorder="little")[:, 0]] if high else []
    pairs = (parts & 15).reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    return np.concatenate([head, *first, rest, *bits, nibbles], axis=1)


def _packed_q2(halves: list[Any], levels: list[Bytes], codes: Bytes, *, high: bool) -> Bytes:
    """A byte of integers for each part; four codes, 32 weights apart, in a byte; d, dmin."""
    quarters = codes.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    packed = np.bitwise_or.reduce(quarters, axis=2).reshape(-1, 64)
    return np.concatenate([levels[0] | (levels[1] << 4), packed, np.stack(halves, axis=1).view(np.uint8)], axis=1)


def _packed_alone(halves: list[Any], levels: list[Bytes], codes: Bytes, *, high: bool) -> Bytes:
    """d, m; with `high` the highest bits of the codes; their low 4 bits, two codes, 16 weights apart, in a byte."""
    d, dmin = halves
    head = np.stack([d, 0 - dmin], axis=1).view(np.uint8)
    bits = [np.packbits(codes >> 4, axis=1, bitorder="little")] if high else []
    return np.concatenate([head, *bits, (codes[:, :16] & 15) | ((codes[:, 16:] & 15) << 4)], axis=1)


# --- arithmetic ---


def _inverse(scale: Floats) -> Floats:
    return np.where(scale > 0, f32(1) / np.where(scale > 0, scale, f32(1)), f32(0))


def _minimum(a: Any, b: Any) -> Any:
    """The minimum as processors compute it: of two zeros, or with a NaN, the second."""
    return np.where(a < b, a, b)


def _maximum(a: Any, b: Any) -> Any:
    return np.where(a > b, a, b)


def _clipped(t: Floats, most: np.float32) -> Floats:
    result: Floats = _minimum(_maximum(t, f32(0)), most)
    return result


def _in_order(terms: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Add up [..., terms, blocks] to [..., blocks], one after the other, beginning with 0."""
    start = np.zeros_like(terms[..., :1, :])
    return np.add.accumulate(np.concatenate([start, terms], axis=-2), axis=-2)[..., -1, :]


# --- what to encode ---


def hard_blocks() -> Floats:
    """Blocks [197, 256], which 16 does not divide: ordinary ones, and one of every kind that is treated differently."""
    rng = np.random.default_rng(21)
    x = rng.standard_normal((197, 256)).astype(np.float32)
    x[3:90] *= (10.0 ** rng.uniform(-38, 37, (87, 1))).astype(np.float32)
    x[91], x[92], x[93] = 0, 0.3, -0.2
    x[94] = np.float32(3.4028234663852886e38)
    x[95] = np.float32(2.0**-149) * np.arange(256, dtype=np.float32)
    x[96], x[97, :250], x[98, 32:64] = np.abs(x[96]) + 1, 0, -1
    x[99] = np.where(np.arange(256) % 7, -0.0, 0)
    x[100:120] = rng.standard_t(1.2, (20, 256))
    x[121:140] *= np.float32(1e-5)  # scales in F16 are subnormal, or too small
    x[141:150, ::64] *= 30
    x[151] = np.where(np.arange(256) == 100, np.float32(-7e-3), np.float32(0))
    return x


def some_importance(columns: int) -> Floats:
    """Importance f32 [columns] in which some columns hardly count, and some not at all."""
    found = np.random.default_rng(22).lognormal(0, 2, columns).astype(np.float32)
    found[5:40], found[::50] = 0, 1e-20
    return found
