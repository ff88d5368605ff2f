"""Which export of a model a memory has room for: what each format of each target takes, and what it should cost.

Everything is decided from the configuration and the names and shapes of tensors. Weights are counted by the targets
themselves; docs/memory.md has the formulas of the rest. The expected rise of the loss is that of planning/fit.py, with
the relative error that each format has on Gaussian weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pqweights.checkpoint.config import model_dtype, quantization_settings
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import sources_of
from pqweights.codecs import UNRATED
from pqweights.errors import ExportError, MissingDependencyError, SourceError
from pqweights.exports import get_target
from pqweights.exports.assignment import distortion
from pqweights.exports.bf16 import is_encoded, stored_dtype
from pqweights.exports.formats import Rounding
from pqweights.exports.integers import Outline
from pqweights.exports.possible import as_in_master
from pqweights.exports.target import COMPRESSED_TENSORS, TORCHAO, ExportTarget, PlannedMaster
from pqweights.planning.context_memory import DEFAULT_CONTEXT, context_memory, text_sizes
from pqweights.planning.options import LLAMA_CPP, MLX, RUNTIMES, TRANSFORMERS, VLLM, MemoryOptions
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


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What the weights of a model become.

    loaded_by: the runtimes that load them, of RUNTIMES
    target: what they are exported for, a key of EXPORTS, or SOURCE or MASTER
    format: what a list calls the format
    bytes: their size
    bits_per_parameter: the same for each parameter of the model
    expected_rise: of the loss, as in planning/fit.py
    options: those of ExportOptions that ask for the format
    takes_original: whether the original can be rounded, by `source`
    is_exact: whether the size is that of the export, or estimated because a package is missing
    """

    loaded_by: tuple[str, ...]
    target: str
    format: str
    bytes: int
    bits_per_parameter: float
    expected_rise: float
    options: dict[str, Any] = field(default_factory=dict)
    takes_original: bool = False
    is_exact: bool = True

    @property
    def steps(self) -> tuple[str, ...]:
        """The commands that make them, in order."""
        return {SOURCE: (), MASTER: ("quantize",)}.get(self.target, ("quantize", "export"))


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A way to run a model.

    runtime: what runs it, of RUNTIMES
    stored: its weights
    context_bytes, overhead_bytes: what the context and the runtime take beside them
    memory_bytes: the memory that is needed for all of it
    fits: whether there is so much
    """

    runtime: str
    stored: Stored
    context_bytes: int
    overhead_bytes: int
    memory_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class MemoryAdvice:
    """What a memory has room for.

    memory_bytes, context: what was asked for; the context may be the default
    proposals: all ways to run the model, the best expected quality first
    notes: what was not counted, and what is not proposed, with the reason
    warnings: what the user should know of what was asked for
    """

    memory_bytes: int
    context: int
    proposals: tuple[Proposal, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

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
    known: what was measured of the model; None for the rule of thumb
    """
    assert isinstance(asked.memory, int) and isinstance(asked.context, int | None)
    config, model = master.source.config, _Model.of(master, known)
    kept, sizes = context_memory(config), text_sizes(config)
    context = asked.context or min(sizes.most_context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    runtimes = {*RUNTIMES} if asked.runtime is None else {asked.runtime}
    notes, stored = list(kept.notes), [*model.as_it_is()]
    for export in exports:
        target = get_target(export.target)
        if not runtimes & {*LOADED_BY[target.runtime]}:
            continue
        try:
            if export.possible is False and not target.by_layer:
                raise ExportError(export.reason)
            stored += model.exported(target)
        except (ExportError, SourceError) as error:
            notes.append(f"{export.target}: {error}")
            runtimes -= {target.runtime} & {MLX}  # it has no model of this type, so it runs no other format either
    proposals = []
    for name, weights in ((name, of) for of in stored for name in of.loaded_by if name in runtimes):
        runtime = RUNTIME_MEMORY[name]
        parts = {"context_bytes": runtime.context_bytes(kept, context)}
        parts["overhead_bytes"] = runtime.overhead_bytes(sizes, context)
        needed = runtime.memory_for(weights.bytes + sum(parts.values()))
        fits = needed <= asked.memory
        proposals.append(Proposal(runtime=name, stored=weights, memory_bytes=needed, fits=fits, **parts))
    too_long = f"`context` {context}: the model takes at most {sizes.most_context} tokens"
    return MemoryAdvice(
        memory_bytes=asked.memory,
        context=context,
        proposals=tuple(sorted(proposals, key=lambda p: (p.stored.expected_rise, p.memory_bytes, p.runtime))),
        notes=tuple(notes),
        warnings=(too_long,) if 0 < sizes.most_context < context else (),
    )


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
        """Return the model of a master. known: what was measured of it"""
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

    @functools.cached_property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(plan.weights for plan in self.master.planned if plan.role != "buffer")

    def _stored(self, **about: Any) -> Stored:
        """Return what the weights become. about: the fields of Stored but for bits"""
        return Stored(bits_per_parameter=8 * about["bytes"] / max(1, self.parameters), **about)

    @functools.cached_property
    def master_rise(self) -> float:
        """By how much the loss rises with the errors of the master."""
        encoded = [plan for plan in self.master.planned if plan.action == QUANTIZE and plan.codec not in UNRATED]
        kinds = {(plan.codec, plan.bits, plan.weights): plan for plan in encoded}
        errors = {kind: coder_of(plan).least_squares().distortion for kind, plan in kinds.items()}
        return math.fsum(
            self.densities.get(p.name, 0.0) * p.weights * errors[p.codec, p.bits, p.weights] for p in encoded
        )

    def as_it_is(self) -> Iterator[Stored]:
        """Yield the model as it is, and the master."""
        source, master = self.master.source, sum(plan.bytes for plan in self.master.planned)
        stored = sum(part.byte_count for tensor in source.tensors for part in tensor.parts)
        is_packed = bool(quantization_settings(source.config))
        loaded_by = tuple(runtime for runtime in LOADED_BY[TRANSFORMERS] if not (is_packed and runtime == MLX))
        plain: Any = {"loaded_by": loaded_by, "target": SOURCE, "format": "as it is"}
        packed: Any = {"loaded_by": (TRANSFORMERS,), "target": MASTER, "format": "packed"}
        yield self._stored(**plain, bytes=stored, expected_rise=0.0)
        if not any(plan.codec in UNRATED for plan in self.master.planned):  # of which loading decodes what has no loss
            yield self._stored(**packed, bytes=master, expected_rise=self.master_rise)

    def exported(self, target: ExportTarget[Any]) -> Iterator[Stored]:
        """Yield what each format of a target makes of the model, as far as it can.

        Raises ExportError or SourceError for a model that none of them can store.
        """
        settings, by_layer, is_exact = [target.settings(choice.options) for choice in target.choices], True, True
        try:
            outlines, by_layer = [*self._outlines(target, settings)], target.by_layer
        except MissingDependencyError:
            outlines, is_exact = [self._estimated(target, of) for of in settings], False
        refusals = [outline for outline in outlines if isinstance(outline, ExportError)]
        if refusals and len(refusals) == len(outlines):
            raise refusals[0]
        for choice, outline in zip(target.choices, outlines, strict=True):
            if isinstance(outline, ExportError):
                continue
            size, rise = self._counted(outline, by_layer=by_layer)
            yield self._stored(
                loaded_by=LOADED_BY[target.runtime],
                target=target.name,
                format=choice.name,
                bytes=size,
                expected_rise=rise * (1 + choice.rounds_inputs) + (0 if target.takes_original else self.master_rise),
                options={name: getattr(choice.options, name) for name in choice.options.given},
                takes_original=target.takes_original,
                is_exact=is_exact,
            )

    def _outlines(self, target: ExportTarget[Any], settings: Sequence[Any]) -> Iterator[Outline | ExportError]:
        """Yield what each of some settings makes of the model; of one layer of each kind, if that tells all."""
        if not target.by_layer:
            yield from target.outlines(self._whole, settings)
            return
        for of in settings:
            try:
                yield from target.outlines(self.master.layers, [of])
            except ExportError as error:
                yield error

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
            first = self._source_of(tensor)
            count = len(self.master.alike[first]) if by_layer else 1
            if isinstance(decision, Rounding):
                total += count * stored_bytes(decision.specs(tensor.name, tensor.shape))
                density = self.of_alike[first] if by_layer else self.densities.get(first, 0.0)
                rises.append(density * element_count(tensor) * distortion(decision.rule))
            else:
                forced = None if decision is None else decision.dtype
                dtype = forced or stored_dtype(tensor, model=self.dtype, dtype=outline.plain_dtype)
                total += count * TensorSpec(tensor.name, dtype, tensor.shape).byte_count
        return total, math.fsum(rises)

    def _source_of(self, tensor: LogicalTensor) -> str:
        """Return the name of the first tensor of the master that a tensor is made of, such as a stack of experts."""
        while tensor.name not in self.master.alike and (sources := sources_of(tensor)):
            tensor = sources[0]
        return tensor.name
