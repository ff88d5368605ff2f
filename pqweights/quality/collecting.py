"""What a calibration collects of the inputs of matrices while a model reads a text, with some rows that are held back.

Matrices with the same inputs (q, k and v; gate and up) share one vector. They are found by what they read in the first
window, so no architecture needs a rule of its own. One pass over the text collects everything that was asked for: the
sum of x x', the sums of squares, and random samples of rows. If the moments or samples of all vectors would take too
much room, the model runs several times, each time for a part of the vectors.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pqweights.checkpoint.writer import disk_errors
from pqweights.planning.statistics_file import InputVector, WeightInputs, moments_bytes
from pqweights.quality.activations import MatrixId, TextWindow, WeightLocation, matrix_ids, watch
from pqweights.quality.preparation import temporary_file
from pqweights.quality.scale_search import FEWEST_ROWS, Inputs

Floats = npt.NDArray[np.float32]

# The most rows of inputs that are kept of each vector, to search on and held back; fewer of both if the disk space is
# short.
MOST_ROWS = (768, 384)
# The rows that are held back of each vector for moments.
HELD_BACK_ROWS = 512
# The most disk space for the rows of one run, in bytes; those of a single weight may take more.
SAMPLE_BYTES = 8_000_000_000
# The most memory for the moments of one run of the model, in bytes; those of a single vector may take more.
MOMENTS_BYTES = 4_000_000_000


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which vectors there are: for each its K, and the matrix at which it is collected; and what each weight reads."""

    sizes: list[int]
    places: list[MatrixId]
    weights: dict[str, WeightInputs]


class _SeenInputs:
    """What each matrix reads in a window, to find which ones read the same."""

    def __init__(self) -> None:
        # By matrix: K, whether the model stores the matrix as [N, K], and a digest of its inputs.
        self.matrices: dict[MatrixId, tuple[int, bool, Any]] = {}
        self._rows: Counter[MatrixId] = Counter()

    def add(self, matrix_id: MatrixId, values: torch.Tensor, *, along_rows: bool, window: int, held_back: bool) -> None:
        """Add inputs [..., K] to the digest of a matrix."""
        rows = values.detach().reshape(-1, values.shape[-1]).float().cpu().numpy()
        if not len(rows):
            return
        self._rows[matrix_id] += len(rows)
        if matrix_id not in self.matrices:
            self.matrices[matrix_id] = rows.shape[1], along_rows, hashlib.sha256()
        self.matrices[matrix_id][2].update(np.ascontiguousarray(rows).tobytes())

    def key(self, matrix_id: MatrixId) -> tuple[object, ...] | None:
        """Return what is equal for matrices that read the same; None for a matrix that read nothing.

        Experts may have read the same few tokens by chance: matrices that did not read every token must also be of the
        same expert, by its number or by the module that holds it.
        """
        seen = self.matrices.get(matrix_id)
        if seen is None:
            return None
        name, number = matrix_id
        module = name.rpartition(".")[0].rpartition(".")[0]
        every_token = self._rows[matrix_id] == max(self._rows.values())
        expert = () if every_token and number is None else (number, None if number is not None else module)
        return seen[0], seen[2].hexdigest(), expert


def find_layout(
    model: Any,
    where: Mapping[str, WeightLocation],
    shapes: Mapping[str, tuple[int, ...]],
    window: TextWindow,
    *,
    source: Path,
) -> Layout:
    """Find out which matrices of some weights read the same in a window.

    where: the places of the weights in the model, by name
    shapes: their shapes
    source: the folder of the model, for messages
    """
    seen = _SeenInputs()
    watch(model, [window], seen, source=source)
    layout = Layout(sizes=[], places=[], weights={})
    known: dict[Any, int] = {}
    for name, location in where.items():
        matrices = matrix_ids(shapes[name], location)
        # The model stores all matrices of a stack alike; it may multiply by none of them.
        stacks = {stack for stack, _ in matrices}
        stored = next((stored for (stack, _), stored in seen.matrices.items() if stack in stacks), None)
        if stored is None:
            continue
        size, along_rows, _ = stored
        vectors = tuple(_numbered(matrix_id, size, seen, known=known, layout=layout) for matrix_id in matrices)
        layout.weights[name] = WeightInputs(vectors=vectors, transposed=along_rows == location.transposed)
    return layout


