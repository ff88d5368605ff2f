"""The block formats of GGUF, and weights as their blocks, with nearly the least error.

The error is the sum of the squared errors of weights, each times the importance of the weight's column. Without
importances it is each times the weight's magnitude plus two root mean squares of its block: if all counted alike, the
largest weights would be clipped, which costs models more. In blocks of short floats all count alike.

Format: https://github.com/ggml-org/llama.cpp (ggml/src/ggml-common.h, the structures block_q1_0 to block_iq4_xs).
native/gguf_affine.cpp has the encoders of blocks of scales and offsets, native/gguf_grids.cpp those of grid points,
native/gguf_symmetric.cpp the others, and native/gguf_formats.hpp the bytes. Where the searches begin is in
gguf_searches.py. Blocks of short floats are encoded by native/float_groups.cpp, and packed here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.kernels import native
from pqweights.kernels.gguf_codes import PLANES, codes_of, with_codes
from pqweights.kernels.gguf_grids import UNITS, grid_of
from pqweights.kernels.gguf_searches import SEARCHES, Points
from pqweights.kernels.groups import BEST, FloatRule, Groups, normalized_importance

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Types of short floats with scales in bytes.
FLOATS = {"MXFP4": FloatRule("mxfp4", 4, 32, BEST), "NVFP4": FloatRule("nvfp4", 4, 16, BEST)}
# Types that hold integers of which a block is a group: what the codes are, and whether a number is added to products.
INTEGER_TYPES = {"Q4_0": ("INT4", False), "Q4_1": ("INT4", True), "Q8_0": ("INT8", False)}

# What codes stand for where a block has one scale, and perhaps a number that is added. The gguf package lacks two of
# these types, and is slow in others.
LEVELS = {
    "Q4_1": range(16),
    "Q5_1": range(32),
    "Q1_0": (-1, 1),
    "Q2_0": (-1, 0, 1, 2),
    "Q4_0": range(-8, 8),
    "Q5_0": range(-16, 16),
    "Q8_0": (*range(128), *range(-128, 0)),
    "IQ4_NL": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
# The weights that have a scale and an offset in common, of the types that have the fewest; and the code of IQ4_NL and
# IQ4_XS that stands for 1.
PART, IQ4_ONE = 16, 8


@dataclass(frozen=True, kw_only=True)
class BlockRule:
    """One block format, whose scales are those of nearly the least error. `Groups.codes` are the bytes of the blocks.

    kind: what GGUF calls it
    number: ggml's number of it
    bits: width of a code
    group_size: weights of a block
    block_bytes: bytes of a block, with its scales
    distortion: the relative squared error of Gaussian weights, which for NVFP4 depends on their size: here 0.02
    """

    kind: str
    number: int
    bits: int
    group_size: int
    block_bytes: int
    distortion: float

    name, rows = BEST, 1

    @property
    def codes(self) -> str:
        """What codes are."""
        return INTEGER_TYPES.get(self.kind, (self.kind, False))[0]

    @property
    def is_compensated(self) -> bool:
        """Whether codes can be chosen one by one so that errors cancel."""
        # The errors of Q8_0 are small beside those of inputs, which llama.cpp rounds to 8 bits.
        return self.kind in PLANES.keys() - {"Q8_0"}

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, with scales."""
        return 8 * self.block_bytes / self.group_size

    def row_bytes(self, columns: int) -> int:
        """Return the size of a row in bytes; the block size must divide its length."""
        assert columns % self.group_size == 0
        return columns // self.group_size * self.block_bytes

    def quantize(self, values: Floats) -> Groups:
        """Quantize whole blocks of weights, in whose error large weights count more: see encode_blocks."""
        return encode_blocks(self.kind, values.reshape(-1, self.group_size), None)

    def quantize_weighted(self, values: Floats, importance: Floats) -> Groups:
        """Quantize whole rows, given the mean square of each input: values [rows * K], importance [K]."""
        return encode_blocks(self.kind, values.reshape(-1, len(importance)), importance)

    def decode(self, groups: Groups) -> Floats:
        """Return the weights that llama.cpp decodes: [blocks, block size]."""
        return self.numbers(groups.codes)

    def numbers(self, codes: npt.NDArray[np.uint8]) -> Floats:
        """Return the weights of blocks."""
        return decode_blocks(self.kind, codes)


