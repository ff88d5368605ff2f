"""Calibration: run a checkpoint over a text, and write statistics of the inputs of its matrices.

They are second moments for `export --calibration`, or scales that are searched for the weights that a recipe quantizes,
or both. collecting.py collects, scale_search.py searches. docs/moments.md and docs/awq.md have the methods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.checkpoint.writer import COPY_BYTES, check_free, disk_errors
from pqweights.common.documents import as_json
from pqweights.common.threads import slow_step
from pqweights.errors import EvaluationError, RecipeError
from pqweights.inference.runtimes.folders import read_folder
from pqweights.inference.runtimes.packages import package
from pqweights.planning.options import path_of
from pqweights.planning.plan import TensorPlan
from pqweights.planning.recipe import Recipe
from pqweights.planning.statistics_file import (
    InputVector,
    MomentsToWrite,
    ScalesToWrite,
    WeightInputs,
    open_statistics,
    write_statistics,
)
from pqweights.quality.options import CalibrationOptions
from pqweights.quality.preparation import (
    TextWindows,
    load_model,
    locate_weights,
    plan_original,
    temporary_file,
    text_windows,
    window_size,
)
from pqweights.quality.scale_search import FEWEST_WINDOWS, Inputs, LayerReport, search_layer
from pqweights.rewrite.task import usable_cores

if TYPE_CHECKING:
    from pqweights.quality.collecting import VectorInputs

Floats = npt.NDArray[np.float32]
Searched = dict[str, tuple[LayerReport, Floats | None]]  # the result of each weight and its scales [..., K], by name
Progress = Callable[[int, int, str], None]  # called with the steps done, the steps in all, and what is being done

# Tokens that the model reads together, unless it takes fewer.
WINDOW = 512
# One window in this many is held back from the search, to check its result.
HELD_BACK_OF = 4


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The result of a calibration.

    tokens, held_back_tokens: how many tokens of the text were collected from, and held back.
    bos: whether each window of them began with BOS.
    vectors: what is known of each distinct vector of inputs; None without moments.
    weights: which of them each weight reads, by name; empty without moments.
    layers: one report for each weight whose scales were searched; None without scales.
    bits_per_weight: what all scales add, over the quantized weights.
    """

    tokens: int
    held_back_tokens: int
    bos: bool
    vectors: tuple[InputVector, ...] | None
    weights: dict[str, WeightInputs]
    layers: tuple[LayerReport, ...] | None
    bits_per_weight: float

    def to_json(self) -> dict[str, Any]:
        """Return the document of calibrate --json."""
        result: dict[str, Any] = {"tokens": self.tokens, "held_back_tokens": self.held_back_tokens, "bos": self.bos}
        weights: dict[str, dict[str, Any]] = {name: as_json(reads) for name, reads in self.weights.items()}
        if self.layers is not None:
            result["bits_per_weight"] = self.bits_per_weight
            for layer in self.layers:
                weights[layer.name] = weights.get(layer.name, {}) | layer.to_json()
        if self.vectors is not None:
            result["inputs"] = [as_json(vector) for vector in self.vectors]
        return result | {"weights": weights}


