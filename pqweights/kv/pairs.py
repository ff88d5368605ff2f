"""Pairs of key coordinates that RoPE rotates together, as an angle and a radius (Wu et al., arXiv:2502.00527).

Keys may have outliers in single channels, but RoPE turns such a channel and its partner in a circle, on which radius
and angle are spread evenly (Section 3.1). Angles need no scale, and radii are not negative, so all that is stored with
the codes is one scale for each pair of channels (Section 3.2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pqweights.kernels.attention import POLAR_WIDTHS, polar_rope_scores
from pqweights.kv.bits import halves, pack, unpack
from pqweights.kv.quantizer import TOKENS_TOGETHER, Parts
from pqweights.kv.rope import RopePairs

# A later radius may exceed the largest one by this factor, and is cut then. Some of the many pairs exceed theirs by a
# little in nearly every 32 tokens: new scales each time would cost memory, and products that begin anew.
OVERSHOOT = 1.375
# Sizes of keys that the kernel takes are multiples of this.
UNIT = 8


class PolarPairs:
    """The quantizer. Codes of 32 tokens lie together, so that a product looks up 32 tokens in one table (Section 3.3).

    pairs: which coordinates are pairs
    angle_bits, radius_bits: of the codes, m and n of the paper
    """

    step = first = TOKENS_TOGETHER

    def __init__(self, pairs: RopePairs, angle_bits: int, radius_bits: int) -> None:
        self.pairs, self.angle_bits, self.radius_bits = pairs, angle_bits, radius_bits

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """See StateQuantizer. New scales are taken only when a radius exceeds the old ones by more than OVERSHOOT."""
        x, y = self.pairs.split(states)
        scale = halves(torch.hypot(x, y).amax(2) / ((1 << self.radius_bits) - 1))
        if shared is None:
            return {"scale": scale}
        known = shared["scale"]
        exceeded = (scale.float() > known.float() * OVERSHOOT).flatten(1).any(1)
        if not exceeded.any():
            return shared
        return {"scale": torch.where(exceeded[:, None, None], torch.maximum(scale, known), known)}

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """See StateQuantizer."""
        x, y = self.pairs.split(states)
        scale = shared["scale"].float()[:, :, None]
        radii = torch.hypot(x, y) / torch.where(scale > 0, scale, 1)
        radii = radii.round_().clamp_(0, (1 << self.radius_bits) - 1)
        turns = (torch.atan2(y, x) + math.pi) / (2 * math.pi)
        angles = (turns * (1 << self.angle_bits)).round_().to(torch.int32) & ((1 << self.angle_bits) - 1)
        return {
            "angles": pack(self._together(angles.to(torch.uint8)), self.angle_bits),
            "radii": pack(self._together(radii.to(torch.uint8)), self.radius_bits),
        }

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        table = self.directions(rows["angles"].device)
        codes = self._apart(unpack(rows["angles"], self.angle_bits, self.step)).long()
        radii = self._apart(unpack(rows["radii"], self.radius_bits, self.step)) * shared["scale"].float()[:, :, None]
        return self.pairs.joined(table[0][codes] * radii, table[1][codes] * radii)

    def can_score(self) -> bool:
        """See TakesScores."""
        return (self.angle_bits, self.radius_bits) in POLAR_WIDTHS and not self.pairs.size % UNIT

    def scores(self, queries: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """See TakesScores: the product by table look-up of Section 3.3."""
        batch, heads = queries.shape[:2]
        found = polar_rope_scores(
            torch.cat(self.pairs.split(queries), dim=-1).flatten(0, 1),
            rows["angles"].flatten(0, 1),
            rows["radii"].flatten(0, 1),
            shared["scale"].flatten(0, 1).contiguous(),
            angle_bits=self.angle_bits,
            radius_bits=self.radius_bits,
        )
        return found.view(batch, heads, *found.shape[1:])

    def directions(self, device: torch.device) -> Tensor:
        """Return cosine and sine of every angle code, [2, 2**angle_bits] f32."""
        angles = torch.arange(1 << self.angle_bits, device=device) * (2 * math.pi / (1 << self.angle_bits)) - math.pi
        return torch.stack([angles.cos(), angles.sin()])

    def _together(self, codes: Tensor) -> Tensor:
        """[batch, heads, tokens, pairs] -> [batch, heads, rows, pairs, 32]"""
        batch, heads, tokens, pairs = codes.shape
        return codes.view(batch, heads, tokens // self.step, self.step, pairs).transpose(-1, -2)

    def _apart(self, codes: Tensor) -> Tensor:
        """Undo `_together`."""
        return codes.transpose(-1, -2).flatten(2, 3)
