"""What all methods have in common: options that are numbers, and a quantizer each for keys and for values."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from pqweights.errors import OptionError
from pqweights.kv.klt import LayerBases
from pqweights.kv.quantizer import StateQuantizer
from pqweights.kv.rope import RopePairs

UNQUANTIZED = 16
WINDOWS = range(1 << 20)


@dataclass(frozen=True, kw_only=True)
class LayerModel:
    """What a method may know of a layer.

    key_size, value_size: the coordinates of a key and of a value
    pairs: the coordinates of keys that RoPE rotates together; None without RoPE
    bases: what the weights say of keys and values, for methods that need it
    """

    key_size: int
    value_size: int
    pairs: RopePairs | None
    bases: LayerBases | None


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """A method with its options, which are the fields of the dataclass: numbers.

    residual: how many of the most recent tokens stay as they came
    """

    residual: int = 0

    name: ClassVar[str]
    # The values that each option may have.
    choices: ClassVar[Mapping[str, Collection[float]]]
    # What words without "=" stand for.
    words: ClassVar[Mapping[str, Mapping[str, float]]]
    # The options that a spec names even if they have their default values.
    always: ClassVar[Collection[str]] = ("bits",)
    # Whether keys must be rotated by RoPE.
    needs_rope: ClassVar[bool] = False
    # Whether single tokens can attend on codes.
    has_kernels: ClassVar[bool] = False
    # Whether what is fitted to one sequence of a batch follows from the others, too.
    mixes_sequences: ClassVar[bool] = False
    # Whether quantizers follow from the weights of the model.
    needs_weights: ClassVar[bool] = False
    # The number that sizes of heads must divide by.
    size_unit: ClassVar[int] = 8

    @abstractmethod
    def key_quantizer(self, layer: LayerModel) -> StateQuantizer | None:
        """Return what quantizes the keys of a layer; None if they stay as they are."""

    @abstractmethod
    def value_quantizer(self, layer: LayerModel) -> StateQuantizer | None:
        """Return what quantizes the values of a layer; None if they stay as they are."""

    def check_size(self, size: int) -> None:
        """Raise OptionError for a size of heads that the method cannot take."""
        if size % self.size_unit:
            expected = (
                f"KV cache {self.name}: expected heads of a multiple of {self.size_unit} coordinates, found {size}"
            )
            others = "" if self.size_unit == Scheme.size_unit else "; klt and hadamard take multiples of 8"
            raise OptionError(expected + others)

    def __str__(self) -> str:
        """Return the shortest spec of the method with these options."""
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default or field.name in self.always
        }
        found = []
        for word, meant in self.words.items():
            if all(given.get(key) == value for key, value in meant.items()):
                found.append(word)
                given = {key: value for key, value in given.items() if key not in meant}
        found += [f"{key}={value:.9g}" for key, value in given.items()]
        return f"{self.name}:{','.join(found)}" if found else self.name


def digits(option: str, values: Collection[float]) -> dict[str, Mapping[str, float]]:
    """Return the words for an option that may be given as a bare number."""
    return {f"{value:g}": {option: value} for value in values}
