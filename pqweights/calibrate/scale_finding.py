"""Search scales of input channels (AWQ) for the weights that a recipe quantizes, layer by layer.

scale_search.py searches; docs/awq.md has the method.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pqweights.calibrate.collecting import HELD_BACK_OF, VectorInputs, check_windows
from pqweights.calibrate.layer_passes import LayerPasses
from pqweights.calibrate.layer_statistics import LayerStatistics, weight_inputs
from pqweights.calibrate.layered import OUTSIDE, LayeredModel, ModelMatrix
from pqweights.calibrate.sample import SEED, SampleOf
from pqweights.calibrate.scale_search import Inputs, LayerReport, search_layer
from pqweights.calibrate.work_folder import check_space, folder_beside, stated_by_result, worked_on_in
from pqweights.checkpoint.names import awq_name
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import Options
from pqweights.common.threads import Progress, slow_step
from pqweights.convert.scales import AwqScales, write_scales
from pqweights.errors import RecipeError
from pqweights.planning.calibration import states_bytes
from pqweights.planning.layout import QUANTIZE, TensorPlan
from pqweights.planning.recipe import Recipe
from pqweights.storage import Store
from pqweights.targets.master import plan_quantize

Floats = npt.NDArray[np.float32]
Searched = dict[str, tuple[LayerReport, Floats | None]]  # the result of each weight and its scales [..., K], by name

# The rows of inputs that are kept of each vector, to search on and held back.
SEARCHED_ROWS, HELD_BACK_ROWS = 768, 384
KIND = "scales"  # of what is kept of a layer


@contextlib.contextmanager
def found_scales(
    source: Path, out: Store, recipe: Recipe, options: Options, *, progress: Progress
) -> Iterator[tuple[AwqScales, Options]]:
    """Search the scales of a checkpoint's weights on the sample of `awq`, continuing an interrupted search.

    See calibrated_codes.
    """
    with slow_step("loading transformers"):
        made = plan_quantize(source, recipe, replace(options, revision=None))
        checkpoint = made.checkpoint
        planned = [_without_scales(tensor) for tensor in made.tensors if tensor.action == QUANTIZE]
        if not planned:
            raise RecipeError(f"recipe {recipe.name!r}: `awq`: expected a recipe that quantizes something here")
        sample = SampleOf.of(source, checkpoint, str(options.awq), options)
        check_windows(*sample.shape)
    codecs = [(tensor.name, tensor.codec, tensor.bits) for tensor in planned]
    key = hashlib.sha256(json.dumps([*sample.stated, recipe.to_json(), codecs, KIND]).encode()).hexdigest()
    if (stated := stated_by_result(out, "awq", key, overwrite=options.overwrite)) is not None:
        sample.save_again(out, key, options.thread_count)
        scaled = frozenset(name for name, told in stated["weights"].items() if "gain" in told)
        yield AwqScales(about=stated, scaled=scaled), options
        return
    with slow_step("loading transformers"):
        model = LayeredModel(checkpoint, source, remedy="quantize it without `awq`")
    with worked_on_in(folder_beside(out), out, key, options.thread_count, sample.contents.is_same) as work:
        ids = sample.ids(work, options.thread_count)
        check_windows(*ids.shape)
        check_space(work, states_bytes(checkpoint.config, ids.numel()), {})
        passes = LayerPasses(model=model, ids=ids, work=work, batch_tokens=ids.shape[1], check=sample.check_source)
        files = _searched(passes, checkpoint, planned, options.thread_count, progress)
        sample.check_source()
        yield (
            AwqScales.open(files, _about(sample, ids) | {"identity": key}),
            replace(options, check=sample.check_source),
        )


def _without_scales(tensor: TensorPlan) -> TensorPlan:
    """Return a plan as it is before scales are found: its format is that of a weight without any."""
    stored = tuple(spec for spec in tensor.stored if spec.name != awq_name(tensor.name))
    return tensor._replace(stored=stored)


def _about(sample: SampleOf, ids: Tensor) -> dict[str, Any]:
    """Return what the manifest says of a search. ids: the tokens of the sample, [windows, tokens]"""
    windows, window = ids.shape
    held_back = windows // HELD_BACK_OF * window
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    return {
        "sample": sample.kind,
        "tokens": ids.numel() - held_back,
        "held_back_tokens": held_back,
        "window": window,
        "seed": SEED,
        "sample_sha256": digest,
    }


def _searched(
    passes: LayerPasses, checkpoint: Checkpoint, planned: Sequence[TensorPlan], threads: int, progress: Progress
) -> list[Path]:
    """Run the model layer by layer, and search the scales of each layer's weights; return the files of the scales."""
    model, last = passes.model, passes.model.layers
    by_name = {tensor.name: tensor for tensor in planned}
    own = {
        layer: [by_name.pop(tensor.name) for tensor in model.tensors_of(layer) if tensor.name in by_name]
        for layer in (OUTSIDE, *range(last))
    }
    own[OUTSIDE] += by_name.values()  # those that the model does not compute with

    def watch(layer: int) -> LayerStatistics[VectorInputs]:
        names = {matrix.parameter for tensor in own[layer] for matrix in model.matrices_of(tensor.name).matrices}
        parameters = {name: it for name, it in model.parameters_of(layer).items() if name in names}
        collect = partial(VectorInputs, rows=SEARCHED_ROWS, held_back=HELD_BACK_ROWS)
        return LayerStatistics(parameters, collect, model.head)

    def search(layer: int, file: Path, seen: LayerStatistics[VectorInputs]) -> None:
        searched = _search_all(checkpoint, own[layer], model=model, seen=seen, threads=threads)
        passes.check()
        reports = {name: report.to_json() for name, (report, _) in searched.items()}
        write_scales(file, reports, {name: scales for name, (_, scales) in searched.items() if scales is not None})

    files = [passes.file(KIND, layer) for layer in range(last + 1)]
    for layer, file in enumerate(files[:last]):
        if not file.exists():
            passes.forward(layer, partial(watch, layer), partial(search, layer, file))
        progress(layer + 1, last + 1, f"layer {layer}")
    if not files[last].exists():
        passes.head(partial(watch, OUTSIDE), partial(search, OUTSIDE, files[last]))
    progress(last + 1, last + 1, "head")
    return files


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
    heads = {matrix for matrix, product in seen.products.items() if product.makes_logits}
    pool = ThreadPoolExecutor(threads)
    try:
        results = [
            pool.submit(
                search_layer,
                plan,
                tensors[plan.name],
                reads=reads[plan.name],
                inputs_of=inputs.__getitem__,
                makes_logits=not heads.isdisjoint(model.matrices_of(plan.name).matrices),
            )
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
