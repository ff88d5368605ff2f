"""Fitting: a width for every weight, so that a size is kept and the loss is predicted to rise least.

The predicted rise is the sum over groups of alpha * t^2 (sensitivity/); t^2 of a width is what its codec promises. Groups are
those that runtimes fuse (fusion.py), sizes are counted to the byte, and the choice is the optimum (knapsack.py). docs/fit.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pqweights.checkpoint.header import encode_header
from pqweights.checkpoint.source import Checkpoint
from pqweights.codecs import get_codec
from pqweights.errors import RecipeError
from pqweights.planning.knapsack import Choice, Solution, cheapest, curve, solve
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.planning.recipe import Target
from pqweights.planning.sensitivity_file import HEURISTIC, Sensitivity, alphas_for, groups_of
from pqweights.strict_json import rounded

# Tries at meeting a size exactly: file headers depend a little on what is in the files.
MOST_ROUNDS = 8
CURVE_POINTS = 12

Widths = Mapping[str, int | None]  # bits by weight; None: kept as it is


@dataclass(frozen=True)
class FittedGroup:
    """weights: the names. bits: None where it is kept. bytes: in the output. rise: predicted, in nats per token."""

    name: str
    weights: tuple[str, ...]
    bits: int | None
    bytes: int
    parameters: int
    alpha: float
    rise: float


@dataclass(frozen=True)
class CurvePoint:
    """What a size would give at best."""

    output_bytes: int
    rise: float


@dataclass(frozen=True)
class Fit:
    """An allocation. output_bytes: of the safetensors files; bits_per_weight: of all weights that the recipe would quantize,
    those that are kept counted as they are. gap: the predicted rise is at most by this share above the least there is.

    unknown: groups of which the sensitivity file says nothing. curve: size against rise, from the smallest possible one on.
    free: the weights that no rule gives a width.
    """

    target: Target
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
        """Of the loss, predicted, in nats per token."""
        return math.fsum(group.rise for group in self.groups)

    @property
    def widths(self) -> Widths:
        """For the transform."""
        return {name: group.bits for group in self.groups for name in group.weights if name in self.free}

    def describe(self) -> dict[str, Any]:
        """The manifest's account of it."""
        by = {"kind": HEURISTIC} if self.sensitivity is None else {
            "kind": self.sensitivity.method.get("kind"), "sha256": self.sensitivity.sha256,
        }  # fmt: skip
        return {"sensitivity": by, "predicted_rise": rounded(self.rise)}

    def to_json(self) -> dict[str, Any]:
        """plan --json."""
        return self.describe() | {
            "target": self.target.to_json(),
            "output_bytes": self.output_bytes,
            "bits_per_weight": self.bits_per_weight,
            "smallest_bytes": self.smallest_bytes,
            "gap": self.gap,
            "unknown_groups": list(self.unknown),
            "groups": [vars(group) | {"weights": list(group.weights)} for group in self.groups],
            "curve": [vars(point) for point in self.curve],
        }


@dataclass(frozen=True)
class _Option:
    """One width of one group; None where all of it is kept. bytes: of its data. cost: what counts for the target."""

    bits: int | None
    bytes: int
    cost: int
    error: float


