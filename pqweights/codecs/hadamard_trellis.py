"""Hadamard rotation, a trellis over the integers, and an entropy coder: the least error for a file of a given size.

Entropy-coded trellis-coded quantization (Marcellin and Fischer, IEEE Trans. Commun. 38, 1990; Ungerboeck's trellises)
of blocks rotated like those of the scalar codec. A superblock of about 512 blocks has one step, chosen so that it fits
its bytes: a weight takes exactly the rate, and blocks of large norm more of it than others. docs/format.md has the
bytes, docs/trellis.md the reasons.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pqweights.codecs.protocol import (
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
    check_effort,
    exact_rate,
    exceeds_promise,
    has_rate,
    unknown_rate,
)
from pqweights.codecs.scalar import HADAMARD, ROTATIONS, SIGNED_HADAMARD, RotatedState, parse_rotated
from pqweights.codecs.trellis_tables import EXPONENTS, NOISE, decode_tables, encode_model
from pqweights.kernels import BLOCK_SIZE, trellis

TRELLIS = "_trellis"
# Blocks of a superblock: about as many, so that the last superblock of a weight has few zeros to fill it. The most are
# twice the fewest: otherwise some weights could only be cut into superblocks of which one is half empty.
_BLOCKS, _FEWEST, _MOST = 512, 384, 768
_LANES = 16
# Bits above the rate-distortion bound of N(0,1), with everything counted, 8 states, from 1.5 to 8 bits.
_ABOVE_BOUND = 0.097
REASONS = {1: "its header is not one that an encoder writes", 2: "its stream does not end as it should"}


class HadamardTrellis(Codec):
    """The codec; see Codec."""

    name = "hadamard-trellis"
    format_version = 2
    suffixes = (TRELLIS,)
    rates = tuple(eighths / 8 for eighths in range(12, 65))
    any_rate = True
    efforts = trellis.STATES
    block_size = BLOCK_SIZE
    state_defaults: Mapping[str, Any] = {"rotation": HADAMARD}
    description = (
        "Each weight is cut along its rows into blocks of 128. A block is rotated by the Walsh-Hadamard matrix, which "
        "makes its coordinates nearly Gaussian. Coordinates become integers by trellis-coded quantization, with one "
        "step for some 512 blocks, and an entropy coder packs the integers into a fixed number of bytes."
    )
    papers = (
        "Ungerboeck, *Channel coding with multilevel/phase signals*, IEEE Trans. Inf. Theory 28 (1982): the trellises.",
        "Marcellin and Fischer, *Trellis coded quantization*, IEEE Trans. Commun. 38 (1990): the search for integers.",
        "Duda, *Asymmetric numeral systems*, [arXiv:1311.2540](https://arxiv.org/abs/1311.2540): the entropy coder.",
    )

    def coder(self, bits: float, effort: int | None = None) -> TrellisCoder:
        """See Codec; the effort is the number of states of the trellis."""
        check_effort(self, effort)
        if not has_rate(self, bits):
            raise unknown_rate(self, bits)
        return _coder(bits, self.efforts[0] if effort is None else effort)


@functools.lru_cache(maxsize=1024)
def _coder(bits: float, states: int) -> TrellisCoder:
    """Return the coder of a rate, cached because plans ask for it once for each weight."""
    return TrellisCoder(rate=bits, states=states)


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
    cut: how the weight that it is sized for is cut
    """

    rate: float
    states: int
    cut: trellis.Superblocks | None = None

    codec = HadamardTrellis.name
    depends_on_size = True
    orthogonal_error = True  # because the step of a superblock is fitted by least squares

    @property
    def bits(self) -> float:
        """See Coder."""
        return exact_rate(self.rate)

    def sized(self, weights: int) -> TrellisCoder:
        """See Coder."""
        return replace(self, cut=superblocks(weights, self.rate))

    @property
    def block_size(self) -> int:
        """See Coder; what the protocol calls a block is a superblock."""
        return self._cut.blocks * BLOCK_SIZE

    @property
    def parts(self) -> tuple[Part, ...]:
        """See Coder."""
        return (Part(TRELLIS, "U8", self._cut.stride),)

    @property
    def _cut(self) -> trellis.Superblocks:
        assert self.cut is not None
        return self.cut

    @property
    def distortion(self) -> float:
        """See Coder."""
        return float(4.0 ** (_ABOVE_BOUND - self.rate))

    def first_state(self) -> RotatedState:
        """See Coder."""
        return RotatedState(HADAMARD)

    def next_state(self, history: Sequence[PassResult]) -> RotatedState | None:
        """See Coder: signs before the rotation, if the error is too large without, and whichever is better."""
        last = history[-1]
        if len(history) == 1:
            return RotatedState(SIGNED_HADAMARD) if exceeds_promise(self, last.relative_mse) else None
        if len(history) == 2 and last.relative_mse >= history[0].relative_mse:
            return RotatedState(HADAMARD)
        return None

    def parse_state(self, values: Mapping[str, Any]) -> RotatedState:
        """See Coder."""
        return parse_rotated(self, RotatedState, ROTATIONS, values)

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str, state: State) -> Measures:
        """See Coder."""
        (rows,) = parts
        energies, errors, bad = trellis.encode(
            values,
            dtype,
            cut=self._cut._replace(number=len(rows)),
            states=self.states,
            signed=_is_signed(state),
            model=encode_model(),
            rows=rows,
        )
        return Measures(energies=energies, errors=errors, first_bad_block=bad)

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str, state: State) -> None:
        """See Coder."""
        (rows,) = parts
        cut, signed = self._cut._replace(number=len(rows)), _is_signed(state)
        damaged, reason = trellis.decode(rows, values, dtype, cut=cut, signed=signed, tables=decode_tables())
        if damaged >= 0:
            raise DamagedBlock(damaged, REASONS[reason])

    def check(self, parts: Sequence[Bytes], state: State) -> None:
        """See Coder; what is wrong with a superblock shows when it is decoded."""

    def modelled_errors(self, blocks: Floats) -> Doubles:
        """See Coder: the same error for each weight, but not more than a block's energy (reverse water-filling).

        At one step blocks whose variances have a geometric mean g take the rate at an error of g * 4**-rate. Blocks
        beyond the widest table have the step doubled until they are not.
        """
        squares = np.einsum("ij,ij->i", blocks, blocks, dtype=np.float64) / BLOCK_SIZE
        # As in the encoder: steps do not go below 2**-45 of the root mean square of the largest block.
        level = max(_water_level(squares, self.rate), float(squares.max(initial=0.0)) * 2.0**-90)
        widest = level * 2.0 ** ((EXPONENTS[-1] + 0.5) / 2) / NOISE
        doublings = np.ceil(np.log2(np.maximum(squares / max(widest, 1e-300), 1.0)) / 2)
        level *= 4.0 ** -doublings.mean()  # which leaves bits to all
        errors: Doubles = np.minimum(squares, level * 4.0**doublings)
        return errors


def _is_signed(state: State) -> bool:
    assert isinstance(state, RotatedState)
    return state.rotation == SIGNED_HADAMARD


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
