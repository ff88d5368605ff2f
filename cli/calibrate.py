"""The command `pqweights calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pqweights.common.units import counted
from pqweights.quality.options import CalibrateArguments

from . import options, output

if TYPE_CHECKING:
    from pqweights.planning.statistics_file import InputVector
    from pqweights.quality.calibrate import Calibration
    from pqweights.quality.scale_search import LayerReport

COLUMNS = ["weight", "codec", "#bits", "#tokens", "exponents", "#gain", "#gain held back", "why scale 1"]
REASONS_SHOWN = 2


@options.taking(CalibrateArguments)
def command(asked: CalibrateArguments, *, json: options.JsonOption = False) -> None:
    """Search activation-aware scales (AWQ) for quantize --awq by running the model over a text.

    The scales of the input channels of a matrix are those with the least error of the layer's output, for the codec
    that the recipe gives the matrix. Every fourth window of the text is held back, and a matrix that does not clearly
    gain on those windows keeps scale 1. With --moments, no scales are searched: the second moments of the inputs of
    all matrices are written, for export --calibration; --moments --scales writes both into one file.
    """
    from pqweights.inference.runtimes.texts import read_text
    from pqweights.planning.choice import choose_recipe
    from pqweights.planning.options import RecipeOptions
    from pqweights.quality.calibrate import calibrate

    recipe = choose_recipe(asked.recipe, asked.part(RecipeOptions))
    model, text = options.fetched(str(asked.source), asked.access).path, read_text(asked.text)
    with output.progress("calibrating", unit="steps") as progress:
        done = calibrate(
            model,
            asked.out,
            text,
            recipe=recipe if asked.searches_scales else None,
            moments=asked.moments,
            options=asked,
            progress=progress,
        )
    if json:
        output.print_json({"output": str(asked.out)} | done.to_json())
    else:
        output.summary(*_lines(done, str(asked.source), asked.out))


def _lines(done: Calibration, source: str, out: Path) -> list[str]:
    lines = [] if done.layers is None else _scales_lines(done, done.layers, source, out)
    return lines if done.vectors is None else [*lines, *_moments_lines(done, done.vectors, source, out)]


def _moments_lines(done: Calibration, vectors: Sequence[InputVector], source: str, out: Path) -> list[str]:
    fewest = min((vector.tokens for vector in vectors), default=0)
    return [
        f"{source} -> {out}: moments of {counted(len(vectors), 'distinct vector')} of inputs, which "
        f"{counted(len(done.weights), 'tensor')} read; {done.tokens} tokens, and another {done.held_back_tokens} "
        f"held back; the vector with the fewest had {fewest}",
        f"Next: pqweights export MASTER OUT -t TARGET --calibration {out}",
    ]


def _scales_lines(done: Calibration, layers: Sequence[LayerReport], source: str, out: Path) -> list[str]:
    scaled = sum(layer.scaled for layer in layers)
    return [
        *output.table(COLUMNS, [_row(layer) for layer in layers]),
        "",
        "gain: the share by which the error of the layer's output falls, on the text and on its held-back windows",
        f"{source} -> {out}: scales for {scaled} of {len(layers)} tensors, which add "
        f"{done.bits_per_weight:.4f} bits per weight; searched on {done.tokens} tokens and checked on "
        f"another {done.held_back_tokens}",
        f"Next: pqweights quantize {source} OUT --awq {out}",
    ]


def _row(layer: LayerReport) -> list[str]:
    """Return the cells of one weight; for a stack of experts, means, and how many of them are scaled."""
    scaled = [matrix for matrix in layer.matrices if matrix.scaled]
    few, count = min(matrix.tokens for matrix in layer.matrices), len(layer.matrices)
    row = [layer.name, layer.codec, str(layer.bits), str(few) if count == 1 else f"{few}+", "", "", ""]
    if scaled:
        first = scaled[0]
        if count == 1:
            row[4] = f"{first.input_exponent:g}, {first.weight_exponent:g}"
        row[5] = f"{sum(matrix.gain or 0.0 for matrix in scaled) / len(scaled):.1%}"
        row[6] = f"{sum(matrix.held_back_gain or 0.0 for matrix in scaled) / len(scaled):.1%}"
    reasons = sorted({matrix.reason for matrix in layer.matrices if not matrix.scaled})
    unscaled = f"{count - len(scaled)} of {count}: " if count > 1 and reasons else ""
    return [*row, output.with_flags(unscaled + "; ".join(reasons[:REASONS_SHOWN]))]
