"""The command `pqweights eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output, text_options

if TYPE_CHECKING:
    from pqweights.inference.runtimes.cached import CacheFigures
    from pqweights.quality.evaluate.evaluation import EvaluationOptions
    from pqweights.quality.evaluate.report import EvaluationReport, EvaluationSettings, ModelScores
    from pqweights.rewrite.results.evaluation_record import EvaluationRecord, Place
    from pqweights.storage.hub.sources import Fetched


CACHE_LEGEND = (
    "; bits/coord.: all that the cache holds of a window, with recent tokens at 16 bits; attention: relative squared "
    "error of its outputs"
)


class Dataset(StrEnum):
    """The texts that the datasets package provides."""

    WIKITEXT = "wikitext"


ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...", help="Checkpoints, masters and exports: folders, or ORG/NAME on the Hub; also GGUF files."
    ),
]
TextOption = Annotated[Path | None, typer.Option("--text", metavar="FILE", help="UTF-8 text to evaluate on.")]
DatasetOption = Annotated[
    Dataset | None,
    typer.Option("--dataset", help="Evaluate on the test split of WikiText-2 (raw) instead of --text."),
]
ReferenceOption = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="SRC",
        help="Model to compare with, token by token: KL divergence, top-1 agreement, change of the perplexity.",
    ),
]
DtypeOption = Annotated[
    text_options.ModelDtype | None,
    typer.Option("--dtype", help="Dtype to compute in.", show_default="float32; with --speed the model's own"),
]
DeviceOption = Annotated[
    options.Device, typer.Option("--device", help="Device to compute on; auto uses a GPU if there is one.")
]
PackedOption = Annotated[
    bool, typer.Option("--packed", help="Keep the weights packed in memory; every MODEL must be a master.")
]
KvCacheOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache",
        metavar="SPEC",
        help="Quantize keys and values: klt, hadamard, polar or polar-rope, with options as in "
        "hadamard:3. Repeat it to compare several. Scored tokens are read one by one, as in generation.",
        show_default=False,
    ),
]
SpeedOption = Annotated[
    bool, typer.Option("--speed", help="Also measure tokens per second and peak memory, each model in its own process.")
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Plot KL divergence (or perplexity) over bits per parameter to FILE, a .svg or .png.",
    ),
]


def command(
    models: ModelsArgument,
    text: TextOption = None,
    dataset: DatasetOption = None,
    reference: ReferenceOption = None,
    window: text_options.WindowOption = None,
    stride: text_options.StrideOption = None,
    score_first: text_options.ScoreFirstOption = False,
    max_tokens: text_options.MaxTokensOption = None,
    tokenizer: text_options.TokenizerOption = None,
    no_bos: text_options.NoBosOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = options.Device.CPU,
    packed: PackedOption = False,
    kv_cache: KvCacheOption = None,
    speed: SpeedOption = False,
    plot: PlotOption = None,
    no_record: text_options.RecordOption = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Evaluate models on a text: perplexity, and how far each model is from a reference.

    Each model runs in the library that it is made for, which is named below the table. Windows slide over the text,
    and only the last tokens of each window are scored; see docs/evaluation.md. The results of a master or an export
    are also recorded beside it; its model card shows those that score at least 10000 tokens.
    """
    if (text is None) == (dataset is None):
        raise typer.BadParameter("expected either --text FILE or --dataset wikitext")
    with output.errors(quiet=quiet):
        from pqweights.quality.evaluate.evaluation import EvaluationOptions, TextOptions

        options.check_plot(plot)
        sources = _fetch(models, reference, revision=revision, token=token)
        reading = TextOptions(
            window=window,
            stride=stride,
            score_first=score_first,
            max_tokens=max_tokens,
            tokenizer=tokenizer,
            bos=not no_bos,
        )
        asked = EvaluationOptions(
            text_name=str(text or dataset),
            reading=reading,
            reference=sources.base and sources.base.path,
            dtype=dtype and dtype.value,
            device=device.value,
            packed=packed,
            kv_caches=tuple(kv_cache or ()),
            speed=speed,
        )
        _evaluate(
            sources, text, asked, presentation=_Presentation(plot=plot, json=json, record=not (no_record or kv_cache))
        )


