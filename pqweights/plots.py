"""The plots of inspect and eval, as PNG or SVG: distributions of a checkpoint; errors and sizes of a result; models compared.

The one module that imports matplotlib, and only when a plot is drawn. It leaves matplotlib's settings as they were and uses
none of the user's, so that the same figures give the same SVG.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.distribution import HISTOGRAM_EDGES, Distribution
from pqweights.errors import MissingDependencyError, OutputError
from pqweights.evaluate import Report
from pqweights.inspect import Inspection
from pqweights.manifest import TensorRecord
from pqweights.plan import TensorPlan
from pqweights.roles import ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = {".png": "png", ".svg": "svg"}
# Text stays text in an SVG; its ids come from its content alone.
SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "pqweights", "svg.fonttype": "none", "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3,
}  # fmt: skip

# Colour and marker of each series: the palette of Okabe and Ito, which colour-blind readers can tell apart.
BEFORE, AFTER, NORMAL = "#D55E00", "#0072B2", "#000000"
STYLES = {
    "attention": ("#0072B2", "o"), "mlp": ("#D55E00", "s"), "expert": ("#009E73", "^"), "embedding": ("#CC79A7", "D"),
    "lm_head": ("#E69F00", "v"), "linear": ("#56B4E9", "P"), "router": ("#000000", "x"), "vision": ("#8C564B", "<"),
    "mtp": ("#7F7F7F", ">"), "parameter": ("#B8A000", "*"),
}  # fmt: skip
OTHER_STYLE = ("#7F7F7F", ".")
STRUCTURAL = {role.name for role in ROLES.values() if role.structural}
# Where tensors outside of the layers stand, in layers before the first.
NO_LAYER = -1.5
# How far apart the series of a layer stand, so that none hides another.
SERIES_WIDTH = 0.5


def check_plot_file(file: Path) -> None:
    """Whether a plot can be written there, before the work that leads to it.

    Raises OutputError, or MissingDependencyError without matplotlib.
    """
    if file.suffix.lower() not in FORMATS:
        raise OutputError(f"{file}: expected the name of a plot to end in {' or '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise OutputError(f"{file}: cannot be written: {file.parent} is no folder")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise OutputError(f"{file}: cannot be written: choose another place for the plot")
    _import_matplotlib()


def plot_distribution(distribution: Distribution, file: Path) -> None:
    """Histogram and quantiles of the block-normalised coordinates of all tensors, beside N(0,1).

    Raises OutputError, MissingDependencyError.
    """
    check_plot_file(file)
    with _figure(file, width=11.0, height=4.8) as figure:
        histogram, quantiles = figure.subplots(1, 2)
        series = [
            ("before rotation", BEFORE, distribution.histogram_before),
            ("after rotation", AFTER, distribution.histogram_after),
        ]
        _draw_histogram(histogram, series)
        _draw_quantiles(quantiles, series)
        figure.suptitle(f"block-normalised weights: {distribution.sampled_weights} of {distribution.weights}")


def plot_inspection(inspection: Inspection, file: Path) -> None:
    """Errors and bits per weight of a master or an export, by layer and role.

    Raises OutputError, MissingDependencyError.
    """
    check_plot_file(file)
    manifest = inspection.manifest
    pairs = [
        (tensor, record)
        for tensor, record in zip(manifest.tensors, manifest.records, strict=True)
        if tensor.weights and (tensor.bits is not None or tensor.role not in STRUCTURAL)
    ]
    with _figure(file, width=10.0, height=8.0) as figure:
        errors, bits = figure.subplots(2, 1, sharex=True)
        against, points = _errors(pairs)
        _draw_by_layer(errors, points)
        errors.set(ylabel=f"relative MSE{against}", title=f"error of the {manifest.kind}: mean and range by layer")
        if points:
            errors.set_yscale("log")
            errors.grid(visible=True, which="both")
        else:
            errors.text(0.5, 0.5, "no errors are known of these tensors", transform=errors.transAxes, ha="center")
        _draw_bits(figure, bits, [tensor for tensor, _ in pairs])


def plot_widths(tensors: Sequence[TensorPlan], file: Path) -> None:
    """Bits per weight of a plan, by layer and role.

    Raises OutputError, MissingDependencyError.
    """
    check_plot_file(file)
    with _figure(file, width=10.0, height=4.5) as figure:
        shown = [t for t in tensors if t.weights and (t.bits is not None or t.role not in STRUCTURAL)]
        _draw_bits(figure, figure.subplots(), shown)


def _draw_bits(figure: Figure, axes: Axes, tensors: Sequence[TensorPlan]) -> None:
    """Bits per weight, with the legend of roles for the whole figure."""
    sizes = [Point(layer_of(t.name), t.role, 8 * t.bytes / t.weights, t.weights) for t in tensors]
    _draw_by_layer(axes, sizes)
    axes.set(ylabel="bits per weight", xlabel="layer", title="bits per weight, all overhead counted")
    axes.set_ylim(bottom=0)
    _mark_layers(axes, sizes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", title="role")


def plot_evaluation(report: Report, file: Path) -> None:
    """A point for each model over its bits per parameter: KL against the reference where there is one, else perplexity.

    Bars are standard errors over windows. Models whose parameters cannot be counted are left out. Raises OutputError,
    MissingDependencyError.
    """
    check_plot_file(file)
    with _figure(file, width=7.0, height=4.5) as figure:
        axes = figure.subplots()
        for row in report.rows:
            divergence, bits = row.scores.divergence, row.size.bits_per_parameter
            value, error = row.scores.perplexity if divergence is None else divergence.mean
            if bits is not None and math.isfinite(value):
                axes.errorbar(bits, value, error, color=AFTER, marker="o", markersize=4, capsize=2)
                name = Path(row.model).name
                axes.annotate(name, (bits, value), xytext=(6, 4), textcoords="offset points", fontsize="small")
        axes.margins(x=0.15)
        axes.set(
            xlabel="bits per parameter, all files of weights counted",
            ylabel="perplexity" if report.reference is None else "KL(reference || model), nats per token",
            title=f"{report.settings.scored_tokens} tokens, windows of {report.settings.window}",
        )


def layer_of(name: str) -> int | None:
    """The first number among the components of a tensor's name; one of more than six digits counts no layers."""
    return next((int(part) for part in name.split(".") if re.fullmatch("[0-9]{1,6}", part)), None)