def fit(
    checkpoint: Checkpoint,
    target: Target,
    sensitivity: Sensitivity | None,
    planned: Callable[[Widths], Sequence[TensorPlan]],
    file_bytes: Callable[[Sequence[TensorPlan]], int],
    free: Sequence[str],
) -> Fit:
    """Choose widths for the weights in `free`, in groups.

    sensitivity: None for the rule of thumb. planned: what becomes of all tensors with given widths (by default the recipe's).
    file_bytes: of the safetensors files that hold them. Raises RecipeError for a target that is below what is possible, or above what can
    be used.
    """
    chosen = set(free)
    # Those that a rule fixes, too: they have a part in the loss, and in groups.
    by_name = {t.name: t for t in planned({}) if t.name in chosen or t.action == QUANTIZE}
    if not free:
        raise RecipeError(
            "a target size: expected weights whose width is free, found none that the recipe quantizes without bits of its own"
        )
    groups = groups_of(checkpoint, [(t.name, t.role) for t in by_name.values()])
    roles = {t.name: t.role for t in by_name.values()}
    parameters = {t.name: t.weights for t in by_name.values()}
    alphas, unknown = alphas_for(groups, roles, parameters, sensitivity)
    codecs = {name: by_name[name].codec for name in free}
    widths = sorted({bits for codec in codecs.values() for bits in get_codec(codec or "").widths})
    plans = {bits: {t.name: t for t in planned(dict.fromkeys(free, bits))} for bits in [*widths, None]}

    options: list[list[_Option]] = []
    for names in groups.values():
        weights = sum(parameters[name] for name in names)
        of_group = []
        for plan in plans.values():
            parts = [plan[name] for name in names]
            # What the free ones get, if there are any.
            deciding = [part for part in parts if part.name in chosen] or parts
            used = next((part.bits for part in deciding if part.bits is not None), None)
            cost = sum(part.bytes for part in parts)
            # A file's header has an entry for every stored tensor; counted where files are.
            entries = (
                len(encode_header([spec for part in parts for spec in part.stored], {})) if target.output_bytes else 0
            )
            error = math.fsum(_error(part) * part.weights for part in parts) / weights
            of_group.append(_Option(used, cost, cost + entries, error))
        options.append(of_group)
    choices = [
        [Choice(o.cost, alpha * o.error) for o in of_group]
        for of_group, alpha in zip(options, alphas.values(), strict=True)
    ]

    def size(solution: Solution) -> int:
        widths = {
            name: of_group[at].bits
            for names, of_group, at in zip(groups.values(), options, solution.choices, strict=True)
            for name in names
        }
        return file_bytes(planned(widths))

    all_weights = sum(parameters.values())
    least = cheapest(choices)
    smallest = solve(choices, least)
    assert smallest is not None
    smallest_bytes = size(smallest)
    if target.bits_per_weight is not None:
        budget = math.floor(min(target.bits_per_weight * all_weights / 8, 2.0**62))
        most = sum(max(o.cost for o in of_group) for of_group in options)
        if budget < least:
            raise RecipeError(
                f"target: {target}: below the smallest possible, {8 * least / all_weights:.4f} bits per weight "
                f"({smallest_bytes} bytes)"
            )
        if budget > most:
            raise RecipeError(
                f"target: {target}: above what the source has, {8 * most / all_weights:.4f} bits per weight with what rules fix; no "
                "quantization is needed for that"
            )
        solution = solve(choices, budget)
        assert solution is not None
        output_bytes = size(solution)
    else:
        assert target.output_bytes is not None
        largest_bytes = file_bytes(planned(dict.fromkeys(free, None)))
        if target.output_bytes < smallest_bytes:
            raise RecipeError(f"target: {target}: below the smallest possible, {smallest_bytes} bytes")
        if target.output_bytes > largest_bytes:
            raise RecipeError(
                f"target: {target}: above the {largest_bytes} bytes of the source's weights with what rules fix; no quantization is needed for that"
            )
        solution, output_bytes = _within(target.output_bytes, smallest, smallest_bytes, choices, size)
    fitted = tuple(
        FittedGroup(
            name, tuple(names), of_group[at].bits, of_group[at].bytes, sum(parameters[n] for n in names), alpha,
            alpha * of_group[at].error,
        )
        for (name, names), of_group, at, alpha in zip(
            groups.items(), options, solution.choices, alphas.values(), strict=True
        )
    )  # fmt: skip
    return Fit(
        target,
        sensitivity,
        fitted,
        output_bytes,
        8 * sum(group.bytes for group in fitted) / all_weights,
        smallest_bytes,
        solution.gap,
        tuple(unknown),
        _curve(choices, smallest, smallest_bytes, solution, output_bytes),
        frozenset(free),
    )


def _error(planned: TensorPlan) -> float:
    """What a codec promises; nothing for what is kept."""
    if planned.codec is None or planned.bits is None:
        return 0.0
    return get_codec(planned.codec).distortion(planned.bits)


def _within(
    output_bytes: int,
    smallest: Solution,
    smallest_bytes: int,
    choices: Sequence[Sequence[Choice]],
    size: Callable[[Solution], int],
) -> tuple[Solution, int]:
    """The best choices whose files have at most so many bytes.

    Costs count headers but for the digits of offsets and the padding, so the budget is corrected by what was found.
    """
    best, best_bytes = smallest, smallest_bytes
    budget = output_bytes - (smallest_bytes - smallest.cost)
    tried: set[int] = set()
    while budget not in tried and len(tried) < MOST_ROUNDS:
        tried.add(budget)
        solution = solve(choices, budget)
        if solution is None:
            break
        found = size(solution)
        if found <= output_bytes and solution.loss <= best.loss:
            best, best_bytes = solution, found
        budget = (solution.cost if found > output_bytes else budget) + output_bytes - found
    return best, best_bytes


def _curve(
    choices: Sequence[Sequence[Choice]], smallest: Solution, smallest_bytes: int, chosen: Solution, chosen_bytes: int
) -> tuple[CurvePoint, ...]:
    """Sizes from the smallest to beyond the chosen one, with the least rise that the envelope allows there."""
    end = max(chosen_bytes + (chosen_bytes - smallest_bytes) // 2, smallest_bytes + 1)
    sizes = {smallest_bytes + (end - smallest_bytes) * n // (CURVE_POINTS - 1) for n in range(1, CURVE_POINTS)}
    overhead = chosen_bytes - chosen.cost
    between = sorted(size for size in sizes if size != chosen_bytes)
    rises = curve(choices, [size - overhead for size in between])
    points = {size: max(0.0, float(rise)) for size, rise in zip(between, rises, strict=True) if rise is not None}
    points |= {smallest_bytes: smallest.loss, chosen_bytes: chosen.loss}
    return tuple(CurvePoint(size, rise) for size, rise in sorted(points.items()))
