"""Which targets a checkpoint can be exported to, and which exports a memory has room for.

The first is decided by the targets themselves, from the configuration and the names and shapes of tensors alone, so the
answer is there before the first weight is read; the second by a rule: parameters x bits, and the keys and values of the
context.

Sizes are estimates from the configuration and the shapes of tensors; docs/memory.md has the rule.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pqweights.checkpoint.config import quantization_settings
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import LLAMA_CPP, MLX, RUNTIMES, TRANSFORMERS, VLLM, Options, given_in
from pqweights.errors import ExportError, MissingDependencyError, SourceError
from pqweights.formats import UNRATED
from pqweights.planning.context_memory import DEFAULT_CONTEXT, context_bytes, most_context
from pqweights.planning.decisions import with_weights
from pqweights.planning.layout import QUANTIZE, TensorPlan
from pqweights.targets import EXPORTS, get_target
from pqweights.targets.architectures import UNEXAMINED, is_examined
from pqweights.targets.target import COMPRESSED_TENSORS, TORCHAO, ExportTarget

GIB = 1 << 30
# What a runtime computes with beside weights and context: activations, logits, the context of a GPU.
WORKING_BYTES = GIB
PLAIN_BITS = 16
# The runtimes for which exports are proposed, by what a target names as its own. transformers decodes the exports of
# compressed-tensors whole, so they save nothing there.
LOADED_BY = {
    TRANSFORMERS: (TRANSFORMERS, VLLM, MLX), TORCHAO: (TRANSFORMERS,), COMPRESSED_TENSORS: (VLLM,), MLX: (MLX,),
    LLAMA_CPP: (LLAMA_CPP,),
}  # fmt: skip
# What is no export: the model as it is, and its master, which transformers keeps packed.
SOURCE, MASTER = "source", "master"
# The runtimes that load weights, what a Proposal says of them, and their bytes.
_Stored = tuple[tuple[str, ...], dict[str, Any], int]
# A layer or an expert: what its name begins with, its number, and the name of a tensor in it.
_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.*)")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A way to run a model.

    runtime: what runs it, of RUNTIMES
    target: what it is exported for, a key of EXPORTS, or SOURCE or MASTER
    format: what a list calls the format
    options: those of Options that ask for it
    bits: of each parameter of the model
    weight_bytes, context_bytes: what the weights and the context take
    memory_bytes: the memory that is needed for all of it
    fits: whether there is so much
    """

    runtime: str
    target: str
    format: str
    options: dict[str, Any] = field(default_factory=dict)
    bits: float
    weight_bytes: int
    context_bytes: int
    memory_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class MemoryAdvice:
    """What a memory has room for.

    memory_bytes, context: what was asked for; the context may be the default
    proposals: all ways to run the model, those of the most bits first
    notes: what is not proposed, with the reason
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

    def to_json(self) -> dict[str, Any]:
        """Return the key `memory` of plan --json."""
        return asdict(self)


def advise(
    checkpoint: Checkpoint, planned: Sequence[TensorPlan], exports: Sequence[PossibleExport], options: Options
) -> MemoryAdvice:
    """Return what a memory has room for.

    planned: what becomes of each tensor in a master
    exports: what the checkpoint can be exported to
    """
    assert isinstance(options.memory, int) and isinstance(options.context, int | None)
    config, most = checkpoint.config, most_context(checkpoint.config)
    context = options.context or min(most or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    kept, parameters = context_bytes(config, context), sum(p.weights for p in planned if p.role != "buffer")
    notes = [f"{of.target}: {of.reason}" for of in exports if of.possible is False]
    runtimes = {*RUNTIMES} if options.runtime is None else {options.runtime}
    if any(of.target == MLX and of.possible is False for of in exports):
        runtimes -= {MLX}  # it has no model of this type, so it runs no other format either
    stored = [*_as_it_is(checkpoint, planned)]
    for target in (get_target(of.target) for of in exports if of.possible is not False):
        stored += _exported(checkpoint, planned, target)
    proposals = []
    for loaded_by, about, size in stored:
        for runtime in (name for name in loaded_by if name in runtimes):
            needed = math.ceil((size + kept + WORKING_BYTES) / share_of(runtime, options.memory))
            about = {"bits": 8 * size / max(1, parameters), "weight_bytes": size, "context_bytes": kept, **about}
            fits = needed <= options.memory
            proposals.append(Proposal(runtime=runtime, memory_bytes=needed, fits=fits, **about))
    too_long = f"`context` {context}: the model takes at most {most} tokens"
    return MemoryAdvice(
        memory_bytes=options.memory,
        context=context,
        proposals=tuple(sorted(proposals, key=lambda p: (-p.bits, p.runtime, p.target, p.format))),
        notes=tuple(notes),
        warnings=(too_long,) if 0 < most < context else (),
    )


def share_of(runtime: str, memory: int) -> float:
    """Return the share of a memory that a runtime uses: that of a GPU, or all of a Mac's."""
    of_a_mac = 2 / 3 if memory <= 32 * GIB else 3 / 4
    return {MLX: of_a_mac, VLLM: 0.92}.get(runtime, 1.0)


