"""The states of a layer with all of them decoded beside the codes, for a text that is read token by token.

Decoding everything again for each token takes most of the time that a text takes; what is packed never changes, so each
token is decoded once here. This takes the memory that the codes save: it is for evaluating a method, not for using it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pqweights.kv.quantizer import StateQuantizer
from pqweights.kv.states import Chunk, PackedStates

# Room for more tokens is added in proportion to those there are.
GROWTH, LEAST_ROOM = 4, 64


class DecodedStates(PackedStates):
    """The states of one layer, which gives what PackedStates gives."""

    def __init__(self, quantizer: StateQuantizer | None, residual: int) -> None:
        super().__init__(quantizer, residual)
        self._all: Tensor | None = None  # of all tokens, [batch, heads, room, size]
        self._decoded = 0  # how many of them are there as they are decoded

    def extended(self, states: Tensor) -> Tensor:
        """See PackedStates. The result is valid until the next call."""
        before = self.decoded() if self._all is None else None
        held, total = self.tokens, self.tokens + states.shape[2]
        if self._all is None or total > self._all.shape[2]:
            self._grow(states, before, total=total)
        assert self._all is not None
        # What the last call packed is decoded only now: until then, its result held it as it came.
        for chunk in reversed(self.chunks):
            if chunk.start + chunk.tokens <= self._decoded:
                break
            self._decode(chunk)
        self._decoded = self.packed_tokens
        self._all[:, :, held:total] = states
        self.append(states)
        return self._all[:, :, :total]

    def crop(self, tokens: int) -> None:
        """See PackedStates."""
        super().crop(tokens)
        self._forget()

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """See PackedStates."""
        super().each(change)
        self._forget()

    def _forget(self) -> None:
        self._all, self._decoded = None, 0

    def _grow(self, states: Tensor, before: Tensor | None, *, total: int) -> None:
        """Make room for more tokens. before: those that are known, if none are held decoded"""
        batch, heads, _, size = states.shape
        grown = states.new_empty(batch, heads, total + max(LEAST_ROOM, total // GROWTH), size)
        known = before if self._all is None else self._all[:, :, : self.tokens]
        if known is not None:
            grown[:, :, : known.shape[2]] = known
        self._all = grown

    def _decode(self, chunk: Chunk) -> None:
        """Decode the tokens of a chunk that are not decoded yet."""
        assert self.quantizer is not None and self._all is not None
        step = self.quantizer.step
        first = max(0, self._decoded - chunk.start) // step
        rows = {name: part[:, :, first : -(-chunk.tokens // step)] for name, part in chunk.rows.items()}
        start, end = chunk.start + first * step, chunk.start + chunk.tokens
        with torch.no_grad():
            values = self.quantizer.decode(rows, chunk.shared, start)
        self._all[:, :, start:end] = values[:, :, : end - start]
