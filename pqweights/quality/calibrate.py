"""Search scales of input channels (AWQ) for the weights that a recipe quantizes, layer by layer.

scale_search.py searches; docs/awq.md has the method.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import check_free
from pqweights.common.threads import Progress, slow_step
from pqweights.errors import RecipeError
from pqweights.planning.calibration import states_bytes
from pqweights.planning.plan import TensorPlan
from pqweights.planning.recipe import Recipe
from pqweights.planning.scales_file import open_scales, write_scales
from pqweights.quality.collecting import HELD_BACK_OF, VectorInputs, check_windows
from pqweights.quality.layer_passes import LayerPasses
from pqweights.quality.layer_statistics import LayerStatistics, weight_inputs
from pqweights.quality.layered import OUTSIDE, LayeredModel, ModelMatrix
from pqweights.quality.options import SamplingOptions
from pqweights.quality.preparation import plan_original
from pqweights.quality.sample import SampleOf
from pqweights.quality.scale_search import Inputs, LayerReport, search_layer
from pqweights.quality.work_folder import check_space, folder_beside_file, worked_on_in
from pqweights.rewrite.task import usable_cores

Floats = npt.NDArray[np.float32]
Searched = dict[str, tuple[LayerReport, Floats | None]]  # the result of each weight and its scales [..., K], by name

# The rows of inputs that are kept of each vector, to search on and held back.
SEARCHED_ROWS, HELD_BACK_ROWS = 768, 384


@dataclass(frozen=True, kw_only=True)
class ScaleReport:
    """The result of a search.

    tokens, held_back_tokens: how many tokens of the sample were learned from, and held back.
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


def calibrate(
    source: Path,
    out: Path,
    *,
    recipe: Recipe,
    options: SamplingOptions = SamplingOptions(),
    progress: Progress = lambda done, total, what: None,
) -> ScaleReport:
    """Run a checkpoint over a sample, search scales for the weights that a recipe quantizes, and write those that help.

    source: the folder of the original checkpoint
    out: the file for the scales

    Raises SourceError, RecipeError, OutputError, EvaluationError, MissingDependencyError.
    """
    if recipe.target is not None:
        raise RecipeError(
            f"recipe {recipe.name!r}: expected given widths, because scales are searched for them; found a target, "
            "which chooses the widths"
        )
    with slow_step("loading transformers"):
        checkpoint, planned = plan_original(source, recipe)
        check_free(out, options.overwrite, kind="scales", read=open_scales)
        sample = SampleOf(source=source, checkpoint=checkpoint, text=str(options.text), tokens=options.tokens)
        model = LayeredModel(checkpoint, source, remedy="quantize it without `awq`")
    check_windows(*sample.shape)
    stated, threads = sample.stated, options.threads or usable_cores()
    key = hashlib.sha256(json.dumps(stated).encode()).hexdigest()
    folder, is_same = folder_beside_file(out), sample.contents.is_same
    with worked_on_in(folder, out, key, threads, is_same) as work:
        ids = sample.ids(work, threads)
        check_windows(*ids.shape)
        check_space(work, states_bytes(checkpoint.config, ids.numel()), {})
        windows, window = ids.shape
        passes = LayerPasses(model=model, ids=ids, work=work, batch_tokens=window, check=sample.check_source)
        layers = _searched(passes, checkpoint, planned, threads, progress)
        sample.check_source()
        scaled = {layer.name: values for layer, values in layers if values is not None}
        held_back = windows // HELD_BACK_OF * window
        result = ScaleReport(
            tokens=ids.numel() - held_back,
            held_back_tokens=held_back,
            layers=tuple(layer for layer, _ in layers),
            bits_per_weight=16 * sum(values.size for values in scaled.values()) / sum(t.weights for t in planned),
        )
        write_scales(
            out,
            checkpoint=checkpoint.fingerprint(),
            about={"recipe": recipe.to_json(), "sample": sample.digest, "tokens": ids.numel(), "window": window},
            weights={layer.name: layer.to_json() for layer in result.layers},
            scales=scaled,
        )
    return result


def _searched(
    passes: LayerPasses, checkpoint: Checkpoint, planned: Sequence[TensorPlan], threads: int, progress: Progress
) -> list[tuple[LayerReport, Floats | None]]:
    """Run the model layer by layer, and search the scales of each layer's weights."""
    model, result = passes.model, Searched()
    by_name = {tensor.name: tensor for tensor in planned}

    def own(layer: int) -> list[TensorPlan]:
        return [by_name[tensor.name] for tensor in model.tensors_of(layer) if tensor.name in by_name]

    def watch(layer: int) -> LayerStatistics[VectorInputs]:
        names = {matrix.parameter for tensor in own(layer) for matrix in model.matrices_of(tensor.name).matrices}
        parameters = {name: it for name, it in model.parameters_of(layer).items() if name in names}
        return LayerStatistics(parameters, partial(VectorInputs, rows=SEARCHED_ROWS, held_back=HELD_BACK_ROWS))

    def search(layer: int, seen: LayerStatistics[VectorInputs]) -> None:
        result.update(_search_all(checkpoint, own(layer), model=model, seen=seen, threads=threads))

    for layer in range(model.layers):
        passes.forward(layer, partial(watch, layer), partial(search, layer))
        progress(layer + 1, model.layers + 1, f"layer {layer}")
    passes.head(partial(watch, OUTSIDE), partial(search, OUTSIDE))
    progress(model.layers + 1, model.layers + 1, "head")
    left = [tensor for tensor in planned if tensor.name not in result]
    nothing = LayerStatistics[VectorInputs]({}, partial(VectorInputs, held_back=0))
    result |= _search_all(checkpoint, left, model=model, seen=nothing, threads=threads)
    return [result[tensor.name] for tensor in planned]


def _search_all(
    checkpoint: Checkpoint,
    planned: Sequence[TensorPlan],
    *,
    model: LayeredModel,
    seen: LayerStatistics[VectorInputs],
    threads: int,
) -> Searched:
    """Search weights in threads; the first error stops the search."""
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    number_of: dict[ModelMatrix, int] = {}
    inputs: list[Inputs] = []
    for matrices, collected in seen.inputs():
        number_of |= dict.fromkeys(matrices, len(inputs))
        inputs.append(_to_search_on(collected))
    reads = {plan.name: weight_inputs(model.matrices_of(plan.name), number_of, seen.products) for plan in planned}
    pool = ThreadPoolExecutor(threads)
    try:
        results = [
            pool.submit(search_layer, plan, tensors[plan.name], reads=reads[plan.name], inputs_of=inputs.__getitem__)
            for plan in planned
        ]
        return {plan.name: result.result() for plan, result in zip(planned, results, strict=True)}
    finally:
        pool.shutdown(cancel_futures=True)


def _to_search_on(collected: VectorInputs) -> Inputs:
    return Inputs(
        tokens=collected.tokens,
        rms=np.sqrt(collected.mean_squares()),
        rows=collected.rows.rows,
        held_back=collected.held_back.rows,
        windows=collected.held_back.windows,
    )
