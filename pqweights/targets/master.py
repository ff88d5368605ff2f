"""The target `master`: the plan of packed codes and norms for a source checkpoint, behind `quantize`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pqweights.checkpoint.config import model_facts
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint, proven
from pqweights.common.options import Options
from pqweights.convert.jobs import CopyJob, EncodeJob, Job
from pqweights.convert.manifest import Manifest
from pqweights.convert.master_config import master_config
from pqweights.convert.plan import MASTER, Plan
from pqweights.convert.ready import ReadyWeights
from pqweights.convert.scales import AwqScales
from pqweights.errors import OutputError, SourceError
from pqweights.formats import get_codec
from pqweights.formats.columns import TrellisColumns
from pqweights.formats.trellis import Trellis
from pqweights.planning.decisions import open_planned, rate_planner
from pqweights.planning.fit import Fit, fit
from pqweights.planning.layout import DEFAULT_MAX_SHARD_BYTES, KEEP, QUANTIZE, TensorPlan
from pqweights.planning.recipe import Recipe
from pqweights.planning.sensitivity import Sensitivity
from pqweights.storage import Store
from pqweights.storage.sources import place_apart
from pqweights.targets.lossless import plan_lossless


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What was learned of a source by running it.

    ready: the weights whose codes a calibration found
    finished: the manifest of a result that has such codes: what finds that there is nothing to do
    awq: scales for input channels
    sensitivity: how much the loss rises with errors, by which bit widths are chosen for a size
    """

    ready: ReadyWeights | None = None
    finished: Manifest | None = None
    awq: AwqScales | None = None
    sensitivity: Sensitivity | None = None


def plan_quantize(
    source: str | Path,
    recipe: Recipe,
    options: Options = Options(),
    learned: Learned = Learned(),
    *,
    out: Store | None = None,
) -> Plan:
    """Open a source, and decide what quantizing it does: from its headers alone, but for `lossless`.

    source: a folder or a file; a string may also be a repository on the Hub, whose files are fetched during the run,
        or an address in object storage
    recipe: which codec encodes which tensor
    learned: what was learned of the source; without scales, all matrices are planned with them if `awq` asks for some
    out: where the result is made; all values that decide are then read, as what is done with them cannot be undone

    Raises SourceError, RecipeError, OptionError or HubError; OutputError for an output that overlaps the source.
    """
    checkpoint = open_planned(source, options)
    if out is not None:
        checkpoint = proven(checkpoint, options.progress)
    if checkpoint.is_master:
        raise SourceError("the source is already a pqweights master; give the original, or export it to BF16 first")
    model: dict[str, Any] = {}
    if out is not None:
        place_apart(source, checkpoint, out)
        model = model_facts(checkpoint.storage)
    if options.lossless:
        return replace(plan_lossless(checkpoint, _max_shard_bytes(options), options), model=model)
    ready, awq = learned.ready, learned.awq
    tensors, fitted = _planned(checkpoint, recipe, options, learned)
    reads = {} if awq is None or awq.files is None else {"scales": awq.files}
    reads |= {} if ready is None else {"calibrated": ready.files}
    return Plan(
        kind=MASTER,
        made_by={"recipe": recipe.to_json(), **_about(learned, fitted)},
        checkpoint=checkpoint,
        tensors=tuple(tensors),
        encode=partial(encode, effort=recipe.effort, awq=awq, ready=ready),
        configs={CONFIG_FILE: master_config},
        max_shard_bytes=_max_shard_bytes(options),
        reads=reads,
        strict=options.strict,
        warnings=() if ready is None else ready.warnings,
        fit=fitted,
        learned={} if awq is None else {"awq": {**awq.about, "weights": awq.reports}},
        model=model,
    )


def _planned(
    checkpoint: Checkpoint, recipe: Recipe, options: Options, learned: Learned
) -> tuple[list[TensorPlan], Fit | None]:
    """Plan the tensors of a checkpoint, and say how bit widths were chosen, if that holds for what was learned."""
    # A size leaves room for scales of all matrices: the search is for the widths that are chosen.
    matrices = frozenset(tensor.name for tensor in checkpoint.tensors if len(tensor.shape) in (2, 3))
    planner = rate_planner(checkpoint, recipe, frozenset() if options.awq is None else matrices)
    goal, ready, fitted = recipe.goal, learned.ready, None
    if goal is not None and not (goal.divergence is not None and Trellis.codec in recipe.codecs):
        most, known = _max_shard_bytes(options), learned.sensitivity
        fitted = fit(checkpoint, goal, sensitivity=known, planner=planner, max_shard_bytes=most)
    elif goal is not None and options.calibrate is None:
        goal.check_measured(None)
    if learned.awq is not None:
        planner = rate_planner(checkpoint, recipe, learned.awq.scaled)
    tensors = planner.planned({} if fitted is None else fitted.rates)
    if ready is not None:
        if goal is not None and goal.divergence is not None:  # others take as many bits as these
            free = [of.name for of in tensors if of.codec == Trellis.codec and of.name in planner.free]
            tensors = planner.planned(dict.fromkeys(free, ready.bits_per_weight))
        return ready.planned(tensors), None
    if learned.finished is not None:
        coded = {of.name: of for of in learned.finished.tensors if of.action == QUANTIZE}
        return [coded.get(tensor.name, tensor) for tensor in tensors], None
    return tensors, fitted


def _max_shard_bytes(options: Options) -> int:
    return options.max_shard_size or DEFAULT_MAX_SHARD_BYTES


def _about(learned: Learned, fitted: Fit | None) -> dict[str, Any]:
    """Return what the manifest states of what was learned, and of a fit."""
    stated = {} if learned.ready is None else {"calibrated": learned.ready.describe()}
    stated |= {} if learned.finished is None else {"calibrated": learned.finished.made_by["calibrated"]}
    stated |= {} if learned.awq is None else {"awq": dict(learned.awq.about)}
    return stated | ({} if fitted is None else {"fit": fitted.describe()})


def encode(
    planned: TensorPlan,
    tensor: LogicalTensor,
    *,
    effort: int | None,
    awq: AwqScales | None,
    ready: ReadyWeights | None,
) -> Job:
    """Return the pass that encodes a weight, stores its ready codes, or copies a tensor that is kept."""
    if ready is not None and planned.name in ready.weights:
        return ready.job(planned)
    if planned.codec == TrellisColumns.codec:
        raise OutputError(f"tensor {planned.name!r}: the finished result was removed; run the same command again")
    if planned.action == KEEP:
        return CopyJob(planned, tensor)
    scales = awq.read(planned.name) if awq is not None and planned.is_scaled else None
    assert planned.codec is not None
    return EncodeJob(planned, tensor, awq=scales, effort=effort if get_codec(planned.codec).efforts else None)
