"""The stored tensors of weights of the codec hadamard-trellis-columns, and how a weight is cut.

A weight [N, K] is cut into strips of 128 rows. A strip has a block of 128 weights for each column, which are coded like
those of hadamard-trellis, and rows and columns have scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.codecs.protocol import Bytes
from pqweights.kernels import BLOCK_SIZE

# Blocks of a superblock at most.
_MOST = 768


class ColumnCut(NamedTuple):
    """How a weight [rows, columns] is cut.

    strips: of 128 rows, the last of which may have fewer
    superblocks: of a strip
    blocks: the columns of a superblock; the last one of a strip has the rest
    """

    rows: int
    columns: int
    strips: int
    superblocks: int
    blocks: int

    @staticmethod
    def of(shape: Sequence[int]) -> ColumnCut:
        """Return how a weight of a shape [rows, columns], at least 1 each, is cut."""
        rows, columns = shape
        blocks = -(-columns // -(-columns // _MOST))
        return ColumnCut(rows, columns, -(-rows // BLOCK_SIZE), -(-columns // blocks), blocks)

    def columns_of(self, superblock: int) -> range:
        """Return the columns of a superblock of each strip."""
        return range(superblock * self.blocks, min((superblock + 1) * self.blocks, self.columns))


@dataclass(frozen=True, eq=False)
class ColumnCodes:
    """The stored tensors of a weight [N, K].

    trellis: u8 [bytes], the superblocks, strip by strip
    lengths: i32 [strips, superblocks of a strip], their bytes
    row_scales, column_scales: u8 [N] and u8 [K]; u stands for the factor 2**((u - 128) / 16)
    """

    trellis: Bytes
    lengths: npt.NDArray[np.int32]
    row_scales: Bytes
    column_scales: Bytes

    @property
    def cut(self) -> ColumnCut:
        """How the weight is cut."""
        return ColumnCut.of((len(self.row_scales), len(self.column_scales)))
