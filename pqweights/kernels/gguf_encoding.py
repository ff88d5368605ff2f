"""Weights as GGUF blocks, with nearly the least squared error: what calls the encoders of each format.

native/gguf_affine.cpp has those of blocks of scales and offsets, native/gguf_grids.cpp those of grid points,
native/gguf_symmetric.cpp the others, and native/gguf_formats.hpp the bytes. Where the searches begin is in
gguf_searches.py. Blocks of short floats are encoded by native/float_groups.cpp, and packed here.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from pqweights.kernels import native
from pqweights.kernels.gguf_grids import UNITS, grid_of
from pqweights.kernels.gguf_searches import SEARCHES, Points
from pqweights.kernels.gguf_types import BLOCK_TYPES, BlockType
from pqweights.kernels.groups import BEST, FloatRule, Groups, normalized_importance

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Types of short floats with scales in bytes.
FLOATS = {"MXFP4": FloatRule("mxfp4", 4, 32, BEST), "NVFP4": FloatRule("nvfp4", 4, 16, BEST)}


def encode_blocks(type_name: str, values: Floats, importance: Floats | None) -> Groups:
    """Weights f32 [rows, columns] as blocks of a type (a key of BLOCK_TYPES), row by row.

    Codes of the groups are the bytes of the blocks, u8 [blocks, block bytes], with scales and offsets in them. Squares
    are summed whatever the importance, and are not finite where the weights are not.

    importance: f32 [columns], the second moments of the inputs at any scale, by which squared errors count; None: all
    the same. A block's bytes depend on nothing but its weights and the importance of all columns.
    Raises ValueError if blocks do not divide the columns, or importance does not fit or is negative or not finite.
    """
    kind = BLOCK_TYPES[type_name]
    rows, columns = values.shape
    if columns % kind.block_size:
        raise ValueError(f"{type_name}: {columns} columns are not a multiple of {kind.block_size}")
    factors = None if importance is None else normalized_importance(importance, columns)
    if type_name in FLOATS:
        return _encode_floats(kind, values, factors)
    row_blocks = columns // kind.block_size
    blocks = rows * row_blocks
    data = np.empty((blocks, kind.block_bytes), dtype=np.uint8)
    energies, errors = np.empty((2, blocks), dtype=np.float64)
    search = SEARCHES[type_name]
    native.call(
        search.kernel,
        kind.number,
        native.array(values, np.float32, blocks * kind.block_size),
        None if factors is None else native.array(factors, np.float32, columns),
        *_points(search.starts if factors is None else search.weighted_starts),
        *_points(search.factors),
        native.array(data, np.uint8, blocks * kind.block_bytes, written=True),
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
        if type_name == "Q1_0":  # the package lacks it, and the next one
            signs = np.unpackbits(data[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
            return np.ascontiguousarray(data[:, :2]).view("<f2") * signs
        if type_name == "Q2_0":
            codes = (data[:, 2:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8) & 3).astype(np.float32) - 1
            return np.ascontiguousarray(data[:, :2]).view("<f2") * codes.reshape(len(data), -1)
        decoded: Floats = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])
    return decoded.reshape(len(data), -1)


def _encode_floats(kind: BlockType, values: Floats, importance: Floats | None) -> Groups:
    """A block has the scales of its groups, then their codes, those of the first half of a group in the low bits."""
    rule, flat = FLOATS[kind.name], values.reshape(-1)
    groups = rule.quantize(flat) if importance is None else rule.quantize_weighted(flat, importance)
    in_block, half = kind.block_size // rule.group_size, rule.group_size // 2
    codes = groups.codes[:, :half] | groups.codes[:, half:] << 4
    scales = groups.scales.astype(np.uint8).reshape(-1, in_block)
    squares = (numbers.reshape(-1, in_block).T for numbers in (groups.energies, groups.errors))
    energies, errors = (functools.reduce(np.add, of_groups) for of_groups in squares)
    data = np.concatenate([scales, codes.reshape(len(scales), in_block * half)], axis=1)
    return _groups_of(data, energies, errors)


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
