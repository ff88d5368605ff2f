"""The transform behind every integer target: weights to codes, scales and offsets per group, measured and written.

What is rounded, how, and where each number goes is the target's decision (integers.py). Warnings of the sizes of a
result follow from these decisions. docs/exports.md has the rules, and what the errors mean.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pqweights.checkpoint.config import CONFIG_DTYPES, model_dtype
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.models import text_model
from pqweights.checkpoint.models.description import ModelDescription
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.threads import Progress
from pqweights.common.units import counted, size_text
from pqweights.exports.bf16 import is_encoded, plain_plan, role_of, stored_dtype
from pqweights.exports.carried import carried_unit
from pqweights.exports.compensation import CompensatedJob, Compensation, WeightedJob
from pqweights.exports.formats import BlockRule, Rounding, Stays
from pqweights.exports.integers import IntegerJob, IntegerTarget, Outline
from pqweights.exports.linear import FUSED_WITH_KEPT
from pqweights.exports.target import GPTQ, IMPORTANCE
from pqweights.exports.units import UnitJob, fused_weights, of_unit, with_unit
from pqweights.planning.plan import INTEGER, Safetensors, TensorPlan, stored_bytes
from pqweights.rewrite.jobs import CopyJob, Job
from pqweights.rewrite.records import TensorRecord, master_part, mean_error
from pqweights.rewrite.transform import EXPORT, Account, Notes, Output, TransformInputs

# Above this share of the error, the master decides how good an export is, and no longer its format.
MOST_BY_MASTER = 0.5
PLAIN_BITS = 16
# The next tensor is begun while the last chunks of one are computed.
TENSORS_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class IntegerExport:
    """The transform of an integer target, made by original.integer_export.

    target: the format with its options
    outline: what the target makes of the model
    original: the checkpoint whose values are rounded in place of the master's, if it is given
    master: with an original, the master's tensors by name, to measure what going through the master would have cost
    master_errors: without an original, relative errors of the master's weights by name, where they are known and add up
        with those of rounding
    compensation: what is known of the inputs, if rounding is compensated by it
    """

    target: IntegerTarget
    outline: Outline
    original: Checkpoint | None = None
    master: Mapping[str, LogicalTensor] = field(default_factory=dict)
    master_errors: Mapping[str, float] = field(default_factory=dict)
    compensation: Compensation | None = None

    @functools.cached_property
    def account(self) -> Account:
        """The target, the original, and a digest of the errors; once, because a fingerprint reads every tensor."""
        made_by = self.target.describe()
        if self.original is not None:
            made_by["original_fingerprint"] = self.original.fingerprint()
        errors = json.dumps(self.master_errors, sort_keys=True).encode() if self.master_errors else None
        made_by["master_errors"] = None if errors is None else hashlib.sha256(errors).hexdigest()
        if self.compensation is not None:
            in_blocks = any(isinstance(rounding.rule, BlockRule) for _, rounding in self.outline.rounded)
            made_by["rounding"] = IMPORTANCE if in_blocks else GPTQ
            made_by["calibration"] = self.compensation.inputs.identity
        return Account(EXPORT, made_by)

    @functools.cached_property
    def fused(self) -> dict[str, tuple[LogicalTensor, ...]]:
        """For each weight whose scales have a unit, the weights that share it, by name."""
        return fused_weights(self.outline.tensors, self.outline.decisions)

    @property
    def inputs(self) -> TransformInputs:
        """The original, if it is read."""
        checkpoints = {} if self.original is None else {"--source": self.original}
        held = 0 if self.compensation is None else self.compensation.memory_bytes
        by_columns = sorted(rounding.column_bytes(tensor.shape) for tensor, rounding in self.outline.rounded)
        spooled = sum(by_columns[-TENSORS_AT_ONCE:])
        return TransformInputs(checkpoints=checkpoints, memory_bytes=held, disk_bytes=spooled)

    @property
    def output(self) -> Output:
        """What the outline says."""
        outline, config = self.outline, self.outline.config
        return Output(
            config=None if config is None else lambda checkpoint, tensors, records: config,
            container=outline.container or (lambda tensors, most: Safetensors(outline.metadata)),
            small_files=outline.small_files or (lambda shards: {}),
            left_out=outline.left_out,
        )

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """Plan each tensor by the outline's decision."""
        model, known = model_dtype(checkpoint.config, checkpoint.tensors), text_model(checkpoint.config)
        return [self._planned(tensor, known, model) for tensor in checkpoint.tensors]

    def prepare(self, progress: Progress) -> None:
        """Learn the inputs of weights, if rounding is compensated by them."""
        if self.compensation is not None:
            self.compensation.inputs.prepare(progress)

    def _planned(self, tensor: LogicalTensor, known: ModelDescription, model: str) -> TensorPlan:
        decision = self.outline.decisions.get(tensor.name)
        if not isinstance(decision, Rounding):
            reason, forced = (None, None) if decision is None else (decision.reason, decision.dtype)
            dtype = self.outline.plain_dtype
            return plain_plan(tensor, known, model=model, dtype=dtype, reason=reason, forced=forced)
        specs = decision.specs(tensor.name, tensor.shape)
        return TensorPlan(
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            role=role_of(tensor, known),
            action=INTEGER,
            codec=decision.codec,
            bits=decision.rule.bits,
            reason=decision.reason or f"{decision.rule.name} rule",
            bytes=stored_bytes(specs),
            stored=specs,
        )

    def job(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """Return the job that rounds a weight or copies another tensor."""
        decision = self.outline.decisions.get(tensor.name)
        if not isinstance(decision, Rounding):
            return CopyJob(planned, tensor)
        if decision.unit_of is None:
            return self._rounding_job(planned, tensor, decision)
        unit = carried_unit(self.fused[tensor.name])
        if unit is not None:
            return self._rounding_job(planned, tensor, of_unit(decision, unit))
        return UnitJob(
            self.fused[tensor.name],
            lambda largest: self._rounding_job(planned, tensor, with_unit(decision, largest)),
        )

    def _rounding_job(self, planned: TensorPlan, tensor: LogicalTensor, decision: Rounding) -> Job:
        error, is_original = self.master_errors.get(tensor.name), self.original is not None
        if self.compensation is None:
            master = self.master.get(tensor.name) if self.target.compares_master else None
            return IntegerJob(planned, tensor, decision, master=master, master_error=error, is_original=is_original)
        # The master's values are not rounded for comparison here: that would take as long again.
        job = WeightedJob if isinstance(decision.rule, BlockRule) else CompensatedJob
        return job(
            planned, tensor, decision, master_error=error, is_original=is_original, compensation=self.compensation
        )

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """Accept every tensor."""

    def notes(self, records: Sequence[TensorRecord]) -> Notes:
        """Return what the target has to say, and that the error is for the most part the master's."""
        warnings = self.outline.warnings
        total, by_master = mean_error(records, "total_mse"), master_part(records)
        if total is not None and by_master is not None and by_master > MOST_BY_MASTER * total:
            warnings = (
                *warnings,
                f"the error of the master is {by_master / total:.0%} of the error against the original "
                f"({by_master:.6f} of {total:.6f}), and no format makes that smaller: --source ORIGINAL rounds the "
                "original's weights instead, and a master of more bits has less of it",
            )
        return Notes(warnings=warnings)


def remarks(outline: Outline, master: Checkpoint) -> tuple[str, ...]:
    """Return warnings of the sizes of a result."""
    return (*_experts_warnings(outline, text_model(master.config)), *_plain_warnings(outline, master))


def _experts_warnings(outline: Outline, model: ModelDescription) -> tuple[str, ...]:
    """Return a warning for each reason why experts that the master encodes stay plain, with their bytes."""
    by_reason: dict[str, list[LogicalTensor]] = {}
    for tensor in outline.tensors:
        decision = outline.decisions.get(tensor.name)
        if not isinstance(decision, Stays) or decision.dtype or decision.reason == FUSED_WITH_KEPT:
            continue  # of a type that was asked for, or said elsewhere
        if is_encoded(tensor) and role_of(tensor, model) == "expert":
            by_reason.setdefault(decision.reason, []).append(tensor)
    return tuple(
        f"experts stay in BF16: {counted(len(tensors), 'tensor')} of {sum(map(element_count, tensors))} weights, "
        f"{size_text(sum(2 * element_count(t) for t in tensors))} in place of "
        f"{size_text(sum(part.byte_count for t in tensors for part in t.parts))} in the master: {reason}; the targets "
        "gguf and mlx round the experts of the models that they know"
        for reason, tensors in by_reason.items()
    )


def _plain_warnings(outline: Outline, master: Checkpoint) -> tuple[str, ...]:
    """Return a warning if a result has more than half of the bits of BF16, and its integers have less.

    For integers of more bits the half way between the two counts.
    """
    integers = {tensor.name: rounding for tensor, rounding in outline.rounded}
    rounded = sum(element_count(tensor) for tensor, _ in outline.rounded)
    if not rounded:
        return ()
    integer_bytes = sum(stored_bytes(rounding.specs(t.name, t.shape)) for t, rounding in outline.rounded)
    weights = sum(element_count(t) for t in outline.tensors if t.plain_dtype in CONFIG_DTYPES)
    model = model_dtype(outline.config, outline.tensors)
    plain_bytes = sum(
        TensorSpec(tensor.name, stored_dtype(tensor, model=model, dtype=outline.plain_dtype), tensor.shape).byte_count
        for tensor in outline.tensors
        if tensor.name not in integers
    )
    total, bits_of_integers = integer_bytes + plain_bytes, 8 * integer_bytes / rounded
    bits = 8 * total / weights
    half = PLAIN_BITS / 2 if bits_of_integers < PLAIN_BITS / 2 else (bits_of_integers + PLAIN_BITS) / 2
    if bits <= half:
        return ()
    held = master.weight_file_bytes
    larger = f"; the master that it is made from is smaller ({size_text(held)})" if total > held else ""
    return (
        f"{bits:.3g} bits per parameter, more than half of the {PLAIN_BITS} of BF16, although integers take "
        f"{bits_of_integers:.3g}: of {size_text(total)}, {size_text(plain_bytes)} are weights that stay plain{larger}",
    )
