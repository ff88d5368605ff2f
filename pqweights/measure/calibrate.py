"""Calibration: run a checkpoint over a text, and search scales for every weight that a recipe quantizes.

activations.py records the inputs of the weights, scale_search.py searches. The rows of inputs lie on the disk in
between; if those of all weights would take too much space, the model runs several times, each time for a part of the
weights. The method is in docs/awq.md.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
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
from pqweights.errors import RecipeError
from pqweights.measure.preparation import plan_original, text_windows, window_size
from pqweights.measure.scale_search import FEWEST_ROWS, FEWEST_WINDOWS, Matrix, SearchResult, search
from pqweights.planning.awq_file import open_awq, write_awq
from pqweights.planning.plan import TensorPlan
from pqweights.planning.recipe import Recipe
from pqweights.planning.result_file import check_free
from pqweights.rewrite.manifest import coder_of
from pqweights.runtimes.folders import read_folder
from pqweights.runtimes.packages import Refused, package, quiet
from pqweights.runtimes.texts import Ids

if TYPE_CHECKING:
    from pqweights.measure.activations import Activations, Place, WeightPlace

Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int, str], None]  # called with the steps done, the steps in all, and what is being done

# Tokens that the model reads together, unless it takes fewer.
WINDOW = 512
DEFAULT_TOKENS = 16384
# One window in this many is held back from the search, to check its result.
HELD_BACK_OF = 4
# The most rows of inputs that are kept of each matrix, to search on and held back; fewer if the disk space is short.
MOST_ROWS = (768, 384)
# The most disk space for the rows of one run, in bytes; those of a single weight may take more.
SAMPLE_BYTES = 8_000_000_000


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
    layers: one report for each weight.
    bits_per_weight: what all scales add, over the quantized weights.
    """

    tokens: int
    held_back_tokens: int
    layers: tuple[LayerReport, ...]
    bits_per_weight: float

    def to_json(self) -> dict[str, Any]:
        """Return the document of calibrate --json."""
        return {
            "tokens": self.tokens,
            "held_back_tokens": self.held_back_tokens,
            "bits_per_weight": self.bits_per_weight,
            "weights": {layer.name: layer.to_json() for layer in self.layers},
        }


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How a checkpoint is calibrated.

    max_tokens: how many tokens of the text are read at most.
    window: tokens that are read together; by default 512, or the model's limit if that is smaller.
    tokenizer: the folder of the tokenizer; by default the model's own.
    dtype: the dtype that the model runs in; auto for its own.
    device_map: as in transformers.
    threads: how many threads search.
    overwrite: whether an existing file of scales may be replaced.
    """

    max_tokens: int = DEFAULT_TOKENS
    window: int | None = None
    tokenizer: Path | None = None
    dtype: str = "auto"
    device_map: str | None = None
    threads: int = 1
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class _CalibrationJob:
    """A calibration of which everything but the model has been read and checked.

    planned: the weights that the recipe quantizes.
    windows: the text, cut into windows of token ids, [tokens].
    """

    source: Path
    checkpoint: Checkpoint
    planned: list[TensorPlan]
    windows: list[Ids]
    options: CalibrationOptions
    progress: Progress

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
    job = _prepare(source, out, text, recipe=recipe, options=options, progress=progress)
    with disk_errors(out), tempfile.TemporaryFile(dir=out.absolute().parent) as file:
        found = list(_layers(job, file.fileno()))
    scales = {layer.name: values for layer, values in found if values is not None}
    held_back = sum(job.is_held_back(number) for number in range(len(job.windows)))
    window = len(job.windows[0])
    result = Calibration(
        tokens=window * (len(job.windows) - held_back),
        held_back_tokens=window * held_back,
        layers=tuple(layer for layer, _ in found),
        bits_per_weight=16 * sum(values.size for values in scales.values()) / sum(t.weights for t in job.planned),
    )
    about = {
        "recipe": recipe.to_json(),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": result.tokens,
        "held_back_tokens": result.held_back_tokens,
        "window": window,
    }
    write_awq(
        out,
        checkpoint=job.checkpoint.fingerprint(),
        about=about,
        weights=result.to_json()["weights"],
        scales=scales,
    )
    return result


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
    folder = read_folder(source)
    size = window_size(folder, options.window, WINDOW)
    windows = text_windows(
        folder,
        text,
        size=size,
        fewest=fewest_tokens(size) // size,
        tokenizer=options.tokenizer,
        max_tokens=options.max_tokens,
    )
    package("transformers", "transformers", "running the model")
    return _CalibrationJob(
        source=source, checkpoint=checkpoint, planned=planned, windows=windows, options=options, progress=progress
    )


def _layers(job: _CalibrationJob, descriptor: int) -> Iterator[tuple[LayerReport, Floats | None]]:
    """Yield the report of each weight, and its scales [..., K] or None.

    descriptor: the open file for rows of inputs.
    """
    from pqweights.measure.activations import Sampling, TextWindow, places, watch

    cannot_run = f"{job.source}: transformers cannot run this model"
    with Refused(cannot_run), quiet():
        model = _load(job.source, job.options)
        where = places(model, [tensor.name for tensor in job.planned])
    rows = _rows(job.planned, where)
    rounds = _rounds(job.planned, where, rows)
    windows = [TextWindow(ids, job.is_held_back(number)) for number, ids in enumerate(job.windows)]
    for number, tensors in enumerate(rounds):
        wanted = {place for tensor in tensors for place in _places(tensor, where.get(tensor.name))}
        sampling = Sampling(wanted=wanted, rows=rows, descriptor=descriptor)
        with Refused(cannot_run):
            activations = watch(
                model, windows, sampling, progress=lambda done, total: job.progress(done, total, "running")
            )
        if number == len(rounds) - 1:
            del model  # frees the memory of a large model for the search
        yield from _search_all(job, tensors, where=where, activations=activations)


def _load(source: Path, options: CalibrationOptions) -> Any:
    from pqweights.integrations.transformers import load_model

    return load_model(source, dtype=options.dtype, device_map=options.device_map, experts_implementation="eager")


def _places(planned: TensorPlan, where: WeightPlace | None) -> list[Place]:
    """Return the places of the matrices of a weight, in order.

    A stack in the file is a stack in the model; an expert that is a tensor of its own is a part of a stack there.
    """
    if where is None or len(planned.shape) not in (2, 3):
        return []
    name, expert = where.place
    return [(name, number) for number in range(planned.shape[0])] if len(planned.shape) == 3 else [(name, expert)]


def _channels(tensors: Sequence[TensorPlan], where: Mapping[str, WeightPlace]) -> int:
    """Return the number of input channels of all matrices; matrices with the same inputs count once."""
    by_place = {place: t.shape[-1] for t in tensors for place in _places(t, where.get(t.name))}
    return sum(by_place.values())


def _rows(planned: Sequence[TensorPlan], where: Mapping[str, WeightPlace]) -> tuple[int, int]:
    """Return how many rows are kept of each matrix, to search on and held back: fewer if there are many matrices."""
    share = min(1.0, SAMPLE_BYTES / (4 * max(_channels(planned, where), 1) * sum(MOST_ROWS)))
    rows = [max(fewest, int(most * share)) for most, fewest in zip(MOST_ROWS, FEWEST_ROWS, strict=True)]
    return rows[0], rows[1]


def _rounds(
    planned: Sequence[TensorPlan], where: Mapping[str, WeightPlace], rows: tuple[int, int]
) -> list[list[TensorPlan]]:
    """Return the weights in parts, such that the rows of each part fit into SAMPLE_BYTES."""
    rounds: list[list[TensorPlan]] = [[]]
    for tensor in planned:
        if rounds[-1] and 4 * sum(rows) * _channels([*rounds[-1], tensor], where) > SAMPLE_BYTES:
            rounds.append([])
        rounds[-1].append(tensor)
    return rounds


def _search_all(
    job: _CalibrationJob, planned: Sequence[TensorPlan], *, where: Mapping[str, WeightPlace], activations: Activations
) -> Iterator[tuple[LayerReport, Floats | None]]:
    """Search all weights in threads and yield the results in order; the first error stops the search."""
    tensors = {tensor.name: tensor for tensor in job.checkpoint.tensors}
    pool = ThreadPoolExecutor(job.options.threads)
    try:
        results = [
            pool.submit(_search_layer, plan, tensors[plan.name], where=where.get(plan.name), activations=activations)
            for plan in planned
        ]
        for number, result in enumerate(results):
            yield result.result()
            job.progress(number + 1, len(results), planned[number].name)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _search_layer(
    planned: TensorPlan, tensor: LogicalTensor, *, where: WeightPlace | None, activations: Activations
) -> tuple[LayerReport, Floats | None]:
    """Search one weight; return its report, and its scales [..., K] or None."""
    coder, shape = coder_of(planned), planned.shape

    def report(*results: SearchResult) -> LayerReport:
        return LayerReport(name=planned.name, codec=coder.codec, bits=coder.bits, matrices=results)

    if len(shape) not in (2, 3) or not planned.weights:
        reason = f"expected a matrix or a stack of them, found shape {list(shape)}"
        return report(SearchResult(scaled=False, reason=reason, tokens=0)), None
    if where is None:
        return report(SearchResult(scaled=False, reason="transformers does not load it", tokens=0)), None
    results, scales = [], np.ones((math.prod(shape[:-2]), shape[-1]), dtype=np.float32)
    for number, place in enumerate(_places(planned, where)):
        weight = Matrix(tensor=tensor, number=number, rows=shape[-2], columns=shape[-1], block_size=coder.block_size)
        result, best = search(coder, weight, activations.inputs(place), transposed=where.transposed)
        results.append(result)
        if best is not None:
            scales[number] = best
    layer = report(*results)
    return layer, scales.reshape(scale_shape(shape)) if layer.scaled else None
