"""What the formats of a master's weights have in common.

A format is a value that says everything that decoding needs besides the stored tensors: a codec, its rate, and what the
passes over a weight settled (a rotation, a common exponent). A weight is encoded in passes: after each, `after` answers
with the format of another one, or None. Nothing outside formats/ and kernels/ knows what a stored tensor holds or what
a setting means. docs/codecs.md shows how to add a format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from pqweights.common.documents import as_document
from pqweights.common.dtypes import item_bytes
from pqweights.errors import RecipeError
from pqweights.kernels import BLOCK_SIZE, Measures, load_backend

if TYPE_CHECKING:
    from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# The dtypes that block formats read and write.
VALUE_DTYPES = ("BF16", "F16", "F32")
# The rotations, as files name them; the second one is the rescue.
HADAMARD, SIGNED_HADAMARD = "hadamard", "signed-hadamard"

# A weight is encoded again, or reported, if its relative error exceeds the promised distortion by this factor.
RESCUE_FACTOR = 1.25


class DamagedBlock(Exception):
    """Stored bytes cannot be what an encoder wrote. Whoever knows where they come from makes a PqweightsError of it.

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


@dataclass(frozen=True, kw_only=True)
class MasterFormat:
    """How a weight of a master is stored: a codec at a rate, and what its last pass settled.

    codec: the name in recipes and files
    suffixes: those of the stored tensors, the same at every rate
    stated_block_size: what config.json states: the size of every block, or the unit of blocks that depend on the size
    settings: the fields besides `bits` that decoding needs, with the values of weights for which a master gives none
    choices: the values that a setting may have, where its type allows more
    depends_on_size: whether stored shapes do not tell that of the weight, so that a master always states it
    description: what becomes of a weight, in sentences for a model card; empty if it is only for comparison
    papers: where the method comes from, a line of Markdown each, for a model card

    bits: the rate by which users and files name the format; an int if it is whole
    """

    codec: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    stated_block_size: ClassVar[int] = BLOCK_SIZE
    settings: ClassVar[Mapping[str, Any]] = {}
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    depends_on_size: ClassVar[bool] = True
    description: ClassVar[str] = ""
    papers: ClassVar[Sequence[str]] = ()

    bits: float

    @classmethod
    def at(cls, bits: float) -> Self:
        """Return the format of a weight that takes so many bits. Raises RecipeError for a rate that no weight has."""
        if not 0 < bits < math.inf:
            raise RecipeError(f"expected the bits per weight that {cls.codec} takes, found {bits}")
        return cls(bits=exact_rate(bits))

    @property
    def distortion(self) -> float:
        """The relative mean squared error that theory promises for Gaussian weights; inf if nothing is promised."""
        return math.inf

    @property
    def orthogonal_error(self) -> bool:
        """Whether the error of a decoded weight is orthogonal to it, so that errors of later rounding simply add."""
        return False

    @property
    def rescued(self) -> bool:
        """Whether the codec's first choice had too large an error, so that the weight is encoded in another way."""
        return False

    def stated(self) -> dict[str, Any]:
        """Return the settings as manifests state them, JSON scalars; those that are 0 or false may be left out."""
        return {key: value for key in self.settings if (value := getattr(self, key))}

    def with_settings(self, values: Mapping[str, Any]) -> Self:
        """Return the format with what `stated` returns, where absent keys have the values of `settings`.

        Raises ValueError for a value that no encoder writes; the message names its key.
        """
        checked = as_document({"bits": self.bits, **self.settings, **values}, type(self), ValueError)
        settings = {key: getattr(checked, key) for key in self.settings}
        for key, choices in self.choices.items():
            if settings[key] not in choices:
                raise ValueError(f"{key}: expected {' or '.join(map(str, choices))}, found {settings[key]!r}")
        return replace(self, **settings)

    def tables(self) -> Any:
        """Return what decoding needs besides settings and stored tensors, as JSON for the master; None for nothing."""
        return None

    def check_tables(self, tables: Any) -> None:
        """Raise ValueError, which says what was expected, for tables of a master that are not those of the format."""
        if tables is not None:
            raise ValueError(f"expected none for {self.codec}")