def _as_it_is(checkpoint: Checkpoint, planned: Sequence[TensorPlan]) -> Iterator[_Stored]:
    """Yield the model as it is, and the master, unless it is one of those that loading decodes."""
    is_packed = bool(quantization_settings(checkpoint.config))
    loaded_by = tuple(runtime for runtime in LOADED_BY[TRANSFORMERS] if not (is_packed and runtime == MLX))
    size = sum(part.byte_count for tensor in checkpoint.tensors for part in tensor.parts)
    yield loaded_by, {"target": SOURCE, "format": "as it is"}, size
    if not any(plan.codec in UNRATED for plan in planned):
        yield (TRANSFORMERS,), {"target": MASTER, "format": "packed"}, sum(plan.bytes for plan in planned)


def _exported(checkpoint: Checkpoint, planned: Sequence[TensorPlan], target: ExportTarget) -> Iterator[_Stored]:
    """Yield what each format of a target makes of the model, as far as the target can store it."""
    kept, whole = sum(plan.bytes for plan in planned if plan.action != QUANTIZE), with_weights(checkpoint)
    coded = [plan for plan in planned if plan.action == QUANTIZE]
    plain = sum(plan.weights for plan in coded if plan.role in target.plain_roles)
    by_columns = Counter[int]()
    for plan in coded:
        by_columns[plan.shape[-1]] += plan.weights if plan.role not in target.plain_roles else 0
    for name, (chosen, bits) in target.choices.items():
        try:
            check(target, whole, chosen)
        except (ExportError, SourceError):
            continue
        except MissingDependencyError:  # the rule needs no package
            pass
        rounded = sum(count * (bits(size) if callable(bits) else bits) for size, count in by_columns.items())
        size = kept + math.ceil((plain * PLAIN_BITS + rounded) / 8)
        options = {option: getattr(chosen, option) for option in given_in(chosen)}
        yield LOADED_BY[target.runtime], {"target": target.name, "format": name, "options": options}, size


@dataclass(frozen=True, kw_only=True)
class PossibleExport:
    """What is known of the export of a checkpoint to one target, with the target's defaults.

    target: the name of the target
    possible: whether it can be made; None if that is not known
    reason: why not, or what is still to be found out; None if there is nothing
    """

    target: str
    possible: bool | None
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the target in plan --json."""
        return asdict(self)


def possible_exports(checkpoint: Checkpoint) -> tuple[PossibleExport, ...]:
    """Return for every target that is for models of its kind whether a checkpoint can be exported to it."""
    checkpoint = with_weights(checkpoint)
    return tuple(_possible(name, checkpoint) for name in EXPORTS if get_target(name).concerns(checkpoint))


def _possible(name: str, checkpoint: Checkpoint) -> PossibleExport:
    target = get_target(name)
    try:
        check(target, checkpoint, Options())
    except (ExportError, SourceError) as error:
        return PossibleExport(target=name, possible=False, reason=str(error))
    except MissingDependencyError as error:
        return PossibleExport(target=name, possible=None, reason=str(error))
    names = target.runtime in (TORCHAO, COMPRESSED_TENSORS) and not is_examined(checkpoint.config)
    return PossibleExport(target=name, possible=True, reason=UNEXAMINED if names else target.unchecked(checkpoint))


def check(target: ExportTarget, checkpoint: Checkpoint, options: Options) -> None:
    """Check whether a checkpoint can be exported. Raises ExportError or MissingDependencyError."""
    settings = target.settings(options)
    if target.check is not None:
        target.check(checkpoint)
    else:
        settings.assign(one_of_each(checkpoint), None)


def one_of_each(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the first of all layers, and within them of all experts, that are alike."""
    named = [(tensor.name, tensor) for tensor in checkpoint.tensors]
    return replace(checkpoint, tensors=tuple(_firsts(named, checkpoint.weights)))


def _firsts(named: Sequence[tuple[str, LogicalTensor]], weights: frozenset[str]) -> Iterator[LogicalTensor]:
    """Yield the tensors of the first of all blocks that are alike. named: each with its own name within a block"""
    blocks: dict[tuple[str, str], list[tuple[str, LogicalTensor]]] = {}
    for name, tensor in named:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            yield tensor
        else:
            blocks.setdefault((match[1], match[2]), []).append((match[3], tensor))
    firsts: dict[object, list[tuple[str, LogicalTensor]]] = {}
    for (prefix, _), block in blocks.items():
        content = (prefix, tuple([(name, of.shape, of.dtype, of.name in weights) for name, of in block]))
        firsts.setdefault(content, block)
    for block in firsts.values():
        yield from _firsts(block, weights)
