"""Which type each tensor of a GGUF file gets: by a mix, by rules, or so that the file has a given size."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.checkpoint.header import aligned
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import View
from pqweights.checkpoint.writer import sha256_of_file
from pqweights.common.units import parse_size
from pqweights.errors import OptionError, RecipeError, SourceError
from pqweights.exports.bf16 import role_of
from pqweights.gguf.mixes import PLAIN_TYPES, Mix, Shape, find_mix, find_type, fitting_type, may_be_quantized
from pqweights.gguf.model import ALIGNMENT, FilePart, GgufModel, GgufTensor, encode_header
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.options import ExportOptions
from pqweights.planning.knapsack import Choice, cheapest, solve
from pqweights.planning.sensitivity_file import HEURISTIC, Sensitivity, alphas_for, groups_of, read_sensitivity

DEFAULT_TYPE = "q4_k_m"


class TypeRule(NamedTuple):
    """The type of the tensors whose name matches a pattern: their name in the file, or in the checkpoint."""

    pattern: str
    type: str


@dataclass(frozen=True, kw_only=True)
class TypeOptions:
    """What a user asks for.

    mix: the mix that decides about what no rule matches
    rules: the first that matches a tensor decides
    target_size: the largest size of the files, in bytes, for which types are then chosen; None to leave it to the mix
    sensitivity: by what they are chosen: a file that `pqweights sensitivity` wrote; None for the rule of thumb
    """

    mix: Mix
    rules: tuple[TypeRule, ...] = ()
    target_size: int | None = None
    sensitivity: Path | None = None

    @property
    def label(self) -> str:
        """What file names call the choice."""
        if self.target_size is not None:
            return "fit"
        name = self.mix.type if self.mix.pure else self.mix.name
        return f"{name}-mixed" if self.rules else name

    def describe(self) -> dict[str, Any]:
        """Return what a manifest says of the choice; what is not said is the default."""
        stated: dict[str, Any] = {} if self.target_size is not None else {"type": self.mix.name}
        if self.mix.pure:
            stated["pure"] = True
        if self.rules:
            stated["types"] = [list(rule) for rule in self.rules]
        if self.target_size is not None:
            stated["target_size"] = self.target_size
        if self.sensitivity is not None:
            stated["sensitivity"] = sha256_of_file(self.sensitivity)
        return stated


def read_types(options: ExportOptions) -> TypeOptions:
    """Return the types that a user asks for.

    Raises OptionError for an unknown type and for options that contradict each other.
    """
    by_pattern = options.set_type.items() if isinstance(options.set_type, Mapping) else options.set_type or ()
    rules = [TypeRule(pattern, find_type(f"`set_type` {pattern}={asked}", asked)) for pattern, asked in by_pattern]
    mix, size = find_mix(options.type or DEFAULT_TYPE), options.target_size
    if options.sensitivity is not None and size is None:
        raise OptionError("`sensitivity`: expected `target_size` as well, for which types are then chosen")
    if size is not None and (options.type is not None or options.pure):
        raise OptionError("`target_size`: chooses the types itself; leave out `type` and `pure`")
    measured = options.sensitivity is not None and str(options.sensitivity) != HEURISTIC
    return TypeOptions(
        mix=replace(mix, pure=options.pure),
        rules=tuple(rules),
        target_size=None if size is None else parse_size(size),
        sensitivity=Path(str(options.sensitivity)) if measured else None,
    )


# The bits of weights without blocks, and their relative error.
PLAIN_BITS = {"F16": 16, "BF16": 16, "F32": 32}
F16_ERROR = 1e-8
# What the headers of further files and the padding of tensors may take of a target size.
RESERVED_BYTES = 4096


def candidates(*, imatrix: bool) -> tuple[str, ...]:
    """Return the types from which a file of a given size is made.

    Grids have the least errors for their size, but channels that are outliers spoil them unless errors are weighed.
    """
    narrow = ("IQ3_S", "IQ3_XXS", "IQ2_S") if imatrix else ("Q3_K", "Q2_K")
    return ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", *narrow, "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "F16")


class TypeChoice(NamedTuple):
    """The type of a tensor, and why it has it."""

    type: str
    reason: str


def chosen_types(
    options: TypeOptions, model: GgufModel, checkpoint: Checkpoint, *, fingerprint: str | None, imatrix: bool
) -> dict[str, TypeChoice]:
    """Return the type of every tensor, by its name in the file.

    fingerprint: that of the checkpoint that a file of sensitivities must be of; None to take any
    imatrix: whether errors are weighed by an importance matrix

    Raises RecipeError for a pattern that matches nothing, and for a size that cannot be met.
    """
    shape, mix = _shape_of(model, imatrix=imatrix), options.mix
    used: set[str] = set()
    result: dict[str, TypeChoice] = {}
    free: list[LogicalTensor] = []
    for tensor in model.tensors:
        wanted, reason = mix.type_of(tensor.name, tensor.shape, shape), f"{mix.name} {'pure' if mix.pure else 'mix'}"
        if not may_be_quantized(tensor.name, tensor.shape):
            result[tensor.name] = TypeChoice(wanted, "llama.cpp computes with it in float32")
            continue
        rule = next((rule for rule in options.rules if _matches(tensor, rule.pattern)), None)
        if rule is None:
            free.append(tensor)
        else:
            used.add(rule.pattern)
            wanted, reason = rule.type, f"rule {rule.pattern}"
        result[tensor.name] = _fitted(tensor, wanted, reason)
    unused = [rule.pattern for rule in options.rules if rule.pattern not in used]
    if unused:
        raise RecipeError(
            f"pattern {unused[0]!r}: matches no tensor that can be quantized before another rule does; names are those "
            "of the file, such as blk.0.attn_v.weight, or of the checkpoint"
        )
    if options.target_size is None:
        return result
    known, types = _sensitivity(options, fingerprint), candidates(imatrix=imatrix)
    return result | _within(options.target_size, model, checkpoint, types=types, chosen=result, free=free, known=known)


def _shape_of(model: GgufModel, *, imatrix: bool) -> Shape:
    """Return what of a model the mixes depend on."""
    values = {entry.key.removeprefix(f"{model.architecture}."): entry.value for entry in model.metadata}

    def number(key: str) -> int:
        value = values.get(key, 0)
        return int(value[0] if isinstance(value, list | tuple) else value)

    heads, shared = number("attention.head_count"), number("attention.head_count_kv")
    layers = number("block_count")
    per_group = heads // shared if shared else 1
    return Shape(
        layers=layers,
        shared=per_group,
        experts=number("expert_count"),
        tied=all(tensor.name != "output.weight" for tensor in model.tensors),
        large=model.architecture in ("llama", "qwen2") and layers == 80 and per_group > 1,
        imatrix=imatrix,
    )


def type_bytes(type_name: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor of a type, in bytes."""
    if type_name in PLAIN_TYPES:
        return math.prod(shape) * PLAIN_BITS[type_name] // 8
    return math.prod(shape[:-1]) * BLOCK_TYPES[type_name].row_bytes(shape[-1])


