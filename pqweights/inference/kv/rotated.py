"""Keys and values that a fixed orthogonal matrix rotates first (arXiv:2502.02617, Section 2.2), whatever they were.

`RotatedScalar` is the scalar case of TurboQuant (arXiv:2504.19874): a rotated vector is divided by its norm, after
which its coordinates are nearly Gaussian, and take the levels that masters have. The factor that is stored is not the
norm but the one with the least error, <x, levels> / <levels, levels>, which costs nothing.

`RecursivePolar` is PolarQuant of Han et al. (arXiv:2502.02617): after a random rotation the angles of the transform
(codecs/polar_transform.py; Definition 1, Section 4.1) follow known densities (Lemma 2), so that their codebooks need no
data, and nothing but the radius has to be stored with the codes:
(16 + 8 * 4 + (4 + 2 + 1) * 2) / 16 = 3.875 bits for each coordinate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pqweights.codecs.polar_transform import ANGLE_BITS, GROUP, LEVELS, angle_codes, directions, transform, unit_vectors
from pqweights.inference.kv.codes import coded, halves, levels_of, pack, packed_bytes, unpack, width_tables
from pqweights.inference.kv.states import Parts, StateQuantizer
from pqweights.kernels.attention import MOST_SIZE, hadamard_scores, weighted_values

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
    turned: Doubles = q * np.sign(np.diag(r))[None, :]
    return turned


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
        """See StateQuantizer."""
        if shared is None and self.centred:
            return {"mean": halves(states.mean(2, keepdim=True))}
        return super().fit(states, shared, start)

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """See StateQuantizer."""
        if self.centred:
            states = states - shared["mean"].float()
        rotated = states @ rotation(self.size, states.device).T
        rms = rotated.square().mean(-1, keepdim=True).sqrt()
        codes, levels = coded(rotated / torch.where(rms > 0, rms, 1), [(self.size, self.bits)])
        factor = halves((rotated * levels).sum(-1) / levels.square().sum(-1))
        return {"codes": codes, "factor": factor}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        states = levels_of(rows, [(self.size, self.bits)]) @ rotation(self.size, rows["codes"].device)
        return states + shared["mean"].float() if self.centred else states

    def can_score(self) -> bool:
        """See StateQuantizer."""
        return self.size % UNIT == 0 and self.size <= MOST_SIZE

    def scores(self, queries: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """See StateQuantizer: queries are rotated in place of keys."""
        batch, heads = queries.shape[:2]
        scores = hadamard_scores(
            (queries @ rotation(self.size, queries.device).T).flatten(0, 1),
            rows["codes"].flatten(0, 1),
            rows["factor"].flatten(0, 1),
            width_tables(self.bits, queries.device)[0],
        ).view(batch, heads, queries.shape[2], -1)
        return scores + queries @ shared["mean"].float().transpose(-1, -2) if self.centred else scores

    def can_weigh(self) -> bool:
        """See StateQuantizer."""
        return self.can_score() and not self.centred

    def weighted(self, weights: Tensor, rows: Parts, shared: Parts) -> Tensor:
        """See StateQuantizer: the sum is rotated back in place of values."""
        batch, heads = weights.shape[:2]
        sums = weighted_values(
            weights.flatten(0, 1),
            rows["codes"].flatten(0, 1),
            width_tables(self.bits, weights.device)[0],
            size=self.size,
            scales=rows["factor"].flatten(0, 1),
        )
        return sums.view(batch, heads, *sums.shape[1:]) @ rotation(self.size, weights.device)


# Rounds of k-means on a prompt's angles; the centroids of the densities, from which it starts, are near already.
ROUNDS = 8
# Codebooks of a prompt are made from at least so many tokens.
TOKENS_OF_CODEBOOKS = 64


class RecursivePolar(StateQuantizer):
    """The quantizer.

    size: coordinates of a vector, a multiple of 16
    online: whether codebooks are made for the first states, by k-means in one dimension (Section 4.1), and kept for
        each sequence; otherwise those of the densities serve all
    rotated: whether vectors are rotated first; without it, this is what the paper calls PolarQuant without the R
    """

    def __init__(self, size: int, *, online: bool = False, rotated: bool = True) -> None:
        self.size, self.online, self.rotated = size, online, rotated
        self.first = TOKENS_OF_CODEBOOKS if online else 1

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """See StateQuantizer."""
        if shared is not None or not self.online:
            return super().fit(states, shared, start)
        angles, _ = transform(self._turned(states), _angles)
        return {f"centroids{level}": _k_means(of_level, level) for level, of_level in enumerate(angles, 1)}

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """See StateQuantizer."""
        codes, radius = transform(self._turned(states), self._code_rule(shared))
        packed = [pack(of_level, bits) for of_level, bits in zip(codes, ANGLE_BITS, strict=True)]
        return {"angles": torch.cat(packed, dim=-1), "radius": halves(radius)}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        counts = [self.size >> level for level in range(1, len(ANGLE_BITS) + 1)]
        sizes = [packed_bytes(count, bits) for count, bits in zip(counts, ANGLE_BITS, strict=True)]
        packed = rows["angles"].split(sizes, dim=-1)
        codes = [unpack(*of_level) for of_level in zip(packed, ANGLE_BITS, counts, strict=True)]
        groups: Tensor = directions(codes, functools.partial(self._pairs_of, shared)).unflatten(-1, (-1, GROUP))
        values: Tensor = (groups * rows["radius"].float()[..., None]).flatten(-2)
        return values @ rotation(self.size, values.device) if self.rotated else values

    def _code_rule(self, shared: Parts) -> Callable[[int, Tensor, Tensor], Tensor]:
        """Return what gives the codes of pairs: tangents, or for codebooks of a prompt the nearest centroids."""
        if not self.online:
            return angle_codes

        def nearest(level: int, x: Tensor, y: Tensor) -> Tensor:
            angles = _angles(level, x, y)
            return _nearest(angles.flatten(1), shared[f"centroids{level}"][:, 0]).view(angles.shape).to(torch.uint8)

        return nearest

    def _pairs_of(self, shared: Parts, level: int, codes: Tensor) -> Tensor:
        """Return cosines and sines of the centroids of codes, which are complex numbers, so that one look-up does."""
        if not self.online:
            return torch.view_as_real(_unit_vectors(level, codes.device)[codes.int()])
        centroids = shared[f"centroids{level}"][:, 0]
        table = torch.complex(centroids.cos(), centroids.sin())
        return torch.view_as_real(table.gather(1, codes.flatten(1).long()).view(codes.shape))

    def _turned(self, states: Tensor) -> Tensor:
        return states @ rotation(self.size, states.device).T if self.rotated else states


def polar(vectors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Transform groups of 16 coordinates to angles and radii, level after level (arXiv:2502.02617, Definition 1).

    vectors: [..., size] f32

    Returns the angles of each level, [..., size / 2**level] in radians, those of the first level in [0, 2 pi), all
    others in [0, pi / 2]; and the radii [..., size / 16].
    """
    return transform(vectors, _angles)


