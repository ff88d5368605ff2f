"""Calibration for error-compensated rounding: run a checkpoint over a text, and write the moments of all inputs.

inputs.py records them. What a model needs may not fit into memory at once, so it runs once for each part of the
vectors; a finished part lies in the folder of unfinished.py, from which the same command continues. docs/moments.md has
the format of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.checkpoint.writer import COPY_BYTES, disk_errors
from pqweights.errors import EvaluationError
from pqweights.measure.calibrate import HELD_BACK_OF, CalibrationOptions, calibration_windows
from pqweights.measure.preparation import TextWindows
from pqweights.measure.recording import LoadedModel, places_of_shape
from pqweights.measure.unfinished import Unfinished, inputs_of, open_unfinished
from pqweights.notices import slow_step
from pqweights.planning.calibration_json import MOMENTS
from pqweights.planning.moments_file import (
    InputVector,
    WeightInputs,
    header_of,
    open_moments,
    vector_bytes,
    write_moments,
)
from pqweights.planning.result_file import check_free
from pqweights.runtimes.packages import Refused
from pqweights.runtimes.texts import Ids

if TYPE_CHECKING:
    from pqweights.measure.activations import Place, TextWindow
    from pqweights.measure.inputs import SeenInputs

Progress = Callable[[int, int, str], None]  # called with the steps done, the steps in all, and what is being done

# The most rows that are held back of each vector.
HELD_BACK_ROWS = 512
# The most memory for the moments of one run of the model, in bytes; those of a single vector may take more.
PART_BYTES = 4_000_000_000
LAYOUT = "layout"


@dataclass(frozen=True, kw_only=True)
class MomentsReport:
    """The result of a calibration for error-compensated rounding.

    tokens, held_back_tokens: how many tokens of the text were read for the moments, and held back
    bos: whether each window of them began with BOS
    vectors: what is known of each distinct vector of inputs
    weights: which of them each weight reads, by name
    """

    tokens: int
    held_back_tokens: int
    bos: bool
    vectors: tuple[InputVector, ...]
    weights: dict[str, WeightInputs]

    def to_json(self) -> dict[str, Any]:
        """Return the document of calibrate --moments --json."""
        return {
            "tokens": self.tokens,
            "held_back_tokens": self.held_back_tokens,
            "bos": self.bos,
            "inputs": [vars(vector) for vector in self.vectors],
            "weights": {name: vars(found) for name, found in self.weights.items()},
        }


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Which vectors there are: for each its K, and the matrix at which it is recorded; and what each weight reads."""

    sizes: list[int]
    places: list[Place]
    weights: dict[str, WeightInputs]

    def offsets(self) -> list[int]:
        """Where the data of each vector begin in the file of the work folder, and where the last ends, in bytes."""
        result = [0]
        for size in self.sizes:
            result.append(result[-1] + vector_bytes(size, HELD_BACK_ROWS))
        return result

    def parts(self) -> list[list[int]]:
        """The vectors that are recorded together."""
        parts: list[list[int]] = [[]]
        taken = 0
        for number, size in enumerate(self.sizes):
            count = vector_bytes(size, HELD_BACK_ROWS)
            if parts[-1] and taken + count > PART_BYTES:
                parts.append([])
                taken = 0
            parts[-1].append(number)
            taken += count
        return parts


@dataclass(frozen=True, kw_only=True)
class _MomentsJob:
    """A calibration of which everything but the model has been read and checked."""

    source: Path
    checkpoint: Checkpoint
    text: TextWindows
    options: CalibrationOptions
    progress: Progress

    @property
    def windows(self) -> list[Ids]:
        """The windows of token ids, each [tokens]."""
        return self.text.ids

    def is_held_back(self, window: int) -> bool:
        """Whether a window is held back."""
        return window % HELD_BACK_OF == HELD_BACK_OF - 1


