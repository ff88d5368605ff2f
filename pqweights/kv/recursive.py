"""The recursive polar transform of rotated vectors (Han et al., arXiv:2502.02617).

Coordinates are taken in pairs, each of which becomes a radius and an angle; the radii again, four times, so that 16
coordinates become one radius and 15 angles (Definition 1, Section 4.1). After a random rotation the angles follow known
densities (Lemma 2), so that their codebooks need no data, and nothing but the radius has to be stored with the codes:
(16 + 8 * 4 + (4 + 2 + 1) * 2) / 16 = 3.875 bits for each coordinate.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pqweights.codecs.polar_codebook import ANGLE_BITS, GROUP, LEVELS
from pqweights.kernels.transform_codes import CodeTables, code_tables, nearest
from pqweights.kv.bits import halves, pack, packed_bytes, unpack
from pqweights.kv.quantizer import Parts
from pqweights.kv.rotation import rotation

# Rounds of k-means on a prompt's angles; the centroids of the densities, from which it starts, are near already.
ROUNDS = 8
# Codebooks of a prompt are made from at least so many tokens.
FIRST_TOKENS = 64


class RecursivePolar:
    """The quantizer.

    size: coordinates of a vector, a multiple of 16
    online: whether codebooks are made for the first states, by k-means in one dimension (Section 4.1), and kept for
        each sequence; otherwise those of the densities serve all
    rotated: whether vectors are rotated first; without it, this is what the paper calls PolarQuant without the R
    """

    step = 1

    def __init__(self, size: int, *, online: bool = False, rotated: bool = True) -> None:
        self.size, self.online, self.rotated = size, online, rotated
        self.first = FIRST_TOKENS if online else 1

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """See StateQuantizer."""
        if shared is not None:
            return shared
        if not self.online:
            return {}
        angles, _ = polar(self._turned(states))
        return {f"centroids{level}": _k_means(each, level) for level, each in enumerate(angles, 1)}

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """See StateQuantizer."""
        angles, radius = polar(self._turned(states))
        codes = [pack(self._codes(each, level, shared), ANGLE_BITS[level - 1]) for level, each in enumerate(angles, 1)]
        return {"angles": torch.cat(codes, dim=-1), "radius": halves(radius)}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """See StateQuantizer."""
        values, packed = rows["radius"].float(), rows["angles"]
        for level in range(len(ANGLE_BITS), 0, -1):
            bits, count = ANGLE_BITS[level - 1], self.size >> level
            size = packed_bytes(count, bits)
            codes = unpack(packed[..., packed.shape[-1] - size :], bits, count)
            packed = packed[..., : packed.shape[-1] - size]
            centroids = self._centroids(level, shared, packed.device)
            # Both coordinates of a pair in one look-up, side by side.
            pairs = torch.view_as_real(_looked_up(torch.complex(centroids.cos(), centroids.sin()), codes))
            values = pairs.mul_(values[..., None]).flatten(-2)
        return values @ rotation(self.size, values.device) if self.rotated else values

    def _codes(self, angles: Tensor, level: int, shared: Parts) -> Tensor:
        if angles.is_cpu and not self.online and angles.shape[-1] % 8 == 0:
            return nearest(angles, [(angles.shape[-1], ANGLE_BITS[level - 1])], _offline_tables(level))[0]
        return _codes(angles, self._centroids(level, shared, angles.device))

    def _turned(self, states: Tensor) -> Tensor:
        return states @ rotation(self.size, states.device).T if self.rotated else states

    def _centroids(self, level: int, shared: Parts, device: torch.device) -> Tensor:
        """Return the centroids of a level, [entries] or, for codebooks of each sequence, [batch, 1, entries]."""
        return shared[f"centroids{level}"] if self.online else _offline(level, device)


def polar(vectors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Transform groups of 16 coordinates to angles and radii, level after level (arXiv:2502.02617, Definition 1).

    vectors: [..., size] f32

    Returns the angles of each level, [..., size / 2**level] in radians, those of the first level in [0, 2 pi), all
    others in [0, pi / 2]; and the radii [..., size / 16].
    """
    angles = []
    radii = vectors
    for level in range(len(ANGLE_BITS)):
        # Without gaps, because torch computes angles of others one by one.
        first, second = radii[..., 0::2].contiguous(), radii[..., 1::2].contiguous()
        angle = torch.atan2(second, first)
        angles.append(torch.where(angle < 0, angle + 2 * math.pi, angle) if level == 0 else angle)
        radii = torch.hypot(first, second)
    return angles, radii


def _codes(angles: Tensor, centroids: Tensor) -> Tensor:
    """Return the number of the nearest centroid, [..., n] u8; the first level's circle is closed at 0.

    centroids: ascending, [entries] or [batch, 1, entries]
    """
    middles = _middles(centroids)
    if middles.dim() == 1:
        return torch.bucketize(angles.contiguous(), middles, right=True).to(torch.uint8)
    flat = angles.flatten(1).contiguous()
    return torch.searchsorted(middles[:, 0].contiguous(), flat, right=True).view(angles.shape).to(torch.uint8)


def _middles(centroids: Tensor) -> Tensor:
    return (centroids[..., 1:] + centroids[..., :-1]) / 2


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return the entries of codes, [batch, ...], from one table [entries] or from one for each sequence."""
    if table.dim() == 1:
        return table[codes.int()]
    return table[:, 0].gather(1, codes.flatten(1).long()).view(codes.shape)


def _k_means(angles: Tensor, level: int) -> Tensor:
    """Return the centroids of angles for each sequence, [batch, 1, entries] f32.

    angles: [batch, heads, tokens, n]
    """
    flat = angles.flatten(1)
    found = _offline(level, angles.device).expand(len(flat), -1).contiguous()
    for _ in range(ROUNDS):
        middles = _middles(found).contiguous()
        codes = torch.searchsorted(middles, flat.contiguous(), right=True)
        counts = torch.zeros_like(found).scatter_add_(1, codes, torch.ones_like(flat))
        sums = torch.zeros_like(found).scatter_add_(1, codes, flat)
        found = torch.where(counts > 0, sums / counts.clamp(min=1), found)
    return found[:, None]


@functools.cache
def _offline(level: int, device: torch.device) -> Tensor:
    """Return the centroids of the densities at a level, [entries] f32."""
    with torch.inference_mode(False):  # later calls may need gradients
        return torch.tensor(LEVELS[level - 1], dtype=torch.float32, device=device)


@functools.cache
def _offline_tables(level: int) -> CodeTables:
    """Return the same for the kernel, which finds those of a level alone."""
    found = _offline(level, torch.device("cpu"))
    return code_tables({ANGLE_BITS[level - 1]: (found.numpy(), _middles(found).numpy())})


assert 1 << len(ANGLE_BITS) == GROUP
