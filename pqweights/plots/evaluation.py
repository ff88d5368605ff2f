"""The plot of an evaluation: divergence or perplexity of models over their bits per parameter."""

from __future__ import annotations

import math
from pathlib import Path

from pqweights.evaluate.report import EvaluationReport
from pqweights.plots.figure import AFTER, check_plot_file, figure


def plot_evaluation(report: EvaluationReport, file: Path) -> None:
    """Draw a point for each model: its KL divergence from the reference, or its perplexity if there is no reference.

    The bars are standard errors over windows. Models whose parameters cannot be counted are left out.

    Raises OutputError, MissingDependencyError.
    """
    check_plot_file(file)
    with figure(file, width=7.0, height=4.5) as drawn:
        axes = drawn.subplots()
        for row in report.rows:
            divergence, bits = row.scores.divergence, row.size.bits_per_parameter
            value, error = row.scores.perplexity if divergence is None else divergence.mean
            if bits is not None and math.isfinite(value):
                axes.errorbar(bits, value, error, color=AFTER, marker="o", markersize=4, capsize=2)
                name = Path(row.model).name
                axes.annotate(name, (bits, value), xytext=(6, 4), textcoords="offset points", fontsize="small")
        axes.margins(x=0.15)
        axes.set(
            xlabel="bits per parameter, all weight files counted",
            ylabel="perplexity" if report.reference is None else "KL(reference || model), nats per token",
            title=f"{report.settings.scored_tokens} tokens, windows of {report.settings.window}",
        )
