"""The runs of the model in a calibration: what each collects of the inputs, within the room that there is.

Everything is collected in one pass over the text. If the moments or samples of all vectors would take too much room,
the model runs several times, each time for a part of the vectors. What a run has collected is saved in between, so that
an interrupted calibration continues.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pqweights.checkpoint.writer import disk_errors
from pqweights.errors import EvaluationError
from pqweights.inference.runtimes.packages import Refused
from pqweights.planning.statistics_file import InputVector, WeightInputs, moments_bytes
from pqweights.quality.measure.preparation import LoadedModel
from pqweights.quality.measure.scale_search import FEWEST_ROWS
from pqweights.quality.measure.unfinished import Unfinished

if TYPE_CHECKING:
    from pqweights.quality.measure.activations import MatrixId, TextWindow
    from pqweights.quality.measure.inputs import SeenInputs, VectorInputs

# The most rows of inputs that are kept of each vector, to search on and held back; fewer of both if the disk space is
# short.
MOST_ROWS = (768, 384)
# The rows that are held back of each vector for moments.
HELD_BACK_ROWS = 512
# The most disk space for the rows of one run, in bytes; those of a single weight may take more.
SAMPLE_BYTES = 8_000_000_000
# The most memory for the moments of one run of the model, in bytes; those of a single vector may take more.
MOMENTS_BYTES = 4_000_000_000
# What is collected is saved while the model runs, for a run that continues this one: at most this often, and so that
# saving takes at most this share of the time.
SECONDS_BETWEEN_SAVES = 5.0
SAVING_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which vectors there are: for each its K, and the matrix at which it is collected; and what each weight reads."""

    sizes: list[int]
    places: list[tuple[str, int | None]]
    weights: dict[str, WeightInputs]


def find_layout(model: LoadedModel, shapes: Mapping[str, tuple[int, ...]], window: TextWindow) -> Layout:
    """Find out which matrices of some weights read the same in a window. shapes: those of the weights, by name"""
    from pqweights.quality.measure.activations import matrix_ids, watch
    from pqweights.quality.measure.inputs import SeenInputs

    where = model.locate(list(shapes))
    seen = SeenInputs()
    loaded = model.get()
    with Refused(model.cannot_run):
        watch(loaded, [window], seen, progress=lambda done, total: None)
    layout = Layout(sizes=[], places=[], weights={})
    known: dict[Any, int] = {}
    for name, location in where.items():
        matrices = matrix_ids(shapes[name], location)
        stored = _stored(matrices, seen)
        if stored is None:
            continue
        size, along_rows = stored
        vectors = tuple(_numbered(matrix_id, size, seen, known=known, layout=layout) for matrix_id in matrices)
        layout.weights[name] = WeightInputs(vectors=vectors, transposed=along_rows == location.transposed)
    return layout


def _stored(matrices: Sequence[MatrixId], seen: SeenInputs) -> tuple[int, bool] | None:
    """Return K and whether the model stores matrices as [N, K]; None if it multiplies by none of their stack."""
    names = {name for name, _ in matrices}
    return next((stored[:2] for (name, _), stored in seen.found.items() if name in names), None)


def _numbered(matrix_id: MatrixId, size: int, seen: SeenInputs, *, known: dict[Any, int], layout: Layout) -> int:
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


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """A run of the model that collects the inputs of some vectors.

    work: where what is collected is kept
    number: which part of the vectors it is for
    vectors: their numbers
    """

    work: Unfinished
    collection: Collection
    number: int
    vectors: Sequence[int]

    def run(
        self, model: LoadedModel, windows: Sequence[TextWindow], *, progress: Callable[[int, int], None]
    ) -> Mapping[int, VectorInputs]:
        """Return the inputs of the vectors, by number; what an interrupted run has collected is not computed again.

        progress: called with the windows done and the windows in all
        """
        from pqweights.quality.measure.activations import watch
        from pqweights.quality.measure.inputs import CollectedInputs

        room, is_known = self._room()
        numbers = {self.collection.layout.places[number]: number for number in self.vectors}
        collected = CollectedInputs(self._empty(room), numbers)
        identity = [self.number, self.collection.rows]
        if is_known:
            collected.restore(self.work.state, identity)
        due = time.monotonic() + SECONDS_BETWEEN_SAVES

        def after_window(done: int, total: int) -> None:
            nonlocal due
            start = time.monotonic()
            if done == total or start >= due:
                room.flush()
                collected.save(self.work.state, identity)
                end = time.monotonic()
                due = end + max(SECONDS_BETWEEN_SAVES, (end - start) / SAVING_SHARE)
            progress(done, total)

        if collected.windows < len(windows):
            loaded = model.get()
            with Refused(model.cannot_run):
                watch(loaded, windows, collected, progress=after_window)
        return collected.vectors

    def _room(self) -> tuple[np.memmap[Any, np.dtype[np.float32]], bool]:
        """Return the file of sampled rows as an array, and whether it was there. Raises OutputError."""
        channels = sum(self.collection.layout.sizes[number] for number in self.vectors)
        count = max(1, sum(self.collection.rows) * channels)
        is_known = self.work.samples.exists() and self.work.samples.stat().st_size >= 4 * count
        if not is_known:
            with disk_errors(self.work.samples), open(self.work.samples, "wb") as stream:
                stream.truncate(4 * count)
                if hasattr(os, "posix_fallocate"):  # macOS has none
                    # Room that is missing when a mapped page is written would end the process.
                    with _ignored(errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # some file systems cannot
                        os.posix_fallocate(stream.fileno(), 0, 4 * count)
        return np.memmap(self.work.samples, dtype=np.float32, mode="r+", shape=(count,)), is_known

    def _empty(self, room: np.memmap[Any, np.dtype[np.float32]]) -> dict[int, VectorInputs]:
        """Return the vectors without inputs, by number. room: for their sampled rows"""
        from pqweights.quality.measure.inputs import VectorInputs

        result, at = {}, 0
        for number in self.vectors:
            size, samples = self.collection.layout.sizes[number], []
            for capacity in self.collection.rows:
                samples.append(room[at : at + capacity * size].reshape(capacity, size))
                at += capacity * size
            result[number] = VectorInputs(number, *samples, with_moments=self.collection.moments)
        return result


@contextlib.contextmanager
def _ignored(*numbers: int) -> Iterator[None]:
    """Ignore OSErrors with these numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def keep_moments(
    work: Unfinished, vectors: Mapping[int, VectorInputs], layout: Layout, *, known: int
) -> list[InputVector]:
    """Write moments behind those that the file in the work folder has, and return what is known of the vectors.

    known: the size of what the file has

    Raises EvaluationError if one is not finite.
    """
    with disk_errors(work.moments), open(work.moments, "ab") as stream:
        stream.truncate(known)
        for number, vector in vectors.items():
            for values in vector.moments():
                if not np.isfinite(values).all():
                    raise EvaluationError(
                        f"the inputs of {layout.places[number][0]} are not finite; try `dtype` float32"
                    )
                stream.write(np.ascontiguousarray(values).data)
        stream.flush()
        os.fsync(stream.fileno())
    return [vector.about for vector in vectors.values()]
