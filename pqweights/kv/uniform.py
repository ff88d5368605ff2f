"""Codes at even steps between a lowest and a highest value, or around zero: what most caches are quantized with."""

from __future__ import annotations

import torch
from torch import Tensor

from pqweights.kernels.attention import weighted_values
from pqweights.kv.bits import halves, pack, unpack
from pqweights.kv.quantizer import TOKENS_TOGETHER, Parts


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


class TokenWise:
    """Each token apart, in groups of neighbouring coordinates with a scale and a lowest value (KIVI's values).

    Reference: Liu et al., arXiv:2402.02750, Section 3; arXiv:2502.00527 stores values so, too.

    bits: of a code
    group: coordinates with one scale; None for all of a vector
    """

    step = first = 1

    def __init__(self, bits: int, group: int | None = None) -> None:
        self.bits, self.group = bits, group

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """See StateQuantizer."""
        return {} if shared is None else shared

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """See StateQuantizer."""
        size = states.shape[-1]
        codes, scale, low = affine_codes(states.unflatten(-1, (-1, self._group(size))), self.bits)
        return {"codes": pack(codes.flatten(-2), self.bits), "scale": scale, "low": low}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        scale, low = rows["scale"].float(), rows["low"].float()
        size = scale.shape[-1] * (self.group or rows["codes"].shape[-1] * 8 // self.bits)
        codes = unpack(rows["codes"], self.bits, size)
        return (codes.view(*scale.shape, -1) * scale[..., None] + low[..., None]).flatten(-2)

    def can_weigh(self) -> bool:
        """See TakesWeights."""
        return self.group is None

    def weighted(self, weights: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """See TakesWeights."""
        batch, heads = weights.shape[:2]
        found = weighted_values(
            weights.flatten(0, 1),
            rows["codes"].flatten(0, 1),
            torch.arange(1 << self.bits, dtype=torch.float32, device=weights.device),
            size=rows["codes"].shape[-1] * 8 // self.bits,
            scales=rows["scale"].flatten(0, 1).squeeze(-1),
            lows=rows["low"].flatten(0, 1).squeeze(-1),
        )
        return found.view(batch, heads, *found.shape[1:])

    def _group(self, size: int) -> int:
        return size if self.group is None else self.group


class ChannelWise:
    """Each channel apart, in groups of tokens with a scale and a lowest value (KIVI's keys, arXiv:2402.02750).

    bits: of a code
    """

    step = first = TOKENS_TOGETHER

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """See StateQuantizer."""
        return {} if shared is None else shared

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """See StateQuantizer."""
        codes, scale, low = affine_codes(states.unflatten(2, (-1, self.step)).transpose(-1, -2), self.bits)
        return {"codes": pack(codes, self.bits), "scale": scale, "low": low}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        codes = unpack(rows["codes"], self.bits, self.step)
        values = codes * rows["scale"].float()[..., None] + rows["low"].float()[..., None]
        return values.transpose(-1, -2).flatten(2, 3)


class Symmetric:
    """Each token apart, from -largest to largest in even steps, with zero among them (per-token absmax).

    bits: of a code, 2 or more
    """

    step = first = 1

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """See StateQuantizer."""
        return {} if shared is None else shared

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """See StateQuantizer."""
        most = (1 << (self.bits - 1)) - 1
        scale = halves(states.abs().amax(-1) / most)
        divisor = torch.where(scale > 0, scale, 1).float()
        codes = (states / divisor[..., None]).round_().clamp_(-most, most) + most
        return {"codes": pack(codes.to(torch.uint8), self.bits), "scale": scale}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        codes = unpack(rows["codes"], self.bits, rows["codes"].shape[-1] * 8 // self.bits)
        return (codes - float((1 << (self.bits - 1)) - 1)) * rows["scale"].float()[..., None]
