"""Which export of a model a memory has room for: what each format of each target takes, and what it should cost.

Everything is decided from the configuration and the names and shapes of tensors. Weights are counted by the targets
themselves; docs/memory.md has the formulas of the rest. The expected rise of the loss is that of planning/fit.py, with
the relative error that each format has on Gaussian weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pqweights.checkpoint.config import model_dtype, quantization_settings
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.readers import element_count
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import sources_of
from pqweights.errors import ExportError, MissingDependencyError, SourceError
from pqweights.exports import get_target
from pqweights.exports.bf16 import is_encoded, stored_dtype
from pqweights.exports.formats import Rounding, Rule
from pqweights.exports.integers import Outline
from pqweights.exports.possible import as_in_master
from pqweights.exports.target import COMPRESSED_TENSORS, TORCHAO, ExportTarget, PlannedMaster
from pqweights.options import LLAMA_CPP, MLX, TRANSFORMERS, VLLM, MemoryOptions
from pqweights.planning.context_memory import DEFAULT_CONTEXT, context_memory, text_sizes
from pqweights.planning.plan import QUANTIZE, coder_of, stored_bytes
from pqweights.planning.runtime_memory import RUNTIME_MEMORY
from pqweights.planning.sensitivity_file import Sensitivity, alphas_for, groups_of
from pqweights.rewrite.task import PossibleExport

# The runtimes for which exports are proposed, by what a target names as its own. transformers decodes the exports of
# compressed-tensors whole, so they save nothing there.
LOADED_BY = {
    TRANSFORMERS: (TRANSFORMERS, VLLM, MLX), TORCHAO: (TRANSFORMERS,), COMPRESSED_TENSORS: (VLLM,), MLX: (MLX,),
    LLAMA_CPP: (LLAMA_CPP,),
}  # fmt: skip
# What is no export: the model as it is, and its master, which transformers keeps packed.
SOURCE, MASTER = "source", "master"
SAMPLE_WEIGHTS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A way to run a model.

    runtime: what runs it, of RUNTIMES
    target: what is exported for it, a key of EXPORTS, or SOURCE or MASTER
    format: what a list calls the format
    options: those of ExportOptions that make it
    takes_original: whether it is made of the weights of the original, by `source`
    bits_per_parameter: of all parameters of the model
    weight_bytes, context_bytes, overhead_bytes: what weights, the context and the runtime take
    memory_bytes: the memory that is needed for it
    fits: whether there is so much
    expected_rise: of the loss, as in planning/fit.py
    is_exact: whether the bytes of weights are those of the export, or estimated because a package is missing
    """

    runtime: str
    target: str
    format: str
    options: dict[str, Any]
    takes_original: bool
    bits_per_parameter: float
    weight_bytes: int
    context_bytes: int
    overhead_bytes: int
    memory_bytes: int
    fits: bool
    expected_rise: float
    is_exact: bool

    @property
    def steps(self) -> tuple[str, ...]:
        """The commands that make it, in order."""
        return {SOURCE: (), MASTER: ("quantize",)}.get(self.target, ("quantize", "export"))


