"""Quantizing: the transform that turns a source checkpoint into a master."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pqweights.buffers import BufferPool
from pqweights.checkpoint.config import edited_config, guarded_config, model_dtype
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.master import Encoding, encoded_specs, quantization_config
from pqweights.checkpoint.model_card import model_facts
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.codecs import get_codec, nearest_rate
from pqweights.errors import OutputError, RecipeError, SourceError
from pqweights.hub.sources import Access, open_source
from pqweights.hub.storage import HubStorage
from pqweights.planning.awq_file import AwqScales, open_awq
from pqweights.planning.fit import Fit, Rates, fit
from pqweights.planning.plan import (
    DEFAULT_MAX_SHARD_BYTES,
    DEFAULT_METADATA,
    KEEP,
    QUANTIZE,
    Plan,
    TensorPlan,
    plan_shards,
)
from pqweights.planning.recipe import Decision, Recipe, SizeTarget, decide, is_smaller
from pqweights.planning.sensitivity_file import HEURISTIC, Sensitivity, read_sensitivity
from pqweights.rewrite.driver import Lineage, RewriteReport, RewriteTask, RunOptions, make_plan, rewrite
from pqweights.rewrite.encode_job import EncodeJob, WeightToEncode
from pqweights.rewrite.jobs import CopyJob, Job
from pqweights.rewrite.manifest import TensorRecord, coder_of, exceeds


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """How a source is opened and quantized; see also RunOptions.

    access: to a repository on the Hub. low_disk: delete its files once what was made of them is on the disk. allow_pickle: read
    pickled weights, too. awq: a file that `calibrate` wrote. awq_any_codec: take its scales although they were searched for
    another codec or rate. strict: refuse a weight whose error exceeds the promise even when it was rescued.
    """

    access: Access = Access()
    low_disk: bool = False
    allow_pickle: bool = False
    awq: Path | None = None
    awq_any_codec: bool = False
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    strict: bool = False


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """The transform. See transform.Transform.

    strict: see QuantizeOptions. awq: scales for input channels. fit: the rates of a recipe with a target.
    """

    recipe: Recipe
    strict: bool = False
    awq: AwqScales | None = None
    fit: Fit | None = None
    kind: str = "master"

    def describe(self) -> dict[str, Any]:
        """See Transform."""
        awq = {} if self.awq is None else {"awq": self.awq.describe()}
        return {"recipe": self.recipe.to_json()} | awq | ({} if self.fit is None else {"fit": self.fit.describe()})

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """See Transform; refuses a master as source, and scales that are not for this checkpoint."""
        decisions = decide(self.recipe, checkpoint.tensors)
        result = self.plan_with(checkpoint, decisions, {} if self.fit is None else self.fit.rates)
        if self.awq is not None:
            self.awq.check(checkpoint, result)
        return result

    def plan_with(self, checkpoint: Checkpoint, decisions: Sequence[Decision], rates: Rates) -> list[TensorPlan]:
        """The plan by the recipe's decisions, but for these rates, by name of the weight; None keeps it."""
        if checkpoint.is_master:
            raise SourceError("the source is already a pqweights master; give the original, or export it to BF16 first")
        return [
            self._planned(tensor, decision, rates)
            for tensor, decision in zip(checkpoint.tensors, decisions, strict=True)
        ]

    def _planned(self, tensor: LogicalTensor, decision: Decision, rates: Rates) -> TensorPlan:
        name, codec, bits, reason = tensor.name, decision.codec, decision.bits, decision.reason
        if name in rates and decision.free:
            bits, reason = rates[name], f"{reason}; to keep {self.recipe.target}"
            # The rate of a group; codecs that share one may have other rates.
            bits = None if bits is None or codec is None else nearest_rate(codec, bits)
            if bits is None or not is_smaller(tensor, codec, bits):
                codec = bits = None
        if codec is not None and bits is not None:
            scaled = self.awq is not None and name in self.awq.searched
            stored = encoded_specs(name, tensor.shape, get_codec(codec).coder(bits), scaled)
            reason += ", input channels scaled" if scaled else ""
        else:
            stored = (TensorSpec(name, tensor.plain_dtype, tensor.shape),)
        return TensorPlan(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            role=decision.role,
            action=KEEP if codec is None else QUANTIZE,
            codec=codec,
            bits=bits,
            reason=reason,
            stored=stored,
        )

    @property
    def metadata(self) -> dict[str, str]:
        """See Transform."""
        return DEFAULT_METADATA

    @property
    def left_out(self) -> dict[str, str]:
        """See Transform; nothing."""
        return {}

    @property
    def also_reads(self) -> dict[str, Checkpoint]:
        """See Transform: the file of the scales."""
        return {} if self.awq is None else {"--awq": self.awq.file}

    def job(self, planned: TensorPlan, tensor: LogicalTensor, buffers: BufferPool) -> Job:
        """See Transform."""
        if planned.action == KEEP:
            return CopyJob(planned, tensor, buffers)
        awq = self.awq.read(planned.name) if self.awq is not None and planned.is_scaled else None
        return EncodeJob(WeightToEncode(planned=planned, tensor=tensor, awq=awq, buffers=buffers))

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """See Transform."""
        if self.strict and exceeds(planned, record):
            raise SourceError(
                f"tensor {planned.name!r}: --strict: relative error {record.relative_mse} at {planned.bits} bits exceeds what "
                "the codec promises, also with its rescue; keep it with a rule, or give it more bits"
            )

    def config(
        self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
    ) -> dict[str, Any]:
        """See Transform."""
        dtype = model_dtype(checkpoint.config, checkpoint.tensors)
        quantization = quantization_config(encodings(tensors, records), [t.name for t in tensors if t.action == KEEP])
        return guarded_config(edited_config(checkpoint.config, dtype, dtype, None), quantization)


