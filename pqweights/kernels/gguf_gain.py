"""Blocks of GGUF, enlarged by what their codes have lost.

Codes of least squared error are too small: the error is orthogonal to what is decoded, so of the energy E of a block
only E - error is left, and products with the weights shrink by that share. Enlarging a block by E / (E - error) gives
the products their size again. The squared error grows by the same small factor, and models lose less: the divergence of
2-bit types falls by a fifth, that of 4-bit types by one or two percent (docs/gguf.md). Blocks that were encoded by
importances stay as they are: what counts in the products is weighed already, and enlarging them costs divergence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pqweights.kernels.groups import LARGEST_GAIN, Groups

Doubles = npt.NDArray[np.float64]
# Where the F16 factors of a block lie, by type. Others have none, or lose less than these resolve.
FACTORS = {
    "Q5_K": (0, 2),
    "Q5_1": (0, 2),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q4_K": (0, 2),
    "Q4_0": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q3_K": (108,),
    "IQ3_S": (0,),
    "IQ3_XXS": (0,),
    "Q2_K": (80, 82),
    "IQ2_S": (0,),
    "IQ2_XS": (0,),
    "TQ2_0": (64,),
    "IQ2_XXS": (0,),
    "IQ1_M": (48,),
    "TQ1_0": (52,),
    "IQ1_S": (0,),
    "Q2_0": (0,),
    "Q1_0": (0,),
}
LARGEST_F16 = 65504.0


def with_gain(type_name: str, blocks: Groups) -> Groups:
    """Return blocks of a type enlarged by what the codes have lost, with the errors that they then have.

    The errors follow from those that were measured, up to the rounding of factors to F16. Blocks of types that are not
    in FACTORS, and blocks without finite weights, stay as they are.
    """
    if type_name not in FACTORS:
        return blocks
    energies, left = blocks.energies, blocks.energies - blocks.errors
    held = np.isfinite(energies) & (left > 0)
    gains = np.ones(len(energies))
    np.divide(energies, left, out=gains, where=held)
    np.clip(gains, 1.0, LARGEST_GAIN, out=gains)
    data = blocks.codes.copy()
    for at in FACTORS[type_name]:
        _enlarge(data, at, gains, spread=type_name == "IQ1_M")
    errors = energies - 2 * gains * left + gains * gains * left
    return replace(blocks, codes=data, errors=np.where(held, errors, blocks.errors))


def _enlarge(data: npt.NDArray[np.uint8], at: int, gains: Doubles, *, spread: bool) -> None:
    """Multiply the F16 factors that begin at a byte of each block, and saturate them.

    spread: whether the highest four bits of four words hold one, the lowest bits of it in the first
    """
    places = np.array([0, 4, 8, 12], dtype=np.uint16)
    words = np.ascontiguousarray(data[:, at : at + (8 if spread else 2)]).view("<u2")
    factors = np.bitwise_or.reduce(words >> 12 << places, axis=1, keepdims=True) if spread else words
    products = np.clip(factors.view("<f2").astype(np.float32) * gains[:, None], -LARGEST_F16, LARGEST_F16)
    enlarged = products.astype("<f2").view("<u2")
    data[:, at : at + 2 * words.shape[1]] = (words & 0xFFF | enlarged >> places << 12 if spread else enlarged).view(
        np.uint8
    )