@dataclass(frozen=True, kw_only=True)
class BlockFormat(MasterFormat):
    """A format of several rates that encodes each block by itself, into a fixed number of bytes.

    rates: those that fitting to a size chooses from, ascending
    any_rate: whether there is every rate from the first to the last of `rates`, not only those
    efforts: the amounts of work that encoding may take, ascending, the first by default; empty if there is no choice.
        More effort gives less error in the same bytes; it has no part in decoding, nor in what `distortion` promises

    How weights are cut into blocks may depend on how many there are. Only a format that is `sized` for a weight has
    blocks and parts, and encodes and decodes. Where `parts` is a parameter, it holds an array [blocks, bytes per block]
    u8 for each entry of the property `parts`, in the same order.
    """

    rates: ClassVar[Sequence[float]]
    any_rate: ClassVar[bool] = False
    efforts: ClassVar[Sequence[int]] = ()
    depends_on_size: ClassVar[bool] = False

    @classmethod
    def at(cls, bits: float, effort: int | None = None) -> Self:
        """Return the format of a rate, which encodes with an effort; None for the default.

        Raises RecipeError for a rate or an effort that the codec does not have (check_rate, check_effort).
        """
        raise NotImplementedError

    def sized(self, weights: int) -> Self:
        """Return the format of a weight of this many elements; its block_size and parts hold for it alone.

        weights: any number from 0 on, also from a damaged file; a weight without elements is never encoded
        """
        return self

    @property
    def block_size(self) -> int:
        """The number of weights in a block; the last block of a weight is padded with zeros."""
        return BLOCK_SIZE

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stored tensors of a weight, with the suffixes of the codec."""
        raise NotImplementedError

    def least_squares(self) -> Self:
        """Return the format that makes the same codes with the least squared error.

        At low rates others may trade squared error for the size of the decoded weights, which serves weights whose
        errors nothing else weighs. Planning compares rates by the errors of least squares.
        """
        return self

    def after(self, passes: Sequence[Pass]) -> Self | None:
        """Return the format of another pass after these, or None if the last one stands."""
        return None

    def encode(self, values: Bytes, parts: Sequence[Bytes], *, dtype: str) -> Measures:
        """Encode whole blocks into parts, and return what was measured.

        values: the weights, as raw bytes of `dtype`: BF16, F16 or F32
        """
        raise NotImplementedError

    def decode(self, parts: Sequence[Bytes], values: Bytes, *, dtype: str) -> None:
        """Decode whole blocks to raw bytes of `dtype`: BF16, F16 or F32.

        Raises DamagedBlock if it finds that no encoder wrote these bytes. It never reads or writes outside the arrays.
        """
        raise NotImplementedError

    def check(self, parts: Sequence[Bytes]) -> None:
        """Raise DamagedBlock if it shows without decoding that no encoder wrote these bytes.

        `decode` calls it, and so does `decode_torch` on the CPU. Whoever brings parts to another device, or computes
        with them undecoded, calls it before.
        """

    def decode_torch(self, parts: Sequence[Tensor]) -> Tensor:
        """Decode whole blocks on the device of the parts, [blocks, bytes] u8 -> [blocks, block size] f32.

        By default on the CPU. Raises DamagedBlock like `decode`, but does not call `check` on another device.
        """
        import torch

        values = np.empty(len(parts[0]) * self.block_size * 4, dtype=np.uint8)
        self.decode([part.cpu().numpy() for part in parts], values, dtype="F32")
        return torch.from_numpy(values.view(np.float32)).view(-1, self.block_size).to(parts[0].device)

    def modelled_errors(self, blocks: Floats) -> Doubles | None:
        """Return about the mean squared error of the weights of each block, [blocks] f64, up to a common factor.

        blocks: any consecutive weights in blocks of `stated_block_size`, [blocks, size]

        Scalings of one weight are compared by it (scale_search.py). The format need not be sized. None if encoding is
        fast enough to measure the error in its place.
        """
        return None


class Pass:
    """What a pass over all blocks of a weight measured, added up chunk by chunk in the order of the blocks.

    So the sums do not depend on the size of chunks or the number of threads.

    format: the format in which the pass encoded
    smallest_norm, largest_norm: the extremes of the norms that are not 0, before any exponent; inf and 0.0 without any
    """

    def __init__(self, format: BlockFormat) -> None:
        self.format = format
        self.smallest_norm, self.largest_norm = math.inf, 0.0
        self._sums = np.zeros(2)

    def add(self, measures: Measures) -> None:
        """Add the measures of the next blocks."""
        load_backend().add_in_order(self._sums, measures.energies, measures.errors)
        self.smallest_norm = min(self.smallest_norm, measures.smallest_norm)
        self.largest_norm = max(self.largest_norm, measures.largest_norm)

    @property
    def energy(self) -> float:
        """The sum of squares of the weights."""
        return float(self._sums[0])

    @property
    def error(self) -> float:
        """The sum of squared errors after decoding."""
        return float(self._sums[1])

    @property
    def relative_mse(self) -> float:
        """The sum of squared errors over the sum of squares; 0 for a weight of zeros."""
        return self.error / self.energy if self.energy else 0.0


def has_rate(codec: type[BlockFormat], bits: float) -> bool:
    """Whether a codec has a rate; none has NaN."""
    return bits in codec.rates or (codec.any_rate and codec.rates[0] <= bits <= codec.rates[-1])


def rates_text(codec: type[BlockFormat]) -> str:
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


def check_rate(codec: type[BlockFormat], bits: float) -> None:
    """Raise RecipeError for a rate that a codec does not have."""
    if not has_rate(codec, bits):
        raise RecipeError(f"expected {rates_text(codec)} for {codec.codec}, found {exact_rate(bits)}")


def check_effort(codec: type[BlockFormat], effort: int | None) -> None:
    """Raise RecipeError for an effort that a codec does not have."""
    if effort is None or effort in codec.efforts:
        return
    if not codec.efforts:
        raise RecipeError(f"{codec.codec} has no effort setting, found {effort}")
    raise RecipeError(f"expected an effort of {alternatives(codec.efforts)} for {codec.codec}, found {effort}")


def exact_rate(bits: float) -> float:
    """Return a rate as files and messages write it: an int if it is whole."""
    return int(bits) if math.isfinite(bits) and bits == int(bits) else float(bits)


def largest_error(distortion: float) -> float:
    """Return the largest relative error that passes without a rescue, where theory promises a distortion."""
    return RESCUE_FACTOR * distortion