def encodings(tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]) -> list[Encoding]:
    """How each quantized tensor of a finished plan is stored."""
    return [
        Encoding(
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            coder=coder_of(tensor),
            state=record.state or {},
        )
        for tensor, record in zip(tensors, records, strict=True)
        if tensor.action == QUANTIZE
    ]


def plan_quantize(
    source: str | Path, recipe: Recipe, options: QuantizeOptions = QuantizeOptions()
) -> tuple[Checkpoint, Quantize, Plan]:
    """Open a source and decide what quantizing it would do, from the headers alone.

    source: see quantize. Raises SourceError, HubError, RecipeError.
    """
    checkpoint = open_source(source, options.access, low_disk=options.low_disk, allow_pickle=options.allow_pickle)
    awq = None if options.awq is None else open_awq(options.awq, options.awq_any_codec)
    transform = Quantize(recipe=recipe, strict=options.strict, awq=awq)
    if recipe.target is not None:
        transform = replace(transform, fit=_fit(checkpoint, transform, recipe.target, options.max_shard_bytes))
    return checkpoint, transform, make_plan(checkpoint, transform, options.max_shard_bytes)


def _fit(checkpoint: Checkpoint, transform: Quantize, target: SizeTarget, max_shard_bytes: int) -> Fit:
    """The rates of a recipe with a target.

    Raises SourceError for sensitivities of another checkpoint, RecipeError for a target that cannot be kept.
    """
    if transform.awq is not None and not transform.awq.any_codec:
        raise RecipeError(
            f"--awq and a target ({target}): the widths are chosen, so scales that were searched for one width are taken for "
            "others: pass --awq-any-codec, too"
        )
    decisions = decide(transform.recipe, checkpoint.tensors)

    def file_bytes(tensors: Sequence[TensorPlan]) -> int:
        return sum(shard.file_bytes for shard in plan_shards(tensors, max_shard_bytes, transform.metadata))

    def planned(rates: Rates) -> list[TensorPlan]:
        return transform.plan_with(checkpoint, decisions, rates)

    pairs = zip(checkpoint.tensors, decisions, strict=True)
    return fit(
        checkpoint,
        target,
        sensitivity=_sensitivity(checkpoint, transform.recipe),
        planned=planned,
        file_bytes=file_bytes,
        free=[tensor.name for tensor, decision in pairs if decision.free and decision.codec is not None],
    )


def _sensitivity(checkpoint: Checkpoint, recipe: Recipe) -> Sensitivity | None:
    """Those that the recipe names; None for the rule of thumb.

    Raises SourceError for those of another checkpoint.
    """
    if recipe.sensitivity in (None, HEURISTIC):
        return None
    assert recipe.sensitivity is not None
    sensitivity = read_sensitivity(Path(recipe.sensitivity))
    found = checkpoint.fingerprint()
    if sensitivity.checkpoint != found:
        raise SourceError(
            f"{recipe.sensitivity}: expected sensitivities of this checkpoint (fingerprint {found[:12]}), found those of "
            f"another ({sensitivity.checkpoint[:12]}): measure them with pqweights sensitivity"
        )
    return sensitivity


def quantize(
    source: str | Path,
    out: Path,
    recipe: Recipe,
    *,
    options: QuantizeOptions = QuantizeOptions(),
    run: RunOptions = RunOptions(),
) -> RewriteReport:
    """Turn a checkpoint into a master in the folder `out`, continuing an interrupted run of the same call.

    source: a folder or file; a text may also be a repository on the Hub, whose files are fetched while the work goes on.
    Raises SourceError, RecipeError, OutputError, DeviceError, HubError.
    """
    checkpoint, transform, plan = plan_quantize(source, recipe, options)
    if isinstance(checkpoint.storage, HubStorage):
        if Path(source) == out:
            raise OutputError(
                f"{out}: expected another folder than one called like the repository, which it would be taken for"
            )
        checkpoint.storage.check_room(checkpoint.weight_files)
    task = RewriteTask(
        checkpoint=checkpoint,
        source=None if checkpoint.storage.origin else Path(source),
        transform=transform,
        plan=plan,
        out=out,
        lineage=Lineage(model_facts(checkpoint.storage)),
    )
    return rewrite(task, run)
