"""pqweights calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output

if TYPE_CHECKING:
    from pqweights.measure.calibrate import LayerReport


def command(
    source: options.SourceArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="New file for the scales.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="UTF-8 text for the model to read.")],
    recipe: options.RecipeOption = "q5",
    bits: options.BitsOption = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Read at most so many tokens of the text.")
    ] = 16384,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", min=2, help="Tokens that are read together.", show_default="512, or the model's limit"
        ),
    ] = None,
    tokenizer: options.TokenizerOption = None,
    dtype: Annotated[
        options.ModelDtype, typer.Option("--dtype", help="Run the model in this dtype; auto: its own.")
    ] = options.ModelDtype.AUTO,
    device_map: Annotated[
        str | None,
        typer.Option("--device-map", help="As in transformers: auto spreads a large model (needs accelerate)."),
    ] = None,
    threads: options.ThreadsOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file of scales.")] = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Search activation-aware scales (AWQ) for quantize --awq: run the checkpoint over a text, keep what helps.

    For each matrix, scales of its input channels are searched against the codec that the recipe gives it, by the error of
    the layer's output. Every fourth window of the text is held back; what does not clearly help there keeps scale 1.
    """
    with output.errors():
        from pqweights.measure.calibrate import calibrate
        from pqweights.runtimes.texts import read_text

        chosen = options.chosen_recipe(recipe, bits)
        found = options.fetched(source, options.access(revision, token))
        with output.progress("calibrating", unit=None) as progress:
            done = calibrate(
                found.path, out, read_text(text), chosen, max_tokens=max_tokens, window=window, tokenizer=tokenizer,
                dtype=dtype.value, device_map=device_map, threads=options.thread_count(threads), overwrite=overwrite,
                progress=progress,
            )  # fmt: skip
        if json:
            output.print_json({"output": str(out)} | done.to_json())
            return
        columns = [
            ("weight", False), ("codec", False), ("bits", True), ("tokens", True), ("exponents", False),
            ("gain", True), ("gain held back", True), ("why scale 1", False),
        ]  # fmt: skip
        lines = [output.table(columns, [_row(layer) for layer in done.layers]), ""]
        scaled = sum(layer.scaled for layer in done.layers)
        lines.append(
            f"{source} -> {out}: {scaled} of {len(done.layers)} weights are scaled, which adds {done.bits_per_weight:.4f} bits "
            f"per weight; searched on {done.tokens} tokens, checked on {done.held_back_tokens}"
        )
        lines.append(
            f"gain: by how much the error of the layer's output falls. Now: pqweights quantize {source} OUT --awq {out}"
        )
        typer.echo("\n".join(lines))


def _row(layer: LayerReport) -> list[str]:
    """One line; of a stack of experts the mean, and how many of them are scaled."""
    scaled = [found for found in layer.matrices if found.scaled]
    few = min(found.tokens for found in layer.matrices)
    row = [layer.name, layer.codec, str(layer.bits), str(few) if len(layer.matrices) == 1 else f"{few}+"]
    if scaled:
        first = scaled[0]
        exponents = f"{first.input_exponent:g}, {first.weight_exponent:g}" if len(layer.matrices) == 1 else ""
        gains = [[getattr(found, of) for found in scaled] for of in ("gain", "held_back_gain")]
        row += [exponents, *(f"{sum(values) / len(values):.1%}" for values in gains)]
    else:
        row += ["", "", ""]
    reasons = sorted({found.reason for found in layer.matrices if not found.scaled})
    several = (
        f"{len(layer.matrices) - len(scaled)} of {len(layer.matrices)}: " if len(layer.matrices) > 1 and reasons else ""
    )
    return [*row, several + "; ".join(reasons[:2])]
