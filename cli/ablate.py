"""The command `pqweights ablate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output, text_options

if TYPE_CHECKING:
    from pqweights.measure.ablation import Ablation, AblationRow

COLUMNS = [
    ("bits", True),
    ("configuration", False),
    ("bits/weight", True),
    ("relative MSE", True),
    ("perplexity", True),
    ("change", True),
    ("KL mean", True),
    ("top-1", True),
    ("share of the gain", True),
]


TextOption = Annotated[Path, typer.Option("--text", metavar="FILE", help="UTF-8 text to evaluate on.")]
BitsOption = Annotated[
    str, typer.Option("--bits", "-b", metavar="N,N,...", help="Bit widths to measure, separated by commas.")
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="UTF-8 text to search the scales of AWQ on.",
        show_default="the last third of --text",
    ),
]
NoAwqOption = Annotated[bool, typer.Option("--no-awq", help="Do not measure activation-aware scales (AWQ).")]
NoInt4Option = Annotated[bool, typer.Option("--no-int4", help="Do not measure INT4.")]
WorkOption = Annotated[
    Path | None,
    typer.Option(
        "--work",
        metavar="DIR",
        help="Existing folder for temporary masters and exports.",
        show_default="the folder for temporary files",
        exists=True,
        file_okay=False,
    ),
]


def command(
    source: options.FetchedSourceArgument,
    text: TextOption,
    bits: BitsOption = "5",
    calibration: CalibrationOption = None,
    no_awq: NoAwqOption = False,
    no_int4: NoInt4Option = False,
    recipe: options.RecipeOption = "q5",
    keep: options.KeepOption = None,
    set_bits: options.SetOption = None,
    window: text_options.WindowOption = None,
    stride: text_options.StrideOption = None,
    score_first: text_options.ScoreFirstOption = False,
    max_tokens: text_options.MaxTokensOption = None,
    tokenizer: text_options.TokenizerOption = None,
    no_bos: text_options.NoBosOption = False,
    work: WorkOption = None,
    threads: options.ThreadsOption = None,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Measure what each part of the method gains over absmax on a model: rotation, levels, norms and AWQ, then INT4.

    This is the ablation of arXiv:2603.29078 v1. Each row is a model that is quantized, loaded and evaluated in full.
    It needs disk space for one master and one export at a time.
    """
    widths = parse_widths(bits)
    with output.errors(quiet=quiet):
        from pqweights.evaluate.evaluation import TextOptions
        from pqweights.measure.ablation import AblationOptions, ablate
        from pqweights.planning.choice import RecipeOptions, choose_recipe
        from pqweights.runtimes.texts import read_text

        chosen = choose_recipe(recipe, RecipeOptions(keep=tuple(keep or ()), set_bits=options.settings(set_bits)))
        found = options.fetched(source, options.access(revision, token))
        reading = TextOptions(
            window=window,
            stride=stride,
            score_first=score_first,
            max_tokens=max_tokens,
            tokenizer=tokenizer,
            bos=not no_bos,
        )
        asked = AblationOptions(
            widths=widths,
            reading=reading,
            calibration=None if calibration is None else read_text(calibration),
            awq=not no_awq,
            int4=not no_int4,
            work=work,
            threads=options.thread_count(threads),
        )
        with output.progress("ablating", unit="rows") as progress:
            done = ablate(found.path, read_text(text), recipe=chosen, options=asked, progress=progress)
        if json:
            output.print_json({"text": str(text)} | done.to_json())
        else:
            output.show(*_lines(done, str(text)))


def parse_widths(text: str) -> list[float]:
    """Return the bit widths in a list such as "3,4,5"; the codecs refuse those that they do not have."""
    from pqweights.codecs.protocol import exact_rate

    try:
        widths = [exact_rate(float(part)) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected bit widths such as 3,4,5, found {text!r}") from None
    if len(set(widths)) < len(widths):
        raise typer.BadParameter(f"expected different bit widths, found {text!r}")
    return widths


def _lines(done: Ablation, text: str) -> list[str]:
    windows = done.windows
    calibrated = f"; AWQ calibrated on {done.calibration_tokens} other tokens" if done.calibration_tokens else ""
    return [
        f"{text}: {done.tokens} tokens, windows of {windows.size}, stride {windows.stride}"
        f"{'' if windows.bos is None else ', each begins with BOS'}: {done.scored_tokens} tokens scored{calibrated}",
        "",
        *output.table(COLUMNS, [_cells(row) for row in done.rows]),
        "",
        "change: of the perplexity, +- its paired standard error over windows; share of the gain: of rotation and "
        "levels together over absmax at the same bit width, empty if that gain is below twice its standard error",
        *(f"not measured: {reason}" for reason in done.absent),
    ]


def _cells(row: AblationRow) -> list[str]:
    divergence = row.scores.divergence
    return [
        "" if row.bits is None else f"{row.bits:g}",
        row.name,
        "" if row.bits_per_weight is None else f"{row.bits_per_weight:.4f}",
        "" if row.relative_mse is None else f"{row.relative_mse:.6f}",
        f"{row.scores.perplexity.value:.3f}",
        output.estimate(row.scores.perplexity_change, "+.3f"),
        "" if divergence is None else f"{divergence.mean.value:.5f}",
        "" if divergence is None else f"{divergence.top1.value:.2%}",
        "" if row.share is None else f"{row.share:.1%}",
    ]
