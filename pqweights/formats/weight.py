"""One weight: the passes over its blocks, and a whole weight in memory.

`encode_weight` and the streaming jobs (convert/jobs.py) make the same passes with the same functions. The errors of
blocks are added in the order of the blocks, so the sum does not depend on the size of chunks or the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pqweights.common.dtypes import item_bytes, to_float32
from pqweights.errors import MasterError, SourceError
from pqweights.formats.protocol import Bytes, Coder, DamagedBlock, Measures, NormRange, PassResult, State
from pqweights.kernels import load_backend


class PassTotals:
    """The running totals of one pass, whose chunks are added in the order of the blocks."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._sums = np.zeros(2)  # the energy and the error
        self._norms = NormRange()

    def add(self, measures: Measures) -> None:
        """Add the measures of the next blocks."""
        load_backend("cpu").add_in_order(self._sums, measures.energies, measures.errors)
        self._norms = self._norms.merged(measures.norms)

    def result(self) -> PassResult:
        """Return the totals of all blocks."""
        energy, error = self._sums.tolist()
        return PassResult(state=self._state, energy=energy, error=error, norms=self._norms)


def encode_chunk(
    coder: Coder, values: Bytes, weights: int, *, dtype: str, state: State, parts: Sequence[Bytes]
) -> Measures:
    """Encode the next blocks of a weight; only the last block may hold padding, whose error does not count.

    coder: what encodes them, sized for the weight
    values: raw bytes, [blocks * block size * item size]; those of the padding are set to zero
    weights: how many of the values are weights; the rest is padding
    dtype: BF16, F16 or F32, the dtype of `values`
    state: the state of the pass
    parts: the arrays to write, [blocks, bytes per block] each
    """
    size = item_bytes(dtype)
    values[weights * size :] = 0
    measures = coder.encode(values, parts, dtype=dtype, state=state)
    used = weights % coder.block_size
    if used and measures.first_bad_block < 0:
        decoded = np.empty(coder.block_size * 4, dtype=np.uint8)
        coder.decode([part[-1:] for part in parts], decoded, dtype="F32", state=state)
        last = to_float32(values[-coder.block_size * size :], dtype)[:used].astype(np.float64)
        difference = last - decoded.view(np.float32)[:used].astype(np.float64)
        measures.errors[-1] = np.add.accumulate(difference * difference)[-1]
    return measures


def block_count(weights: int, block_size: int) -> int:
    """Return how many blocks hold `weights` weights; the last one is padded."""
    return -(-weights // block_size)


def damaged_error(where: str, damage: DamagedBlock, *, first: int | None) -> MasterError:
    """Return the error for a block that cannot be decoded.

    where: what the block belongs to, for the user
    first: the first block of the call that damage it; None if the blocks of the call do not lie together
    """
    block = "a block" if first is None else f"block {first + damage.block}"
    return damaged_master(f"{where}: {block}: {damage.reason}")


def damaged_master(problem: str) -> MasterError:
    """Return the error for a master that holds what no run writes. problem: where, and what."""
    return MasterError(
        f"{problem}; the master is damaged: pqweights verify names what differs, and a copy or quantizing again "
        "restores it"
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class EncodedWeight:
    """A whole encoded weight in memory.

    shape: the shape of the weight
    dtype: BF16, F16 or F32, the dtype that `decode` returns
    coder: what decodes it, sized for it
    state: the state in which it was encoded
    parts: its stored tensors, [blocks, bytes per block] u8 each
    """

    shape: tuple[int, ...]
    dtype: str
    coder: Coder
    state: State
    parts: tuple[Bytes, ...]

    def decode_blocks(self, start: int, stop: int, dtype: str) -> Bytes:
        """Return the raw bytes of blocks [start, stop) in `dtype`, padding included.

        Raises MasterError if the parts cannot be those of an encoded weight.
        """
        values = np.empty((stop - start) * self.coder.block_size * item_bytes(dtype), dtype=np.uint8)
        try:
            self.coder.decode([part[start:stop] for part in self.parts], values, dtype=dtype, state=self.state)
        except DamagedBlock as damage:
            raise damaged_error("the encoded weight", damage, first=start) from None
        return values

    def decode(self) -> Bytes:
        """Return the raw bytes of the weight in its own dtype, row-major."""
        decoded = self.decode_blocks(0, len(self.parts[0]), self.dtype)
        return decoded[: math.prod(self.shape) * item_bytes(self.dtype)]


def encode_weight(
    values: Bytes, *, dtype: str, shape: tuple[int, ...], coder: Coder
) -> tuple[EncodedWeight, PassResult]:
    """Encode a weight that is in memory, and return it with what the last pass measured.

    values: the weight as raw bytes, row-major
    dtype: BF16, F16 or F32
    shape: the shape of the weight
    coder: what encodes it; it is sized here

    Raises SourceError if the weight holds a NaN or an infinity.
    """
    weights = math.prod(shape)
    coder = coder.sized(weights)
    blocks = block_count(weights, coder.block_size)
    padded = np.empty(blocks * coder.block_size * item_bytes(dtype), dtype=np.uint8)
    padded[: len(values)] = values
    parts = tuple(np.empty((blocks, part.bytes_per_block), dtype=np.uint8) for part in coder.parts)
    history: list[PassResult] = []
    state: State | None = coder.first_state()
    while state is not None:
        measures = encode_chunk(coder, padded, weights, dtype=dtype, state=state, parts=parts)
        if measures.first_bad_block >= 0:
            raise SourceError(f"NaN or infinity in block {measures.first_bad_block} of the weight")
        totals = PassTotals(state)
        totals.add(measures)
        history.append(totals.result())
        state = coder.next_state(history)
    last = history[-1]
    return EncodedWeight(shape=shape, dtype=dtype, coder=coder, state=last.state, parts=parts), last
