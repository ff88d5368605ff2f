"""Evaluate: perplexity of models on a text, how far they are from a reference, and how fast they write.

`evaluate` does what `pqweights eval` does; `compare` scores one opened model, beside a reference or alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pqweights.errors import DeviceError, EvaluationError
from pqweights.evaluate.protocol import (
    Scores,
    Windows,
    compare,
)
from pqweights.evaluate.report import EvaluationReport, EvaluationSettings, ModelScores
from pqweights.evaluate.speed import Speed, measure_speed
from pqweights.exports.target import MLX
from pqweights.runtimes.folders import Folder, read_folder, size
from pqweights.runtimes.models import AUTO, DTYPES, Model, check_options, open_model
from pqweights.runtimes.packages import package
from pqweights.runtimes.texts import Ids, tokenize

DEFAULT_WINDOW, DEFAULT_STRIDE = 2048, 512

Progress = Callable[
    [int, int, str], None
]  # steps done, in all (windows of all models, runs for speed), and what is done


def evaluate(
    models: Sequence[Path],
    text: str,
    *,
    name: str = "the text",
    reference: Path | None = None,
    window: int | None = None,
    stride: int | None = None,
    score_first: bool = False,
    max_tokens: int | None = None,
    tokenizer: Path | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    packed: bool = False,
    speed: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> EvaluationReport:
    """Score models on a text, one after the other; with a reference each beside it, two in memory at most.

    name: of the text, for the report. window: by default 2048 tokens, or what the model of the shortest context takes.
    stride: by default a quarter of the window, 512 at most. tokenizer: a folder, instead of each model's own. dtype:
    one of DTYPES, by default float32; speed is measured in the model's own by default. packed: masters are computed with as
    they are, the reference excepted.

    Raises SourceError for a folder that is no causal language model or is incomplete, EvaluationError where models cannot
    be compared or not on this text, DeviceError, MasterError, MissingDependencyError. All but what loading finds is found
    before the first model is loaded.
    """
    if dtype not in (None, *DTYPES):
        raise EvaluationError(f"dtype {dtype!r}: expected {', '.join(DTYPES)}")
    if not models:
        raise EvaluationError("expected at least one model")
    folders = [read_folder(path) for path in models]
    base = None if reference is None else read_folder(reference)
    everything = [*([base] if base else []), *folders]
    device = _device(device, everything)
    for folder in everything:
        check_options(folder, device, packed and folder is not base)
    windows = choose_windows(everything, window, stride, score_first)
    for folder in folders if base else []:
        assert base is not None
        if None not in (folder.vocabulary, base.vocabulary) and folder.vocabulary != base.vocabulary:
            raise EvaluationError(
                f"{folder.path}: its config.json has {folder.vocabulary} tokens, that of the reference {base.vocabulary}: "
                "expected models of one vocabulary"
            )
    ids = _ids(everything, text, tokenizer, max_tokens)
    sizes = [size(folder.path) for folder in everything]
    count = len(windows.starts(len(ids)))
    settings = EvaluationSettings(
        name, len(ids), count, windows.size, windows.stride, score_first,
        sum(windows.scored(start) for start in windows.starts(len(ids))), dtype or "float32", device, packed,
        None if reference is None else str(reference),
    )  # fmt: skip

    steps = count * len(folders) + (len(everything) if speed else 0)

    def opened(folder: Folder, done: int) -> Model:
        progress(done, steps, f"loading {folder.path}")
        return open_model(folder.path, device, settings.dtype, packed and folder is not base)

    loaded_base = None if base is None else opened(base, 0)
    found: list[tuple[str, str, Scores]] = []
    for number, folder in enumerate(folders):
        model = opened(folder, number * count)

        def show(done: int, total: int, before: int = number * count, what: str = str(folder.path)) -> None:
            progress(before + done, steps, what)

        try:
            scores = compare(model, loaded_base, ids, windows, show)
        except EvaluationError as error:
            raise EvaluationError(f"{folder.path}: {error}") from None
        found.append((model.runtime, model.dtype, scores))
        del model  # before the next one is loaded
    if loaded_base is not None:
        losses = found[0][2].reference_losses
        assert losses is not None
        found.insert(0, (loaded_base.runtime, loaded_base.dtype, Scores(losses)))
        del loaded_base
    speeds: list[Speed | None] = [None] * len(everything)
    for number, folder in enumerate(everything if speed else ()):
        progress(steps - len(everything) + number, steps, f"tokens per second of {folder.path}")
        speeds[number] = measure_speed(
            folder.path, ids, device=device, dtype=dtype or AUTO, packed=packed and folder is not base
        )
    rows = [
        ModelScores(str(folder.path), runtime, computed_in, own, scores, fast)
        for folder, own, (runtime, computed_in, scores), fast in zip(everything, sizes, found, speeds, strict=True)
    ]
    return EvaluationReport(settings, rows.pop(0) if base else None, tuple(rows))


def _device(asked: str, folders: Sequence[Folder]) -> str:
    """cpu or cuda. auto is cuda where there is one, unless a folder is for mlx-lm, which chooses by itself.

    Raises DeviceError, MissingDependencyError.
    """
    if asked == "cpu" or (asked == "auto" and any(folder.kind == MLX for folder in folders)):
        return "cpu"
    torch = package("torch", "transformers", f"--device {asked}")
    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise DeviceError(f"--device cuda: torch {torch.__version__} finds no GPU that it can use; use --device cpu")
    return "cpu"


def choose_windows(folders: Sequence[Folder], window: int | None, stride: int | None, score_first: bool) -> Windows:
    """Of the size that was asked for, or that all models can take; None: the defaults of `evaluate`.

    Raises EvaluationError.
    """
    limits = [(folder.context, folder.path) for folder in folders if folder.context is not None]
    shortest, path = min(limits, default=(None, None))
    if window is None:
        window = min(DEFAULT_WINDOW, shortest or DEFAULT_WINDOW)
    elif shortest is not None and window > shortest:
        raise EvaluationError(f"--window {window}: {path} takes at most {shortest} tokens (by its config.json)")
    return Windows(window, stride or min(DEFAULT_STRIDE, max(1, window // 4)), score_first)


def _ids(folders: Sequence[Folder], text: str, tokenizer: Path | None, max_tokens: int | None) -> Ids:
    """The same tokens for all.

    Raises EvaluationError where models have other tokens, or more than they know.
    """
    first = tokenize(tokenizer or folders[0].path, text, max_tokens)
    for folder in folders:
        if tokenizer is None and folder is not folders[0]:
            ids = tokenize(folder.path, text, max_tokens)
            if not np.array_equal(ids, first):
                both = min(len(ids), len(first))
                place = int((ids[:both] != first[:both]).argmax()) if (ids[:both] != first[:both]).any() else both
                raise EvaluationError(
                    f"{folder.path}: its tokenizer makes other tokens of the text than that of {folders[0].path} ({len(ids)}, "
                    f"not {len(first)}; number {place} differs): per token, they cannot be compared; evaluate them apart"
                )
        if folder.vocabulary is not None and len(first) and int(first.max()) >= folder.vocabulary:
            raise EvaluationError(
                f"{folder.path}: the text has the token {int(first.max())}, the model knows {folder.vocabulary} tokens; "
                "the tokenizer is of another model"
            )
    return first