def calibrate_moments(
    source: Path,
    out: Path,
    text: str,
    *,
    options: CalibrationOptions = CalibrationOptions(),
    progress: Progress = lambda done, total, what: None,
) -> MomentsReport:
    """Run a checkpoint over a text, and write the second moments of the inputs of its linear layers and experts.

    source: the folder of the original checkpoint, or of a master
    out: the file for the moments
    text: what the model reads

    Raises SourceError, MasterError, OutputError, EvaluationError, MissingDependencyError.
    """
    with slow_step("reading the text with transformers"):
        job = _prepare(source, out, text, options=options, progress=progress)
    asked = inputs_of(
        job.checkpoint,
        recipe={"moments": MOMENTS.version},
        text=text,
        windows=job.windows,
        dtype=options.dtype,
        device_map=options.device_map,
    )
    with open_unfinished(out, asked, job.checkpoint, overwrite=options.overwrite) as work:
        layout, vectors = _recorded(job, work)
        report = _report(job, layout, vectors)
        about = {
            "checkpoint": job.checkpoint.fingerprint(),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": report.tokens,
            "held_back_tokens": report.held_back_tokens,
            "window": len(job.windows[0]),
            **job.text.about,
        }
        write_moments(out, header_of(vectors, about, layout.weights), _data(work.samples, layout, vectors))
    return report


def _prepare(source: Path, out: Path, text: str, *, options: CalibrationOptions, progress: Progress) -> _MomentsJob:
    """Read and check everything that needs no model in memory."""
    checkpoint = open_local(source)
    check_free(out, options.overwrite, kind="moments", read=open_moments)
    windows = calibration_windows(source, text, options)
    return _MomentsJob(source=source, checkpoint=checkpoint, text=windows, options=options, progress=progress)


def _report(job: _MomentsJob, layout: _Layout, vectors: Sequence[InputVector]) -> MomentsReport:
    held_back, window = sum(map(job.is_held_back, range(len(job.windows)))), len(job.windows[0])
    return MomentsReport(
        tokens=window * (len(job.windows) - held_back),
        held_back_tokens=window * held_back,
        bos=job.text.bos,
        vectors=tuple(vectors),
        weights=layout.weights,
    )


def _recorded(job: _MomentsJob, work: Unfinished) -> tuple[_Layout, list[InputVector]]:
    """Record what `work` does not have, and return which vectors there are and what is known of each."""
    from pqweights.measure.activations import TextWindow

    model = LoadedModel(job.source, dtype=job.options.dtype, device_map=job.options.device_map)
    windows = [TextWindow(ids, job.is_held_back(number)) for number, ids in enumerate(job.windows)]
    if LAYOUT not in work.found:
        work.keep(LAYOUT, _to_record(_found_layout(job, model, windows[0])))
    layout = _from_record(work.found[LAYOUT])
    vectors: list[InputVector] = []
    parts = layout.parts()
    for number, part in enumerate(parts):
        name = f"part {number}"
        if name not in work.found:
            steps = (number * len(windows), len(parts) * len(windows))
            work.keep(
                name, {"vectors": _record_part(job, model, windows, part=part, layout=layout, work=work, of=steps)}
            )
        vectors += [InputVector(**entry) for entry in work.found[name]["vectors"]]
    return layout, vectors


def _found_layout(job: _MomentsJob, model: LoadedModel, window: TextWindow) -> _Layout:
    """Find out which matrices read the same, by the first window."""
    from pqweights.measure.activations import watch
    from pqweights.measure.inputs import SeenInputs

    shapes = {tensor.name: tensor.shape for tensor in job.checkpoint.tensors if len(tensor.shape) in (2, 3)}
    where = model.places(list(shapes))
    seen = SeenInputs()
    loaded = model.get()
    with Refused(model.cannot_run):
        watch(loaded, [replace(window, held_back=False)], seen, progress=lambda done, total: None)
    layout = _Layout(sizes=[], places=[], weights={})
    known: dict[Any, int] = {}
    for name, found in where.items():
        matrices = places_of_shape(shapes[name], found)
        stored = _stored(matrices, seen)
        if stored is None:
            continue
        size, along_rows = stored
        vectors = tuple(_numbered(place, size, seen, known=known, layout=layout) for place in matrices)
        layout.weights[name] = WeightInputs(vectors=vectors, transposed=along_rows == found.transposed)
    return layout


