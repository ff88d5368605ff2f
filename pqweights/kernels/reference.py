"""The reference backend, in torch: every operation of docs/format.md in its order, on any device.

It defines what the compiled kernels must return, byte for byte (tests/kernels/test_kernels.py). It is not meant to be
fast.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pqweights.kernels import BLOCK_SIZE, FIELD_WIDTHS, SIGNS, BlockCoding, Doubles, Encoded, Measures

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

# Sums of squares in this range need no prescaling: their squares neither overflow nor vanish.
SMALLEST_SAFE_SQUARE = 2.0**-60
LARGEST_SAFE_SQUARE = 2.0**60


def hadamard(x: Tensor) -> Tensor:  # [blocks, 128] f32 -> [blocks, 128] f32
    """The unnormalised Sylvester Walsh-Hadamard transform, by butterflies h = 1, 2, 4, ..., 64; twice gives 128 x."""
    h = 1
    while h < BLOCK_SIZE:
        pairs = x.reshape(-1, BLOCK_SIZE // (2 * h), 2, h)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack([low + high, low - high], dim=2).reshape(-1, BLOCK_SIZE)
        h *= 2
    return x


def tree_sum(x: Tensor) -> Tensor:  # [blocks, 128] f32 -> [blocks] f32
    """The sum of each block, by folding the upper half onto the lower one until one number is left."""
    h = BLOCK_SIZE // 2
    while h:
        x = x[:, :h] + x[:, h : 2 * h]
        h //= 2
    return x[:, 0]


def pack(codes: Tensor, bits: int) -> Tensor:  # [blocks, 128] u8 -> [blocks, 16 * bits] u8
    """Cut each code into fields (low bits first), and fold the 128 values of each field into 16 * width bytes."""
    fields, shift = [], 0
    for width in FIELD_WIDTHS[bits]:
        field = (codes >> shift) & ((1 << width) - 1)
        folded = field.reshape(-1, 8 // width, 16 * width)
        packed = folded[:, 0]
        for m in range(1, 8 // width):
            packed = packed | (folded[:, m] << (width * m))
        fields.append(packed)
        shift += width
    return torch.cat(fields, dim=1)


def unpack(packed: Tensor, bits: int) -> Tensor:  # [blocks, 16 * bits] u8 -> [blocks, 128] u8
    """The inverse of `pack`."""
    codes = torch.zeros(packed.shape[0], BLOCK_SIZE, dtype=torch.uint8, device=packed.device)
    shift = 0
    for width in FIELD_WIDTHS[bits]:
        field = packed[:, 16 * shift : 16 * (shift + width)]
        folded = [(field >> (width * m)) & ((1 << width) - 1) for m in range(8 // width)]
        codes |= torch.cat(folded, dim=1) << shift
        shift += width
    return codes


def power_of_two(k: Tensor) -> Tensor:  # i32 -> f64
    """2**k, exactly."""
    return torch.ldexp(torch.ones_like(k, dtype=torch.float64), k)


def prescale(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [blocks, 128] f32 times 2**-k, their sums of squares [blocks] f32, and k [blocks] i32.

    k is 0 unless the sum of squares leaves the safe range; then it is the binary exponent of the largest magnitude.
    The factor is applied as two exact powers of two, because 2**149 exceeds float32.
    """
    squares = tree_sum(x * x)
    safe = (squares >= SMALLEST_SAFE_SQUARE) & (squares <= LARGEST_SAFE_SQUARE)
    largest = x.abs().amax(dim=1)
    exponent = torch.frexp(largest.to(torch.float64)).exponent - 1
    k = torch.where(safe | (largest == 0) | ~torch.isfinite(largest), 0, exponent).to(torch.int32)
    half = torch.div(k, 2, rounding_mode="trunc")
    scaled = x * power_of_two(-half).float()[:, None] * power_of_two(half - k).float()[:, None]
    return scaled, tree_sum(scaled * scaled), k


