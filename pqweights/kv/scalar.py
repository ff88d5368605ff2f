"""Rotated vectors in Lloyd-Max levels, with a norm: the scalar case of TurboQuant (arXiv:2504.19874).

A vector is multiplied by a fixed rotation and divided by its norm, after which its coordinates are nearly Gaussian
whatever it was. Levels are those that masters have. The factor that is stored is not the norm but the one with the
least error, <x, levels> / <levels, levels>, which costs nothing.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from pqweights.kernels.attention import MOST_SIZE, hadamard_scores, weighted_values
from pqweights.kv.bits import halves, pack, packed_bytes, unpack
from pqweights.kv.levels import coded, levels_of, width_tables
from pqweights.kv.quantizer import Parts
from pqweights.kv.rotation import SEED, rotation

# The mean is that of at least so many tokens.
FIRST_TOKENS = 32
# Sizes of heads that the kernels take are multiples of this.
UNIT = 32


class RotatedScalar:
    """The quantizer.

    size: coordinates of a vector, a multiple of 8
    bits: of a code, 2 to 8
    centred: whether the mean of the first states is taken off all states, once for each sequence and head. Keys may
        lose any vector: it adds the same to the scores of all tokens, which softmax takes off again. Here it is added
        back all the same, so that decoded states are near the given ones.
    """

    step = 1

    def __init__(self, size: int, bits: int, *, centred: bool = False) -> None:
        self.size, self.bits, self.centred = size, bits, centred
        self.first = FIRST_TOKENS if centred else 1

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """See StateQuantizer."""
        if shared is not None:
            return shared
        return {"mean": halves(states.mean(2, keepdim=True))} if self.centred else {}

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """See StateQuantizer."""
        if self.centred:
            states = states - shared["mean"].float()
        rotated = states @ rotation(self.size, states.device).T
        return self.encode_rotated(rotated)[0]

    def encode_rotated(self, rotated: Tensor) -> tuple[Parts, Tensor]:
        """Encode vectors that are rotated already; return the parts, and what the vectors are decoded to."""
        rms = rotated.square().mean(-1, keepdim=True).sqrt()
        codes, found = coded(rotated / torch.where(rms > 0, rms, 1), [(self.size, self.bits)])
        factor = halves((rotated * found).sum(-1) / found.square().sum(-1))
        return {"codes": codes, "factor": factor}, found * factor.float()[..., None]

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        states = self.decode_rotated(rows) @ rotation(self.size, rows["codes"].device)
        return states + shared["mean"].float() if self.centred else states

    def decode_rotated(self, rows: Parts) -> Tensor:
        """Decode vectors as they are after the rotation."""
        return levels_of(rows, [(self.size, self.bits)])

    def can_score(self) -> bool:
        """See TakesScores."""
        return self.size % UNIT == 0 and self.size <= MOST_SIZE

    def scores(self, queries: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """See TakesScores: queries are rotated in place of keys."""
        batch, heads = queries.shape[:2]
        found = hadamard_scores(
            (queries @ rotation(self.size, queries.device).T).flatten(0, 1),
            rows["codes"].flatten(0, 1),
            rows["factor"].flatten(0, 1),
            width_tables(self.bits, queries.device)[0],
        ).view(batch, heads, queries.shape[2], -1)
        return found + queries @ shared["mean"].float().transpose(-1, -2) if self.centred else found

    def can_weigh(self) -> bool:
        """See TakesWeights."""
        return self.can_score() and not self.centred

    def weighted(self, weights: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """See TakesWeights: the sum is rotated back in place of values."""
        batch, heads = weights.shape[:2]
        found = weighted_values(
            weights.flatten(0, 1),
            rows["codes"].flatten(0, 1),
            width_tables(self.bits, weights.device)[0],
            size=self.size,
            scales=rows["factor"].flatten(0, 1),
        )
        return found.view(batch, heads, *found.shape[1:]) @ rotation(self.size, weights.device)


class RotatedScalarWithSigns:
    """One bit less for each coordinate, and the signs of a projection of the rest, so that products are unbiased (QJL).

    Reference: arXiv:2504.19874, Section 3.2 (TurboQuant_prod) and arXiv:2406.03482. With Gaussian rows s of a fixed
    matrix, the expectation of sign(<s, rest>) <s, query> is sqrt(2 / pi) <rest, query> / |rest|.

    size, bits: as in RotatedScalar; one of the bits is the sign
    """

    step = first = 1

    def __init__(self, size: int, bits: int) -> None:
        self.size, self._scalar = size, RotatedScalar(size, bits - 1)

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """See StateQuantizer."""
        return {} if shared is None else shared

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """See StateQuantizer."""
        rotated = states @ rotation(self.size, states.device).T
        parts, found = self._scalar.encode_rotated(rotated)
        rest = rotated - found
        signs = (rest @ _projection(self.size, rest.device).T >= 0).to(torch.uint8)
        return {**parts, "signs": pack(signs, 1), "rest": halves(rest.square().sum(-1).sqrt())}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        signs = unpack(rows["signs"], 1, self.size).float() * 2 - 1
        rest = signs @ _projection(self.size, signs.device) * rows["rest"].float()[..., None]
        rotated = self._scalar.decode_rotated(rows) + rest * (math.sqrt(math.pi / 2) / self.size)
        return rotated @ rotation(self.size, rotated.device)


def vector_bytes(size: int, bits: int) -> int:
    """Return what a vector takes in bytes: its codes and its factor."""
    return packed_bytes(size, bits) + 2


@functools.cache
def _projection(size: int, device: torch.device) -> Tensor:
    """Return the matrix of independent Gaussian rows whose products' signs are stored, [size, size] f32."""
    numbers = np.random.Generator(np.random.PCG64(SEED + 1)).standard_normal((size, size))
    with torch.inference_mode(False):  # later calls may need gradients
        return torch.from_numpy(numbers.astype(np.float32)).to(device)