def _angles(level: int, x: Tensor, y: Tensor) -> Tensor:
    """Return the angles of pairs, which at the first level go around the circle."""
    angles = torch.atan2(y.contiguous(), x.contiguous())  # torch computes angles of others one by one
    return torch.where(angles < 0, angles + 2 * math.pi, angles) if level == 1 else angles


def _nearest(angles: Tensor, centroids: Tensor) -> Tensor:
    """Return the numbers of the nearest centroids, i64; the first level's circle is closed at 0.

    angles: [batch, n]
    centroids: of each sequence, ascending, [batch, entries]
    """
    middles = (centroids[:, 1:] + centroids[:, :-1]) / 2
    return torch.searchsorted(middles.contiguous(), angles.contiguous(), right=True)


def _k_means(angles: Tensor, level: int) -> Tensor:
    """Return the centroids of angles for each sequence, [batch, 1, entries] f32.

    angles: [batch, heads, tokens, n]
    """
    flat = angles.flatten(1)
    centroids = _offline(level, angles.device).expand(len(flat), -1).contiguous()
    for _ in range(ROUNDS):
        codes = _nearest(flat, centroids)
        counts = torch.zeros_like(centroids).scatter_add_(1, codes, torch.ones_like(flat))
        sums = torch.zeros_like(centroids).scatter_add_(1, codes, flat)
        centroids = torch.where(counts > 0, sums / counts.clamp(min=1), centroids)
    return centroids[:, None]


@functools.cache
def _offline(level: int, device: torch.device) -> Tensor:
    """Return the centroids of the densities at a level, [entries] f32."""
    with torch.inference_mode(False):  # later calls may need gradients
        return torch.tensor(LEVELS[level - 1], dtype=torch.float32, device=device)


@functools.cache
def _unit_vectors(level: int, device: torch.device) -> Tensor:
    """Return the unit vectors of these as complex numbers, [entries] c64."""
    with torch.inference_mode(False):
        cosines, sines = (torch.from_numpy(table) for table in unit_vectors(level))
        return torch.complex(cosines, sines).to(device)


assert 1 << len(ANGLE_BITS) == GROUP
