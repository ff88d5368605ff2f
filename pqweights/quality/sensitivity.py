"""Sensitivity: how much a model diverges from itself for errors in each of its weights, from one pass back.

For small changes of a weight W, independent and of the mean square s_b^2 in each block b, the expected divergence per
token is half the sum of s_b^2 E[G^2] over all its elements, where G are the gradients of the loss with labels that are
drawn from the model's own predictions: the diagonal of the Fisher information (Amari, Neural Computation 10, 1998). The
change of a block is taken as relative to the size of that block, which is how the codecs here err. So alpha, the
divergence for a relative squared error of 1, is half the sum of the squared gradients, each with the mean square of its
block. It agrees with what noise in the weights does (docs/fit.md), which takes four runs of the model for each group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pqweights.checkpoint.writer import check_free
from pqweights.common.threads import Progress, slow_step
from pqweights.errors import SourceError
from pqweights.planning.calibration import states_bytes
from pqweights.planning.plan import TensorPlan, coder_of
from pqweights.planning.recipe import Recipe
from pqweights.planning.sensitivity_file import Measured, Sensitivity, read_sensitivity, write_sensitivity
from pqweights.quality.layer_passes import LayerPasses
from pqweights.quality.layered import OUTSIDE, LayeredModel
from pqweights.quality.options import SamplingOptions
from pqweights.quality.preparation import plan_original
from pqweights.quality.sample import SEED, SampleOf
from pqweights.quality.work_folder import check_space, folder_beside_file, worked_on_in
from pqweights.rewrite.task import usable_cores

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


def measure_sensitivity(
    source: Path,
    recipe: Recipe,
    options: SamplingOptions = SamplingOptions(),
    *,
    out: Path,
    progress: Progress = lambda done, total, name: None,
) -> Sensitivity:
    """Run a checkpoint over a sample, and gradients back, for the weights that a recipe quantizes.

    out: the file for the sensitivities

    Raises SourceError, RecipeError, EvaluationError, OutputError, MissingDependencyError.
    """
    with slow_step("loading transformers"):
        checkpoint, planned = plan_original(source, recipe)
        check_free(out, options.overwrite, kind="sensitivities", read=read_sensitivity)
        sample = SampleOf(source=source, checkpoint=checkpoint, text=str(options.text), tokens=options.tokens)
        model = LayeredModel(checkpoint, source, remedy="fit it with `sensitivity` heuristic")
    threads = options.threads or usable_cores()
    block_sizes = {tensor.name: coder_of(tensor).block_size for tensor in planned}
    key = hashlib.sha256(json.dumps([*sample.stated, block_sizes]).encode()).hexdigest()
    folder, is_same = folder_beside_file(out), sample.contents.is_same
    with worked_on_in(folder, out, key, threads, is_same) as work:
        ids = sample.ids(work, threads)
        check_space(work, states_bytes(checkpoint.config, ids.numel(), more=2), {})
        passes = LayerPasses(model=model, ids=ids, work=work, seed=SEED, check=sample.check_source)
        alphas = _alphas(passes, block_sizes, progress)
        sample.check_source()
        if not alphas:
            raise SourceError(f"{source}: the model uses none of the weights that the recipe quantizes as they are")
        result = Sensitivity(
            checkpoint=checkpoint.fingerprint(), method=_method(sample, ids), groups=_measured(planned, alphas)
        )
        write_sensitivity(out, result)
    return result


def _measured(planned: Sequence[TensorPlan], alphas: Mapping[str, float]) -> tuple[Measured, ...]:
    known = (tensor.name for tensor in planned if tensor.name in alphas)
    return tuple(Measured(name=name.removesuffix(".weight"), weights=(name,), alpha=alphas[name]) for name in known)


def _method(sample: SampleOf, ids: Tensor) -> dict[str, Any]:
    """Return how sensitivities were measured, as JSON."""
    about = {"kind": "sample", "sample": sample.digest, "tokens": ids.numel(), "window": ids.shape[1]}
    return about | {"seed": SEED, "estimate": "fisher"}


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
