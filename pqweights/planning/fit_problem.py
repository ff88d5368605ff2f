"""Fitting as a knapsack: what every bit width of every group costs, and how large the files of a choice are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from json.encoder import encode_basestring
from typing import NamedTuple

from pqweights.checkpoint.header import entry_bytes
from pqweights.checkpoint.source import Checkpoint
from pqweights.codecs import get_codec
from pqweights.errors import RecipeError
from pqweights.planning.decisions import RatePlanner
from pqweights.planning.knapsack import Choice, Solution, cheapest, curve, solve
from pqweights.planning.plan import QUANTIZE, TensorPlan, coder_of
from pqweights.planning.sensitivity_file import Sensitivity, alphas_for, groups_of
from pqweights.planning.target import SizeTarget
from pqweights.planning.totals import count

# How often the budget is corrected to meet a file size exactly: headers depend a little on what the files hold.
MOST_ROUNDS = 8
CURVE_POINTS = 12

# A result may be smaller than its target by this share; for more, codecs of any rate get finer ones.
MOST_UNUSED = 0.0005
# The steps between finer rates, in bits: what is left of a step of rates is divided by one after the other.
FINER_STEPS = (0.01, 0.001)


@dataclass(frozen=True, kw_only=True)
class RateOption:
    """One bit width of one group.

    bits: None if the whole group is kept
    bytes: size of the group's data
    cost: what counts for the target: the data, and for a file size also the entries in headers
    error: mean relative error of the group
    """

    bits: float | None
    bytes: int
    cost: int
    error: float


@dataclass(frozen=True, kw_only=True)
class FreeGroup:
    """Weights that get one bit width together, with all bit widths that they may get.

    name, weights: its name, and those of its weights
    parameters: number of elements
    alpha: sensitivity, in nats per token for a relative squared error of 1
    members: how many weights of each kind it has, and the bytes of their names
    counts_entries: whether the target counts entries in headers
    options: its bit widths, ascending, then that it is kept
    """

    name: str
    weights: tuple[str, ...]
    parameters: int
    alpha: float
    members: tuple[_Members, ...]
    counts_entries: bool
    options: tuple[RateOption, ...]


class _Members(NamedTuple):
    """The weights of a group that are of one kind (RatePlanner.kinds).

    kind: the number of the kind
    tensors: how many there are
    name_bytes: the length of all their names in a header
    """

    kind: int
    tensors: int
    name_bytes: int


def free_groups(
    checkpoint: Checkpoint, target: SizeTarget, *, sensitivity: Sensitivity | None, planner: RatePlanner
) -> tuple[tuple[FreeGroup, ...], tuple[str, ...]]:
    """Return every group with its options, and the names of the groups that the sensitivity file does not have."""
    # Weights whose bit width a rule fixes are included: they contribute to the loss, and belong to groups.
    by_name = {t.name: t for t in planner.planned({}) if t.name in planner.free or t.action == QUANTIZE}
    roles = {t.name: t.role for t in by_name.values()}
    groups = groups_of(checkpoint, list(roles.items()))
    alphas, unknown = alphas_for(groups, roles=roles, known=sensitivity)
    codecs = {by_name[name].codec or "" for name in planner.free}
    rates = sorted({bits for codec in codecs for bits in get_codec(codec).rates})
    result = []
    for name, names in groups.items():
        members = _members(names, planner)
        options = tuple(_rate_option(bits, members, planner, target.bounds_files) for bits in [*rates, None])
        group = FreeGroup(
            name=name,
            weights=tuple(names),
            parameters=sum(by_name[weight].weights for weight in names),
            alpha=alphas[name],
            members=members,
            counts_entries=target.bounds_files,
            options=options,
        )
        result.append(group)
    return tuple(result), tuple(unknown)


def _members(names: Sequence[str], planner: RatePlanner) -> tuple[_Members, ...]:
    by_kind: dict[int, list[str]] = {}
    for name in names:
        by_kind.setdefault(planner.kind_of[name], []).append(name)
    return tuple(
        _Members(kind, len(alike), sum(len(encode_basestring(name).encode()) for name in alike))
        for kind, alike in by_kind.items()
    )


def _rate_option(
    asked: float | None, members: Sequence[_Members], planner: RatePlanner, counts_entries: bool
) -> RateOption:
    """Return what the weights of a group come to when the free ones are planned with this rate, or kept if None."""
    plans = [planner.of_kind(member.kind, (asked,)) for member in members]
    deciding = [p for p, member in zip(plans, members, strict=True) if planner.is_free(member.kind)] or plans
    byte_count = entries = weights = 0
    errors = []
    for plan, member in zip(plans, members, strict=True):
        byte_count += member.tensors * plan.bytes
        weights += member.tensors * plan.weights
        errors.append(member.tensors * plan.weights * _error(plan))
        # A file's header has an entry for every stored tensor, which counts if the target is the size of files.
        if counts_entries:
            of_one = sum(entry_bytes(spec.dtype, spec.shape) + len(spec.name) for spec in plan.stored)
            entries += member.tensors * of_one + len(plan.stored) * member.name_bytes
    # Codecs that lack a rate take their nearest.
    given = {plan.bits for plan in deciding if plan.bits is not None}
    return RateOption(
        bits=given.pop() if len(given) == 1 else asked if given else None,
        bytes=byte_count,
        cost=byte_count + entries,
        error=math.fsum(errors) / weights,
    )


def _error(planned: TensorPlan) -> float:
    """Return the relative error that a codec promises; 0 for a weight that is kept."""
    return 0.0 if planned.codec is None else coder_of(planned).distortion


@dataclass(frozen=True, eq=False, kw_only=True)
class FitProblem:
    """The knapsack of all groups, and what its solutions come to in files."""

    groups: tuple[FreeGroup, ...]
    planner: RatePlanner
    file_bytes: Callable[[Sequence[TensorPlan]], int]

    @cached_property
    def choices(self) -> list[list[Choice]]:
        """For each group, a choice for each of its options."""
        return [[Choice(o.cost, group.alpha * o.error) for o in group.options] for group in self.groups]

    @cached_property
    def parameters(self) -> int:
        """The number of elements of all groups."""
        return sum(group.parameters for group in self.groups)

    @cached_property
    def all_weights(self) -> int:
        """The number of elements of the whole checkpoint."""
        return count(self.planner.planned({})).weights

    @cached_property
    def smallest(self) -> Solution:
        """The cheapest solution."""
        solution = solve(self.choices, cheapest(self.choices))
        assert solution is not None
        return solution

    @cached_property
    def cost_of_all_kept(self) -> int:
        """The cost without quantizing a free weight."""
        return sum(max(option.cost for option in group.options) for group in self.groups)

    @cached_property
    def largest(self) -> Solution:
        """The best solution that quantizes a free weight: more bytes gain nothing but keeping them all."""
        solution = solve(self.choices, self.cost_of_all_kept - 1)
        assert solution is not None
        return solution

    @cached_property
    def smallest_bytes(self) -> int:
        """The size of the cheapest solution's files."""
        return self.size(self.smallest)

    def size(self, solution: Solution) -> int:
        """Return the size of a solution's files, in bytes."""
        rates = {
            name: group.options[choice].bits
            for group, choice in zip(self.groups, solution.choices, strict=True)
            for name in group.weights
        }
        return self.file_bytes(self.planner.planned(rates))

    def solved(self, target: SizeTarget) -> tuple[FitProblem, Solution, int]:
        """Return the best solution that meets a target, the problem that it solves, and the size of its files in bytes.

        That problem is another one, with finer rates, if codecs of any rate would else leave too much of the target
        unused.

        Raises RecipeError for a target that cannot be met, or that leaves nothing to quantize.
        """
        problem, budget = self, self._budget(target)
        self._check(target, budget)
        solution, output_bytes = first, _ = self._within(target, budget)
        for step in FINER_STEPS:
            unused = budget - (output_bytes if target.bounds_files else solution.cost)
            finer = problem._with_finer_rates(solution, step)
            if unused <= MOST_UNUSED * budget or finer.groups == problem.groups:
                break
            problem, (solution, output_bytes) = finer, finer._within(target, budget)
        return problem, replace(solution, bound=min(first.bound, solution.loss)), output_bytes

    def _with_finer_rates(self, solution: Solution, step: float) -> FitProblem:
        """Return the problem of raising rates from those of a solution, at most to the next option of each group.

        step: the distance between finer rates, for groups that have a weight with a codec of any rate
        """
        groups = []
        for group, choice in zip(self.groups, solution.choices, strict=True):
            here, above = group.options[choice], group.options[choice + 1 : choice + 2]
            low, high = here.bits, above[0].bits if above else None
            finer = [] if low is None or high is None or not self._has_any_rate(group) else _between(low, high, step)
            between = [_rate_option(bits, group.members, self.planner, group.counts_entries) for bits in finer]
            groups.append(replace(group, options=(here, *between, *(above if between else ()))))
        return replace(self, groups=tuple(groups))

    def _has_any_rate(self, group: FreeGroup) -> bool:
        codecs = {
            self.planner.of_kind(member.kind, ()).codec for member in group.members if self.planner.is_free(member.kind)
        }
        return any(get_codec(codec).any_rate for codec in codecs if codec is not None)

    def _budget(self, target: SizeTarget) -> int:
        """Return what the target bounds: the size of files, or the cost of all groups."""
        if target.bounds_files:
            return target.file_bytes(self.all_weights)
        assert target.bits_per_weight is not None
        return math.floor(min(target.bits_per_weight * self.parameters / 8, 2.0**62))

    def _check(self, target: SizeTarget, budget: int) -> None:
        """Raise RecipeError for a target that cannot be met, or that leaves nothing to quantize."""
        if target.bounds_files:
            self._check_bytes(target, budget)
            return
        least = self.smallest.cost
        if budget < least:
            fewest = _bits(least, self.parameters)
            raise RecipeError(
                f"target: {target}: below the smallest possible, {fewest} per weight ({self.smallest_bytes} bytes)"
            )
        if budget >= self.cost_of_all_kept:
            most = _bits(self.largest.cost, self.parameters, most=self.cost_of_all_kept - 1)
            raise self._leaves_nothing(target, f"{most} per weight")

    def _check_bytes(self, target: SizeTarget, output_bytes: int) -> None:
        def figure(byte_count: int, most: int | None = None) -> str:
            if target.output_bytes is not None:
                return f"{byte_count} bytes"
            return f"{_bits(byte_count, self.all_weights, most=most)} per parameter ({byte_count} bytes)"

        if output_bytes < self.smallest_bytes:
            smallest = figure(self.smallest_bytes)
            raise RecipeError(f"target: {target}: below the smallest possible, {smallest}")
        most = self.file_bytes(self.planner.planned(dict.fromkeys(self.planner.free, None))) - 1
        if output_bytes > most:
            raise self._leaves_nothing(target, figure(self._best_within(most)[1], most))

    def _within(self, target: SizeTarget, budget: int) -> tuple[Solution, int]:
        """Return the best solution within the budget, and the size of its files in bytes."""
        if target.bounds_files:
            return self._best_within(budget)
        solution = solve(self.choices, budget)
        assert solution is not None
        return solution, self.size(solution)

    def _leaves_nothing(self, target: SizeTarget, most: str) -> RecipeError:
        """Return the error for a target that is met without quantizing. most: the largest that is not."""
        ruled = not self.planner.free.issuperset(name for group in self.groups for name in group.weights)
        more = " beside the weights whose bits a rule gives" if ruled else ""
        return RecipeError(f"target: {target}: leaves nothing to quantize{more}; expected at most {most}")

    def _best_within(self, output_bytes: int) -> tuple[Solution, int]:
        """Return the best solution whose files have at most `output_bytes`, and their size.

        Costs count headers except for the digits of offsets and the padding, so the budget is corrected by the size
        that each solution turns out to have.
        """
        best, best_bytes = self.smallest, self.smallest_bytes
        budget = output_bytes - (self.smallest_bytes - self.smallest.cost)
        tried: set[int] = set()
        while budget not in tried and len(tried) < MOST_ROUNDS:
            tried.add(budget)
            solution = solve(self.choices, budget)
            if solution is None:
                break
            size = self.size(solution)
            if size <= output_bytes and solution.loss <= best.loss:
                best, best_bytes = solution, size
            budget = (solution.cost if size > output_bytes else budget) + output_bytes - size
        return best, best_bytes

    def curve(self, chosen: Solution, chosen_bytes: int) -> list[tuple[int, float]]:
        """Return sizes from the smallest to beyond the chosen one, each with the least rise on the convex envelope.

        They end where nothing is left to quantize.
        """
        overhead = chosen_bytes - chosen.cost
        end = max(chosen_bytes + (chosen_bytes - self.smallest_bytes) // 2, self.smallest_bytes + 1)
        if end >= self.cost_of_all_kept + overhead:
            end = max(chosen_bytes, self.largest.cost + overhead)
        step = end - self.smallest_bytes
        sizes = {self.smallest_bytes + step * n // (CURVE_POINTS - 1) for n in range(1, CURVE_POINTS)}
        between = sorted(size for size in sizes if size != chosen_bytes)
        rises = curve(self.choices, [size - overhead for size in between])
        points = {size: max(0.0, float(rise)) for size, rise in zip(between, rises, strict=True) if rise is not None}
        points |= {self.smallest_bytes: self.smallest.loss, chosen_bytes: chosen.loss}
        return sorted(points.items())


def _between(low: float, high: float, step: float) -> list[float]:
    """Return the multiples of a step between two rates, in the decimals of the step."""
    numbers = range(math.floor(low / step), math.ceil(high / step) + 1)
    return [bits for number in numbers if low < (bits := round(number * step, 3)) < high]


def _bits(byte_count: int, weights: int, *, most: int | None = None) -> str:
    """Return bits with their mean over weights to four digits, rounded so that the figure can be a target itself.

    A target must not be below the size, so the figure is rounded up, or down if it would be above `most` bytes.
    """
    ten_thousandths = math.ceil(80_000 * byte_count / weights)
    if most is not None and ten_thousandths * weights > 80_000 * most:
        ten_thousandths -= 1
    return f"{ten_thousandths / 10_000:.4f} bits"
