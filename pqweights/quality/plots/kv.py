"""The plot of keys and values: angles, coordinates, and the outlier channels of keys.

The angles are those of Figure 2 of Han et al. (arXiv:2502.02617), the channels those of Figure 1 of Wu et al.
(arXiv:2502.00527).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.codecs.polar_transform import angle_density
from pqweights.quality.measure.distribution import HISTOGRAM_EDGES
from pqweights.quality.measure.kv_channels import OUTLIER, KeyPair
from pqweights.quality.measure.kv_distribution import (
    ANGLE_BINS,
    COARSE_BINS,
    KEYS,
    LEVEL_COUNT,
    VALUES,
    KVDistribution,
    SideCounts,
    angle_edges,
)
from pqweights.quality.plots.figure import AFTER, BEFORE, NORMAL, check_plot_file, draw_density, draw_normal, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SIDES = (("before", BEFORE), ("after", AFTER))
# Bins of HISTOGRAM_EDGES that are drawn as one.
COORDINATE_BINS = 10
# At most so many tokens are drawn, evenly spread.
SHOWN_TOKENS = 2048
CHANNEL_COLOURS = ("#D55E00", "#009E73")


def plot_kv(distribution: KVDistribution, file: Path) -> None:
    """Draw the distributions of all layers together, and the head of keys with the largest channel.

    Raises OutputError, MissingDependencyError.
    """
    check_plot_file(file)
    with figure(file, width=13.0, height=15.5) as drawn:
        keys, values, coordinates, channels = _rows(drawn, 3.0, 3.0, 3.6, 4.2)
        _draw_angles(keys, KEYS, distribution.histograms[KEYS])
        _draw_angles(values, VALUES, distribution.histograms[VALUES])
        _draw_coordinates(coordinates, distribution)
        _draw_channels(channels, distribution)
        drawn.suptitle(f"keys and values of {distribution.tokens} tokens, before and after preconditioning")


def _rows(drawn: Figure, *heights: float) -> list[SubFigure]:
    """Return a part of the figure for each row. heights: their proportions"""
    rows: Any = drawn.subfigures(len(heights), 1, height_ratios=heights)
    return list(rows)


def _draw_angles(row: SubFigure, kind: str, sides: tuple[SideCounts, SideCounts]) -> None:
    """Draw the angles of each level with their density."""
    title = f"{kind}: angles of the recursive polar transform"
    missing = "" if sides[0].angles.any() else ", none were measured"
    row.suptitle(title + missing, fontsize="medium")
    for level, axes in enumerate(row.subplots(1, LEVEL_COUNT), 1):
        for (label, colour), side in zip(SIDES, sides, strict=True):
            draw_density(axes, angle_edges(level), side.angles[level - 1], ANGLE_BINS // COARSE_BINS, label, colour)
        x = np.linspace(0, 2 * math.pi if level == 1 else math.pi / 2, 401)
        density = np.maximum(angle_density(level, x), 0)
        axes.plot(x, density, label="density", color=NORMAL, linestyle="--", linewidth=1)
        ends = ["0", "π", "2π"] if level == 1 else ["0", "π/4", "π/2"]
        axes.set_xticks([0, float(x[200]), float(x[400])], ends)
        axes.set(title=f"level {level}", xlim=(0, x[-1]))
        axes.set_ylim(bottom=0)
        if level == 1:
            axes.set_ylabel("density per radian")
            axes.legend(loc="lower center", fontsize="small")


def _draw_coordinates(row: SubFigure, distribution: KVDistribution) -> None:
    """Draw the coordinates of keys and of values, and N(0, 1), with a logarithmic axis that shows their tails."""
    row.suptitle("coordinates of vectors that are divided by their norm / sqrt(size)", fontsize="medium")
    for axes, kind in zip(row.subplots(1, 2), (KEYS, VALUES), strict=True):
        for (label, colour), side in zip(SIDES, distribution.histograms[kind], strict=True):
            draw_density(axes, HISTOGRAM_EDGES, side.coordinates, COORDINATE_BINS, label, colour)
        draw_normal(axes, 6)
        axes.set(title=kind, xlabel="coordinate", ylabel="density", xlim=(-6, 6), yscale="log", ylim=(1e-5, 2))
        axes.legend(loc="upper right", fontsize="small")


def _draw_channels(row: SubFigure, distribution: KVDistribution) -> None:
    """Draw the head with the largest channel: all its keys, the mean of each channel, and its strongest pair."""
    layer, head, keys = distribution.strongest_keys
    channels = next(channels for channels in distribution.channels if channels.layer == layer)
    pair = channels.strongest
    row.suptitle(f"keys with the largest channel: layer {layer}, head {head}", fontsize="medium")
    image, profile, plane = row.subplots(1, 3, width_ratios=[2, 1.4, 1.2])
    shown = np.linspace(0, len(keys) - 1, min(len(keys), SHOWN_TOKENS)).round().astype(int)
    _draw_magnitudes(row, image, np.abs(keys[shown]), pair, tokens=len(keys))
    _draw_profile(profile, channels.magnitudes[head], pair)
    if pair is None:
        plane.text(0.5, 0.5, "the model has no RoPE", transform=plane.transAxes, ha="center")
        plane.set_axis_off()
    else:
        _draw_pair(plane, keys[shown], pair)


def _draw_magnitudes(
    row: SubFigure, axes: Axes, magnitudes: npt.NDArray[np.float32], pair: KeyPair | None, *, tokens: int
) -> None:
    """Draw the magnitude of every coordinate, [tokens, size], and mark the channels of the pair."""
    extent = (0.0, float(tokens), magnitudes.shape[1] - 0.5, -0.5)
    drawn = axes.imshow(magnitudes.T, aspect="auto", cmap="magma", interpolation="nearest", extent=extent)
    axes.grid(visible=False)
    if pair is not None:
        for channel, colour in zip(pair.channels, CHANNEL_COLOURS, strict=True):
            axes.plot(tokens, channel, marker="<", color=colour, clip_on=False, linestyle="none")
    axes.set(title="|K|", xlabel="token", ylabel="channel", xlim=extent[:2])
    row.colorbar(drawn, ax=axes, pad=0.02)


def _draw_profile(axes: Axes, magnitudes: npt.NDArray[np.float64], pair: KeyPair | None) -> None:
    """Draw the mean magnitude of each channel, [size], and mark the channels of the pair."""
    axes.vlines(np.arange(len(magnitudes)), 0, magnitudes, color="#7F7F7F", linewidth=1.5)
    axes.axhline(OUTLIER, color=NORMAL, linestyle=":", linewidth=1, label=f"outliers: {OUTLIER:g} and above")
    if pair is not None:
        for channel, colour in zip(pair.channels, CHANNEL_COLOURS, strict=True):
            axes.vlines(channel, 0, magnitudes[channel], color=colour, linewidth=2.5, label=f"channel {channel}")
    axes.set(title="mean |K| over the median channel", xlabel="channel")
    axes.set_ylim(0, 1.35 * max(OUTLIER, float(magnitudes.max())))
    axes.legend(loc="upper right", fontsize="small")


def _draw_pair(axes: Axes, keys: npt.NDArray[np.float32], pair: KeyPair) -> None:
    """Draw both channels of a pair in their plane, a point for each token. keys: [tokens, size]"""
    first, second = pair.channels
    axes.scatter(keys[:, first], keys[:, second], s=5, alpha=0.35, color=AFTER, linewidths=0)
    limit = 1.1 * float(np.abs(keys[:, [first, second]]).max()) or 1.0
    across: dict[str, Any] = {"xlim": (-limit, limit), "ylim": (-limit, limit)}
    axes.set(title=f"channels {first} and {second}", xlabel=f"channel {first}", ylabel=f"channel {second}", **across)
    axes.set_aspect("equal")
