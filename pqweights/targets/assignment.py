"""What targets make of a recipe: the formats that weights get by rules, or so that the result has a given size.

A target says which formats it has, what its runtime computes with as one layer, and what a format costs there.
docs/exports.md has the rules as users see them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.advice import instead
from pqweights.common.documents import as_json
from pqweights.common.options import Options
from pqweights.errors import OptionError, RecipeError
from pqweights.formats.packing import RoundingRule
from pqweights.kernels.gguf_encoding import BlockRule
from pqweights.kernels.groups import FloatRule
from pqweights.models import text_model
from pqweights.planning.knapsack import Choice, Solution, best_within, least_cost
from pqweights.planning.recipe import NOTHING, Recipe, Rule
from pqweights.planning.roles import role_of
from pqweights.planning.sensitivity import alphas_for, groups_of

# The format of a weight that stays as it is.
PLAIN = "plain"
# The relative squared error of 16 bits.
PLAIN_ERROR = 1e-8
SAMPLES = 1 << 16


def recipe_of(options: Options, formats: Sequence[str]) -> Recipe:
    """Return the recipe of an export with formats as its target spells them. formats: those that the target has

    Raises OptionError for a format that the target does not have.
    """
    recipe = options.recipe if isinstance(options.recipe, Recipe) else NOTHING
    spelled = [_spelled(label, rule, formats) for label, rule in recipe.labelled]
    first = len(recipe.overrides)
    return replace(
        recipe, overrides=tuple(spelled[:first]), rules=tuple(spelled[first:]), sensitivity=options.sensitivity
    )


def _spelled(label: str, rule: Rule, formats: Sequence[str]) -> Rule:
    if rule.format is None:
        return rule
    by_name = {known.lower(): known for known in formats}
    if rule.format.lower() not in by_name:
        name = rule.format.upper() if formats[0].isupper() else rule.format.lower()
        raise OptionError(f"{label}: {instead(name, list(formats))}")
    return msgspec.structs.replace(rule, format=by_name[rule.format.lower()])


def describe(recipe: Recipe) -> dict[str, Any]:
    """Return what the manifest of an export says of its recipe; what is not said is the default."""
    rules = [msgspec.structs.replace(rule, reason=None) for _, rule in recipe.labelled]
    stated: dict[str, Any] = {"rules": [as_json(rule) for rule in rules]} if rules else {}
    stated |= {} if recipe.goal is None else recipe.goal.to_json()
    return stated | ({} if recipe.sensitivity is None else {"sensitivity": recipe.sensitivity.to_json()})


class Candidate(NamedTuple):
    """A format that a layer can have. cost: in bytes, of all its weights. error: their relative squared error."""

    format: str
    cost: int
    error: float


def chosen_within(
    recipe: Recipe,
    layers: Mapping[str, Sequence[Candidate]],
    *,
    overhead: int,
    weights: Mapping[str, Sequence[str]],
    roles: Mapping[str, str],
    parameters: int,
) -> dict[str, str]:
    """Return the format of each layer, so that the predicted rise of the loss is least within the size of a recipe.

    If the recipe bounds the divergence, the size is least within that.

    layers: the formats that each layer can have, by name
    overhead: what else the files hold, in bytes
    weights: the names of the weights of each layer
    roles: the role of each weight
    parameters: how many elements the layers have

    Raises RecipeError for a goal that cannot be met, OptionError for a divergence without sensitivities.
    """
    assert recipe.goal is not None
    recipe.goal.check_measured(recipe.sensitivity)
    alphas, _ = alphas_for(weights, roles=roles, known=recipe.sensitivity)
    choices = [[Choice(c.cost, alphas[name] * c.error) for c in candidates] for name, candidates in layers.items()]
    if recipe.goal.divergence is not None:
        solution = least_cost(choices, recipe.goal.divergence)
        if solution is None:
            possible = sum(min(choice.loss for choice in of) for of in choices)
            raise RecipeError(f"target: {recipe.goal}: below the least possible, {possible:.2g}")
        return _chosen(layers, solution)
    besides = overhead if recipe.goal.output_bytes is not None else 0
    limit = recipe.goal.limit(parameters)
    most = sum(max(choice.cost for choice in of) for of in choices) + besides
    if most <= limit:
        more = recipe.goal.measured(most, parameters)
        raise RecipeError(f"target: {recipe.goal}: leaves nothing to quantize; expected less than {more}")
    solution = best_within(choices, limit, lambda solution: solution.cost + besides)
    if solution.cost + besides > limit:
        least = recipe.goal.measured(solution.cost + besides, parameters)
        names = ", ".join(dict.fromkeys(candidate.format for of in layers.values() for candidate in of))
        raise RecipeError(f"target: {recipe.goal}: below the smallest possible, {least}, of {names}")
    return _chosen(layers, solution)


def _chosen(layers: Mapping[str, Sequence[Candidate]], solution: Solution) -> dict[str, str]:
    """Return the format of each layer in a solution."""
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
        roles = {s.name: role_of(s, model) for s in sources.values()}
        weights = groups_of(checkpoint, list(roles.items()))
        members = {layer: [name for source in names for name in made[source]] for layer, names in weights.items()}
        return Layers(members, weights, roles)


@functools.cache
def distortion(rule: RoundingRule) -> float:
    """Return the relative squared error of Gaussian weights, always the same ones."""
    if isinstance(rule, BlockRule):
        return rule.distortion
    length = rule.row_length * rule.rows if isinstance(rule, FloatRule) and rule.rows > 1 else rule.group_size
    values = np.random.default_rng(0).standard_normal(-(-SAMPLES // length) * length, dtype=np.float32)
    groups = rule.quantize(values)
    return float(groups.errors.sum() / groups.energies.sum())
