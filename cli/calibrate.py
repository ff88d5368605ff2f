"""The command `pqweights calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pqweights.planning.options import DEFAULT_SAMPLE_TOKENS, SELF

from . import options, output

if TYPE_CHECKING:
    from pqweights.quality.calibrate import ScaleReport
    from pqweights.quality.scale_search import LayerReport

COLUMNS = ["weight", "codec", "#bits", "#tokens", "exponents", "#gain", "#gain held back", "why scale 1"]
REASONS_SHOWN = 2


def command(
    source: options.Source,
    out: options.OutFile,
    recipe: options.Recipe = "q5",
    codec: options.Codec = None,
    bits: options.Bits = None,
    keep: options.Keep = None,
    set_bits: options.SetBits = None,
    text: options.SampleText = SELF,
    tokens: options.CalibrationTokens = DEFAULT_SAMPLE_TOKENS,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
    revision: options.Revision = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Search activation-aware scales (AWQ) for quantize --awq by running the model over a text.

    The scales of the input channels of a matrix are those with the least error of the layer's output, for the codec
    that the recipe gives the matrix. Every fourth window of the text is held back, and a matrix that does not clearly
    gain on those windows keeps scale 1. The model runs layer by layer, with one layer in memory.
    """
    with output.errors(quiet=quiet, kept=lambda: options.work_beside(out)):
        from pqweights.planning.choice import choose_recipe
        from pqweights.planning.options import RecipeOptions
        from pqweights.quality.calibrate import calibrate
        from pqweights.quality.options import SamplingOptions

        changes = RecipeOptions(codec=codec, bits=bits, keep=keep or (), set_bits=set_bits)
        chosen = choose_recipe(recipe, changes)
        asked = SamplingOptions(text=text, tokens=tokens, threads=threads, overwrite=overwrite)
        model = options.fetched(source, options.access(revision, token)).path
        with output.progress("calibrating", unit="steps") as progress:
            done = calibrate(model, out, recipe=chosen, options=asked, progress=progress)
        if json:
            output.print_json({"output": str(out)} | done.to_json())
        else:
            output.summary(*_lines(done, source, out))


def _lines(done: ScaleReport, source: str, out: Path) -> list[str]:
    scaled = sum(layer.scaled for layer in done.layers)
    return [
        *output.table(COLUMNS, [_row(layer) for layer in done.layers]),
        "",
        "gain: the share by which the error of the layer's output falls, on the text and on its held-back windows",
        f"{source} -> {out}: scales for {scaled} of {len(done.layers)} tensors, which add "
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
