"""Fitting: a bit width for every weight, so that the result has a given size and the loss is predicted to rise least.

The predicted rise is the sum of alpha * t^2 over groups of weights (sensitivity_file.py), where t^2 is the relative
error that a codec promises at a bit width. Groups are weights that runtimes fuse, sizes are counted to the byte, and
the choice is the optimum (knapsack.py). docs/fit.md describes the method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pqweights.checkpoint.source import Checkpoint
from pqweights.common.strict_json import rounded
from pqweights.errors import RecipeError
from pqweights.planning.decisions import RatePlanner, Rates
from pqweights.planning.fit_problem import FitProblem, FreeGroup, free_groups
from pqweights.planning.plan import TensorPlan
from pqweights.planning.sensitivity_file import HEURISTIC, Sensitivity
from pqweights.planning.target import SizeTarget


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
    bits_per_parameter: mean over all parameters of the checkpoint, with all bytes of the safetensors files
    smallest_bytes: the smallest size that is possible
    gap: the predicted rise is at most this share above the least possible one with the rates in Codec.rates
    unknown: groups that the sensitivity file does not have
    curve: the least rise at sizes from the smallest one on
    free: the weights whose bit width no rule gives
    """

    target: SizeTarget
    sensitivity: Sensitivity | None
    groups: tuple[FittedGroup, ...]
    output_bytes: int
    bits_per_weight: float
    bits_per_parameter: float
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
            "bits_per_parameter": self.bits_per_parameter,
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
    planner: RatePlanner,
    file_bytes: Callable[[Sequence[TensorPlan]], int],
) -> Fit:
    """Choose bit widths for the free weights of a checkpoint, one for each group.

    sensitivity: None for the rule of thumb
    planner: plans all tensors with given bit widths, and by the recipe where none is given
    file_bytes: returns the size of the safetensors files of planned tensors

    Raises RecipeError for a target below the smallest possible size, and for one that leaves nothing to quantize.
    """
    if not planner.free:
        raise RecipeError(
            "a target size: expected weights whose bit width is free, found none that the recipe quantizes without "
            "bits of their own"
        )
    groups, unknown = free_groups(checkpoint, target, sensitivity=sensitivity, planner=planner)
    problem = FitProblem(groups=groups, planner=planner, file_bytes=file_bytes)
    chosen, solution, output_bytes = problem.solved(target)
    fitted = tuple(_fitted(group, choice) for group, choice in zip(chosen.groups, solution.choices, strict=True))
    return Fit(
        target=target,
        sensitivity=sensitivity,
        groups=fitted,
        output_bytes=output_bytes,
        bits_per_weight=8 * sum(group.bytes for group in fitted) / problem.parameters,
        bits_per_parameter=8 * output_bytes / problem.all_weights,
        smallest_bytes=problem.smallest_bytes,
        gap=solution.gap,
        unknown=unknown,
        curve=tuple(CurvePoint(size, rise) for size, rise in problem.curve(solution, output_bytes)),
        free=planner.free,
    )


def _fitted(group: FreeGroup, choice: int) -> FittedGroup:
    """Return a group with the chosen bit width."""
    option = group.options[choice]
    return FittedGroup(
        name=group.name,
        weights=group.weights,
        bits=option.bits,
        bytes=option.bytes,
        parameters=group.parameters,
        alpha=group.alpha,
        rise=group.alpha * option.error,
    )
