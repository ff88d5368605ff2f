"""pqweights ablate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output

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


def parse_widths(text: str) -> list[float]:
    """Return the widths in a list such as "3,4,5", in bits; the codecs refuse those that they do not have."""
    try:
        widths = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected widths such as 3,4,5, found {text!r}") from None
    if len(set(widths)) < len(widths):
        raise typer.BadParameter(f"expected different widths, found {text!r}")
    return widths


def command(
    source: options.SourceArgument,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="UTF-8 text to evaluate on.")],
    bits: Annotated[str, typer.Option("--bits", "-b", metavar="N,N,...", help="Bits per code to measure at.")] = "5",
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Text for AWQ.", show_default="the last third of --text"),
    ] = None,
    no_awq: Annotated[bool, typer.Option("--no-awq", help="Leave out activation-aware scales.")] = False,
    no_int4: Annotated[bool, typer.Option("--no-int4", help="Leave out INT4.")] = False,
    recipe: options.RecipeOption = "q5",
    window: options.WindowOption = None,
    stride: options.StrideOption = None,
    score_first: options.ScoreFirstOption = False,
    max_tokens: options.MaxTokensOption = None,
    tokenizer: options.TokenizerOption = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", metavar="DIR", help="Folder for temporary masters.", exists=True, file_okay=False),
    ] = None,
    threads: options.ThreadsOption = None,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Measure what each part of the method is worth on a model: absmax, rotation, levels, norms, AWQ, and INT4 on top.

    This is the ablation of arXiv:2603.29078 v1. Each row is quantized, loaded and evaluated in full. It needs disk
    space for one master and one export at a time.
    """
    widths = parse_widths(bits)
    with output.errors():
        from pqweights.evaluate.evaluation import TextOptions
        from pqweights.measure.ablation import AblationOptions, ablate
        from pqweights.planning.recipe import load_recipe
        from pqweights.runtimes.texts import read_text

        chosen = load_recipe(recipe)
        found = options.fetched(source, options.access(revision, token))
        asked = AblationOptions(
            widths=widths,
            reading=TextOptions(
                window=window, stride=stride, score_first=score_first, max_tokens=max_tokens, tokenizer=tokenizer
            ),
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
            typer.echo(_text(done, str(text)))


def _text(done: Ablation, text: str) -> str:
    windows = done.windows
    calibrated = f"; AWQ calibrated on {done.calibration_tokens} other tokens" if done.calibration_tokens else ""
    return "\n".join(
        [
            f"{text}: {done.tokens} tokens, windows of {windows.size}, stride {windows.stride}: "
            f"{done.scored_tokens} tokens scored{calibrated}",
            "",
            output.table(COLUMNS, [_cells(row) for row in done.rows]),
            "",
            "change: of the perplexity, +- its paired standard error over windows; share: of the gain of rotation and "
            "levels together over absmax at the same width, empty if that gain is not above twice its standard error",
            *(f"not measured: {reason}" for reason in done.absent),
        ]
    )


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
