"""Hadamard rotation, a trellis over the integers, and an entropy coder: the least error for a file of a given size.

Entropy-coded trellis-coded quantization (Marcellin and Fischer, IEEE Trans. Commun. 38, 1990; Ungerboeck's trellises)
of blocks rotated like those of the scalar codec. A superblock of about 512 blocks has one step, from which those of its
blocks follow, chosen so that it fits its bytes: a weight takes exactly the rate, and blocks of large norm more of it
than others. docs/format.md has the bytes, docs/trellis.md the reasons.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pqweights.formats.protocol import (
    Bytes,
    Codec,
    Coder,
    DamagedBlock,
    Doubles,
    Floats,
    Measures,
    Part,
    PassResult,
    State,
    alternatives,
    check_effort,
    exact_rate,
    has_rate,
    largest_error,
    unknown_rate,
)
from pqweights.formats.scalar import HADAMARD, ROTATIONS, SIGNED_HADAMARD, RotatedState, parse_rotated
from pqweights.formats.trellis_tables import EXPONENTS, NOISE, decode_tables, encode_model
from pqweights.kernels import BLOCK_SIZE, trellis

TRELLIS = "_trellis"
# Blocks of a superblock: about as many, so that the last superblock of a weight has few zeros to fill it. The most are
# twice the fewest: otherwise some weights could only be cut into superblocks of which one is half empty.
_BLOCKS, _FEWEST, _MOST = 512, 384, 768
_LANES = 16
# Those that the format has.
STEP_POWERS = (0, 0.5)
# Bits above the rate-distortion bound of N(0,1), with everything counted, 8 states, from 1.5 to 8 bits.
_ABOVE_BOUND = 0.097
REASONS = {1: "its header is not one that an encoder writes", 2: "its stream does not end as it should"}


class TrellisState(RotatedState, frozen=True):
    """The state of a weight: its rotation, and the power of a block's norm to which its step is in proportion."""

    step_power: float = 0

    def to_json(self) -> dict[str, Any]:
        """Return the state as manifests store it: keys of Codec.state_defaults, with JSON scalars.

        A power of 0 is not stated, as in the masters from before there was another.
        """
        return {key: value for key, value in super().to_json().items() if value}


class HadamardTrellis(Codec):
    """The codec; see Codec.

    step_power: the power of a block's norm to which its step is in proportion
    most_gained: the highest rate at which steps are enlarged, so that decoded weights have the size of the weights
    """

    name = "hadamard-trellis"
    suffixes = (TRELLIS,)
    rates = tuple(eighths / 8 for eighths in range(12, 65))
    any_rate = True
    efforts = trellis.STATES
    block_size = BLOCK_SIZE
    state_defaults: Mapping[str, Any] = {"rotation": HADAMARD, "step_power": 0}
    step_power: float = 0.5
    most_gained: float = 2.5
    description = (
        "Each weight is cut along its rows into blocks of 128. A block is rotated by the Walsh-Hadamard matrix, which "
        "makes its coordinates nearly Gaussian. Coordinates become integers by trellis-coded quantization, with steps "
        "in proportion to the square root of a block's norm, and an entropy coder packs the integers into a "
        "fixed number of bytes."
    )
    papers = (
        "Ungerboeck, *Channel coding with multilevel/phase signals*, IEEE Trans. Inf. Theory 28 (1982): the trellises.",
        "Marcellin and Fischer, *Trellis coded quantization*, IEEE Trans. Commun. 38 (1990): the search for integers.",
        "Duda, *Asymmetric numeral systems*, [arXiv:1311.2540](https://arxiv.org/abs/1311.2540): the entropy coder.",
    )

    def coder(self, bits: float, effort: int | None = None) -> TrellisCoder:
        """Return the coder of a rate, which encodes with an effort; None for the default.

        The effort is the number of states of the trellis.
        """
        check_effort(self, effort)
        if not has_rate(self, bits):
            raise unknown_rate(self, bits)
        states = self.efforts[0] if effort is None else effort
        return _coder(bits, states, self.step_power, bits <= self.most_gained)


@functools.lru_cache(maxsize=1024)
def _coder(bits: float, states: int, step_power: float, gained: bool) -> TrellisCoder:
    """Return the coder of a rate, cached because plans ask for it once for each weight."""
    return TrellisCoder(rate=bits, states=states, step_power=step_power, gained=gained)


