"""From options to the codes of a calibrated master: what is calibrated, on which sample, and where it is worked on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pqweights.calibrate.calibrated import FEWEST_INPUTS, Encoded, LayerwiseCalibration
from pqweights.calibrate.calibrated_weights import CalibratedWeight
from pqweights.calibrate.divergence import LayerwiseDivergence
from pqweights.calibrate.layered import OUTSIDE, LayeredModel
from pqweights.calibrate.sample import SEED, SampleOf
from pqweights.calibrate.sensitivity import model_of_trial
from pqweights.calibrate.work_folder import (
    check_space,
    finished_manifest,
    folder_beside,
    stated_by_result,
    worked_on_in,
)
from pqweights.checkpoint.readers import element_count
from pqweights.common.options import BY_TENSOR, Options
from pqweights.common.strict_json import rounded
from pqweights.common.threads import Progress
from pqweights.convert.distributed.engine import local_files
from pqweights.convert.ready import ReadyWeights
from pqweights.formats.trellis import Trellis
from pqweights.planning.calibration import FEWEST_ROWS, wanted_bits, work_bytes
from pqweights.planning.recipe import Goal, Recipe
from pqweights.storage import Store
from pqweights.targets.master import Learned, plan_quantize

# Of the trellis, unless the effort says otherwise: beside the rest of a calibration 64 cost nothing.
STATES = 64
# A weight whose outputs have this share of their energy as error is nearly gone.
LOST = 0.3


@contextlib.contextmanager
def calibrated_codes(
    source: Path, out: Store, recipe: Recipe, options: Options, *, progress: Progress
) -> Iterator[tuple[Learned, Options]]:
    """Calibrate a checkpoint, and yield the codes; see `learned`.

    recipe: which weights are calibrated, those of the trellis, and about how many bits they take together
    """
    plan = plan_quantize(source, recipe, replace(options, revision=None))
    checkpoint = plan.checkpoint
    wanted = wanted_bits(recipe, plan.tensors)
    states = recipe.effort or STATES
    goal = recipe.goal or Goal()
    is_checked = goal.divergence is not None
    sample = SampleOf.of(source, checkpoint, str(options.calibrate), options, is_checked=is_checked)
    planned = [(tensor.name, tensor.bytes) for tensor in plan.tensors]
    stated = [*sample.stated, recipe.to_json(), planned, states, options.rate]
    key = hashlib.sha256(json.dumps(stated).encode()).hexdigest()
    if stated_by_result(out, "calibrated", key, overwrite=options.overwrite) is not None:
        sample.save_again(out, key, options.thread_count)
        yield Learned(finished=finished_manifest(out, overwrite=False)), options
        return
    model = LayeredModel(checkpoint, source, remedy="quantize it without `calibrate`")
    with worked_on_in(folder_beside(out), out, key, options.thread_count, sample.contents.is_same) as work:
        ids = sample.ids(work, options.thread_count)
        needed = work_bytes(checkpoint.config, ids.numel(), wanted)
        check_space(work, needed, {} if out.is_elsewhere else {out.work: plan.output_bytes})
        weights = _weights(model, wanted)
        calibration = LayerwiseCalibration(
            model=model,
            ids=ids,
            weights=weights,
            work=work,
            wanted_bits=wanted,
            states=states,
            at_most=goal != Goal(),
            most_divergence=goal.divergence,
            diverged=_divergence_of(model, ids, sample, recipe, options, work) if is_checked else None,
            by_tensor=options.rate == BY_TENSOR,
            threads=options.thread_count,
            seed=SEED,
            engine=options.engine,
            files=tuple(local_files(checkpoint.storage, checkpoint.weight_files)),
            progress=progress,
            check=sample.check_source,
        )
        encoded = calibration.encode()
        about = _about(sample, ids, states=states, rate=options.rate)
        if encoded.divergence is not None:
            about |= {"divergence": rounded(encoded.divergence), **sample.checked}
        ready = ReadyWeights.open(encoded.folder, about=about | {"identity": key})
        left = {tensor.name for tensor in plan.tensors if tensor.codec == Trellis.codec} - ready.weights.keys()
        sample.check_source()
        warnings = (*_missed(encoded, goal), *_warnings(left, wanted, weights, ready))
        pooled = _pooled(calibration.hardly_reached, ready)
        learned = Learned(ready=replace(ready, warnings=(*warnings, *pooled)))
        yield learned, replace(options, check=sample.check_source)


def _divergence_of(
    model: LayeredModel, ids: Tensor, sample: SampleOf, recipe: Recipe, options: Options, work: Path
) -> Callable[[Path], float]:
    """Return what measures the divergence of a master with the codes in a folder. ids: the sample"""
    divergence = LayerwiseDivergence(model, sample.unseen(work, ids))

    def measured(folder: Path) -> float:
        learned = Learned(ready=ReadyWeights.open(folder, about={}))
        return divergence.of(model_of_trial(sample, recipe, options, work, learned))

    return measured


def _about(sample: SampleOf, ids: Tensor, *, states: int, rate: str) -> dict[str, Any]:
    """Return what the manifest says of a calibration. ids: the tokens of the sample, [windows, tokens]"""
    return {
        "sample": sample.kind,
        "tokens": ids.numel(),
        "window": ids.shape[1],
        "seed": SEED,
        "states": states,
        "rate": rate,
        "sample_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
    }


def _warnings(
    left: AbstractSet[str],
    wanted: Mapping[str, float],
    weights: Mapping[int, Sequence[CalibratedWeight]],
    ready: ReadyWeights,
) -> tuple[str, ...]:
    """Return lines about the weights that a calibration did not encode, and those whose outputs it mostly lost.

    left: those of the trellis that it did not encode
    wanted: those that it was to encode
    weights: those that the model has as they are, by layer
    """
    lines = []
    outside = left & {weight.name for weight in weights.get(OUTSIDE, ())}
    inside = left & {weight.name for layer, own in weights.items() if layer != OUTSIDE for weight in own}
    for names, why in (
        (left - wanted.keys(), f"it is not a matrix of {FEWEST_ROWS} rows or more, or a stack of such"),
        (left & wanted.keys() - outside - inside, "the model has it in another form than the checkpoint"),
        (outside, "no linear layer multiplies by it"),
        (inside, f"fewer than {FEWEST_INPUTS} tokens of the sample reached it in a linear layer, or it has no effect"),
    ):
        if names:
            lines.append(
                f"tensor {min(names)!r}{_more(names)}: not calibrated, because {why}; encoded without calibration"
            )
    lost = {name for name, weight in ready.weights.items() if (weight.weighed_mse or 0) > LOST}
    if lost:
        lines.append(
            f"tensor {min(lost)!r}{_more(lost)}: more than {LOST:.0%} of its output energy is lost, because the "
            "calibration gave its bits to weights that matter more; use more bits"
        )
    return tuple(lines)


def _pooled(experts: Mapping[str, int], ready: ReadyWeights) -> tuple[str, ...]:
    """Return a line about experts that hardly any token reached. experts: how many of each stack"""
    if not experts:
        return ()
    name, count = min(experts), experts[min(experts)]
    return (
        f"tensor {name!r}{_more(experts.keys())}: fewer than {FEWEST_INPUTS} tokens of the sample reached {count} of "
        f"its {ready.weights[name].shape[0]} experts, or these have no effect; they were encoded for the inputs of all",
    )


def _missed(encoded: Encoded, goal: Goal) -> tuple[str, ...]:
    """Return a line about a size, or a divergence, that was missed."""
    if encoded.is_met:
        return ()
    if encoded.divergence is not None:
        found = f"a divergence of {encoded.divergence:.3g}, where at most {goal.divergence:g} was wanted"
        return (f"`max_kl`: the calibrated weights have {found}, after the last attempt; ask for another one",)
    taken, wanted = (round(bits / 8) for bits in (encoded.bits, encoded.wanted_bits))
    return (
        f"`calibrate`: the calibrated weights take {taken} bytes after the last attempt, {taken / wanted:.1%} of the "
        f"{wanted} that they were to take; ask for other bits, or another size",
    )


def _more(names: AbstractSet[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _weights(model: LayeredModel, wanted: dict[str, float]) -> dict[int, list[CalibratedWeight]]:
    """Return which matrices are calibrated, by layer, those of a tensor one after the other."""
    result: dict[int, list[CalibratedWeight]] = {}
    for layer in (OUTSIDE, *range(model.layers)):
        own = model.parameters_of(layer)
        for tensor in model.tensors_of(layer):
            places, is_stack = model.places_of(tensor.name), len(tensor.shape) > 2
            if tensor.name not in wanted or not places or places[0].matrix.parameter not in own:
                continue
            if is_stack and element_count(tensor) != own[places[0].matrix.parameter].numel():
                continue  # a part of what the model has
            transposed = model.matrices_of(tensor.name).transposed
            result.setdefault(layer, []).extend(
                CalibratedWeight(
                    name=tensor.name, place=place, number=number if is_stack else None, transposed=transposed
                )
                for number, place in enumerate(places)
            )
    return result
