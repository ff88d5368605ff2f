"""Rates of the trellis codec, uniform and fitted to a size, beside fits of whole bit widths: loss at equal size.

    python benchmarks/rates.py MODEL_DIR [MODEL_DIR...]

Measured as in benchmarks/fit.py, with sensitivities on a sample of the model itself. Each target is a number of bits
per quantized weight. *Left over* is how far below the target the bytes of the quantized weights are.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from fit import CODECS, SAMPLED, Bench, run
from harness import Cell, Document, table

from pqweights.common.options import Options
from pqweights.planning.choice import choose_recipe
from pqweights.planning.recipe import Goal, Recipe, load_recipe

TARGETS = (2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
WIDTHS, UNIFORM, FITTED = "fit of whole widths", "uniform trellis", "fit of trellis rates"
KINDS = (WIDTHS, UNIFORM, FITTED)


def recipes(target: float) -> dict[str, Recipe]:
    """What is compared at one target, by its name."""
    goal = Goal(bits_per_weight=target)
    widths, trellis = load_recipe("q5"), load_recipe("t4")
    return {
        WIDTHS: replace(widths, goal=goal),
        UNIFORM: choose_recipe(trellis, Options(bits=target)),
        FITTED: replace(trellis, goal=goal),
    }


def measured_model(folder: Path, options: Any) -> dict[str, Any]:
    """The entry of one model in the document."""
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        bench = Bench(folder, Path(work), max_tokens=options.max_tokens, sensitivity_tokens=options.tokens)
        rows = []
        for target in TARGETS:
            for what, recipe in recipes(target).items():
                rows.append({**bench.row(what, recipe, SAMPLED), "target": target})
                print(f"{folder.name}: {target} {what}: KL {rows[-1]['kl']:.5f}", file=sys.stderr, flush=True)
    return {"name": folder.resolve().name, "perplexity": bench.perplexity, "rows": rows}


HEADER = (
    "model",
    "target",
    *(f"{what}: {field}" for field in ("bits/weight", "log-perplexity, change", "KL") for what in KINDS),
    "left over by the fit of rates",
)


def sections(document: Document) -> dict[str, str]:
    """The table, in Markdown."""
    lines: list[list[Cell]] = []
    for model in document["models"]:
        for target in TARGETS:
            found = {row["what"]: row for row in model["rows"] if row["target"] == target}
            rows = [found[what] for what in KINDS]
            left = 1 - found[FITTED]["bits_per_weight"] / target
            lines.append(
                [
                    model["name"],
                    target,
                    *(f"{row['bits_per_weight']:.4f}" for row in rows),
                    *(f"{row['change']:+.5f}" for row in rows),
                    *(f"{row['kl']:.5f}" for row in rows),
                    f"{left:.3%}",
                ]
            )
    return {"rates": table(HEADER, lines)}


if __name__ == "__main__":
    run("rates", __doc__, measured_model, sections, ("trellis", *CODECS))
