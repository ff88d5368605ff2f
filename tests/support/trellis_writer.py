"""Superblocks of the codec hadamard-trellis with numbers drawn at random, for decoders: every class, every trellis.

The inverse of trellis_decoder.py, with its tables. The encoder of the package writes only some of what the format can.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from trellis_decoder import BLOCK, LANES, LEAST, TRELLISES, kind_of, table_of


class Symbol(NamedTuple):
    """A symbol for the coder of a lane: its share of 2**table_bits, and bits that follow as they are."""

    lane: int
    start: int
    frequency: int
    table_bits: int
    low_bits: int = 0
    low: int = 0


def superblock(
    rng: np.random.Generator,
    blocks: int,
    *,
    step: float,
    state_bits: int,
    first: int = 0,
    frequencies: Sequence[int] = (256,),
    unused: int = 0,
) -> bytes:
    """A superblock with random numbers, distributed as the classes have them.

    first, frequencies: the first class, and how frequent it and those after it are, of 256
    unused: bytes at the end
    """
    starts = np.cumsum([0, *frequencies])
    classes = rng.choice(len(frequencies), blocks, p=np.array(frequencies) / 256)
    steps: list[list[Symbol]] = []
    paths = [0] * LANES
    for begin in range(0, blocks, LANES):
        lanes = range(min(LANES, blocks - begin))
        chosen = [int(classes[begin + lane]) for lane in lanes]
        steps.append([Symbol(lane, int(starts[chosen[lane]]), frequencies[chosen[lane]], 8) for lane in lanes])
        for _ in range(BLOCK):
            steps.append([])
            for lane in lanes:
                parity, k = paths[lane] & 1, 0
                exponent = kind_of(first + chosen[lane]).exponent
                if exponent is not None:
                    symbol, k = _drawn(rng, lane, exponent, parity)
                    steps[-1].append(symbol)
                by_parity, by_bit = TRELLISES[state_bits]
                paths[lane] = paths[lane] >> 1 ^ (by_parity if parity else 0) ^ (by_bit if k & 1 else 0)
    states, words = _coded(steps)
    row = struct.pack("<fBBB", step, state_bits, first, len(frequencies))
    row += bytes(frequencies) if len(frequencies) > 1 else b""
    row += struct.pack(f"<{min(LANES, blocks)}I", *states[:blocks])
    return row + struct.pack(f"<{len(words)}H", *words) + bytes(unused)


def _drawn(rng: np.random.Generator, lane: int, exponent: int, parity: int) -> tuple[Symbol, int]:
    """A random number of a table, as a symbol and as k."""
    table, slot = table_of(exponent, parity), int(rng.integers(4096))
    place = int(np.searchsorted(table.starts, slot, side="right")) - 1
    bucket = table.buckets[place]
    low = int(rng.integers(1 << bucket.low_bits))
    symbol = Symbol(lane, table.starts[place], table.frequencies[place], 12, bucket.low_bits, low)
    return symbol, bucket.first + low


def _coded(steps: list[list[Symbol]]) -> tuple[list[int], list[int]]:
    """The states with which a decoder begins, and the words that it reads."""
    states, words = [LEAST] * LANES, []
    for symbols in reversed(steps):
        for symbol in reversed(symbols):
            state = states[symbol.lane]
            if state >> (32 - symbol.table_bits - symbol.low_bits) >= symbol.frequency:
                words.append(state & 0xFFFF)
                state >>= 16
            state = state << symbol.low_bits | symbol.low
            quotient, rest = divmod(state, symbol.frequency)
            states[symbol.lane] = (quotient << symbol.table_bits) + rest + symbol.start
    return states, words[::-1]


# --- weights for encoders ---


def all_hostile(blocks: int, seed: int) -> dict[str, npt.NDArray[np.float64]]:
    """Finite weights [blocks, 128] by kind, on which searches for steps and classes could fail."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((blocks, 128))
    odd = np.arange(blocks)[:, None] % 2
    largest = float(np.finfo(np.float32).max)
    return {
        "normal": normal,
        "huge": np.clip(normal * 1e38, -largest, largest),
        "largest": np.full((blocks, 128), largest),
        "signs of the largest": np.where(normal > 0, largest, -largest),
        "subnormal": normal * 1e-41,
        "smallest": np.full((blocks, 128), 1e-45),
        "constant": np.full((blocks, 128), -0.37),
        "constant rows": np.repeat(normal[:, :1], 128, axis=1),
        "sparse": normal * (rng.random(normal.shape) < 0.002),
        "one weight": np.where(np.arange(blocks * 128).reshape(blocks, 128) == seed % (blocks * 128), 1.0, 0.0),
        "one block": normal * (np.arange(blocks)[:, None] == seed % blocks),
        "some zero blocks": normal * (np.arange(blocks)[:, None] % 3 > 0),
        "wide norms": normal * np.exp2(rng.uniform(-40, 40, (blocks, 1))),
        "huge and tiny blocks": normal * np.where(odd, 1e35, 1e-35),
        "steps of scale": normal * np.exp2(np.arange(blocks)[:, None] % 60),
        "lognormal": normal * np.exp(2 * rng.standard_normal((blocks, 1))),
        "heavy tails": np.clip(rng.standard_t(1.1, normal.shape), -1e30, 1e30),
        "integers": np.rint(normal * 3),
        "zero": np.zeros_like(normal),
    }


def hostile(kind: str, blocks: int, seed: int) -> npt.NDArray[np.float32]:
    """Weights of one of the KINDS."""
    return all_hostile(blocks, seed)[kind].astype(np.float32)


KINDS = tuple(all_hostile(1, 0))
