"""One weight: how it is encoded, in which passes, and the whole of it in memory.

A weight is encoded in one pass over its blocks unless that pass shows otherwise: norms that leave float16's normal
range ask for another pass with a common exponent, and an error above 1.25 times the codec's promise asks for one with
the next rotation (the rescue). `next_pass` makes those decisions for the in-memory function below and for the
streaming driver alike. Block errors are added in block order, so no chunk size or thread count shows in the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.codecs import Codec, EncodedBlocks, get_codec
from pqweights.dtypes import item_bytes, to_float32
from pqweights.errors import SourceError
from pqweights.kernels import BLOCK_SIZE
from pqweights.kernels.codebook import Codebook

# A tensor whose relative error exceeds this many times the codec's distortion is rescued, or reported.
RESCUE_FACTOR = 1.25

SMALLEST_NORMAL_HALF = 2.0**-14
LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Pass:
    """One way through the blocks of a weight."""

    rotation: str
    norm_exponent: int


@dataclass(frozen=True)
class PassResult:
    """What a pass over all blocks measured. Norms are of non-zero blocks, before the exponent; (inf, 0.0) if none."""

    rotation: str
    norm_exponent: int
    smallest_norm: float
    largest_norm: float
    energy: float
    error: float

    @property
    def relative_mse(self) -> float:
        """Sum of squared errors over sum of squares; 0 for a weight of zeros."""
        return self.error / self.energy if self.energy else 0.0


class PassTotals:
    """Adds up the chunks of one pass; they must come in block order."""

    def __init__(self, this_pass: Pass) -> None:
        self._pass = this_pass
        self._smallest, self._largest = math.inf, 0.0
        self._energy, self._error = 0.0, 0.0

    def add(self, encoded: EncodedBlocks) -> None:
        """Account for the next blocks."""
        self._smallest = min(self._smallest, encoded.stats.smallest_norm)
        self._largest = max(self._largest, encoded.stats.largest_norm)
        self._energy = add_in_order(self._energy, encoded.energies)
        self._error = add_in_order(self._error, encoded.errors)

    def result(self) -> PassResult:
        """The totals so far."""
        return PassResult(
            self._pass.rotation, self._pass.norm_exponent, self._smallest, self._largest, self._energy, self._error
        )


def add_in_order(total: float, values: npt.NDArray[np.float64]) -> float:
    """total + values[0] + values[1] + ..., one addition after the other."""
    if len(values) == 0:
        return total
    running = np.add.accumulate(np.concatenate([[total], values]))
    return float(running[-1])


def norm_exponent_for(smallest: float, largest: float) -> int:
    """The exponent e with which norms are stored as float16(norm * 2**-e).

    0 where all non-zero norms are normal float16 numbers; else the one that puts the largest into [2**14, 2**15).
    """
    if largest == 0.0 or (smallest >= SMALLEST_NORMAL_HALF and largest <= LARGEST_HALF):
        return 0
    return math.frexp(largest)[1] - 1 - 14


def exceeds_promise(codec: Codec, bits: int, relative_mse: float) -> bool:
    """Whether an error is above what the codec may be trusted with."""
    return relative_mse > RESCUE_FACTOR * codec.distortion(bits)


def first_pass(codec: Codec) -> Pass:
    """The pass that nearly every weight needs alone."""
    return Pass(codec.rotations[0], 0)


def next_pass(codec: Codec, bits: int, history: Sequence[PassResult]) -> Pass | None:
    """What to do after the passes so far, or None when the last one stands.

    A rotation counts once its exponent fits its norms. Rotations are tried in the codec's order until one keeps the
    promise; if none does, the one with the smallest error stands, and `exceeds_promise` will report it.
    """
    last = history[-1]
    exponent = norm_exponent_for(last.smallest_norm, last.largest_norm)
    if last.norm_exponent != exponent:
        return Pass(last.rotation, exponent)
    if not exceeds_promise(codec, bits, last.relative_mse):
        return None
    tried = {result.rotation: result for result in history}  # the last pass of a rotation has the fitting exponent
    for rotation in codec.rotations:
        if rotation not in tried:
            return Pass(rotation, last.norm_exponent)
    best = min(tried.values(), key=lambda r: r.relative_mse)
    return None if best.rotation == last.rotation else Pass(best.rotation, best.norm_exponent)


def encode_chunk(
    codec: Codec,
    values: npt.NDArray[np.uint8],  # [blocks * 128 * itemsize], raw bytes
    weights: int,  # how many of the values count; the rest is padding, set to zero here
    dtype: str,
    bits: int,
    this_pass: Pass,
    codes: npt.NDArray[np.uint8],  # out: [blocks, code bytes]
) -> EncodedBlocks:
    """Encode the next blocks of a weight; only the last ones may hold padding, whose decoded error does not count."""
    size = item_bytes(dtype)
    values[weights * size :] = 0
    encoded = codec.encode(values, dtype, bits, this_pass.rotation, this_pass.norm_exponent, codes)
    used = weights % BLOCK_SIZE
    if used and encoded.stats.first_bad_block < 0:
        decoded = np.empty(BLOCK_SIZE * 4, dtype=np.uint8)
        codec.decode(
            codes[-1:],
            encoded.norms[-1:],
            "F32",
            codec.codebook(bits),
            this_pass.rotation,
            this_pass.norm_exponent,
            decoded,
        )
        last = to_float32(values[-BLOCK_SIZE * size :], dtype)[:used].astype(np.float64)
        difference = last - decoded.view(np.float32)[:used].astype(np.float64)
        encoded.errors[-1] = add_in_order(0.0, difference * difference)
    return encoded


def block_count(weights: int) -> int:
    """Blocks of 128 that hold `weights` weights; the last one is padded with zeros."""
    return -(-weights // BLOCK_SIZE)


@dataclass(frozen=True, eq=False)
class EncodedWeight:
    """A whole weight in memory: everything that decoding needs.

    codes: [blocks, code bytes] u8. norms: [blocks] float16 bits as u16. dtype: BF16, F16 or F32, that of `decode`.
    """

    shape: tuple[int, ...]
    dtype: str
    codec: str
    bits: int
    rotation: str
    norm_exponent: int
    codebook: Codebook
    codes: npt.NDArray[np.uint8]
    norms: npt.NDArray[np.uint16]

    def decode_blocks(self, start: int, stop: int, dtype: str) -> npt.NDArray[np.uint8]:
        """The raw bytes of blocks [start, stop) in `dtype`, padding included."""
        values = np.empty((stop - start) * BLOCK_SIZE * item_bytes(dtype), dtype=np.uint8)
        get_codec(self.codec).decode(
            self.codes[start:stop],
            self.norms[start:stop],
            dtype,
            self.codebook,
            self.rotation,
            self.norm_exponent,
            values,
        )
        return values

    def decode(self) -> npt.NDArray[np.uint8]:
        """The raw bytes of the weight in its own dtype, row-major."""
        return self.decode_blocks(0, len(self.codes), self.dtype)[: math.prod(self.shape) * item_bytes(self.dtype)]


def encode_weight(
    values: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...], codec: Codec, bits: int
) -> tuple[EncodedWeight, PassResult]:
    """Encode a weight that is in memory, given as the raw row-major bytes of dtype BF16, F16 or F32.

    Raises SourceError where the weight holds a NaN or an infinity.
    """
    padded = np.empty(block_count(math.prod(shape)) * BLOCK_SIZE * item_bytes(dtype), dtype=np.uint8)
    padded[: len(values)] = values
    codes = np.empty((block_count(math.prod(shape)), codec.code_bytes_per_block(bits)), dtype=np.uint8)
    history: list[PassResult] = []
    this_pass: Pass | None = first_pass(codec)
    while this_pass is not None:
        encoded = encode_chunk(codec, padded, math.prod(shape), dtype, bits, this_pass, codes)
        if encoded.stats.first_bad_block >= 0:
            raise SourceError(f"NaN or infinity in block {encoded.stats.first_bad_block} of the weight")
        totals = PassTotals(this_pass)
        totals.add(encoded)
        history.append(totals.result())
        this_pass = next_pass(codec, bits, history)
    last = history[-1]
    weight = EncodedWeight(
        shape, dtype, codec.name, bits, last.rotation, last.norm_exponent, codec.codebook(bits), encoded.codes,
        encoded.norms,
    )  # fmt: skip
    return weight, last
