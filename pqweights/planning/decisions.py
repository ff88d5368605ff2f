"""Decisions: what a recipe makes of each tensor, judged by its name, role, shape and dtype.

With other bit widths tensors are planned again, those that differ in name alone only once (RatePlanner).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from pqweights.checkpoint.master import encoded_specs
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.advice import nearest
from pqweights.common.dtypes import item_bytes
from pqweights.common.units import counted
from pqweights.errors import RecipeError
from pqweights.formats import get_codec, nearest_rate
from pqweights.models.description import UNKNOWN, ModelDescription
from pqweights.models.names import is_behind, without_numbers
from pqweights.planning.plan import TensorPlan
from pqweights.planning.recipe import Recipe, Rule
from pqweights.planning.roles import Role, classify


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
    _check_patterns(recipe, tensors)
    _check_effects(recipe, tensors, model)
    named = [rule for rule in (*recipe.overrides, *recipe.rules) if rule.names]
    made: dict[tuple[object, ...], Decision] = {}
    kind: tuple[object, ...]
    decisions = []
    for tensor in tensors:
        name = tensor.name
        matching = tuple([rule.matches_name(name) for rule in named]) if named else ()
        # Everything that a decision depends on; thousands of experts have it in common.
        kind = (
            without_numbers(name),
            is_behind(name, model.layers),
            matching,
            tensor.dtype,
            tensor.plain_dtype,
            tensor.shape,
        )
        decision = made.get(kind)
        if decision is None:
            decision = made[kind] = _decide_one(recipe, tensor, model)
        decisions.append(decision)
    return decisions


def _decide_one(recipe: Recipe, tensor: LogicalTensor, model: ModelDescription) -> Decision:
    role = classify(tensor.name, tensor.dtype, tensor.shape, model)
    rule, why = _first_match(recipe, tensor, role)
    if rule is not None and rule.keep:
        return _kept(role, why)
    if rule is None and role.keep is not None:
        return _kept(role, role.keep)
    rule = rule or Rule()
    codec = rule.codec or recipe.codec
    bits = rule.bits or nearest_rate(codec, recipe.bits)
    if role.name == "buffer":
        return _kept(role, role.keep or "")
    if not is_smaller(tensor, codec, bits):
        encoded, plain = _sizes(tensor, codec, bits)
        return _kept(role, f"encoding would not make it smaller ({encoded} against {plain} bytes)")
    return Decision(role=role.name, codec=codec, bits=bits, reason=why, free=rule.bits is None)


def _first_match(recipe: Recipe, tensor: LogicalTensor, role: Role) -> tuple[Rule | None, str]:
    """Return the rule that decides what becomes of a tensor, and the reason; None if no rule matches."""
    for rule in recipe.overrides:
        if rule.matches(tensor, role):
            return rule, rule.reason or ""
    for number, rule in enumerate(recipe.rules, start=1):
        if rule.matches(tensor, role):
            return rule, rule.reason or f"rule {number} of the recipe"
    return None, f"default for role {role.name}"


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
    encoded = sum(spec.byte_count for spec in encoded_specs(tensor.name, tensor.shape, get_codec(codec).coder(bits)))
    return encoded, math.prod(tensor.shape) * item_bytes(tensor.plain_dtype)


def _check_patterns(recipe: Recipe, tensors: Sequence[LogicalTensor]) -> None:
    """Raise RecipeError if a name pattern of the recipe matches no tensor."""
    names = [tensor.name for tensor in tensors]
    rules = [("`keep`" if rule.keep else "`set_bits`", rule) for rule in recipe.overrides]
    rules += [(f"recipe {recipe.name!r}: rule {number}", rule) for number, rule in enumerate(recipe.rules, start=1)]
    for where, rule in rules:
        for pattern in rule.names:
            if not fnmatch.filter(names, pattern):
                raise RecipeError(
                    f"{where}: the pattern {pattern!r} matches no tensor of the checkpoint; "
                    f"{instead_of(pattern, names)}"
                )


def _check_effects(recipe: Recipe, tensors: Sequence[LogicalTensor], model: ModelDescription) -> None:
    """Raise RecipeError if an option sets the bits of no tensor.

    Such tensors have structural roles, where it has no effect, or options before it decide about all of them.
    """
    decided: dict[str, Rule] = {}  # by tensor, the first option that decides about it
    for rule in recipe.overrides:
        matching = [tensor for tensor in tensors if rule.matches_name(tensor.name)]
        roles = [classify(tensor.name, tensor.dtype, tensor.shape, model) for tensor in matching]
        if not rule.keep and roles and all(role.structural for role in roles):
            first, role = matching[0], roles[0]
            hint = "" if role.name == "buffer" else f"; only a recipe's rule with role: {role.name} quantizes those"
            raise RecipeError(
                f"{rule.reason}: matches nothing that it can quantize, only tensors such as {first.name!r} "
                f"({role.keep}){hint}"
            )
        taken = [tensor.name for tensor, role in zip(matching, roles, strict=True) if rule.matches(tensor, role)]
        if not rule.keep and taken and all(name in decided for name in taken):
            before = decided[taken[0]]
            narrower = "" if before.keep or set(before.names) == set(rule.names) else "; give it before that option"
            raise RecipeError(
                f"{rule.reason}: decides about no tensor, since {before.reason} comes first for all that it matches, "
                f"such as {taken[0]!r}{narrower}"
            )
        for name in taken:
            decided.setdefault(name, rule)


def without(checkpoint: Checkpoint, patterns: Sequence[str]) -> Checkpoint:
    """Return a checkpoint without the tensors whose names match a pattern of `leave_out`.

    Raises RecipeError for a pattern that matches none, or if nothing is left.
    """
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
    return replace(checkpoint, tensors=tensors, left_out_tensors=checkpoint.left_out_tensors | left_out)


def instead_of(pattern: str, names: Sequence[str]) -> str:
    """Return what to give in place of a pattern that matches no tensor.

    That is a wider pattern which matches some; else the nearest tensor; if none is near, the first one as an example.
    """
    for wider in (f"{pattern}.weight", f"*.{pattern}.weight", f"{pattern}.*", f"*.{pattern}.*", f"*{pattern}*"):
        matching = fnmatch.filter(names, wider)
        if matching:
            return f"did you mean {wider.replace('**', '*')!r} ({counted(len(matching), 'tensor')})?"
    fixed = pattern.replace("*", "").strip(".")
    by_part: dict[str, str] = {}
    for name in names:
        for part in (name[-len(fixed) :], *_runs(name, fixed.count(".") + 1)):
            by_part.setdefault(part, name)
    near = nearest(fixed, by_part) if fixed else None
    if near is None:
        return f"the first of its {len(names)} tensors is {names[0]!r}"
    return f"the nearest is {by_part[near]!r}"


def _runs(name: str, count: int) -> list[str]:
    """Return all runs of `count` components of a dotted name."""
    components = name.split(".")
    return [".".join(components[at : at + count]) for at in range(len(components) - count + 1)]


Rates = Mapping[str, float | None]  # bit width by weight; None: the weight is kept
# The rate that is chosen in place of the one of the decision, if any.
Chosen = tuple[float | None, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class RatePlanner:
    """What becomes of the tensors of a checkpoint with any bit widths.

    tensors: the tensors
    decisions: what the recipe decides about each
    scaled: the weights whose input channels are scaled
    unnamed: returns the plan of a tensor with an empty name: by its decision, a chosen rate, and whether it is scaled
    """

    tensors: Sequence[LogicalTensor]
    decisions: Sequence[Decision]
    scaled: Collection[str]
    unnamed: Callable[[LogicalTensor, Decision, Chosen, bool], TensorPlan]
    _made: dict[tuple[int, Chosen], TensorPlan] = field(default_factory=dict)

    @cached_property
    def first_of(self) -> dict[str, int]:
        """For each tensor, by name: the place of the first whose plan differs from its own in the name alone."""
        places: dict[tuple[object, ...], int] = {}
        return {
            tensor.name: places.setdefault(
                (decision, tensor.shape, tensor.dtype, tensor.plain_dtype, tensor.name in self.scaled), place
            )
            for place, (tensor, decision) in enumerate(zip(self.tensors, self.decisions, strict=True))
        }

    @cached_property
    def free(self) -> frozenset[str]:
        """The weights whose bit width the recipe leaves free."""
        pairs = zip(self.tensors, self.decisions, strict=True)
        return frozenset(tensor.name for tensor, decision in pairs if decision.free and decision.codec is not None)

    def unnamed_plan(self, place: int, chosen: Chosen) -> TensorPlan:
        """Return the plan of a tensor in first_of, with an empty name; a chosen rate counts only if it is free."""
        tensor, decision = self.tensors[place], self.decisions[place]
        chosen = chosen if decision.free else ()
        if (place, chosen) not in self._made:
            self._made[place, chosen] = self.unnamed(tensor, decision, chosen, tensor.name in self.scaled)
        return self._made[place, chosen]

    def planned(self, rates: Rates) -> list[TensorPlan]:
        """Plan all tensors by the recipe's decisions, with the given bit widths for those that it leaves free."""
        return [
            self.unnamed_plan(place, (rates[name],) if name in rates else ()).named(name)
            for name, place in self.first_of.items()
        ]
