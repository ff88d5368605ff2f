"""Keys and values that a fixed orthogonal matrix rotates first (arXiv:2502.02617, Section 2.2), whatever they were.

`RotatedScalar` is the scalar case of TurboQuant (arXiv:2504.19874): a rotated vector is divided by its norm, after
which its coordinates are nearly Gaussian, and take the levels that masters have. The factor that is stored is not the
norm but the one with the least error, <x, levels> / <levels, levels>, which costs nothing.

`RecursivePolar` is PolarQuant of Han et al. (arXiv:2502.02617): after a random rotation the angles of the transform
(polar_transform.py; Definition 1, Section 4.1) follow known densities (Lemma 2), so that their codebooks need no
data, and nothing but the radius has to be stored with the codes:
(16 + 8 * 4 + (4 + 2 + 1) * 2) / 16 = 3.875 bits for each coordinate.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pqweights.kernels.attention import MOST_SIZE, hadamard_scores, weighted_values
from pqweights.runtime.kv.codes import coded, halves, levels_of, pack, packed_bytes, unpack, width_tables
from pqweights.runtime.kv.polar_transform import ANGLE_BITS, GROUP, angle_codes, directions, transform, unit_vectors
from pqweights.runtime.kv.states import Parts, StateQuantizer

SEED = 0x51A75

Doubles = npt.NDArray[np.float64]


@functools.cache
def rotation(size: int, device: torch.device) -> Tensor:
    """Return the matrix R by whose transpose vectors of `size` coordinates are multiplied, [size, size] f32."""
    with torch.inference_mode(False):  # later calls may need gradients
        matrix = _hadamard(size) if size & (size - 1) == 0 else _dense(size)
        return torch.from_numpy(matrix.astype(np.float32)).to(device)


def _hadamard(size: int) -> Doubles:
    """Return H diag(signs) / sqrt(size)."""
    index = np.arange(size)
    rows = np.where(np.bitwise_count(index[:, None] & index[None, :]) % 2, -1.0, 1.0)
    scaled: Doubles = rows * _signs(size)[None, :] / np.sqrt(size)
    return scaled


def _signs(size: int) -> Doubles:
    bits = np.random.Generator(np.random.PCG64(SEED)).bytes(size)
    return np.where(np.frombuffer(bits, dtype=np.uint8) & 1, -1.0, 1.0)


def _dense(size: int) -> Doubles:
    """Return a random orthogonal matrix whose distribution has no preferred direction."""
    gaussian = np.random.Generator(np.random.PCG64(SEED)).standard_normal((size, size))
    q, r = np.linalg.qr(gaussian)
    rotation: Doubles = q * np.sign(np.diag(r))[None, :]
    return rotation


# The mean is that of at least so many tokens.
TOKENS_OF_A_MEAN = 32
# Sizes of heads that the kernels take are multiples of this.
UNIT = 32


class RotatedScalar(StateQuantizer):
    """The quantizer.

    size: coordinates of a vector, a multiple of 8
    bits: of a code, 2 to 8
    centred: whether the mean of the first states is taken off all states, once for each sequence and head. Keys may
        lose any vector: it adds the same to the scores of all tokens, which softmax takes off again. Here it is added
        back all the same, so that decoded states are near the given ones.
    """

    def __init__(self, size: int, bits: int, *, centred: bool = False) -> None:
        self.size, self.bits, self.centred = size, bits, centred
        self.first = TOKENS_OF_A_MEAN if centred else 1

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """Return the shared parts with which states are encoded: those of earlier states if they serve."""
        if shared is None and self.centred:
            return {"mean": halves(states.mean(2, keepdim=True))}
        return super().fit(states, shared, start)

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """Encode states, [batch, heads, rows * step, size] f32, into parts [batch, heads, rows, ...]."""
        if self.centred:
            states = states - shared["mean"].float()
        rotated = states @ rotation(self.size, states.device).T
        rms = rotated.square().mean(-1, keepdim=True).sqrt()
        codes, levels = coded(rotated / torch.where(rms > 0, rms, 1), [(self.size, self.bits)])
        factor = halves((rotated * levels).sum(-1) / levels.square().sum(-1))
        return {"codes": codes, "factor": factor}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """Decode whole rows, into [batch, heads, rows * step, size] f32."""
        states = levels_of(rows, [(self.size, self.bits)]) @ rotation(self.size, rows["codes"].device)
        return states + shared["mean"].float() if self.centred else states

    def can_score(self) -> bool:
        """Whether there is a kernel for products of queries with these keys."""
        return self.size % UNIT == 0 and self.size <= MOST_SIZE

    def scores(self, queries: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """Return the products of queries [batch, heads, n, size] f32 with all keys in `rows`, [batch, heads, n, keys].

        Queries are rotated in place of keys.
        """
        batch, heads = queries.shape[:2]
        scores = hadamard_scores(
            (queries @ rotation(self.size, queries.device).T).flatten(0, 1),
            rows["codes"].flatten(0, 1),
            rows["factor"].flatten(0, 1),
            width_tables(self.bits, queries.device)[0],
        ).view(batch, heads, queries.shape[2], -1)
        return scores + queries @ shared["mean"].float().transpose(-1, -2) if self.centred else scores

    def can_weigh(self) -> bool:
        """Whether there is a kernel for weighted sums of these values."""
        return self.can_score() and not self.centred

    def weighted(self, weights: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """Return the sums of values with weights [batch, heads, n, values] f32, [batch, heads, n, size] f32.

        The sum is rotated back in place of values.
        """
        batch, heads = weights.shape[:2]
        sums = weighted_values(
            weights.flatten(0, 1),
            rows["codes"].flatten(0, 1),
            width_tables(self.bits, weights.device)[0],
            size=self.size,
            scales=rows["factor"].flatten(0, 1),
        )
        return sums.view(batch, heads, *sums.shape[1:]) @ rotation(self.size, weights.device)


class RecursivePolar(StateQuantizer):
    """The quantizer. size: coordinates of a vector, a multiple of 16"""

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """Encode states, [batch, heads, rows * step, size] f32, into parts [batch, heads, rows, ...]."""
        codes, radius = transform(states @ rotation(self.size, states.device).T, angle_codes)
        packed = [pack(of_level, bits) for of_level, bits in zip(codes, ANGLE_BITS, strict=True)]
        return {"angles": torch.cat(packed, dim=-1), "radius": halves(radius)}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """Decode whole rows, into [batch, heads, rows * step, size] f32."""
        groups: Tensor = directions(angle_codes_of(rows, self.size), _pairs).unflatten(-1, (-1, GROUP))
        values: Tensor = (groups * rows["radius"].float()[..., None]).flatten(-2)
        return values @ rotation(self.size, values.device)


def angle_codes_of(rows: Parts, size: int) -> list[Tensor]:
    """Return the codes of the angles of each level. size: coordinates of a vector"""
    counts = [size >> level for level in range(1, len(ANGLE_BITS) + 1)]
    sizes = [packed_bytes(count, bits) for count, bits in zip(counts, ANGLE_BITS, strict=True)]
    packed = rows["angles"].split(sizes, dim=-1)
    return [unpack(*of_level) for of_level in zip(packed, ANGLE_BITS, counts, strict=True)]


def _pairs(level: int, codes: Tensor) -> Tensor:
    """Return cosines and sines of the centroids of codes, which are complex numbers, so that one look-up does."""
    return torch.view_as_real(_unit_vectors(level, codes.device)[codes.int()])


@functools.cache
def _unit_vectors(level: int, device: torch.device) -> Tensor:
    """Return the unit vectors of the centroids at a level, [entries] c64."""
    with torch.inference_mode(False):  # later calls may need gradients
        cosines, sines = (torch.from_numpy(table) for table in unit_vectors(level))
        return torch.complex(cosines, sines).to(device)