BLOCK_TYPES = {
    rule.kind: rule
    for rule in (
        BlockRule(kind="Q8_0", number=8, bits=8, group_size=32, block_bytes=34, distortion=2.15e-5),
        BlockRule(kind="Q6_K", number=14, bits=6, group_size=256, block_bytes=210, distortion=2.72e-4),
        BlockRule(kind="Q5_K", number=13, bits=5, group_size=256, block_bytes=176, distortion=1.16e-3),
        BlockRule(kind="Q5_1", number=7, bits=5, group_size=32, block_bytes=24, distortion=1.12e-3),
        BlockRule(kind="Q5_0", number=6, bits=5, group_size=32, block_bytes=22, distortion=1.61e-3),
        BlockRule(kind="Q4_1", number=3, bits=4, group_size=32, block_bytes=20, distortion=4.79e-3),
        BlockRule(kind="Q4_K", number=12, bits=4, group_size=256, block_bytes=144, distortion=4.82e-3),
        BlockRule(kind="Q4_0", number=2, bits=4, group_size=32, block_bytes=18, distortion=6.59e-3),
        BlockRule(kind="IQ4_NL", number=20, bits=4, group_size=32, block_bytes=18, distortion=5.4e-3),
        BlockRule(kind="NVFP4", number=40, bits=4, group_size=64, block_bytes=36, distortion=7.9e-3),
        BlockRule(kind="MXFP4", number=39, bits=4, group_size=32, block_bytes=17, distortion=1.24e-2),
        BlockRule(kind="IQ4_XS", number=23, bits=4, group_size=256, block_bytes=136, distortion=5.47e-3),
        BlockRule(kind="Q3_K", number=11, bits=3, group_size=256, block_bytes=110, distortion=2.08e-2),
        BlockRule(kind="IQ3_S", number=21, bits=3, group_size=256, block_bytes=110, distortion=1.7e-2),
        BlockRule(kind="IQ3_XXS", number=18, bits=3, group_size=256, block_bytes=98, distortion=3.14e-2),
        BlockRule(kind="Q2_K", number=10, bits=2, group_size=256, block_bytes=84, distortion=6.83e-2),
        BlockRule(kind="IQ2_S", number=22, bits=2, group_size=256, block_bytes=82, distortion=5.79e-2),
        BlockRule(kind="IQ2_XS", number=17, bits=2, group_size=256, block_bytes=74, distortion=8.21e-2),
        BlockRule(kind="Q2_0", number=42, bits=2, group_size=64, block_bytes=18, distortion=0.125),
        BlockRule(kind="TQ2_0", number=35, bits=2, group_size=256, block_bytes=66, distortion=0.192),
        BlockRule(kind="IQ2_XXS", number=16, bits=2, group_size=256, block_bytes=66, distortion=0.109),
        BlockRule(kind="IQ1_M", number=29, bits=1, group_size=256, block_bytes=56, distortion=0.174),
        BlockRule(kind="TQ1_0", number=34, bits=1, group_size=256, block_bytes=54, distortion=0.192),
        BlockRule(kind="IQ1_S", number=19, bits=1, group_size=256, block_bytes=50, distortion=0.202),
        BlockRule(kind="Q1_0", number=41, bits=1, group_size=128, block_bytes=18, distortion=0.375),
    )
}


def encode_blocks(type_name: str, values: Floats, importance: Floats | None) -> Groups:
    """Weights f32 [rows, columns] as blocks of a type (a key of BLOCK_TYPES), row by row.

    Codes of the groups are the bytes of the blocks, u8 [blocks, block bytes], with scales and offsets in them. Squares
    are summed whatever the importance, and are not finite where the weights are not.

    importance: f32 [columns], the second moments of the inputs at any scale, by which squared errors count. None: that
    of a weight counts by its magnitude plus two root mean squares of its block, and all alike in MXFP4 and NVFP4.
    A block's bytes depend on nothing but its weights and the importance of all columns.
    Raises ValueError if blocks do not divide the columns, or importance does not fit or is negative or not finite.
    """
    block = BLOCK_TYPES[type_name]
    rows, columns = values.shape
    if columns % block.group_size:
        raise ValueError(f"{type_name}: {columns} columns are not a multiple of {block.group_size}")
    factors = None if importance is None else normalized_importance(importance, columns)
    if type_name in FLOATS:
        return _encode_floats(block, values, factors)
    row_blocks = columns // block.group_size
    blocks = rows * row_blocks
    data = np.empty((blocks, block.block_bytes), dtype=np.uint8)
    energies, errors = np.empty((2, blocks), dtype=np.float64)
    search = SEARCHES[type_name]
    native.call(
        search.kernel,
        block.number,
        native.array(values, np.float32, blocks * block.group_size),
        None if factors is None else native.array(factors, np.float32, columns),
        *_points(search.starts if factors is None else search.weighted_starts),
        *_points(search.factors),
        native.array(data, np.uint8, blocks * block.block_bytes, written=True),
        native.array(energies, np.float64, blocks, written=True),
        native.array(errors, np.float64, blocks, written=True),
        blocks,
        row_blocks,
        *(_grid(type_name) if type_name in UNITS else ()),
    )
    return _groups_of(data, energies, errors)


