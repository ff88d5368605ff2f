"""The kernels of the codec hadamard-trellis-columns, called with arrays: groups of 2048 rows to bytes, and back.

Groups that are searched together go on run by run: threads share out what the errors of the columns before a run add to
it, which is nearly all of the work, and then the groups.

They run on the CPU alone. docs/format.md, section 10, has the bytes and the decoder's arithmetic;
native/columns_*.cpp are the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pqweights.common.dtypes import item_bytes
from pqweights.kernels import BLOCK_SIZE, VALUE_DTYPES, native
from pqweights.kernels.trellis import CLASSES, HEADER_BYTES, MOST_BLOCKS, STATES, DecodeTables, EncodeModel
from pqweights.kernels.workers import scratch

Floats = npt.NDArray[np.float32]

# The strips of a group, one in each lane, and its rows.
STRIPS = 16
GROUP_ROWS = STRIPS * BLOCK_SIZE
# Rows of a tile, columns of a run, and what a matrix of feedback has more rows than columns, as in native/.
_TILE, _RUN, _SPARE_ROWS = 64, 64, 3
_GROUP_TILES = GROUP_ROWS // _TILE
# Words of a stream that a tile of sixteen blocks takes at most.
_TILE_WORDS = (BLOCK_SIZE + 1) * STRIPS


def most_bytes(blocks: int) -> int:
    """Return the most bytes that a superblock of some blocks takes."""
    return HEADER_BYTES + CLASSES + 4 * STRIPS + 2 * -(-blocks // STRIPS) * _TILE_WORDS


def load(rows: Floats, row_factors: Floats, column_factors: Floats, *, threads: int = 1) -> Floats:
    """Return rows [rows, K], multiplied by factors [rows] and [K] and rotated, in groups: f32 [groups, 32, K, 64].

    Raises ValueError for arrays that do not fit together.
    """
    count, columns = rows.shape
    if count < 1 or columns < 1:
        raise ValueError(f"expected rows of columns, found {count} of {columns}")
    groups = np.empty((-(-count // GROUP_ROWS), _GROUP_TILES, columns, _TILE), dtype=np.float32)
    native.call(
        "load_columns",
        native.counter(),
        native.array(rows, np.float32, count * columns),
        native.array(row_factors, np.float32, count),
        native.array(column_factors, np.float32, columns),
        native.array(groups, np.float32, groups.size, written=True),
        *(count, columns),
        threads=threads,
    )
    return groups


def feedback_room(columns: int) -> Floats:
    """Return room for a matrix of feedback: [K + 3, K] f32, of which the last rows mean nothing."""
    room = np.empty((columns + _SPARE_ROWS, columns), dtype=np.float32)
    room[columns:] = 0
    return room


@dataclass(frozen=True, eq=False, kw_only=True)
class ColumnNumbers:
    """The numbers that a search chose for a superblock of each strip of a group.

    numbers: i16 [blocks, 128, 16]
    classes: u8 [blocks, 16]
    squares: f32 [2, 128, 16]: for each row of each strip the sum of the squared errors of its weights, times those of
        the columns, and of the squared errors of their targets
    """

    numbers: npt.NDArray[np.int16]
    classes: npt.NDArray[np.uint8]
    squares: Floats


def search(
    groups: Floats,
    columns: range,
    feedback: Floats,
    *,
    weights: Floats,
    model: EncodeModel,
    states: int,
    step: float,
    threads: int = 1,
) -> list[ColumnNumbers]:
    """Find the numbers of one superblock of each strip of groups, after those of the columns before it.

    groups: as of `load`; the errors take the place of the columns
    columns: those of the superblock
    feedback: as of `feedback_room`; row k has by what the error of each column before k is multiplied before it is
        added to column k, which gives the target
    weights: f32 [columns, 2], of the squared errors of the weights of each column, and of those of its targets
    states: one of STATES
    step: of the coordinates, from 1 to 2

    Raises ValueError for arrays that do not fit together, too many columns, or states or a step of another number.
    """
    number, _, size, _ = groups.shape
    count = len(columns)
    if states not in STATES or not 1 <= step <= 2:
        raise ValueError(f"expected one of {STATES} states and a step from 1 to 2, found {states} and {step}")
    if not 0 <= columns.start < columns.stop <= size or columns.step != 1 or count > MOST_BLOCKS:
        raise ValueError(f"expected up to {MOST_BLOCKS} of {size} columns, found {columns}")
    numbers = np.empty((number, count, BLOCK_SIZE, STRIPS), dtype=np.int16)
    classes = np.empty((number, count, STRIPS), dtype=np.uint8)
    squares = np.zeros((number, 2, BLOCK_SIZE, STRIPS), dtype=np.float32)
    starts = np.zeros((number, STRIPS, STRIPS), dtype=np.int32)
    fed = native.array(feedback, np.float32, (size + _SPARE_ROWS) * size)
    errors = native.array(groups, np.float32, number * GROUP_ROWS * size)
    sums = native.room("columns sums", np.float32, number * GROUP_ROWS * _RUN)
    searched = (
        fed,
        native.array(groups, np.float32, number * GROUP_ROWS * size, written=True),
        replace(sums, kind="r f4"),
        native.array(weights, np.float32, 2 * count),
        native.array(model.limits, np.float64, CLASSES + 1),
        *(native.array(factors, np.float64, CLASSES) for factors in (model.down, model.up)),
        native.array(model.reach, np.int32, CLASSES),
        native.array(numbers, np.int16, numbers.size, written=True),
        native.array(classes, np.uint8, classes.size, written=True),
        native.array(squares, np.float32, squares.size, written=True),
        native.array(starts, np.int32, starts.size, written=True),
        native.room("columns decisions", np.uint16, number * BLOCK_SIZE * states),
    )
    for begin in range(0, count, _RUN):
        run = (number, size, columns.start + begin, min(_RUN, count - begin))
        native.call("feed_back_columns", native.counter(), fed, errors, sums, *run, threads=threads)
        own = (*run, begin, count, states, step)
        native.call("search_columns", native.counter(), *searched, *own, threads=min(threads, number))
    return [ColumnNumbers(numbers=n, classes=c, squares=s) for n, c, s in zip(numbers, classes, squares, strict=True)]


def pack(
    chosen: ColumnNumbers, *, strips: int, model: EncodeModel, states: int, step: float
) -> list[npt.NDArray[np.uint8]]:
    """Return the bytes of the superblock of each of the first `strips` strips.

    states: of the trellis with which the numbers were found
    step: that is stored

    Raises ValueError for arrays that do not fit together.
    """
    blocks = len(chosen.classes)
    if not 1 <= blocks <= MOST_BLOCKS or not 0 <= strips <= STRIPS or states not in STATES:
        raise ValueError(f"expected up to {MOST_BLOCKS} blocks of up to {STRIPS} strips, found {blocks} of {strips}")
    stride = most_bytes(blocks)
    rows = scratch("columns packed", STRIPS * stride).reshape(STRIPS, stride)
    lengths = np.empty(STRIPS, dtype=np.int32)
    native.call(
        "pack_columns",
        native.array(chosen.numbers, np.int16, blocks * GROUP_ROWS),
        native.array(chosen.classes, np.uint8, blocks * STRIPS),
        native.array(model.zero, np.int32, 2 * CLASSES),
        native.array(model.entries, np.uint32, len(model.entries)),
        native.array(rows, np.uint8, rows.size, written=True),
        native.array(lengths, np.int32, STRIPS, written=True),
        native.room("columns tile", np.int16, STRIPS * GROUP_ROWS),
        native.room("columns words", np.uint16, STRIPS * (-(-blocks // STRIPS) * _TILE_WORDS + STRIPS)),
        *(blocks, stride, states, step),
    )
    return [row[:length].copy() for row, length in zip(rows[:strips], lengths, strict=False)]


def decode(
    superblocks: npt.NDArray[np.uint8],
    lengths: npt.NDArray[np.int32],
    values: npt.NDArray[np.uint8],
    dtype: str,
    *,
    blocks: int,
    row_factors: Floats,
    column_factors: Floats,
    tables: DecodeTables,
) -> tuple[int, int]:
    """Decode neighbouring strips into raw bytes of `dtype`, [rows, K].

    superblocks: their bytes, one superblock after the other
    lengths: i32 [strips, superblocks of a strip], their bytes
    dtype: BF16, F16 or F32
    blocks: of each superblock of a strip but the last, which has the rest of the columns
    row_factors, column_factors: f32 [rows] and [K]

    Returns the first superblock that is not sound, or -1, and what is wrong with it: 1 the header, 2 what follows. The
    weights of such a superblock mean nothing. Raises ValueError for arrays that do not fit together.
    """
    strips, count = lengths.shape
    rows, columns = len(row_factors), len(column_factors)
    fits = -(-rows // BLOCK_SIZE) == strips and 1 <= blocks <= MOST_BLOCKS and -(-columns // blocks) == count
    ends = np.cumsum(lengths, dtype=np.int64)
    if not fits or lengths.min(initial=HEADER_BYTES) < HEADER_BYTES or ends[-1] != len(superblocks):
        raise ValueError(
            f"expected {HEADER_BYTES} bytes or more for each superblock of the strips of {rows} rows and {columns} "
            f"columns, {blocks} of which are in one, found {strips} x {count} lengths of {len(superblocks)} bytes"
        )
    longest = int(lengths.max())
    status = np.empty(2, dtype=np.int64)
    native.call(
        "decode_columns",
        native.array(superblocks, np.uint8, len(superblocks)),
        native.array(ends - lengths.reshape(-1), np.int64, strips * count),
        native.array(lengths, np.int32, strips * count),
        *tables.arrays(),
        native.array(row_factors, np.float32, rows),
        native.array(column_factors, np.float32, columns),
        native.array(values, np.uint8, rows * columns * item_bytes(dtype), written=True),
        native.room("columns streams", np.uint16, 2 * (longest // 2 + _TILE_WORDS + STRIPS)),
        native.array(status, np.int64, 2, written=True),
        *(strips, count, blocks, rows, columns, longest, VALUE_DTYPES[dtype]),
    )
    return int(status[0]), int(status[1])
