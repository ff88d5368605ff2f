"""A codec for tests: superblocks of 1024 weights in an odd number of bytes, at fractional rates.

At b + 1/2 bits, weights at even places have b + 1 bits and the others b, for uniform levels. Every 128 weights have a
scale of 8 bits, in a unit that each superblock chooses among powers of four. There is one stored tensor, and no norms.
If errors are large, another pass clips the largest weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.codecs.protocol import (
    Basis,
    Bytes,
    Measures,
    Part,
    PassResult,
    State,
    decode_torch_on_cpu,
    exact_rate,
    exceeds_promise,
)
from pqweights.dtypes import from_float32, to_float32
from pqweights.errors import RecipeError
from pqweights.strict_json import Fields

NAME = "test-superblocks"
BLOCK, GROUP = 1024, 128
GROUPS = BLOCK // GROUP
SMALLEST_EXPONENT = -150
CLIPPED = 0.75
# Of weights that are Gaussian; tests/codecs/test_conformance.py measures them.
DISTORTIONS = {2.5: 0.181, 3.5: 0.0338, 4.5: 0.00745}

if TYPE_CHECKING:
    from torch import Tensor

Levels = dict[str, list[float]]


def levels_of(bits: float) -> Levels:
    """Uniform levels from -1 to 1, for weights at even and at odd places."""
    low = int(bits)
    return {"even": np.linspace(-1, 1, 2 ** (low + 1)).tolist(), "odd": np.linspace(-1, 1, 2**low).tolist()}


@dataclass(frozen=True)
class ClipState:
    """The state of a weight: the largest magnitude that is coded, relative to that of the group."""

    clip: float = 1.0

    @property
    def rescued(self) -> bool:
        return self.clip != 1.0

    def to_json(self) -> dict[str, Any]:
        return {"clip": self.clip}


@dataclass(frozen=True)
class Nothing:
    """An empty observation, because the codec needs none."""

    def merged(self, later: Nothing) -> Nothing:
        return later


class SuperblockCodec:
    """The codec; see the docstring of the module."""

    name = NAME
    format_version = 2
    suffixes = ("_super_codes",)
    rates = tuple(DISTORTIONS)
    state_defaults: Mapping[str, Any] = {"clip": 1.0}
    description = ""

    def coder(self, bits: float) -> SuperblockCoder:
        if bits not in self.rates:
            raise RecipeError(f"expected 2.5, 3.5 or 4.5 bits for {self.name}, found {exact_rate(bits)}")
        return SuperblockCoder(float(bits), levels_of(bits))

    def coder_from_tables(self, bits: float, tables: Any) -> SuperblockCoder:
        coder = self.coder(bits)
        if tables != coder.levels:
            raise ValueError(f"expected the levels of {coder.bits} bits")
        return coder


@dataclass(frozen=True, eq=False)
class SuperblockCoder:
    """The codec at one rate."""

    bits: float
    levels: Levels

    codec = NAME
    block_size = BLOCK
    orthogonal_error = False

    @property
    def code_bytes(self) -> tuple[int, int]:
        """The bit widths at even and at odd places of a superblock."""
        low = int(self.bits)
        return BLOCK // 2 * (low + 1) // 8, BLOCK // 2 * low // 8

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("_super_codes", "U8", sum(self.code_bytes) + GROUPS + 1),)

    @property
    def distortion(self) -> float:
        return DISTORTIONS[self.bits]

    def tables(self) -> Levels:
        return self.levels

    def first_state(self) -> ClipState:
        return ClipState()

    def next_state(self, history: Sequence[PassResult]) -> ClipState | None:
        errors = [result.relative_mse for result in history]
        if len(errors) == 1:
            return ClipState(CLIPPED) if exceeds_promise(self, errors[0]) else None
        return ClipState() if len(errors) == 2 and errors[0] < errors[1] else None

    def parse_state(self, fields: Fields) -> ClipState:
        clip = fields.defaulted("clip", fields.number, 1.0)
        if clip not in (1.0, CLIPPED):
            raise ValueError(f"clip: expected 1 or {CLIPPED}, found {clip}")
        return ClipState(float(clip))

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str, state: State) -> Measures:
        assert isinstance(state, ClipState)
        x = to_float32(values, dtype).reshape(-1, GROUPS, GROUP)
        bad = np.flatnonzero(~np.isfinite(x).all(axis=(1, 2)))
        x = np.where(np.isfinite(x), x, np.float32(0))
        (out,) = parts
        even, odd = self.code_bytes
        units, scales = self._scales(x, state.clip)
        z = np.divide(x, self._factors(units, scales), out=np.zeros_like(x), where=scales[..., None] > 0)
        flat = z.reshape(len(x), BLOCK)
        out[:, :even] = _packed(flat[:, ::2], self.levels["even"])
        out[:, even : even + odd] = _packed(flat[:, 1::2], self.levels["odd"])
        out[:, even + odd : -1] = scales
        out[:, -1] = units
        error = self._decoded(out).reshape(x.shape).astype(np.float64) - x
        return Measures(
            energies=(x.astype(np.float64) ** 2).sum(axis=(1, 2)),
            errors=(error**2).sum(axis=(1, 2)),
            first_bad_block=int(bad[0]) if len(bad) else -1,
            observed=Nothing(),
        )

    def decode(
        self, parts: Sequence[Bytes], values: Bytes, *, dtype: str, state: State, basis: Basis = Basis.PLAIN
    ) -> None:
        assert basis is Basis.PLAIN
        values[:] = from_float32(self._decoded(parts[0]).reshape(-1), dtype)

    def decode_torch(self, parts: Sequence[Tensor], state: State) -> Tensor:
        return decode_torch_on_cpu(self, parts, state)

    def bases(self, state: State) -> frozenset[Basis]:
        return frozenset([Basis.PLAIN])

    def _scales(self, x: npt.NDArray[np.float32], clip: float) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """The unit of every superblock, and the scale of every group in that unit."""
        largest = np.abs(x).max(axis=2).astype(np.float64)
        exponents = np.where(largest.max(axis=1) > 0, np.frexp(largest.max(axis=1))[1], SMALLEST_EXPONENT)
        units = np.ceil((exponents - SMALLEST_EXPONENT) / 2).astype(np.uint8)
        scales = np.ceil(largest * clip / np.ldexp(1.0, _exponents(units))[:, None] * 255)
        return units, scales.astype(np.uint8)

    def _factors(self, units: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        exact = scales / 255 * np.ldexp(1.0, _exponents(units))[:, None]
        return exact.astype(np.float32)[..., None]

    def _decoded(self, stored: Bytes) -> npt.NDArray[np.float32]:
        even, odd = self.code_bytes
        z = np.empty((len(stored), BLOCK), dtype=np.float32)
        z[:, ::2] = _unpacked(stored[:, :even], self.levels["even"])
        z[:, 1::2] = _unpacked(stored[:, even : even + odd], self.levels["odd"])
        factors = self._factors(stored[:, -1], stored[:, even + odd : -1])
        return (z.reshape(-1, GROUPS, GROUP) * factors).reshape(-1, BLOCK)


def _exponents(units: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    return 2 * units.astype(np.int64) + SMALLEST_EXPONENT


def _packed(z: npt.NDArray[np.float32], levels: list[float]) -> Bytes:  # [blocks, n] -> [blocks, n * bits / 8]
    last = len(levels) - 1
    codes = np.clip(np.rint((z.astype(np.float64) + 1) * (last / 2)), 0, last).astype(np.uint8)
    bits = np.unpackbits(codes[..., None], axis=2)[..., 8 - last.bit_length() :]
    return np.packbits(bits.reshape(len(z), -1), axis=1)


def _unpacked(stored: Bytes, levels: list[float]) -> npt.NDArray[np.float32]:
    width = int(math.log2(len(levels)))
    bits = np.unpackbits(np.ascontiguousarray(stored), axis=1).reshape(len(stored), -1, width)
    codes = bits.astype(np.int64) @ (1 << np.arange(width)[::-1])
    return np.array(levels, dtype=np.float32)[codes]
