"""One weight: the passes over its blocks, and what is wrong with blocks that cannot be decoded.

`encode_weight` and the streaming jobs (convert/jobs.py) make the same passes with the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pqweights.common.dtypes import item_bytes, to_float32
from pqweights.errors import MasterError, SourceError
from pqweights.formats.master import BlockFormat, Bytes, DamagedBlock, Pass
from pqweights.kernels import Measures


def encode_chunk(format: BlockFormat, values: Bytes, weights: int, *, dtype: str, parts: Sequence[Bytes]) -> Measures:
    """Encode the next blocks of a weight; only the last block may hold padding, whose error does not count.

    format: how, sized for the weight
    values: raw bytes, [blocks * block size * item size]; those of the padding are set to zero
    weights: how many of the values are weights; the rest is padding
    dtype: BF16, F16 or F32, the dtype of `values`
    parts: the arrays to write, [blocks, bytes per block] each
    """
    size = item_bytes(dtype)
    values[weights * size :] = 0
    measures = format.encode(values, parts, dtype=dtype)
    used = weights % format.block_size
    if used and measures.first_bad_block < 0:
        decoded = np.empty(format.block_size * 4, dtype=np.uint8)
        format.decode([part[-1:] for part in parts], decoded, dtype="F32")
        last = to_float32(values[-format.block_size * size :], dtype)[:used].astype(np.float64)
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


def encode_weight(
    values: Bytes, *, dtype: str, shape: tuple[int, ...], format: BlockFormat
) -> tuple[tuple[Bytes, ...], Pass]:
    """Encode a weight that is in memory.

    values: the weight as raw bytes, row-major
    dtype: BF16, F16 or F32
    shape: the shape of the weight
    format: that of the first pass; it is sized here

    Returns the stored tensors, [blocks, bytes per block] u8 each, and the last pass, whose format decodes them.

    Raises SourceError if the weight holds a NaN or an infinity.
    """
    weights = math.prod(shape)
    format = format.sized(weights)
    blocks = block_count(weights, format.block_size)
    padded = np.empty(blocks * format.block_size * item_bytes(dtype), dtype=np.uint8)
    padded[: len(values)] = values
    parts = tuple(np.empty((blocks, part.bytes_per_block), dtype=np.uint8) for part in format.parts)
    passes: list[Pass] = []
    following: BlockFormat | None = format
    while following is not None:
        passes.append(Pass(following))
        measures = encode_chunk(following, padded, weights, dtype=dtype, parts=parts)
        if measures.first_bad_block >= 0:
            raise SourceError(f"NaN or infinity in block {measures.first_bad_block} of the weight")
        passes[-1].add(measures)
        following = following.after(passes)
    return parts, passes[-1]


def decode_weight(format: BlockFormat, parts: Sequence[Bytes], weights: int, dtype: str) -> Bytes:
    """Return the raw bytes of a weight of so many elements in `dtype`: BF16, F16 or F32."""
    values = np.empty(len(parts[0]) * format.block_size * item_bytes(dtype), dtype=np.uint8)
    format.decode(parts, values, dtype=dtype)
    return values[: weights * item_bytes(dtype)]
