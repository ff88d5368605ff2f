"""The formats of integer targets: how groups of weights become codes, and where runtimes look for their bytes.

A rule makes codes of weights, and weights of codes again; a layout says which tensors a weight is stored as. The rules
of GroupRule and FloatRule are in kernels/groups.py, the blocks of GGUF in kernels/gguf_encoding.py. docs/exports.md has
the arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import TensorSpec, aligned, byte_count
from pqweights.common.dtypes import float8_table, from_float32
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.kernels.groups import AWQ_ORDER, BEST, FloatRule, GroupRule, Groups, pack_bits, pack_tiles

if TYPE_CHECKING:
    from pqweights.kernels.gguf_encoding import EncodedBlocks

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Shape = tuple[int, ...]

# The largest number of E2M1.
FLOAT4_LARGEST = 6
# The unit of the scales of NVFP4 activations when nothing is known of them, for blocks whose largest number is up to
# 2688: what Model-Optimizer's recipes without data set by `constant_amax`.
INPUT_UNIT = 1.0
# The tiles of torchao's Int4TilePackedTo4dTensor have 8 rows, and rows are padded to a multiple of 1024 weights.
TILE_ROWS, PADDED_COLUMNS = 8, 1024
# Where numbers of consecutive rows share words, so many rows fill whole words, however wide the numbers are.
WORD_ROWS = 32


@dataclass(frozen=True)
class BlockRule:
    """A block format of GGUF (a key of BLOCK_TYPES), whose scales are chosen by least squares.

    `Groups.codes` are the bytes of the blocks.
    """

    kind: str
    bits: int
    group_size: int

    name = BEST

    @staticmethod
    def of(name: str) -> BlockRule:
        """Return the rule of a type."""
        return BlockRule(name, BLOCK_TYPES[name].bits, BLOCK_TYPES[name].block_size)

    def quantize(self, values: Floats) -> Groups:
        """Quantize whole blocks of weights."""
        from pqweights.kernels.gguf_encoding import encode_blocks
        from pqweights.kernels.gguf_gain import with_gain

        return _as_groups(with_gain(self.kind, encode_blocks(self.kind, values.reshape(-1, self.group_size), None)))

    def quantize_weighted(self, values: Floats, importance: Floats) -> Groups:
        """Quantize whole rows, given the mean square of each input: values [rows * K], importance [K]."""
        from pqweights.kernels.gguf_encoding import encode_blocks
        from pqweights.kernels.gguf_gain import FACTORS, products_of, with_gain

        rows = values.reshape(-1, len(importance))
        blocks = encode_blocks(self.kind, rows, importance)
        if self.kind in FACTORS:
            decoded = self.decode(_as_groups(blocks))
            blocks = with_gain(self.kind, blocks, products_of(rows, decoded, importance))
        return _as_groups(blocks)

    def decode(self, groups: Groups) -> Floats:
        """Return the weights that llama.cpp decodes: [blocks, block size]."""
        from pqweights.kernels.gguf_encoding import decode_blocks

        return decode_blocks(self.kind, groups.codes)


@dataclass(frozen=True)
class TileRule:
    """FP8 in tiles of rows and columns, each with a scale that takes its largest weight to the largest float.

    `Groups.codes` are [rows, row_length] here, and `Groups.scales` [tiles of rows, tiles of columns].

    row_length: the columns of the weight; tiles at its edges may be smaller
    rows, group_size: the rows and the columns of a tile
    """

    row_length: int
    rows: int = 128
    group_size: int = 128

    kind, bits, name = "fp8", 8, "compressed-tensors"

    def tiles(self, rows: int) -> tuple[int, int]:
        """Return how many tiles some rows of the weight have, down and across."""
        return -(-rows // self.rows), -(-self.row_length // self.group_size)

    def quantize(self, values: Floats) -> Groups:
        """Quantize whole rows of weights."""
        rows, (down, across) = len(values) // self.row_length, self.tiles(len(values) // self.row_length)
        padded = np.zeros((down, self.rows, across, self.group_size), dtype=np.float32)
        padded.reshape(down * self.rows, -1)[:rows, : self.row_length] = values.reshape(rows, -1)
        one_by_one = np.ascontiguousarray(padded.swapaxes(1, 2)).reshape(-1)
        groups = FloatRule(self.kind, self.bits, self.rows * self.group_size, self.name).quantize(one_by_one)
        codes = groups.codes.reshape(down, across, self.rows, self.group_size).swapaxes(1, 2)
        codes = codes.reshape(down * self.rows, -1)[:rows, : self.row_length]
        return replace(groups, codes=np.ascontiguousarray(codes), scales=groups.scales.reshape(down, across))

    def decode(self, groups: Groups) -> Floats:
        """Return the weights: [rows, row_length]."""
        rows = len(groups.codes)
        scales = groups.scales.repeat(self.rows, axis=0)[:rows].repeat(self.group_size, axis=1)[:, : self.row_length]
        return float8_table("F8_E4M3")[groups.codes] * scales


def _as_groups(blocks: EncodedBlocks) -> Groups:
    none = np.zeros(len(blocks.data), dtype=np.float32)
    return Groups(codes=blocks.data, scales=none, offsets=none, energies=blocks.energies, errors=blocks.errors)


# Each has bits, group_size, name ("best", or what the runtime calls its own rule), kind ("affine", "symmetric", or the
# name of a block or floating format), quantize and decode.
Rule = GroupRule | FloatRule | TileRule | BlockRule


class StoredPiece(NamedTuple):
    """Bytes of a stored tensor.

    stored_name: the stored tensor
    offset: where the data goes, in bytes from the start of the tensor; for columns, from the start of each of its rows
    data: u8, contiguous; [rows of the stored tensor, bytes] for columns
    """

    stored_name: str
    offset: int
    data: Bytes


class StoredPart(NamedTuple):
    """One of the tensors that a weight is stored as.

    name: its name, from {weight}, and from {module} and {parameter} before and after the last dot of that
    dtype: its dtype
    shape: returns its shape for that of the weight
    pack: returns the bytes of some rows, given their groups and the shape of the weight
    by_columns: whether those rows are columns of the stored tensor; pack then returns [rows, bytes]
    once: whether the bytes are those of all rows, and written with the first
    """

    name: str
    dtype: str
    shape: Callable[[Shape, Any], Shape]
    pack: Callable[[Groups, Shape, Any], Bytes]
    by_columns: bool = False
    once: bool = False

    def stored_name(self, weight: str) -> str:
        """Return the name of the tensor for that of the weight."""
        module, _, parameter = weight.rpartition(".")
        return self.name.format(weight=weight, module=module, parameter=parameter)


@dataclass(frozen=True)
class Rounding:
    """How one weight becomes integers.

    layout: how it is stored, a key of LAYOUTS
    label: what the plan calls its codec, if not by kind and group size
    reason: why it is rounded so, if not by the name of the rule
    unit_of: for scales that are multiplied by FloatRule.unit, the layer of a runtime all of whose weights have one unit
    """

    rule: Rule
    layout: str
    label: str | None = None
    reason: str | None = None
    unit_of: str | None = None

    @property
    def codec(self) -> str:
        """The name in the plan, such as symmetric-g128."""
        return f"{self.rule.kind}-g{self.rule.group_size}" if self.label is None else self.label

    @property
    def row_multiple(self) -> int:
        """Rows are packed in multiples of this number, except for the last ones."""
        return ROW_MULTIPLES.get(self.layout, 1)

    @property
    def has_unit(self) -> bool:
        """Whether scales are multiplied by a unit, which is stored."""
        return self.layout in WITH_UNITS

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        """Return the stored tensors of a weight [..., K]."""
        parts = LAYOUTS[self.layout]
        return tuple(TensorSpec(part.stored_name(name), part.dtype, part.shape(shape, self.rule)) for part in parts)

    def column_bytes(self, shape: Shape) -> int:
        """Return how many bytes of a weight [..., K] come by columns, and wait in files for all of them."""
        parts = (part for part in LAYOUTS[self.layout] if part.by_columns)
        return sum(byte_count(part.dtype, part.shape(shape, self.rule)) for part in parts)

    def pieces(self, name: str, shape: Shape, *, first_row: int, groups: Groups) -> list[StoredPiece]:
        """Return the stored bytes of consecutive rows of a weight, which begin at `first_row`."""
        result = []
        for part in LAYOUTS[self.layout]:
            if not part.once or first_row == 0:
                data = part.pack(groups, shape, self.rule)
                before = 0 if part.once else byte_count(part.dtype, part.shape((first_row, shape[-1]), self.rule))
                offset = before // len(data) if part.by_columns else before
                result.append(StoredPiece(part.stored_name(name), offset, data))
        return result


@dataclass(frozen=True)
class Stays:
    """The decision to store a weight plainly, although others of its kind become integers.

    dtype: the dtype that it gets whatever the others get
    """

    reason: str
    dtype: str | None = None


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


def tile_shape(shape: Shape) -> tuple[int, int]:
    """Return the shape [N, K] of a weight padded to whole tiles."""
    return aligned(shape[0], TILE_ROWS), aligned(shape[1], PADDED_COLUMNS)


def _columns(numbers: Floats, dtype: str = "BF16") -> Bytes:
    """Return [stored rows, rows, ...] as floats: [stored rows, bytes]."""
    return from_float32(np.ascontiguousarray(numbers).reshape(-1), dtype).reshape(len(numbers), -1)


def _tiles(groups: Groups, shape: Shape, rule: Rule) -> Bytes:
    """Return tiles of codes; those of the padding stand for 0."""
    count = groups.codes.size // shape[1]
    codes: Bytes = np.full(tile_shape((count, shape[1])), 8, dtype=np.uint8)
    codes[:count, : shape[1]] = groups.codes.reshape(count, -1)
    return pack_tiles(codes)


def _tile_pairs(groups: Groups, shape: Shape, rule: Rule) -> Bytes:
    """Return the scales and zero points of rows, as columns; those of the padding are 1 and 0."""
    count = groups.codes.size // shape[1]
    rows, columns = tile_shape((count, shape[1]))
    pairs = np.empty((columns // rule.group_size, rows, 2), dtype=np.float32)
    pairs[...] = 1, 0
    for axis, numbers in enumerate((groups.scales, groups.offsets)):
        pairs[: shape[1] // rule.group_size, :count, axis] = numbers.reshape(count, -1).T
    return _columns(pairs)


def _zeros(groups: Groups, shape: Shape, rule: Rule) -> Bytes:
    """Return the codes that stand for 0, of each group: [rows, K / g]; those of a symmetric rule are the middle one."""
    assert isinstance(rule, GroupRule)
    zeros = groups.offsets if rule.zeros else np.full_like(groups.offsets, 2 ** (rule.bits - 1))
    return zeros.astype(np.uint8).reshape(-1, shape[1] // rule.group_size)


def _packed_along_rows(numbers: Bytes, bits: int) -> Bytes:
    """Return the columns of numbers [rows, columns], each packed to words of its own: [columns, bytes]."""
    padded = np.zeros((numbers.shape[1], aligned(len(numbers), WORD_ROWS)), dtype=np.uint8)
    padded[:, : len(numbers)] = numbers.T
    words = -(-len(numbers) * bits // 32)
    return np.ascontiguousarray(pack_bits(padded, bits).reshape(len(padded), -1)[:, : 4 * words])


def _as_columns(words: Bytes) -> Bytes:
    """Return rows of words, as bytes [rows, 4 * words], as columns: [words, 4 * rows]."""
    return np.ascontiguousarray(words.view(np.uint32).T).view(np.uint8)


def _awq_words(codes: Bytes) -> Bytes:
    """Return 4-bit codes [rows, columns] as words that eight rows share: columns [columns, rows / 2]."""
    ordered = codes.reshape(-1, 8, codes.shape[1])[:, AWQ_ORDER]
    pairs = ordered[:, ::2] | ordered[:, 1::2] << 4
    return np.ascontiguousarray(pairs.transpose(2, 0, 1)).reshape(codes.shape[1], -1)


# s: the shape of a weight, r: its rule, g: groups of some of its rows


def _per_group(s: Shape, r: Rule) -> Shape:
    return (*s[:-1], s[-1] // r.group_size)


def _codes(name: str, dtype: str, word_bits: int = 32) -> StoredPart:
    """Return the part of codes that follow each other in words, the first code in the lowest bits."""
    return StoredPart(
        name, dtype, lambda s, r: (*s[:-1], s[-1] * r.bits // word_bits), lambda g, s, r: pack_bits(g.codes, r.bits)
    )


def _bytes(name: str, dtype: str, flipped: int = 0) -> StoredPart:
    """Return the part of a byte for each code. flipped: the bits of it that are inverted"""
    return StoredPart(name, dtype, lambda s, r: s, lambda g, s, r: g.codes.reshape(-1) ^ np.uint8(flipped))


def _numbers(name: str, field: str = "scales") -> StoredPart:
    """Return the part of a number of each group, as BF16 [..., K / g]."""
    return StoredPart(name, "BF16", _per_group, lambda g, s, r: from_float32(getattr(g, field), "BF16"))


def _byte_scales(name: str, dtype: str = "U8") -> StoredPart:
    """Return the part of scales that are small floats themselves, [..., K / g]."""
    return StoredPart(name, dtype, _per_group, lambda g, s, r: g.scales.astype(np.uint8))


def _tile_scales(name: str, dtype: str) -> StoredPart:
    """Return the part of scales of tiles of 128 rows."""
    return StoredPart(
        name, dtype, lambda s, r: r.tiles(s[0]), lambda g, s, r: from_float32(g.scales.reshape(-1), dtype)
    )


def _row_scales(name: str) -> StoredPart:
    """Return the part of a scale of each row, in float32."""
    return StoredPart(name, "F32", lambda s, r: (*s[:-1], 1), lambda g, s, r: from_float32(g.scales, "F32"))


def _once(name: str, shape: Shape, number: Callable[[FloatRule], float]) -> StoredPart:
    """Return the part of a number that all groups have in common, in float32."""
    return StoredPart(
        name, "F32", lambda s, r: shape, lambda g, s, r: np.array(number(r), "<f4").reshape(1).view(np.uint8), once=True
    )


def _numbers_by_row(name: str, field: str = "scales", dtype: str = "BF16") -> StoredPart:
    """Return the part of a number of each group [K / g, N]."""
    return StoredPart(
        name,
        dtype,
        lambda s, r: _per_group(s, r)[::-1],
        lambda g, s, r: _columns(getattr(g, field).reshape(-1, s[1] // r.group_size).T, dtype),
        by_columns=True,
    )


def _gptq(first_zero: int) -> tuple[StoredPart, ...]:
    """Return the parts of AutoGPTQ's layout.

    Codes follow each other in words along K, zeros along N; of 3 bits, 32 in three words. N is a multiple of 32 / bits.

    first_zero: the zero that is stored as 0
    """

    def zeros(g: Groups, s: Shape, r: Rule) -> Bytes:
        numbers = _zeros(g, s, r)
        assert numbers.min() >= first_zero
        return _packed_along_rows(numbers - np.uint8(first_zero), r.bits)

    return (
        StoredPart(
            "{module}.qweight",
            "I32",
            lambda s, r: (s[1] * r.bits // 32, s[0]),
            lambda g, s, r: _as_columns(pack_bits(g.codes, r.bits).reshape(-1, s[1] * r.bits // 8)),
            by_columns=True,
        ),
        StoredPart(
            "{module}.qzeros", "I32", lambda s, r: (s[1] // r.group_size, s[0] * r.bits // 32), zeros, by_columns=True
        ),
        _numbers_by_row("{module}.scales", dtype="F16"),
        # The group of each column: those of the same group lie side by side.
        StoredPart(
            "{module}.g_idx",
            "I32",
            lambda s, r: (s[1],),
            lambda g, s, r: (np.arange(s[1], dtype="<i4") // np.int32(r.group_size)).view(np.uint8),
            once=True,
        ),
    )


_TORCHAO = "{module}._{parameter}_"
# Of compressed-tensors, by its names; a weight q is the code q + 2**(bits - 1).
_PACK_QUANTIZED = (
    _codes("{weight}_packed", "I32"),
    _numbers("{weight}_scale"),
    StoredPart(
        "{weight}_shape", "I64", lambda s, r: (2,), lambda g, s, r: np.array(s, "<i8").view(np.uint8), once=True
    ),
)
# By layout: how many rows are packed together, if not each row by itself.
ROW_MULTIPLES = {
    "int4-tiles": TILE_ROWS,
    "float-tiles": 128,
    "float-tiles-inverse": 128,
    "pack-quantized-asym": WORD_ROWS,
    "awq": WORD_ROWS,
    "gptq": WORD_ROWS,
    "gptq-v2": WORD_ROWS,
}
# How runtimes store a weight, by names that can be sent to other processes.
LAYOUTS: dict[str, tuple[StoredPart, ...]] = {
    # Blocks of GGUF, one after the other.
    "gguf": (
        StoredPart(
            "{weight}",
            "U8",
            lambda s, r: (*s[:-1], BLOCK_TYPES[r.kind].row_bytes(s[-1])),
            lambda g, s, r: g.codes.reshape(-1),
        ),
    ),
    "pack-quantized": _PACK_QUANTIZED,
    # Zeros of consecutive rows share words, the last of which are padded.
    "pack-quantized-asym": (
        *_PACK_QUANTIZED,
        StoredPart(
            "{weight}_zero_point",
            "I32",
            lambda s, r: (-(-s[0] * r.bits // 32), s[1] // r.group_size),
            lambda g, s, r: _as_columns(_packed_along_rows(_zeros(g, s, r), r.bits)).reshape(-1),
        ),
    ),
    # The stacks of experts of gpt-oss: 16 bytes for each group.
    "mxfp4-blocks": (
        StoredPart(
            "{weight}_blocks",
            "U8",
            lambda s, r: (*s[:-1], s[-1] // r.group_size, r.group_size // 2),
            lambda g, s, r: pack_bits(g.codes, r.bits),
        ),
        _byte_scales("{weight}_scales"),
    ),
    # A weight q is stored as itself.
    "int-quantized": (_bytes("{weight}", "I8", flipped=128), _numbers("{weight}_scale")),
    "float-quantized": (_bytes("{weight}", "F8_E4M3"), _numbers("{weight}_scale")),
    "mxfp4-pack-quantized": (_codes("{weight}_packed", "U8", word_bits=8), _byte_scales("{weight}_scale")),
    "mxfp8-quantized": (_bytes("{weight}", "F8_E4M3"), _byte_scales("{weight}_scale")),
    "nvfp4-pack-quantized": (
        _codes("{weight}_packed", "U8", word_bits=8),
        _byte_scales("{weight}_scale", "F8_E4M3"),
        _once("{weight}_global_scale", (1,), lambda r: 1 / r.unit),
    ),
    "nvfp4-pack-quantized-inputs": (
        _codes("{weight}_packed", "U8", word_bits=8),
        _byte_scales("{weight}_scale", "F8_E4M3"),
        _once("{weight}_global_scale", (1,), lambda r: 1 / r.unit),
        _once("{module}.input_global_scale", (1,), lambda r: 1 / INPUT_UNIT),
    ),
    "float-tiles": (_bytes("{weight}", "F8_E4M3"), _tile_scales("{weight}_scale", "BF16")),
    # DeepSeek-V3 (arXiv:2412.19437, section 3.3)
    "float-tiles-inverse": (_bytes("{weight}", "F8_E4M3"), _tile_scales("{weight}_scale_inv", "F32")),
    # NVIDIA's Model-Optimizer
    "modelopt-nvfp4": (
        _codes("{weight}", "U8", word_bits=8),
        _byte_scales("{weight}_scale", "F8_E4M3"),
        _once("{weight}_scale_2", (), lambda r: r.unit),
        _once("{module}.input_scale", (), lambda r: INPUT_UNIT),
    ),
    # mlx.core.quantize
    "mlx-affine": (_codes("{weight}", "U32"), _numbers("{module}.scales"), _numbers("{module}.biases", "offsets")),
    "mlx-floats": (_codes("{weight}", "U32"), _byte_scales("{module}.scales")),
    # torchao's Int8Tensor and Float8Tensor, with a scale for each row.
    "int8-rows": (
        _bytes(_TORCHAO + "qdata", "I8", flipped=128),
        _row_scales(_TORCHAO + "scale"),
        StoredPart(
            _TORCHAO + "zero_point", "I8", lambda s, r: (s[0], 1), lambda g, s, r: np.zeros(len(g.scales), np.uint8)
        ),
    ),
    "fp8-rows": (_bytes(_TORCHAO + "qdata", "F8_E4M3"), _row_scales(_TORCHAO + "scale")),
    # torchao's Int4Tensor: codes minus 8 as nibbles, the even column low.
    "int4-plain": (
        StoredPart(
            _TORCHAO + "qdata",
            "I8",
            lambda s, r: (s[0], s[1] // 2),
            lambda g, s, r: pack_bits(g.codes, 4) ^ np.uint8(0x88),
        ),
        _numbers_by_row(_TORCHAO + "scale", "scales"),
        _numbers_by_row(_TORCHAO + "zero_point", "offsets"),
    ),
    # AutoAWQ's GEMM: eight consecutive rows of 4-bit codes and zeros share words, in an order of its own.
    "awq": (
        StoredPart(
            "{module}.qweight",
            "I32",
            lambda s, r: (s[1], s[0] // 8),
            lambda g, s, r: _awq_words(g.codes.reshape(-1, s[1])),
            by_columns=True,
        ),
        StoredPart(
            "{module}.qzeros",
            "I32",
            lambda s, r: (s[1] // r.group_size, s[0] // 8),
            lambda g, s, r: _awq_words(_zeros(g, s, r)),
            by_columns=True,
        ),
        _numbers_by_row("{module}.scales", dtype="F16"),
    ),
    # AutoGPTQ's first format, in which loaders differ on a zero of 0: for symmetric rules; and that of GPTQModel.
    "gptq": _gptq(first_zero=1),
    "gptq-v2": _gptq(first_zero=0),
    # torchao's Int4TilePackedTo4dTensor: tiles of 8 rows by 128 columns; the padding is read back as 0.
    "int4-tiles": (
        StoredPart(
            _TORCHAO + "qdata",
            "I32",
            lambda s, r: (tile_shape(s)[0] // TILE_ROWS, tile_shape(s)[1] // 128, 32, 4),
            _tiles,
        ),
        StoredPart(
            _TORCHAO + "scale_and_zero",
            "BF16",
            lambda s, r: (tile_shape(s)[1] // r.group_size, tile_shape(s)[0], 2),
            _tile_pairs,
            by_columns=True,
        ),
    ),
}
# Those of which the file holds FloatRule.unit.
WITH_UNITS = frozenset({"nvfp4-pack-quantized", "nvfp4-pack-quantized-inputs", "modelopt-nvfp4"})
