"""pqweights eval."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output

if TYPE_CHECKING:
    from pqweights.evaluate.report import EvaluationReport, EvaluationSettings, ModelScores
    from pqweights.results.evaluation_record import Place


class Dataset(StrEnum):
    """Texts that the datasets package brings."""

    WIKITEXT = "wikitext"


def command(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Checkpoints, masters and exports: folders, or ORG/NAME on the Hub."),
    ],
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="UTF-8 text to evaluate on.")] = None,
    dataset: Annotated[
        Dataset | None, typer.Option("--dataset", help="Instead of --text: the test split of WikiText-2 (raw).")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="SRC", help="Compare with this model, token by token: KL, top-1, change."),
    ] = None,
    window: options.WindowOption = None,
    stride: options.StrideOption = None,
    score_first: options.ScoreFirstOption = False,
    max_tokens: options.MaxTokensOption = None,
    tokenizer: options.TokenizerOption = None,
    dtype: Annotated[
        options.ModelDtype | None,
        typer.Option("--dtype", help="What is computed in.", show_default="float32; for --speed the model's own"),
    ] = None,
    device: Annotated[
        options.Device, typer.Option("--device", help="Where to compute: cpu; cuda; auto: cuda if there is one.")
    ] = options.Device.CPU,
    packed: Annotated[
        bool, typer.Option("--packed", help="Compute with the packed weights of the MODELs, which must be masters.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also tokens per second and peak memory, each in a process of its own.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw KL (or perplexity) against bits per parameter: .svg or .png."
        ),
    ] = None,
    no_record: options.RecordOption = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Measure models on a text: perplexity, and how far each is from a reference.

    Each model is computed by the library that is meant to load it; the column runtime says how. Sliding windows, of which
    only the last tokens count: docs/evaluation.md. What was measured of a master or an export is written beside it, for
    its model card.
    """
    if (text is None) == (dataset is None):
        raise typer.BadParameter("expected either --text FILE or --dataset wikitext")
    with output.errors():
        from pqweights.evaluate.evaluation import evaluate
        from pqweights.results.evaluation_record import find_place
        from pqweights.runtimes.texts import read_text, wikitext

        if plot is not None:
            from pqweights.plots.evaluation import plot_evaluation
            from pqweights.plots.figure import check_plot_file

            check_plot_file(plot)
        from pqweights.hub.sources import repository_id

        if revision is not None and not any(repository_id(name) for name in models):
            raise typer.BadParameter("--revision: expected a repository on the Hub among the models")
        named = {
            name: options.fetched(name, options.access(revision if repository_id(name) else None, token))
            for name in models
        }
        base = None if reference is None else options.fetched(reference, options.access(None, token))
        folders = [named[name].path for name in models]
        places = [None if no_record or named[name].origin else find_place(named[name].path) for name in models]
        words = wikitext() if text is None else read_text(text)
        with output.progress("evaluating", unit="steps") as progress:
            done = evaluate(
                folders, words, name=str(text or dataset), reference=base and base.path,
                window=window, stride=stride, score_first=score_first, max_tokens=max_tokens, tokenizer=tokenizer,
                dtype=dtype and dtype.value, device=device.value, packed=packed, speed=speed, progress=progress,
            )  # fmt: skip
        recorded = done
        shown = [(name, named[name]) for name in models] + ([(reference, base)] if reference and base else [])
        done = done.renamed({str(found.path): name for name, found in shown if found.origin})
        if plot is not None:
            plot_evaluation(done, plot)
        if json:
            output.print_json(done.to_json())
        else:
            typer.echo(_text(done))
        _record(recorded, places, words, tokenizer, reference)


def _record(
    report: EvaluationReport, places: list[Place | None], words: str, tokenizer: Path | None, reference: str | None
) -> None:
    """Write figures beside the models that they are of; where that cannot be done, the figures were shown all the same."""
    from pqweights.errors import MasterError, OutputError
    from pqweights.evaluate.recording import make_record
    from pqweights.hub.sources import repository_id
    from pqweights.results.evaluation_record import write_record

    on_hub = None if reference is None else repository_id(reference)
    for row, place in zip(report.rows, places, strict=True):
        if place is not None:
            try:
                path = write_record(place, make_record(report, row, words, tokenizer=tokenizer, reference=on_hub))
                output.note(f"recorded in {path}")
            except (MasterError, OutputError) as error:
                output.note(f"not recorded: {error}")


def _text(report: EvaluationReport) -> str:
    """What was done, a line per model, and what the columns mean."""
    rows = [*([report.reference] if report.reference else []), *report.rows]
    cells = [_cells(row, row is report.reference) for row in rows]
    shown = [name for name in cells[0] if any(each[name] for each in cells)]
    columns = [(name, name not in ("model", "runtime")) for name in shown]
    lines = [
        _settings_line(report.settings),
        "",
        output.table(columns, [[each[n] for n in shown] for each in cells]),
        "",
    ]
    lines.append("+-: standard error over windows")
    if report.reference:
        lines[-1] += "; change: of the perplexity, paired; KL(reference || model) in nats per token"
    fast = next((row.speed for row in rows if row.speed), None)
    if fast:
        lines.append(
            f"tok/s: mean of {len(fast.tokens_per_second)} runs of 100 tokens, greedy, batch 1; memory: peak of that process; "
            "computed in " + ", ".join(sorted({row.speed.dtype for row in rows if row.speed}))
        )
    return "\n".join(lines)


def _settings_line(settings: EvaluationSettings) -> str:
    masked = f"the first {settings.masked} tokens of each masked" if settings.masked else "none masked"
    if settings.score_first and settings.masked:
        masked = f"the first {settings.masked} tokens of each but the first masked"
    return (
        f"{settings.text}: {settings.tokens} tokens, {settings.windows} window(s) of {settings.window}, stride "
        f"{settings.stride}, {masked}: {settings.scored_tokens} tokens scored; {settings.dtype} on {settings.device}"
    )


def _cells(row: ModelScores, is_reference: bool) -> dict[str, str]:
    """By column; a column that is empty everywhere is not shown."""
    found, size, speed = row.scores.divergence, row.size, row.speed
    return {
        "model": row.model + (" (reference)" if is_reference else ""),
        "GB": f"{size.bytes / 1e9:.3f}",
        "bits/param": "" if size.bits_per_parameter is None else f"{size.bits_per_parameter:.3f}",
        "bits/weight": "" if size.bits_per_weight is None else f"{size.bits_per_weight:.3f}",
        "perplexity": output.estimate(row.scores.perplexity, ".4f"),
        "change": output.estimate(row.scores.perplexity_change, "+.4f"),
        "KL mean": "" if found is None else output.estimate(found.mean, ".5f"),
        "KL 99%": "" if found is None else f"{found.percentile_99:.4f}",
        "top-1": "" if found is None else output.estimate(found.top1, ".2%"),
        "tok/s": "" if speed is None else f"{speed.mean:.1f}",
        "memory": "" if speed is None else output.size(speed.peak_bytes),
        "runtime": row.runtime,
    }
