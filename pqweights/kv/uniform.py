"""Codes at even steps between a lowest and a highest value."""

from __future__ import annotations

import torch
from torch import Tensor

from pqweights.kernels.attention import weighted_values
from pqweights.kv.bits import halves, pack, unpack
from pqweights.kv.quantizer import Parts


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
    """Each token apart, with a scale and a lowest value, as arXiv:2502.00527 stores values.

    bits: of a code
    """

    step = first = 1

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """See StateQuantizer."""
        return {} if shared is None else shared

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """See StateQuantizer."""
        codes, scale, low = affine_codes(states, self.bits)
        return {"codes": pack(codes, self.bits), "scale": scale[..., None], "low": low[..., None]}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        codes = unpack(rows["codes"], self.bits, rows["codes"].shape[-1] * 8 // self.bits)
        return codes * rows["scale"].float() + rows["low"].float()

    def can_weigh(self) -> bool:
        """See TakesWeights."""
        return True

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
