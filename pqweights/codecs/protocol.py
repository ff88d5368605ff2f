"""What a codec is: two functions between whole blocks of weights and a fixed number of bytes. All else is its own business.

A `Codec` has a name; at a rate it becomes a `Coder`, which knows its sizes, its tables and the error that theory promises.
A weight is encoded in passes: the coder says in which `State` the next one codes (a rotation, a common exponent), and after
each pass whether another is needed. The state that stands is all that decoding needs beside the stored parts and the tables.
Nothing outside of codecs/ and kernels/ knows what a part holds or what a state means. docs/codecs.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pqweights.dtypes import item_bytes
from pqweights.strict_json import Fields

if TYPE_CHECKING:
    from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]

# What coders read and write.
VALUE_DTYPES = ("BF16", "F16", "F32")

# A weight whose relative error exceeds this many times the distortion that its coder promises is encoded again, or reported.
RESCUE_FACTOR = 1.25


class Basis(Enum):
    """In which coordinates weights are decoded: their own, or each run of 128 times H / sqrt(128)."""

    PLAIN = "plain"
    HADAMARD = "hadamard"


@dataclass(frozen=True)
class Part:
    """A stored tensor of an encoded weight. dtype: of safetensors, in whole bytes.

    suffix: follows the weight's name, begins with an underscore and has no dot (transformers splits names at the last one).
    """

    suffix: str
    dtype: str
    items_per_block: int

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the data."""
        return self.items_per_block * item_bytes(self.dtype)


class State(Protocol):
    """What a pass over a weight fixes for all of its blocks, and decoding has to know."""

    @property
    def rescued(self) -> bool:
        """Whether the weight was encoded in another way than its codec's first choice, because that erred too much."""
        ...

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest: keys of Codec.state_defaults, with JSON scalars."""
        ...


Own = TypeVar("Own", bound="Observed")


class Observed(Protocol):
    """What a coder noticed while it encoded, for its own `next_state`."""

    def merged(self: Own, later: Own) -> Own:
        """Of these blocks and those that follow."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Measures:
    """What encoding found out about some consecutive blocks.

    energies, errors: [blocks] f64, sums of squares of the weights and of their errors after decoding. first_bad_block: index of
    the first block with a NaN or an infinity, or -1; what was encoded of such a block is meaningless.
    """

    energies: Doubles
    errors: Doubles
    first_bad_block: int
    observed: Observed


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """What a pass over all blocks of a weight measured."""

    state: State
    energy: float
    error: float
    observed: Observed

    @property
    def relative_mse(self) -> float:
        """Sum of squared errors over sum of squares; 0 for a weight of zeros."""
        return self.error / self.energy if self.energy else 0.0


class Coder(Protocol):
    """A codec at one rate.

    Arrays of parts are [blocks, bytes per block] u8, one for each entry of `parts`, in that order.
    """

    @property
    def codec(self) -> str:
        """The name of the codec, a key of CODECS."""
        ...

    @property
    def bits(self) -> float:
        """The rate by which users and files name it; an int where it is whole."""
        ...

    @property
    def block_size(self) -> int:
        """Weights of a block; the last block of a weight is padded with zeros."""
        ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stored tensors of a weight. The shape of the first one tells that of the weight."""
        ...

    @property
    def distortion(self) -> float:
        """The relative mean squared error that theory promises for Gaussian weights."""
        ...

    @property
    def orthogonal_error(self) -> bool:
        """Whether the error of a decoded weight is orthogonal to it, so that errors of later rounding add up to it."""
        ...

    def tables(self) -> Any:
        """What decoding needs besides parts and state, as JSON that every master of this rate carries; None for nothing."""
        ...

    def first_state(self) -> State:
        """The state of the pass that nearly every weight needs alone."""
        ...

    def next_state(self, history: Sequence[PassResult]) -> State | None:
        """The state for another pass after these, or None where the last one stands."""
        ...

    def parse_state(self, fields: Fields) -> State:
        """The inverse of State.to_json; absent keys have the values of Codec.state_defaults.

        Raises what `fields` raises, ValueError for a value that this coder never writes.
        """
        ...

    def encode(self, values: Bytes, dtype: str, state: State, parts: Sequence[Bytes]) -> Measures:
        """Encode whole blocks, given as raw bytes of dtype BF16, F16 or F32, into the parts."""
        ...

    def decode(
        self, parts: Sequence[Bytes], state: State, dtype: str, values: Bytes, basis: Basis = Basis.PLAIN
    ) -> None:
        """Decode whole blocks into raw bytes of dtype BF16, F16 or F32. basis: PLAIN, or another one of `bases`."""
        ...

    def bases(self, state: State) -> frozenset[Basis]:
        """The bases in which `decode` can give a weight of this state."""
        ...

    def decode_torch(self, parts: Sequence[Tensor], state: State) -> Tensor:
        """Decode whole blocks on the device of the parts, [blocks, bytes] u8 -> [blocks, block size] f32.

        A codec that has no kernels for other devices leaves it to `decode_torch_on_cpu`.
        """
        ...


class Codec(Protocol):
    """A block quantizer of several rates."""

    @property
    def name(self) -> str:
        """The key in CODECS."""
        ...

    @property
    def format_version(self) -> int:
        """The version of the master's format that brought it: older readers refuse masters that use it."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of the parts, in their order; they are the same at every rate."""
        ...

    @property
    def rates(self) -> Sequence[float]:
        """The rates, ascending, among which fitting to a size chooses."""
        ...

    @property
    def state_defaults(self) -> Mapping[str, Any]:
        """The keys of State.to_json, with the values that a weight has where a master does not say otherwise."""
        ...

    @property
    def description(self) -> str:
        """What it does to a weight, in sentences for a model card; empty for one that is there to be compared with."""
        ...

    def coder(self, bits: float) -> Coder:
        """The coder of that rate.

        Raises RecipeError for a rate that the codec does not have, saying which it has.
        """
        ...

    def coder_from_tables(self, bits: float, tables: Any) -> Coder:
        """The coder of that rate with the tables that a master carries.

        Raises RecipeError as `coder`, ValueError, saying what was expected, for tables that cannot be those of the rate.
        """
        ...


def decode_torch_on_cpu(coder: Coder, parts: Sequence[Tensor], state: State) -> Tensor:
    """Coder.decode_torch by way of `coder.decode`, for any device."""
    import torch

    values = np.empty(len(parts[0]) * coder.block_size * 4, dtype=np.uint8)
    coder.decode([part.cpu().numpy() for part in parts], state, "F32", values)
    return torch.from_numpy(values.view(np.float32)).view(-1, coder.block_size).to(parts[0].device)


def exact_rate(bits: float) -> float:
    """A rate as files and messages have it: an int where it is whole."""
    return int(bits) if bits == int(bits) else float(bits)


def exceeds_promise(coder: Coder, relative_mse: float) -> bool:
    """Whether an error is above what the coder may be trusted with."""
    return relative_mse > largest_error(coder)


def largest_error(coder: Coder) -> float:
    """The largest relative error that passes without a rescue."""
    return RESCUE_FACTOR * coder.distortion
