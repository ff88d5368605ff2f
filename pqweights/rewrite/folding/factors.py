"""The factors of a vector between layers, from the sizes of its channels and of the weights that read them.

A reader of the vector x has the columns w_k, and a rounding error that is spread evenly over the columns of a group.
The output error is then proportional to the mean of x_k^2 times the mean of w_k^2. Columns that are multiplied by c_k,
while x_k is divided by it, have the least error at c_k = sqrt(x_k / w_k), by the inequality of Cauchy and Schwarz. That
is the choice of AWQ (Lin et al., arXiv:2306.00978), but for all readers together. Without data, x_k is taken from the
writer: it is the gain of a norm, or the length of a row of the weight behind a norm. Moving scales between neighbouring
layers is from Nagel et al. (arXiv:1906.04721).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.common.dtypes import FINITE_RANGES, convert, from_float32, to_float32

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# A vector is folded if that is expected to take away at least this share of its readers' error. Where channels differ
# little, folding only loses what training found, with data or without.
SMALLEST_GAIN = 0.25
# Channels smaller than this share of the mean are taken as that large, and no factor is further from 1.
SMALLEST_SHARE = 1e-4
LARGEST_FACTOR = 4096.0


def factors_of(inputs: Doubles, weights: Doubles, *, powers_of_two: bool) -> tuple[Floats, float]:
    """Return the factors c = sqrt(x / w) of a vector, around 1, and the share of its readers' error that should go.

    inputs: the size of each channel x, [matrices, channels]
    weights: the root mean square of the columns that read it, [matrices, channels]
    powers_of_two: round to powers of two, which multiply numbers of any floating dtype exactly

    Factors are [matrices, channels] f32 with 8 significant bits. Sizes that are not finite, as of a weight with a NaN,
    have none to gain by: what encodes that weight names it.
    """
    if not (np.isfinite(inputs).all() and np.isfinite(weights).all()):
        return np.ones(inputs.shape, dtype=np.float32), 0.0
    x, w = _at_least_small(inputs), _at_least_small(weights)
    gain = 1 - float(((x * w).mean(axis=1) ** 2).sum() / ((x**2).mean(axis=1) * (w**2).mean(axis=1)).sum())
    logarithms = (np.log2(x) - np.log2(w)) / 2
    logarithms -= logarithms.mean(axis=1, keepdims=True)
    if powers_of_two:
        logarithms = np.rint(logarithms)
    columns = np.exp2(np.clip(logarithms, -np.log2(LARGEST_FACTOR), np.log2(LARGEST_FACTOR)))
    return rounded_to_8_bits(columns.astype(np.float32)), gain


def rounded_to_8_bits(values: Floats) -> Floats:
    """Round to 8 significant bits.

    So the last bits of sums and logarithms, which depend on the processor, do not show, but for ties; and the result
    is exact in every dtype.
    """
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    return to_float32(from_float32(flat, "BF16"), "BF16").reshape(values.shape)


def _at_least_small(sizes: Doubles) -> Doubles:
    floor = np.maximum(SMALLEST_SHARE * sizes.mean(axis=1, keepdims=True), 1e-30)
    result: Doubles = np.maximum(sizes, floor)
    return result


def keeping_bits(columns: Floats, vectors: Sequence[tuple[Floats, str]]) -> Floats:
    """Return powers of two with 1 in place of those that would cost a plain vector bits.

    columns: the powers of two, [channels]
    vectors: what is divided by them and stored plainly, [channels], each with its dtype

    A power of two is exact as long as no number becomes subnormal or infinite, which in float16 is soon.
    """
    kept = np.ones(columns.shape, dtype=bool)
    for values, dtype in vectors:
        divided = values / columns
        kept &= _is_in_range(divided, dtype) & (_stored(divided, dtype) * columns == values)
    return np.where(kept, columns, np.float32(1))


def _is_in_range(values: Floats, dtype: str) -> npt.NDArray[np.bool_]:
    low, high = FINITE_RANGES.get(dtype, FINITE_RANGES["F32"])
    return (values >= low) & (values <= high)


def _stored(values: Floats, dtype: str) -> Floats:
    """Return values as they are in a dtype: the largest for those beyond its range."""
    limited = np.clip(values, *FINITE_RANGES.get(dtype, FINITE_RANGES["F32"])).astype(np.float32)
    return to_float32(convert(limited.view(np.uint8), "F32", dtype), dtype)


@dataclass(frozen=True, eq=False)
class FoldedGain:
    """A norm's gain with the factors of its readers.

    stored: the weight that is stored, f32 with 8 significant bits, or the original where its gain is 0
    columns: by what the columns of readers are multiplied, so that the product stays the same, f32
    """

    stored: Floats
    columns: Floats


def folded_gain(weight: Floats, columns: Floats, *, zero_centred: bool, exact: bool, dtype: str) -> FoldedGain:
    """Divide a gain by the factors of its readers.

    weight: the norm's weight, [channels]
    columns: the factors that are wanted, [channels]
    zero_centred: the gain is 1 + weight
    exact: the factors are powers of two, and the gain is divided without rounding
    dtype: the dtype that the weight is stored in
    """
    gain = weight.astype(np.float64) + zero_centred
    if exact:
        return FoldedGain((gain / columns).astype(np.float32), columns)
    wanted = rounded_to_8_bits((gain / columns).astype(np.float32))
    rounded = rounded_to_8_bits(wanted - np.float32(1)) if zero_centred else wanted
    stored = _stored(rounded, dtype)
    computed = stored.astype(np.float64) + zero_centred
    usable = (computed != 0) & _is_in_range(rounded, dtype) & (np.sign(computed) == np.sign(gain))
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(usable, gain / computed, 1.0).astype(np.float32)
    return FoldedGain(np.where(usable, stored, weight).astype(np.float32), factors)
