"""Fitting: a bit width for every weight, so that the result has a given size and the loss is predicted to rise least.

The predicted rise is the sum of alpha * t^2 over groups of weights (sensitivity.py), where t^2 is the relative
error that a codec promises at a bit width. Groups are weights that runtimes fuse, sizes are counted to the byte, and a
knapsack is solved (knapsack.py). docs/fit.md describes the method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from pqweights.checkpoint.header import entry_bytes
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.strict_json import rounded
from pqweights.errors import RecipeError
from pqweights.formats import get_codec
from pqweights.planning.decisions import RatePlanner, Rates
from pqweights.planning.knapsack import Choice, Solution, best_within, cheapest, least_cost, solve
from pqweights.planning.layout import QUANTIZE, Safetensors, block_format_of
from pqweights.planning.recipe import Goal
from pqweights.planning.sensitivity import HEURISTIC, Sensitivity, alphas_for, groups_of, taken_apart

# A result may be smaller than its target by this share; for more, codecs of any rate get finer ones.
MOST_UNUSED = 0.0005
# The steps between finer rates, in bits: what is left of a step of rates is divided by one after the other.
FINER_STEPS = (0.01, 0.001)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Bit widths for all groups of weights.

    goal: what the bit widths were chosen to meet
    sensitivity: where the sensitivities come from; None for the rule of thumb
    groups: every group with the bit width that was chosen, as its only option
    output_bytes: size of the safetensors files
    bits_per_weight: mean over all weights that the recipe would quantize; those that are kept count as they are
    bits_per_parameter: mean over all parameters of the checkpoint, with all bytes of the safetensors files
    smallest_bytes: the smallest size that is possible
    unknown: groups that were not measured
    free: the weights whose bit width no rule gives
    """

    goal: Goal
    sensitivity: Sensitivity | None
    groups: tuple[WeightGroup, ...]
    output_bytes: int
    bits_per_weight: float
    bits_per_parameter: float
    smallest_bytes: int
    unknown: tuple[str, ...]
    free: frozenset[str]

    @property
    def rise(self) -> float:
        """The predicted rise of the loss, in nats per token."""
        return math.fsum(group.rise for group in self.groups)

    @property
    def rates(self) -> Rates:
        """The bit widths of the weights that were free."""
        return {name: group.bits for group in self.groups for name in group.weights if name in self.free}

    def describe(self) -> dict[str, Any]:
        """Return what the manifest states of the fit."""
        by: dict[str, Any] = {"kind": HEURISTIC}
        if self.sensitivity is not None:
            by = self.sensitivity.to_json()
        return {"sensitivity": by, "predicted_rise": rounded(self.rise)}

    def to_json(self) -> dict[str, Any]:
        """Return what `plan --json` prints of the fit."""
        return self.describe() | {
            "target": self.goal.to_json(),
            "output_bytes": self.output_bytes,
            "bits_per_weight": self.bits_per_weight,
            "bits_per_parameter": self.bits_per_parameter,
            "smallest_bytes": self.smallest_bytes,
            "unknown_groups": list(self.unknown),
            "groups": [group.to_json() for group in self.groups],
        }


