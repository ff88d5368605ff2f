"""The base of the scalar codecs: packed codes and a norm for each block of 128, decoded by one formula.

A codec chooses the levels, the rotations, and how a block becomes codes and a norm. What codes and norms mean is the
same for all of them (docs/format.md, section 4).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pqweights.codecs.lloyd_max import MAX_BITS, MIN_BITS
from pqweights.codecs.protocol import (
    Bytes,
    Coder,
    DamagedBlock,
    Doubles,
    Floats,
    Measures,
    Part,
    PassResult,
    State,
    check_effort,
    exceeds_promise,
    unknown_rate,
)
from pqweights.kernels import BLOCK_SIZE, BlockCoding, EncodedArrays, EncodeStats, load_backend
from pqweights.kernels.codebook import Codebook, codebook_from_levels
from pqweights.strict_json import Fields, is_number

if TYPE_CHECKING:
    from torch import Tensor

# The rotations, as files name them.
HADAMARD = "hadamard"
SIGNED_HADAMARD = "signed-hadamard"
ROTATIONS = (HADAMARD, SIGNED_HADAMARD)

CODES = "_codes"
NORMS = "_norms"

SMALLEST_NORMAL_HALF = 2.0**-14
LARGEST_HALF = 65504.0
# Norms of float32 weights need no exponents beyond these.
NORM_EXPONENTS = range(-200, 201)
_FIRST_INVALID_HALF = 0x7C00  # of the bit patterns of float16: infinity; NaN and all negative numbers follow
# Above the largest norm of 128 float32 numbers, and above four times it, because that of least squares may be larger.
_NORM_BOUND = 2.0**135
_EXPONENT_OF_BOUND = 119  # up to which no float16 reaches the bound

POLARQUANT = (
    "Vicentino, *PolarQuant* for weights, [arXiv:2603.29078](https://arxiv.org/abs/2603.29078v1) v1 (later renamed "
    "HLWQ): the method. PolarQuant for KV caches ([arXiv:2502.02617](https://arxiv.org/abs/2502.02617)) is another "
    "method with the same name."
)


@dataclass(frozen=True)
class ScalarState:
    """The state of a weight: its rotation, and the exponent with which norms are float16(norm * 2**-norm_exponent).

    The radii of polar.py are such norms, too.
    """

    rotation: str
    norm_exponent: int

    @property
    def rescued(self) -> bool:
        """See State."""
        return self.rotation == SIGNED_HADAMARD

    def to_json(self) -> dict[str, Any]:
        """See State."""
        return {"rotation": self.rotation, "norm_exponent": self.norm_exponent}


@dataclass(frozen=True)
class NormRange:
    """The smallest and largest norm that is not 0, before the exponent; inf and 0.0 if there are none."""

    smallest: float
    largest: float

    def merged(self, later: NormRange) -> NormRange:
        """See Observed."""
        return NormRange(min(self.smallest, later.smallest), max(self.largest, later.largest))


class ScalarCodec(ABC):
    """The base class of the scalar codecs."""

    name: str
    format_version = 1
    suffixes = (CODES, NORMS)
    rates = range(MIN_BITS, MAX_BITS + 1)
    any_rate = False
    efforts: tuple[int, ...] = ()
    block_size = BLOCK_SIZE
    description = ""
    papers = (POLARQUANT,)

    @property
    @abstractmethod
    def rotations(self) -> tuple[str, ...]:
        """The default rotation, followed by those that a rescue tries."""

    @property
    @abstractmethod
    def orthogonal_error(self) -> bool:
        """See Coder."""

    @abstractmethod
    def codebook(self, bits: int) -> Codebook:
        """Return the levels of a bit width."""

    @abstractmethod
    def distortion(self, bits: int) -> float:
        """Return what Coder.distortion is at a bit width, for Gaussian coordinates."""

    @abstractmethod
    def encode_blocks(self, values: Bytes, dtype: str, coding: BlockCoding, out: EncodedArrays) -> EncodeStats:
        """Encode whole blocks as kernels.Backend.encode does, which codecs may call."""

    @property
    def state_defaults(self) -> Mapping[str, Any]:
        """See Codec."""
        return {"rotation": self.rotations[0], "norm_exponent": 0}

    def coder(self, bits: float, effort: int | None = None) -> ScalarCoder:
        """See Codec."""
        check_effort(self, effort)
        return _coder(self, bits)

    def coder_from_tables(self, bits: float, tables: Any) -> ScalarCoder:
        """See Codec; the tables are the levels."""
        width = self.width(bits)
        return ScalarCoder(self, codebook_from_levels(width, _checked_levels(tables, width)))

    def width(self, bits: float) -> int:
        """Return a bit width as an integer.

        Raises RecipeError for one that the codec does not have.
        """
        if bits not in self.rates:
            raise unknown_rate(self, bits)
        return int(bits)


@functools.cache
def _coder(codec: ScalarCodec, bits: float) -> ScalarCoder:
    """Return the coder of a codec and a bit width, cached because plans ask for it once for each weight."""
    return ScalarCoder(codec, codec.codebook(codec.width(bits)))


def _checked_levels(numbers: Any, bits: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the levels of a master as float32, which must be finite and ascending.

    Raises ValueError for anything else.
    """
    if isinstance(numbers, list) and len(numbers) == 2**bits and all(map(is_number, numbers)):
        with np.errstate(over="ignore"):
            levels = np.array(numbers, dtype=np.float64).astype(np.float32)
        if np.isfinite(levels).all() and (levels[1:] > levels[:-1]).all():
            return levels
    raise ValueError(f"expected {2**bits} ascending float32 numbers for {bits} bits")


