"""The command `pqweights eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pqweights.common.options import EvaluationOptions, options_in, path_of
from pqweights.common.units import counted, size_text

from . import options, output

if TYPE_CHECKING:
    from pqweights.common.options import Options
    from pqweights.results.evaluation_record import EvaluationRecord, ResultFolder
    from pqweights.runtime.report import EvaluationReport, EvaluationSettings, ModelScores
    from pqweights.storage.sources import Fetched

WIKITEXT = "wikitext"
COLUMNS = "model,KV cache,bits/coord.,bytes/token,GB,bits/param,bits/weight,perplexity,change,KL mean,KL 99%,top-1"
CACHE_LEGEND = "; bits/coord.: all that the cache holds of a window, with recent tokens at 16 bits"


def command(
    models: options.Models,
    text: options.Text = None,
    dataset: options.Dataset = None,
    reference: options.Reference = None,
    save_reference: options.SaveReference = None,
    no_record: options.NoRecord = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    packed: options.PackedMasters = False,
    kv_cache: options.KvCaches = None,
    no_bos: options.NoBos = False,
    window: options.Window = None,
    stride: options.Stride = None,
    score_first: options.ScoreFirst = False,
    max_tokens: options.TextTokens = None,
    tokenizer: options.Tokenizer = None,
    threads: options.Threads = None,
    revision: options.Revision = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Evaluate models on a text: perplexity, and how far each model is from a reference.

    Each model runs in the library that it is made for, which is named below the table. Windows slide over the text,
    and only the last tokens of each window are scored; see docs/evaluation.md. The results of a master or an export
    are also recorded beside it; its model card shows those that score at least 10000 tokens. In a folder with
    several GGUF models or formats, each is evaluated.
    """
    with output.errors(quiet=quiet):
        from pqweights.results.evaluation_record import result_folder_of
        from pqweights.results.parts import models_in
        from pqweights.runtime.evaluation import evaluate

        _check_text(text, dataset, reference)
        evaluation = options_in(EvaluationOptions, locals())
        fetched = _fetched(models, options.hub(revision, token))
        base = None if reference is None else options.fetched(reference, options.hub(None, token))
        words = _words(text, dataset)
        evaluation = replace(
            evaluation, kv_caches=kv_cache or (), text_name=str(text or dataset), reference=base and base.path
        )
        paths = [(path, model) for model in fetched for path in models_in(model.path)]
        folders = [None if no_record or kv_cache or model.origin else result_folder_of(path) for path, model in paths]
        with output.progress("evaluating", unit="steps") as progress:
            done = evaluate([path for path, _ in paths], words, evaluation, progress=progress)
        opened = [*zip(models, fetched, strict=True), *([] if base is None else [(str(reference), base)])]
        names = [pair for name, model in opened if model.origin for pair in _names_in(name, model.path)]
        _show(done.renamed(dict(names)), json)
        if save_reference is not None:
            output.note(f"{save_reference}: {size_text(save_reference.stat().st_size)}, for --reference")
        _record_all(done, folders, words, tokenizer=path_of(tokenizer), reference=reference)


def _names_in(name: str, folder: Path) -> list[tuple[str, str]]:
    """Return the paths of the models in a folder that was fetched, and what a report calls each. name: as given"""
    from pqweights.results.parts import models_in

    return [(str(path), name if path == folder else f"{name}/{path.name}") for path in models_in(folder)]


def _check_text(text: Path | None, dataset: str | None, reference: str | None) -> None:
    """Raise OptionError unless there is one text; a saved reference has its own."""
    from pqweights.errors import OptionError
    from pqweights.runtime.saved_reference import is_saved_reference

    has_text = reference is not None and is_saved_reference(Path(reference))
    given = [name for name in (text, dataset) if name is not None]
    if len(given) > 1 or not (given or has_text) or dataset not in (None, WIKITEXT):
        raise OptionError(f"expected either `text` or `dataset` {WIKITEXT}")


def _words(text: Path | None, dataset: str | None) -> str | None:
    """Return the text that is given; None for that of a saved reference."""
    from pqweights.runtime.texts import read_text, wikitext

    if dataset is not None:
        return wikitext()
    return None if text is None else read_text(text)


