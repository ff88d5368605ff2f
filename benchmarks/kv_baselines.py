"""Methods for caches that the benchmarks compare with: KIVI, per-token absmax, and variants of the papers' methods.

`add` makes them methods of this process: `kivi:B`, `absmax:B`, `hadamard:B,qjl` with unbiased products, and `polar`
with its options `online` (codebooks made for each prompt) and `rotation=0` (without the random rotation).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pqweights.runtime.kv.codes import halves, pack, unpack
from pqweights.runtime.kv.polar_rope import affine_codes
from pqweights.runtime.kv.polar_transform import ANGLE_BITS, GROUP, LEVELS, directions, transform
from pqweights.runtime.kv.rotated import SEED, RotatedScalar, angle_codes_of, rotation
from pqweights.runtime.kv.schemes import SCHEMES, WINDOWS, Hadamard, LayerModel, Polar, Scheme, digits
from pqweights.runtime.kv.states import TOKENS_TOGETHER, Parts, StateQuantizer


class Groups(StateQuantizer):
    """Even steps between the lowest and the highest of 32 numbers (Liu et al., arXiv:2402.02750): KIVI.

    bits: of a code
    channels: whether the numbers are those of 32 tokens in one channel, as of KIVI's keys; otherwise they are 32
        coordinates of a token, as of its values, or all where 32 does not divide them
    """

    def __init__(self, bits: int, *, channels: bool) -> None:
        self.bits, self.channels = bits, channels
        self.step = self.first = TOKENS_TOGETHER if channels else 1

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        if self.channels:
            groups = states.unflatten(2, (-1, self.step)).transpose(-1, -2)
        else:
            size = states.shape[-1]
            groups = states.unflatten(-1, (-1, size if size % TOKENS_TOGETHER else TOKENS_TOGETHER))
        codes, scale, low = affine_codes(groups, self.bits)
        return {"codes": pack(codes, self.bits), "scale": scale, "low": low}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        codes = unpack(rows["codes"], self.bits, rows["codes"].shape[-1] * 8 // self.bits)
        values = codes * rows["scale"].float()[..., None] + rows["low"].float()[..., None]
        return values.transpose(-1, -2).flatten(2, 3) if self.channels else values.flatten(-2)


class Symmetric(StateQuantizer):
    """Each token apart, from -largest to largest in even steps, with zero among them (per-token absmax).

    bits: of a code, 2 or more
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        most = (1 << (self.bits - 1)) - 1
        scale = halves(states.abs().amax(-1) / most)
        divisor = torch.where(scale > 0, scale, 1).float()
        codes = (states / divisor[..., None]).round_().clamp_(-most, most) + most
        return {"codes": pack(codes.to(torch.uint8), self.bits), "scale": scale}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        codes = unpack(rows["codes"], self.bits, rows["codes"].shape[-1] * 8 // self.bits)
        return (codes - float((1 << (self.bits - 1)) - 1)) * rows["scale"].float()[..., None]


class RotatedScalarWithSigns(StateQuantizer):
    """One bit less for each coordinate, and the signs of a projection of the rest, so that products are unbiased (QJL).

    Reference: arXiv:2504.19874, Section 3.2 (TurboQuant_prod) and arXiv:2406.03482. With Gaussian rows s of a fixed
    matrix, the expectation of sign(<s, rest>) <s, query> is sqrt(2 / pi) <rest, query> / |rest|.

    size, bits: as in RotatedScalar; one of the bits is the sign
    """

    def __init__(self, size: int, bits: int) -> None:
        self.size, self._scalar = size, RotatedScalar(size, bits - 1)

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        parts = self._scalar.encode(states, shared, start)
        rest = states - self._scalar.decode(parts, shared, start)
        signs = (rest @ projection(self.size, rest.device).T >= 0).to(torch.uint8)
        return {**parts, "signs": pack(signs, 1), "rest": halves(rest.square().sum(-1).sqrt())}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        signs = unpack(rows["signs"], 1, self.size).float() * 2 - 1
        rest = signs @ projection(self.size, signs.device) * rows["rest"].float()[..., None]
        return self._scalar.decode(rows, shared, start) + rest * (math.sqrt(math.pi / 2) / self.size)


# Rounds of k-means on a prompt's angles; the centroids of the densities, from which it starts, are near already.
ROUNDS = 8
# Codebooks of a prompt are made from at least so many tokens.
TOKENS_OF_CODEBOOKS = 64


def angles_of(level: int, x: Tensor, y: Tensor) -> Tensor:
    """The angles of pairs in radians: at level 1 in [0, 2 pi), at the others in [0, pi / 2]."""
    angles = torch.atan2(y.contiguous(), x.contiguous())  # torch computes angles of others one by one
    return torch.where(angles < 0, angles + 2 * math.pi, angles) if level == 1 else angles


class PolarOfPrompt(StateQuantizer):
    """The recursive polar transform (arXiv:2502.02617) with codebooks of the prompt, or without the random rotation.

    size: coordinates of a vector, a multiple of 16
    online: whether codebooks are made for the first states, by k-means in one dimension (Section 4.1), and kept for
        each sequence; otherwise those of the densities serve all
    rotated: whether vectors are rotated first; without it, this is what the paper calls PolarQuant without the R
    """

    def __init__(self, size: int, *, online: bool, rotated: bool) -> None:
        self.size, self.online, self.rotated = size, online, rotated
        self.first = TOKENS_OF_CODEBOOKS if online else 1

    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        if shared is not None:
            return shared
        angles, _ = transform(self._turned(states), angles_of)
        tables = [torch.tensor(LEVELS[level]).expand(len(states), -1) for level in range(len(angles))]
        if self.online:
            tables = [_k_means(of_level.flatten(1), table) for of_level, table in zip(angles, tables, strict=True)]
        return {f"centroids{level}": table[:, None] for level, table in enumerate(tables, 1)}

    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        angles, radius = transform(self._turned(states), angles_of)
        packed = []
        for level, (of_level, bits) in enumerate(zip(angles, ANGLE_BITS, strict=True), 1):
            codes = _nearest(of_level.flatten(1), shared[f"centroids{level}"][:, 0]).view(of_level.shape)
            packed.append(pack(codes.to(torch.uint8), bits))
        return {"angles": torch.cat(packed, dim=-1), "radius": halves(radius)}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        def pairs(level: int, codes: Tensor) -> Tensor:
            centroids = shared[f"centroids{level}"][:, 0].gather(1, codes.flatten(1).long()).view(codes.shape)
            return torch.stack([centroids.cos(), centroids.sin()], dim=-1)

        groups: Tensor = directions(angle_codes_of(rows, self.size), pairs).unflatten(-1, (-1, GROUP))
        values: Tensor = (groups * rows["radius"].float()[..., None]).flatten(-2)
        return values @ rotation(self.size, values.device) if self.rotated else values

    def _turned(self, states: Tensor) -> Tensor:
        return states @ rotation(self.size, states.device).T if self.rotated else states


def _nearest(angles: Tensor, centroids: Tensor) -> Tensor:
    """The numbers of the nearest centroids, i64; the first level's circle is closed at 0.

    angles: [batch, n]; centroids: of each sequence, ascending, [batch, entries]
    """
    middles = (centroids[:, 1:] + centroids[:, :-1]) / 2
    return torch.searchsorted(middles.contiguous(), angles.contiguous(), right=True)


def _k_means(angles: Tensor, centroids: Tensor) -> Tensor:
    """Better centroids of angles [batch, n] for each sequence, [batch, entries]."""
    for _ in range(ROUNDS):
        codes = _nearest(angles, centroids)
        counts = torch.zeros_like(centroids).scatter_add_(1, codes, torch.ones_like(angles))
        sums = torch.zeros_like(centroids).scatter_add_(1, codes, angles)
        centroids = torch.where(counts > 0, sums / counts.clamp(min=1), centroids)
    return centroids


@functools.cache
def projection(size: int, device: torch.device) -> Tensor:
    """The matrix of independent Gaussian rows, rotated, whose products' signs are stored, [size, size] f32."""
    numbers = np.random.Generator(np.random.PCG64(SEED + 1)).standard_normal((size, size))
    return torch.from_numpy(numbers.astype(np.float32)).to(device) @ rotation(size, device)


@dataclass(frozen=True, kw_only=True)
class Kivi(Scheme):
    """KIVI. bits: of a code"""

    bits: int = 4
    residual: int = 128

    name = "kivi"
    choices = {"bits": (2, 3, 4, 8), "residual": WINDOWS}
    words = digits("bits", (2, 3, 4, 8))

    def quantizers(self, layer: LayerModel) -> tuple[StateQuantizer | None, StateQuantizer | None]:
        return Groups(self.bits, channels=True), Groups(self.bits, channels=False)


@dataclass(frozen=True, kw_only=True)
class Absmax(Scheme):
    """Each key and each value in even steps around zero. bits: of a code"""

    bits: int = 4

    name = "absmax"
    choices = {"bits": range(2, 9), "residual": WINDOWS}
    words = digits("bits", range(2, 9))

    def quantizers(self, layer: LayerModel) -> tuple[StateQuantizer | None, StateQuantizer | None]:
        return Symmetric(self.bits), Symmetric(self.bits)


@dataclass(frozen=True, kw_only=True)
class HadamardOrSigns(Hadamard):
    """The method of the library, with a further option. qjl: 1 to spend one of the keys' bits on unbiased products"""

    qjl: int = 0

    choices = {**Hadamard.choices, "qjl": (0, 1)}
    words = {**Hadamard.words, "qjl": {"qjl": 1, "centred": 0}}

    def quantizers(self, layer: LayerModel) -> tuple[StateQuantizer | None, StateQuantizer | None]:
        keys, values = super().quantizers(layer)
        return RotatedScalarWithSigns(layer.key_size, self.keys or self.bits) if self.qjl else keys, values


@dataclass(frozen=True, kw_only=True)
class PolarWithOptions(Polar):
    """The method of the library, with further options.

    online: 1 for codebooks made for each prompt
    rotation: 0 to leave out the random rotation
    """

    online: int = 0
    rotation: int = 1

    choices = {**Polar.choices, "online": (0, 1), "rotation": (0, 1)}
    words = {"online": {"online": 1}}

    def quantizers(self, layer: LayerModel) -> tuple[StateQuantizer | None, StateQuantizer | None]:
        if not self.online and self.rotation:
            return super().quantizers(layer)
        options = {"online": bool(self.online), "rotated": bool(self.rotation)}
        return PolarOfPrompt(layer.key_size, **options), PolarOfPrompt(layer.value_size, **options)


def add() -> None:
    """Make them methods of this process."""
    SCHEMES.update({"kivi": Kivi, "absmax": Absmax, "hadamard": HadamardOrSigns, "polar": PolarWithOptions})
