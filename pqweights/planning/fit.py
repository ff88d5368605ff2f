"""Fitting: a bit width for every weight, so that the result has a given size and the loss is predicted to rise least.

The predicted rise is the sum of alpha * t^2 over groups of weights (sensitivity_file.py), where t^2 is the relative
error that a codec promises at a bit width. Groups are weights that runtimes fuse (groups.py), sizes are counted to the
byte, and the choice is the optimum (knapsack.py). docs/fit.md describes the method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pqweights.checkpoint.header import encode_header
from pqweights.checkpoint.source import Checkpoint
from pqweights.codecs import get_codec
from pqweights.errors import RecipeError
from pqweights.planning.knapsack import Choice, Solution, cheapest, curve, solve
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.planning.recipe import SizeTarget
from pqweights.planning.sensitivity_file import HEURISTIC, Sensitivity, alphas_for, groups_of
from pqweights.strict_json import rounded

# How often the budget is corrected to meet a file size exactly: headers depend a little on what the files hold.
MOST_ROUNDS = 8
CURVE_POINTS = 12

Rates = Mapping[str, float | None]  # bit width by weight; None: the weight is kept


@dataclass(frozen=True, kw_only=True)
class FittedGroup:
    """A group of weights with its bit width.

    name: the name of the group
    weights: the names of its weights
    bits: their bit width; None if they are kept
    bytes: their size in the result
    parameters: number of elements
    alpha: sensitivity, in nats per token for a relative squared error of 1
    rise: the predicted rise of the loss, in nats per token
    """

    name: str
    weights: tuple[str, ...]
    bits: float | None
    bytes: int
    parameters: int
    alpha: float
    rise: float


@dataclass(frozen=True)
class CurvePoint:
    """The least predicted rise of the loss at a size."""

    output_bytes: int
    rise: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Bit widths for all groups of weights.

    target: what the bit widths were chosen to meet
    sensitivity: where the sensitivities come from; None for the rule of thumb
    groups: every group with its bit width
    output_bytes: size of the safetensors files
    bits_per_weight: mean over all weights that the recipe would quantize; those that are kept count as they are
    smallest_bytes: the smallest size that is possible
    gap: the predicted rise is at most this share above the least possible one
    unknown: groups that the sensitivity file does not have
    curve: the least rise at sizes from the smallest one on
    free: the weights whose bit width no rule gives
    """

    target: SizeTarget
    sensitivity: Sensitivity | None
    groups: tuple[FittedGroup, ...]
    output_bytes: int
    bits_per_weight: float
    smallest_bytes: int
    gap: float
    unknown: tuple[str, ...]
    curve: tuple[CurvePoint, ...]
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
        """Return the manifest's account of the fit."""
        by: dict[str, Any] = {"kind": HEURISTIC}
        if self.sensitivity is not None:
            by = {"kind": self.sensitivity.method.get("kind"), "sha256": self.sensitivity.sha256}
        return {"sensitivity": by, "predicted_rise": rounded(self.rise)}

    def to_json(self) -> dict[str, Any]:
        """Return what `plan --json` prints of the fit."""
        return self.describe() | {
            "target": self.target.to_json(),
            "output_bytes": self.output_bytes,
            "bits_per_weight": self.bits_per_weight,
            "smallest_bytes": self.smallest_bytes,
            "gap": self.gap,
            "unknown_groups": list(self.unknown),
            "groups": [asdict(group) | {"weights": list(group.weights)} for group in self.groups],
            "curve": [asdict(point) for point in self.curve],
        }


def fit(
    checkpoint: Checkpoint,
    target: SizeTarget,
    *,
    sensitivity: Sensitivity | None,
    planned: Callable[[Rates], Sequence[TensorPlan]],
    file_bytes: Callable[[Sequence[TensorPlan]], int],
    free: Sequence[str],
) -> Fit:
    """Choose bit widths for the free weights of a checkpoint, one for each group.

    sensitivity: None for the rule of thumb
    planned: plans all tensors with given bit widths, and by the recipe where none is given
    file_bytes: returns the size of the safetensors files of planned tensors
    free: the weights whose bit width no rule gives

    Raises RecipeError for a target that is below the smallest possible size, or above the largest useful one.
    """
    if not free:
        raise RecipeError(
            "a target size: expected weights whose bit width is free, found none that the recipe quantizes without "
            "bits of their own"
        )
    groups, unknown = _free_groups(checkpoint, target, sensitivity=sensitivity, planned=planned, free=frozenset(free))
    problem = _Problem(groups=groups, free=frozenset(free), planned=planned, file_bytes=file_bytes)
    solution, output_bytes = problem.solved(target)
    fitted = tuple(group.fitted(choice) for group, choice in zip(groups, solution.choices, strict=True))
    return Fit(
        target=target,
        sensitivity=sensitivity,
        groups=fitted,
        output_bytes=output_bytes,
        bits_per_weight=8 * sum(group.bytes for group in fitted) / problem.parameters,
        smallest_bytes=problem.smallest_bytes,
        gap=solution.gap,
        unknown=unknown,
        curve=problem.curve(solution, output_bytes),
        free=frozenset(free),
    )