@dataclass(frozen=True, eq=False)
class ScalarCoder:
    """A scalar codec with the levels of one bit width; see Coder."""

    _codec: ScalarCodec
    codebook: Codebook

    @property
    def codec(self) -> str:
        """See Coder."""
        return self._codec.name

    @property
    def bits(self) -> int:
        """See Coder."""
        return self.codebook.bits

    @property
    def depends_on_size(self) -> bool:
        """See Coder."""
        return False

    def sized(self, weights: int) -> ScalarCoder:
        """See Coder."""
        return self

    @property
    def block_size(self) -> int:
        """See Coder."""
        return BLOCK_SIZE

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """See Coder; a block has 16 bytes of codes for each bit, and a norm."""
        return Part(CODES, "U8", BLOCK_SIZE * self.bits // 8), Part(NORMS, "F16", 1)

    @property
    def distortion(self) -> float:
        """See Coder."""
        return self._codec.distortion(self.bits)

    @property
    def orthogonal_error(self) -> bool:
        """See Coder."""
        return self._codec.orthogonal_error

    def tables(self) -> list[float]:
        """See Coder; the levels are the shortest decimals that round to them."""
        return [float(str(level)) for level in self.codebook.levels]

    def first_state(self) -> ScalarState:
        """See Coder."""
        return ScalarState(self._codec.rotations[0], 0)

    def next_state(self, history: Sequence[PassResult]) -> ScalarState | None:
        """See Coder and `state_after`."""
        return state_after(self, self._codec.rotations, history)

    def parse_state(self, fields: Fields) -> ScalarState:
        """See Coder."""
        return parse_scalar_state(self.codec, self._codec.rotations, fields)

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str, state: State) -> Measures:
        """See Coder."""
        codes, norms = parts
        energies, errors = np.empty((2, len(codes)), dtype=np.float64)
        out = EncodedArrays(codes, norms.reshape(-1).view(np.uint16), energies, errors)
        stats = self._codec.encode_blocks(values, dtype, self.coding(state), out)
        # Norms become infinite only where the exponent does not fit, of which `observed` tells.
        np.minimum(out.norms, _FIRST_INVALID_HALF - 1, out=out.norms)
        return Measures(
            energies=energies,
            errors=errors,
            first_bad_block=stats.first_bad_block,
            observed=NormRange(stats.smallest_norm, stats.largest_norm),
        )

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str, state: State) -> None:
        """See Coder."""
        self.check(parts, state)
        codes, norms = parts
        encoded = codes, norms.reshape(-1).view(np.uint16)
        load_backend("cpu").decode(encoded, self.coding(state), dtype, values)

    def check(self, parts: Sequence[Bytes], state: State) -> None:
        """See Coder."""
        check_norms(parts[1], state, "its norm")

    def decode_torch(self, parts: Sequence[Tensor], state: State) -> Tensor:
        """See Coder; the operations of the reference run on any device."""
        import torch

        from pqweights.kernels.reference import decode_blocks

        codes, norms = parts
        if norms.device.type == "cpu":
            self.check([codes.numpy(), norms.numpy()], state)
        return decode_blocks(codes, norms.reshape(-1).view(torch.float16), self.coding(state))

    def modelled_errors(self, blocks: Floats) -> Doubles | None:
        """See Coder; encoding takes no longer than a model would."""
        return None

    def coding(self, state: State) -> BlockCoding:
        """Return how blocks were coded in a state, for kernels that read codes and norms themselves."""
        assert isinstance(state, ScalarState)
        return BlockCoding(
            codebook=self.codebook,
            rotate=True,
            signed=state.rotation == SIGNED_HADAMARD,
            norm_exponent=state.norm_exponent,
        )


