"""The sizes of the channels of vectors between layers, as a calibration measured them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pqweights.folding.links import Link, Side
from pqweights.planning.statistics_file import Statistics

Doubles = npt.NDArray[np.float64]


def mean_squares(link: Link, moments: Statistics) -> Doubles | None:
    """Return the mean square of each channel of a link, [matrices, channels]; NaN for a matrix without inputs.

    It is the mean over all readers, weighted by their tokens; None if none of them had inputs.

    Raises SourceError for damaged moments.
    """
    totals, tokens = np.zeros((link.matrices, link.channels)), np.zeros((link.matrices, 1))
    seen: set[tuple[int, int]] = set()
    for side in link.readers:
        known = moments.weights.get(side.tensor)
        for matrix, vector in enumerate(() if known is None else known.vectors):
            into = matrix if side.stacked else 0
            if (
                into >= link.matrices
                or vector is None
                or (into, vector) in seen
                or moments.vectors[vector].size != side.count
            ):
                continue
            seen.add((into, vector))
            count = moments.vectors[vector].tokens
            totals[into] += count * _by_channel(moments.mean_squares(vector).astype(np.float64), side)
            tokens[into] += count
    if not tokens.any():
        return None
    with np.errstate(invalid="ignore"):
        means: Doubles = totals / np.where(tokens, tokens, np.nan)
    return means


def _by_channel(squares: Doubles, side: Side) -> Doubles:
    """Return the means over the places of a side that hold the same channel, [channels]."""
    result: Doubles = squares.reshape(-1, side.repeats, side.width).mean(axis=1).reshape(-1)
    return result
