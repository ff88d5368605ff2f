"""Sensitivity: how much a model diverges from itself for errors in each of its weights, from one pass back.

For small changes of a weight W, independent and of the mean square s_b^2 in each block b, the expected divergence per
token is half the sum of s_b^2 E[G^2] over all its elements, where G are the gradients of the loss with labels that are
drawn from the model's own predictions: the diagonal of the Fisher information (Amari, Neural Computation 10, 1998). The
change of a block is taken as relative to the size of that block, which is how the codecs here err. So alpha, the
divergence for a relative squared error of 1, is half the sum of the squared gradients, each with the mean square of its
block. It agrees with what noise in the weights does (docs/fit.md), which takes four runs of the model for each group.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from pqweights.calibrate.divergence import LayerwiseDivergence, scaled_for
from pqweights.calibrate.layer_passes import LayerPasses, save_whole
from pqweights.calibrate.layered import OUTSIDE, LayeredModel
from pqweights.calibrate.sample import SEED, SampleOf
from pqweights.calibrate.work_folder import check_space, folder_beside, stated_by_result, worked_on_in
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import Options
from pqweights.common.strict_json import rounded
from pqweights.common.threads import Progress, no_progress, slow_step
from pqweights.convert.convert import convert
from pqweights.errors import RecipeError, SourceError
from pqweights.formats import CODECS
from pqweights.models import text_model
from pqweights.planning.calibration import states_bytes
from pqweights.planning.decisions import decide, without
from pqweights.planning.recipe import Recipe
from pqweights.planning.sensitivity import Sensitivity
from pqweights.storage import Store, open_store
from pqweights.storage.sources import open_source
from pqweights.targets.exporting import open_exported
from pqweights.targets.master import Learned, plan_quantize

PASSES = "passes"  # the folder of what lies on the disk between passes
REMEDY = "choose bits without `calibrate`"
ALPHAS = "alphas"  # of a layer, by the name of a tensor


class _SquaredGradients:
    """Adds up the squared gradients of tensors, weighed by the mean squares of their blocks; a context.

    model: whose weights are in memory
    block_sizes: of the tensors, by name
    """

    def __init__(self, model: LayeredModel, block_sizes: Mapping[str, int]) -> None:
        self._model = model
        parameters = {name: model.parameter_of(name) for name in block_sizes}
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter is not None}
        self._mean_squares = {
            name: _squares(model.part_of(name, parameter.detach()), block_sizes[name]) / block_sizes[name]
            for name, parameter in self._parameters.items()
        }
        self._block_sizes = block_sizes
        self.sums: dict[str, float] = {}  # of those that a gradient reached

    def __enter__(self) -> _SquaredGradients:
        for parameter in self._parameters.values():
            parameter.requires_grad_()
        return self

    def __exit__(self, *raised: Any) -> None:
        for parameter in self._parameters.values():
            parameter.requires_grad_(False)
            parameter.grad = None

    def next_batch(self) -> None:
        """Take the gradients of a batch."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                squares = _squares(self._model.part_of(name, parameter.grad), self._block_sizes[name])
                self.sums[name] = self.sums.get(name, 0.0) + float(squares @ self._mean_squares[name])
        for parameter in self._parameters.values():
            parameter.grad = None


def _squares(values: Tensor, block_size: int) -> Tensor:
    """Return the sum of squares of each block, f64; the last one may be shorter."""
    flat = values.reshape(-1)
    whole = flat.numel() // block_size * block_size
    blocks = [flat[:whole].view(-1, block_size), flat[whole:][None]]
    return torch.cat([torch.linalg.vector_norm(part, dim=1).double().square() for part in blocks])


@contextlib.contextmanager
def sensitivity_for(
    source: Path, out: Store, recipe: Recipe, options: Options, *, progress: Progress
) -> Iterator[tuple[Sensitivity, Options]]:
    """Measure the sensitivities by which the bit widths of a master are chosen; see `learned`."""
    sample, key = _sample(source, recipe, options)
    if (stated := stated_by_result(out, "fit", key, overwrite=options.overwrite)) is not None:
        sample.save_again(out, key, options.thread_count)
        yield Sensitivity.read(stated), options
        return
    with worked_on_in(folder_beside(out), out, key, options.thread_count, sample.contents.is_same) as work:
        yield _measured(sample, key, work, recipe, options, progress), replace(options, check=sample.check_source)


def measured(source: Path, work: Path, recipe: Recipe, options: Options, *, progress: Progress) -> Sensitivity:
    """Measure the sensitivities by which a plan chooses bit widths. work: an empty folder"""
    sample, key = _sample(source, recipe, options)
    with worked_on_in(work / "sensitivity", source, key, options.thread_count, sample.contents.is_same) as folder:
        return _measured(sample, key, folder, recipe, options, progress)


def _sample(source: Path, recipe: Recipe, options: Options) -> tuple[SampleOf, str]:
    """Return the sample that is wanted, and a digest of everything on which the sensitivities depend."""
    checkpoint = without(open_source(source, allow_pickle=options.allow_pickle), options.leave_out)
    sizes = block_sizes(checkpoint, recipe)
    goal = None if recipe.goal is None else recipe.goal.divergence
    sample = SampleOf.of(source, checkpoint, str(options.calibrate), options, is_checked=goal is not None)
    return sample, hashlib.sha256(json.dumps([*sample.stated, sizes, goal]).encode()).hexdigest()


