"""The vectors of a model between two layers, found by names and shapes: who writes each, and which weights read it.

A factor for each channel of such a vector may be moved: what the writer gives is multiplied, and what a reader takes is
divided by it. For a norm the writer is its gain. The table of models says which modules of a layer read what. A layer
with a module that is not listed there is left as it is, because that module may read one of these vectors, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pqweights.checkpoint.models.conventions import LAYER
from pqweights.checkpoint.readers import LogicalTensor

COLUMNS, ROWS = -1, -2


@dataclass(frozen=True, kw_only=True)
class Side:
    """The part of a tensor that writes or reads a vector.

    tensor: its name
    axis: COLUMNS for the last dimension, ROWS for the one before it
    first, count: which positions along that axis
    repeats, width: position i holds channel i // (repeats * width) * width + i % width of the vector
    stacked: whether each matrix of a stack has a vector of its own
    """

    tensor: str
    axis: int
    count: int
    width: int
    first: int = 0
    repeats: int = 1
    stacked: bool = False

    @property
    def channels(self) -> int:
        """The channels of the vector."""
        return self.count // self.repeats


@dataclass(frozen=True, kw_only=True)
class Link:
    """A vector between layers.

    name: the norm, or the module that writes it
    norm: the norm's weight, if a norm writes it
    zero_centred: whether that norm multiplies by 1 + weight
    writers: the weights of which rows write it
    vectors: biases that are a part of it
    readers: the weights that read it
    input_norm: the weight of the norm that the writers read, if any, and whether that is zero-centred
    exact: whether the factors must be powers of two, because a tensor that they multiply is stored plainly
    matrices: how many vectors there are, one for each matrix of a stack
    channels: the channels of each vector
    """

    name: str
    norm: str | None
    zero_centred: bool
    writers: tuple[Side, ...]
    vectors: tuple[Side, ...]
    readers: tuple[Side, ...]
    input_norm: tuple[str, bool] | None
    exact: bool
    matrices: int
    channels: int


@dataclass(frozen=True, kw_only=True)
class FoldLinks:
    """All vectors of a model that can be folded.

    links: the vectors
    notes: for each tensor that may be folded, with what
    left: what is left as it is, by the reason: names
    unfolded: why nothing is; empty if something is
    """

    links: tuple[Link, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unfolded: str = ""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. prefix: of its names. tensors: by module and by "weight", "bias", or "" for a parameter itself."""

    prefix: str
    modules: dict[str, dict[str, LogicalTensor]]

    def weight(self, module: str) -> LogicalTensor | None:
        """Return the weight of a module, or the parameter of that name."""
        parameters = self.modules.get(module, {})
        return parameters.get("weight", parameters.get(""))

    def bias(self, module: str) -> LogicalTensor | None:
        """Return the bias of a module."""
        return self.modules.get(module, {}).get("bias")


def layers_of(tensors: Sequence[LogicalTensor]) -> Iterator[Layer]:
    """Yield the layers of a model in the order in which they are met; those of other towers are not layers of it."""
    layers: dict[str, dict[str, dict[str, LogicalTensor]]] = {}
    for tensor in tensors:
        match = LAYER.fullmatch(tensor.name)
        if match is None:
            continue
        prefix, rest = f"{match[1]}{match[2]}.", match[3]
        module, _, last = rest.rpartition(".")
        if last not in ("weight", "bias"):
            module, last = rest, ""
        layers.setdefault(prefix, {}).setdefault(module, {})[last] = tensor
    for prefix, modules in layers.items():
        yield Layer(prefix=prefix, modules=modules)