@dataclass(frozen=True, kw_only=True)
class _CalibrationJob:
    """A calibration of which everything but the model has been read and checked.

    planned: the weights that the recipe quantizes, for which scales are searched; None without scales.
    moments: whether moments are written.
    text: the windows of the text.
    """

    source: Path
    out: Path
    checkpoint: Checkpoint
    planned: list[TensorPlan] | None
    moments: bool
    text: TextWindows
    options: CalibrationOptions
    progress: Progress

    def is_held_back(self, window: int) -> bool:
        """Whether a window is held back."""
        return window % HELD_BACK_OF == HELD_BACK_OF - 1

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the matrices and stacks whose inputs are collected."""
        tensors: Sequence[LogicalTensor | TensorPlan] = self.checkpoint.tensors
        if not self.moments and self.planned is not None:
            tensors = self.planned
        return {tensor.name: tensor.shape for tensor in tensors if len(tensor.shape) in (2, 3)}


def fewest_tokens(window: int) -> int:
    """Return how many tokens a text needs at least, in windows of `window` tokens."""
    return FEWEST_WINDOWS * HELD_BACK_OF * window


def calibrate(
    source: Path,
    out: Path,
    text: str,
    *,
    recipe: Recipe | None = None,
    moments: bool = False,
    options: CalibrationOptions = CalibrationOptions(),
    progress: Progress = lambda done, total, what: None,
) -> Calibration:
    """Run a checkpoint over a text, and write statistics of the inputs of its matrices.

    source: the folder of the original checkpoint, or, for moments alone, of a master.
    out: the file for the statistics.
    text: what the model reads.
    recipe: search scales for the weights that this recipe quantizes, and write those that help.
    moments: write the second moments of the inputs of all linear layers and experts.

    Raises SourceError, MasterError, RecipeError, OutputError, EvaluationError, MissingDependencyError.
    """
    with slow_step("reading the text with transformers"):
        job = _prepare(source, out, text, recipe=recipe, moments=moments, options=options, progress=progress)
    with temporary_file(out) as stream:
        vectors, weights, searched = _collect(job, stream)
        job.checkpoint.check_unchanged()
        layers = None if job.planned is None else [searched[tensor.name] for tensor in job.planned]
        result = _result(job, vectors if moments else None, weights if moments else {}, layers)
        about = {
            **({} if recipe is None else {"recipe": recipe.to_json()}),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": result.tokens,
            "held_back_tokens": result.held_back_tokens,
            "window": len(job.text.ids[0]),
            **job.text.about,
        }
        stream.seek(0)
        pieces = iter(partial(stream.read, COPY_BYTES), b"")
        write_statistics(
            out,
            checkpoint=job.checkpoint.fingerprint(),
            about=about,
            moments=MomentsToWrite(vectors=vectors, weights=weights, data=pieces) if moments else None,
            scales=None if layers is None else _scales(layers),
        )
    return result


def _scales(layers: Sequence[tuple[LayerReport, Floats | None]]) -> ScalesToWrite:
    return ScalesToWrite(
        weights={layer.name: layer.to_json() for layer, _ in layers},
        scales={layer.name: values for layer, values in layers if values is not None},
    )


def _result(
    job: _CalibrationJob,
    vectors: Sequence[InputVector] | None,
    weights: dict[str, WeightInputs],
    layers: Sequence[tuple[LayerReport, Floats | None]] | None,
) -> Calibration:
    held_back, window = sum(map(job.is_held_back, range(len(job.text.ids)))), len(job.text.ids[0])
    scales = 16 * sum(values.size for _, values in layers or () if values is not None)
    return Calibration(
        tokens=window * (len(job.text.ids) - held_back),
        held_back_tokens=window * held_back,
        bos=job.text.bos,
        vectors=None if vectors is None else tuple(vectors),
        weights=weights,
        layers=None if layers is None else tuple(layer for layer, _ in layers),
        bits_per_weight=scales / max(1, sum(tensor.weights for tensor in job.planned or ())),
    )


def calibration_windows(source: Path, text: str, options: CalibrationOptions) -> TextWindows:
    """Return a text as windows of token ids for the model in a folder.

    Raises EvaluationError for a text that is too short, MissingDependencyError without transformers.
    """
    package("transformers", "transformers", "calibrating")
    folder = read_folder(source)
    size = window_size(folder, options.window, WINDOW)
    return text_windows(
        folder,
        text,
        size=size,
        fewest=fewest_tokens(size) // size,
        tokenizer=path_of(options.tokenizer),
        max_tokens=options.max_tokens,
        bos=not options.no_bos,
    )


def _prepare(
    source: Path,
    out: Path,
    text: str,
    *,
    recipe: Recipe | None,
    moments: bool,
    options: CalibrationOptions,
    progress: Progress,
) -> _CalibrationJob:
    """Read and check everything that needs no model in memory."""
    if recipe is not None and recipe.target is not None:
        raise RecipeError(
            f"recipe {recipe.name!r}: expected given widths, because scales are searched for them; found a target, "
            "which chooses the widths"
        )
    checkpoint, planned = (open_local(source), None) if recipe is None else plan_original(source, recipe)
    check_free(out, options.overwrite, kind="statistics", read=open_statistics)
    return _CalibrationJob(
        source=source,
        out=out,
        checkpoint=checkpoint,
        planned=planned,
        moments=moments,
        text=calibration_windows(source, text, options),
        options=options,
        progress=progress,
    )


def _collect(job: _CalibrationJob, stream: IO[bytes]) -> tuple[list[InputVector], dict[str, WeightInputs], Searched]:
    """Run the model and search; return what is known of the vectors, what weights read, and what was found for them.

    stream: where moments are written
    """
    from pqweights.quality.activations import TextWindow
    from pqweights.quality.collecting import Collection, find_layout

    model = load_model(job.source, dtype=job.options.dtype, device_map=job.options.device_map)
    windows = [TextWindow(ids, job.is_held_back(number)) for number, ids in enumerate(job.text.ids)]
    where = locate_weights(job.source, model, list(job.shapes))
    layout = find_layout(model, where, job.shapes, windows[0], source=job.source)
    collection = Collection.of(layout, scales=job.planned is not None, moments=job.moments)
    names = list(layout.weights)
    # The matrices of a weight are searched together, but moments may be collected one vector at a time.
    units = [[number] for number in range(len(layout.sizes))]
    if job.planned is not None:
        units = [[vector for vector in layout.weights[name].vectors if vector is not None] for name in names]
    parts = collection.parts(units)
    vectors: list[InputVector] = []
    searched: Searched = {}
    for number, part in enumerate(parts):
        collected = collection.run(
            model,
            windows,
            sorted({vector for unit in part for vector in units[unit]}),
            source=job.source,
            beside=job.out,
            progress=lambda done, total, before=number: job.progress(  # type: ignore[misc]
                before * total + done, len(parts) * total, "running the model"
            ),
        )
        job.checkpoint.check_unchanged()
        if number == len(parts) - 1:
            model = None  # its memory is free for the search
        if job.moments:
            new = {vector: collected[vector] for vector in collected if vector >= len(vectors)}
            _write_moments(new, stream, out=job.out, names=[name for name, _ in layout.places])
            vectors += [vector.about for vector in new.values()]
        if job.planned is not None:
            here = {names[unit] for unit in part}
            planned = [tensor for tensor in job.planned if tensor.name in here]
            searched |= _search_all(job, planned, reads=layout.weights, collected=collected)
    left = [tensor for tensor in job.planned or () if tensor.name not in layout.weights]
    return vectors, layout.weights, searched | _search_all(job, left, reads={}, collected={})


def _write_moments(vectors: Mapping[int, VectorInputs], stream: IO[bytes], *, out: Path, names: Sequence[str]) -> None:
    """Write the moments of vectors to a temporary file.

    out: the file of the result, for messages
    names: the parameter at which each vector was collected, by number

    Raises EvaluationError if one is not finite, OutputError.
    """
    for number, vector in vectors.items():
        for values in vector.moments():
            if not np.isfinite(values).all():
                raise EvaluationError(f"the inputs of {names[number]} are not finite; try `dtype` float32")
            with disk_errors(out):
                stream.write(np.ascontiguousarray(values).data)


def _search_all(
    job: _CalibrationJob,
    planned: Sequence[TensorPlan],
    *,
    reads: Mapping[str, WeightInputs],
    collected: Mapping[int, VectorInputs],
) -> Searched:
    """Search weights in threads; the first error stops the search."""
    tensors = {tensor.name: tensor for tensor in job.checkpoint.tensors}
    searched: Searched = {}

    def inputs_of(vector: int) -> Inputs | None:
        return collected[vector].inputs()

    pool = ThreadPoolExecutor(job.options.threads or usable_cores())
    try:
        results = [
            pool.submit(search_layer, plan, tensors[plan.name], reads=reads.get(plan.name), inputs_of=inputs_of)
            for plan in planned
        ]
        for number, (plan, result) in enumerate(zip(planned, results, strict=True)):
            searched[plan.name] = result.result()
            job.progress(number + 1, len(results), plan.name)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return searched
