"""What is collected of a vector of inputs while a model reads a sample, with some windows that are held back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pqweights.calibrate.scale_search import FEWEST_WINDOWS
from pqweights.errors import EvaluationError
from pqweights.planning.inputs import InputVector

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# One window in this many is held back, to check what was learned from the others.
HELD_BACK_OF = 4
# Rows of a sum of products that are computed together, from the diagonal on: those below it are the same numbers.
ROWS_TOGETHER = 256
# The least that all inputs of a vector count together: where no gradient came back, their moments are zeros.
LEAST_COUNTED = 2.0**-126


def check_windows(windows: int, window: int) -> None:
    """Raise EvaluationError if so many windows are too few to check on those that are held back. window: its tokens"""
    fewest = HELD_BACK_OF * FEWEST_WINDOWS
    if windows < fewest:
        raise EvaluationError(
            f"the sample: expected at least {fewest * window} tokens, {fewest} windows of {window}, found "
            f"{windows * window}; take more tokens, or give a longer text"
        )


class RowSample:
    """A random sample of rows; every row that was offered is kept with the same chance (reservoir sampling).

    most: how many rows are kept
    size: K
    """

    def __init__(self, most: int, size: int) -> None:
        self._room, self._random, self._seen = np.empty((most, size), dtype=np.float32), np.random.default_rng(most), 0
        self._windows = np.zeros(most, dtype=np.int64)

    def add(self, rows: Floats, window: int) -> None:
        """Offer rows [n, K] of a window."""
        most = len(self._room)
        if not most:
            return
        numbers = np.arange(self._seen, self._seen + len(rows))
        into = np.where(numbers < most, numbers, self._random.integers(0, numbers + 1))
        self._seen += len(rows)
        for row in np.flatnonzero(into < most):
            self._room[into[row]], self._windows[into[row]] = rows[row], window

    def include(self, other: RowSample) -> None:
        """Take the rows that another sample has kept; no more can be added after that."""
        self._room, self._windows = (
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.windows, other.windows]),
        )
        self._seen = len(self._room)

    @property
    def rows(self) -> Floats:
        """The rows that are kept, [rows, K]."""
        return self._room[: self._seen]

    @property
    def windows(self) -> npt.NDArray[np.int64]:
        """The number of the window that each kept row comes from, [rows]."""
        return self._windows[: self._seen]


class ProductSums:
    """The sum of x x' over rows x of K channels, in blocks on its diagonal.

    Rows are kept until they would take more memory than the sum does: an expert sees few of a sample's tokens.

    parts: the channels of each block
    """

    def __init__(self, parts: Sequence[slice]) -> None:
        self.parts = parts
        self._rows: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor) -> None:
        """Add rows [n, K] f32, which stay as they are."""
        self._rows.append(rows)
        if sum(map(len, self._rows)) >= self.parts[0].stop:
            self._add_up()

    def include(self, others: Sequence[torch.Tensor]) -> None:
        """Add the blocks of another sum."""
        for own, block in zip(self.blocks, others, strict=True):
            own += block

    @property
    def blocks(self) -> list[torch.Tensor]:
        """The blocks, which may be changed."""
        self._add_up()
        for block in self._sums:
            for stop in range(ROWS_TOGETHER, len(block), ROWS_TOGETHER):
                own = slice(stop - ROWS_TOGETHER, stop)
                block[stop:, own] = block[own, stop:].T
        return self._sums

    def _add_up(self) -> None:
        sizes = [part.stop - part.start for part in self.parts]
        self._sums = self._sums or [torch.zeros(size, size) for size in sizes]
        if self._rows:
            rows = torch.cat(self._rows)
            self._rows.clear()
            for part, block in zip(self.parts, self._sums, strict=True):
                of_block = rows[:, part]
                for start in range(0, len(block), ROWS_TOGETHER):
                    own = slice(start, start + ROWS_TOGETHER)
                    block[own, start:].addmm_(of_block[:, own].T, of_block[:, start:])


def counted(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return rows at which the sum of squares has each of them as often as it counts."""
    return rows * counts.sqrt()[:, None]


class VectorInputs:
    """The inputs of one vector, which come window by window.

    size: K
    rows, held_back: how many rows are kept, of those that are learned from and of those that are held back
    with_moments: whether the sum of x x' is kept
    """

    def __init__(self, size: int, *, rows: int = 0, held_back: int, with_moments: bool = False) -> None:
        self.rows, self.held_back = RowSample(rows, size), RowSample(held_back, size)
        self.tokens, self._windows, self._counted = 0, 0, 0.0
        self._squares: Doubles = np.zeros(size)
        self._sum = ProductSums([slice(0, size)]) if with_moments else None

    def add(self, rows: torch.Tensor, counts: torch.Tensor) -> None:
        """Add rows [n, K] f32 of a window. counts: how much each counts, [n]"""
        self._windows += 1
        rows = counted(rows, counts)
        values = rows.numpy()
        if self._windows % HELD_BACK_OF == 0:
            self.held_back.add(values, self._windows)
            return
        self.tokens += len(rows)
        self._counted += float(counts.sum(dtype=torch.float64))
        if self._sum is not None:
            self._sum.add(rows)
        self.rows.add(values, self._windows)
        with np.errstate(over="ignore", invalid="ignore"):
            self._squares += np.einsum("ij,ij->j", values, values, dtype=np.float64)

    def include(self, other: VectorInputs) -> None:
        """Add the moments and the rows held back of other inputs, which count as much."""
        assert self._sum is not None and other._sum is not None
        self._sum.include(other._sum.blocks)
        self._counted += other._counted
        self.held_back.include(other.held_back)

    @property
    def about(self) -> InputVector:
        """What is said of the vector."""
        windows = self.held_back.windows
        return InputVector(
            size=len(self._squares), tokens=self.tokens, held_back=len(windows), windows=len(np.unique(windows))
        )

    def mean_squares(self) -> Floats:
        """Return the mean square of each channel, [K]; zeros if no row counted."""
        return (self._squares / max(self._counted, LEAST_COUNTED)).astype(np.float32)

    def moments(self) -> Floats:
        """Return the mean of x x', [K, K], if its sum is kept."""
        assert self._sum is not None
        return (self._sum.blocks[0] / max(self._counted, LEAST_COUNTED)).numpy()