def fit(
    checkpoint: Checkpoint,
    goal: Goal,
    *,
    sensitivity: Sensitivity | None,
    planner: RatePlanner,
    max_shard_bytes: int,
) -> Fit:
    """Choose bit widths for the free weights of a checkpoint, one for each group.

    sensitivity: None for the rule of thumb
    planner: plans all tensors with given bit widths, and by the recipe where none is given
    max_shard_bytes: data bytes after which a new file begins

    Raises RecipeError for a size below the smallest possible, and for a goal that leaves nothing to quantize;
    OptionError for a divergence without sensitivities.
    """
    if not planner.free:
        raise RecipeError(
            f"target: {goal}: expected weights whose bit width is free, found none that the recipe quantizes without "
            "bits of their own"
        )
    goal.check_measured(sensitivity)
    groups, unknown = free_groups(checkpoint, sensitivity=sensitivity, planner=planner)
    parameters, counts_files = sum(group.parameters for group in groups), goal.output_bytes is not None
    limit = 0 if goal.divergence is not None else goal.limit(parameters)

    def size(solution: Solution) -> int:
        chosen = zip(groups, solution.choices, strict=True)
        tensors = planner.planned({n: group.options[at].bits for group, at in chosen for n in group.weights})
        return sum(shard.file_bytes for shard in Safetensors().shards(tensors, max_shard_bytes))

    def measured(solution: Solution) -> int:
        return size(solution) if counts_files else solution.cost

    def figure(solution: Solution, rounding: Callable[[float], int]) -> str:
        if counts_files:
            return f"{size(solution)} bytes"
        bits = rounding(80_000 * solution.cost / parameters) / 10_000
        return f"{bits:.4f} bits per weight ({size(solution)} bytes)"

    choices = [group.choices(with_headers=counts_files) for group in groups]
    smallest = solve(choices, cheapest(choices))
    assert smallest is not None
    smallest_bytes = size(smallest)
    if goal.divergence is None and measured(smallest) > limit:
        raise RecipeError(f"target: {goal}: below the smallest possible, {figure(smallest, math.ceil)}")
    solution = _solved(goal, choices, limit, measured, figure)
    for step in FINER_STEPS if goal.divergence is None else ():
        if limit - measured(solution) <= MOST_UNUSED * limit:
            break
        groups = [g.with_finer_rates(at, step, planner) for g, at in zip(groups, solution.choices, strict=True)]
        solution = best_within([group.choices(with_headers=counts_files) for group in groups], limit, measured)
    chosen = zip(groups, solution.choices, strict=True)
    fitted = tuple(replace(group, options=(group.options[at],)) for group, at in chosen)
    output_bytes = size(solution)
    return Fit(
        goal=goal,
        sensitivity=sensitivity,
        groups=fitted,
        output_bytes=output_bytes,
        bits_per_weight=8 * sum(group.bytes for group in fitted) / parameters,
        bits_per_parameter=8 * output_bytes / sum(t.weights for t in planner.planned({}) if t.role != "buffer"),
        smallest_bytes=smallest_bytes,
        unknown=tuple(unknown),
        free=planner.free,
    )


def _solved(
    goal: Goal,
    choices: Sequence[Sequence[Choice]],
    limit: int,
    measured: Callable[[Solution], int],
    figure: Callable[[Solution, Callable[[float], int]], str],
) -> Solution:
    """Choose among the listed bit widths. Raises RecipeError for a goal that leaves nothing to quantize.

    limit, measured: of a size: the most bytes, and what counts of a solution
    figure: what messages say of the size of a solution
    """
    kept = Solution(tuple(len(of) - 1 for of in choices), sum(of[-1].cost for of in choices), 0.0)
    if goal.divergence is not None:
        solution = least_cost(choices, goal.divergence) or kept  # as kept weights lose nothing
    elif measured(kept) <= limit:
        most = figure(kept, math.floor)
        raise RecipeError(f"target: {goal}: leaves nothing to quantize; expected less than {most}")
    else:
        solution = best_within(choices, limit, measured)
    if solution.choices == kept.choices:
        raise RecipeError(f"target: {goal}: leaves nothing to quantize; expected more")
    return solution


class RateOption(NamedTuple):
    """One bit width of one group.

    bits: None if the whole group is kept
    bytes: size of the group's data
    header_bytes: size of its entries in headers
    error: mean relative error of the group
    """

    bits: float | None
    bytes: int
    header_bytes: int
    error: float