def _numbered(matrix_id: MatrixId, size: int, seen: _SeenInputs, *, known: dict[Any, int], layout: Layout) -> int:
    """Return the number of the vector that a matrix reads, a new one unless another matrix reads the same."""
    # An expert that the first window did not reach has a vector of its own.
    for key in (matrix_id, seen.key(matrix_id)):
        if key is not None and key in known:
            return known[key]
    number = len(layout.sizes)
    layout.sizes.append(size)
    layout.places.append(matrix_id)
    known[matrix_id] = number
    if (key := seen.key(matrix_id)) is not None:
        known[key] = number
    return number


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What is collected of the vectors of a layout.

    rows: how many rows are kept of each vector, to search on and held back
    moments: whether their moments are
    """

    layout: Layout
    rows: tuple[int, int]
    moments: bool

    @staticmethod
    def of(layout: Layout, *, scales: bool, moments: bool) -> Collection:
        """Return what scales, moments or both need: fewer rows if there are many channels."""
        most = (MOST_ROWS[0] if scales else 0, HELD_BACK_ROWS if moments else MOST_ROWS[1])
        share = min(1.0, SAMPLE_BYTES / (4 * max(sum(layout.sizes), 1) * sum(most))) if scales else 1.0
        searched, held_back = (
            min(count, max(fewest, int(count * share))) for count, fewest in zip(most, FEWEST_ROWS, strict=True)
        )
        return Collection(layout=layout, rows=(searched, held_back), moments=moments)

    def parts(self, units: Iterable[Sequence[int]]) -> list[list[int]]:
        """Return which units are collected together. units: vectors, by number, that must be in one part"""
        parts: list[list[int]] = [[]]
        together: set[int] = set()
        for number, unit in enumerate(units):
            together |= set(unit)
            sizes = [self.layout.sizes[vector] for vector in together]
            too_large = 4 * sum(self.rows) * sum(sizes) > SAMPLE_BYTES or (
                self.moments and sum(moments_bytes(size, self.rows[1]) for size in sizes) > MOMENTS_BYTES
            )
            if parts[-1] and too_large:
                parts.append([])
                together = set(unit)
            parts[-1].append(number)
        return parts

    def run(
        self,
        model: Any,
        windows: Sequence[TextWindow],
        vectors: Sequence[int],
        *,
        source: Path,
        beside: Path,
        progress: Callable[[int, int], None],
    ) -> dict[int, VectorInputs]:
        """Run the model over the windows, and return the inputs of some vectors, by number.

        source: the folder of the model, for messages
        beside: a file in the folder whose disk has room for the sampled rows
        progress: called with the windows done and the windows in all
        """
        room = _room(beside, sum(self.rows) * sum(self.layout.sizes[number] for number in vectors))
        result, at = {}, 0
        for number in vectors:
            size, samples = self.layout.sizes[number], []
            for capacity in self.rows:
                samples.append(room[at : at + capacity * size].reshape(capacity, size))
                at += capacity * size
            result[number] = VectorInputs(number, *samples, with_moments=self.moments)
        recorder = Collector({self.layout.places[number]: vector for number, vector in result.items()})
        watch(model, windows, recorder, source=source, progress=progress)
        return result


def _room(beside: Path, count: int) -> np.memmap[Any, np.dtype[np.float32]]:
    """Return room for numbers in a temporary file, [count] f32. Raises OutputError."""
    with disk_errors(beside), temporary_file(beside) as stream:
        stream.truncate(4 * max(1, count))
        if hasattr(os, "posix_fallocate"):  # macOS has none
            # Room that is missing when a mapped page is written would end the process.
            try:
                os.posix_fallocate(stream.fileno(), 0, 4 * max(1, count))
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # some file systems cannot
                    raise
        return np.memmap(stream, dtype=np.float32, mode="r+", shape=(max(1, count),))


class Sample:
    """A random sample of rows; every row that was offered is kept with the same chance (reservoir sampling).

    room: where the rows are kept, [capacity, K] f32
    seed: the seed of the choice
    """

    def __init__(self, room: Floats, seed: int | tuple[int, ...]) -> None:
        self._room, self._random, self.seen = room, np.random.default_rng(seed), 0
        self._windows = np.zeros(len(room), dtype=np.int64)

    def add(self, rows: Floats, window: int) -> None:
        """Offer rows [n, K] of a window."""
        capacity = len(self._room)
        numbers = np.arange(self.seen, self.seen + len(rows))
        into = np.where(numbers < capacity, numbers, self._random.integers(0, numbers + 1))
        self.seen += len(rows)
        for row in np.flatnonzero(into < capacity):
            self._room[into[row]], self._windows[into[row]] = rows[row], window

    @property
    def rows(self) -> Floats:
        """The rows that are kept, [rows, K]."""
        return self._room[: self.seen]

    @property
    def windows(self) -> npt.NDArray[np.int64]:
        """The number of the window that each kept row comes from, [rows]."""
        return self._windows[: self.seen]


class VectorInputs:
    """The inputs of one vector.

    number: that of the vector, from which the samples are seeded
    rows, held_back: the room for samples of rows and of rows held back, [capacity, K] f32; no sums of squares are kept
        if there is no room for rows
    with_moments: whether the sum of x x' is kept
    """

    def __init__(self, number: int, rows: Floats, held_back: Floats, *, with_moments: bool) -> None:
        size = rows.shape[1]
        self._rows, self._held_back, self._tokens = Sample(rows, (number, 1)), Sample(held_back, number), 0
        self._squares = np.zeros(size if len(rows) else 0, dtype=np.float64)
        self._sum = torch.zeros((size, size) if with_moments else (0, 0), dtype=torch.float32)
        self._size = size

    def add(self, rows: torch.Tensor, *, window: int, held_back: bool) -> None:
        """Add rows [n, K] f32 of a window."""
        if held_back:
            self._held_back.add(rows.cpu().numpy(), window)
            return
        self._tokens += len(rows)
        if len(self._sum):
            self._sum = self._sum.to(rows.device).addmm_(rows.T, rows)
        if len(self._squares):
            values = rows.cpu().numpy()
            self._rows.add(values, window)
            with np.errstate(over="ignore", invalid="ignore"):
                self._squares += np.einsum("ij,ij->j", values, values, dtype=np.float64)

    def inputs(self) -> Inputs | None:
        """Return what scales are searched on; None if there were no inputs."""
        if not self._tokens and not self._held_back.seen:
            return None
        return Inputs(
            tokens=self._tokens,
            rms=np.sqrt(self._squares / max(self._tokens, 1)).astype(np.float32),
            rows=np.array(self._rows.rows),
            held_back=np.array(self._held_back.rows),
            windows=self._held_back.windows,
        )

    @property
    def about(self) -> InputVector:
        """What the file says of the vector."""
        windows = self._held_back.windows
        return InputVector(
            size=self._size, tokens=self._tokens, held_back=len(windows), windows=len(np.unique(windows))
        )

    def moments(self) -> tuple[Floats, Floats]:
        """Return the moments [K, K], which are zeros if there was no token, and the rows held back."""
        return (self._sum / max(self._tokens, 1)).cpu().numpy(), self._held_back.rows


class Collector:
    """A recorder for vectors, each of which is collected at one of the matrices that read it."""

    def __init__(self, vectors: Mapping[MatrixId, VectorInputs]) -> None:
        self._vectors = vectors

    def add(self, matrix_id: MatrixId, values: torch.Tensor, *, along_rows: bool, window: int, held_back: bool) -> None:
        """Collect the inputs [..., K] of a matrix."""
        vector = self._vectors.get(matrix_id)
        if vector is not None:
            vector.add(values.detach().reshape(-1, values.shape[-1]).float(), window=window, held_back=held_back)
