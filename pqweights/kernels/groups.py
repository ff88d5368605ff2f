"""Integers for runtimes: groups of weights to codes, scales and offsets, and codes to the bytes of each packing.

A group is some consecutive weights of a row that share a scale and an offset. The rules and their arithmetic are in
docs/exports.md. There is one implementation, for the CPU: after a decoding on the GPU the integers are still made here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.dtypes import FLOAT4_VALUES, float8_table
from pqweights.kernels import BLOCK_SIZE, ORTHONORMAL, cpu

# How scale and offset are chosen: to minimise the squared error, or as a runtime's own converter does (cpu_groups.py).
BEST = "best"
RUNTIME_RULES = {"mlx": 1, "torchao": 2, "compressed-tensors": 3}
FLOAT_MODES = {"mxfp4": 0, "mxfp8": 1, "nvfp4": 2}


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    """How a group becomes integers.

    A weight is read back as code * scale + offset, codes counting from 0; with `middle`, as (code - 2**(bits - 1)) *
    scale + offset. symmetric: `middle`, and the offset is 0. rule: BEST, or a key of RUNTIME_RULES. Scales and offsets are BF16.
    """

    bits: int
    group_size: int
    symmetric: bool
    middle: bool
    rule: str

    @property
    def name(self) -> str:
        """Of the rule."""
        return self.rule

    @property
    def kind(self) -> str:
        """symmetric or affine."""
        return "symmetric" if self.symmetric else "affine"

    def quantize(self, values: npt.NDArray[np.float32]) -> Groups:
        """[groups * group size] finite weights as integers."""
        groups = len(values) // self.group_size
        assert groups * self.group_size == len(values)
        result = _empty_groups(groups, self.group_size)
        out = (result.codes, result.scales, result.offsets, result.energies, result.errors)
        if self.rule == BEST:
            cpu.fit_groups(
                values,
                _settings(self.symmetric, self.bits, self.group_size),
                *out,
                self.bits,
                self.symmetric,
                self.middle,
            )
        else:
            cpu.round_groups(values, *out, self.bits, RUNTIME_RULES[self.rule])
        return result

    def decode(self, groups: Groups) -> npt.NDArray[np.float32]:
        """What a runtime computes with, in float32: [groups, group size]."""
        codes = groups.codes.astype(np.float32)
        if self.middle:
            codes -= np.float32(2 ** (self.bits - 1))
        return codes * groups.scales[:, None] + groups.offsets[:, None]


@dataclass(frozen=True)
class FloatRule:
    """A floating mode of mlx (a key of FLOAT_MODES): E2M1 or E4M3 codes, and per group a scale in E8M0 or E4M3.

    `Groups.scales` are the bytes of the scales, as numbers. Formats: OCP microscaling formats specification 1.0; nvfp4
    without a scale per tensor.
    """

    kind: str
    bits: int
    group_size: int
    name: str = "mlx"

    def quantize(self, values: npt.NDArray[np.float32]) -> Groups:
        """[groups * group size] finite weights, by mlx's rule."""
        groups = len(values) // self.group_size
        assert groups * self.group_size == len(values)
        result = _empty_groups(groups, self.group_size)
        result.offsets[:] = 0
        cpu.round_floats(values, result.codes, result.scales, result.energies, result.errors, FLOAT_MODES[self.kind])
        return result

    def decode(self, groups: Groups) -> npt.NDArray[np.float32]:
        """What mlx computes with, in float32: [groups, group size]."""
        scales = float8_table("F8_E4M3" if self.kind == "nvfp4" else "F8_E8M0")[groups.scales.astype(np.uint8)]
        values = FLOAT4_VALUES if self.bits == 4 else float8_table("F8_E4M3")
        return values[groups.codes] * scales[:, None]


@dataclass(frozen=True, eq=False)
class Groups:
    """Some groups as integers.

    codes: [groups, group size] u8. scales, offsets: [groups] f32, BF16 numbers. energies, errors:
    [groups] f64, sums of squares of the weights and of their errors.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.float32]
    energies: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]


def _empty_groups(groups: int, size: int) -> Groups:
    return Groups(
        np.empty((groups, size), dtype=np.uint8),
        np.empty(groups, dtype=np.float32),
        np.empty(groups, dtype=np.float32),
        np.empty(groups, dtype=np.float64),
        np.empty(groups, dtype=np.float64),
    )


@functools.lru_cache
def _settings(symmetric: bool, bits: int, group_size: int) -> npt.NDArray[np.float32]:
    """Where the chains of lanes.py start, and how far they step: found best by search, on the three kinds of weights of
    benchmarks/peers.py together; the optimum is flat.

    Affine: the range shrunk to a share, of which 1.2 steps are then cut at the lower end, at the upper end, or half at each.
    Symmetric: the largest weight times three shares.
    """
    if symmetric:
        share, cut = {
            2: (0.9, 0.4), 3: (0.95, 0.3), 4: (1.02, 0.2), 5: (1.05, 0.12), 6: (1.05, 0.06), 7: (1.04, 0.05), 8: (1.02, 0.02),
        }[bits]  # fmt: skip
        pairs = [share] * 2 + [share * (1 - cut / 2)] * 2 + [share * (1 - cut)] * 2
        return np.array([*pairs, 6 if bits == 8 else 3], dtype=np.float32)
    small, large = {2: (0.9, 0.9), 3: (1.0, 0.9), 4: (1.0, 0.95), 5: (1.03, 1.0)}.get(bits, (1.01, 1.01))
    share = small if group_size <= 64 else large
    if bits == 4 and group_size <= 32:
        share = 1.03
    cut = share * (1 - 1.2 / (2**bits - 1))
    pairs = [share, cut, cut, share, (share + cut) / 2, (share + cut) / 2]
    return np.array([*pairs, {2: 2, 7: 4, 8: 5}.get(bits, 3)], dtype=np.float32)


def rotate(values: npt.NDArray[np.float32]) -> None:
    """Multiply each run of 128 values by H / sqrt(128), in place; its own inverse."""
    cpu.rotate(values, ORTHONORMAL)


def pack_bits(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Codes below 2**bits as one stream of bits, the lowest first; their number is a multiple of 8."""
    packed = np.empty(codes.size * bits // 8, dtype=np.uint8)
    cpu.pack_bits(codes.reshape(-1), bits, packed)
    return packed


# Where in a tile (row * 128 + column) each nibble of the packed words comes from, lowest nibbles first.
TILE_ORDER: npt.NDArray[np.int32] = np.ascontiguousarray(
    np.arange(8 * BLOCK_SIZE, dtype=np.int32).reshape(8, 4, 2, 2, 4, 2).transpose(0, 4, 1, 5, 2, 3).reshape(-1)
)


def pack_tiles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[8 * m, 128 * n] 4-bit codes in tiles of 8 x 128, as PyTorch's tinygemm kernel reads them: the bytes of [m, n, 32, 4] i32.

    The layout of aten::_convert_weight_to_int4pack with inner_k_tiles 8 (PyTorch, aten/src/ATen/native/cuda/int4mm.cu).
    """
    rows, columns = codes.shape
    packed = np.empty(rows * columns // 2, dtype=np.uint8)
    cpu.pack_tiles(codes, TILE_ORDER, packed)
    return packed
