"""KIVI (Liu et al., arXiv:2402.02750): keys channel by channel in groups of tokens, values token by token."""

from __future__ import annotations

from dataclasses import dataclass

from pqweights.kv.quantizer import TOKENS_TOGETHER, StateQuantizer
from pqweights.kv.schemes.scheme import WINDOWS, LayerModel, Scheme, digits
from pqweights.kv.uniform import ChannelWise, TokenWise

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Kivi(Scheme):
    """Groups of 32: tokens of a channel of keys, coordinates of a value.

    bits: of a code
    """

    bits: int = 4
    residual: int = 128

    name = "kivi"
    choices = {"bits": BITS, "residual": WINDOWS}
    words = digits("bits", BITS)

    def key_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        return ChannelWise(self.bits)

    def value_quantizer(self, layer: LayerModel) -> StateQuantizer:
        """See Scheme."""
        return TokenWise(self.bits, None if layer.value_size % TOKENS_TOGETHER else TOKENS_TOGETHER)