def _matches(tensor: LogicalTensor, pattern: str) -> bool:
    """Whether a pattern matches the name of a tensor in the file, or in the checkpoint."""
    sources = tensor.sources if isinstance(tensor, View) else ()
    return any(fnmatch.fnmatchcase(name, pattern) for name in (tensor.name, *(source.name for source in sources)))


def _fitted(tensor: LogicalTensor, wanted: str, reason: str) -> TypeChoice:
    """Return the type of a tensor whose rows the blocks of a type may not divide."""
    fitting = fitting_type(wanted, tensor.shape[-1])
    if fitting == wanted:
        return TypeChoice(fitting, reason)
    size = BLOCK_TYPES[wanted].block_size
    return TypeChoice(fitting, f"as blocks of {size} ({wanted}) do not divide its rows of {tensor.shape[-1]} weights")


def _within(
    target_bytes: int,
    model: GgufModel,
    checkpoint: Checkpoint,
    *,
    types: Sequence[str],
    chosen: dict[str, TypeChoice],
    free: Sequence[LogicalTensor],
    known: Sensitivity | None,
) -> dict[str, TypeChoice]:
    """Choose of some types for the free tensors, so that the predicted rise of the loss is least within a size."""
    stored = {t.name: type_bytes(chosen[t.name].type, t.shape) for t in model.tensors}
    # The header does not depend on the types.
    tensors = [GgufTensor(t.name, t.shape, chosen[t.name].type, stored[t.name]) for t in model.tensors]
    header = encode_header(model.metadata, tensors, FilePart(0, 1, len(tensors)))
    overhead = RESERVED_BYTES + len(header) + ALIGNMENT * len(tensors)
    overhead += sum(stored.values()) - sum(stored[tensor.name] for tensor in free)
    sources: dict[str, list[LogicalTensor]] = {}  # of fused experts, several tensors have the same source
    for tensor in free:
        source = tensor.sources[0] if isinstance(tensor, View) and tensor.sources else tensor
        sources.setdefault(source.name, []).append(tensor)
    roles = {name: role_of(tensors[0]) for name, tensors in sources.items()}
    groups = groups_of(checkpoint, list(roles.items()))
    alphas, _ = alphas_for(groups, roles=roles, known=known)
    members = {name: [tensor for source in names for tensor in sources[source]] for name, names in groups.items()}
    choices = [[_choice(type_name, members[name], alphas[name]) for type_name in types] for name in groups]
    solution = solve(choices, target_bytes - overhead)
    if solution is None:
        least = overhead + cheapest(choices)
        raise RecipeError(f"target: {target_bytes} bytes: below the smallest possible, {least} bytes")
    result = {}
    for name, number in zip(groups, solution.choices, strict=True):
        for tensor in members[name]:
            result[tensor.name] = _fitted(tensor, types[number], f"chosen for {target_bytes} bytes")
    return result


def _choice(type_name: str, tensors: Sequence[LogicalTensor], alpha: float) -> Choice:
    """Return what a type costs for some tensors, and how much the loss is predicted to rise."""
    cost, error, weights = 0, 0.0, 0
    for tensor in tensors:
        fitting = fitting_type(type_name, tensor.shape[-1])
        count = math.prod(tensor.shape)
        cost += aligned(type_bytes(fitting, tensor.shape), ALIGNMENT)
        error += count * (F16_ERROR if fitting in PLAIN_TYPES else BLOCK_TYPES[fitting].distortion)
        weights += count
    return Choice(cost, alpha * error / weights)


def _sensitivity(options: TypeOptions, fingerprint: str | None) -> Sensitivity | None:
    """Read the sensitivities that were given; None stands for the rule of thumb."""
    if options.sensitivity is None:
        return None
    known = read_sensitivity(options.sensitivity)
    if fingerprint is not None and known.checkpoint != fingerprint:
        raise SourceError(
            f"{options.sensitivity}: expected sensitivities of the model that the master was made from (fingerprint "
            f"{fingerprint[:12]}), found those of another ({known.checkpoint[:12]})"
        )
    return known