@dataclass(frozen=True, kw_only=True)
class MemoryAdvice:
    """What a memory has room for.

    memory_bytes, context: what was asked for; the context may be the default
    proposals: all ways to run the model, the best expected quality first
    notes: what was not counted, and what is not proposed, with the reason
    warnings: what the user should know of what was asked for
    is_measured: whether the rises come from measured sensitivities
    """

    memory_bytes: int
    context: int
    proposals: tuple[Proposal, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    is_measured: bool

    @property
    def fitting(self) -> tuple[Proposal, ...]:
        """The proposals for which there is enough memory."""
        return tuple(proposal for proposal in self.proposals if proposal.fits)

    @property
    def best(self) -> tuple[Proposal, ...]:
        """Those of them for which the same runtime has none that needs no more memory and is expected to do better."""
        least: dict[str, float] = {}
        result = []
        for proposal in self.fitting:
            if proposal.memory_bytes < least.get(proposal.runtime, math.inf):
                least[proposal.runtime] = proposal.memory_bytes
                result.append(proposal)
        return tuple(result)

    def to_json(self) -> dict[str, Any]:
        """Return the key `memory` of plan --json."""
        return asdict(self)


def advise(
    master: PlannedMaster, exports: Sequence[PossibleExport], asked: MemoryOptions, known: Sensitivity | None = None
) -> MemoryAdvice:
    """Return what a memory has room for.

    master: the master from which exports would be made
    exports: what it can be exported to
    known: sensitivities of the model; None for the rule of thumb
    """
    assert isinstance(asked.memory, int) and isinstance(asked.context, int | None)
    config = master.source.config
    kept, sizes, model = context_memory(config), text_sizes(config), _Model.of(master, known)
    context = asked.context or min(sizes.most_context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    notes, stored = list(kept.notes), [*model.as_it_is()]
    for export in exports:
        target = get_target(export.target)
        if asked.runtime not in (None, *LOADED_BY[target.runtime]):
            continue
        try:
            if export.possible is False:
                raise ExportError(export.reason)
            stored += model.exported(target)
        except (ExportError, SourceError) as error:
            notes.append(f"{export.target}: {error}")
    proposals = []
    for of in stored:
        for name in of.loaded_by if asked.runtime is None else {asked.runtime} & {*of.loaded_by}:
            runtime = RUNTIME_MEMORY[name]
            overhead, cache = runtime.overhead_bytes(sizes, context), runtime.context_bytes(kept, context)
            needed = runtime.memory_for(of.bytes + cache + overhead)
            proposals.append(
                Proposal(
                    runtime=name,
                    target=of.target,
                    format=of.format,
                    options=of.options,
                    takes_original=of.takes_original,
                    bits_per_parameter=8 * of.bytes / max(1, model.parameters),
                    weight_bytes=of.bytes,
                    context_bytes=cache,
                    overhead_bytes=overhead,
                    memory_bytes=needed,
                    fits=needed <= asked.memory,
                    expected_rise=of.rise,
                    is_exact=of.is_exact,
                )
            )
    too_long = f"`context` {context}: the model takes at most {sizes.most_context} tokens"
    return MemoryAdvice(
        memory_bytes=asked.memory,
        context=context,
        proposals=tuple(sorted(proposals, key=lambda p: (p.expected_rise, p.memory_bytes, p.runtime, p.target))),
        notes=tuple(notes),
        warnings=(too_long,) if 0 < sizes.most_context < context else (),
        is_measured=known is not None,
    )


class _Stored(NamedTuple):
    """What the weights of a model become. rise: that of the loss; the rest: see Proposal"""

    loaded_by: tuple[str, ...]
    target: str
    format: str
    bytes: int
    rise: float
    options: dict[str, Any] = {}
    takes_original: bool = False
    is_exact: bool = True


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model whose weights are to be stored.

    master: its master
    dtype: that of the model
    densities: by how much the loss rises with the relative error of one weight of a tensor, by its name
    of_alike: the sum of the densities of all that are alike, by the name of the first
    """

    master: PlannedMaster
    dtype: str
    densities: Mapping[str, float]
    of_alike: Mapping[str, float]

    @staticmethod
    def of(master: PlannedMaster, known: Sensitivity | None) -> _Model:
        """Return the model of a master. known: its sensitivities; None for the rule of thumb"""
        matrices = {plan.name: plan for plan in master.planned if len(plan.shape) > 1 and plan.role != "buffer"}
        roles = {name: plan.role for name, plan in matrices.items()}
        groups = groups_of(master.source, list(roles.items()))
        alphas, _ = alphas_for(groups, roles=roles, known=known)
        densities: dict[str, float] = {}
        for group, names in groups.items():
            density = alphas[group] / max(1, sum(matrices[name].weights for name in names))
            densities |= dict.fromkeys(names, density)
        sums = {first: sum(densities.get(name, 0.0) for name in names) for first, names in master.alike.items()}
        dtype = model_dtype(master.source.config, master.source.tensors)
        return _Model(master=master, dtype=dtype, densities=densities, of_alike=sums)

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(plan.weights for plan in self.master.planned if plan.role != "buffer")

    @functools.cached_property
    def master_rise(self) -> float:
        """By how much the loss rises with the errors of the master."""
        encoded = [plan for plan in self.master.planned if plan.action == QUANTIZE]
        kinds = {(plan.codec, plan.bits, plan.weights): plan for plan in encoded}
        errors = {kind: coder_of(plan).distortion for kind, plan in kinds.items()}
        return math.fsum(self.densities[p.name] * p.weights * errors[p.codec, p.bits, p.weights] for p in encoded)

    def as_it_is(self) -> Iterator[_Stored]:
        """Yield the model as it is, and the master."""
        source, planned = self.master.source, self.master.planned
        stored = sum(part.byte_count for tensor in source.tensors for part in tensor.parts)
        packed = bool(quantization_settings(source.config))
        loaded_by = tuple(runtime for runtime in LOADED_BY[TRANSFORMERS] if not (packed and runtime == MLX))
        yield _Stored(loaded_by, SOURCE, "as it is", stored, 0.0)
        yield _Stored((TRANSFORMERS,), MASTER, "packed", sum(plan.bytes for plan in planned), self.master_rise)

    def exported(self, target: ExportTarget[Any]) -> Iterator[_Stored]:
        """Yield what each format of a target makes of the model.

        Raises ExportError or SourceError for a model that it cannot store in any of them.
        """
        settings, by_layer, is_exact = [target.settings(choice.options) for choice in target.choices], True, True
        try:
            by_layer = target.by_layer
            outlines = target.outlines(self.master.layers if by_layer else self._whole, settings)
        except MissingDependencyError:
            outlines, by_layer, is_exact = [self._estimated(target, of) for of in settings], True, False
        for choice, outline in zip(target.choices, outlines, strict=True):
            stored, rise = self._counted(outline, by_layer=by_layer)
            yield _Stored(
                loaded_by=LOADED_BY[target.runtime],
                target=target.name,
                format=choice.name,
                bytes=stored,
                rise=rise * (2 if choice.rounds_inputs else 1) + (0 if target.takes_original else self.master_rise),
                options={name: getattr(choice.options, name) for name in choice.options.given},
                takes_original=target.takes_original,
                is_exact=is_exact,
            )

    @functools.cached_property
    def _whole(self) -> Checkpoint:
        pairs = zip(self.master.source.tensors, self.master.planned, strict=True)
        return replace(self.master.source, tensors=as_in_master(pairs))

    def _estimated(self, target: ExportTarget[Any], settings: Any) -> Outline:
        """Return an outline in which every weight becomes what most of them do."""
        tensors = self.master.layers.tensors
        encoded = [tensor for tensor in tensors if is_encoded(tensor)]
        decisions = {t.name: how for t in encoded if (how := target.estimate(settings, t.shape[-1])) is not None}
        return Outline(tensors=tensors, decisions=decisions, config=None, left_out={}, metadata={})

    def _counted(self, outline: Outline, *, by_layer: bool) -> tuple[int, float]:
        """Return the bytes of all tensors, and by how much the loss rises. by_layer: whether there is one of each"""
        total, rises = 0, []
        for tensor in outline.tensors:
            decision = outline.decisions.get(tensor.name)
            count = len(self.master.alike[tensor.name]) if by_layer else 1
            if isinstance(decision, Rounding):
                total += count * stored_bytes(decision.specs(tensor.name, tensor.shape))
                first = (*sources_of(tensor), tensor)[0].name
                density = self.of_alike[first] if by_layer else self.densities.get(first, 0.0)
                rises.append(density * element_count(tensor) * expected_error(decision.rule))
            else:
                forced = None if decision is None else decision.dtype
                dtype = forced or stored_dtype(tensor, model=self.dtype, dtype=outline.plain_dtype)
                total += count * TensorSpec(tensor.name, dtype, tensor.shape).byte_count
        return total, math.fsum(rises)


@functools.cache
def expected_error(rule: Rule) -> float:
    """Return the relative squared error with which a rule rounds Gaussian weights, measured on a few of them."""
    count = -(-SAMPLE_WEIGHTS // rule.group_size) * rule.group_size
    groups = rule.quantize(np.random.default_rng(0).standard_normal(count, dtype=np.float32))
    return float(groups.errors.sum() / groups.energies.sum())
