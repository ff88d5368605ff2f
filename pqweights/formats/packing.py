"""How the numbers of a weight lie in stored tensors: the packings of other tools and runtimes, with their inverses.

A weight is one matrix [rows, columns] or several of them. Each weight has a code; weights in a tile of some rows and
columns share a scale, and perhaps a zero (the code that stands for 0) and an offset. A `StoredPart` is a stored tensor
of some of these numbers, a layout the tuple of all parts: with it weights are stored, and with it sources are read. The
layouts are in the files of the formats: integer_groups.py, fp8.py, microscaling.py, gguf_blocks.py, tables.py, mlx.py
and torchao.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import TensorSpec, aligned, byte_count
from pqweights.common.dtypes import DTYPE_BITS, float8_table, from_float32, item_bytes, to_float32
from pqweights.kernels.gguf_encoding import BLOCK_TYPES
from pqweights.kernels.groups import FloatRule, GroupRule, Groups, pack_bits, pack_tiles, unpack_bits

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Shape = tuple[int, ...]

# What a stored tensor holds: for each weight a code, for each tile a scale, a zero and an offset; for each column its
# group; for the whole weight what scales are multiplied or divided by, its shape, the numbers of codes, and 1.
# The blocks of GGUF hold all of these.
CODES, SCALES, ZEROS, OFFSETS, GROUP_OF = "codes", "scales", "zeros", "offsets", "group of each column"
UNIT, DIVISOR, SHAPE, TABLE, ONE, BLOCKS = "unit", "divisor", "shape", "table", "one", "blocks"
OF_TILES = (SCALES, ZEROS, OFFSETS)
# So many numbers fill whole words, however wide they are.
WORD = 32
# The columns that follow each other in a word of AutoAWQ, from the lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The tiles of torchao's Int4TilePackedTo4dTensor have 8 rows, and rows are padded to a multiple of 1024 weights.
TILE_ROWS, PADDED_COLUMNS = 8, 1024


class RoundingRule(Protocol):
    """How weights become codes, and codes weights: a GroupRule, FloatRule, BlockRule or, of sources alone, TableRule.

    bits: the width of a code
    rows, group_size: the rows and columns of a tile
    kind: what scales are of, such as "symmetric" or "mxfp4"
    name: how scales are chosen, "best" or what the runtime calls its own way
    codes: what codes are; those of a source may be taken over if they are the same
    """

    def __hash__(self) -> int: ...
    @property
    def bits(self) -> int: ...  # noqa: D102
    @property
    def rows(self) -> int: ...  # noqa: D102
    @property
    def group_size(self) -> int: ...  # noqa: D102
    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def codes(self) -> str: ...  # noqa: D102

    def quantize(self, values: Floats) -> Groups:
        """Return finite weights, whole rows or groups of them, as codes."""
        ...

    def decode(self, groups: Groups) -> Floats:
        """Return the weights that a runtime computes with, in float32."""
        ...

    def numbers(self, codes: Bytes) -> Floats:
        """Return the numbers that codes stand for, before zeros and scales, in float32."""
        ...


class StoredPart(NamedTuple):
    """A stored tensor of a weight.

    holds: which numbers, one of those above
    name: its name, from {weight}, and from {module} and {parameter} before and after the last dot of that
    dtype: its dtype; codes and zeros of fewer bits share its words, and follow each other from the lowest bits on
    across: whether numbers follow each other down the columns of the matrix, and not along its rows
    transposed: whether the matrix of words is stored so
    flipped: the bits of each byte that are inverted
    order: how codes follow each other in a word, if not in their own order
    first: the number that is stored as 0
    shape: of what the whole weight has in common
    by_tile: whether the codes of each tile have a dimension of their own
    tiled: whether codes, or pairs of scales and offsets, lie in the tiles of PyTorch's tinygemm
    """

    holds: str
    name: str
    dtype: str
    across: bool = False
    transposed: bool = False
    flipped: int = 0
    order: tuple[int, ...] = ()
    first: int = 0
    shape: Shape = ()
    by_tile: bool = False
    tiled: bool = False

    def stored_name(self, weight: str) -> str:
        """Return the name of the tensor for that of the weight."""
        module, _, parameter = weight.rpartition(".")
        return self.name.format(weight=weight, module=module, parameter=parameter)

    @property
    def by_columns(self) -> bool:
        """Whether rows of the weight are columns of the stored tensor."""
        return self.across != self.transposed or (self.tiled and self.holds == SCALES)

    @property
    def once(self) -> bool:
        """Whether the tensor holds what all rows have in common."""
        return self.holds not in (CODES, BLOCKS, *OF_TILES)

    def bits(self, rule: RoundingRule) -> int:
        """Return the bits of a number."""
        is_whole = self.holds not in (CODES, ZEROS) or (self.holds == ZEROS and self.dtype == "I8")
        return DTYPE_BITS[self.dtype] if is_whole else rule.bits

    def matrix(self, rows: int, columns: int, rule: RoundingRule) -> tuple[int, int]:
        """Return how many numbers a matrix has, down and across."""
        return (-(-rows // rule.rows), -(-columns // rule.group_size)) if self.holds in OF_TILES else (rows, columns)

    def words(self, count: int, rule: RoundingRule) -> int:
        """Return how many words so many numbers take."""
        return -(-count * self.bits(rule) // DTYPE_BITS[self.dtype])

    def run_of(self, first: int, last: int, words: int, rule: RoundingRule) -> tuple[int, int]:
        """Return the first word and the end of those that hold numbers [first, last) of a line of so many words.

        They begin with a number that begins a word.
        """
        of_run = self.words(WORD, rule)
        return first // WORD * of_run, min(words, -(-last // WORD) * of_run)

    def transpose(self, raw: Bytes) -> Bytes:
        """Return a matrix of words, as bytes [rows, bytes], transposed."""
        words = np.ascontiguousarray(raw).view(f"u{item_bytes(self.dtype)}")
        return np.ascontiguousarray(words.T).view(np.uint8)

    def stored_shape(self, shape: Shape, rule: RoundingRule) -> Shape:
        """Return the shape of the stored tensor for that of the weight."""
        if self.once:
            return (shape[-1],) if self.holds == GROUP_OF else self.shape
        if self.holds == BLOCKS:
            return (*shape[:-1], BLOCK_TYPES[rule.kind].row_bytes(shape[-1]))
        if self.tiled:
            rows, columns = tile_shape(shape)
            codes = (rows // TILE_ROWS, columns // 128, 32, 4)
            return codes if self.holds == CODES else (columns // rule.group_size, rows, 2)
        lines, numbers = self.matrix(shape[-2], shape[-1], rule)
        if self.across:
            lines, numbers = numbers, lines
        words = self.words(numbers, rule)
        if self.by_tile:
            tiles = shape[-1] // rule.group_size
            return (*shape[:-1], tiles, words // tiles)
        return (*shape[:-2], words, lines) if self.transposed else (*shape[:-2], lines, words)

    def pack(self, groups: Groups, shape: Shape, rule: RoundingRule) -> Bytes:
        """Return the bytes of some rows of a weight, or of all that they have in common.

        groups: the numbers of the rows
        shape: of the weight

        They are contiguous; of rows that are columns of the stored tensor, [rows of the stored tensor, bytes].
        """
        if self.once:
            return self._of_all(shape, rule).view(np.uint8)
        if self.holds == BLOCKS:
            return groups.codes.reshape(-1)
        if self.tiled:
            return _tiles(groups, shape) if self.holds == CODES else _tile_pairs(groups, shape, rule)
        numbers = self._numbers(groups, shape[-1], rule)
        if self.order:  # while they still are rows
            numbers = numbers.reshape(-1, len(self.order), numbers.shape[1])[:, self.order].reshape(numbers.shape)
        lines = _packed(numbers.T if self.across else numbers, self.dtype, self.bits(rule))
        if self.flipped:
            lines = lines ^ np.uint8(self.flipped)
        lines = self.transpose(lines) if self.transposed else lines
        return lines if self.by_columns else lines.reshape(-1)

    def _numbers(self, groups: Groups, columns: int, rule: RoundingRule) -> Bytes | Floats:
        if self.holds == CODES:
            return groups.codes.reshape(-1, columns)
        numbers: Bytes | Floats = groups.scales if self.holds == SCALES else groups.offsets
        if self.holds == ZEROS:  # of a symmetric rule, the middle code
            assert isinstance(rule, GroupRule)
            zeros = (numbers if rule.zeros else np.full_like(numbers, 2 ** (rule.bits - 1))).astype(np.uint8)
            assert zeros.min() >= self.first
            numbers = zeros - np.uint8(self.first)
        elif self.dtype in ("U8", "F8_E4M3"):  # bytes as numbers
            numbers = numbers.astype(np.uint8)
        return numbers.reshape(-1, -(-columns // rule.group_size))

    def _of_all(self, shape: Shape, rule: RoundingRule) -> npt.NDArray[Any]:
        if self.holds == SHAPE:
            return np.array(shape, "<i8")
        if self.holds == GROUP_OF:  # those of the same group lie side by side
            return np.arange(shape[-1], dtype="<i4") // np.int32(rule.group_size)
        unit = rule.unit if isinstance(rule, FloatRule) else 1.0
        number = {UNIT: unit, DIVISOR: 1 / unit, ONE: 1.0}[self.holds]
        return np.array([number], "<f4")

    def unpack(self, lines: Bytes, rule: RoundingRule) -> Bytes | Floats:
        """Return the numbers of lines of the stored tensor, [lines, bytes] from whole words on: the inverse of `pack`.

        Those of codes and zeros are u8, all others f32.
        """
        if self.holds not in (CODES, ZEROS):
            raw, dtype = np.ascontiguousarray(lines).reshape(-1), self.dtype
            if dtype in ("U8", "F8_E8M0"):  # small floats (OCP microscaling formats specification 1.0)
                numbers = float8_table("F8_E4M3" if rule.kind == "nvfp4" else "F8_E8M0")[raw]
            else:
                numbers = to_float32(raw, dtype)
            return numbers.reshape(len(lines), -1)
        bits = self.bits(rule)
        lines = lines ^ np.uint8(self.flipped) if self.flipped and self.dtype == "I8" else lines
        if self.order:
            words = np.ascontiguousarray(lines).view(f"<u{len(self.order) * bits // 8}")
            codes = np.empty((*words.shape, len(self.order)), dtype=np.uint8)
            for index, column in enumerate(self.order):
                codes[..., column] = words >> words.dtype.type(bits * index) & words.dtype.type((1 << bits) - 1)
            codes = codes.reshape(len(lines), -1)
        else:
            codes = lines if bits == 8 else unpack_bits(np.ascontiguousarray(lines), bits)
        # Beyond the largest code, zeros begin at 0 again, as in AutoGPTQ.
        return codes + np.uint8(self.first) & np.uint8((1 << bits) - 1) if self.first else codes


def _packed(numbers: npt.NDArray[Any], dtype: str, bits: int) -> Bytes:
    """Return each line of numbers, u8 or f32, in words of its own: [lines, bytes]."""
    count = numbers.shape[1]
    if numbers.dtype == np.float32:
        return from_float32(np.ascontiguousarray(numbers).reshape(-1), dtype).reshape(len(numbers), -1)
    size = -(-count * bits // DTYPE_BITS[dtype]) * item_bytes(dtype)
    if bits == 8 and count == size:
        return np.ascontiguousarray(numbers)
    if count % 8 or count * bits // 8 != size:
        padded = np.zeros((len(numbers), aligned(count, WORD)), dtype=np.uint8)
        padded[:, :count] = numbers
        return np.ascontiguousarray(pack_bits(padded, bits).reshape(len(padded), -1)[:, :size])
    return pack_bits(np.ascontiguousarray(numbers), bits).reshape(len(numbers), -1)


@dataclass(frozen=True)
class PackedFormat:
    """How a weight is stored: the numbers, and where they lie. That of a source and that of an export are compared.

    rule: how codes are made of weights, and weights of codes
    layout: the stored tensors
    factor, offset: what weights of sources are multiplied by at the end, and what is added then
    name: what the target calls the format
    label: what the plan calls its codec, if not by kind and group size
    reason: why a weight has the format, if not by the name of the rule
    unit_of: for scales that are multiplied by FloatRule.unit, the layer of a runtime all of whose weights have one unit
    """

    rule: RoundingRule
    layout: tuple[StoredPart, ...]
    factor: float = 1.0
    offset: float = 0.0
    name: str = field(default="", compare=False)
    label: str | None = field(default=None, compare=False)
    reason: str | None = field(default=None, compare=False)
    unit_of: str | None = field(default=None, compare=False)

    @property
    def codec(self) -> str:
        """The name in the plan, such as symmetric-g128."""
        return f"{self.rule.kind}-g{self.rule.group_size}" if self.label is None else self.label

    @property
    def row_multiple(self) -> int:
        """Rows are packed in multiples of this number, except for the last ones."""
        shares_words = any(part.across and part.holds in (CODES, ZEROS) for part in self.layout)
        in_tiles = any(part.tiled for part in self.layout)
        return WORD if shares_words else TILE_ROWS if in_tiles else self.rule.rows

    def part(self, *holds: str) -> StoredPart | None:
        """Return the stored tensor that holds one of these numbers."""
        return next((part for part in self.layout if part.holds in holds), None)

    @property
    def has_unit(self) -> bool:
        """Whether scales are multiplied by a unit, which is stored."""
        return self.part(UNIT, DIVISOR) is not None

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        """Return the stored tensors of a weight [..., K]."""
        stored = ((part, part.stored_shape(shape, self.rule)) for part in self.layout)
        return tuple(TensorSpec(part.stored_name(name), part.dtype, of_part) for part, of_part in stored)

    def column_bytes(self, shape: Shape) -> int:
        """Return how many bytes of a weight [..., K] come by columns, and wait in files for all of them."""
        parts = (part for part in self.layout if part.by_columns)
        return sum(byte_count(part.dtype, part.stored_shape(shape, self.rule)) for part in parts)

    def pieces(self, name: str, shape: Shape, *, first_row: int, groups: Groups) -> list[tuple[str, int, Bytes]]:
        """Return the stored bytes of consecutive rows of a weight, which begin at `first_row`.

        For each stored tensor, its name, where the bytes go from its start, and these, u8 and contiguous; of columns,
        where they go from the start of each of its rows, and [rows of the stored tensor, bytes].
        """
        result = []
        for part in self.layout:
            if not part.once or first_row == 0:
                data = part.pack(groups, shape, self.rule)
                above = part.stored_shape((first_row, shape[-1]), self.rule)
                before = 0 if part.once else byte_count(part.dtype, above)
                offset = before // len(data) if part.by_columns else before
                result.append((part.stored_name(name), offset, data))
        return result


# --- the tiles of PyTorch's tinygemm ---


def tile_shape(shape: Shape) -> tuple[int, int]:
    """Return the shape [N, K] of a weight padded to whole tiles."""
    return aligned(shape[0], TILE_ROWS), aligned(shape[1], PADDED_COLUMNS)


def unpack_tiles(words: npt.NDArray[np.int32]) -> Bytes:
    """Unpack words [rows / 8, columns / 128, 32, 4] of PyTorch's tinygemm to codes [rows, columns].

    The layout is matrix_to_m16n8k16_Bint4_layout in aten/src/ATen/native/cuda/int4mm.cu: lane t holds row t / 4, and of
    each 16 columns the pairs that start at 2 (t % 4) and 2 (t % 4) + 8. A word holds two such runs of 16 columns, as
    nibbles 0 2 4 6 1 3 5 7.
    """
    tiles, blocks = words.shape[:2]
    result = np.empty((tiles, 8, blocks, 128), dtype=np.uint8)
    for lane, word, nibble in itertools.product(range(32), range(4), range(8)):
        odd, sixteen, half = nibble >> 2, nibble >> 1 & 1, nibble & 1
        column = word * 32 + sixteen * 16 + half * 8 + lane % 4 * 2 + odd
        result[:, lane // 4, :, column] = words[:, :, lane, word] >> 4 * nibble & 15
    return result.reshape(tiles * 8, blocks * 128)


def _tiles(groups: Groups, shape: Shape) -> Bytes:
    """Return tiles of codes; those of the padding stand for 0."""
    count = groups.codes.size // shape[1]
    codes: Bytes = np.full(tile_shape((count, shape[1])), 8, dtype=np.uint8)
    codes[:count, : shape[1]] = groups.codes.reshape(count, -1)
    return pack_tiles(codes)


def _tile_pairs(groups: Groups, shape: Shape, rule: RoundingRule) -> Bytes:
    """Return the scales and offsets of rows, as columns; those of the padding are 1 and 0."""
    count = groups.codes.size // shape[1]
    rows, columns = tile_shape((count, shape[1]))
    pairs = np.empty((columns // rule.group_size, rows, 2), dtype=np.float32)
    pairs[...] = 1, 0
    for axis, numbers in enumerate((groups.scales, groups.offsets)):
        pairs[: shape[1] // rule.group_size, :count, axis] = numbers.reshape(count, -1).T
    return from_float32(pairs.reshape(-1), "BF16").reshape(len(pairs), -1)