def encode_blocks(x: Tensor, coding: BlockCoding) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Encode finite blocks [blocks, 128] f32.

    Returns the packed codes u8 [blocks, 16 * bits], the norms f16 [blocks], and in f64 [blocks] the energies, the
    errors and the norms before scaling and rounding.
    """
    levels = torch.from_numpy(coding.codebook.levels).to(x.device)
    thresholds = torch.from_numpy(coding.codebook.thresholds).to(x.device)
    if coding.signed:
        x = x * torch.from_numpy(SIGNS).to(x.device)
    x, squares, k = prescale(x)
    # Through float64: torch's float32 square root on the CPU is not always the nearest float (it differs in a sixth of
    # random arguments), while rounding the float64 root to float32 is exact (24 bits need 2 * 24 + 2 < 53).
    radius = torch.sqrt(squares.double()).float()
    inverse = torch.where(radius > 0, 1 / radius, 0)
    z = hadamard(x) * inverse[:, None]
    codes = torch.bucketize(z, thresholds, right=True)
    c = levels[codes]
    projection, level_energy, residual = tree_sum(z * c), tree_sum(c * c), tree_sum((z - c) * (z - c))
    norm = radius * (projection / level_energy)

    two_to_k = power_of_two(k)
    exact_norms = norm.double() * two_to_k * coding.gain
    norms = (exact_norms * 2.0**-coding.norm_exponent).float().half()

    energies = squares.double() * two_to_k * two_to_k
    stored = norms.double() * 2.0**coding.norm_exponent
    short = 1 - torch.where(radius > 0, stored / (radius.double() * two_to_k), 0)
    per_block = residual.double() + 2 * short * (projection.double() - level_energy.double())
    per_block = (per_block + short * short * level_energy.double()).clamp(min=0)
    errors = torch.where(radius > 0, energies / BLOCK_SIZE * per_block, 0)
    return pack(codes.to(torch.uint8), coding.codebook.bits), norms, energies, errors, exact_norms


def decode_blocks(packed: Tensor, norms: Tensor, coding: BlockCoding) -> Tensor:
    """The inverse of `encode_blocks`, up to quantization.

    packed: u8 [blocks, 16 * bits]. norms: f16 [blocks]. Returns f32 [blocks, 128].
    """
    levels = torch.from_numpy(coding.codebook.levels).to(packed.device)
    scale = (norms.double() * 2.0 ** (coding.norm_exponent - 7)).float()
    x = hadamard(levels[unpack(packed, coding.codebook.bits).long()]) * scale[:, None]
    return x * torch.from_numpy(SIGNS).to(packed.device) if coding.signed else x


def encode(values: npt.NDArray[np.uint8], dtype: str, coding: BlockCoding, encoded: Encoded) -> Measures:
    """Encode whole blocks, with norms of least squared error."""
    x = torch.from_numpy(values).view(TORCH_DTYPES[dtype]).float().reshape(-1, BLOCK_SIZE)
    bad = (~torch.isfinite(x)).any(dim=1).nonzero()
    codes, norms, energies, errors, exact = encode_blocks(x, coding)
    encoded[0][:] = codes.numpy()
    encoded[1][:] = norms.numpy().view(np.uint16)
    nonzero = exact[exact > 0]
    return Measures(
        energies.numpy(),
        errors.numpy(),
        int(bad[0]) if len(bad) else -1,
        float(nonzero.min()) if len(nonzero) else float("inf"),
        float(nonzero.max()) if len(nonzero) else 0.0,
    )


def decode(
    encoded: Encoded,
    coding: BlockCoding,
    dtype: str,
    values: npt.NDArray[np.uint8],
) -> None:
    """Decode whole blocks into `values`."""
    codes, norms = encoded
    x = decode_blocks(torch.from_numpy(codes), torch.from_numpy(norms.view(np.float16)), coding)
    target = TORCH_DTYPES[dtype]
    limit = torch.finfo(target).max
    rounded = x.clamp(-limit, limit).to(target).reshape(-1).contiguous()
    values[:] = rounded.view(torch.uint8).numpy()


def add_in_order(totals: Doubles, *summands: Doubles) -> None:
    """Add the elements of one to three arrays [n] to their totals [arrays], one after the other."""
    for index, values in enumerate(summands):
        totals[index] = np.add.accumulate(np.append(totals[index], values))[-1]
