"""Methods for caches that the benchmarks compare with: KIVI, per-token absmax, and the unbiased products of QJL.

`add` makes them methods of this process: `kivi:B`, `absmax:B`, and `hadamard:B,qjl`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pqweights.inference.kv.codes import halves, pack, unpack
from pqweights.inference.kv.polar_rope import affine_codes
from pqweights.inference.kv.rotated import SEED, RotatedScalar, rotation
from pqweights.inference.kv.schemes import SCHEMES, WINDOWS, Hadamard, LayerModel, Scheme, digits
from pqweights.inference.kv.states import TOKENS_TOGETHER, Parts, StateQuantizer


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


def add() -> None:
    """Make them methods of this process."""
    SCHEMES.update({"kivi": Kivi, "absmax": Absmax, "hadamard": HadamardOrSigns})
