"""Files of second moments for tests, of inputs that are drawn at random, without running a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from helpers import Array, gaussian

from pqweights.checkpoint.source import open_local
from pqweights.planning.statistics_file import InputVector, MomentsToWrite, WeightInputs, write_statistics

ROWS, HELD_BACK = 1500, 256


def inputs(columns: int, seed: int, rows: int = ROWS) -> Array:
    """Correlated inputs with channels of different size."""
    mixed = gaussian(rows, columns, seed=seed, scale=1) @ (
        np.eye(columns) + gaussian(columns, columns, seed=seed + 1000, scale=0.06)
    )
    return (mixed * np.exp(gaussian(columns, seed=seed + 2000, scale=0.6))).astype(np.float32)


def write_random_moments(
    source: Path,
    out: Path,
    *,
    transposed: Callable[[str], bool] = lambda name: False,
    tokens: Callable[[str, int], int] = lambda name, matrix: ROWS,
    change: Callable[[Any], None] = lambda parts: None,
) -> dict[tuple[str, int], Array]:
    """Write moments for every matrix of a checkpoint, each with inputs of its own.

    transposed: whether input channels run along the columns of a weight
    tokens: how many tokens the file says that a matrix had
    change: changes the moments and the rows held back before they are written

    Returns the rows that are held back, by weight and number of the matrix.
    """
    checkpoint = open_local(source)
    vectors, weights, data, held_back = [], {}, [], {}
    for tensor in checkpoint.tensors:
        if len(tensor.shape) not in (2, 3):
            continue
        flipped = transposed(tensor.name)
        columns, first = tensor.shape[-2 if flipped else -1], len(vectors)
        for matrix in range(tensor.shape[0] if len(tensor.shape) == 3 else 1):
            x = inputs(columns, seed=len(vectors))
            parts = [
                (x[HELD_BACK:].T @ x[HELD_BACK:] / np.float32(len(x) - HELD_BACK)).astype(np.float32),
                x[:HELD_BACK],
            ]
            change(parts)
            vectors.append(
                InputVector(size=columns, tokens=tokens(tensor.name, matrix), held_back=HELD_BACK, windows=8)
            )
            held_back[tensor.name, matrix] = parts[1]
            data += [np.ascontiguousarray(part).tobytes() for part in parts]
        weights[tensor.name] = WeightInputs(vectors=tuple(range(first, len(vectors))), transposed=flipped)
    about = {"text_sha256": "", "tokens": ROWS, "held_back_tokens": HELD_BACK}
    moments = MomentsToWrite(vectors=vectors, weights=weights, data=data)
    write_statistics(out, checkpoint=checkpoint.fingerprint(), about=about, moments=moments)
    return held_back
