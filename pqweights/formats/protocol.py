"""What a codec is: two functions between whole blocks of weights and a fixed number of bytes.

A `Codec` has a name; at a rate it becomes a `Coder`, which knows its tables and the error that theory promises. How
weights are cut into blocks may depend on how many there are, so a coder is `sized` for each weight. A weight is encoded
in passes: the coder says in which `State` the next pass encodes (a rotation, a common exponent), and after each pass
whether another is needed. Besides the stored parts and the tables, decoding needs only the state of the last pass.
Nothing outside formats/ and kernels/ knows what a part holds or what a state means.
docs/codecs.md shows how to add a codec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.common.documents import Document
from pqweights.common.dtypes import item_bytes
from pqweights.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# The dtypes that coders read and write.
VALUE_DTYPES = ("BF16", "F16", "F32")

# A weight is encoded again, or reported, if its relative error exceeds the promised distortion by this factor.
RESCUE_FACTOR = 1.25


class DamagedBlock(Exception):
    """Stored bytes cannot be what a coder wrote. Whoever knows where they come from makes a PqweightsError of it.

    block: the index of the block among those of the call
    """

    def __init__(self, block: int, reason: str) -> None:
        super().__init__(f"block {block}: {reason}")
        self.block, self.reason = block, reason


class Part(NamedTuple):
    """A stored tensor of an encoded weight.

    suffix: what follows the name of the weight; begins with an underscore, and has no dot, because transformers splits
        names at the last one
    dtype: a dtype of safetensors that takes whole bytes
    items_per_block: how many items a block of weights has
    """

    suffix: str
    dtype: str
    items_per_block: int

    @property
    def bytes_per_block(self) -> int:
        """The data of a block, in bytes."""
        return self.items_per_block * item_bytes(self.dtype)


class State(Protocol):
    """What a pass over a weight fixes for all of its blocks; decoding needs it."""

    @property
    def rescued(self) -> bool:
        """Whether the codec's first choice had too large an error, so that the weight is encoded in another way."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as manifests store it: keys of Codec.state_defaults, with JSON scalars.

        It may leave out a key whose default is 0, if that is the value.
        """


class Unstated(Document, frozen=True):
    """The state of a weight that has none."""

    @property
    def rescued(self) -> bool:
        """Whether the codec's first choice had too large an error, so that the weight is encoded in another way."""
        return False

    def to_json(self) -> dict[str, Any]:
        """Return the state as manifests store it: keys of Codec.state_defaults, with JSON scalars."""
        return {}


class NormRange(NamedTuple):
    """The smallest and the largest norm that is not 0, before any exponent; inf and 0.0 if there are none."""

    smallest: float = math.inf
    largest: float = 0.0

    def merged(self, later: NormRange) -> NormRange:
        """Return the range of both."""
        return NormRange(min(self.smallest, later.smallest), max(self.largest, later.largest))


NO_NORMS = NormRange()


@dataclass(frozen=True, eq=False, kw_only=True)
class Measures:
    """What encoding measured of some consecutive blocks.

    energies: sums of squares of the weights, [blocks] f64
    errors: sums of squared errors after decoding, [blocks] f64
    first_bad_block: index of the first block with a NaN or an infinity, whose codes mean nothing; -1 if there is none
    norms: those of the blocks, for the coder's next state, if it has any
    """

    energies: Doubles
    errors: Doubles
    first_bad_block: int
    norms: NormRange = NO_NORMS


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """What a pass over all blocks of a weight measured.

    state: the state of the pass
    energy: the sum of squares of the weights
    error: the sum of squared errors after decoding
    norms: those of all blocks, for the coder's next state
    """

    state: State
    energy: float
    error: float
    norms: NormRange

    @property
    def relative_mse(self) -> float:
        """The sum of squared errors over the sum of squares; 0 for a weight of zeros."""
        return self.error / self.energy if self.energy else 0.0


