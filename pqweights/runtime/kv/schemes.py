"""The methods of quantizing a cache, each with its options: `hadamard:3`, `polar-rope:m4n2,values=2,residual=64`.

A method has options that are numbers, and a quantizer each for keys and for values.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers.cache_utils import get_layer_types_and_kwargs

from pqweights.common.advice import instead, nearest
from pqweights.errors import OptionError
from pqweights.runtime.kv.klt import KarhunenLoeve, LayerBases
from pqweights.runtime.kv.polar_rope import PolarPairs, RopePairs, TokenWise, rope_pairs
from pqweights.runtime.kv.polar_transform import GROUP
from pqweights.runtime.kv.rotated import RecursivePolar, RotatedScalar
from pqweights.runtime.kv.states import StateQuantizer

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
    def quantizers(self, layer: LayerModel) -> tuple[StateQuantizer | None, StateQuantizer | None]:
        """Return what quantizes the keys of a layer, and its values; None if they stay as they are."""

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
        written = []
        for word, meant in self.words.items():
            if all(given.get(key) == value for key, value in meant.items()):
                written.append(word)
                given = {key: value for key, value in given.items() if key not in meant}
        written += [f"{key}={value:.9g}" for key, value in given.items()]
        return f"{self.name}:{','.join(written)}" if written else self.name


def digits(option: str, values: Collection[float]) -> dict[str, Mapping[str, float]]:
    """Return the words for an option that may be given as a bare number."""
    return {f"{value:g}": {option: value} for value in values}


KLT_BITS = tuple(quarters / 4 for quarters in range(4, 25))


@dataclass(frozen=True, kw_only=True)
class Klt(Scheme):
    """Ours: transform coding in bases that follow from the weights, after Karhunen and Loeve.

    It takes a mean number of bits for each coordinate, and 16 for each vector.

    bits: of keys and of values
    keys, values: of one of them; 0 for `bits`
    """

    bits: float = 3
    keys: float = 0
    values: float = 0

    name = "klt"
    choices = {"bits": KLT_BITS, "keys": KLT_BITS, "values": KLT_BITS, "residual": WINDOWS}
    words = digits("bits", KLT_BITS)
    needs_weights: ClassVar[bool] = True
    mixes_sequences: ClassVar[bool] = True  # kernels want the same widths for all

    def quantizers(self, layer: LayerModel) -> tuple[StateQuantizer | None, StateQuantizer | None]:
        """Return what quantizes the keys of a layer, and its values; None if they stay as they are."""
        assert layer.bases is not None
        keys = KarhunenLoeve(layer.bases.keys, self.keys or self.bits, layer.bases.rope)
        return keys, KarhunenLoeve(layer.bases.values, self.values or self.bits, None)


BITS = range(2, 9)


@dataclass(frozen=True, kw_only=True)
class Hadamard(Scheme):
    """Rotated keys and values in Lloyd-Max levels: the scalar case of TurboQuant (arXiv:2504.19874).

    It takes a number of bits for each coordinate, and 16 for each vector.

    bits: of keys and of values
    keys, values: of one of them; 0 for `bits`
    centred: 0 to leave the mean of the first keys in them
    """

    bits: int = 4
    keys: int = 0
    values: int = 0
    centred: int = 1

    has_kernels: ClassVar[bool] = True
    name = "hadamard"
    choices = {"bits": BITS, "keys": BITS, "values": BITS, "centred": (0, 1), "residual": WINDOWS}
    words = digits("bits", BITS)

    def quantizers(self, layer: LayerModel) -> tuple[StateQuantizer | None, StateQuantizer | None]:
        """Return what quantizes the keys of a layer, and its values; None if they stay as they are."""
        keys = RotatedScalar(layer.key_size, self.keys or self.bits, centred=bool(self.centred))
        return keys, RotatedScalar(layer.value_size, self.values or self.bits)


WIDTHS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, kw_only=True)
class PolarRope(Scheme):
    """PolarQuant of Wu et al. (arXiv:2502.00527): pairs of key coordinates as angles of m and radii of n bits.

    Values are quantized token by token.

    angle, radius: m and n
    values: the bits of values, 2 or 4; 16 to keep them as they are
    """

    angle: int = 4
    radius: int = 4
    values: int = 4
    residual: int = 128

    has_kernels: ClassVar[bool] = True
    name = "polar-rope"
    choices = {"angle": WIDTHS, "radius": WIDTHS, "values": (2, 4, UNQUANTIZED), "residual": WINDOWS}
    words = {f"m{m}n{n}": {"angle": m, "radius": n} for m in WIDTHS for n in WIDTHS}
    always: ClassVar[Collection[str]] = ("angle", "radius")
    needs_rope: ClassVar[bool] = True

    def quantizers(self, layer: LayerModel) -> tuple[StateQuantizer | None, StateQuantizer | None]:
        """Return what quantizes the keys of a layer, and its values; None if they stay as they are."""
        assert layer.pairs is not None
        values = None if self.values == UNQUANTIZED else TokenWise(self.values)
        return PolarPairs(layer.pairs, self.angle, self.radius), values


@dataclass(frozen=True, kw_only=True)
class Polar(Scheme):
    """PolarQuant of Han et al. (arXiv:2502.02617): rotated keys and values as angles, at 3.875 bits.

    Angles take 4, 2, 2 and 2 bits, and a radius 16 bits for 16 coordinates.
    """

    name = "polar"
    choices = {"residual": WINDOWS}
    words = {}
    size_unit: ClassVar[int] = GROUP

    def quantizers(self, layer: LayerModel) -> tuple[StateQuantizer | None, StateQuantizer | None]:
        """Return what quantizes the keys of a layer, and its values; None if they stay as they are."""
        return RecursivePolar(layer.key_size), RecursivePolar(layer.value_size)


@dataclass(frozen=True, kw_only=True)
class Unquantized(Scheme):
    """Keys and values as they come, to compare with."""

    name = "none"
    choices = {}
    words = {}
    size_unit: ClassVar[int] = 1

    def quantizers(self, layer: LayerModel) -> tuple[StateQuantizer | None, StateQuantizer | None]:
        """Return what quantizes the keys of a layer, and its values; None if they stay as they are."""
        return None, None


SCHEMES: dict[str, type[Scheme]] = {
    "klt": Klt,
    "hadamard": Hadamard,
    "polar-rope": PolarRope,
    "polar": Polar,
    "none": Unquantized,
}


def parse_spec(spec: str) -> Scheme:
    """Return the method that a spec names, such as `hadamard:3` or `polar-rope:m4n2,values=2`.

    Raises OptionError for an unknown name, option or value; the message names the nearest one.
    """
    name, colon, rest = spec.partition(":")
    if name not in SCHEMES:
        raise OptionError(f"KV cache {spec!r}: no method is called {name!r}; {instead(name, SCHEMES)}")
    scheme = SCHEMES[name]
    options: dict[str, float] = {}
    for word in rest.split(",") if colon else []:
        for key, value in _meant(scheme, spec, word.strip()).items():
            if options.setdefault(key, value) != value:
                raise OptionError(f"KV cache {spec!r}: {key} is given twice")
    return scheme(**options)  # type: ignore[arg-type]


def _meant(scheme: type[Scheme], spec: str, word: str) -> Mapping[str, float]:
    """Return the options that a word sets."""
    if word in scheme.words:
        return scheme.words[word]
    key, _, value = word.partition("=")
    if key not in scheme.choices:
        expected = [*scheme.words] if len(scheme.words) <= 4 else [f"{min(scheme.words)} to {max(scheme.words)}"]
        expected += [f"{name}=N" for name in scheme.choices]
        near = nearest(key, [*scheme.words, *scheme.choices])
        raise OptionError(
            f"KV cache {spec!r}: {scheme.name} has no option {key!r}; "
            f"{'' if near is None else f'the nearest is {near!r}; '}expected {', '.join(expected) or 'none'}"
        )
    choices = scheme.choices[key]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if number.is_integer():
        number = int(number)
    if number not in choices:
        raise OptionError(f"KV cache {spec!r}: {key}: expected {_listed(choices)}, found {value!r}")
    return {key: number}


def _listed(choices: Collection[float]) -> str:
    numbers = list(choices)
    if len(numbers) > 4 and numbers == list(range(int(numbers[0]), int(numbers[-1]) + 1)):
        return f"a whole number from {numbers[0]} to {numbers[-1]}"
    if len(numbers) > 8:
        return f"a multiple of {numbers[1] - numbers[0]:g} from {numbers[0]:g} to {numbers[-1]:g}"
    return " or ".join(f"{number:g}" for number in numbers)


FULL = "full_attention"  # layers with keys and values of all tokens


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A model, as its cache sees it.

    config: of the decoder, a PreTrainedConfig
    layers: the type of each layer, in the words of transformers
    options: what the cache of each layer is made with
    size: the coordinates of a key
    """

    config: Any
    layers: tuple[str, ...]
    options: tuple[dict[str, Any], ...]
    size: int

    @property
    def pairs(self) -> RopePairs | None:
        """The pairs of coordinates that RoPE rotates; None without RoPE."""
        return self.pairs_of(self.size)

    def pairs_of(self, size: int) -> RopePairs | None:
        """Return the pairs of keys of another size, which single layers may have."""
        return rope_pairs(self.config, size)


