"""Fitting as a knapsack: what every bit width of every group costs, and how large the files of a choice are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pqweights.checkpoint.header import encode_header
from pqweights.checkpoint.source import Checkpoint
from pqweights.codecs import get_codec
from pqweights.errors import RecipeError
from pqweights.planning.knapsack import Choice, Solution, cheapest, curve, solve
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.planning.sensitivity_file import Sensitivity, alphas_for, groups_of
from pqweights.planning.target import SizeTarget
from pqweights.planning.totals import count

# How often the budget is corrected to meet a file size exactly: headers depend a little on what the files hold.
MOST_ROUNDS = 8
CURVE_POINTS = 12

Rates = Mapping[str, float | None]  # bit width by weight; None: the weight is kept


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
    """Weights that get one bit width together, with all bit widths that they may get."""

    name: str
    weights: tuple[str, ...]
    parameters: int
    alpha: float
    options: tuple[RateOption, ...]


def free_groups(
    checkpoint: Checkpoint,
    target: SizeTarget,
    *,
    sensitivity: Sensitivity | None,
    planned: Callable[[Rates], Sequence[TensorPlan]],
    free: frozenset[str],
) -> tuple[tuple[FreeGroup, ...], tuple[str, ...]]:
    """Return every group with its options, and the names of the groups that the sensitivity file does not have."""
    # Weights whose bit width a rule fixes are included: they contribute to the loss, and belong to groups.
    by_name = {t.name: t for t in planned({}) if t.name in free or t.action == QUANTIZE}
    roles = {t.name: t.role for t in by_name.values()}
    groups = groups_of(checkpoint, list(roles.items()))
    alphas, unknown = alphas_for(groups, roles=roles, known=sensitivity)
    codecs = {by_name[name].codec or "" for name in free}
    rates = sorted({bits for codec in codecs for bits in get_codec(codec).rates})
    plans = [{t.name: t for t in planned(dict.fromkeys(free, bits))} for bits in [*rates, None]]
    found = tuple(
        FreeGroup(
            name=name,
            weights=tuple(names),
            parameters=sum(by_name[weight].weights for weight in names),
            alpha=alphas[name],
            options=tuple(
                _rate_option(bits, [plan[weight] for weight in names], free, target)
                for bits, plan in zip([*rates, None], plans, strict=True)
            ),
        )
        for name, names in groups.items()
    )
    return found, tuple(unknown)


def _rate_option(
    asked: float | None, parts: Sequence[TensorPlan], free: frozenset[str], target: SizeTarget
) -> RateOption:
    """Return what the weights of a group come to when the free ones are planned with this rate, or kept if None."""
    deciding = [part for part in parts if part.name in free] or parts
    byte_count = sum(part.bytes for part in parts)
    # A file's header has an entry for every stored tensor, which counts if the target is the size of files.
    entries = len(encode_header([spec for part in parts for spec in part.stored], {})) if target.bounds_files else 0
    # Codecs that lack a rate take their nearest.
    given = {part.bits for part in deciding if part.bits is not None}
    return RateOption(
        bits=given.pop() if len(given) == 1 else asked if given else None,
        bytes=byte_count,
        cost=byte_count + entries,
        error=math.fsum(_error(part) * part.weights for part in parts) / sum(part.weights for part in parts),
    )


def _error(planned: TensorPlan) -> float:
    """Return the relative error that a codec promises; 0 for a weight that is kept."""
    if planned.codec is None or planned.bits is None:
        return 0.0
    return get_codec(planned.codec).coder(planned.bits).distortion


@dataclass(frozen=True, eq=False, kw_only=True)
class FitProblem:
    """The knapsack of all groups, and what its solutions come to in files."""

    groups: tuple[FreeGroup, ...]
    free: frozenset[str]
    planned: Callable[[Rates], Sequence[TensorPlan]]
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
        return count(self.planned({})).weights

    @cached_property
    def smallest(self) -> Solution:
        """The cheapest solution."""
        found = solve(self.choices, cheapest(self.choices))
        assert found is not None
        return found

    @cached_property
    def cost_of_all_kept(self) -> int:
        """The cost without quantizing a free weight."""
        return sum(max(option.cost for option in group.options) for group in self.groups)

    @cached_property
    def largest(self) -> Solution:
        """The best solution that quantizes a free weight: more bytes gain nothing but keeping them all."""
        found = solve(self.choices, self.cost_of_all_kept - 1)
        assert found is not None
        return found

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
        return self.file_bytes(self.planned(rates))

    def solved(self, target: SizeTarget) -> tuple[Solution, int]:
        """Return the best solution that meets a target, and the size of its files in bytes.

        Raises RecipeError for a target that cannot be met, or that leaves nothing to quantize.
        """
        if target.bounds_files:
            return self._within_bytes(target)
        solution = self._within_bits(target)
        return solution, self.size(solution)

    def _within_bits(self, target: SizeTarget) -> Solution:
        assert target.bits_per_weight is not None
        budget = math.floor(min(target.bits_per_weight * self.parameters / 8, 2.0**62))
        least = self.smallest.cost
        if budget < least:
            fewest = _bits(least, self.parameters)
            raise RecipeError(
                f"target: {target}: below the smallest possible, {fewest} per weight ({self.smallest_bytes} bytes)"
            )
        if budget >= self.cost_of_all_kept:
            most = _bits(self.largest.cost, self.parameters, most=self.cost_of_all_kept - 1)
            raise self._leaves_nothing(target, f"{most} per weight")
        solution = solve(self.choices, budget)
        assert solution is not None
        return solution

    def _within_bytes(self, target: SizeTarget) -> tuple[Solution, int]:
        weights, output_bytes = self.all_weights, target.file_bytes(self.all_weights)

        def figure(byte_count: int, most: int | None = None) -> str:
            if target.output_bytes is not None:
                return f"{byte_count} bytes"
            return f"{_bits(byte_count, weights, most=most)} per parameter ({byte_count} bytes)"

        if output_bytes < self.smallest_bytes:
            smallest = figure(self.smallest_bytes)
            raise RecipeError(f"target: {target}: below the smallest possible, {smallest}")
        most = self.file_bytes(self.planned(dict.fromkeys(self.free, None))) - 1
        if output_bytes > most:
            raise self._leaves_nothing(target, figure(self._best_within(most)[1], most))
        return self._best_within(output_bytes)

    def _leaves_nothing(self, target: SizeTarget, most: str) -> RecipeError:
        """Return the error for a target that is met without quantizing. most: the largest that is not."""
        ruled = not self.free.issuperset(name for group in self.groups for name in group.weights)
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
            found = self.size(solution)
            if found <= output_bytes and solution.loss <= best.loss:
                best, best_bytes = solution, found
            budget = (solution.cost if found > output_bytes else budget) + output_bytes - found
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


def _bits(byte_count: int, weights: int, *, most: int | None = None) -> str:
    """Return bits with their mean over weights to four digits, rounded so that the figure can be a target itself.

    A target must not be below the size, so the figure is rounded up, or down if it would be above `most` bytes.
    """
    ten_thousandths = math.ceil(80_000 * byte_count / weights)
    if most is not None and ten_thousandths * weights > 80_000 * most:
        ten_thousandths -= 1
    return f"{ten_thousandths / 10_000:.4f} bits"
