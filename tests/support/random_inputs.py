"""Inputs of weights for tests of exports, drawn at random, without running a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from helpers import Array, gaussian

from pqweights.checkpoint.source import open_local
from pqweights.common.threads import Progress
from pqweights.planning.inputs import InputVector, WeightInputs

ROWS, HELD_BACK = 1500, 256


def inputs(columns: int, seed: int, rows: int = ROWS) -> Array:
    """Correlated inputs with channels of different size."""
    mixed = gaussian(rows, columns, seed=seed, scale=1) @ (
        np.eye(columns) + gaussian(columns, columns, seed=seed + 1000, scale=0.06)
    )
    return (mixed * np.exp(gaussian(columns, seed=seed + 2000, scale=0.6))).astype(np.float32)


@dataclass(kw_only=True, eq=False)
class RandomInputs:
    """Inputs of every matrix of a checkpoint; see KnownInputs.

    held_back: the rows that are held back, by weight and number of the matrix
    """

    vectors: list[InputVector] = field(default_factory=list)
    weights: dict[str, WeightInputs] = field(default_factory=dict)
    held_back: dict[tuple[str, int], Array] = field(default_factory=dict)
    parts: list[tuple[Array, Array]] = field(default_factory=list)

    @property
    def about(self) -> dict[str, Any]:
        digest = hashlib.sha256(b"".join(part.tobytes() for parts in self.parts for part in parts)).hexdigest()
        return {"sample": "text", "tokens": 0, "identity": digest}

    def prepare(self, progress: Progress) -> None:
        pass

    def check_source(self) -> None:
        pass

    def parts_of(self, name: str) -> Array:
        """The moments of what a matrix reads."""
        (vector,) = self.weights[name].vectors
        assert vector is not None
        return self.parts[vector][0]

    def mean_squares(self, name: str, matrix: int) -> Array:
        vector = self.weights[name].vectors[matrix]
        assert vector is not None
        return np.diagonal(self.parts[vector][0])

    def moments(self, vector: int) -> tuple[Array, Array]:
        return self.parts[vector]


def random_inputs(
    source: Path,
    *,
    transposed: Callable[[str], bool] = lambda name: False,
    tokens: Callable[[str, int], int] = lambda name, matrix: ROWS,
    change: Callable[[Any], None] = lambda parts: None,
) -> RandomInputs:
    """Draw inputs for every matrix of a checkpoint, each with its own.

    transposed: whether input channels run along the columns of a weight
    tokens: how many tokens a matrix is said to have had
    change: changes the moments and the rows held back
    """
    known = RandomInputs()
    for tensor in open_local(source).tensors:
        if len(tensor.shape) not in (2, 3):
            continue
        flipped = transposed(tensor.name)
        columns, first = tensor.shape[-2 if flipped else -1], len(known.vectors)
        for matrix in range(tensor.shape[0] if len(tensor.shape) == 3 else 1):
            x = inputs(columns, seed=len(known.vectors))
            rest, held_back = x[HELD_BACK:], x[:HELD_BACK]
            parts = [(rest.T @ rest / np.float32(len(rest))).astype(np.float32), held_back]
            change(parts)
            count = tokens(tensor.name, matrix)
            known.vectors.append(InputVector(size=columns, tokens=count, held_back=HELD_BACK, windows=8))
            known.held_back[tensor.name, matrix] = parts[1]
            known.parts.append((parts[0], parts[1]))
        vectors = tuple(range(first, len(known.vectors)))
        known.weights[tensor.name] = WeightInputs(vectors=vectors, transposed=flipped)
    return known
