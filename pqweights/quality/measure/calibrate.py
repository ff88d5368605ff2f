"""Calibration: run a checkpoint over a text, and write statistics of the inputs of its matrices.

They are second moments for `export --calibration`, or scales that are searched for the weights that a recipe quantizes,
or both. collecting.py runs the model, inputs.py collects, scale_search.py searches. What is found is kept in the folder
of unfinished.py, from which the same command continues. docs/moments.md and docs/awq.md have the methods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import convert

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.checkpoint.writer import COPY_BYTES, check_free
from pqweights.common.documents import as_json
from pqweights.common.notices import slow_step
from pqweights.errors import RecipeError
from pqweights.inference.runtimes.folders import read_folder
from pqweights.inference.runtimes.packages import package
from pqweights.options import path_of
from pqweights.planning.plan import TensorPlan
from pqweights.planning.recipe import Recipe
from pqweights.planning.statistics_file import (
    VERSION,
    InputVector,
    MomentsToWrite,
    ScalesToWrite,
    WeightInputs,
    moments_bytes,
    open_statistics,
    write_statistics,
)
from pqweights.quality.measure.collecting import Collection, Layout, ModelRun, find_layout, keep_moments
from pqweights.quality.measure.layer_search import LayerReport, layer_from_record, layer_to_record, search_layer
from pqweights.quality.measure.preparation import LoadedModel, TextWindows, plan_original, text_windows, window_size
from pqweights.quality.measure.scale_search import FEWEST_WINDOWS
from pqweights.quality.measure.unfinished import Unfinished, inputs_of, open_unfinished
from pqweights.quality.options import CalibrationOptions
from pqweights.rewrite.task import usable_cores

if TYPE_CHECKING:
    from pqweights.quality.measure.inputs import VectorInputs

Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int, str], None]  # called with the steps done, the steps in all, and what is being done

# Tokens that the model reads together, unless it takes fewer.
WINDOW = 512
# One window in this many is held back from the search, to check its result.
HELD_BACK_OF = 4
# The record of the layout in the journal.
LAYOUT = "layout"


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
        result: dict[str, Any] = {
            "tokens": self.tokens,
            "held_back_tokens": self.held_back_tokens,
            "bos": self.bos,
        }
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
    asked = inputs_of(
        job.checkpoint,
        recipe={"recipe": None if recipe is None else recipe.to_json(), "moments": moments, "version": VERSION},
        text=text,
        windows=job.text.ids,
        dtype=options.dtype,
        device_map=options.device_map,
    )
    with open_unfinished(out, asked, job.checkpoint, overwrite=options.overwrite) as work:
        vectors, weights = _collect(job, work)
        layers = None if job.planned is None else [layer_from_record(t.name, work.found[t.name]) for t in job.planned]
        result = _result(job, vectors if moments else None, weights if moments else {}, layers)
        about = {
            **({} if recipe is None else {"recipe": recipe.to_json()}),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": result.tokens,
            "held_back_tokens": result.held_back_tokens,
            "window": len(job.text.ids[0]),
            **job.text.about,
        }
        write_statistics(
            out,
            checkpoint=job.checkpoint.fingerprint(),
            about=about,
            moments=MomentsToWrite(vectors=vectors, weights=weights, data=_data(work.moments, vectors))
            if moments
            else None,
            scales=None if layers is None else _scales(layers),
        )
    return result


def _scales(layers: Sequence[tuple[LayerReport, Floats | None]]) -> ScalesToWrite:
    return ScalesToWrite(
        weights={layer.name: layer.to_json() for layer, _ in layers},
        scales={layer.name: values for layer, values in layers if values is not None},
    )


def _data(path: Path, vectors: Sequence[InputVector]) -> Iterator[bytes]:
    """Yield the moments in the work folder."""
    left = sum(moments_bytes(vector.size, vector.held_back) for vector in vectors)
    with open(path, "rb") as stream:
        while left:
            data = stream.read(min(left, COPY_BYTES))
            assert data, "the file of the moments was cut"
            left -= len(data)
            yield data


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
        checkpoint=checkpoint,
        planned=planned,
        moments=moments,
        text=calibration_windows(source, text, options),
        options=options,
        progress=progress,
    )


def _collect(job: _CalibrationJob, work: Unfinished) -> tuple[list[InputVector], dict[str, WeightInputs]]:
    """Find what `work` does not have, and keep it there; return which vectors there are, and what weights read."""
    from pqweights.quality.measure.activations import TextWindow

    model = LoadedModel(job.source, dtype=job.options.dtype, device_map=job.options.device_map)
    windows = [TextWindow(ids, job.is_held_back(number)) for number, ids in enumerate(job.text.ids)]
    if LAYOUT not in work.found:
        work.keep(LAYOUT, as_json(find_layout(model, job.shapes, windows[0])))
    layout = convert(work.found[LAYOUT], Layout)
    collection = Collection.of(layout, scales=job.planned is not None, moments=job.moments)
    names = list(layout.weights)
    # The matrices of a weight are searched together, but moments may be collected one vector at a time.
    units = [[number] for number in range(len(layout.sizes))]
    if job.planned is not None:
        units = [[vector for vector in layout.weights[name].vectors if vector is not None] for name in names]
    parts = collection.parts(units)
    vectors: list[InputVector] = []
    for number, part in enumerate(parts):
        numbers = sorted({vector for unit in part for vector in units[unit]})
        weights = {names[unit] for unit in part} if job.planned is not None else set()
        missing = [tensor for tensor in job.planned or () if tensor.name in weights and tensor.name not in work.found]
        record = f"part {number}"
        if missing or record not in work.found:
            collected = ModelRun(work=work, collection=collection, number=number, vectors=numbers).run(
                model,
                windows,
                progress=lambda done, total, before=number: job.progress(  # type: ignore[misc]
                    before * total + done, len(parts) * total, "running the model"
                ),
            )
            if number == len(parts) - 1:
                model.free()
            if record not in work.found:
                work.keep(record, {"vectors": _written(job, work, collected, layout=layout, before=vectors)})
            _search_all(job, missing, work=work, reads=layout.weights, collected=collected)
        vectors += [InputVector(**entry) for entry in work.found[record]["vectors"]]
    left = [tensor for tensor in job.planned or () if tensor.name not in work.found]
    _search_all(job, left, work=work, reads=layout.weights, collected={})
    return vectors, layout.weights


def _written(
    job: _CalibrationJob,
    work: Unfinished,
    collected: Mapping[int, VectorInputs],
    *,
    layout: Layout,
    before: Sequence[InputVector],
) -> list[dict[str, Any]]:
    """Write the moments of the vectors that no earlier part has, and return what is known of them, as JSON."""
    if not job.moments:
        return []
    new = {number: vector for number, vector in collected.items() if number >= len(before)}
    known = sum(moments_bytes(vector.size, vector.held_back) for vector in before)
    return [as_json(vector) for vector in keep_moments(work, new, layout, known=known)]


def _search_all(
    job: _CalibrationJob,
    planned: Sequence[TensorPlan],
    *,
    work: Unfinished,
    reads: Mapping[str, WeightInputs],
    collected: Mapping[int, VectorInputs],
) -> None:
    """Search weights in threads, each of which keeps what it found; the first error stops the search."""
    tensors = {tensor.name: tensor for tensor in job.checkpoint.tensors}
    pool = ThreadPoolExecutor(job.options.threads or usable_cores())

    def search_one(plan: TensorPlan) -> None:
        layer, scales = search_layer(plan, tensors[plan.name], reads=reads.get(plan.name), collected=collected)
        work.keep(plan.name, layer_to_record(layer, scales))

    try:
        results = [pool.submit(search_one, plan) for plan in planned]
        for number, result in enumerate(results):
            result.result()
            job.progress(number + 1, len(results), planned[number].name)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
