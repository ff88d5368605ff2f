"""Calibration: run a checkpoint over a text, and search scales for every weight that a recipe quantizes.

recording.py runs the model, activations.py records the inputs of the weights, scale_search.py searches. What is found
for each weight is kept in the folder of unfinished.py, from which the same command continues. The method is in
docs/awq.md.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.scales import scale_shape
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import disk_errors
from pqweights.codecs import CODECS
from pqweights.errors import RecipeError
from pqweights.measure.preparation import TextWindows, plan_original, text_windows, window_size
from pqweights.measure.recording import LoadedModel, ModelRun, parts_of, places_of, rows_kept
from pqweights.measure.scale_search import FEWEST_WINDOWS, Matrix, SearchResult, search
from pqweights.measure.unfinished import Unfinished, inputs_of, open_unfinished
from pqweights.notices import slow_step
from pqweights.planning.awq_file import open_awq, write_awq
from pqweights.planning.plan import TensorPlan, coder_of
from pqweights.planning.recipe import Recipe
from pqweights.planning.result_file import check_free
from pqweights.runtimes.folders import read_folder
from pqweights.runtimes.packages import package
from pqweights.runtimes.texts import Ids

if TYPE_CHECKING:
    from pqweights.measure.activations import Activations, WeightPlace

Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int, str], None]  # called with the steps done, the steps in all, and what is being done

# Tokens that the model reads together, unless it takes fewer.
WINDOW = 512
DEFAULT_TOKENS = 16384
# One window in this many is held back from the search, to check its result.
HELD_BACK_OF = 4


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The result for one weight of the plan.

    name: the weight.
    codec, bits: what the scales were searched for.
    matrices: one result, or one for each expert.
    """

    name: str
    codec: str
    bits: float
    matrices: tuple[SearchResult, ...]

    @property
    def scaled(self) -> bool:
        """Whether any of its matrices gets scales."""
        return any(found.scaled for found in self.matrices)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the weight in the metadata of the file."""
        return {
            "codec": self.codec,
            "bits": self.bits,
            "scaled": self.scaled,
            "matrices": [vars(matrix) for matrix in self.matrices],
        }


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The result of a calibration.

    tokens, held_back_tokens: how many tokens of the text were searched on, and held back.
    bos: whether each window of them began with BOS.
    layers: one report for each weight.
    bits_per_weight: what all scales add, over the quantized weights.
    """

    tokens: int
    held_back_tokens: int
    bos: bool
    layers: tuple[LayerReport, ...]
    bits_per_weight: float

    def to_json(self) -> dict[str, Any]:
        """Return the document of calibrate --json."""
        return {
            "tokens": self.tokens,
            "held_back_tokens": self.held_back_tokens,
            "bos": self.bos,
            "bits_per_weight": self.bits_per_weight,
            "weights": {layer.name: layer.to_json() for layer in self.layers},
        }


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How a checkpoint is calibrated.

    max_tokens: how many tokens of the text are read at most.
    window: tokens that are read together; by default 512, or the model's limit if that is smaller.
    tokenizer: the folder of the tokenizer; by default the model's own.
    bos: whether windows begin with the token BOS, if the tokenizer puts one before a text.
    dtype: the dtype that the model runs in; auto for its own.
    device_map: as in transformers.
    threads: how many threads search.
    overwrite: whether an existing file of scales may be replaced.
    """

    max_tokens: int = DEFAULT_TOKENS
    window: int | None = None
    tokenizer: Path | None = None
    bos: bool = True
    dtype: str = "auto"
    device_map: str | None = None
    threads: int = 1
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class _CalibrationJob:
    """A calibration of which everything but the model has been read and checked.

    planned: the weights that the recipe quantizes.
    text: the windows of the text.
    """

    source: Path
    checkpoint: Checkpoint
    planned: list[TensorPlan]
    text: TextWindows
    options: CalibrationOptions
    progress: Progress

    @property
    def windows(self) -> list[Ids]:
        """The windows of token ids, each [tokens]."""
        return self.text.ids

    def is_held_back(self, window: int) -> bool:
        """Whether a window is held back from the search."""
        return window % HELD_BACK_OF == HELD_BACK_OF - 1


def fewest_tokens(window: int) -> int:
    """Return how many tokens a text needs at least, in windows of `window` tokens."""
    return FEWEST_WINDOWS * HELD_BACK_OF * window


def calibrate(
    source: Path,
    out: Path,
    text: str,
    *,
    recipe: Recipe,
    options: CalibrationOptions = CalibrationOptions(),
    progress: Progress = lambda done, total, what: None,
) -> Calibration:
    """Run a checkpoint over a text, search scales for the weights that the recipe quantizes, and write those that help.

    source: the folder of the original checkpoint.
    out: the file for the scales.
    text: what the model reads.
    recipe: which weights are quantized, and how.

    Raises SourceError, RecipeError, OutputError, EvaluationError, MissingDependencyError.
    """
    with slow_step("reading the text with transformers"):
        job = _prepare(source, out, text, recipe=recipe, options=options, progress=progress)
    with open_unfinished(out, _inputs(job, text, recipe), job.checkpoint, overwrite=options.overwrite) as work:
        _search_missing(job, work)
        found = [_from_record(tensor.name, work.found[tensor.name]) for tensor in job.planned]
        scales = {layer.name: values for layer, values in found if values is not None}
        result = _result(job, [layer for layer, _ in found], scales)
        about = {
            "recipe": recipe.to_json(),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": result.tokens,
            "held_back_tokens": result.held_back_tokens,
            "window": len(job.windows[0]),
            **job.text.about,
        }
        write_awq(
            out,
            checkpoint=job.checkpoint.fingerprint(),
            about=about,
            weights=result.to_json()["weights"],
            scales=scales,
        )
    return result


def _inputs(job: _CalibrationJob, text: str, recipe: Recipe) -> dict[str, Any]:
    """Return what decides the scales, by which an interrupted run is known."""
    options = job.options
    return inputs_of(
        job.checkpoint,
        recipe=recipe.to_json(),
        text=text,
        windows=job.windows,
        dtype=options.dtype,
        device_map=options.device_map,
    )


def _result(job: _CalibrationJob, layers: Sequence[LayerReport], scales: Mapping[str, Floats]) -> Calibration:
    held_back = sum(job.is_held_back(number) for number in range(len(job.windows)))
    window = len(job.windows[0])
    return Calibration(
        tokens=window * (len(job.windows) - held_back),
        held_back_tokens=window * held_back,
        bos=job.text.bos,
        layers=tuple(layers),
        bits_per_weight=16 * sum(values.size for values in scales.values()) / sum(t.weights for t in job.planned),
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
        tokenizer=options.tokenizer,
        max_tokens=options.max_tokens,
        bos=options.bos,
    )


def _prepare(
    source: Path, out: Path, text: str, *, recipe: Recipe, options: CalibrationOptions, progress: Progress
) -> _CalibrationJob:
    """Read and check everything that needs no model in memory."""
    if recipe.target is not None:
        raise RecipeError(
            f"recipe {recipe.name!r}: expected given widths, because scales are searched for them; found a target, "
            "which chooses the widths"
        )
    checkpoint, planned = plan_original(source, recipe)
    check_free(out, options.overwrite, kind="scales", read=open_awq)
    windows = calibration_windows(source, text, options)
    return _CalibrationJob(
        source=source, checkpoint=checkpoint, planned=planned, text=windows, options=options, progress=progress
    )


def _search_missing(job: _CalibrationJob, work: Unfinished) -> None:
    """Search the weights that `work` does not have, and keep the result of each there."""
    from pqweights.measure.activations import TextWindow
    from pqweights.measure.activations_file import load_activations

    if all(tensor.name in work.found for tensor in job.planned):
        return
    model = LoadedModel(job.source, dtype=job.options.dtype, device_map=job.options.device_map)
    kept = load_activations(work.state, work.samples)
    where = model.places([tensor.name for tensor in job.planned]) if kept is None else kept.where
    rows = rows_kept(job.planned, where)
    parts = parts_of(job.planned, where, rows)
    windows = [TextWindow(ids, job.is_held_back(number)) for number, ids in enumerate(job.windows)]
    with disk_errors(work.samples), _opened(work.samples) as samples:
        for number, weights in enumerate(parts):
            missing = [tensor for tensor in weights if tensor.name not in work.found]
            if missing:
                activations = ModelRun(work=work, samples=samples, number=number, rows=rows, where=where).run(
                    model,
                    windows,
                    weights=weights,
                    kept=kept,
                    progress=lambda done, total: job.progress(done, total, "running the model"),
                )
                if number == len(parts) - 1:
                    model.free()
                _search_all(job, missing, work=work, where=where, activations=activations)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading and writing, which is created if it does not exist; yield its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _search_all(
    job: _CalibrationJob,
    planned: Sequence[TensorPlan],
    *,
    work: Unfinished,
    where: Mapping[str, WeightPlace],
    activations: Activations,
) -> None:
    """Search weights in threads, each of which keeps what it found; the first error stops the search."""
    tensors = {tensor.name: tensor for tensor in job.checkpoint.tensors}
    pool = ThreadPoolExecutor(job.options.threads)

    def search_one(plan: TensorPlan) -> None:
        found = _search_layer(plan, tensors[plan.name], where=where.get(plan.name), activations=activations)
        work.keep(plan.name, _to_record(*found))

    try:
        results = [pool.submit(search_one, plan) for plan in planned]
        for number, result in enumerate(results):
            result.result()
            job.progress(number + 1, len(results), planned[number].name)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _to_record(layer: LayerReport, scales: Floats | None) -> dict[str, Any]:
    """Return what was found for one weight as JSON. Scales are float16 numbers."""
    stored = None
    if scales is not None:
        stored = {"shape": scales.shape, "float16": base64.b64encode(scales.astype("<f2").tobytes()).decode()}
    return {**layer.to_json(), "scales": stored}


def _from_record(name: str, record: Mapping[str, Any]) -> tuple[LayerReport, Floats | None]:
    matrices = tuple(SearchResult(**matrix) for matrix in record["matrices"])
    layer = LayerReport(name=name, codec=record["codec"], bits=record["bits"], matrices=matrices)
    stored = record["scales"]
    if stored is None:
        return layer, None
    values = np.frombuffer(base64.b64decode(stored["float16"]), dtype="<f2").astype(np.float32)
    return layer, values.reshape(stored["shape"])


def _search_layer(
    planned: TensorPlan, tensor: LogicalTensor, *, where: WeightPlace | None, activations: Activations
) -> tuple[LayerReport, Floats | None]:
    """Search one weight; return its report, and its scales [..., K] or None."""
    coder, shape = coder_of(planned), planned.shape
    together = CODECS[coder.codec].block_size

    def report(*results: SearchResult) -> LayerReport:
        return LayerReport(name=planned.name, codec=coder.codec, bits=coder.bits, matrices=results)

    if len(shape) not in (2, 3) or not planned.weights:
        reason = f"expected a matrix or a stack of them, found shape {list(shape)}"
        return report(SearchResult(scaled=False, reason=reason, tokens=0)), None
    if where is None:
        return report(SearchResult(scaled=False, reason="transformers does not load it", tokens=0)), None
    results, scales = [], np.ones((math.prod(shape[:-2]), shape[-1]), dtype=np.float32)
    for number, place in enumerate(places_of(planned, where)):
        weight = Matrix(tensor=tensor, number=number, rows=shape[-2], columns=shape[-1], block_size=together)
        result, best = search(coder, weight, activations.inputs(place), transposed=where.transposed)
        results.append(result)
        if best is not None:
            scales[number] = best
    layer = report(*results)
    return layer, scales.reshape(scale_shape(shape)) if layer.scaled else None
