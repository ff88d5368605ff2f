"""Quantizing: a source checkpoint into a master, the folder of codes from which exports are made.

`quantize` opens a source, plans and rewrites it. `Quantize` is the transform that the rewrite applies to each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pqweights.checkpoint.config import model_facts
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.master import encoded_specs
from pqweights.checkpoint.models import text_model
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint, proven
from pqweights.codecs import get_codec, nearest_rate
from pqweights.common.threads import Progress
from pqweights.errors import OutputError, RecipeError, SourceError, StrictError
from pqweights.exports.possible import planned_master, possible_exports
from pqweights.planning.decisions import Chosen, Decision, RatePlanner, decide, is_smaller, without
from pqweights.planning.fit import Fit, fit
from pqweights.planning.options import QuantizeOptions
from pqweights.planning.plan import KEEP, QUANTIZE, Plan, TensorPlan, stored_bytes
from pqweights.planning.recipe import Recipe, SizeTarget
from pqweights.planning.scales_file import AwqScales, open_scales
from pqweights.planning.sensitivity_file import HEURISTIC, Sensitivity, read_sensitivity
from pqweights.rewrite.driver import make_plan, rewrite
from pqweights.rewrite.jobs import CopyJob, EncodeJob, Job
from pqweights.rewrite.lossless import Lossless, measure
from pqweights.rewrite.master_config import master_config
from pqweights.rewrite.ready import FinishedWeights, ReadyWeights
from pqweights.rewrite.records import TensorRecord, exceeds
from pqweights.rewrite.task import RewriteReport, RewriteTask, RunOptions
from pqweights.rewrite.transform import MASTER, Account, Notes, Output, TransformInputs
from pqweights.storage import Store, open_store
from pqweights.storage.addresses import RepositoryName, parse_location
from pqweights.storage.sources import open_source


def quantize(
    source: str | Path,
    out: str | Path | Store,
    recipe: Recipe,
    *,
    options: QuantizeOptions = QuantizeOptions(),
    run: RunOptions = RunOptions(),
    ready: ReadyWeights | FinishedWeights | None = None,
) -> RewriteReport:
    """Turn a checkpoint into a master in `out`, continuing an interrupted run of the same call.

    source: a folder or a file; a string may also be a repository on the Hub, whose files are fetched during the run,
        or an address in object storage
    out: a folder or an address in object storage, new, empty, or written by an earlier run
    recipe: which codec encodes which tensor
    ready: the weights whose codes a calibration of this source has found

    Raises SourceError, RecipeError, OutputError, HubError or StorageError.
    """
    store, location = open_store(out), parse_location(source)
    checkpoint, transform, plan = plan_quantize(source, recipe, options, ready, run=run, surely=True)
    if checkpoint.storage.origin is not None and str(Path(source)) == str(store):
        raise OutputError(
            f"{out}: expected a folder whose name is not that of the repository, or later commands would read the "
            "folder in its place; choose another folder"
        )
    task = RewriteTask(
        checkpoint=checkpoint,
        source=None if isinstance(location, RepositoryName) else location,
        transform=transform,
        plan=plan,
        out=store,
        model=model_facts(checkpoint.storage),
    )
    report = rewrite(task, run)
    return replace(report, exports=possible_exports(planned_master(checkpoint, plan.tensors)))


def plan_quantize(
    source: str | Path,
    recipe: Recipe,
    options: QuantizeOptions = QuantizeOptions(),
    ready: ReadyWeights | FinishedWeights | None = None,
    *,
    run: RunOptions = RunOptions(),
    surely: bool = False,
) -> tuple[Checkpoint, Quantize | Lossless, Plan]:
    """Open a source, and decide what quantizing it would do: from its headers alone, but for `lossless`.

    run: with how many threads to find out how small weights become without loss, and how to show progress
    surely: whether to read all values that decide, as what is done with them cannot be undone

    Raises SourceError, RecipeError, OptionError or HubError.
    """
    checkpoint = open_source(
        source,
        options.access,
        low_disk=options.low_disk,
        allow_pickle=options.allow_pickle,
        include=options.include_files,
    )
    if surely:
        checkpoint = proven(checkpoint, run.progress)
    if options.leave_out:
        checkpoint = without(checkpoint, options.leave_out)
    if options.lossless:
        refuse_master(checkpoint)
        checkpoint.storage.keep(checkpoint.weight_files, run.progress)
        lossless = Lossless(lengths=measure(checkpoint, run.threads, run.progress))
        return checkpoint, lossless, make_plan(checkpoint, lossless, options.max_shard_bytes)
    awq = None
    if options.awq is not None:
        awq = AwqScales(file=open_scales(Path(options.awq)), any_codec=options.awq_any_codec)
    transform = Quantize(recipe=recipe, strict=options.strict, awq=awq, ready=ready)
    if recipe.target is not None:
        chosen = _fitted(checkpoint, transform, recipe.target, max_shard_bytes=options.max_shard_bytes)
        transform = replace(transform, fit=chosen)
    return checkpoint, transform, make_plan(checkpoint, transform, options.max_shard_bytes)


def refuse_master(checkpoint: Checkpoint) -> None:
    """Raise SourceError for a checkpoint that is a master."""
    if checkpoint.is_master:
        raise SourceError("the source is already a pqweights master; give the original, or export it to BF16 first")


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """The transform from a source to a master.

    recipe: which codec encodes which tensor
    strict: see QuantizeOptions
    awq: scales for the input channels of some weights
    fit: the bit widths that were chosen for a recipe with a target; what it says of calibrated weights does not hold
    ready: the weights whose codes a calibration has found; the recipe decides on the others
    """

    recipe: Recipe
    strict: bool = False
    awq: AwqScales | None = None
    fit: Fit | None = None
    ready: ReadyWeights | FinishedWeights | None = None

    @property
    def account(self) -> Account:
        """The recipe, the scales, and how a size was fitted."""
        awq = {} if self.awq is None else {"awq": self.awq.describe()}
        fit = {} if self.fit is None or self.ready is not None else {"fit": self.fit.describe()}
        ready = {} if self.ready is None else {"calibrated": self.ready.describe()}
        return Account(MASTER, {"recipe": self.recipe.to_json()} | ready | awq | fit)

    @property
    def inputs(self) -> TransformInputs:
        """The files of the scales and of ready codes."""
        scales = {} if self.awq is None else {"--awq": self.awq.file.file}
        ready = {} if self.ready is None or self.ready.files is None else {"calibrated": self.ready.files}
        return TransformInputs(checkpoints=scales | ready)

    @property
    def output(self) -> Output:
        """Safetensors files, and a config.json with a quantization_config of ours."""
        return Output(config=master_config)

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """Decide what becomes of each tensor.

        Raises SourceError if the checkpoint is a master, or if the scales are for another checkpoint; RecipeError if
        the recipe names a tensor that is not there.
        """
        result = self.planner(checkpoint).planned({} if self.fit is None else self.fit.rates)
        if self.awq is not None:
            self.awq.check(checkpoint, result)
        if self.ready is not None:
            result = self.ready.planned(result)
        return result

    def planner(self, checkpoint: Checkpoint) -> RatePlanner:
        """Return what plans the tensors by the recipe's decisions, with any bit widths where the recipe gives none.

        Raises SourceError if the checkpoint is a master; RecipeError if the recipe names a tensor that is not there.
        """
        decisions = decide(self.recipe, checkpoint.tensors, text_model(checkpoint.config))
        refuse_master(checkpoint)
        return RatePlanner(
            tensors=checkpoint.tensors,
            decisions=decisions,
            scaled=frozenset() if self.awq is None else self.awq.file.searched.keys(),
            nameless=self._nameless,
        )

    def _nameless(self, tensor: LogicalTensor, decision: Decision, chosen: Chosen, scaled: bool) -> TensorPlan:
        """Return the plan of a tensor, and of all that differ from it in name alone, with an empty name.

        chosen: the rate that was chosen in place of the decision's, if any; a rate of None keeps the tensor
        scaled: whether its input channels are scaled if it is quantized
        """
        codec, bits, reason = decision.codec, decision.bits, decision.reason
        if chosen:
            (rate,), reason = chosen, f"{reason}; to keep {self.recipe.target}"
            # The rate of a group; codecs that share one may have other rates.
            bits = None if rate is None or codec is None else nearest_rate(codec, rate)
            if bits is None or not is_smaller(tensor, codec, bits):
                codec = bits = None
        if codec is not None and bits is not None:
            stored = encoded_specs("", tensor.shape, get_codec(codec).coder(bits), awq=scaled)
            reason += ", input channels scaled" if scaled else ""
        else:
            stored = (TensorSpec("", tensor.plain_dtype, tensor.shape),)
        return TensorPlan(
            name="",
            shape=tensor.shape,
            dtype=tensor.dtype,
            role=decision.role,
            action=KEEP if codec is None else QUANTIZE,
            codec=codec,
            bits=bits,
            reason=reason,
            bytes=stored_bytes(stored),
            stored=stored,
        )

    def prepare(self, progress: Progress) -> None:
        """Do nothing: scales and ready codes are read with their tensors."""

    def job(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """Return the job that encodes a weight, stores its ready codes, or copies a tensor that is kept."""
        if self.ready is not None and planned.name in self.ready.weights:
            return self.ready.job(planned)
        if planned.action == KEEP:
            return CopyJob(planned, tensor)
        awq = self.awq.read(planned.name) if self.awq is not None and planned.is_scaled else None
        assert planned.codec is not None
        effort = self.recipe.effort if get_codec(planned.codec).efforts else None
        return EncodeJob(planned, tensor, awq=awq, effort=effort)

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """Raise StrictError for a weight that exceeds what its codec promises, if the user asked to be strict."""
        if self.strict and exceeds(planned, record):
            raise StrictError(
                f"tensor {planned.name!r}: `strict`: relative error {record.relative_mse} at {planned.bits} bits "
                "exceeds what the codec promises, even with its rescue; keep the tensor with a rule, or give it more "
                "bits"
            )

    def notes(self, records: Sequence[TensorRecord]) -> Notes:
        """Return how a size was fitted if there was a target, and what the ready codes have to say."""
        document = {} if self.fit is None or self.ready is not None else {"fit": self.fit.to_json()}
        return Notes(warnings=() if self.ready is None else self.ready.warnings, document=document)


def _fitted(checkpoint: Checkpoint, transform: Quantize, target: SizeTarget, *, max_shard_bytes: int) -> Fit:
    """Choose the bit widths of a recipe with a target.

    Raises SourceError for sensitivities of another checkpoint, RecipeError for a target that cannot be met.
    """
    if transform.awq is not None and not transform.awq.any_codec:
        raise RecipeError(
            f"`awq` with a target ({target}): bit widths are chosen to meet it, so scales that were searched for one "
            "bit width would be used with others; pass `awq_any_codec` to allow that"
        )

    def file_bytes(tensors: Sequence[TensorPlan]) -> int:
        container = transform.output.container(tensors, max_shard_bytes)
        return sum(shard.file_bytes for shard in container.shards(tensors, max_shard_bytes))

    return fit(
        checkpoint,
        target,
        sensitivity=sensitivity_of(checkpoint, transform.recipe.sensitivity),
        planner=transform.planner(checkpoint),
        file_bytes=file_bytes,
    )


def sensitivity_of(checkpoint: Checkpoint, asked: str | None) -> Sensitivity | None:
    """Read the sensitivities of a file; None stands for the rule of thumb.

    Raises SourceError for sensitivities of another checkpoint.
    """
    if asked is None or asked == HEURISTIC:
        return None
    sensitivity = read_sensitivity(Path(asked))
    fingerprint = checkpoint.fingerprint()
    if sensitivity.checkpoint != fingerprint:
        raise SourceError(
            f"{asked}: expected sensitivities of this checkpoint (fingerprint {fingerprint[:12]}), found "
            f"those of another ({sensitivity.checkpoint[:12]}); measure this one with pqweights sensitivity"
        )
    return sensitivity
