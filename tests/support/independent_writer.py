"""An encoder of one weight, written from docs/format.md (section 5) alone: plain numpy, all blocks at once.

It shares no code with the package, so equal bytes show that the page specifies them completely.
"""

from typing import NamedTuple

import numpy as np
from independent_reader import BLOCK, FIELDS, SIGNS, decode_blocks, hadamard

RESCUE = 1.25
# Of the levels of 2 and 3 bits, at which norms are enlarged.
ENLARGED = {2: 0.117481848, 3: 0.0345477608}


class Weight(NamedTuple):
    """An encoded weight and its measures, as section 5 defines them."""

    codes: np.ndarray  # uint8 (blocks, 16 * bits)
    norms: np.ndarray  # uint16 (blocks,): the bits of float16
    norm_exponent: int
    rotation: str
    energy: float
    squared_error: float
    relative_mse: float


def tree(v: np.ndarray) -> np.ndarray:
    """The sum of every row, folded in halves."""
    h = BLOCK // 2
    while h:
        v = v[:, :h] + v[:, h : 2 * h]
        h //= 2
    return v[:, 0]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Bytes of shape (blocks, 16 * bits) from codes of shape (blocks, 128)."""
    parts = []
    shift = 0
    for width in FIELDS[bits]:
        values = codes >> shift & ((1 << width) - 1)
        count = 16 * width
        part = np.zeros((codes.shape[0], count), dtype=np.int64)
        for m in range(8 // width):
            part |= values[:, m * count : (m + 1) * count] << (m * width)
        parts.append(part)
        shift += width
    return np.concatenate(parts, axis=1).astype(np.uint8)


def blocks_of(values: np.ndarray) -> np.ndarray:
    """Float32 blocks of a weight, the last one padded with zeros."""
    flat = np.asarray(values, dtype=np.float32).reshape(-1)
    count = -(-flat.size // BLOCK)
    blocks = np.zeros(count * BLOCK, dtype=np.float32)
    blocks[: flat.size] = flat
    return blocks.reshape(count, BLOCK)


def power(exponent: np.ndarray) -> np.ndarray:
    """2**exponent in float64."""
    return np.ldexp(np.float64(1), exponent)


def norm_exponent(norm: np.ndarray) -> int:
    """The exponent e of a weight whose least-squares norms are given in float64."""
    used = norm[norm != 0]
    if used.size == 0 or (used.min() >= 2.0**-14 and used.max() <= 65504):
        return 0
    return int(np.frexp(used.max())[1]) - 1 - 14


class Blocks(NamedTuple):
    """Blocks times 2**-k, for a whole number k of each block, and their squared lengths."""

    values: np.ndarray  # float32 (blocks, 128)
    squares: np.ndarray  # float32 (blocks,)
    k: np.ndarray  # int (blocks,)


def prescaled(b: np.ndarray) -> Blocks:
    """Scale the blocks whose squared length is outside [2**-60, 2**60]."""
    s = tree(b * b)
    largest = np.abs(b).max(axis=1, initial=0)
    scaled = ~((s >= np.float32(2.0**-60)) & (s <= np.float32(2.0**60))) & (largest > 0)
    k = np.where(scaled, np.frexp(largest.astype(np.float64))[1] - 1, 0)
    a = np.where(k < 0, -(-k // 2), k // 2)
    smaller = b * power(-a).astype(np.float32)[:, None] * power(a - k).astype(np.float32)[:, None]
    b = np.where(scaled[:, None], smaller, b)
    return Blocks(b, np.where(scaled, tree(b * b), s), k)


def codes_of(z: np.ndarray, level: np.ndarray) -> np.ndarray:
    """The code of every coordinate: the number of thresholds that it reaches."""
    threshold = ((level[:-1].astype(np.float64) + level[1:].astype(np.float64)) / 2).astype(np.float32)
    code = np.zeros(z.shape, dtype=np.int64)
    for t in threshold:
        code += z >= t
    return code


def in_order(values: np.ndarray) -> float:
    """The sum of numbers, one after the other."""
    total = 0.0
    for value in values.tolist():
        total += value
    return total


def encode_rotated(values: np.ndarray, levels: np.ndarray, bits: int, rotation: str, gain: float = 1.0) -> Weight:
    """A weight encoded with one rotation. gain: the factor of the least-squares norms."""
    level = np.asarray(levels, dtype=np.float64).astype(np.float32)
    b = blocks_of(values)
    if not np.isfinite(b).all():
        raise ValueError("not finite")
    if rotation == "signed-hadamard":
        b = np.where(SIGNS, -b, b)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        b, s, k = prescaled(b)
        r = np.sqrt(s)
        z = hadamard(b) * np.where(r == 0, np.float32(0), np.float32(1) / r)[:, None]
        code = codes_of(z, level)
        c = level[code]
        num, den, res = tree(z * c), tree(c * c), tree((z - c) * (z - c))
        q = r * (num / den)
        assert q.dtype == z.dtype == np.float32
        norm = q.astype(np.float64) * power(k) * gain
        e = norm_exponent(norm)
        n = (norm * 2.0**-e).astype(np.float32).astype(np.float16)
        energy = s.astype(np.float64) * power(k) * power(k)
        u = 1 - n.astype(np.float64) * 2.0**e / (r.astype(np.float64) * power(k))
        num64, den64, res64 = (v.astype(np.float64) for v in (num, den, res))
        error = energy / 128 * ((res64 + 2 * u * (num64 - den64)) + u * u * den64)
        error = np.where(r == 0, 0.0, np.maximum(error, 0.0))
    used = np.asarray(values).size % BLOCK
    if used:
        y = decode_blocks(pack(code, bits)[-1:], n[-1:], level, bits, rotation, e)[0, :used].astype(np.float64)
        error[-1] = in_order((blocks_of(values)[-1, :used].astype(np.float64) - y) ** 2)
    energy_sum, error_sum = in_order(energy), in_order(error)
    relative = error_sum / energy_sum if energy_sum != 0 else 0.0
    return Weight(pack(code, bits), n.view(np.uint16), e, rotation, energy_sum, error_sum, relative)


def encode(values: np.ndarray, levels: np.ndarray, bits: int, distortion: float) -> Weight:
    """A weight encoded as section 5 says, the rescue included."""
    gain = 1 / (1 - ENLARGED[bits]) if bits in ENLARGED else 1.0
    distortion *= gain
    plain = encode_rotated(values, levels, bits, "hadamard", gain)
    if plain.relative_mse <= RESCUE * distortion:
        return plain
    signed = encode_rotated(values, levels, bits, "signed-hadamard", gain)
    if signed.relative_mse <= RESCUE * distortion:
        return signed
    return signed if signed.relative_mse < plain.relative_mse else plain