@dataclass(frozen=True, kw_only=True)
class _Presentation:
    """What becomes of the figures.

    plot: where to plot them, if anywhere
    json: whether to print JSON
    record: whether to record them beside masters and exports
    """

    plot: Path | None
    json: bool
    record: bool


def _evaluate(sources: _Sources, text: Path | None, asked: EvaluationOptions, *, presentation: _Presentation) -> None:
    """Evaluate the models, and show and record the figures. text: the file, or None for WikiText."""
    from pqweights.inference.runtimes.texts import read_text, wikitext
    from pqweights.quality.evaluate.evaluation import evaluate
    from pqweights.quality.evaluate.report import make_record

    places = sources.places(record=presentation.record)
    words = wikitext() if text is None else read_text(text)
    with output.progress("evaluating", unit="steps") as progress:
        done = evaluate(sources.folders, words, asked, progress=progress)
    _show(sources.renamed(done), presentation)
    if not presentation.record:
        return
    for row, place in zip(done.rows, places, strict=True):
        if place is not None:
            tokenizer = asked.reading.tokenizer
            _record(place, make_record(done, row, words, tokenizer=tokenizer, reference=sources.base_id))


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """The models and the reference.

    names: the models as the user named them
    found: their folders by name
    reference: the reference as the user named it
    base: its folder
    """

    names: list[str]
    found: dict[str, Fetched]
    reference: str | None
    base: Fetched | None

    @property
    def folders(self) -> list[Path]:
        """The folders of the models."""
        return [self.found[name].path for name in self.names]

    @property
    def base_id(self) -> str | None:
        """The id of the reference if it is on the Hub."""
        from pqweights.storage.hub.sources import repository_id

        return None if self.reference is None else repository_id(self.reference)

    def places(self, *, record: bool) -> list[Place | None]:
        """Return where to record the figures of each model, if anywhere: not in the cache of the Hub."""
        from pqweights.rewrite.results.evaluation_record import find_place

        found = [self.found[name] for name in self.names]
        return [find_place(each.path) if record and not each.origin else None for each in found]

    def renamed(self, report: EvaluationReport) -> EvaluationReport:
        """Return the report with the user's names for models on the Hub, in place of folders in the cache."""
        shown = [*self.found.items(), *([(self.reference, self.base)] if self.reference and self.base else [])]
        return report.renamed({str(found.path): name for name, found in shown if found.origin})


def _fetch(models: list[str], reference: str | None, *, revision: str | None, token: str | None) -> _Sources:
    from pqweights.storage.hub.sources import repository_id

    if revision is not None and not any(repository_id(name) for name in models):
        raise typer.BadParameter("--revision: expected a repository on the Hub among the models")
    return _Sources(
        names=models,
        found={
            name: options.fetched(name, options.access(revision if repository_id(name) else None, token))
            for name in models
        },
        reference=reference,
        base=None if reference is None else options.fetched(reference, options.access(None, token)),
    )


def _show(done: EvaluationReport, presentation: _Presentation) -> None:
    if presentation.plot is not None:
        from pqweights.quality.plots.evaluation import plot_evaluation

        plot_evaluation(done, presentation.plot)
    if presentation.json:
        output.print_json(done.to_json())
    else:
        output.show(*_lines(done))


def _record(place: Place, record: EvaluationRecord) -> None:
    """Write figures beside their model; a failure is only a note, because the figures are printed already."""
    from pqweights.errors import MasterError, OutputError
    from pqweights.rewrite.results.evaluation_record import FEWEST_TOKENS_FOR_CARD, write_record

    too_few = (
        f"; too few tokens for the model card, which shows evaluations that score at least {FEWEST_TOKENS_FOR_CARD}"
    )
    try:
        output.note(f"recorded in {write_record(place, record)}{'' if record.is_for_card else too_few}")
    except (MasterError, OutputError) as error:
        output.note(f"not recorded: {error}")