def cached_model(config: Any, scheme: Scheme) -> CachedModel:
    """Return what a cache has to know of a model.

    config: the configuration of the model, a PreTrainedConfig

    Raises OptionError for a model whose cache the method cannot quantize.
    """
    decoder = config.get_text_config(decoder=True)
    subject = f"KV cache {scheme.name}: {decoder.model_type}"
    if getattr(decoder, "kv_lora_rank", None) is not None:
        raise OptionError(f"{subject} has multi-head latent attention, whose cache is compressed already; leave the KV "
                          "cache as it is")  # fmt: skip
    if getattr(config, "is_encoder_decoder", False) or not getattr(decoder, "num_attention_heads", None):
        raise OptionError(
            f"{subject}: expected a decoder with attention, found a model without keys and values to keep"
        )
    layers, options = get_layer_types_and_kwargs(decoder)
    if FULL not in layers:
        raise OptionError(f"{subject}: expected layers with full attention, found {', '.join(sorted(set(layers)))}")
    size = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
    scheme.check_size(size)
    model = CachedModel(config=decoder, layers=tuple(layers), options=tuple(options), size=size)
    if scheme.needs_rope and model.pairs is None:
        raise OptionError(f"{subject} has no rotary position embedding, which the method needs; use hadamard")
    return model
