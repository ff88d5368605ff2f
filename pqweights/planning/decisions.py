"""Decisions: what a recipe makes of each tensor, judged by its name, role, shape and dtype.

With other bit widths tensors are planned again, those that differ in name alone only once (RatePlanner).
"""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.master import encoded_specs
from pqweights.checkpoint.promise import unlike_config
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import Storage
from pqweights.common.dtypes import item_bytes
from pqweights.common.options import Options
from pqweights.errors import RecipeError
from pqweights.formats import get_codec, nearest_rate
from pqweights.kernels import BLOCK_SIZE
from pqweights.models import text_model
from pqweights.models.description import UNKNOWN, ModelDescription
from pqweights.models.names import is_behind, without_numbers
from pqweights.planning.layout import KEEP, QUANTIZE, TensorPlan
from pqweights.planning.recipe import DEFAULT_BITS, Recipe, instead_of
from pqweights.planning.roles import Role, classify
from pqweights.storage.sources import merged, open_source

# Of a block of the default codec: its codes, and a norm.
DEFAULT_BLOCK_BYTES = BLOCK_SIZE * DEFAULT_BITS // 8 + 2


class Decision(NamedTuple):
    """What a recipe decides about a tensor.

    It is a named tuple because it is often a part of keys.

    role: the tensor's role
    codec, bits: how to encode it; None if it is kept
    reason: why
    free: whether the bit width is the recipe's default, not that of a rule
    """

    role: str
    codec: str | None
    bits: float | None
    reason: str
    free: bool = False


def decide(recipe: Recipe, tensors: Sequence[LogicalTensor], model: ModelDescription = UNKNOWN) -> list[Decision]:
    """Return a decision for each tensor. model: what is known of their model

    Raises RecipeError for a name pattern that matches no tensor at all; the message names the nearest one.
    """
    named = [rule for _, rule in recipe.labelled if rule.name or rule.layers or rule in recipe.overrides]
    about = [tensor for tensor in tensors if any(rule.is_about([tensor.name]) for rule in named)] if named else []
    recipe.check(model, about, [tensor.name for tensor in tensors])
    made: dict[tuple[object, ...], Decision] = {}
    kind: tuple[object, ...]
    decisions = []
    for tensor in tensors:
        name = tensor.name
        kind = (*_kind(tensor, model), *[rule.is_about([name]) for rule in named])
        decision = made.get(kind)
        if decision is None:
            decision = made[kind] = _decide_one(recipe, tensor, model)
        decisions.append(decision)
    return decisions


def _kind(tensor: LogicalTensor, model: ModelDescription) -> tuple[object, ...]:
    """Return all that a decision without names depends on; thousands of experts have it in common."""
    is_further = is_behind(tensor.name, model.layers)
    return without_numbers(tensor.name), is_further, tensor.dtype, tensor.plain_dtype, tensor.shape


def _decide_one(recipe: Recipe, tensor: LogicalTensor, model: ModelDescription) -> Decision:
    role = classify(tensor.name, tensor.dtype, tensor.shape, model)
    rule, why = recipe.rule_for(model, tensor)
    if rule is not None and rule.keep:
        return _kept(role, why)
    if role.name == "buffer" or (rule is None and role.keep is not None):
        return _kept(role, role.keep or "")
    codec = (rule and rule.codec) or recipe.codec
    bits = (rule and rule.bits) or nearest_rate(codec, recipe.bits)
    if not is_smaller(tensor, codec, bits):
        encoded, plain = _sizes(tensor, codec, bits)
        return _kept(role, f"encoding would not make it smaller ({encoded} against {plain} bytes)")
    is_free = rule is None or rule.bits is None
    return Decision(role=role.name, codec=codec, bits=bits, reason=why or f"default for role {role.name}", free=is_free)


def _kept(role: Role, reason: str) -> Decision:
    return Decision(role=role.name, codec=None, bits=None, reason=reason)


def is_smaller(tensor: LogicalTensor, codec: str | None, bits: float) -> bool:
    """Whether encoding makes a tensor smaller."""
    if codec is None:
        return False
    encoded, plain = _sizes(tensor, codec, bits)
    return encoded < plain


def _sizes(tensor: LogicalTensor, codec: str, bits: float) -> tuple[int, int]:
    """Return the size of a tensor in bytes if it is encoded, and if it is kept."""
    encoded = sum(spec.byte_count for spec in encoded_specs(tensor.name, tensor.shape, get_codec(codec).at(bits)))
    return encoded, math.prod(tensor.shape) * item_bytes(tensor.plain_dtype)