def _stored(matrices: Sequence[Place], seen: SeenInputs) -> tuple[int, bool] | None:
    """Return K and whether the model stores matrices as [N, K]; None if it multiplies by none of their stack."""
    names = {name for name, _ in matrices}
    return next((found[:2] for (name, _), found in seen.found.items() if name in names), None)


def _numbered(place: Place, size: int, seen: SeenInputs, *, known: dict[Any, int], layout: _Layout) -> int:
    """Return the number of the vector that a matrix reads, a new one unless another matrix reads the same."""
    # An expert that the first window did not reach has a vector of its own.
    for key in (place, seen.key(place)):
        if key is not None and key in known:
            return known[key]
    number = len(layout.sizes)
    layout.sizes.append(size)
    layout.places.append(place)
    known[place] = number
    if (key := seen.key(place)) is not None:
        known[key] = number
    return number


def _record_part(
    job: _MomentsJob,
    model: LoadedModel,
    windows: Sequence[TextWindow],
    *,
    part: Sequence[int],
    layout: _Layout,
    work: Unfinished,
    of: tuple[int, int],
) -> list[dict[str, Any]]:
    """Run the model for some vectors, write their data to the work folder, and return what is known of them.

    of: the steps done before, and in all, for the progress
    """
    from pqweights.measure.activations import watch
    from pqweights.measure.inputs import RecordedMoments

    recorded = RecordedMoments(
        [layout.places[number] for number in part],
        [layout.sizes[number] for number in part],
        rows=HELD_BACK_ROWS,
        seeds=part,
    )
    loaded = model.get()
    with Refused(model.cannot_run):
        watch(
            loaded,
            windows,
            recorded,
            progress=lambda done, total: job.progress(of[0] + done, of[1], "running the model"),
        )
    offsets = layout.offsets()
    with disk_errors(work.samples), _opened(work.samples) as descriptor:
        for number, vector in zip(part, recorded.vectors, strict=True):
            at = offsets[number]
            for values in vector.data():
                if not np.isfinite(values).all():
                    raise EvaluationError(
                        f"the inputs of {layout.places[number][0]} are not finite; try --dtype float32"
                    )
                view = np.ascontiguousarray(values).reshape(-1).data.cast("B")
                while view:
                    count = os.pwrite(descriptor, view, at)
                    view, at = view[count:], at + count
        os.fsync(descriptor)
    return [vars(vector.about) for vector in recorded.vectors]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading and writing, which is created if it does not exist; yield its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _data(path: Path, layout: _Layout, vectors: Sequence[InputVector]) -> Iterator[bytes]:
    """Yield the data of the vectors from the file in the work folder, without the room that they did not need."""
    with open(path, "rb") as stream:
        for offset, vector in zip(layout.offsets(), vectors, strict=False):
            stream.seek(offset)
            left = vector_bytes(vector.size, vector.held_back)
            while left:
                data = stream.read(min(left, COPY_BYTES))
                assert data, "the file of the moments was cut"
                left -= len(data)
                yield data


def _to_record(layout: _Layout) -> dict[str, Any]:
    weights = {name: vars(found) for name, found in layout.weights.items()}
    return {"sizes": layout.sizes, "places": layout.places, "weights": weights}


def _from_record(record: dict[str, Any]) -> _Layout:
    return _Layout(
        sizes=record["sizes"],
        places=[(name, number) for name, number in record["places"]],
        weights={
            name: WeightInputs(vectors=tuple(found["vectors"]), transposed=found["transposed"])
            for name, found in record["weights"].items()
        },
    )
