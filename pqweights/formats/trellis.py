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
from typing import Any, ClassVar, Self

import numpy as np

from pqweights.formats.master import (
    HADAMARD,
    SIGNED_HADAMARD,
    BlockFormat,
    Bytes,
    DamagedBlock,
    Doubles,
    Floats,
    Part,
    Pass,
    check_effort,
    check_rate,
    exact_rate,
    largest_error,
)
from pqweights.formats.trellis_tables import EXPONENTS, NOISE, decode_tables, encode_model
from pqweights.kernels import BLOCK_SIZE, Measures, trellis

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


@dataclass(frozen=True, kw_only=True)
class Trellis(BlockFormat):
    """Integers of a trellis, packed by an entropy coder; what BlockFormat calls a block is a superblock.

    first_step_power: the step_power of the first pass
    most_gained: the highest rate at which steps are enlarged, so that decoded weights have the size of the weights

    rotation: what blocks are multiplied by before their coordinates are rounded
    step_power: the power of a block's norm to which its step is in proportion
    states: of the trellis of the encoder, its effort
    gained: whether the encoder enlarges steps beyond those of least squares
    cut: how the weight that it is sized for is cut
    """

    codec: ClassVar[str] = "hadamard-trellis"
    suffixes: ClassVar[tuple[str, ...]] = (TRELLIS,)
    settings: ClassVar[Mapping[str, Any]] = {"rotation": HADAMARD, "step_power": 0}
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "rotation": (HADAMARD, SIGNED_HADAMARD),
        "step_power": STEP_POWERS,
    }
    depends_on_size: ClassVar[bool] = True
    rates: ClassVar[Sequence[float]] = tuple(eighths / 8 for eighths in range(12, 65))
    any_rate: ClassVar[bool] = True
    efforts: ClassVar[Sequence[int]] = trellis.STATES
    first_step_power: ClassVar[float] = 0.5
    most_gained: ClassVar[float] = 2.5
    description: ClassVar[str] = (
        "Each weight is cut along its rows into blocks of 128. A block is rotated by the Walsh-Hadamard matrix, which "
        "makes its coordinates nearly Gaussian. Coordinates become integers by trellis-coded quantization, with steps "
        "in proportion to the square root of a block's norm, and an entropy coder packs the integers into a "
        "fixed number of bytes."
    )
    papers: ClassVar[Sequence[str]] = (
        "Ungerboeck, *Channel coding with multilevel/phase signals*, IEEE Trans. Inf. Theory 28 (1982): the trellises.",
        "Marcellin and Fischer, *Trellis coded quantization*, IEEE Trans. Commun. 38 (1990): the search for integers.",
        "Duda, *Asymmetric numeral systems*, [arXiv:1311.2540](https://arxiv.org/abs/1311.2540): the entropy coder.",
    )

    rotation: str = HADAMARD
    step_power: float = 0.5
    states: int = trellis.STATES[0]
    gained: bool = False
    cut: trellis.Superblocks | None = None

    @classmethod
    def at(cls, bits: float, effort: int | None = None) -> Self:
        """Return the format of a rate. The effort is the number of states of the trellis."""
        check_effort(cls, effort)
        check_rate(cls, bits)
        states = cls.efforts[0] if effort is None else effort
        power, gained = cls.first_step_power, bits <= cls.most_gained
        return cls(bits=exact_rate(bits), step_power=power, states=states, gained=gained)

    def sized(self, weights: int) -> Self:
        """Return the format of a weight of this many elements; its block_size and parts hold for it alone."""
        return replace(self, cut=superblocks(weights, self.bits))

    @property
    def block_size(self) -> int:
        """The number of weights in a superblock; the last one of a weight is padded with zeros."""
        return self._cut.blocks * BLOCK_SIZE

    @property
    def parts(self) -> tuple[Part, ...]:
        """The only stored tensor of a weight."""
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
        error = float(4.0 ** (_ABOVE_BOUND - self.bits))
        return error / (1 - error) if self.gained else error

    @property
    def orthogonal_error(self) -> bool:
        """Whether steps are those of least squares."""
        return not self.gained

    @property
    def rescued(self) -> bool:
        """Whether signs precede the rotation."""
        return self.rotation == SIGNED_HADAMARD

    def least_squares(self) -> Self:
        """Return the format whose steps are not enlarged."""
        return replace(self, gained=False)

    def after(self, passes: Sequence[Pass]) -> Self | None:
        """Return the format of another pass after these, or None if the last one stands.

        If the error is too large, signs before the rotation and one step, and whichever is better.
        """
        last = passes[-1]
        if len(passes) == 1 and last.relative_mse > largest_error(self.distortion):
            return replace(self, rotation=SIGNED_HADAMARD, step_power=0)
        if len(passes) == 2 and last.relative_mse >= passes[0].relative_mse:
            return replace(self, rotation=HADAMARD, step_power=self.first_step_power)
        return None

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str) -> Measures:
        """Encode whole superblocks."""
        (rows,) = parts
        return trellis.encode(
            values,
            dtype,
            cut=self._cut._replace(number=len(rows)),
            states=self.states,
            signed=self.rescued,
            gained=self.gained,
            model=encode_model(self.step_power),
            rows=rows,
        )

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str) -> None:
        """Decode whole superblocks to raw bytes of `dtype`: BF16, F16 or F32.

        What is wrong with a superblock shows when it is decoded.
        """
        (rows,) = parts
        cut, tables = self._cut._replace(number=len(rows)), decode_tables(self.step_power)
        damaged, reason = trellis.decode(rows, values, dtype, cut=cut, signed=self.rescued, tables=tables)
        if damaged >= 0:
            raise DamagedBlock(damaged, REASONS[reason])

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
        level = max(_water_level(squares**rest, self.bits), least)
        widest = (level * 2.0 ** ((EXPONENTS[-1] + 0.5) / 2) / NOISE) ** (1 / rest)
        doublings = np.ceil(np.log2(np.maximum(squares / max(widest, 1e-300), 1.0)) / 2)
        level *= 4.0 ** (-rest * doublings.mean())  # which leaves bits to all
        errors: Doubles = np.minimum(squares, level * np.minimum(squares, widest) ** self.step_power * 4.0**doublings)
        return errors


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
