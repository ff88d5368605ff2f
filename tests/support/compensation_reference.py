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
        for quad in range(size - 4, -1, -4):
            sums = np.zeros((4, weights.shape[1]), dtype=np.float32)
            for i in range(0 if again else quad, size):
                sums += passed[quad : quad + 4, i, None] * errors[i]
            for q in (3, 2, 1, 0):
                k = quad + q
                scale, offset = scales[group_of[k]], offsets[group_of[k]]
                code = np.clip(np.rint((weights[k] + sums[q] - offset) / scale), *map(np.float32, codes))
                error = weights[k] - (code * scale + offset)
                change = error - errors[k]
                errors[k], found[k] = error, (code - np.float32(codes[0])).astype(np.uint8)
                for p in range(q):
                    sums[p] += passed[quad + p, k] * change
    return errors, found


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
