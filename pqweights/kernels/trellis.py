"""The trellis codec's kernels, called with arrays: superblocks of rotated blocks to bytes of a given number, and back.

They run on the CPU alone. Plans import this module, so its functions import what loads machine code. docs/format.md
has the bytes and the decoder's arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.dtypes import item_bytes
from pqweights.kernels import BLOCK_SIZE, ORTHONORMAL, SIGNS, VALUE_DTYPES
from pqweights.kernels.trellis_codes import TRELLISES
from pqweights.kernels.workers import scratch

# The numbers of states for which there is a search, ascending.
STATES = (8, 64, 256)
CLASSES = 256
# Blocks of a superblock for which the encoder has room, and the bytes with which one begins.
MOST_BLOCKS, HEADER_BYTES = 1024, 7
_LANES = 16
# Words that the decoder may read beyond a damaged stream.
_OVERRUN = 2 * 129 * _LANES

_MINUS_ONE = np.array([-1], dtype=np.float32)
# By state bits; 0 where there is no such trellis.
_TRELLISES = np.array([TRELLISES.get(bits, (0, 0)) for bits in range(16)], dtype=np.int32)


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeTables:
    """What the decoder looks up.

    entries: u32 [tables, 2, 4096]; see codecs.trellis_tables.decode_table
    tables: i32 [256], the table of each class
    widths: i32 [tables, 2]: the low bits of k that buckets of the core, and of the tails, leave
    gains: f64 [256]: what a number of each class is multiplied by, besides the step
    """

    entries: npt.NDArray[np.uint32]
    tables: npt.NDArray[np.int32]
    widths: npt.NDArray[np.int32]
    gains: npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class EncodeModel:
    """What the encoder knows of each class; see trellis_step.ClassModel."""

    limits: npt.NDArray[np.float64]
    bits: npt.NDArray[np.float64]
    slopes: npt.NDArray[np.float64]
    down: npt.NDArray[np.float64]
    up: npt.NDArray[np.float64]
    reach: npt.NDArray[np.int32]
    zero: npt.NDArray[np.int32]
    logarithms: npt.NDArray[np.float64]
    entries: npt.NDArray[np.uint32]


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
    model: EncodeModel,
    rows: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], int]:
    """Encode superblocks.

    values: the weights as raw bytes of `dtype` (BF16, F16 or F32)
    states: one of STATES
    signed: whether coordinates are multiplied by SIGNS before the rotation
    rows: out: u8 [superblocks, stride]

    Returns the sums of squares of the weights and of the errors, [superblocks] f64 each, and the first superblock that
    holds a NaN or an infinity, or -1. Raises ValueError for arrays or superblocks of a size that is none.
    """
    from pqweights.kernels.cpu import address, run

    _check(cut)
    energies, errors = np.empty((2, cut.number), dtype=np.float64)
    bad = np.empty(1, dtype=np.int64)
    tiles = -(-cut.blocks // _LANES)
    floats = scratch("trellis floats", tiles * (BLOCK_SIZE + 5) * _LANES * 4)
    words = scratch("trellis words", tiles * BLOCK_SIZE * (states + 36) * 2)
    run(
        f"encode_trellis_{states}",
        address(values, np.uint8, cut.number * cut.blocks * BLOCK_SIZE * item_bytes(dtype)),
        _MINUS_ONE.ctypes.data,
        SIGNS.ctypes.data,
        address(model.limits, np.float64, CLASSES + 1),
        *(address(each, np.float64, CLASSES) for each in (model.bits, model.slopes, model.down, model.up)),
        address(model.reach, np.int32, CLASSES),
        address(model.zero, np.int32, 2 * CLASSES),
        address(model.logarithms, np.float64, 257),
        address(model.entries, np.uint32, len(model.entries)),
        address(rows, np.uint8, cut.number * cut.stride, written=True),
        energies.ctypes.data,
        errors.ctypes.data,
        bad.ctypes.data,
        floats.ctypes.data,
        words.ctypes.data,
        *(cut.number, cut.blocks, cut.stride, len(model.entries), VALUE_DTYPES[dtype], signed),
    )
    return energies, errors, int(bad[0])


def decode(
    rows: npt.NDArray[np.uint8],
    values: npt.NDArray[np.uint8],
    dtype: str,
    *,
    cut: Superblocks,
    signed: bool,
    rotate: bool,
    tables: DecodeTables,
) -> tuple[int, int]:
    """Decode superblocks into raw bytes of `dtype`, rotated back or not.

    Returns the first superblock that is not sound, or -1, and what is wrong with it: 1 the header, 2 what follows. The
    weights of such a superblock mean nothing. Raises ValueError for arrays or superblocks of a size that is none.
    """
    from pqweights.kernels.cpu import address, run

    if cut.number and cut.stride < HEADER_BYTES:
        return 0, 1
    _check(cut)
    status = np.empty(2, dtype=np.int64)
    gains = tables.gains * ORTHONORMAL if rotate else tables.gains
    run(
        "decode_trellis",
        address(rows, np.uint8, cut.number * cut.stride),
        address(tables.entries, np.uint32, tables.entries.size),
        _MINUS_ONE.ctypes.data,
        SIGNS.ctypes.data,
        address(tables.tables, np.int32, CLASSES),
        address(tables.widths, np.int32, 2 * len(tables.entries)),
        address(gains, np.float64, CLASSES),
        _TRELLISES.ctypes.data,
        address(values, np.uint8, cut.number * cut.blocks * BLOCK_SIZE * item_bytes(dtype), written=True),
        scratch("trellis stream", 2 * (cut.stride // 2 + _OVERRUN) * 2).ctypes.data,
        status.ctypes.data,
        *(cut.number, cut.blocks, cut.stride, VALUE_DTYPES[dtype], signed, rotate),
    )
    return int(status[0]), int(status[1])


def _check(cut: Superblocks) -> None:
    """Raise ValueError for superblocks for which the kernels have no room."""
    if cut.number < 0 or not 1 <= cut.blocks <= MOST_BLOCKS or cut.stride < HEADER_BYTES:
        raise ValueError(
            f"expected superblocks of 1 to {MOST_BLOCKS} blocks in at least {HEADER_BYTES} bytes, found {cut.number} "
            f"of {cut.blocks} blocks in {cut.stride} bytes"
        )
