"""Hadamard rotation and the recursive polar transform of 16 coordinates: PolarQuant for KV caches, for weights.

Han et al., arXiv:2502.02617: rotate, turn each 16 coordinates into 15 angles and a radius, quantize the angles, and
keep the radius in 16 bits. The codec has one rate, 3.875 bits, and no norm per block. For weights it is there for
comparison: at its size other codecs err less (docs/quality.md). The rotation is that of the other codecs, the
Walsh-Hadamard matrix of order 128, where the paper has a random one for the whole vector. docs/format.md, section 9,
has the bytes. The first steps, on columns of blocks, are those of every codec (section 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.codecs import polar_transform
from pqweights.codecs.polar_transform import RELATIVE_MSE
from pqweights.codecs.protocol import (
    Bytes,
    Codec,
    Coder,
    Floats,
    Measures,
    NormRange,
    Part,
    PassResult,
    State,
    check_effort,
    unknown_rate,
)
from pqweights.codecs.scalar import (
    HADAMARD,
    LARGEST_HALF,
    ROTATIONS,
    SIGNED_HADAMARD,
    ScalarState,
    check_norms,
    parse_rotated,
    state_after,
)
from pqweights.common.dtypes import FINITE_RANGES, from_float32, item_bytes, to_float32
from pqweights.kernels import BLOCK_SIZE, ORTHONORMAL, SIGNS

# Blocks that are encoded together: few enough for their temporary arrays to stay in the cache, and enough to make the
# cost of the numpy calls small.
PIECE_BLOCKS = 1024

# Sums of squares in this range need no prescaling: their squares neither overflow nor vanish.
SMALLEST_SAFE_SQUARE = 2.0**-60
LARGEST_SAFE_SQUARE = 2.0**60


def prescale(x: Floats) -> tuple[Floats, Floats, npt.NDArray[np.int32]]:
    """Scale the blocks whose sums of squares would overflow or vanish (docs/format.md, section 5, step 2).

    x: blocks, [128, blocks]

    Returns the blocks times 2**-k, their sums of squares [blocks], and k [blocks].
    """
    with np.errstate(over="ignore"):
        squares = tree_sum(x * x)
    k = np.zeros(len(squares), dtype=np.int32)
    unsafe = np.flatnonzero(~((squares >= SMALLEST_SAFE_SQUARE) & (squares <= LARGEST_SAFE_SQUARE)))
    if len(unsafe):
        largest = np.abs(x[:, unsafe]).max(axis=0)
        exponent = np.where(largest > 0, np.frexp(largest.astype(np.float64))[1] - 1, 0)
        half = np.trunc(exponent / 2).astype(np.int32)  # in two steps, because 2**149 is not a float32
        one = np.float32(1)
        scaled = x[:, unsafe] * np.ldexp(one, -half) * np.ldexp(one, half - exponent)
        squares[unsafe] = tree_sum(scaled * scaled)
        x = x.copy()
        x[:, unsafe] = scaled
        k[unsafe] = exponent
    return x, squares, k


def hadamard(x: Floats) -> Floats:  # [128, blocks] -> [128, blocks]
    """Return the unnormalised Walsh-Hadamard transform of each column, by butterflies h = 1, 2, 4, ..., 64."""
    h = 1
    while h < BLOCK_SIZE:
        pairs = x.reshape(BLOCK_SIZE // (2 * h), 2, h, -1)
        x = np.empty_like(x)
        result = x.reshape(pairs.shape)
        np.add(pairs[:, 0], pairs[:, 1], out=result[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=result[:, 1])
        h *= 2
    return x


def tree_sum(x: Floats) -> Floats:  # [128, blocks] -> [blocks]
    """Return the sum of each column, added by folding one half of it onto the other."""
    h = BLOCK_SIZE // 2
    while h:
        x = x[:h] + x[h : 2 * h]
        h //= 2
    total: Floats = x[0]
    return total


ANGLES = "_angles"
RADII = "_radii"
RATE = 3.875

_ROOT_OF_BLOCK_SIZE = math.sqrt(BLOCK_SIZE)


class PolarAngles(Codec):
    """The codec; see Codec."""

    name = "polar"
    suffixes = (ANGLES, RADII)
    rates = (RATE,)
    block_size = BLOCK_SIZE
    state_defaults: Mapping[str, Any] = {"rotation": HADAMARD, "norm_exponent": 0}
    papers = (
        "Han, Kacham, Karbasi, Mirrokni and Zandieh, *PolarQuant: Quantizing KV Caches with Polar Transformation*, "
        "[arXiv:2502.02617](https://arxiv.org/abs/2502.02617): the method.",
    )

    def coder(self, bits: float, effort: int | None = None) -> PolarCoder:
        """See Codec."""
        check_effort(self, effort)
        if bits not in self.rates:
            raise unknown_rate(self, bits)
        return PolarCoder()


@dataclass(frozen=True)
class PolarCoder(Coder):
    """The codec at its rate; see Coder."""

    codec = PolarAngles.name
    bits = RATE
    block_size = BLOCK_SIZE
    parts = (Part(ANGLES, "U8", polar_transform.ANGLE_BYTES), Part(RADII, "F16", polar_transform.GROUPS))
    distortion = RELATIVE_MSE
    orthogonal_error = False  # because radii are those of the weights, not of least squares

    def first_state(self) -> ScalarState:
        """See Coder."""
        return ScalarState(HADAMARD, 0)

    def next_state(self, history: Sequence[PassResult]) -> ScalarState | None:
        """See Coder; rotation and exponent are found as for the scalar codecs."""
        return state_after(self, ROTATIONS, history)

    def parse_state(self, values: Mapping[str, Any]) -> ScalarState:
        """See Coder."""
        return parse_rotated(self, ScalarState, ROTATIONS, values)

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str, state: State) -> Measures:
        """See Coder."""
        assert isinstance(state, ScalarState)
        angles, radii = parts[0], parts[1].view(np.float16)
        energies, errors = np.empty((2, len(angles)), dtype=np.float64)
        norms, first_bad = NormRange(), -1
        for here, raw in _pieces(values, len(angles), dtype):
            x = to_float32(raw, dtype).reshape(-1, BLOCK_SIZE).T.copy()
            bad = np.flatnonzero(~np.isfinite(x).all(axis=0))
            if len(bad):
                x[:, bad] = 0
                first_bad = here.start + int(bad[0]) if first_bad < 0 else first_bad
            of_angles, of_radii, piece = _encode(x, state)
            angles[here], radii[here] = of_angles.T, of_radii.T
            energies[here], errors[here] = piece.energies, piece.errors
            norms = norms.merged(piece.norms)
        return Measures(energies=energies, errors=errors, first_bad_block=first_bad, norms=norms)

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str, state: State) -> None:
        """See Coder."""
        assert isinstance(state, ScalarState)
        self.check(parts, state)
        angles, radii = parts[0], np.ascontiguousarray(parts[1]).view(np.float16)
        for here, raw in _pieces(values, len(angles), dtype):
            y = _decode(np.ascontiguousarray(angles[here].T), np.ascontiguousarray(radii[here].T), state)
            raw[:] = from_float32(np.clip(y.T, *FINITE_RANGES[dtype]).reshape(-1), dtype)

    def check(self, parts: Sequence[Bytes], state: State) -> None:
        """See Coder."""
        check_norms(parts[1], state, "a radius")


def _pieces(values: Bytes, blocks: int, dtype: str) -> Iterator[tuple[slice, Bytes]]:
    """Yield slices of the blocks with their raw values."""
    block_bytes = BLOCK_SIZE * item_bytes(dtype)
    for first in range(0, blocks, PIECE_BLOCKS):
        here = slice(first, min(first + PIECE_BLOCKS, blocks))
        yield here, values[here.start * block_bytes : here.stop * block_bytes]


def _encode(x: Floats, state: ScalarState) -> tuple[Bytes, npt.NDArray[np.float16], Measures]:
    """Encode blocks of finite values, [128, blocks]; return packed angle codes [46, blocks] and radii [8, blocks]."""
    if state.rotation == SIGNED_HADAMARD:
        x = x * SIGNS[:, None]
    x, squares, k = prescale(x)
    z = hadamard(x)
    angles, of_groups = polar_transform.transform(z.T, polar_transform.angle_codes)
    codes, lengths = [of_level.T for of_level in angles], of_groups.T
    exact = np.ldexp(lengths.astype(np.float64) * ORTHONORMAL, k)
    # No radius is clipped in the last pass, whose exponent fits.
    radii = np.minimum(np.ldexp(exact, -state.norm_exponent), LARGEST_HALF).astype(np.float16)
    decoded = np.ldexp(radii.astype(np.float64) * _ROOT_OF_BLOCK_SIZE, state.norm_exponent - k).astype(np.float32)
    z -= _directions(codes) * np.repeat(decoded, len(z) // len(decoded), axis=0)
    z *= z
    used = exact[exact > 0]
    measures = Measures(
        energies=np.ldexp(squares.astype(np.float64), 2 * k),
        errors=np.ldexp(tree_sum(z).astype(np.float64) / BLOCK_SIZE, 2 * k),
        first_bad_block=-1,
        norms=NormRange(float(used.min(initial=math.inf)), float(used.max(initial=0.0))),
    )
    return polar_transform.pack(codes), radii, measures


def _decode(angles: Bytes, radii: npt.NDArray[np.float16], state: ScalarState) -> Floats:
    """Decode blocks: packed codes [46, blocks] and radii [8, blocks] to values [128, blocks], some perhaps infinite."""
    x = _directions(polar_transform.unpack(angles))
    scale = radii.astype(np.float64) * ORTHONORMAL
    x *= np.repeat(scale.astype(np.float32), len(x) // len(scale), axis=0)
    x = hadamard(x)
    if state.norm_exponent:
        with np.errstate(over="ignore"):
            x = np.ldexp(x, state.norm_exponent)
    return x * SIGNS[:, None] if state.rotation == SIGNED_HADAMARD else x


def _directions(codes: Sequence[npt.NDArray[np.uint8]]) -> Floats:
    """Return the unit vectors of codes, [128 / 2**level, blocks] each -> [128, blocks]."""
    result: Floats = polar_transform.directions([of_level.T for of_level in codes], _pairs_of).T
    return result


def _pairs_of(level: int, codes: npt.NDArray[np.uint8]) -> Floats:
    """Return cosines and sines of the centroids of codes, [blocks, n] -> [blocks, n, 2], transposed in memory."""
    pairs = np.empty((codes.shape[1], 2, codes.shape[0]), dtype=np.float32)
    for place, table in enumerate(polar_transform.unit_vectors(level)):
        table.take(codes.T, out=pairs[:, place], mode="clip")
    return pairs.transpose(2, 0, 1)