def _lines(report: EvaluationReport) -> list[str]:
    """Return the settings, a line for each model, and what the columns mean."""
    rows = [*([report.reference] if report.reference else []), *report.rows]
    cells = [_cells(row, row is report.reference) for row in rows]
    shown = [name for name in cells[0] if any(each[name] for each in cells)]
    columns = [(name, name != "model") for name in shown]
    legend = "+-: standard error over windows"
    caches = any(row.kv_cache for row in rows)
    if report.reference or caches:
        legend += "; change: of the perplexity, with paired errors; KL: KL(reference || model) in nats per token"
    if caches:
        legend += CACHE_LEGEND + ("" if report.reference else "; the reference is the model with its own cache")
    lines = [
        _settings_line(report.settings),
        "",
        *output.table(columns, [[each[name] for name in shown] for each in cells]),
        "",
        *_runtime_lines(rows),
        legend,
    ]
    speeds = [row.speed for row in rows if row.speed]
    if speeds:
        meaning = (
            f"tok/s: mean of {len(speeds[0].tokens_per_second)} runs of 100 tokens, greedy, batch 1; memory: peak of "
            f"the process; computed in {', '.join(sorted({speed.dtype for speed in speeds}))}"
        )
        lines.append(meaning)
    return lines


def _attention_error(figures: CacheFigures) -> str:
    return "" if figures.attention_error is None else f"{figures.attention_error:.5f}"


def _runtime_lines(rows: Sequence[ModelScores]) -> list[str]:
    """Return which library computed which models, in a line for each library."""
    models: dict[str, list[str]] = {}
    for row in rows:
        models.setdefault(row.runtime, []).append(row.model)
    if len(models) == 1:
        return [f"computed by {runtime}" for runtime in models]
    # A model may also be the reference.
    return [f"{', '.join(dict.fromkeys(names))}: computed by {runtime}" for runtime, names in models.items()]


def _settings_line(settings: EvaluationSettings) -> str:
    from pqweights.common.units import counted
    from pqweights.quality.evaluate.report import beginning, masked_tokens

    windows = counted(settings.windows, "window")
    return (
        f"{settings.text}: {settings.tokens} tokens, {windows} of {settings.window}, stride {settings.stride}"
        f"{beginning(settings)}, "
        f"{masked_tokens(settings)}: {settings.scored_tokens} tokens scored; {settings.dtype} on {settings.device}"
    )


def _cells(row: ModelScores, is_reference: bool) -> dict[str, str]:
    """Return the cells of one model by column; a column that is empty for all models is not shown."""
    divergence, size, speed = row.scores.divergence, row.size, row.speed
    return {
        "model": row.model + (" (reference)" if is_reference else ""),
        "KV cache": "" if row.kv_cache is None else row.kv_cache.spec,
        "bits/coord.": "" if row.kv_cache is None else f"{row.kv_cache.bits_per_coordinate:.3f}",
        "bytes/token": "" if row.kv_cache is None else f"{row.kv_cache.bytes_per_token:.0f}",
        "attention": "" if row.kv_cache is None else _attention_error(row.kv_cache),
        "GB": f"{size.bytes / 1e9:.3f}",
        "bits/param": "" if size.bits_per_parameter is None else f"{size.bits_per_parameter:.3f}",
        "bits/weight": "" if size.bits_per_weight is None else f"{size.bits_per_weight:.3f}",
        "perplexity": output.estimate(row.scores.perplexity, ".4f"),
        "change": output.estimate(row.scores.perplexity_change, "+.4f"),
        "KL mean": "" if divergence is None else output.estimate(divergence.mean, ".5f"),
        "KL 99%": "" if divergence is None else f"{divergence.percentile_99:.4f}",
        "top-1": "" if divergence is None else output.estimate(divergence.top1, ".2%"),
        "tok/s": "" if speed is None else f"{speed.mean:.1f}",
        "memory": "" if speed is None else output.size(speed.peak_bytes),
    }
