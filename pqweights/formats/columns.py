"""The calibrated trellis: columns of a matrix, coded one after the other, in superblocks of their own lengths.

A weight [N, K] is cut into strips of 128 rows. A strip has a block of 128 weights for each column, which are coded like
those of hadamard-trellis, and rows and columns have scales. So codes can be found column by column, each making up for
the errors of those before it (GPTQ: Frantar et al., arXiv:2210.17323), and bytes go where the outputs depend on them.
docs/format.md, section 10, has the bytes. Codes come from a calibration: here they are described and decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.common.dtypes import item_bytes
from pqweights.common.strict_json import rounded
from pqweights.errors import RecipeError
from pqweights.formats.hadamard_trellis import REASONS, TRELLIS, HadamardTrellis
from pqweights.formats.protocol import Bytes, DamagedBlock, Unstated, exact_rate
from pqweights.formats.trellis_tables import decode_tables
from pqweights.kernels import BLOCK_SIZE, columns
from pqweights.kernels.trellis import HEADER_BYTES

# Blocks of a superblock at most.
_MOST = 768
# Columns of a weight as it is stored: a unit that is decoded at once spans all of them.
MOST_STORED_COLUMNS = 1 << 16
# What a scale that is stored as u stands for.
_FACTORS = np.exp2((np.arange(256) - 128) / 16).astype(np.float32)


class Orientation(Unstated, frozen=True):
    """The state of a weight. transposed: whether it is stored as [..., K, N], its matrices being [N, K]"""

    transposed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the state as manifests store it: keys of Codec.state_defaults, with JSON scalars."""
        return {"transposed": True} if self.transposed else {}


@dataclass(frozen=True)
class ColumnCoding:
    """The codec at the rate of one weight, with what `Coder` has for finished weights. bits: see bits_of"""

    bits: float

    codec = "hadamard-trellis-columns"
    block_size = BLOCK_SIZE
    depends_on_size = True
    distortion = math.inf  # nothing is promised: codes have the least error of outputs, not that of weights
    orthogonal_error = False

    def tables(self) -> None:
        """Return what decoding needs besides parts and state, as JSON for the master; None if it needs nothing."""

    def parse_state(self, values: Mapping[str, Any]) -> Orientation:
        """Parse what State.to_json returns; absent keys have the values of Codec.state_defaults."""
        if values.get("transposed", True) is not True:
            raise ValueError(f"transposed: expected true or nothing, found {values['transposed']!r}")
        return Orientation(transposed="transposed" in values)


class HadamardTrellisColumns:
    """The codec, with what `Codec` has for finished weights."""

    name = ColumnCoding.codec
    suffixes = (TRELLIS, "_lengths", "_row_scales", "_column_scales")
    block_size = BLOCK_SIZE
    state_defaults: Mapping[str, Any] = {"transposed": False}
    description = (
        "Linear layers were calibrated: a text was run through the model, and each column of a weight was encoded such "
        "that it makes up for the errors of those before it in the outputs of the layer. Rows and columns are scaled "
        "by how much the outputs depend on them. Blocks of 128 weights of a column are rotated by the Walsh-Hadamard "
        "matrix, become integers by trellis-coded quantization, and are packed by an entropy coder."
    )
    papers = (
        *HadamardTrellis.papers,
        "Frantar et al., *GPTQ*, [arXiv:2210.17323](https://arxiv.org/abs/2210.17323): columns that make up for "
        "errors.",
    )

    def coder(self, bits: float) -> ColumnCoding:
        """Return the codec at the rate of a weight. Raises RecipeError for one that no weight has."""
        if not 0 < bits < math.inf:
            raise RecipeError(f"expected the bits per weight that {self.name} takes, found {bits}")
        return ColumnCoding(exact_rate(bits))

    def coder_from_tables(self, bits: float, tables: Any) -> ColumnCoding:
        """Return the coder of a rate, with the tables of a master."""
        if tables is not None:
            raise ValueError(f"expected none for {self.name}")
        return self.coder(bits)


