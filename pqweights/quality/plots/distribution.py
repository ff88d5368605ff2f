"""The plot of a distribution of weights: a histogram and a quantile-quantile plot, which show how Gaussian it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pqweights.quality.measure.distribution import HISTOGRAM_EDGES, Distribution
from pqweights.quality.plots.figure import AFTER, BEFORE, NORMAL, check_plot_file, draw_density, draw_normal, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_distribution(distribution: Distribution, file: Path) -> None:
    """Draw the histogram and quantiles of the block-normalised coordinates of all tensors, beside those of N(0, 1).

    Raises OutputError, MissingDependencyError.
    """
    check_plot_file(file)
    with figure(file, width=11.0, height=4.8) as drawn:
        histogram, quantiles = drawn.subplots(1, 2)
        series = [
            ("before rotation", BEFORE, distribution.histogram_before),
            ("after rotation", AFTER, distribution.histogram_after),
        ]
        _draw_histogram(histogram, series)
        _draw_quantiles(quantiles, series)
        drawn.suptitle(f"block-normalised weights: {distribution.sampled_weights} of {distribution.weights}")


def _draw_histogram(axes: Axes, series: Sequence[tuple[str, str, npt.NDArray[np.int64]]]) -> None:
    """Draw the densities between -5 and 5, in bins of 0.1."""
    for label, colour, counts in series:
        draw_density(axes, HISTOGRAM_EDGES, counts, 10, label, colour)
    draw_normal(axes, 5)
    axes.set(xlabel="coordinate", ylabel="density", title="histogram", xlim=(-5, 5))
    axes.legend()


def _draw_quantiles(axes: Axes, series: Sequence[tuple[str, str, npt.NDArray[np.int64]]]) -> None:
    """Draw the quantiles of the coordinates over those of N(0, 1), as far out as there are coordinates."""
    normal = np.linspace(-5, 5, 201)
    probability = np.array([NormalDist().cdf(x) for x in normal])
    axes.plot(normal, normal, label="N(0, 1)", color=NORMAL, linestyle="--", linewidth=1)
    for label, colour, counts in series:
        below = np.concatenate([[0], np.cumsum(counts)])
        count = int(below[-1])
        if count:
            inside = (probability * count >= 1) & ((1 - probability) * count >= 1)
            wanted = probability[inside] * count
            # Within a bin, the coordinates are taken to lie evenly.
            first = np.searchsorted(below, wanted, side="left")
            share = (wanted - below[first - 1]) / (below[first] - below[first - 1])
            values = HISTOGRAM_EDGES[first - 1] + share * (HISTOGRAM_EDGES[first] - HISTOGRAM_EDGES[first - 1])
            axes.plot(normal[inside], values, label=label, color=colour, linewidth=1.5)
    axes.set(xlabel="quantile of N(0, 1)", ylabel="quantile of the coordinates", title="quantile-quantile plot")
    axes.legend()