def with_weights(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the weights that an export may round: of a source, those that q5 quantizes."""
    if checkpoint.is_master:
        return checkpoint
    model = text_model(checkpoint.config)
    alike: dict[tuple[object, ...], list[LogicalTensor]] = defaultdict(list)
    for tensor in checkpoint.tensors:
        alike[_kind(tensor, model)].append(tensor)
    rounded = (tensors for tensors in alike.values() if is_rounded_by_default(tensors[0], model))
    return replace(checkpoint, weights=frozenset(tensor.name for tensors in rounded for tensor in tensors))


def is_rounded_by_default(tensor: LogicalTensor, model: ModelDescription) -> bool:
    """Whether `quantize` encodes a tensor unless a recipe says otherwise: in five bits, if that makes it smaller."""
    if classify(tensor.name, tensor.dtype, tensor.shape, model).keep is not None:
        return False
    weights = math.prod(tensor.shape)
    return -(-weights // BLOCK_SIZE) * DEFAULT_BLOCK_BYTES < weights * item_bytes(tensor.plain_dtype)


def open_planned(
    source: str | Path,
    options: Options,
    open_master: Callable[[Storage], Checkpoint | None] = lambda storage: None,
) -> Checkpoint:
    """Open a source with the adapters that are merged into it, and without the tensors that the result does not get.

    open_master: see open_source

    Raises SourceError, RecipeError, OptionError, HubError, StorageError; MasterError for a damaged master.
    """
    checkpoint = open_source(
        source,
        options,
        low_disk=options.low_disk,
        allow_pickle=options.allow_pickle,
        include=options.include_files,
        open_master=open_master,
    )
    return without(merged(checkpoint, options.adapter, options), options.leave_out)


def without(checkpoint: Checkpoint, patterns: Sequence[str]) -> Checkpoint:
    """Return a checkpoint without the tensors whose names match a pattern of `leave_out`.

    Raises RecipeError for a pattern that matches none, or if nothing is left.
    """
    if not patterns:
        return checkpoint
    names = [tensor.name for tensor in checkpoint.tensors]
    left_out: dict[str, str] = {}
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise RecipeError(
                f"`leave_out`: the pattern {pattern!r} matches no tensor of the checkpoint; "
                f"{instead_of(pattern, names)}"
            )
        left_out |= dict.fromkeys(matching, f"--leave-out {pattern}")
    tensors = tuple(tensor for tensor in checkpoint.tensors if tensor.name not in left_out)
    if not tensors:
        raise RecipeError(f"`leave_out`: expected some tensors to stay, found none of {len(names)}")
    remarks = checkpoint.remarks
    if (config := checkpoint.config) is not None:
        before, after = (unlike_config(some, config) for some in (checkpoint.tensors, tensors))
        remarks = (*(remark for remark in remarks if remark not in before), *after)
    left_out_tensors = checkpoint.left_out_tensors | left_out
    return replace(
        checkpoint, tensors=tensors, left_out_tensors=left_out_tensors, leave_out=tuple(patterns), remarks=remarks
    )


Rates = Mapping[str, float | None]  # bit width by weight; None: the weight is kept
# The rate that is chosen in place of the one of the decision, if any.
Chosen = tuple[float | None, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class RatePlanner:
    """What becomes of the tensors of a checkpoint with any bit widths.

    recipe: decides where no bit width is chosen
    tensors: the tensors
    decisions: what the recipe decides about each
    scaled: the weights whose input channels are scaled if they are quantized
    """

    recipe: Recipe
    tensors: Sequence[LogicalTensor]
    decisions: Sequence[Decision]
    scaled: Collection[str]
    _made: dict[tuple[int, Chosen], TensorPlan] = field(default_factory=dict)

    @cached_property
    def first_of(self) -> dict[str, int]:
        """For each tensor, by name: the place of the first whose plan differs from its own in the name alone."""
        indices: dict[tuple[object, ...], int] = {}
        return {
            tensor.name: indices.setdefault(
                (decision, tensor.shape, tensor.dtype, tensor.plain_dtype, tensor.name in self.scaled), index
            )
            for index, (tensor, decision) in enumerate(zip(self.tensors, self.decisions, strict=True))
        }

    @cached_property
    def free(self) -> frozenset[str]:
        """The weights whose bit width the recipe leaves free."""
        pairs = zip(self.tensors, self.decisions, strict=True)
        return frozenset(tensor.name for tensor, decision in pairs if decision.free and decision.codec is not None)

    def unnamed_plan(self, index: int, chosen: Chosen) -> TensorPlan:
        """Return the plan of a tensor in first_of, with an empty name.

        chosen: the rate that was chosen in place of the decision's, if any, which counts only if that is free; a rate
            of None keeps the tensor
        """
        tensor, decision = self.tensors[index], self.decisions[index]
        chosen = chosen if decision.free else ()
        if (index, chosen) not in self._made:
            self._made[index, chosen] = self._unnamed(tensor, decision, chosen)
        return self._made[index, chosen]

    def _unnamed(self, tensor: LogicalTensor, decision: Decision, chosen: Chosen) -> TensorPlan:
        codec, bits, reason = decision.codec, decision.bits, decision.reason
        if chosen:
            (rate,), reason = chosen, f"{reason}; to keep {self.recipe.goal}"
            # The rate of a group; codecs that share one may have other rates.
            bits = None if rate is None or codec is None else nearest_rate(codec, rate)
            if bits is None or not is_smaller(tensor, codec, bits):
                codec = bits = None
        if codec is not None and bits is not None:
            is_scaled = tensor.name in self.scaled
            stored = encoded_specs("", tensor.shape, get_codec(codec).at(bits), awq=is_scaled)
            reason += ", input channels scaled" if is_scaled else ""
        else:
            stored = (TensorSpec("", tensor.plain_dtype, tensor.shape),)
        action = KEEP if codec is None else QUANTIZE
        plan = TensorPlan.of(tensor, stored, role=decision.role, action=action, reason=reason, codec=codec, bits=bits)
        return plan._replace(name="")

    def planned(self, rates: Rates) -> list[TensorPlan]:
        """Plan all tensors by the recipe's decisions, with the given bit widths for those that it leaves free."""
        return [
            self.unnamed_plan(index, (rates[name],) if name in rates else ()).named(name)
            for name, index in self.first_of.items()
        ]


def rate_planner(checkpoint: Checkpoint, recipe: Recipe, scaled: frozenset[str] = frozenset()) -> RatePlanner:
    """Return what plans the tensors by the recipe's decisions, with any bit widths where the recipe gives none.

    scaled: the weights whose input channels are scaled if they are quantized

    Raises RecipeError if the recipe names a tensor that is not there.
    """
    decisions = decide(recipe, checkpoint.tensors, text_model(checkpoint.config))
    return RatePlanner(recipe=recipe, tensors=checkpoint.tensors, decisions=decisions, scaled=scaled)
