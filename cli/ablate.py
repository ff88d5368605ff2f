"""pqweights ablate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output

if TYPE_CHECKING:
    from pqweights.measure.ablation import Ablation, AblationRow


def parse_widths(text: str) -> list[float]:
    """Bits from "3,4,5"; the codecs say which of them they have."""
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
    bits: Annotated[str, typer.Option("--bits", "-b", metavar="N,N,...", help="Widths.")] = "5",
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
        typer.Option("--work", metavar="DIR", help="Where masters are made for a while.", exists=True, file_okay=False),
    ] = None,
    threads: options.ThreadsOption = None,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """What each part of the method is worth on a model: absmax, rotation, levels, norms, AWQ, and INT4 on top.

    The ablation of arXiv:2603.29078 v1. Each row is quantized, loaded and evaluated in full; disk for one master and one
    export at a time.
    """
    widths = parse_widths(bits)
    with output.errors():
        from pqweights.measure.ablation import ablate
        from pqweights.planning.recipe import load_recipe
        from pqweights.runtimes.texts import read_text

        chosen = load_recipe(recipe)
        found = options.fetched(source, options.access(revision, token))
        with output.progress("ablating", unit="rows") as progress:
            done = ablate(
                found.path, read_text(text), widths, chosen, calibration=None if calibration is None else read_text(calibration),
                awq=not no_awq, int4=not no_int4, window=window, stride=stride, score_first=score_first,
                max_tokens=max_tokens, tokenizer=tokenizer, work=work, threads=options.thread_count(threads),
                progress=progress,
            )  # fmt: skip
        if json:
            output.print_json({"text": str(text)} | done.to_json())
        else:
            typer.echo(_text(done, str(text)))


def _text(done: Ablation, text: str) -> str:
    windows = done.windows
    lines = [
        f"{text}: {done.tokens} tokens, windows of {windows.size}, stride {windows.stride}: {done.scored_tokens} tokens scored"
        + (f"; AWQ on {done.calibration_tokens} others" if done.calibration_tokens else "")
    ]
    columns = [
        ("bits", True), ("configuration", False), ("bits/weight", True), ("relative MSE", True), ("perplexity", True),
        ("change", True), ("KL mean", True), ("top-1", True), ("share of the gain", True),
    ]  # fmt: skip
    lines += ["", output.table(columns, [_cells(row) for row in done.rows]), ""]
    lines.append(
        "change: of the perplexity, +- its paired standard error over windows; share: of what rotation and levels together gain "
        "over absmax, at the same width; empty where that gain is not above twice its standard error"
    )
    return "\n".join([*lines, *(f"not measured: {reason}" for reason in done.absent)])


def _cells(row: AblationRow) -> list[str]:
    change, found = row.scores.perplexity_change, row.scores.divergence
    return [
        str(row.bits or ""), row.name, "" if row.bits_per_weight is None else f"{row.bits_per_weight:.4f}",
        "" if row.relative_mse is None else f"{row.relative_mse:.6f}", f"{row.scores.perplexity.value:.3f}",
        output.estimate(change, "+.3f"),
        "" if found is None else f"{found.mean.value:.5f}", "" if found is None else f"{found.top1.value:.2%}",
        "" if row.share is None else f"{row.share:.1%}",
    ]  # fmt: skip