def check_norms(stored: Bytes, state: State, what: str) -> None:
    """Raise DamagedBlock for a norm that no encoder writes in a state.

    stored: the bytes of float16 norms, [blocks, bytes per block]
    what: what such a number is, for the message
    """
    assert isinstance(state, ScalarState)
    patterns, exponent = stored.reshape(-1).view(np.uint16), state.norm_exponent
    largest = patterns.max(initial=0)
    if largest >= _FIRST_INVALID_HALF:
        wrong, reason = patterns >= _FIRST_INVALID_HALF, "negative or not finite"
    elif exponent > _EXPONENT_OF_BOUND:
        numbers = np.ldexp(patterns.view(np.float16).astype(np.float64), exponent)
        wrong, reason = numbers >= _NORM_BOUND, f"too large with the exponent {exponent}"
    else:
        return
    if wrong.any():
        raise DamagedBlock(int(wrong.argmax()) * 2 // stored.shape[1], f"{what} is {reason}")


def norm_exponent_for(norms: NormRange) -> int:
    """Return the exponent e with which norms are stored as float16(norm * 2**-e).

    It is 0 if all non-zero norms are normal float16 numbers; otherwise it brings the largest into [2**14, 2**15).
    """
    if norms.largest == 0.0 or (norms.smallest >= SMALLEST_NORMAL_HALF and norms.largest <= LARGEST_HALF):
        return 0
    return math.frexp(norms.largest)[1] - 1 - 14


def state_after(coder: Coder, rotations: Sequence[str], history: Sequence[PassResult]) -> ScalarState | None:
    """Return what Coder.next_state does for a codec with these rotations, the default one first.

    A rotation is judged only after a pass with the exponent that fits its norms. Rotations are tried in order until the
    error of one is small enough; if none is, the one with the smallest error stands.
    """
    last = history[-1]
    state, norms = last.state, last.observed
    assert isinstance(state, ScalarState) and isinstance(norms, NormRange)
    exponent = norm_exponent_for(norms)
    if state.norm_exponent != exponent:
        return ScalarState(state.rotation, exponent)
    if not exceeds_promise(coder, last.relative_mse):
        return None
    # The last pass of a rotation is the one with the fitting exponent.
    tried = {result.state.rotation: result for result in history if isinstance(result.state, ScalarState)}
    for rotation in rotations:
        if rotation not in tried:
            return ScalarState(rotation, state.norm_exponent)
    best = min(tried.values(), key=lambda result: result.relative_mse).state
    assert isinstance(best, ScalarState)
    return None if best.rotation == state.rotation else best


def parse_scalar_state(codec: str, rotations: Sequence[str], fields: Fields) -> ScalarState:
    """Return what Coder.parse_state does for a codec with these rotations, the default one first.

    Raises ValueError for a rotation or an exponent that the codec never writes, and what `fields` raises.
    """
    rotation = fields.defaulted("rotation", fields.text, rotations[0])
    exponent = fields.defaulted("norm_exponent", fields.whole, 0)
    if rotation not in rotations:
        raise ValueError(f"{codec} has no rotation {rotation!r}")
    if exponent not in NORM_EXPONENTS:
        raise ValueError(f"norm_exponent: expected {NORM_EXPONENTS[0]} to {NORM_EXPONENTS[-1]}, found {exponent}")
    return ScalarState(rotation, exponent)
