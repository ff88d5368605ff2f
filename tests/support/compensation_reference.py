"""References for error-compensated rounding: the bits of the kernels in numpy, and the textbook in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

ZERO = np.float32(0)


def factor(moments: Floats) -> Floats:
    """R above and on the diagonal, in float32, with every sum in the order of the kernel; below it the moments."""
    a = moments.copy()
    size = len(a)
    for row in range(0, size, 4):
        sums = np.zeros((4, size), dtype=np.float32)
        for i in range(row):
            sums += a[i, row : row + 4, None] * a[i]
        for q in range(4):
            own = moments[row + q] - sums[q]
            for p in range(q):
                own = own - a[row + p, row + q] * sums[p]
            diagonal = np.sqrt(own[row + q])
            sums[q] = own / diagonal
            a[row + q, row + q] = diagonal
            a[row + q, row + q + 1 :] = sums[q, row + q + 1 :]
            if row + q + 1 < size:  # in further chunks of columns the kernel divides by the same number
                assert diagonal > 0
    return a


def compensated(
    a: Floats,
    diagonal: Floats,
    weights: Floats,  # [K, rows]
    scales: Floats,  # [groups, rows]
    offsets: Floats,
    group_of: npt.NDArray[np.int64],
    codes: tuple[int, int],
    repeats: int,
) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """The errors and codes [K, rows], with every operation in the order of the kernel."""
    size = len(a)
    errors, found = np.zeros_like(weights), np.zeros(weights.shape, dtype=np.uint8)
    for again in (False, *(True,) * repeats):
        passed = np.zeros((size, size), dtype=np.float32)
        for k in range(size):
            if again:
                passed[k, :k], passed[k, k + 1 :] = a[k, :k] / diagonal[k], a[k + 1 :, k] / diagonal[k]
            else:
                passed[k, k + 1 :] = a[k, k + 1 :] / a[k, k]
        for end in range(size, 0, -64):
            start = max(0, end - 64)
            sums = np.zeros((end - start, weights.shape[1]), dtype=np.float32)
            for i in range(0 if again else start, size):
                sums += passed[start:end, i, None] * errors[i]
            for q in range(end - start - 1, -1, -1):
                k = start + q
                scale, offset = scales[group_of[k]], offsets[group_of[k]]
                code = np.clip(np.rint((weights[k] + sums[q] - offset) / scale), *map(np.float32, codes))
                error = weights[k] - (code * scale + offset)
                change = error - errors[k]
                errors[k], found[k] = error, (code - np.float32(codes[0])).astype(np.uint8)
                for p in range(q):
                    sums[p] += passed[start + p, k] * change
    return errors, found


def output_errors(errors: Floats, inputs: Floats) -> Doubles:
    """The sum over the inputs x of (e x)^2 for each row e; products are added in the order of the columns."""
    outputs = np.zeros((len(inputs), len(errors)), dtype=np.float32)
    for k in range(errors.shape[1]):
        outputs += inputs[:, k, None] * errors[:, k]
    wide = outputs.astype(np.float64)
    result: Doubles = np.add.accumulate(wide * wide, axis=0)[-1]
    return result


SHARES = [each / 16 for each in (17, 16, 15, 14, 13, 12, 11, 10, 8, 6, 5, 4, 3, 2)]


def fitted(
    weights: Floats,  # [rows, K]
    importance: Floats,  # [K]
    scales: Floats,  # [rows, groups]
    offsets: Floats,
    codes: tuple[int, int],
    symmetric: bool,
) -> list[Floats]:
    """Scales and offsets [rows, groups] of smaller weighted error, with every operation in the order of the kernel."""
    size = weights.shape[1] // scales.shape[1]
    found = []
    for group in range(scales.shape[1]):
        w, factors = weights[:, group * size : (group + 1) * size].T, importance[group * size : (group + 1) * size]
        found.append(_fitted_group(w, factors, scales[:, group], offsets[:, group], codes, symmetric))
    return [np.ascontiguousarray(np.stack(each, axis=1)) for each in zip(*found, strict=True)]


def _fitted_group(
    w: Floats, factors: Floats, scale: Floats, offset: Floats, codes: tuple[int, int], symmetric: bool
) -> tuple[Floats, Floats]:
    """The scales and offsets [rows] of one group; w: [size, rows]."""
    lowest, highest = map(np.float32, codes)
    middle = (lowest + highest) / np.float32(2)

    def added(terms: Floats) -> Floats:
        """The sum over the columns, in order."""
        result: Floats = np.add.accumulate(np.concatenate([np.zeros_like(terms[:1]), terms]), axis=0)[-1]
        return result

    def codes_of(s: Floats, o: Floats) -> Floats:
        return np.clip(np.rint((w - o) / s), lowest, highest)

    def error(s: Floats, o: Floats) -> Floats:
        e = w - (codes_of(s, o) * s + o)
        return added(factors[:, None] * (e * e))

    total = added(factors[:, None])[0]
    means = added(factors[:, None] * w) / total
    best, least = (scale, offset), error(scale, offset)
    for share in SHARES:
        factor = np.float32(share)
        s = scale * factor
        center = means + ((offset + middle * scale) - means) * min(factor, np.float32(1))
        o = offset if symmetric else center - middle * s
        for _ in range(4):
            q = codes_of(s, o)
            weighted = factors[:, None] * q
            c, x = added(weighted), added(factors[:, None] * w)
            at = np.zeros_like(c) if symmetric else c / total
            with np.errstate(divide="ignore", invalid="ignore"):
                spread = added(weighted * q) - at * c
                slope = (added(weighted * w) - at * x) / spread
            usable = (spread > np.float32(1e-6) * total) & (slope != 0) & (np.abs(slope) < 1e30)
            s = np.where(usable, slope, s)
            o = np.where(usable, np.float32(0) if symmetric else x / total - slope * at, o).astype(np.float32)
        s, o = _bf16(s), _bf16(o)
        wins = (error(s, o) < least) & (s != 0)
        least = np.where(wins, error(s, o), least)
        best = (np.where(wins, s, best[0]), np.where(wins, o, best[1]))
    return best


def _bf16(values: Floats) -> Floats:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def textbook(weights: Doubles, moments: Doubles, scales: Doubles, offsets: Doubles, codes: tuple[int, int]) -> Doubles:
    """GPTQ as in the paper, column by column with the Cholesky factor of the inverse, without blocks: Q, [N, K].

    moments: damped, in the order in which columns are rounded
    scales, offsets: of each weight, [N, K]
    """
    upper = np.linalg.cholesky(np.linalg.inv(moments)).T
    left, result = weights.copy(), np.empty_like(weights)
    for k in range(weights.shape[1]):
        code = np.clip(np.rint((left[:, k] - offsets[:, k]) / scales[:, k]), *codes)
        result[:, k] = code * scales[:, k] + offsets[:, k]
        left[:, k:] -= ((left[:, k] - result[:, k]) / upper[k, k])[:, None] * upper[k, k:]
    return result
