"""The keys, or the values, of one layer: packed rows that only grow, and a window of recent tokens as they came.

A `StateQuantizer` packs the rows: two functions between states and parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Tensors by name. Each has the sequences of the batch as its first axis, and the heads, or 1 for all, as its second.
Parts = Mapping[str, Tensor]

# The tokens whose codes lie together where codes are stored channel by channel.
TOKENS_TOGETHER = 32


class StateQuantizer(ABC):
    """A quantizer of states: the keys or the values of a layer, [batch, heads, tokens, size].

    Tokens are encoded in rows of `step` tokens, and decoded from the parts of their rows and from `shared` parts, which
    many rows have in common.

    step: how many tokens are encoded together
    first: how many tokens there must be before the first are encoded, because something is measured on them
    """

    step = first = 1

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """Return the shared parts with which states are encoded: those of earlier states if they serve.

        states: [batch, heads, tokens, size] f32
        shared: those of earlier states of the same layer; None for the first ones
        start: the position of the first of the tokens
        """
        return {} if shared is None else shared

    @abstractmethod
    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """Encode states, [batch, heads, rows * step, size] f32, into parts [batch, heads, rows, ...]."""

    @abstractmethod
    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """Decode whole rows, into [batch, heads, rows * step, size] f32."""

    def can_score(self) -> bool:
        """Whether there is a kernel for products of queries with these keys."""
        return False

    def scores(self, queries: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """Return the products of queries [batch, heads, n, size] f32 with all keys in `rows`, [batch, heads, n, keys].

        The parts have room for more rows than are used; what is returned for those means nothing.
        """
        raise NotImplementedError

    def can_weigh(self) -> bool:
        """Whether there is a kernel for weighted sums of these values."""
        return False

    def weighted(self, weights: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """Return the sums of values with weights [batch, heads, n, values] f32, [batch, heads, n, size] f32."""
        raise NotImplementedError


# Room for more rows is added in proportion to those there are, so that a token is copied a bounded number of times.
GROWTH, LEAST_TOKENS = 64, 32


@dataclass(kw_only=True)
class Chunk:
    """Rows with the same shared parts.

    rows: parts with room for more rows than are used, [batch, heads, room, ...]
    shared: what all rows have in common
    start: the position of the first token
    tokens: how many tokens are held; the last row may hold fewer than the quantizer's step after a crop
    """

    rows: dict[str, Tensor]
    shared: Parts
    start: int
    tokens: int


class PackedStates:
    """The states of one layer, [batch, heads, tokens, size], of which all but the most recent are packed.

    quantizer: None to keep all states as they come
    residual: how many of the most recent tokens are never packed
    """

    def __init__(self, quantizer: StateQuantizer | None, residual: int) -> None:
        self.quantizer, self.residual = quantizer, residual
        self.chunks: list[Chunk] = []
        self.window: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens are held."""
        return self.packed_tokens + (0 if self.window is None else self.window.shape[2])

    @property
    def packed_tokens(self) -> int:
        """How many tokens are held as codes."""
        return sum(chunk.tokens for chunk in self.chunks)

    def append(self, states: Tensor) -> None:
        """Add the states of further tokens, [batch, heads, tokens, size], and pack those that leave the window."""
        window = states if self.window is None else torch.cat([self.window, states], dim=2)
        quantizer = self.quantizer
        packed = 0
        ready = window.shape[2] - self.residual
        if quantizer is not None and ready >= (quantizer.step if self.chunks else quantizer.first):
            packed = ready // quantizer.step * quantizer.step
            with torch.no_grad():  # codes have no gradient, and a scale with one would keep the whole graph in memory
                self._pack(quantizer, window[:, :, :packed].float())
        # Without a copy, the window would keep all of the states that it was cut from.
        self.window = window[:, :, packed:].clone() if packed or self.window is None else window

    def extended(self, states: Tensor) -> Tensor:
        """Append states, and return all: those of before as they are decoded, the new ones as they came."""
        before = self.decoded()
        self.append(states)
        return states if before is None else torch.cat([before, states], dim=2)

    def decoded(self) -> Tensor | None:
        """Return all states in the dtype in which they came; None if there are none yet."""
        if self.window is None:
            return None
        parts = [self.decoded_chunk(chunk).to(self.window.dtype) for chunk in self.chunks]
        return torch.cat([*parts, self.window], dim=2) if parts else self.window

    def decoded_chunk(self, chunk: Chunk) -> Tensor:
        """Return the states of a chunk, [batch, heads, tokens, size] f32."""
        assert self.quantizer is not None
        rows = used_rows(chunk, self.quantizer.step)
        return self.quantizer.decode(rows, chunk.shared, chunk.start)[:, :, : chunk.tokens]

    def crop(self, tokens: int) -> None:
        """Keep only the first `tokens` tokens."""
        if self.window is None:
            return
        packed = self.packed_tokens
        self.window = self.window[:, :, : max(0, tokens - packed)].clone()
        while packed > tokens:
            last = self.chunks[-1]
            kept = max(0, last.tokens - (packed - tokens))
            packed -= last.tokens - kept
            last.tokens = kept
            if not kept:
                self.chunks.pop()

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what `change` makes of it: a choice of sequences, or a copy on another device."""
        changed: dict[int, Tensor] = {}  # chunks may share tensors

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            return changed[id(tensor)]

        if self.window is not None:
            self.window = change(self.window)
        for chunk in self.chunks:
            chunk.rows = {name: change(part) for name, part in chunk.rows.items()}
            chunk.shared = {name: once(part) for name, part in chunk.shared.items()}

    def packed_bytes(self) -> int:
        """Return the memory of all codes and of what decoding needs with them, in bytes."""
        return sum(tensor_bytes(tensor) for tensor in self.tensors() if tensor is not self.window)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that is held, each once, with the room for more rows."""
        seen: set[int] = set()
        for chunk in self.chunks:
            yield from chunk.rows.values()
            for part in chunk.shared.values():
                if id(part) not in seen:
                    seen.add(id(part))
                    yield part
        if self.window is not None:
            yield self.window

    def _pack(self, quantizer: StateQuantizer, states: Tensor) -> None:
        last = self.chunks[-1] if self.chunks else None
        before = None if last is None else last.shared
        start = self.packed_tokens
        shared = quantizer.fit(states, before, start)
        rows = quantizer.encode(states, shared, start)
        if last is None or shared is not before or last.tokens % quantizer.step:
            self.chunks.append(Chunk(rows=dict(rows), shared=shared, start=start, tokens=states.shape[2]))
            return
        used = last.tokens // quantizer.step
        for name, part in rows.items():
            last.rows[name] = appended(last.rows[name], used, part, least=LEAST_TOKENS // quantizer.step)
        last.tokens += states.shape[2]


def tensor_bytes(tensor: Tensor) -> int:
    """Return the memory of a tensor in bytes."""
    return tensor.numel() * tensor.element_size()


def used_rows(chunk: Chunk, step: int) -> Parts:
    """Return the parts of a chunk without the room for more rows."""
    count = -(-chunk.tokens // step)
    return {name: part[:, :, :count] for name, part in chunk.rows.items()}


def appended(part: Tensor, used: int, more: Tensor, *, least: int) -> Tensor:
    """Write rows behind the `used` ones, in place if there is room, and return where all rows are.

    least: the fewest rows for which there is room after growing, beyond these
    """
    needed = used + more.shape[2]
    frozen = part.is_inference() and not torch.is_inference_mode_enabled()  # torch refuses to write into it here
    if needed > part.shape[2] or frozen:
        room = needed + max(least - 1, needed // GROWTH)
        grown = part.new_zeros((*part.shape[:2], room, *part.shape[3:]))
        grown[:, :, :used] = part[:, :, :used]
        part = grown
    part[:, :, used:needed] = more
    return part
