"""Which format each weight gets, for every target: by default, by rules, or so that the result has a given size.

A target says which formats it has, what its runtime computes with as one layer, and what a format costs there.
docs/exports.md has the rules as users see them.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import sources_of
from pqweights.common.advice import instead
from pqweights.common.units import parse_size
from pqweights.errors import OptionError, RecipeError
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.models import text_model
from pqweights.models.names import role_name
from pqweights.planning.decisions import instead_of
from pqweights.planning.knapsack import Choice, cheapest, solve
from pqweights.planning.options import ExportOptions
from pqweights.planning.roles import ROLES
from pqweights.planning.sensitivity import Sensitivity, alphas_for, groups_of
from pqweights.targets.formats import BlockRule, Rule, TileRule

# The format of a weight that a rule keeps as it is.
PLAIN = "plain"
ROLE = "role:"
# The relative squared error of 16 bits.
PLAIN_ERROR = 1e-8
SAMPLES = 1 << 16


class FormatRule(NamedTuple):
    """The format of the weights whose name matches a pattern, or of a role: role:expert."""

    pattern: str
    format: str

    def matches(self, names: Iterable[str], role: str) -> bool:
        """Whether it is about a weight. names: its name, and others by which it is known"""
        if self.pattern.startswith(ROLE):
            return role == self.pattern.removeprefix(ROLE)
        return any(fnmatch.fnmatchcase(name, self.pattern) for name in names)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a user asks for.

    rules: the first that matches a weight, or another one of its fused layer, decides; others get the default
    target_size: the largest size of the weights' files, in bytes, for which formats are then chosen where no rule
        decides; None to take the default
    known: by what they are chosen: sensitivities that were measured; None for the rule of thumb
    """

    rules: tuple[FormatRule, ...] = ()
    target_size: int | None = None
    known: Sensitivity | None = None

    @staticmethod
    def of(options: ExportOptions, formats: Sequence[str]) -> Assignment:
        """Check what a user asks for. formats: those that the target has

        Raises OptionError for an unknown format or role, and for options that contradict each other.
        """
        size = options.target_size
        rules = tuple(
            FormatRule(pattern, known_format(f"`set_format` {pattern}={name}", name, (*formats, PLAIN)))
            for pattern, name in options.set_format or ()
        )
        for rule in rules:
            role = rule.pattern.removeprefix(ROLE)
            if role != rule.pattern and role not in ROLES:
                raise OptionError(f"`set_format` {rule.pattern}: {instead(role, ROLES)}")
        return Assignment(
            rules=rules,
            target_size=None if size is None else parse_size(size),
            known=options.sensitivity,
        )

    def describe(self, rules: str = "formats") -> dict[str, Any]:
        """Return what a manifest says of the choice; what is not said is the default. rules: its key for the rules"""
        stated: dict[str, Any] = {rules: [list(rule) for rule in self.rules]} if self.rules else {}
        if self.target_size is not None:
            stated["target_size"] = self.target_size
        if self.known is not None:
            stated["sensitivity"] = self.known.to_json()
        return stated

    def rule_of(self, weights: Iterable[tuple[Sequence[str], str]]) -> FormatRule | None:
        """Return the rule of a layer. weights: the names of each of its weights, and its role"""
        known = list(weights)
        return next((r for r in self.rules if any(r.matches(names, role) for names, role in known)), None)

    def check_used(self, used: Iterable[FormatRule | None], names: Sequence[str]) -> None:
        """Raise RecipeError for a pattern of names that decides about nothing; a model need not have each role.

        names: those of the weights that are known
        """
        known = set(used)
        unused = [rule.pattern for rule in self.rules if rule not in known and not rule.pattern.startswith(ROLE)]
        if unused:
            pattern = unused[0]
            near = "" if fnmatch.filter(names, pattern) else f"; {instead_of(pattern, names)}"
            raise RecipeError(
                f"pattern {pattern!r}: matches no weight that can be quantized before another rule does; names are "
                f"those of the checkpoint or of the runtime{near}"
            )


# What is asked for if nothing is.
NOTHING = Assignment()


def known_format(where: str, name: str, formats: Sequence[str]) -> str:
    """Return a format as the target spells it. Raises OptionError, which begins with `where`."""
    by_name = {known.lower(): known for known in formats}
    if name.lower() not in by_name:
        asked = name.upper() if formats[0].isupper() else name.lower()
        raise OptionError(f"{where}: {instead(asked, list(formats))}")
    return by_name[name.lower()]


class Candidate(NamedTuple):
    """A format that a layer can have. cost: in bytes, of all its weights. error: their relative squared error."""

    format: str
    cost: int
    error: float


def chosen_within(
    target_bytes: int,
    layers: Mapping[str, Sequence[Candidate]],
    *,
    overhead: int,
    weights: Mapping[str, Sequence[str]],
    roles: Mapping[str, str],
    known: Sensitivity | None,
) -> dict[str, str]:
    """Return the format of each layer, so that the predicted rise of the loss is least within a size.

    layers: the formats that each layer can have, by name
    overhead: what else the files hold, in bytes
    weights: the names of the weights of each layer
    roles: the role of each weight

    Raises RecipeError for a size that cannot be met.
    """
    alphas, _ = alphas_for(weights, roles=roles, known=known)
    choices = [[Choice(c.cost, alphas[name] * c.error) for c in candidates] for name, candidates in layers.items()]
    solution = solve(choices, target_bytes - overhead)
    if solution is None:
        least = overhead + cheapest(choices)
        raise RecipeError(f"target: {target_bytes} bytes: below the smallest possible, {least} bytes")
    return {name: layers[name][number].format for name, number in zip(layers, solution.choices, strict=True)}


class Layers(NamedTuple):
    """Which tensors of a runtime share a format.

    members: the names of the tensors of each layer
    weights: the names of the weights of the checkpoint that those are made of
    roles: the role of each of these weights
    """

    members: dict[str, list[str]]
    weights: dict[str, list[str]]
    roles: dict[str, str]

    @staticmethod
    def of(checkpoint: Checkpoint, sources: Mapping[str, LogicalTensor]) -> Layers:
        """Put tensors together whose weights share a bit width in a master.

        sources: the first weight that each tensor is made of, by its name; those of a stack have one
        """
        made: dict[str, list[str]] = {}
        for name, source in sources.items():
            made.setdefault(source.name, []).append(name)
        model = text_model(checkpoint.config)
        roles = {s.name: role_name(s.name, s.dtype, s.shape, model) for s in sources.values()}
        weights = groups_of(checkpoint, list(roles.items()))
        members = {layer: [name for source in names for name in made[source]] for layer, names in weights.items()}
        return Layers(members, weights, roles)


def made_of(tensor: LogicalTensor) -> tuple[LogicalTensor, ...]:
    """Return the weights of the checkpoint that a tensor is put together from, or itself."""
    return sources_of(tensor) or (tensor,)


def known_names(tensor: LogicalTensor) -> list[str]:
    """Return the names of a tensor that rules may mean: its own, and those of what it is made of."""
    return [tensor.name, *(source.name for source in made_of(tensor))]


@functools.cache
def distortion(rule: Rule) -> float:
    """Return the relative squared error of Gaussian weights, always the same ones."""
    if isinstance(rule, BlockRule):
        return BLOCK_TYPES[rule.kind].distortion
    length = rule.row_length * rule.rows if isinstance(rule, TileRule) else rule.group_size
    values = np.random.default_rng(0).standard_normal(-(-SAMPLES // length) * length, dtype=np.float32)
    groups = rule.quantize(values)
    return float(groups.errors.sum() / groups.energies.sum())
