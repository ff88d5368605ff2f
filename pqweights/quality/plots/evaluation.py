"""The plot of an evaluation: divergence or perplexity of models over their bits per parameter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pqweights.quality.evaluate.report import EvaluationReport
from pqweights.quality.plots.figure import check_plot_file, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The palette of Okabe and Ito without its yellow, and markers: as many pairs as the product of their numbers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^DvPX*"
LONGEST_NAME = 36
# The size in inches, and the height that each model needs in the legend.
WIDTH, HEIGHT, HEIGHT_OF_A_NAME = 8.0, 4.5, 0.25


def plot_evaluation(report: EvaluationReport, file: Path) -> None:
    """Draw a point for each row: its KL divergence from the reference, or its perplexity if there is no reference.

    The bars are standard errors over windows. Models whose parameters cannot be counted are left out.

    Raises OutputError, MissingDependencyError.
    """
    check_plot_file(file)
    with figure(file, width=WIDTH, height=max(HEIGHT, 1 + HEIGHT_OF_A_NAME * len(report.rows))) as drawn:
        draw_evaluation(report, drawn)


def draw_evaluation(report: EvaluationReport, drawn: Figure) -> None:
    """Draw the points on a figure; the names are in a legend beside them, where they cannot overlap."""
    axes = drawn.subplots()
    names = _short_names([row.model for row in report.rows])
    caches = ["" if row.kv_cache is None else f", KV cache {row.kv_cache.spec}" for row in report.rows]
    labels = [name + cache for name, cache in zip(names, caches, strict=True)]
    for number, (row, label) in enumerate(zip(report.rows, labels, strict=True)):
        # Models with a quantized cache have a divergence without a reference, too: from themselves.
        divergence = None if report.reference is None else row.scores.divergence
        bits = row.size.bits_per_parameter
        value, error = row.scores.perplexity if divergence is None else divergence.mean
        if bits is not None and math.isfinite(value):
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            axes.errorbar(
                bits,
                value,
                error,
                color=colour,
                marker=marker,
                markersize=5,
                capsize=2,
                linestyle="none",
                label=label,
            )
    if axes.containers:
        drawn.legend(loc="outside right upper", fontsize="small")
    axes.margins(x=0.15)
    axes.set(
        xlabel="bits per parameter, all weight files counted",
        ylabel="perplexity" if report.reference is None else "KL(reference || model), nats per token",
        title=f"{report.settings.scored_tokens} tokens, windows of {report.settings.window}",
    )


def _short_names(models: Sequence[str]) -> list[str]:
    """Return the last part of each name; all of it where two end alike. Long ones lose their middle."""
    ends = [Path(model).name for model in models]
    count = Counter(Path(model).name for model in set(models))  # a model may have several rows
    names = [end if count[end] == 1 else model for end, model in zip(ends, models, strict=True)]
    half = (LONGEST_NAME - 3) // 2
    return [name if len(name) <= LONGEST_NAME else f"{name[:half]}...{name[-half:]}" for name in names]
