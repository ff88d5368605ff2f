"""The second moments of the inputs of matrices while a model reads a text, with some rows that are held back.

Matrices with the same inputs (q, k and v; gate and up) share one vector. They are found by what they read in the first
window, so no architecture needs a rule of its own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pqweights.measure.activations import Place
from pqweights.planning.moments_file import InputVector

Floats = npt.NDArray[np.float32]


class SeenInputs:
    """What each matrix reads in a window, to find which ones read the same."""

    def __init__(self) -> None:
        self.windows = 0
        # By place: K, whether the model stores the matrix as [N, K], and a digest of its inputs.
        self.found: dict[Place, tuple[int, bool, Any]] = {}
        self._rows: Counter[Place] = Counter()

    def add(self, place: Place, values: torch.Tensor, *, along_rows: bool, window: int, held_back: bool) -> None:
        """Add inputs [..., K] to the digest of the matrix at `place`."""
        rows = values.detach().reshape(-1, values.shape[-1]).float().cpu().numpy()
        if not len(rows):
            return
        self._rows[place] += len(rows)
        if place not in self.found:
            self.found[place] = rows.shape[1], along_rows, hashlib.sha256()
        self.found[place][2].update(np.ascontiguousarray(rows).tobytes())

    def key(self, place: Place) -> tuple[object, ...] | None:
        """Return what is equal for matrices that read the same; None for a matrix that read nothing.

        Experts may have read the same few tokens by chance: matrices that did not read every token must also be of the
        same expert, by its number or by the module that holds it.
        """
        found = self.found.get(place)
        if found is None:
            return None
        name, number = place
        module = name.rpartition(".")[0].rpartition(".")[0]
        every_token = self._rows[place] == max(self._rows.values())
        expert = () if every_token and number is None else (number, None if number is not None else module)
        return found[0], found[2].hexdigest(), expert


class VectorMoments:
    """The inputs of one vector: the sum of x x', and a random sample of the rows that are held back.

    size: K
    capacity: how many rows are kept at most; every row that was held back is kept with the same chance
    seed: the seed of the choice
    """

    def __init__(self, size: int, *, capacity: int, seed: int) -> None:
        self._size, self._capacity, self._random = size, capacity, np.random.default_rng(seed)
        self._sum: torch.Tensor | None = None
        self._tokens = self._offered = 0
        self._rows = np.empty((capacity, size), dtype=np.float32)
        self._windows = np.zeros(capacity, dtype=np.int64)

    def add(self, rows: torch.Tensor) -> None:
        """Add rows [n, K] to the sum."""
        if self._sum is None:
            self._sum = torch.zeros((self._size, self._size), dtype=torch.float32, device=rows.device)
        self._sum.addmm_(rows.T.to(self._sum.device), rows.to(self._sum.device))
        self._tokens += len(rows)

    def hold_back(self, rows: Floats, window: int) -> None:
        """Offer rows [n, K] of a window to the sample."""
        numbers = np.arange(self._offered, self._offered + len(rows))
        places = np.where(numbers < self._capacity, numbers, self._random.integers(0, numbers + 1))
        self._offered += len(rows)
        for row in np.flatnonzero(places < self._capacity):
            self._rows[places[row]], self._windows[places[row]] = rows[row], window

    @property
    def about(self) -> InputVector:
        """What the file says of the vector."""
        kept = min(self._offered, self._capacity)
        windows = len(np.unique(self._windows[:kept]))
        return InputVector(size=self._size, tokens=self._tokens, held_back=kept, windows=windows)

    def data(self) -> tuple[Floats, Floats]:
        """Return the moments [K, K], which are zeros if there was no token, and the rows held back."""
        kept = self._rows[: min(self._offered, self._capacity)]
        if self._sum is None:
            return np.zeros((self._size, self._size), dtype=np.float32), kept
        return (self._sum / self._tokens).cpu().numpy(), kept


class RecordedMoments:
    """The moments of some vectors, each recorded at one of the matrices that read it. windows: of how many windows."""

    def __init__(self, places: Sequence[Place], sizes: Sequence[int], *, rows: int, seeds: Sequence[int]) -> None:
        self.windows = 0
        self.vectors = [VectorMoments(size, capacity=rows, seed=seed) for size, seed in zip(sizes, seeds, strict=True)]
        self._by_place = dict(zip(places, self.vectors, strict=True))

    def add(self, place: Place, values: torch.Tensor, *, along_rows: bool, window: int, held_back: bool) -> None:
        """Record the inputs [..., K] of the matrix at `place`."""
        vector = self._by_place.get(place)
        if vector is None:
            return
        rows = values.detach().reshape(-1, values.shape[-1]).float()
        if held_back:
            vector.hold_back(rows.cpu().numpy(), window)
        else:
            vector.add(rows)
