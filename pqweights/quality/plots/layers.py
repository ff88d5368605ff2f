"""Plots by layer and role: the errors and bits per weight of a master or an export, the bits per weight of a plan."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pqweights.planning.plan import TensorPlan
from pqweights.planning.roles import ROLES
from pqweights.quality.plots.figure import check_plot_file, figure
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.results.inspect import Inspection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colour and marker of each role.
STYLES = {
    "attention": ("#0072B2", "o"),
    "mlp": ("#D55E00", "s"),
    "expert": ("#009E73", "^"),
    "embedding": ("#CC79A7", "D"),
    "lm_head": ("#E69F00", "v"),
    "linear": ("#56B4E9", "P"),
    "router": ("#000000", "x"),
    "vision": ("#8C564B", "<"),
    "mtp": ("#7F7F7F", ">"),
    "parameter": ("#B8A000", "*"),
}
OTHER_STYLE = ("#7F7F7F", ".")
STRUCTURAL = {role.name for role in ROLES.values() if role.structural}
# The place of tensors outside the layers on the axis of layers.
NO_LAYER = -1.5
# The width over which the series of a layer are spread, so that none hides another.
SERIES_WIDTH = 0.5
# How a series looks, apart from its colour and marker.
SERIES: dict[str, Any] = {"markersize": 4, "linewidth": 1, "elinewidth": 0.8, "capsize": 2, "alpha": 0.9}


def plot_inspection(inspection: Inspection, file: Path) -> None:
    """Draw the errors and bits per weight of a master or an export, by layer and role.

    Raises OutputError, MissingDependencyError.
    """
    check_plot_file(file)
    manifest = inspection.manifest
    pairs = [
        (tensor, record)
        for tensor, record in zip(manifest.tensors, manifest.records, strict=True)
        if tensor.weights and (tensor.bits is not None or tensor.role not in STRUCTURAL)
    ]
    with figure(file, width=10.0, height=8.0) as drawn:
        errors, bits = drawn.subplots(2, 1, sharex=True)
        against, points = _errors(pairs)
        _draw_by_layer(errors, points)
        errors.set(ylabel=f"relative MSE{against}", title=f"error of the {manifest.kind}: mean and range by layer")
        if points:
            errors.set_yscale("log")
            errors.grid(visible=True, which="both")
        else:
            errors.text(0.5, 0.5, "no errors are known of these tensors", transform=errors.transAxes, ha="center")
        _draw_bits(drawn, bits, [tensor for tensor, _ in pairs])


def plot_widths(tensors: Sequence[TensorPlan], file: Path) -> None:
    """Draw the bits per weight of a plan, by layer and role.

    Raises OutputError, MissingDependencyError.
    """
    check_plot_file(file)
    with figure(file, width=10.0, height=4.5) as drawn:
        shown = [t for t in tensors if t.weights and (t.bits is not None or t.role not in STRUCTURAL)]
        _draw_bits(drawn, drawn.subplots(), shown)


def _draw_bits(drawn: Figure, axes: Axes, tensors: Sequence[TensorPlan]) -> None:
    """Draw bits per weight, and the legend of roles for the whole figure."""
    sizes = [
        Point(layer=layer_of(t.name), role=t.role, value=8 * t.bytes / t.weights, weight=t.weights) for t in tensors
    ]
    _draw_by_layer(axes, sizes)
    axes.set(ylabel="bits per weight", xlabel="layer", title="bits per weight, all overhead counted")
    axes.set_ylim(bottom=0)
    _mark_layers(axes, sizes)
    handles, labels = axes.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right upper", title="role")


def layer_of(name: str) -> int | None:
    """Return the first number among the components of a tensor's name, or None.

    A number of more than six digits does not count layers.
    """
    return next((int(part) for part in name.split(".") if re.fullmatch("[0-9]{1,6}", part)), None)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value of one tensor.

    layer: the layer that the tensor belongs to; None outside the layers
    role: the role of the tensor
    value: what is drawn
    weight: the weight of the value in the mean of its layer and role
    """

    layer: int | None
    role: str
    value: float
    weight: float


def _errors(pairs: Sequence[tuple[TensorPlan, TensorRecord]]) -> tuple[str, list[Point]]:
    """Return what the errors are against, and the errors above 0, which a logarithmic axis can show.

    They are against the original if all of those are known.
    """
    measured = [(tensor, record) for tensor, record in pairs if record.relative_mse is not None]
    against = ""
    if any(tensor.action == "integer" for tensor, _ in measured):
        known = all(record.total_mse is not None for _, record in measured)
        against = " against the original" if known else " against the master"
    points = []
    for tensor, record in measured:
        error = record.total_mse if against == " against the original" else record.relative_mse
        if error:
            points.append(
                Point(layer=layer_of(tensor.name), role=tensor.role, value=error, weight=record.energy or 0.0)
            )
    return against, points


def _draw_by_layer(axes: Axes, points: Sequence[Point]) -> None:
    """Draw a series for each role: the mean of each layer, and the range if several tensors share it."""
    by_role: dict[str, dict[float, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        by_role[point.role][NO_LAYER if point.layer is None else point.layer].append(point)
    roles = [*(role for role in ROLES if role in by_role), *sorted(by_role.keys() - ROLES)]
    for place, role in enumerate(roles):
        groups = sorted(by_role[role].items())
        x = [layer + SERIES_WIDTH * ((place + 0.5) / len(roles) - 0.5) for layer, _ in groups]
        means = [_mean(group) for _, group in groups]
        lows = [mean - min(p.value for p in group) for mean, (_, group) in zip(means, groups, strict=True)]
        highs = [max(p.value for p in group) - mean for mean, (_, group) in zip(means, groups, strict=True)]
        ranges = np.maximum([lows, highs], 0)  # rounding may make one negative
        if len(groups) > 1 and groups[0][0] == NO_LAYER:
            # A gap, so that no line leads from there to the layers.
            x, means = [x[0], math.nan, *x[1:]], [means[0], math.nan, *means[1:]]
            ranges = np.insert(ranges, 1, 0, axis=1)
        colour, marker = STYLES.get(role, OTHER_STYLE)
        axes.errorbar(x, means, ranges, label=role, color=colour, marker=marker, **SERIES)


def _mean(points: Sequence[Point]) -> float:
    total = math.fsum(point.weight for point in points)
    if total == 0:
        return math.fsum(point.value for point in points) / len(points)
    return math.fsum(point.value * point.weight for point in points) / total


def _mark_layers(axes: Axes, points: Sequence[Point]) -> None:
    """Label the axis of layers with whole numbers, and with a name for the place of tensors outside the layers."""
    last = max((point.layer for point in points if point.layer is not None), default=0)
    step = next(m * 10**power for power in range(6) for m in (1, 2, 5) if last <= 16 * m * 10**power)
    ticks: list[float] = list(range(0, last + 1, step))
    labels = [str(tick) for tick in ticks]
    if any(point.layer is None for point in points):
        ticks, labels = [NO_LAYER, *ticks], ["none", *labels]
    axes.set_xticks(ticks, labels)
