"""Figures: whether a file for one can be written, and drawing on one with fixed settings.

matplotlib is imported only when a plot is drawn. Its settings stay as they were, and those of the user are not used, so
the same data gives the same SVG.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.common.installing import pip_install
from pqweights.errors import MissingDependencyError, OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = {".png": "png", ".svg": "svg"}
# Text in an SVG stays text, and its ids depend only on its content.
SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "pqweights",
    "svg.fonttype": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
}
# The palette of Okabe and Ito, which colour-blind readers can tell apart.
BEFORE, AFTER, NORMAL = "#D55E00", "#0072B2", "#000000"


def check_plot_file(file: Path) -> None:
    """Check that a plot can be written to a file, before the work that leads to it.

    Raises OutputError, or MissingDependencyError without matplotlib.
    """
    if file.suffix.lower() not in FORMATS:
        raise OutputError(f"{file}: expected the name of a plot to end in {' or '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise OutputError(f"{file}: cannot be written: {file.parent} is not a folder")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise OutputError(f"{file}: cannot be written: choose another place for the plot")
    _import_matplotlib()


@contextlib.contextmanager
def figure(file: Path, width: float, height: float) -> Iterator[Figure]:
    """Open a figure to draw on, and write it to the file at the end.

    width, height: its size in inches

    pyplot is not used, because it keeps figures and chooses a backend. Raises OutputError, MissingDependencyError.
    """
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


def draw_density(
    axes: Axes, edges: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], together: int, label: str, colour: str
) -> None:
    """Draw a histogram as a density, in bins of `together` that were counted."""
    coarse = counts.reshape(-1, together).sum(axis=1)
    ends = edges[::together]
    density = coarse / max(int(counts.sum()), 1) / np.diff(ends)
    axes.stairs(density, ends, baseline=None, label=label, color=colour, linewidth=1.5)


def draw_normal(axes: Axes, limit: float) -> None:
    """Draw the density of N(0, 1) between -limit and limit."""
    x = np.linspace(-limit, limit, 401)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    axes.plot(x, density, label="N(0, 1)", color=NORMAL, linestyle="--", linewidth=1)


def _import_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError(f"plots need matplotlib: {pip_install('plot')}") from None