class ColumnCut(NamedTuple):
    """How a weight is cut: a matrix [rows, columns], or each one of a stack.

    strips: of 128 rows, the last of which may have fewer
    superblocks: of a strip
    blocks: the columns of a superblock; the last one of a strip has the rest
    stack: (), or the number of matrices
    transposed: whether the weight is stored as [..., columns, rows], and its superblocks in the order of that
    """

    rows: int
    columns: int
    strips: int
    superblocks: int
    blocks: int
    stack: tuple[int, ...] = ()
    transposed: bool = False

    @staticmethod
    def of(shape: Sequence[int], *, transposed: bool = False) -> ColumnCut:
        """Return how a weight of a shape [rows, columns] or [matrices, rows, columns], at least 1 each, is cut.

        transposed: whether the last two are columns and rows
        """
        *stack, rows, columns = shape
        if transposed:
            rows, columns = columns, rows
        blocks = -(-columns // -(-columns // _MOST))
        strips, superblocks = -(-rows // BLOCK_SIZE), -(-columns // blocks)
        return ColumnCut(rows, columns, strips, superblocks, blocks, tuple(stack), transposed)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return (*self.stack, *self._stored(self.rows, self.columns))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The shape of the lengths of superblocks."""
        return (*self.stack, *self._stored(self.strips, self.superblocks))

    def _stored(self, along_rows: int, along_columns: int) -> tuple[int, int]:
        return (along_columns, along_rows) if self.transposed else (along_rows, along_columns)

    def columns_of(self, superblock: int) -> range:
        """Return the columns of a superblock of each strip."""
        return range(superblock * self.blocks, min((superblock + 1) * self.blocks, self.columns))

    def length_problem(self, lengths: npt.NDArray[np.int32], total: int) -> str | None:
        """Say what is wrong with lengths, [`self.lengths`], of superblocks that take `total` bytes, if anything."""
        most = np.array([columns.most_bytes(len(self.columns_of(number))) for number in range(self.superblocks)])
        most = np.broadcast_to(most[:, None] if self.transposed else most, self.lengths)
        wrong = (lengths < HEADER_BYTES) | (lengths > most)
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0].tolist())
            return f"expected {HEADER_BYTES} to {most[place]} bytes, found {lengths[place]} at {list(place)}"
        found = int(lengths.sum(dtype=np.int64))
        return None if found == total else f"expected lengths whose sum is {total} bytes, found {found}"


def bits_of(cut: ColumnCut, total: int) -> float:
    """Return the bits per weight with everything counted, to seven significant digits, of superblocks of some bytes."""
    stored = total + math.prod(cut.stack) * (4 * cut.strips * cut.superblocks + cut.rows + cut.columns)
    return exact_rate(rounded(8 * stored / math.prod(cut.shape)))


@dataclass(frozen=True, eq=False)
class ColumnCodes:
    """The stored tensors of a weight of matrices [N, K].

    trellis: u8 [bytes], the superblocks in the order of their lengths
    lengths: i32 [strips, superblocks of a strip], [superblocks, strips] if it is transposed; their bytes
    row_scales, column_scales: u8 [N] and u8 [K]; u stands for the factor 2**((u - 128) / 16)
    transposed: see ColumnCut

    Those of a stack have one dimension more in front, all but the trellis.
    """

    trellis: Bytes
    lengths: npt.NDArray[np.int32]
    row_scales: Bytes
    column_scales: Bytes
    transposed: bool = False

    @property
    def cut(self) -> ColumnCut:
        """How the weight is cut."""
        *stack, rows = self.row_scales.shape
        cut = ColumnCut.of((*stack, rows, self.column_scales.shape[-1]))
        return cut._replace(transposed=self.transposed)

    @property
    def parts(self) -> tuple[npt.NDArray[Any], ...]:
        """The tensors in the order of the suffixes of the codec."""
        return (self.trellis, self.lengths, self.row_scales, self.column_scales)

    @property
    def T(self) -> ColumnCodes:  # as numpy calls it
        """The same of a matrix that is stored transposed."""
        pieces = np.split(self.trellis, np.cumsum(self.lengths, dtype=np.int64)[:-1])
        order = np.arange(len(pieces)).reshape(self.lengths.shape).T
        trellis = np.concatenate([pieces[number] for number in order.reshape(-1)])
        return ColumnCodes(trellis, self.lengths.T.copy(), self.row_scales, self.column_scales, not self.transposed)

    @staticmethod
    def stacked(matrices: Sequence[ColumnCodes]) -> ColumnCodes:
        """Return those of a stack of matrices of the same shape and orientation."""
        return ColumnCodes(
            np.concatenate([matrix.trellis for matrix in matrices]),
            np.stack([matrix.lengths for matrix in matrices]),
            np.stack([matrix.row_scales for matrix in matrices]),
            np.stack([matrix.column_scales for matrix in matrices]),
            matrices[0].transposed,
        )


def decode_codes(codes: ColumnCodes, blocks: int, dtype: str, out: Bytes) -> None:
    """Decode neighbouring strips, or neighbouring superblocks of one, into raw bytes of `dtype`, [rows, columns].

    codes: their part of the stored tensors; the last strip may have fewer rows
    blocks: the columns of each superblock but the last
    dtype: BF16, F16 or F32

    Raises DamagedBlock, with the number of a superblock among these, if no encoder wrote it.
    """
    damaged, reason = columns.decode(
        codes.trellis,
        codes.lengths,
        out,
        dtype,
        blocks=blocks,
        row_factors=_FACTORS[codes.row_scales],
        column_factors=_FACTORS[codes.column_scales],
        tables=decode_tables(),
    )
    if damaged >= 0:
        raise DamagedBlock(damaged, REASONS[reason])


def decode_columns(codes: ColumnCodes, strips: range, dtype: str) -> Bytes:
    """Return the rows of neighbouring strips as raw bytes of `dtype`: BF16, F16 or F32.

    Raises DamagedBlock, with the number of a superblock among those of the strips, if no encoder wrote it.
    """
    cut = codes.cut
    ends = np.append(0, np.cumsum(codes.lengths, dtype=np.int64))
    part = ColumnCodes(
        codes.trellis[ends[strips.start * cut.superblocks] : ends[strips.stop * cut.superblocks]],
        codes.lengths[strips.start : strips.stop],
        codes.row_scales[strips.start * BLOCK_SIZE : strips.stop * BLOCK_SIZE],
        codes.column_scales,
    )
    out = np.empty(len(part.row_scales) * cut.columns * item_bytes(dtype), dtype=np.uint8)
    decode_codes(part, cut.blocks, dtype, out)
    return out
