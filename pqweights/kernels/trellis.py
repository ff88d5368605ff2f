"""The trellis codec's kernels, called with arrays: superblocks of rotated blocks to bytes of a given number, and back.

They run on the CPU alone. docs/format.md has the bytes and the decoder's arithmetic; native/trellis_decoding.cpp and
native/trellis_encoding.cpp are the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.common.dtypes import item_bytes
from pqweights.kernels import BLOCK_SIZE, ORTHONORMAL, SIGNS, VALUE_DTYPES, Measures, native

# The numbers of states for which there is a search, ascending.
STATES = (8, 64, 256)
CLASSES = 256
# Blocks of a superblock for which the encoder has room, and the bytes with which one begins.
MOST_BLOCKS, HEADER_BYTES = 1024, 7
_LANES = 16
# Words of a stream that a tile of sixteen blocks takes at most.
_TILE_WORDS = (BLOCK_SIZE + 1) * _LANES


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeTables:
    """What the decoder looks up.

    entries: u32 [tables, 2, 4096]; see formats.trellis_tables
    tables: i32 [256], the table of each class
    widths: i32 [tables, 2]: the low bits of k that buckets of the core, and of the tails, leave
    gains: f64 [256]: what a number of each class is multiplied by, besides the step
    """

    entries: npt.NDArray[np.uint32]
    tables: npt.NDArray[np.int32]
    widths: npt.NDArray[np.int32]
    gains: npt.NDArray[np.float64]

    def arrays(self) -> tuple[native.Array, ...]:
        """Return them as kernels take them, which rotate by a matrix that is not normalised."""
        return (
            native.array(self.entries, np.uint32, self.entries.size),
            native.array(self.tables, np.int32, CLASSES),
            native.array(self.widths, np.int32, 2 * len(self.entries)),
            native.array(self.gains * ORTHONORMAL, np.float64, CLASSES),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class EncodeModel:
    """What the encoder knows of each class; see ClassModel in native/trellis_step.hpp."""

    limits: npt.NDArray[np.float64]
    bits: npt.NDArray[np.float64]
    slopes: npt.NDArray[np.float64]
    down: npt.NDArray[np.float64]
    up: npt.NDArray[np.float64]
    reach: npt.NDArray[np.int32]
    zero: npt.NDArray[np.int32]
    logarithms: npt.NDArray[np.float64]
    entries: npt.NDArray[np.uint32]
    pace: float


class Superblocks(NamedTuple):
    """How weights are cut: `number` superblocks of `blocks` blocks of 128 weights each, in `stride` bytes each."""

    number: int
    blocks: int
    stride: int


def encode(
    values: npt.NDArray[np.uint8],
    dtype: str,
    *,
    cut: Superblocks,
    states: int,
    signed: bool,
    gained: bool,
    model: EncodeModel,
    rows: npt.NDArray[np.uint8],
) -> Measures:
    """Encode superblocks.

    values: the weights as raw bytes of `dtype` (BF16, F16 or F32)
    states: one of STATES
    signed: whether coordinates are multiplied by SIGNS before the rotation
    gained: whether steps are enlarged until the product of decoded weights with the weights is the energy of these
    rows: out: u8 [superblocks, stride]

    Raises ValueError for arrays, superblocks or states of a number that is none.
    """
    _check(cut)
    if states not in STATES:
        raise ValueError(f"expected one of {STATES} states, found {states}")
    energies, errors = np.empty((2, cut.number), dtype=np.float64)
    bad = np.empty(1, dtype=np.int64)
    tiles = -(-cut.blocks // _LANES)
    numbers = tiles * _LANES * BLOCK_SIZE
    native.call(
        "encode_trellis",
        native.array(values, np.uint8, cut.number * cut.blocks * BLOCK_SIZE * item_bytes(dtype)),
        native.array(SIGNS, np.float32, BLOCK_SIZE) if signed else None,
        native.array(model.limits, np.float64, CLASSES + 1),
        *(native.array(each, np.float64, CLASSES) for each in (model.bits, model.slopes, model.down, model.up)),
        native.array(model.reach, np.int32, CLASSES),
        native.array(model.zero, np.int32, 2 * CLASSES),
        native.array(model.logarithms, np.float64, 257),
        native.array(model.entries, np.uint32, len(model.entries)),
        model.pace,
        int(gained),
        native.array(rows, np.uint8, cut.number * cut.stride, written=True),
        *(native.array(sums, np.float64, cut.number, written=True) for sums in (energies, errors)),
        native.array(bad, np.int64, 1, written=True),
        native.room("trellis weights", np.float32, numbers),
        native.room("trellis decisions", np.uint16, tiles * BLOCK_SIZE * states),
        native.room("trellis numbers", np.int16, numbers),
        native.room("trellis stream", np.uint16, tiles * _TILE_WORDS + _LANES),
        *(cut.number, cut.blocks, cut.stride, states, VALUE_DTYPES[dtype]),
    )
    return Measures(energies, errors, int(bad[0]))


def decode(
    rows: npt.NDArray[np.uint8],
    values: npt.NDArray[np.uint8],
    dtype: str,
    *,
    cut: Superblocks,
    signed: bool,
    tables: DecodeTables,
) -> tuple[int, int]:
    """Decode superblocks into raw bytes of `dtype`, rotated back.

    Returns the first superblock that is not sound, or -1, and what is wrong with it: 1 the header, 2 what follows. The
    weights of such a superblock mean nothing. Raises ValueError for arrays or superblocks of a size that is none.
    """
    if cut.number and cut.stride < HEADER_BYTES:
        return 0, 1
    _check(cut)
    status = np.empty(2, dtype=np.int64)
    native.call(
        "decode_trellis",
        native.array(rows, np.uint8, cut.number * cut.stride),
        *tables.arrays(),
        native.array(SIGNS, np.float32, BLOCK_SIZE) if signed else None,
        native.array(values, np.uint8, cut.number * cut.blocks * BLOCK_SIZE * item_bytes(dtype), written=True),
        native.room("trellis stream", np.uint16, 2 * (cut.stride // 2 + _TILE_WORDS + _LANES)),
        native.array(status, np.int64, 2, written=True),
        *(cut.number, cut.blocks, cut.stride, VALUE_DTYPES[dtype]),
    )
    return int(status[0]), int(status[1])


def _check(cut: Superblocks) -> None:
    """Raise ValueError for superblocks for which the kernels have no room."""
    if cut.number < 0 or not 1 <= cut.blocks <= MOST_BLOCKS or cut.stride < HEADER_BYTES:
        raise ValueError(
            f"expected superblocks of 1 to {MOST_BLOCKS} blocks in at least {HEADER_BYTES} bytes, found {cut.number} "
            f"of {cut.blocks} blocks in {cut.stride} bytes"
        )
