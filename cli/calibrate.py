"""The command `pqweights calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import flags, options, output, text_options

if TYPE_CHECKING:
    from pqweights.planning.statistics_file import InputVector
    from pqweights.quality.measure.calibrate import Calibration
    from pqweights.quality.measure.layer_search import LayerReport

COLUMNS = [
    ("weight", False),
    ("codec", False),
    ("bits", True),
    ("tokens", True),
    ("exponents", False),
    ("gain", True),
    ("gain held back", True),
    ("why scale 1", False),
]
REASONS_SHOWN = 2


FileArgument = Annotated[
    Path, typer.Argument(metavar="OUT.safetensors", help="File for the scales, the moments or both.")
]
TextOption = Annotated[Path, typer.Option("--text", metavar="FILE", help="UTF-8 text for the model to read.")]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=2, help="Maximum number of tokens to read from the text.")
]
WindowOption = Annotated[
    int | None,
    typer.Option("--window", min=2, help="Tokens per window.", show_default="512, or the model's limit if smaller"),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier file of statistics.")]
MomentsOption = Annotated[
    bool,
    typer.Option(
        "--moments",
        help="Write second moments of all inputs for export --calibration, in place of scales. SRC may be a master.",
    ),
]
ScalesOption = Annotated[
    bool, typer.Option("--scales", help="With --moments: search scales too, in the same pass over the text.")
]
# Options that choose what scales are searched for, and so mean nothing with --moments alone.
OF_SCALES = ("recipe", "codec", "bits", "keep", "set_bits", "threads")


def command(
    ctx: typer.Context,
    source: options.FetchedSourceArgument,
    out: FileArgument,
    text: TextOption,
    moments: MomentsOption = False,
    scales: ScalesOption = False,
    recipe: options.RecipeOption = "q5",
    codec: options.CodecOption = None,
    bits: options.BitsOption = None,
    keep: options.KeepOption = None,
    set_bits: options.SetOption = None,
    max_tokens: MaxTokensOption = 16384,
    window: WindowOption = None,
    tokenizer: text_options.TokenizerOption = None,
    no_bos: text_options.NoBosOption = False,
    dtype: text_options.ModelDtypeOption = text_options.ModelDtype.AUTO,
    device_map: text_options.DeviceMapOption = None,
    threads: options.ThreadsOption = None,
    overwrite: OverwriteOption = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Search activation-aware scales (AWQ) for quantize --awq by running the model over a text.

    The scales of the input channels of a matrix are those with the least error of the layer's output, for the codec
    that the recipe gives the matrix. Every fourth window of the text is held back, and a matrix that does not clearly
    gain on those windows keeps scale 1. With --moments, no scales are searched: the second moments of the inputs of
    all matrices are written, for export --calibration; --moments --scales writes both into one file. The same command
    continues an interrupted run.
    """
    with output.errors(kept=lambda: options.measurement_continues(source, out), quiet=quiet):
        from pqweights.inference.runtimes.texts import read_text
        from pqweights.options import RecipeOptions
        from pqweights.planning.choice import choose_recipe
        from pqweights.quality.measure.calibrate import CalibrationOptions, calibrate

        if moments and not scales:
            _check_moments_options(ctx)
        changes = RecipeOptions(
            codec=codec, bits=bits, keep=tuple(keep or ()), set_bits=flags.bits_by_pattern(set_bits)
        )
        chosen = choose_recipe(recipe, changes)
        found = options.fetched(source, options.access(revision, token))
        asked = CalibrationOptions(
            max_tokens=max_tokens,
            window=window,
            tokenizer=tokenizer,
            bos=not no_bos,
            dtype=dtype.value,
            device_map=device_map,
            threads=options.thread_count(threads),
            overwrite=overwrite,
        )
        with output.progress("calibrating", unit="steps") as progress:
            done = calibrate(
                found.path,
                out,
                read_text(text),
                recipe=None if moments and not scales else chosen,
                moments=moments,
                options=asked,
                progress=progress,
            )
        if json:
            output.print_json({"output": str(out)} | done.to_json())
        else:
            output.summary(*_lines(done, source, out))


def _check_moments_options(ctx: typer.Context) -> None:
    """Refuse options of the search for scales."""
    for name in OF_SCALES:
        given = ctx.get_parameter_source(name)
        if given is not None and given.name != "DEFAULT":
            option = "--set" if name == "set_bits" else f"--{name}"
            raise typer.BadParameter(f"{option}: means nothing with --moments, which searches no scales; leave it out")


def _lines(done: Calibration, source: str, out: Path) -> list[str]:
    lines = [] if done.layers is None else _scales_lines(done, done.layers, source, out)
    return lines if done.vectors is None else [*lines, *_moments_lines(done, done.vectors, source, out)]


def _moments_lines(done: Calibration, vectors: Sequence[InputVector], source: str, out: Path) -> list[str]:
    from pqweights.common.units import counted

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
    scaled = [found for found in layer.matrices if found.scaled]
    few, count = min(found.tokens for found in layer.matrices), len(layer.matrices)
    row = [layer.name, layer.codec, str(layer.bits), str(few) if count == 1 else f"{few}+", "", "", ""]
    if scaled:
        first = scaled[0]
        if count == 1:
            row[4] = f"{first.input_exponent:g}, {first.weight_exponent:g}"
        row[5] = f"{sum(found.gain or 0.0 for found in scaled) / len(scaled):.1%}"
        row[6] = f"{sum(found.held_back_gain or 0.0 for found in scaled) / len(scaled):.1%}"
    reasons = sorted({found.reason for found in layer.matrices if not found.scaled})
    unscaled = f"{count - len(scaled)} of {count}: " if count > 1 and reasons else ""
    return [*row, unscaled + "; ".join(reasons[:REASONS_SHOWN])]
