"""Rotated vectors in Lloyd-Max levels, with a norm: the scalar case of TurboQuant (arXiv:2504.19874).

A vector is multiplied by a fixed rotation and divided by its norm, after which its coordinates are nearly Gaussian
whatever it was. Levels are those that masters have. The factor that is stored is not the norm but the one with the
least error, <x, levels> / <levels, levels>, which costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pqweights.kernels.attention import MOST_SIZE, hadamard_scores, weighted_values
from pqweights.kv.bits import halves
from pqweights.kv.levels import coded, levels_of, width_tables
from pqweights.kv.quantizer import Parts
from pqweights.kv.rotation import rotation

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
        rms = rotated.square().mean(-1, keepdim=True).sqrt()
        codes, found = coded(rotated / torch.where(rms > 0, rms, 1), [(self.size, self.bits)])
        factor = halves((rotated * found).sum(-1) / found.square().sum(-1))
        return {"codes": codes, "factor": factor}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        states = levels_of(rows, [(self.size, self.bits)]) @ rotation(self.size, rows["codes"].device)
        return states + shared["mean"].float() if self.centred else states

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