def _fetched(models: Sequence[str], hub: Options) -> list[Fetched]:
    """Return the folders of models; the revision is of those on the Hub."""
    from pqweights.errors import OptionError
    from pqweights.storage.addresses import repository_id

    on_hub = [repository_id(name) is not None for name in models]
    if hub.revision is not None and not any(on_hub):
        raise OptionError("`revision`: expected a repository on the Hub among the models")
    main = replace(hub, revision=None)
    return [options.fetched(name, hub if there else main) for name, there in zip(models, on_hub, strict=True)]


def _record_all(
    done: EvaluationReport,
    folders: Sequence[ResultFolder | None],
    words: str | None,
    *,
    tokenizer: Path | None,
    reference: str | None,
) -> None:
    """Write the figures of each model beside it; not those of a quantized cache, which are not the folder's."""
    from pqweights.runtime.report import make_record
    from pqweights.storage.addresses import repository_id

    base = None if reference is None else repository_id(reference)
    for row, folder in zip(done.rows, folders, strict=False):
        if folder is not None:
            _record(folder, make_record(done, row, words, tokenizer=tokenizer, reference=base))


def _show(done: EvaluationReport, json: bool) -> None:
    if json:
        output.print_json(done.to_json())
    else:
        output.show(*_lines(done))


def _record(folder: ResultFolder, record: EvaluationRecord) -> None:
    """Write figures beside their model; a failure is only a note, because the figures are printed already."""
    from pqweights.errors import MasterError, OutputError
    from pqweights.results.evaluation_record import FEWEST_TOKENS_FOR_CARD, write_record

    too_few = (
        f"; too few tokens for the model card, which shows evaluations that score at least {FEWEST_TOKENS_FOR_CARD}"
    )
    try:
        output.note(f"recorded in {write_record(folder, record)}{'' if record.is_for_card else too_few}")
    except (MasterError, OutputError) as error:
        output.note(f"not recorded: {error}")


def _lines(report: EvaluationReport) -> list[str]:
    """Return the settings, a line for each model, and what the columns mean."""
    rows = [*([report.reference] if report.reference else []), *report.rows]
    cells = [_cells(row, row is report.reference) for row in rows]
    shown = [name for name in COLUMNS.split(",") if any(row.get(name) for row in cells)]
    columns = [name if name == "model" else f"#{name}" for name in shown]
    legend = "+-: standard error over windows"
    caches = any(row.kv_cache for row in rows)
    if report.reference or caches:
        legend += "; change: of the perplexity, with paired errors; KL: KL(reference || model) in nats per token"
    if caches:
        legend += CACHE_LEGEND + ("" if report.reference else "; the reference is the model with its own cache")
    return [
        _settings_line(report.settings),
        "",
        *output.table(columns, [[row.get(name, "") for name in shown] for row in cells]),
        "",
        *_runtime_lines(rows),
        legend,
    ]


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
    from pqweights.runtime.report import beginning, masked_tokens

    windows = counted(settings.windows, "window")
    return (
        f"{settings.text}: {settings.tokens} tokens, {windows} of {settings.window}, stride {settings.stride}"
        f"{beginning(settings)}, "
        f"{masked_tokens(settings)}: {settings.scored_tokens} tokens scored; {settings.dtype} on {settings.device}"
    )


def _cells(row: ModelScores, is_reference: bool) -> dict[str, str]:
    """Return the cells of one model by column; a column that is empty for all models is not shown."""
    divergence, size, cache = row.scores.divergence, row.size, row.kv_cache
    cells = {
        "model": row.model + (" (reference)" if is_reference else ""),
        "GB": f"{size.bytes / 1e9:.3f}",
        "bits/param": "" if size.bits_per_parameter is None else f"{size.bits_per_parameter:.3f}",
        "bits/weight": "" if size.bits_per_weight is None else f"{size.bits_per_weight:.3f}",
        "perplexity": output.estimate(row.scores.perplexity, ".4f"),
        "change": output.estimate(row.scores.perplexity_change, "+.4f"),
    }
    if cache is not None:
        cells["KV cache"] = cache.spec
        cells["bits/coord."] = f"{cache.bits_per_coordinate:.3f}"
        cells["bytes/token"] = f"{cache.bytes_per_token:.0f}"
    if divergence is not None:
        cells["KL mean"] = output.estimate(divergence.mean, ".5f")
        cells["KL 99%"] = f"{divergence.percentile_99:.4f}"
        cells["top-1"] = output.estimate(divergence.top1, ".2%")
    return cells