# Weights of a group whose plans differ in their names alone: the index of the first of them in RatePlanner.tensors, how
# many there are, and the length of all their names in a header.
_Alike = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """Weights that get one bit width together, with all that they may get; once it is chosen, with that alone.

    name, weights: its name, and those of its weights
    parameters: number of elements
    alpha: sensitivity, in nats per token for a relative squared error of 1
    members: its weights
    any_rate: whether a codec of its weights has all rates between those that are listed
    options: its bit widths, ascending, then that it is kept
    """

    name: str
    weights: tuple[str, ...]
    parameters: int
    alpha: float
    members: tuple[_Alike, ...]
    any_rate: bool
    options: tuple[RateOption, ...]

    @property
    def bits(self) -> float | None:
        """The bit width that was chosen; None if the weights are kept."""
        return self.options[0].bits

    @property
    def bytes(self) -> int:
        """Their size in the result."""
        return self.options[0].bytes

    @property
    def rise(self) -> float:
        """The predicted rise of the loss, in nats per token."""
        return self.alpha * self.options[0].error

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `plan --json`, once a bit width is chosen."""
        keys = ("name", "weights", "bits", "bytes", "parameters", "alpha", "rise")
        return {key: getattr(self, key) for key in keys} | {"weights": list(self.weights)}

    def choices(self, *, with_headers: bool) -> list[Choice]:
        """Return the options as those of a knapsack. with_headers: whether entries in headers cost something."""
        return [Choice(o.bytes + with_headers * o.header_bytes, self.alpha * o.error) for o in self.options]

    def with_finer_rates(self, chosen: int, step: float, planner: RatePlanner) -> WeightGroup:
        """Return the group with multiples of `step` between a chosen option and the next, and with no others.

        A group without such rates has the chosen option alone.
        """
        here, above = self.options[chosen], self.options[chosen + 1 : chosen + 2]
        low, high = here.bits, above[0].bits if above else None
        if not self.any_rate or low is None or high is None:
            return replace(self, options=(here,))
        numbers = range(math.floor(low / step), math.ceil(high / step) + 1)
        finer = [bits for number in numbers if low < (bits := round(number * step, 3)) < high]
        between = [_rate_option(bits, self.members, planner) for bits in finer]
        return replace(self, options=(here, *between, *above) if between else (here,))


def free_groups(
    checkpoint: Checkpoint, *, sensitivity: Sensitivity | None, planner: RatePlanner
) -> tuple[list[WeightGroup], list[str]]:
    """Return every group with its options, and the names of the groups that were not measured."""
    # Weights whose bit width a rule fixes are included: they contribute to the loss, and belong to groups.
    by_name = {t.name: t for t in planner.planned({}) if t.name in planner.free or t.action == QUANTIZE}
    roles = {t.name: t.role for t in by_name.values()}
    groups = groups_of(checkpoint, list(roles.items()))
    alphas, unknown = alphas_for(groups, roles=roles, known=sensitivity)
    codec_of = {name: get_codec(by_name[name].codec or "") for name in planner.free}
    if all(codec.any_rate for codec in codec_of.values()):
        groups, alphas = taken_apart(groups, alphas, roles, sensitivity)
    rates = sorted({bits for codec in codec_of.values() for bits in codec.rates})
    result = []
    for name, names in groups.items():
        members = _alike(names, planner)
        group = WeightGroup(
            name=name,
            weights=tuple(names),
            parameters=sum(by_name[weight].weights for weight in names),
            alpha=alphas[name],
            members=members,
            any_rate=any(codec_of[weight].any_rate for weight in names if weight in codec_of),
            options=tuple(_rate_option(bits, members, planner) for bits in [*rates, None]),
        )
        result.append(group)
    return result, unknown


def _alike(names: Sequence[str], planner: RatePlanner) -> tuple[_Alike, ...]:
    by_index: dict[int, list[str]] = {}
    for name in names:
        by_index.setdefault(planner.first_of[name], []).append(name)
    return tuple(
        (index, len(alike), sum(len(encode_basestring(name).encode()) for name in alike))
        for index, alike in by_index.items()
    )


def _rate_option(rate: float | None, members: Sequence[_Alike], planner: RatePlanner) -> RateOption:
    """Return what the weights of a group come to when the free ones are planned with this rate, or kept if None."""
    byte_count = header_bytes = weights = 0
    errors, free_bits, fixed_bits = [], set[float | None](), set[float | None]()
    for index, tensors, name_bytes in members:
        plan = planner.unnamed_plan(index, (rate,))
        (free_bits if planner.tensors[index].name in planner.free else fixed_bits).add(plan.bits)
        byte_count += tensors * plan.bytes
        # A file's header has an entry for every stored tensor.
        header_bytes += tensors * sum(entry_bytes(spec.dtype, spec.shape) + len(spec.name) for spec in plan.stored)
        header_bytes += len(plan.stored) * name_bytes
        weights += tensors * plan.weights
        errors.append(
            0.0 if plan.codec is None else tensors * plan.weights * block_format_of(plan).least_squares().distortion
        )
    # Codecs that lack a rate take their nearest.
    given = (free_bits or fixed_bits) - {None}
    bits = given.pop() if len(given) == 1 else rate if given else None
    return RateOption(bits, byte_count, header_bytes, math.fsum(errors) / weights)