def _measured(
    sample: SampleOf, key: str, work: Path, recipe: Recipe, options: Options, progress: Progress
) -> Sensitivity:
    """Measure sensitivities, by masters that are made of them if the recipe is for a divergence. key: see _sample"""
    sizes, threads = block_sizes(sample.checkpoint, recipe), options.thread_count
    sensitivity = measure(sample, work, sizes, threads=threads, progress=progress)
    about = {"identity": key}
    if recipe.goal is not None and recipe.goal.divergence is not None:
        with slow_step("measuring the divergence of masters"):
            model = LayeredModel(sample.checkpoint, sample.source, remedy=REMEDY)
            divergence = LayerwiseDivergence(model, sample.unseen(work, sample.ids(work, threads)))
            sensitivity = scaled_for(
                recipe.goal.divergence,
                sensitivity,
                divergence,
                lambda known: model_of_trial(sample, recipe, options, work, Learned(sensitivity=known)),
                work,
            )
        about |= sample.checked
    return replace(sensitivity, method=sensitivity.method | about)


def model_of_trial(sample: SampleOf, recipe: Recipe, options: Options, work: Path, learned: Learned) -> LayeredModel:
    """Make a master in a folder for work, and return its model."""
    tried = open_store(work / "tried")
    again = replace(options, overwrite=True, progress=no_progress, engine=None)
    convert(plan_quantize(sample.source, recipe, again, learned, out=tried), tried, again)
    return LayeredModel(open_exported(tried.path)[0], sample.described, remedy=REMEDY)


def block_sizes(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, int]:
    """Return the weights that a recipe quantizes, with how many of each share a norm.

    Raises RecipeError if there are none.
    """
    decisions = decide(recipe, checkpoint.tensors, text_model(checkpoint.config))
    pairs = zip(checkpoint.tensors, decisions, strict=True)
    sizes = {t.name: CODECS[decision.codec].stated_block_size for t, decision in pairs if decision.codec is not None}
    if not sizes:
        raise RecipeError(
            f"recipe {recipe.name!r}: expected a recipe that quantizes something here, found one that keeps everything"
        )
    return sizes


def measure(
    sample: SampleOf, work: Path, block_sizes: Mapping[str, int], *, threads: int, progress: Progress
) -> Sensitivity:
    """Run a checkpoint over a sample, and gradients back.

    work: a folder where what was measured stays
    block_sizes: of the weights that are measured, by name

    Raises SourceError, EvaluationError, OutputError, MissingDependencyError.
    """
    file, model = work / "sensitivity.safetensors", None
    if not file.exists():
        with slow_step("loading transformers"):
            model = LayeredModel(sample.checkpoint, sample.source, remedy=REMEDY)
    ids = sample.ids(work, threads)
    if model is not None:
        folder = work / PASSES
        folder.mkdir(exist_ok=True)
        check_space(folder, states_bytes(sample.checkpoint.config, ids.numel(), more=2), {})
        passes = LayerPasses(model=model, ids=ids, work=folder, seed=SEED, check=sample.check_source)
        alphas = _alphas(passes, block_sizes, progress)
        sample.check_source()
        if not alphas:
            raise SourceError(
                f"{sample.source}: the model uses none of the weights that the recipe quantizes as they are stored"
            )
        save_whole(file, {name: np.float64(alphas[name]).reshape(1) for name in block_sizes if name in alphas})
        shutil.rmtree(folder)
    stored = load_file(file)
    about = {"kind": "sample", "sample": sample.kind, "tokens": ids.numel(), "window": ids.shape[1]}
    alphas = {name: rounded(float(stored[name][0])) for name in block_sizes if name in stored}
    return Sensitivity(method=about | {"seed": SEED, "estimate": "fisher"}, alphas=alphas)


def _alphas(passes: LayerPasses, block_sizes: Mapping[str, int], progress: Progress) -> dict[str, float]:
    """Run all passes, those of a layer that are done already excepted; return the alpha of each tensor."""
    model, last = passes.model, passes.model.layers
    steps, done = 2 * (last + 1), 0

    def tell(what: str) -> None:
        nonlocal done
        done += 1
        progress(done, steps, what)

    def watch(layer: int) -> _SquaredGradients:
        names = {tensor.name for tensor in model.tensors_of(layer)}
        return _SquaredGradients(model, {name: size for name, size in block_sizes.items() if name in names})

    def keep(kind: str, layer: int, seen: _SquaredGradients) -> None:
        passes.save(kind, layer, {name: torch.tensor(total).numpy() for name, total in seen.sums.items()})

    passes.all_forward(lambda layer: tell(f"layer {layer} forward"))
    if not passes.file("head", last).exists():
        passes.head_backward(partial(watch, OUTSIDE), partial(keep, "head", last))
    tell("head backward")
    for layer in reversed(range(last)):
        if not passes.file(ALPHAS, layer).exists():
            passes.backward(layer, partial(watch, layer), partial(keep, ALPHAS, layer))
        passes.file("gradients", layer + 1).unlink(missing_ok=True)
        tell(f"layer {layer} backward")
    if not passes.file("embedding", last).exists():
        passes.embedding_backward(partial(watch, OUTSIDE), partial(keep, "embedding", last))
    tell("embedding backward")
    result: dict[str, float] = {}
    for kind, layer in (*((ALPHAS, layer) for layer in range(last)), ("head", last), ("embedding", last)):
        for name, total in passes.read(kind, layer).items():
            result[name] = result.get(name, 0.0) + 0.5 * float(total) / passes.ids.numel()
    return result