@dataclass(frozen=True)
class Point:
    """A value of one tensor, and what it weighs in the mean of its layer and role."""

    layer: int | None
    role: str
    value: float
    weight: float


def _errors(pairs: Sequence[tuple[TensorPlan, TensorRecord]]) -> tuple[str, list[Point]]:
    """Against what, and the errors above 0, which a logarithm can show: where all are known, those against the original."""
    measured = [(tensor, record) for tensor, record in pairs if record.relative_mse is not None]
    against = ""
    if any(tensor.action == "integer" for tensor, _ in measured):
        known = all(record.total_mse is not None for _, record in measured)
        against = " against the original" if known else " against the master"
    points = []
    for tensor, record in measured:
        error = record.total_mse if against == " against the original" else record.relative_mse
        if error:
            points.append(Point(layer_of(tensor.name), tensor.role, error, record.energy or 0.0))
    return against, points


def _draw_by_layer(axes: Axes, points: Sequence[Point]) -> None:
    """A series for each role: the mean of each layer, and the range where several tensors share it."""
    by_role: dict[str, dict[float, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        by_role[point.role][NO_LAYER if point.layer is None else point.layer].append(point)
    roles = [*(role for role in ROLES if role in by_role), *sorted(by_role.keys() - ROLES)]
    for place, role in enumerate(roles):
        colour, marker = STYLES.get(role, OTHER_STYLE)
        groups = sorted(by_role[role].items())
        x = [layer + SERIES_WIDTH * ((place + 0.5) / len(roles) - 0.5) for layer, _ in groups]
        means = [_mean(group) for _, group in groups]
        lows = [mean - min(p.value for p in group) for mean, (_, group) in zip(means, groups, strict=True)]
        highs = [max(p.value for p in group) - mean for mean, (_, group) in zip(means, groups, strict=True)]
        ranges = np.maximum([lows, highs], 0)  # rounding may make them negative
        if len(groups) > 1 and groups[0][0] == NO_LAYER:  # no line from there to the layers
            x, means, ranges = (
                [x[0], math.nan, *x[1:]],
                [means[0], math.nan, *means[1:]],
                np.insert(ranges, 1, 0, axis=1),
            )
        axes.errorbar(
            x, means, ranges, label=role, color=colour, marker=marker, markersize=4, linewidth=1, elinewidth=0.8,
            capsize=2, alpha=0.9,
        )  # fmt: skip


def _mean(points: Sequence[Point]) -> float:
    total = math.fsum(point.weight for point in points)
    if total == 0:
        return math.fsum(point.value for point in points) / len(points)
    return math.fsum(point.value * point.weight for point in points) / total


def _mark_layers(axes: Axes, points: Sequence[Point]) -> None:
    """Whole numbers on the axis of layers, and a name for the place of the tensors without one."""
    last = max((point.layer for point in points if point.layer is not None), default=0)
    step = next(m * 10**power for power in range(6) for m in (1, 2, 5) if last <= 16 * m * 10**power)
    ticks: list[float] = list(range(0, last + 1, step))
    labels = [str(tick) for tick in ticks]
    if any(point.layer is None for point in points):
        ticks, labels = [NO_LAYER, *ticks], ["none", *labels]
    axes.set_xticks(ticks, labels)


def _draw_histogram(axes: Axes, series: Sequence[tuple[str, str, npt.NDArray[np.int64]]]) -> None:
    """Densities in bins of 0.1, as far as 5."""
    at_once = 10
    edges = HISTOGRAM_EDGES[::at_once]
    shown = (edges[:-1] >= -5) & (edges[1:] <= 5)
    for label, colour, counts in series:
        coarse = counts.reshape(-1, at_once).sum(axis=1)
        density = coarse / max(int(counts.sum()), 1) / (edges[1] - edges[0])
        inner = np.flatnonzero(shown)
        axes.stairs(density[inner], edges[inner[0] : inner[-1] + 2], label=label, color=colour, linewidth=1.5)
    x = np.linspace(-5, 5, 401)
    axes.plot(
        x, np.exp(-x * x / 2) / math.sqrt(2 * math.pi), label="N(0, 1)", color=NORMAL, linestyle="--", linewidth=1
    )
    axes.set(xlabel="coordinate", ylabel="density", title="histogram", xlim=(-5, 5))
    axes.legend()


def _draw_quantiles(axes: Axes, series: Sequence[tuple[str, str, npt.NDArray[np.int64]]]) -> None:
    """The quantiles of the coordinates over those of N(0,1), as far out as there are coordinates."""
    normal = np.linspace(-5, 5, 201)
    probability = np.array([NormalDist().cdf(x) for x in normal])
    axes.plot(normal, normal, label="N(0, 1)", color=NORMAL, linestyle="--", linewidth=1)
    for label, colour, counts in series:
        below = np.concatenate([[0], np.cumsum(counts)])
        count = int(below[-1])
        if count:
            inside = (probability * count >= 1) & ((1 - probability) * count >= 1)
            wanted = probability[inside] * count
            # Within the bin where the count is reached, as if its coordinates lay evenly in it.
            first = np.searchsorted(below, wanted, side="left")
            share = (wanted - below[first - 1]) / (below[first] - below[first - 1])
            values = HISTOGRAM_EDGES[first - 1] + share * (HISTOGRAM_EDGES[first] - HISTOGRAM_EDGES[first - 1])
            axes.plot(normal[inside], values, label=label, color=colour, linewidth=1.5)
    axes.set(xlabel="quantile of N(0, 1)", ylabel="quantile of the coordinates", title="quantile-quantile plot")
    axes.legend()


@contextlib.contextmanager
def _figure(file: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure to draw on, in inches, that is written at the end, in one piece. No pyplot: it keeps figures, and a backend."""
    _import_matplotlib()
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", SETTINGS]):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        content = io.BytesIO()
        metadata: dict[str, Any] = {"Date": None} if file.suffix.lower() == ".svg" else {}
        figure.savefig(content, format=FORMATS[file.suffix.lower()], dpi=150, metadata=metadata)
    try:
        file.write_bytes(content.getvalue())
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror or error}") from None


def _import_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError("plots need matplotlib: pip install 'pqweights[plot]'") from None