def decode_blocks(type_name: str, data: npt.NDArray[np.uint8]) -> Floats:
    """Blocks of a type, [blocks, block bytes], as the weights that llama.cpp decodes: f32 [blocks, block size]."""
    import gguf

    with np.errstate(all="ignore"):  # of scales that are not finite, which is found where values are used
        if type_name in LEVELS:
            levels = np.array(LEVELS[type_name], dtype=np.float32)
            scales, lows = np.ascontiguousarray(data[:, :4]).view("<f2").astype(np.float32).T[:, :, None]
            numbers: Floats = scales * levels[codes_of(type_name, data, BLOCK_TYPES[type_name].group_size)]
            return numbers + lows if type_name in ("Q4_1", "Q5_1") else numbers
        decoded: Floats = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])
    return decoded.reshape(len(data), -1)


def steps(type_name: str, blocks: npt.NDArray[np.uint8]) -> tuple[Floats, Floats]:
    """Return what codes of blocks are multiplied by, and what is added then: f32 [blocks, parts of PART weights]."""
    codes = np.zeros((len(blocks), BLOCK_TYPES[type_name].group_size), dtype=np.uint8)
    if type_name.startswith("IQ4"):
        factors = decode_blocks(type_name, with_codes(type_name, blocks, codes + np.uint8(IQ4_ONE)))[:, ::PART]
        return factors, np.zeros_like(factors)
    codes[:, 1::PART] = 1
    decoded = decode_blocks(type_name, with_codes(type_name, blocks, codes))
    return decoded[:, 1::PART] - decoded[:, ::PART], decoded[:, ::PART]


def _encode_floats(block: BlockRule, values: Floats, importance: Floats | None) -> Groups:
    rule, flat = FLOATS[block.kind], values.reshape(-1)
    return blocks_of_floats(
        block, rule.quantize(flat) if importance is None else rule.quantize_weighted(flat, importance)
    )


def blocks_of_floats(block: BlockRule, groups: Groups) -> Groups:
    """Return groups of short floats as blocks, each the scales of its groups and then their codes."""
    in_block = block.group_size // FLOATS[block.kind].group_size
    scales = groups.scales.astype(np.uint8).reshape(-1, in_block)
    squares = (numbers.reshape(-1, in_block).T for numbers in (groups.energies, groups.errors))
    energies, errors = (functools.reduce(np.add, of_groups) for of_groups in squares)
    data = np.zeros((len(scales), block.block_bytes), dtype=np.uint8)
    data[:, :in_block] = scales
    return _groups_of(with_codes(block.kind, data, groups.codes.reshape(-1, block.group_size)), energies, errors)


def _groups_of(data: npt.NDArray[np.uint8], energies: Doubles, errors: Doubles) -> Groups:
    none = np.zeros(len(data), dtype=np.float32)
    return Groups(codes=data, scales=none, offsets=none, energies=energies, errors=errors)


def _points(points: Points) -> tuple[native.Array, int]:
    """As arguments of a kernel."""
    numbers = np.array(points, dtype=np.float32)
    return native.array(numbers, np.float32, numbers.size), len(points)


def _grid(type_name: str) -> tuple[native.Array | int, ...]:
    """As arguments of a kernel."""
    levels, points, numbers = grid_of(type_name)
    given = ((levels, np.float32), (points, np.uint8), (numbers, np.uint16))
    return (*(native.array(array, dtype, array.size) for array, dtype in given), len(points))