class Coder(Protocol):
    """A codec at one rate, for all weights or `sized` for one. A coder is a subclass, for what has a default here.

    Only a sized coder has blocks and parts, and encodes and decodes. Rate, tables and states are the same for all
    weights; what is promised may depend on the size, too.

    Where `parts` is a parameter, it holds an array [blocks, bytes per block] u8 for each entry of the property `parts`,
    in the same order.
    """

    @property
    def codec(self) -> str:
        """The name of the codec, a key of CODECS."""

    @property
    def bits(self) -> float:
        """The rate by which users and files name the coder; an int if it is whole."""

    @property
    def depends_on_size(self) -> bool:
        """Whether blocks and parts depend on the size of a weight, so that a master always states its shape."""
        return False

    def sized(self, weights: int) -> Coder:
        """Return the coder as it stores a weight of this many elements; its block_size and parts hold for it alone.

        weights: any number from 0 on, also from a damaged file; a weight without elements is never encoded
        """
        return self

    @property
    def block_size(self) -> int:
        """The number of weights in a block; the last block of a weight is padded with zeros."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stored tensors of a weight, with the suffixes of the codec."""

    @property
    def distortion(self) -> float:
        """The relative mean squared error that theory promises for Gaussian weights."""

    @property
    def orthogonal_error(self) -> bool:
        """Whether the error of a decoded weight is orthogonal to it, so that errors of later rounding simply add."""

    def least_squares(self) -> Coder:
        """Return the coder that makes the same codes with the least squared error.

        At low rates others may trade squared error for the size of the decoded weights, which serves weights whose
        errors nothing else weighs. Planning compares rates by the errors of least squares.
        """
        return self

    def tables(self) -> Any:
        """Return what decoding needs besides parts and state, as JSON for the master; None if it needs nothing."""
        return None

    def first_state(self) -> State:
        """Return the state of the first pass, which is the only one for nearly every weight."""

    def next_state(self, history: Sequence[PassResult]) -> State | None:
        """Return the state for another pass after these, or None if the last one stands."""

    def parse_state(self, values: Mapping[str, Any]) -> State:
        """Parse what State.to_json returns; absent keys have the values of Codec.state_defaults.

        Raises ValueError for a value that this coder never writes; the message names its key.
        """

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str, state: State) -> Measures:
        """Encode whole blocks into parts, and return what was measured.

        values: the weights, as raw bytes of `dtype`: BF16, F16 or F32
        """

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str, state: State) -> None:
        """Decode whole blocks, encoded in a state, to raw bytes of `dtype`: BF16, F16 or F32.

        Raises DamagedBlock if it finds that no coder wrote these bytes. It never reads or writes outside the arrays.
        """

    def check(self, parts: Sequence[Bytes], state: State) -> None:
        """Raise DamagedBlock if it shows without decoding that no coder wrote these bytes.

        `decode` calls it, and so does `decode_torch` on the CPU. Whoever brings parts to another device, or computes
        with them undecoded, calls it before.
        """

    def decode_torch(self, parts: Sequence[Tensor], state: State) -> Tensor:
        """Decode whole blocks on the device of the parts, [blocks, bytes] u8 -> [blocks, block size] f32.

        By default on the CPU. Raises DamagedBlock like `decode`, but does not call `check` on another device.
        """
        import torch

        values = np.empty(len(parts[0]) * self.block_size * 4, dtype=np.uint8)
        self.decode([part.cpu().numpy() for part in parts], values, dtype="F32", state=state)
        return torch.from_numpy(values.view(np.float32)).view(-1, self.block_size).to(parts[0].device)

    def modelled_errors(self, blocks: Floats) -> Doubles | None:
        """Return about the mean squared error of the weights of each block, [blocks] f64, up to a common factor.

        blocks: any consecutive weights in blocks of Codec.block_size, [blocks, size]

        Scalings of one weight are compared by it (scale_search.py). The coder need not be sized. None if encoding is
        fast enough to measure the error in its place.
        """
        return None


class Codec:
    """A block quantizer of several rates. A codec is a subclass.

    name: the key in CODECS
    suffixes: those of the parts, in the order of the parts, which is the same at every rate
    rates: the rates that fitting to a size chooses from, ascending
    any_rate: whether the codec has every rate from the first to the last of `rates`, not only those
    efforts: the amounts of work that encoding may take, ascending, the first by default; empty if there is no choice.
        More effort gives less error in the same bytes; it has no part in decoding, nor in what `distortion` promises
    block_size: the one that configurations state: that of every weight, or the unit of blocks that depend on size
    state_defaults: the keys that State.to_json may have, with the values of weights for which the master gives none
    description: what the codec does to a weight, in sentences for a model card; empty if it is only for comparison
    papers: where the method comes from, a line of Markdown each, for a model card
    """

    name: str
    suffixes: tuple[str, ...]
    rates: Sequence[float]
    any_rate: bool = False
    efforts: Sequence[int] = ()
    block_size: int
    state_defaults: Mapping[str, Any]
    description: str = ""
    papers: Sequence[str]

    def coder(self, bits: float, effort: int | None = None) -> Coder:
        """Return the coder of a rate, which encodes with an effort; None for the default.

        Raises RecipeError for a rate or an effort that the codec does not have (unknown_rate, check_effort).
        """
        raise NotImplementedError

    def coder_from_tables(self, bits: float, tables: Any) -> Coder:
        """Return the coder of a rate, with the tables of a master.

        Raises RecipeError like `coder`, and ValueError for tables that cannot be those of the rate; the message says
        what was expected. By default there are none but those of the format.
        """
        if tables is not None:
            raise ValueError(f"expected none for {self.name}")
        return self.coder(bits)


def has_rate(codec: Codec, bits: float) -> bool:
    """Whether a codec has a rate; none has NaN."""
    return bits in codec.rates or (codec.any_rate and codec.rates[0] <= bits <= codec.rates[-1])


def rates_text(codec: Codec) -> str:
    """Return the rates of a codec in words, as in "a whole number of bits from 2 to 8"."""
    first, last = (f"{bits:g}" for bits in (codec.rates[0], codec.rates[-1]))
    if codec.any_rate:
        return f"any number of bits from {first} to {last}"
    if list(codec.rates) == list(range(int(codec.rates[0]), int(codec.rates[-1]) + 1)):
        return f"a whole number of bits from {first} to {last}"
    return f"{alternatives(codec.rates)} bits"


def alternatives(numbers: Sequence[float]) -> str:
    """Return numbers as an enumeration, as in "2.5, 3.5 or 4.5"."""
    *others, last = (f"{number:g}" for number in numbers)
    return f"{', '.join(others)} or {last}" if others else last


def unknown_rate(codec: Codec, bits: float) -> RecipeError:
    """Return the error for a rate that a codec does not have."""
    return RecipeError(f"expected {rates_text(codec)} for {codec.name}, found {exact_rate(bits)}")


def check_effort(codec: Codec, effort: int | None) -> None:
    """Raise RecipeError for an effort that a codec does not have."""
    if effort is None or effort in codec.efforts:
        return
    if not codec.efforts:
        raise RecipeError(f"{codec.name} has no effort setting, found {effort}")
    raise RecipeError(f"expected an effort of {alternatives(codec.efforts)} for {codec.name}, found {effort}")


def exact_rate(bits: float) -> float:
    """Return a rate as files and messages write it: an int if it is whole."""
    return int(bits) if math.isfinite(bits) and bits == int(bits) else float(bits)


def largest_error(distortion: float) -> float:
    """Return the largest relative error that passes without a rescue, where theory promises a distortion."""
    return RESCUE_FACTOR * distortion
