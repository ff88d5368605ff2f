"""Pairs of key coordinates that RoPE rotates together, as an angle and a radius (Wu et al., arXiv:2502.00527).

Keys may have outliers in single channels, but RoPE (arXiv:2104.09864) turns such a channel and its partner in a circle,
on which radius and angle are spread evenly (Section 3.1). Angles need no scale, and radii are not negative, so all that
is stored with the codes is one scale for each pair of channels (Section 3.2). Values are quantized token by token.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pqweights.kernels.attention import POLAR_WIDTHS, polar_rope_scores, weighted_values
from pqweights.models import has_trait
from pqweights.models.traits import Trait
from pqweights.runtime.kv.codes import halves, pack, unpack
from pqweights.runtime.kv.states import TOKENS_TOGETHER, Parts, StateQuantizer

# Functions of modeling modules that turn every pair by a right angle.
QUARTER_TURNS = ("rotate_half", "rotate_every_two", "rotate_interleave")


@dataclass(frozen=True)
class RopePairs:
    """The pairs of coordinates.

    size: coordinates of a key
    rotated: how many of them, from the first on, RoPE rotates; the others are paired in the same way among themselves
    interleaved: whether neighbours are pairs (2j, 2j + 1), instead of the halves (j, j + rotated / 2)
    """

    size: int
    rotated: int
    interleaved: bool

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second coordinates of all pairs, [..., size] -> twice [..., size / 2]."""
        parts = [self._split(part) for part in states.split([self.rotated, self.size - self.rotated], dim=-1)]
        firsts, seconds = zip(*parts, strict=True)
        return torch.cat(firsts, dim=-1), torch.cat(seconds, dim=-1)

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        """Undo `split`."""
        halves = [self.rotated // 2, (self.size - self.rotated) // 2]
        parts = zip(first.split(halves, dim=-1), second.split(halves, dim=-1), strict=True)
        return torch.cat([self._joined(*pair) for pair in parts], dim=-1)

    def _split(self, part: Tensor) -> tuple[Tensor, Tensor]:
        half = part.shape[-1] // 2
        return (part[..., 0::2], part[..., 1::2]) if self.interleaved else (part[..., :half], part[..., half:])

    def _joined(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([first, second], dim=-1).flatten(-2) if self.interleaved else torch.cat([first, second], -1)


def rope_pairs(config: Any, size: int) -> RopePairs | None:
    """Return the pairs of a model's keys; None for a model without RoPE.

    config: of the decoder, a PreTrainedConfig
    size: coordinates of a key
    """
    parameters = getattr(config, "rope_parameters", None)
    rotary = getattr(config, "rotary_dim", None)
    if (not parameters and rotary is None) or getattr(config, "alibi", False):
        return None
    nested = (parameters or {}).values()
    of_layers = [settings for settings in (parameters, *nested) if isinstance(settings, dict)]
    share = next(
        (settings["partial_rotary_factor"] for settings in of_layers if "partial_rotary_factor" in settings), 1.0
    )
    rotated = int(rotary if rotary is not None else size * share) // 2 * 2
    return RopePairs(size, min(size, rotated), _is_interleaved(config))


def _is_interleaved(config: Any) -> bool:
    """Whether a model rotates neighbours, by what its own function for quarter turns does to 0, 1, 2, 3."""
    if getattr(config, "rope_interleave", None) is not None:
        return bool(config.rope_interleave)
    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return has_trait(config.model_type, Trait.ROTATES_NEIGHBOURS)
    turn = next((getattr(module, name) for name in QUARTER_TURNS if hasattr(module, name)), None)
    if turn is None:
        return has_trait(config.model_type, Trait.ROTATES_NEIGHBOURS)
    return bool(
        turn(torch.arange(4.0, device="cpu")[None, None, None])[..., 1] == 0
    )  # GPT-J's takes four dimensions only


# A later radius may exceed the largest one by this factor, and is cut then. Some of the many pairs exceed theirs by a
# little in nearly every 32 tokens: new scales each time would cost memory, and products that begin anew.
OVERSHOOT = 1.375
# Sizes of keys that the kernel takes are multiples of this.
UNIT = 8


class PolarPairs(StateQuantizer):
    """The quantizer. Codes of 32 tokens lie together, so that a product looks up 32 tokens in one table (Section 3.3).

    pairs: which coordinates are pairs
    angle_bits, radius_bits: of the codes, m and n of the paper
    """

    step = first = TOKENS_TOGETHER

    def __init__(self, pairs: RopePairs, angle_bits: int, radius_bits: int) -> None:
        self.pairs, self.angle_bits, self.radius_bits = pairs, angle_bits, radius_bits

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """Return the shared parts with which states are encoded: those of earlier states if they serve.

        New scales are taken only when a radius exceeds the old ones by more than OVERSHOOT.
        """
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
        """Encode states, [batch, heads, rows * step, size] f32, into parts [batch, heads, rows, ...]."""
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
        """Decode whole rows, into [batch, heads, rows * step, size] f32."""
        table = self.directions(rows["angles"].device)
        codes = self._apart(unpack(rows["angles"], self.angle_bits, self.step)).long()
        radii = self._apart(unpack(rows["radii"], self.radius_bits, self.step)) * shared["scale"].float()[:, :, None]
        return self.pairs.joined(table[0][codes] * radii, table[1][codes] * radii)

    def can_score(self) -> bool:
        """Whether there is a kernel for products of queries with these keys."""
        return (self.angle_bits, self.radius_bits) in POLAR_WIDTHS and not self.pairs.size % UNIT

    def scores(self, queries: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """Return the products of queries [batch, heads, n, size] f32 with all keys in `rows`, [batch, heads, n, keys].

        The product by table look-up of Section 3.3.
        """
        batch, heads = queries.shape[:2]
        scores = polar_rope_scores(
            torch.cat(self.pairs.split(queries), dim=-1).flatten(0, 1),
            rows["angles"].flatten(0, 1),
            rows["radii"].flatten(0, 1),
            shared["scale"].flatten(0, 1).contiguous(),
            angle_bits=self.angle_bits,
            radius_bits=self.radius_bits,
        )
        return scores.view(batch, heads, *scores.shape[1:])

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


def affine_codes(values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize along the last axis: codes [..., n] u8, scale [...] f16, low [...] f16, with value = scale * code + low.

    values: [..., n] f32
    """
    low = halves(values.amin(-1))
    steps = (1 << bits) - 1
    scale = halves((values.amax(-1) - low.float()) / steps)
    divisor = torch.where(scale > 0, scale, 1).float()
    codes = ((values - low.float()[..., None]) / divisor[..., None]).round_().clamp_(0, steps)
    return codes.to(torch.uint8), scale, low


class TokenWise(StateQuantizer):
    """Each token apart, with a scale and a lowest value, as arXiv:2502.00527 stores values.

    bits: of a code
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """Encode states, [batch, heads, rows * step, size] f32, into parts [batch, heads, rows, ...]."""
        codes, scale, low = affine_codes(states, self.bits)
        return {"codes": pack(codes, self.bits), "scale": scale[..., None], "low": low[..., None]}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """Decode whole rows, into [batch, heads, rows * step, size] f32."""
        codes = unpack(rows["codes"], self.bits, rows["codes"].shape[-1] * 8 // self.bits)
        return codes * rows["scale"].float() + rows["low"].float()

    def can_weigh(self) -> bool:
        """Whether there is a kernel for weighted sums of these values."""
        return True

    def weighted(self, weights: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """Return the sums of values with weights [batch, heads, n, values] f32, [batch, heads, n, size] f32."""
        batch, heads = weights.shape[:2]
        sums = weighted_values(
            weights.flatten(0, 1),
            rows["codes"].flatten(0, 1),
            torch.arange(1 << self.bits, dtype=torch.float32, device=weights.device),
            size=rows["codes"].shape[-1] * 8 // self.bits,
            scales=rows["scale"].flatten(0, 1).squeeze(-1),
            lows=rows["low"].flatten(0, 1).squeeze(-1),
        )
        return sums.view(batch, heads, *sums.shape[1:])
