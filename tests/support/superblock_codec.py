"""A codec for tests: superblocks whose size depends on that of the weight, in any number of bytes, at any rate.

Of every 128 weights, some have one bit more than the others, for uniform levels. They share a scale of 8 bits, in a
unit that each superblock chooses among powers of four. A weight has superblocks of about 1024 weights, all of one size,
and all with the same number of bytes, which is what the rate and OVERHEAD_BITS leave them; what they do not need is
zero. There is one stored tensor, and no norms. If errors are large, another pass clips the largest weights. With an
effort of 2, a superblock has the better of two scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.codecs.protocol import (
    Bytes,
    Codec,
    Coder,
    DamagedBlock,
    Doubles,
    Measures,
    Part,
    PassResult,
    State,
    check_effort,
    exact_rate,
    exceeds_promise,
    has_rate,
    unknown_rate,
)
from pqweights.common.documents import Document, Number, as_document
from pqweights.common.dtypes import from_float32, to_float32

NAME = "test-superblocks"
GROUP = 128
GROUPS_PER_SUPERBLOCK = 8  # about
# Bits per weight for scales and units, beside the rate.
OVERHEAD_BITS = 0.125
SMALLEST_EXPONENT = -150
CLIPPED = 0.75
# What an effort of 2 tries in place of the scale.
SMALLER = 0.9
# The mean square of the largest magnitude among 128 numbers of N(0,1).
LARGEST_SQUARE = 8.07

if TYPE_CHECKING:
    pass

Floats = npt.NDArray[np.float32]
Levels = dict[str, list[float]]


def levels_of(bits: float) -> Levels:
    """Uniform levels from -1 to 1, for the weights with more and with fewer bits."""
    low = int(bits)
    return {"wide": np.linspace(-1, 1, 2 ** (low + 1)).tolist(), "narrow": np.linspace(-1, 1, 2**low).tolist()}


class ClipState(Document, frozen=True):
    """The state of a weight: the largest magnitude that is coded, relative to that of the group."""

    clip: Number = 1.0

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


class SuperblockCodec(Codec):
    """The codec; see the docstring of the module."""

    name = NAME
    format_version = 2
    suffixes = ("_super_codes",)
    rates = (2.5, 3.5, 4.5)
    any_rate = True
    efforts = (1, 2)
    block_size = GROUP
    state_defaults: Mapping[str, Any] = {"clip": 1.0}
    description = ""
    papers = ()

    def coder(self, bits: float, effort: int | None = None) -> SuperblockCoder:
        if not has_rate(self, bits):
            raise unknown_rate(self, bits)
        check_effort(self, effort)
        return SuperblockCoder(rate=exact_rate(bits), levels=levels_of(bits), effort=effort or self.efforts[0])

    def coder_from_tables(self, bits: float, tables: Any) -> SuperblockCoder:
        coder = self.coder(bits)
        if tables != coder.levels:
            raise ValueError(f"expected the levels of {coder.bits} bits")
        return coder


@dataclass(frozen=True, eq=False, kw_only=True)
class SuperblockCoder(Coder):
    """The codec at one rate. weights: those of the weight that it is sized for."""

    rate: float
    levels: Levels
    effort: int
    weights: int | None = None

    codec = NAME
    orthogonal_error = False
    depends_on_size = True

    @property
    def bits(self) -> float:
        return self.rate

    def sized(self, weights: int) -> SuperblockCoder:
        return replace(self, weights=weights)

    @property
    def superblocks(self) -> int:
        assert self.weights is not None
        return max(1, -(-self.weights // (GROUP * GROUPS_PER_SUPERBLOCK)))

    @property
    def groups(self) -> int:
        assert self.weights is not None
        return max(1, -(-self.weights // (GROUP * self.superblocks)))

    @property
    def block_size(self) -> int:
        return self.groups * GROUP

    @property
    def wide(self) -> int:
        """How many weights of a group have more bits."""
        return int((self.bits - int(self.bits)) * GROUP)

    @property
    def code_bytes(self) -> tuple[int, int]:
        """The bytes of the weights with more and with fewer bits in a superblock."""
        low = int(self.bits)
        return -(-self.groups * self.wide * (low + 1) // 8), -(-self.groups * (GROUP - self.wide) * low // 8)

    @property
    def parts(self) -> tuple[Part, ...]:
        assert self.weights is not None
        budget = int((self.bits + OVERHEAD_BITS) * self.weights / 8 / self.superblocks)
        return (Part("_super_codes", "U8", max(budget, sum(self.code_bytes) + self.groups + 1)),)

    @property
    def distortion(self) -> float:
        return LARGEST_SQUARE * self._error_per_largest_square

    @property
    def _error_per_largest_square(self) -> float:
        """The mean squared error of steps between uniform levels, if the largest magnitude is 1.

        More bits promise less, even if no weight has one more.
        """
        share, low = self.bits - int(self.bits), int(self.bits)
        return share / (3 * (2 ** (low + 1) - 1) ** 2) + (1 - share) / (3 * (2**low - 1) ** 2)

    def modelled_errors(self, blocks: Floats) -> Doubles:
        errors: Doubles = np.abs(blocks).max(axis=1).astype(np.float64) ** 2 * self._error_per_largest_square
        return errors

    def tables(self) -> Levels:
        return self.levels

    def first_state(self) -> ClipState:
        return ClipState()

    def next_state(self, history: Sequence[PassResult]) -> ClipState | None:
        errors = [result.relative_mse for result in history]
        if len(errors) == 1:
            return ClipState(CLIPPED) if exceeds_promise(self, errors[0]) else None
        return ClipState() if len(errors) == 2 and errors[0] < errors[1] else None

    def parse_state(self, values: Mapping[str, Any]) -> ClipState:
        state = as_document(values, ClipState, ValueError)
        if state.clip not in (1.0, CLIPPED):
            raise ValueError(f"clip: expected 1 or {CLIPPED}, found {state.clip}")
        return state

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str, state: State) -> Measures:
        assert isinstance(state, ClipState)
        x = to_float32(values, dtype).reshape(-1, self.groups, GROUP)
        bad = np.flatnonzero(~np.isfinite(x).all(axis=(1, 2)))
        x = np.where(np.isfinite(x), x, np.float32(0))
        (out,) = parts
        errors = self._encode(x, out, state.clip)
        if self.effort > 1:
            other = np.empty_like(out)
            smaller = self._encode(x, other, state.clip * SMALLER)
            out[smaller < errors] = other[smaller < errors]
            errors = np.minimum(errors, smaller)
        return Measures(
            energies=(x.astype(np.float64) ** 2).sum(axis=(1, 2)),
            errors=errors,
            first_bad_block=int(bad[0]) if len(bad) else -1,
            observed=Nothing(),
        )

    def _encode(self, x: Floats, out: Bytes, clip: float) -> Doubles:
        wide, narrow = self.code_bytes
        units, scales = self._scales(x, clip)
        z = np.divide(x, self._factors(units, scales), out=np.zeros_like(x), where=scales[..., None] > 0)
        out[:, :wide] = _packed(z[..., : self.wide], self.levels["wide"])
        out[:, wide : wide + narrow] = _packed(z[..., self.wide :], self.levels["narrow"])
        out[:, wide + narrow : wide + narrow + self.groups] = scales
        out[:, wide + narrow + self.groups] = units
        out[:, wide + narrow + self.groups + 1 :] = 0
        error = self._decoded(out).reshape(x.shape).astype(np.float64) - x
        squares: Doubles = (error**2).sum(axis=(1, 2))
        return squares

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str, state: State) -> None:
        used = sum(self.code_bytes) + self.groups + 1
        wrong = np.flatnonzero(parts[0][:, used:].any(axis=1))
        if len(wrong):
            raise DamagedBlock(int(wrong[0]), f"expected zeros after {used} bytes")
        values[:] = from_float32(self._decoded(parts[0]).reshape(-1), dtype)

    def check(self, parts: Sequence[Bytes], state: State) -> None:
        """What is wrong shows when blocks are decoded, as with the trellis."""

    def _scales(self, x: Floats, clip: float) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """The unit of every superblock, and the scale of every group in that unit."""
        largest = np.abs(x).max(axis=2).astype(np.float64)
        exponents = np.where(largest.max(axis=1) > 0, np.frexp(largest.max(axis=1))[1], SMALLEST_EXPONENT)
        units = np.ceil((exponents - SMALLEST_EXPONENT) / 2).astype(np.uint8)
        scales = np.ceil(largest * clip / np.ldexp(1.0, _exponents(units))[:, None] * 255)
        return units, scales.astype(np.uint8)

    def _factors(self, units: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Floats:
        exact = scales / 255 * np.ldexp(1.0, _exponents(units))[:, None]
        return exact.astype(np.float32)[..., None]

    def _decoded(self, stored: Bytes) -> Floats:
        wide, narrow = self.code_bytes
        z = np.empty((len(stored), self.groups, GROUP), dtype=np.float32)
        counts = self.groups * self.wide, self.groups * (GROUP - self.wide)
        first = _unpacked(stored[:, :wide], self.levels["wide"])[:, : counts[0]]
        second = _unpacked(stored[:, wide : wide + narrow], self.levels["narrow"])[:, : counts[1]]
        z[..., : self.wide] = first.reshape(len(stored), self.groups, -1)
        z[..., self.wide :] = second.reshape(len(stored), self.groups, -1)
        scales = stored[:, wide + narrow : wide + narrow + self.groups]
        factors = self._factors(stored[:, wide + narrow + self.groups], scales)
        return (z * factors).reshape(len(stored), -1)


def _exponents(units: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    return 2 * units.astype(np.int64) + SMALLEST_EXPONENT


def _packed(z: Floats, levels: list[float]) -> Bytes:  # [blocks, groups, n] -> [blocks, groups * n * bits / 8]
    last = len(levels) - 1
    codes = np.clip(np.rint((z.astype(np.float64) + 1) * (last / 2)), 0, last).astype(np.uint8)
    bits = np.unpackbits(codes[..., None], axis=-1)[..., 8 - last.bit_length() :]
    return np.packbits(bits.reshape(len(z), -1), axis=1)


def _unpacked(stored: Bytes, levels: list[float]) -> Floats:  # [blocks, bytes] -> [blocks, at least the weights]
    width = int(math.log2(len(levels)))
    bits = np.unpackbits(np.ascontiguousarray(stored), axis=1)
    count = bits.shape[1] // width
    codes = bits[:, : count * width].reshape(len(stored), count, width).astype(np.int64) @ (1 << np.arange(width)[::-1])
    return np.array(levels, dtype=np.float32)[codes]