@dataclass(frozen=True, kw_only=True)
class _RateOption:
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
class _FreeGroup:
    """Weights that get one bit width together, with all bit widths that they may get."""

    name: str
    weights: tuple[str, ...]
    parameters: int
    alpha: float
    options: tuple[_RateOption, ...]

    def fitted(self, choice: int) -> FittedGroup:
        """Return the group with the chosen option."""
        option = self.options[choice]
        return FittedGroup(
            name=self.name,
            weights=self.weights,
            bits=option.bits,
            bytes=option.bytes,
            parameters=self.parameters,
            alpha=self.alpha,
            rise=self.alpha * option.error,
        )


def _free_groups(
    checkpoint: Checkpoint,
    target: SizeTarget,
    *,
    sensitivity: Sensitivity | None,
    planned: Callable[[Rates], Sequence[TensorPlan]],
    free: frozenset[str],
) -> tuple[tuple[_FreeGroup, ...], tuple[str, ...]]:
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
        _FreeGroup(
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
) -> _RateOption:
    """Return what the weights of a group come to when the free ones are planned with this rate, or kept if None."""
    deciding = [part for part in parts if part.name in free] or parts
    byte_count = sum(part.bytes for part in parts)
    # A file's header has an entry for every stored tensor, which counts if the target is the size of files.
    entries = len(encode_header([spec for part in parts for spec in part.stored], {})) if target.output_bytes else 0
    # Codecs that lack a rate take their nearest.
    given = {part.bits for part in deciding if part.bits is not None}
    return _RateOption(
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
class _Problem:
    """The knapsack of all groups, and what its solutions come to in files."""

    groups: tuple[_FreeGroup, ...]
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
    def smallest(self) -> Solution:
        """The cheapest solution."""
        found = solve(self.choices, cheapest(self.choices))
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

        Raises RecipeError for a target that cannot be met, or that everything meets.
        """
        if target.bits_per_weight is not None:
            solution = self._within_bits(target, target.bits_per_weight)
            return solution, self.size(solution)
        assert target.output_bytes is not None
        largest_bytes = self.file_bytes(self.planned(dict.fromkeys(self.free, None)))
        if target.output_bytes < self.smallest_bytes:
            raise RecipeError(f"target: {target}: below the smallest possible, {self.smallest_bytes} bytes")
        if target.output_bytes > largest_bytes:
            raise RecipeError(
                f"target: {target}: above the {largest_bytes} bytes of the source's weights, with those that rules "
                "quantize; no quantization is needed for that"
            )
        return self._within_bytes(target.output_bytes)

    def _within_bits(self, target: SizeTarget, bits_per_weight: float) -> Solution:
        budget = math.floor(min(bits_per_weight * self.parameters / 8, 2.0**62))
        least = self.smallest.cost
        most = sum(max(option.cost for option in group.options) for group in self.groups)
        if budget < least:
            raise RecipeError(
                f"target: {target}: below the smallest possible, {8 * least / self.parameters:.4f} bits per weight "
                f"({self.smallest_bytes} bytes)"
            )
        if budget > most:
            raise RecipeError(
                f"target: {target}: above what the source has, {8 * most / self.parameters:.4f} bits per weight with "
                "those that rules quantize; no quantization is needed for that"
            )
        solution = solve(self.choices, budget)
        assert solution is not None
        return solution

    def _within_bytes(self, output_bytes: int) -> tuple[Solution, int]:
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

    def curve(self, chosen: Solution, chosen_bytes: int) -> tuple[CurvePoint, ...]:
        """Return sizes from the smallest to beyond the chosen one, each with the least rise on the convex envelope."""
        end = max(chosen_bytes + (chosen_bytes - self.smallest_bytes) // 2, self.smallest_bytes + 1)
        step = end - self.smallest_bytes
        sizes = {self.smallest_bytes + step * n // (CURVE_POINTS - 1) for n in range(1, CURVE_POINTS)}
        overhead = chosen_bytes - chosen.cost
        between = sorted(size for size in sizes if size != chosen_bytes)
        rises = curve(self.choices, [size - overhead for size in between])
        points = {size: max(0.0, float(rise)) for size, rise in zip(between, rises, strict=True) if rise is not None}
        points |= {self.smallest_bytes: self.smallest.loss, chosen_bytes: chosen.loss}
        return tuple(CurvePoint(size, rise) for size, rise in sorted(points.items()))
