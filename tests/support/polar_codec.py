"""A codec for tests: pairs of weights as angles and logarithms of radii, without norms, in blocks of 96.

96 does not divide the rows of usual models. Besides its codes, a block needs only a whole number that is the same for
the whole weight, and that a first pass finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from pqweights.codecs.protocol import (
    Bytes,
    Codec,
    Coder,
    Measures,
    Part,
    PassResult,
    State,
    check_effort,
    unknown_rate,
)
from pqweights.common.documents import Document, as_document
from pqweights.common.dtypes import from_float32, to_float32

NAME = "test-polar"
BLOCK = 96
STEPS_PER_OCTAVE = 16
DISTORTIONS = {8: 2.064e-4, 12: 1.564e-4}
ANGLE_DTYPES = {8: "U8", 12: "U16"}

Floats = npt.NDArray[np.float32]


class OctaveState(Document, frozen=True):
    """The state of a weight: its largest radius is at most 2**octave."""

    octave: Annotated[int, Meta(ge=-150, le=130)] = 0

    @property
    def rescued(self) -> bool:
        return False

    def to_json(self) -> dict[str, Any]:
        return {"octave": self.octave}


@dataclass(frozen=True)
class LargestRadius:
    """The largest radius of some blocks; 0 if all their weights are 0."""

    radius: float

    def merged(self, later: LargestRadius) -> LargestRadius:
        return LargestRadius(max(self.radius, later.radius))


class PolarCodec(Codec):
    """The codec; see the docstring of the module."""

    name = NAME
    format_version = 3
    suffixes = ("_radii", "_angles")
    rates = tuple(DISTORTIONS)
    block_size = BLOCK
    state_defaults: Mapping[str, Any] = {"octave": 0}
    description = ""
    papers = ()

    def coder(self, bits: float, effort: int | None = None) -> PolarCoder:
        if bits not in self.rates:
            raise unknown_rate(self, bits)
        check_effort(self, effort)
        return PolarCoder(int(bits))


@dataclass(frozen=True)
class PolarCoder(Coder):
    """The codec at one rate."""

    rate: int

    codec = NAME
    block_size = BLOCK
    orthogonal_error = False

    @property
    def bits(self) -> int:
        return self.rate

    @property
    def parts(self) -> tuple[Part, ...]:
        return Part("_radii", "U8", BLOCK // 2), Part("_angles", ANGLE_DTYPES[self.bits], BLOCK // 2)

    @property
    def distortion(self) -> float:
        return DISTORTIONS[self.bits]

    def first_state(self) -> OctaveState:
        return OctaveState()

    def next_state(self, history: Sequence[PassResult]) -> OctaveState | None:
        found = history[-1].observed
        assert isinstance(found, LargestRadius)
        needed = OctaveState(math.frexp(found.radius)[1])
        return None if needed == history[-1].state else needed

    def parse_state(self, values: Mapping[str, Any]) -> OctaveState:
        return as_document(values, OctaveState, ValueError)

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str, state: State) -> Measures:
        assert isinstance(state, OctaveState)
        weights = to_float32(values, dtype).reshape(-1, BLOCK)
        bad = np.flatnonzero(~np.isfinite(weights).all(axis=1))
        exact = np.where(np.isfinite(weights), weights, np.float32(0)).astype(np.float64)
        pairs = exact.reshape(-1, BLOCK // 2, 2)
        radii = np.hypot(pairs[..., 0], pairs[..., 1])
        with np.errstate(divide="ignore"):
            codes = np.rint(255 + STEPS_PER_OCTAVE * (np.log2(radii) - state.octave))
        parts[0][:] = np.clip(codes, 0, 255).astype(np.uint8)
        turns = np.arctan2(pairs[..., 1], pairs[..., 0]) / (2 * math.pi) % 1
        steps = 256 if self.bits == 8 else 65536
        angles = (np.rint(turns * steps) % steps).astype(np.uint8 if self.bits == 8 else "<u2")
        parts[1][:] = np.ascontiguousarray(angles).view(np.uint8).reshape(len(weights), -1)
        error = self._decoded(parts, state).astype(np.float64) - exact
        return Measures(
            energies=(exact**2).sum(axis=1),
            errors=(error**2).sum(axis=1),
            first_bad_block=int(bad[0]) if len(bad) else -1,
            observed=LargestRadius(float(radii.max(initial=0.0))),
        )

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str, state: State) -> None:
        assert isinstance(state, OctaveState)
        values[:] = from_float32(self._decoded(parts, state).reshape(-1), dtype)

    def check(self, parts: Sequence[Bytes], state: State) -> None:
        pass

    def _decoded(self, parts: Sequence[Bytes], state: OctaveState) -> Floats:
        codes = parts[0].astype(np.float64)
        radii = np.where(codes > 0, np.exp2((codes - 255) / STEPS_PER_OCTAVE + state.octave), 0)
        stored = np.ascontiguousarray(parts[1]).view(np.uint8 if self.bits == 8 else "<u2")
        turns = stored.reshape(codes.shape) / (256 if self.bits == 8 else 65536) * (2 * math.pi)
        pairs = np.stack([radii * np.cos(turns), radii * np.sin(turns)], axis=-1)
        return pairs.reshape(-1, BLOCK).astype(np.float32)
