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

from pqweights.codecs.hadamard_trellis import REASONS, TRELLIS, HadamardTrellis
from pqweights.codecs.protocol import Bytes, Codec, Coder, DamagedBlock, Floats, exact_rate
from pqweights.codecs.trellis_tables import decode_tables
from pqweights.common.documents import Document
from pqweights.common.dtypes import FINITE_RANGES, convert, item_bytes
from pqweights.common.strict_json import rounded
from pqweights.errors import RecipeError
from pqweights.kernels import BLOCK_SIZE, trellis
from pqweights.kernels.workers import scratch

# Blocks of a superblock at most.
_MOST = 768
# Of a superblock of zeros, which is a header alone.
SHORTEST = trellis.HEADER_BYTES
# What a scale that is stored as u stands for.
_FACTORS = np.exp2((np.arange(256) - 128) / 16).astype(np.float32)


class Unstated(Document, frozen=True):
    """The state of a weight that has none."""

    @property
    def rescued(self) -> bool:
        """See State."""
        return False

    def to_json(self) -> dict[str, Any]:
        """See State."""
        return {}


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
        """See Coder."""

    def parse_state(self, values: Mapping[str, Any]) -> Unstated:
        """See Coder."""
        return Unstated()


class HadamardTrellisColumns:
    """The codec, with what `Codec` has for finished weights."""

    name = ColumnCoding.codec
    format_version = 4
    suffixes = (TRELLIS, "_lengths", "_row_scales", "_column_scales")
    block_size = BLOCK_SIZE
    state_defaults: Mapping[str, Any] = {}
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
        """See Codec."""
        if tables is not None:
            raise ValueError(f"expected none for {self.name}")
        return self.coder(bits)


Coding = Coder | ColumnCoding  # how a finished weight was encoded
MasterCodec = Codec | HadamardTrellisColumns


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

    def longest(self, superblock: int) -> int:
        """Return the most bytes that a superblock can take: in each step, a lane takes one word at most."""
        return trellis.most_bytes(len(self.columns_of(superblock)))

    def length_problem(self, lengths: npt.NDArray[np.int32], total: int) -> str | None:
        """Say what is wrong with lengths [strips, superblocks] of superblocks that take `total` bytes, if anything."""
        most = np.array([self.longest(number) for number in range(self.superblocks)])
        wrong = (lengths < SHORTEST) | (lengths > most)
        if wrong.any():
            strip, number = (int(place) for place in np.argwhere(wrong)[0])
            return f"expected {SHORTEST} to {most[number]} bytes, found {lengths[strip, number]} at {[strip, number]}"
        found = int(lengths.sum(dtype=np.int64))
        return None if found == total else f"expected lengths whose sum is {total} bytes, found {found}"


def bits_of(cut: ColumnCut, total: int) -> float:
    """Return the bits per weight with everything counted, to seven significant digits, of superblocks of some bytes."""
    stored = total + 4 * cut.strips * cut.superblocks + cut.rows + cut.columns
    return exact_rate(rounded(8 * stored / (cut.rows * cut.columns)))


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

    @property
    def parts(self) -> tuple[npt.NDArray[Any], ...]:
        """The tensors in the order of the suffixes of the codec."""
        return (self.trellis, self.lengths, self.row_scales, self.column_scales)


@dataclass(frozen=True, eq=False, kw_only=True)
class StripPart:
    """Neighbouring superblocks of a strip, as they are stored.

    cut: how the weight is cut
    superblocks: their numbers in the strip
    trellis: their bytes, one after the other
    lengths: how many each has
    row_scales: those of some neighbouring rows
    first_row: the first of these rows, in the strip
    column_scales: those of the columns of the superblocks
    """

    cut: ColumnCut
    superblocks: range
    trellis: Bytes
    lengths: Sequence[int]
    row_scales: Bytes
    first_row: int
    column_scales: Bytes


def decode_strip(part: StripPart, dtype: str, out: Bytes) -> None:
    """Decode the rows of a part into raw bytes of `dtype`, [rows, columns of the superblocks].

    dtype: BF16, F16 or F32

    Raises DamagedBlock, with the number of a superblock among these, if no encoder wrote it.
    """
    size, rows, at, left = item_bytes(dtype), _FACTORS[part.row_scales], 0, 0
    into = out.reshape(len(rows), -1)
    for place, (number, length) in enumerate(zip(part.superblocks, part.lengths, strict=True)):
        blocks = len(part.cut.columns_of(number))
        values = scratch("superblock", blocks * BLOCK_SIZE * 4)
        damaged, reason = trellis.decode(
            part.trellis[at : at + length],
            values,
            "F32",
            cut=trellis.Superblocks(1, blocks, length),
            signed=False,
            tables=decode_tables(),
        )
        if damaged >= 0:
            raise DamagedBlock(place, REASONS[reason])
        mine = values.view(np.float32).reshape(blocks, BLOCK_SIZE)[:, part.first_row : part.first_row + len(rows)]
        with np.errstate(over="ignore"):  # infinities are clamped
            scaled: Floats = mine.T * rows[:, None] * _FACTORS[part.column_scales[left : left + blocks]]
        finite = np.ascontiguousarray(np.clip(scaled, *FINITE_RANGES[dtype])).reshape(-1).view(np.uint8)
        into[:, left * size : (left + blocks) * size] = convert(finite, "F32", dtype).reshape(len(rows), -1)
        at, left = at + length, left + blocks


def decode_columns(codes: ColumnCodes, strips: range, dtype: str) -> Bytes:
    """Return the rows of neighbouring strips as raw bytes of `dtype`: BF16, F16 or F32.

    Raises DamagedBlock, with the number of a superblock in the weight, if no encoder wrote it.
    """
    cut = codes.cut
    ends = np.append(0, np.cumsum(codes.lengths.reshape(-1), dtype=np.int64))
    rows = slice(strips.start * BLOCK_SIZE, strips.stop * BLOCK_SIZE)
    out = np.empty(len(codes.row_scales[rows]) * cut.columns * item_bytes(dtype), dtype=np.uint8)
    whole = BLOCK_SIZE * cut.columns * item_bytes(dtype)
    for place, strip in enumerate(strips):
        first = strip * cut.superblocks
        part = StripPart(
            cut=cut,
            superblocks=range(cut.superblocks),
            trellis=codes.trellis[ends[first] : ends[first + cut.superblocks]],
            lengths=codes.lengths[strip].tolist(),
            row_scales=codes.row_scales[strip * BLOCK_SIZE : (strip + 1) * BLOCK_SIZE],
            first_row=0,
            column_scales=codes.column_scales,
        )
        try:
            decode_strip(part, dtype, out[place * whole : (place + 1) * whole])
        except DamagedBlock as damage:
            raise DamagedBlock(first + damage.block, damage.reason) from None
    return out
