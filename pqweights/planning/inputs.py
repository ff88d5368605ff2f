"""What is known of the inputs of the weights of a model: which ones read the same, and how large these inputs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import View
from pqweights.common.threads import Progress

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class InputVector:
    """One distinct vector of inputs.

    size: K, its number of channels
    tokens: how many rows its moments are the mean of
    held_back: how many rows are held back
    windows: of how many windows of the sample those are; 0 if there are only mean squares, from a file
    """

    size: int
    tokens: int
    held_back: int
    windows: int


@dataclass(frozen=True, kw_only=True)
class WeightInputs:
    """Which vectors a weight reads.

    vectors: for each of its matrices the number of the vector; None for a matrix that had no inputs
    transposed: whether input channels run along its columns, [..., K, N], not along its rows, [..., N, K]
    """

    vectors: tuple[int | None, ...]
    transposed: bool


def read_by(tensor: LogicalTensor, matrix: int) -> list[tuple[str, int]] | None:
    """Return the matrices of the checkpoint whose rows a matrix of a tensor has, each by name and number.

    None if its rows are not whole rows of others.
    """
    if not isinstance(tensor, View):
        return [(tensor.name, matrix)]
    runs = tensor.runs_of_matrix(matrix)
    if runs is None:
        return None
    result = []
    for source, rows in runs:
        height = source.shape[-2]
        first, last = sorted((rows[0] // height, rows[-1] // height))
        result += [(source.name, number) for number in range(first, last + 1)]
    return result


def importance_of(tensor: LogicalTensor, matrix: int, inputs: KnownInputs) -> Floats:
    """Return the mean square of each channel that a matrix of a tensor reads, [K]; see `KnownInputs.mean_squares`."""
    known = [inputs.mean_squares(name, number) for name, number in read_by(tensor, matrix) or ()]
    return known[0] if len(known) == 1 else np.mean(known, axis=0, dtype=np.float32)


class KnownInputs(Protocol):
    """The inputs of the weights of a checkpoint, from a sample of tokens. `prepare` must be called before the rest."""

    @property
    def about(self) -> dict[str, Any]:
        """What manifests state: the sample, its tokens, and as `identity` a digest of everything on which they depend.

        It needs no `prepare`.
        """
        ...

    def prepare(self, progress: Progress) -> None:
        """Have the model read the sample, unless it has.

        Raises SourceError for a model that cannot be run, EvaluationError for a sample that cannot be had, OutputError.
        """
        ...

    @property
    def vectors(self) -> Sequence[InputVector]:
        """What is known of each vector."""
        ...

    @property
    def weights(self) -> Mapping[str, WeightInputs]:
        """What each weight reads, by name."""
        ...

    def mean_squares(self, name: str, matrix: int) -> Floats:
        """Return the mean square of each channel that a matrix of a weight reads, [K]: its importance.

        Tokens count by the squares of the gradients at the outputs of this matrix, where these are known.
        """
        ...

    def moments(self, vector: int) -> tuple[Floats, Floats]:
        """Return the means of x x' over the inputs x of a vector, [K, K], and the rows that were held back, [n, K].

        It may take the time of a layer: those of one layer are at hand at a time. One thread at a time may ask.
        """
        ...
