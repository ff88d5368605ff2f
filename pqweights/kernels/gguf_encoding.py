"""Weights as GGUF blocks, with nearly the least squared error: what calls the encoders of each format.

Each format has a kernel of its own: cpu_gguf_affine.py has those of blocks whose parts have scales and offsets, and
cpu_gguf_symmetric.py those of the others. The sizes of the blocks are in gguf_types.py, and where the searches begin in
gguf_affine_formats.py and gguf_symmetric_formats.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.kernels import cpu, gguf_affine_formats, gguf_symmetric_formats
from pqweights.kernels.gguf_affine_formats import AffineFormat
from pqweights.kernels.gguf_symmetric_formats import SymmetricFormat
from pqweights.kernels.gguf_types import BLOCK_TYPES

Floats = npt.NDArray[np.float32]

_FORMATS: dict[str, AffineFormat | SymmetricFormat] = {**gguf_affine_formats.FORMATS, **gguf_symmetric_formats.FORMATS}
# type -> its kernel
KERNELS = {name: f"encode_gguf_{name.lower()}" for name in _FORMATS}
# Columns that hardly count are taken to count this much, of the one that counts most.
LEAST_IMPORTANCE = 2.0**-30
# A kernel may read so many settings, however few there are.
_ROOM_OF_SETTINGS = 256


@dataclass(frozen=True, eq=False, kw_only=True)
class EncodedBlocks:
    """Some blocks as a GGUF file has them.

    data: u8 [blocks, block bytes].
    energies, errors: f64 [blocks], the sums of squares of the weights and of their errors, whatever the importance;
        not finite where the weights are not.
    """

    data: npt.NDArray[np.uint8]
    energies: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]


def encode_blocks(type_name: str, values: Floats, importance: Floats | None) -> EncodedBlocks:
    """Weights f32 [rows, columns] as blocks of a type (a key of KERNELS), row by row.

    importance: f32 [columns], the second moments of the inputs at any scale, by which squared errors count; None: all
    the same. A block's bytes depend on nothing but its weights and the importance of all columns.
    Raises ValueError if blocks do not divide the columns, or importance does not fit or is negative or not finite.
    """
    kind = BLOCK_TYPES[type_name]
    rows, columns = values.shape
    if columns % kind.block_size:
        raise ValueError(f"{type_name}: {columns} columns are not a multiple of {kind.block_size}")
    factors = None if importance is None else normalized_importance(importance, columns)
    row_blocks = columns // kind.block_size
    blocks = rows * row_blocks
    out = EncodedBlocks(
        data=np.empty((blocks, kind.block_bytes), dtype=np.uint8),
        energies=np.empty(blocks, dtype=np.float64),
        errors=np.empty(blocks, dtype=np.float64),
    )
    settings = encoder_settings(type_name, weighted=factors is not None)
    cpu.run(
        KERNELS[type_name],
        cpu.address(values, np.float32, blocks * kind.block_size),
        0 if factors is None else cpu.address(factors, np.float32, columns),
        cpu.address(settings, np.float32, _ROOM_OF_SETTINGS),
        cpu.address(out.data, np.uint8, blocks * kind.block_bytes, written=True),
        cpu.address(out.energies, np.float64, blocks, written=True),
        cpu.address(out.errors, np.float64, blocks, written=True),
        blocks,
        row_blocks,
        factors is not None,
    )
    return out


def normalized_importance(importance: Floats, columns: int) -> Floats | None:
    """Importance at a scale at which the largest is in [0.5, 1), and none is 0; None if all are 0."""
    if importance.shape != (columns,):
        raise ValueError(f"expected the importance of {columns} columns, found an array of shape {importance.shape}")
    most, least = importance.max(initial=0), importance.min(initial=0)
    if not (np.isfinite(most) and least >= 0):
        raise ValueError(f"importance has to be finite and not negative; found {least} to {most}")
    if most == 0:
        return None
    scaled = np.ldexp(importance, -np.frexp(most)[1])  # by a power of two: exact
    return np.asarray(np.maximum(scaled, LEAST_IMPORTANCE), dtype=np.float32)


def encoder_settings(type_name: str, *, weighted: bool) -> Floats:
    """Where the search of an encoder begins and how long it goes on: f32 [_ROOM_OF_SETTINGS], the unused ones 0."""
    numbers = _FORMATS[type_name].settings(weighted=weighted)
    settings = np.zeros(_ROOM_OF_SETTINGS, dtype=np.float32)
    settings[: len(numbers)] = numbers
    return settings
