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
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from pqweights.common.strict_json import rounded
from pqweights.formats.master import Bytes, DamagedBlock, MasterFormat, exact_rate
from pqweights.formats.trellis import REASONS, TRELLIS, Trellis
from pqweights.formats.trellis_tables import decode_tables
from pqweights.kernels import BLOCK_SIZE, columns
from pqweights.kernels.trellis import HEADER_BYTES

# Blocks of a superblock at most.
_MOST = 768
# Columns of a weight as it is stored: a unit that is decoded at once spans all of them.
MOST_STORED_COLUMNS = 1 << 16
# What a scale that is stored as u stands for.
_FACTORS = np.exp2((np.arange(256) - 128) / 16).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class TrellisColumns(MasterFormat):
    """Codes of a calibration. Nothing is promised: they have the least error of outputs, not that of weights.

    bits: see bits_of
    transposed: whether the weight is stored as [..., K, N], its matrices being [N, K]
    """

    codec: ClassVar[str] = "hadamard-trellis-columns"
    suffixes: ClassVar[tuple[str, ...]] = (TRELLIS, "_lengths", "_row_scales", "_column_scales")
    settings: ClassVar[Mapping[str, Any]] = {"transposed": False}
    description: ClassVar[str] = (
        "Linear layers were calibrated: a text was run through the model, and each column of a weight was encoded such "
        "that it makes up for the errors of those before it in the outputs of the layer. Rows and columns are scaled "
        "by how much the outputs depend on them. Blocks of 128 weights of a column are rotated by the Walsh-Hadamard "
        "matrix, become integers by trellis-coded quantization, and are packed by an entropy coder."
    )
    papers: ClassVar[Sequence[str]] = (
        *Trellis.papers,
        "Frantar et al., *GPTQ*, [arXiv:2210.17323](https://arxiv.org/abs/2210.17323): columns that make up for "
        "errors.",
    )

    transposed: bool = False

    def with_settings(self, values: Mapping[str, Any]) -> Self:
        """Return the format of a weight that is transposed, which is stated, or not, which is not stated."""
        if values.get("transposed", True) is not True:
            raise ValueError(f"transposed: expected true or nothing, found {values['transposed']!r}")
        return super().with_settings(values)


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
            index = tuple(np.argwhere(wrong)[0].tolist())
            return f"expected {HEADER_BYTES} to {most[index]} bytes, found {lengths[index]} at {list(index)}"
        stated = int(lengths.sum(dtype=np.int64))
        return None if stated == total else f"expected lengths whose sum is {total} bytes, found {stated}"


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