@functools.lru_cache(maxsize=4096)
def superblocks(weights: int, rate: float) -> trellis.Superblocks:
    """Return how a weight is cut into superblocks (docs/format.md).

    weights: the number of weights
    rate: the bits per weight, everything counted
    """
    blocks = max(1, -(-weights // BLOCK_SIZE))
    if blocks <= _MOST:
        # The states of the coder weigh more in a short superblock, so it has some bytes more.
        extra = (8 + 3 * min(_LANES, blocks)) * max(0, _BLOCKS - blocks) // _BLOCKS
        return trellis.Superblocks(1, blocks, int(rate * blocks * BLOCK_SIZE / 8) + extra)
    sizes = range(_FEWEST, _MOST + 1)
    size = min(sizes, key=lambda size: (-blocks % size, abs(size - _BLOCKS), -size))
    count = -(-blocks // size)
    return trellis.Superblocks(count, size, int(rate * blocks * BLOCK_SIZE / 8 / count))


@dataclass(frozen=True, kw_only=True)
class TrellisCoder(Coder):
    """The codec at one rate; see Coder.

    rate: bits per weight
    states: of the trellis of the encoder
    step_power: that of the states in which it encodes
    gained: whether steps are enlarged beyond those of least squares (HadamardTrellis)
    cut: how the weight that it is sized for is cut
    """

    rate: float
    states: int
    step_power: float = HadamardTrellis.step_power
    gained: bool = False
    cut: trellis.Superblocks | None = None

    codec = HadamardTrellis.name
    depends_on_size = True

    @property
    def bits(self) -> float:
        """The rate by which users and files name the coder; an int if it is whole."""
        return exact_rate(self.rate)

    def sized(self, weights: int) -> TrellisCoder:
        """Return the coder as it stores a weight of this many elements; its block_size and parts hold for it alone."""
        return replace(self, cut=superblocks(weights, self.rate))

    @property
    def block_size(self) -> int:
        """The number of weights in a block; the last block of a weight is padded with zeros.

        What the protocol calls a block is a superblock.
        """
        return self._cut.blocks * BLOCK_SIZE

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stored tensors of a weight, with the suffixes of the codec."""
        return (Part(TRELLIS, "U8", self._cut.stride),)

    @property
    def _cut(self) -> trellis.Superblocks:
        assert self.cut is not None
        return self.cut

    @property
    def distortion(self) -> float:
        """The relative mean squared error that theory promises for Gaussian weights.

        Enlarging by 1 / (1 - error) enlarges the error as much.
        """
        error = float(4.0 ** (_ABOVE_BOUND - self.rate))
        return error / (1 - error) if self.gained else error

    @property
    def orthogonal_error(self) -> bool:
        """Whether the error of a decoded weight is orthogonal to it, so that errors of later rounding simply add."""
        return not self.gained

    def least_squares(self) -> TrellisCoder:
        """Return the coder that makes the same codes with the least squared error."""
        return replace(self, gained=False)

    def first_state(self) -> TrellisState:
        """Return the state of the first pass, which is the only one for nearly every weight."""
        return TrellisState(HADAMARD, self.step_power)

    def next_state(self, history: Sequence[PassResult]) -> TrellisState | None:
        """Return the state for another pass after these, or None if the last one stands.

        If the error is too large, signs before the rotation and one step, and whichever is better.
        """
        last = history[-1]
        if len(history) == 1:
            return TrellisState(SIGNED_HADAMARD) if last.relative_mse > largest_error(self.distortion) else None
        if len(history) == 2 and last.relative_mse >= history[0].relative_mse:
            return self.first_state()
        return None

    def parse_state(self, values: Mapping[str, Any]) -> TrellisState:
        """Parse what State.to_json returns; absent keys have the values of Codec.state_defaults."""
        state = parse_rotated(self, TrellisState, ROTATIONS, values)
        if state.step_power not in STEP_POWERS:
            raise ValueError(f"step_power: expected {alternatives(STEP_POWERS)}, found {state.step_power!r}")
        return state

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str, state: State) -> Measures:
        """Encode whole blocks into parts, and return what was measured."""
        assert isinstance(state, TrellisState)
        (rows,) = parts
        energies, errors, bad = trellis.encode(
            values,
            dtype,
            cut=self._cut._replace(number=len(rows)),
            states=self.states,
            signed=state.rotation == SIGNED_HADAMARD,
            gained=self.gained,
            model=encode_model(state.step_power),
            rows=rows,
        )
        return Measures(energies=energies, errors=errors, first_bad_block=bad)

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str, state: State) -> None:
        """Decode whole blocks, encoded in a state, to raw bytes of `dtype`: BF16, F16 or F32."""
        assert isinstance(state, TrellisState)
        (rows,) = parts
        cut, signed = self._cut._replace(number=len(rows)), state.rotation == SIGNED_HADAMARD
        tables = decode_tables(state.step_power)
        damaged, reason = trellis.decode(rows, values, dtype, cut=cut, signed=signed, tables=tables)
        if damaged >= 0:
            raise DamagedBlock(damaged, REASONS[reason])

    def check(self, parts: Sequence[Bytes], state: State) -> None:
        """Raise DamagedBlock if it shows without decoding that no coder wrote these bytes.

        What is wrong with a superblock shows when it is decoded.
        """

    def modelled_errors(self, blocks: Floats) -> Doubles:
        """Return errors in proportion to a block's squared step, but not more than its energy (reverse water-filling).

        With a power p of the steps, errors are level * variance**p. If the variance**(1 - p) of all blocks have a
        geometric mean g, they take the rate at a level of g * 4**-rate. Blocks beyond the widest table have the step
        doubled until they are not.
        """
        squares = np.einsum("ij,ij->i", blocks, blocks, dtype=np.float64) / BLOCK_SIZE
        rest = 1 - self.step_power
        # As in the encoder: steps do not go below 2**-45 of the root mean square of the largest block.
        least = float(squares.max(initial=0.0)) ** rest * 2.0**-90
        level = max(_water_level(squares**rest, self.rate), least)
        widest = (level * 2.0 ** ((EXPONENTS[-1] + 0.5) / 2) / NOISE) ** (1 / rest)
        doublings = np.ceil(np.log2(np.maximum(squares / max(widest, 1e-300), 1.0)) / 2)
        level *= 4.0 ** (-rest * doublings.mean())  # which leaves bits to all
        errors: Doubles = np.minimum(squares, level * np.minimum(squares, widest) ** self.step_power * 4.0**doublings)
        return errors


def _water_level(variances: Doubles, rate: float) -> float:
    """Return the error per weight at which blocks of these variances take a rate on average."""
    descending = np.sort(variances[variances > 0])[::-1]
    if not len(descending):
        return 0.0
    # With the k largest coded and the others zero, the level that spends all bits on the k; the right k is the largest
    # whose level is below all of them.
    count = np.arange(1, len(descending) + 1)
    levels = np.exp2(np.cumsum(np.log2(descending)) / count - 2 * rate * len(variances) / count)
    return float(levels[np.nonzero(levels <= descending)[0][-1]])
