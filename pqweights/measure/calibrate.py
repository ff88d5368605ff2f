"""Calibrate: run a checkpoint over a text, search scales for every weight that a recipe quantizes, write those that help.

The model is run by integrations/activations.py, the search is scale_search.py. Rows of inputs lie on the disk between the
two; where those of all weights would take too much of it, the model is run again for the next ones. docs/awq.md.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.scales import scale_shape
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.writer import disk_errors
from pqweights.errors import EvaluationError, RecipeError, SourceError
from pqweights.measure.scale_search import FEWEST_ROWS, FEWEST_WINDOWS, Matrix, SearchResult, search
from pqweights.planning.awq_file import check_free, write_awq
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.planning.recipe import Recipe
from pqweights.quantize import Quantize
from pqweights.rewrite.manifest import coder_of
from pqweights.runtimes.folders import read_folder
from pqweights.runtimes.packages import Refused, package, quiet
from pqweights.runtimes.texts import Ids, tokenize

if TYPE_CHECKING:
    from pqweights.measure.activations import Activations, Place, WeightPlace

Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int, str], None]  # done, in all, what

# Tokens that are read together, unless the model takes fewer.
WINDOW = 512
# One window of so many is held back from the search, for checking it.
HELD_BACK_OF = 4
# Rows of inputs that are kept for each matrix, to search on and held back, where the disk has room for as many.
MOST_ROWS = (768, 384)
# What all rows of a run may take on the disk; those of a single weight may take more.
SAMPLE_BYTES = 8_000_000_000


@dataclass(frozen=True)
class LayerReport:
    """One weight of the plan. matrices: one entry, or one for each expert."""

    name: str
    codec: str
    bits: float
    matrices: tuple[SearchResult, ...]

    @property
    def scaled(self) -> bool:
        """Whether any of it is."""
        return any(found.scaled for found in self.matrices)

    def to_json(self) -> dict[str, Any]:
        """As in the metadata of the file."""
        return {
            "codec": self.codec, "bits": self.bits, "scaled": self.scaled, "matrices": [vars(m) for m in self.matrices],
        }  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """The whole run. tokens, held_back_tokens: of the text. bits_per_weight: what all scales add to the quantized weights."""

    tokens: int
    held_back_tokens: int
    layers: tuple[LayerReport, ...]
    bits_per_weight: float

    def to_json(self) -> dict[str, Any]:
        """calibrate --json."""
        return {
            "tokens": self.tokens,
            "held_back_tokens": self.held_back_tokens,
            "bits_per_weight": self.bits_per_weight,
            "weights": {layer.name: layer.to_json() for layer in self.layers},
        }


def fewest_tokens(window: int) -> int:
    """Without which a text is too short, in windows of that size."""
    return FEWEST_WINDOWS * HELD_BACK_OF * window


def calibrate(
    source: Path,
    out: Path,
    text: str,
    recipe: Recipe,
    *,
    max_tokens: int = 16384,
    window: int | None = None,
    tokenizer: Path | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    threads: int,
    overwrite: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Calibration:
    """Run a checkpoint over a text, search scales for every weight that the recipe quantizes, and write them to a file.

    window: tokens that are read together, by default the smaller of 512 and what the model can take. Raises SourceError,
    RecipeError, OutputError, EvaluationError, MissingDependencyError.
    """
    checkpoint = open_local(source)
    if checkpoint.is_master:
        raise SourceError(f"{source}: expected an original checkpoint, found a master; calibrate what it was made from")
    if recipe.target is not None:
        raise RecipeError(
            f"recipe {recipe.name!r}: scales are searched for given widths, and this one chooses them by a target"
        )
    planned = [t for t in Quantize(recipe=recipe).plan(checkpoint) if t.action == QUANTIZE]
    if not planned:
        raise RecipeError(f"recipe {recipe.name!r}: expected a recipe that quantizes something here, found none")
    check_free(out, overwrite)
    windows = _windows(source, text, tokenizer, max_tokens, window)
    held_back = [number % HELD_BACK_OF == HELD_BACK_OF - 1 for number in range(len(windows))]
    package("transformers", "transformers", "running the model")
    from pqweights.measure.activations import places, watch

    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    found: list[tuple[LayerReport, Floats | None]] = []
    with disk_errors(out), tempfile.TemporaryFile(dir=out.absolute().parent) as file:
        with Refused(f"{source}: transformers cannot run this model"), quiet():
            model = _load(source, dtype, device_map)
            where = places(model, [tensor.name for tensor in planned])
        rows = _rows(planned, where)
        rounds = _rounds(planned, where, rows)
        for number, of_round in enumerate(rounds):
            wanted = {place for tensor in of_round for place in _places(tensor, where.get(tensor.name))}
            with Refused(f"{source}: transformers cannot run this model"):
                activations = watch(
                    model, windows, held_back, rows, wanted, file.fileno(), lambda done, total: progress(done, total, "running")
                )  # fmt: skip
            if number == len(rounds) - 1:
                del model  # a large one need not stay while the search goes on
            found += _search_all(of_round, tensors, where, activations, threads, progress)
    layers = tuple(layer for layer, _ in found)
    scales = {layer.name: values for layer, values in found if values is not None}
    tokens, back = (len(windows[0]) * held_back.count(kind) for kind in (False, True))
    about = {
        "recipe": recipe.to_json(),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": tokens,
        "held_back_tokens": back,
        "window": len(windows[0]),
    }
    searched = {layer.name: layer.to_json() for layer in layers}
    write_awq(out, checkpoint=checkpoint.fingerprint(), about=about, weights=searched, scales=scales)
    weights = sum(tensor.weights for tensor in planned)
    return Calibration(tokens, back, layers, 16 * sum(values.size for values in scales.values()) / weights)


def _windows(source: Path, text: str, tokenizer: Path | None, max_tokens: int, window: int | None) -> list[Ids]:
    """The ids that are read, in windows.

    Raises EvaluationError where they are too few, or not of this model.
    """
    folder = read_folder(source)
    size = window or min(WINDOW, folder.context or WINDOW)
    if folder.context is not None and size > folder.context:
        raise EvaluationError(
            f"--window: expected at most the {folder.context} tokens that the model takes, found {size}"
        )
    ids = tokenize(tokenizer or source, text, max_tokens)
    if len(ids) < fewest_tokens(size):
        raise EvaluationError(
            f"the text: expected at least {fewest_tokens(size)} tokens, {fewest_tokens(size) // size} windows of {size}, found "
            f"{len(ids)}; give a longer text, more --max-tokens, or a smaller --window"
        )
    if folder.vocabulary is not None and int(ids.max()) >= folder.vocabulary:
        raise EvaluationError(
            f"{tokenizer or source}: its tokenizer makes the token {int(ids.max())}, the model knows {folder.vocabulary}; give "
            "the tokenizer of this model"
        )
    return [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]


def _load(source: Path, dtype: str, device_map: str | None) -> Any:
    from pqweights.integrations.transformers import load_model

    return load_model(source, dtype=dtype, device_map=device_map, experts_implementation="eager")


def _places(planned: TensorPlan, where: WeightPlace | None) -> list[Place]:
    """Of the matrices of a weight, in order: a stack in the file is one in the model, an expert of its own a part of one."""
    if where is None or len(planned.shape) not in (2, 3):
        return []
    name, expert = where.place
    return [(name, number) for number in range(planned.shape[0])] if len(planned.shape) == 3 else [(name, expert)]


def _channels(tensors: Sequence[TensorPlan], where: Mapping[str, WeightPlace]) -> int:
    """Input channels of all matrices; those with the same inputs count once."""
    by_place = {place: t.shape[-1] for t in tensors for place in _places(t, where.get(t.name))}
    return sum(by_place.values())


def _rows(planned: Sequence[TensorPlan], where: Mapping[str, WeightPlace]) -> tuple[int, int]:
    """How many rows are kept for each matrix: fewer where there are many matrices."""
    share = min(1.0, SAMPLE_BYTES / (4 * max(_channels(planned, where), 1) * sum(MOST_ROWS)))
    rows = [max(fewest, int(most * share)) for most, fewest in zip(MOST_ROWS, FEWEST_ROWS, strict=True)]
    return rows[0], rows[1]


def _rounds(
    planned: Sequence[TensorPlan], where: Mapping[str, WeightPlace], rows: tuple[int, int]
) -> list[list[TensorPlan]]:
    """The weights, cut so that the rows of each part fit into SAMPLE_BYTES."""
    rounds: list[list[TensorPlan]] = [[]]
    for tensor in planned:
        if rounds[-1] and 4 * sum(rows) * _channels([*rounds[-1], tensor], where) > SAMPLE_BYTES:
            rounds.append([])
        rounds[-1].append(tensor)
    return rounds


def _search_all(
    planned: Sequence[TensorPlan], tensors: Mapping[str, LogicalTensor], where: Mapping[str, WeightPlace],
    activations: Activations, threads: int, progress: Progress,
) -> list[tuple[LayerReport, Floats | None]]:  # fmt: skip
    """In threads, in order; the first that fails ends it."""
    found = []
    pool = ThreadPoolExecutor(threads)
    try:
        jobs = [pool.submit(_search_layer, t, tensors[t.name], where.get(t.name), activations) for t in planned]
        for number, job in enumerate(jobs):
            found.append(job.result())
            progress(number + 1, len(jobs), planned[number].name)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found


def _search_layer(
    planned: TensorPlan, tensor: LogicalTensor, where: WeightPlace | None, activations: Activations
) -> tuple[LayerReport, Floats | None]:
    """The report, and the scales [..., K] where there are any."""
    coder, shape = coder_of(planned), planned.shape
    if len(shape) not in (2, 3) or not planned.weights:
        reports = [SearchResult(False, f"expected a matrix or a stack of them, found shape {list(shape)}", 0)]
        return LayerReport(planned.name, coder.codec, coder.bits, tuple(reports)), None
    if where is None:
        reports = [SearchResult(False, "transformers does not load it", 0)]
        return LayerReport(planned.name, coder.codec, coder.bits, tuple(reports)), None
    reports, scales = [], np.ones((math.prod(shape[:-2]), shape[-1]), dtype=np.float32)
    for number, place in enumerate(_places(planned, where)):
        weight = Matrix(tensor=tensor, number=number, rows=shape[-2], columns=shape[-1], block_size=coder.block_size)
        report, best = search(coder, weight, activations.inputs(place), where.transposed)
        reports.append(report)
        if best is not None:
            scales[number] = best
    layer = LayerReport(planned.name, coder.codec, coder.bits, tuple(reports))
    return layer, scales.reshape(scale_shape(shape)) if layer.scaled else None
