"""What quantizes the keys, or the values, of a layer: two functions between states and packed parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

# Tensors by name. Each has the sequences of the batch as its first axis, and the heads, or 1 for all, as its second.
Parts = Mapping[str, Tensor]

# The tokens whose codes lie together where codes are stored channel by channel.
TOKENS_TOGETHER = 32


class StateQuantizer(Protocol):
    """A quantizer of states: the keys or the values of a layer, [batch, heads, tokens, size].

    Tokens are encoded in rows of `step` tokens, and decoded from the parts of their rows and from `shared` parts, which
    many rows have in common.
    """

    @property
    def step(self) -> int:
        """How many tokens are encoded together."""
        ...

    @property
    def first(self) -> int:
        """How many tokens there must be before the first are encoded, because something is measured on them."""
        ...

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """Return the shared parts with which states are encoded: those of earlier states if they serve.

        states: [batch, heads, tokens, size] f32
        shared: those of earlier states of the same layer; None for the first ones
        start: the position of the first of the tokens
        """
        ...

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """Encode states, [batch, heads, rows * step, size] f32, into parts [batch, heads, rows, ...]."""
        ...

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """Decode whole rows, into [batch, heads, rows * step, size] f32."""
        ...
