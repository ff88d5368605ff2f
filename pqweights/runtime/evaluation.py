"""The run of an evaluation: checks, windows, and one model after another."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pqweights.checkpoint.writer import free_bytes
from pqweights.common.options import EvaluationOptions, path_of
from pqweights.common.threads import Progress, no_progress, slow_step
from pqweights.errors import EvaluationError
from pqweights.runtime.cached import CachedRun, CacheFigures, check_spec
from pqweights.runtime.folders import Folder, Size, read_model, size
from pqweights.runtime.models import Floats, Model, check_options, check_packed, choose_device, open_model
from pqweights.runtime.packages import give_back_memory
from pqweights.runtime.protocol import Loss, Save, Scores, TextWindows, compare
from pqweights.runtime.report import EvaluationReport, EvaluationSettings, ModelScores, base_name, fingerprint
from pqweights.runtime.saved_reference import (
    SUFFIX,
    Facts,
    ReferenceWriter,
    SavedReference,
    is_saved_reference,
)
from pqweights.runtime.texts import EncodedText, Ids, check_vocabulary, encode
from pqweights.targets.target import MLX

DEFAULT_WINDOW, DEFAULT_STRIDE = 2048, 512

# Called with the windows done, the windows of all models, and what is being done.
# So much of the disk stays free: what no longer fits is computed again.
ROOM_LEFT_BYTES = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class _EvaluationJob:
    """An evaluation of which everything but the models themselves has been read and checked.

    folders: the folders of all models; the reference is the first if there is one that is not saved.
    sizes: the sizes of those folders, in the same order.
    saved: the reference, if it is a file with its distributions.
    text: the text.
    characters: how many of its characters became tokens.
    ids: the tokens of the text, [tokens].
    windows: how the tokens are cut.
    starts: the first token of each window.
    device: cpu or cuda.
    options: what was asked for.
    progress: the callback of the caller.
    """

    folders: tuple[Folder, ...]
    sizes: tuple[Size, ...]
    saved: SavedReference | None
    text: str
    characters: int
    ids: Ids
    windows: TextWindows
    starts: range
    device: str
    options: EvaluationOptions
    progress: Progress

    @property
    def base(self) -> Folder | None:
        """The folder of the reference, unless it is saved."""
        return self.folders[0] if self.options.reference is not None and self.saved is None else None

    @property
    def compared(self) -> tuple[Folder, ...]:
        """The folders of the models that are not the reference."""
        return self.folders if self.base is None else self.folders[1:]

    def report(self, done: int, what: str) -> None:
        """Report progress after `done` windows."""
        total = len(self.starts) * len(self.compared) * max(1, len(self.options.kv_caches))
        self.progress(done, total, what)

    def open(self, folder: Folder, done: int) -> Model:
        """Load a model; the reference is never packed."""
        self.report(done, f"loading {folder.path}")
        packed = self.options.packed and folder is not self.base
        with slow_step(f"loading {folder.path}"):
            options = self.options
            return open_model(
                folder.path, device=self.device, dtype=options.dtype, packed=packed, threads=options.threads
            )


def evaluate(
    models: Sequence[Path],
    text: str | None,
    options: EvaluationOptions = EvaluationOptions(),
    *,
    progress: Progress = no_progress,
) -> EvaluationReport:
    """Score models on a text, one after the other, each beside the reference if there is one.

    text: may be None if the reference is a saved one, which has its text

    At most two models are in memory at a time. Everything that can be checked without loading a model is checked before
    the first one is loaded.

    Raises SourceError for a folder that is not a causal language model or is incomplete, EvaluationError if the models
    cannot be compared on this text, DeviceError, MasterError, MissingDependencyError.
    """
    with slow_step("reading the text with transformers"):
        job = _prepare(models, text, options, progress=progress)
    rows = _score_all(job)
    return EvaluationReport(_settings(job), rows.pop(0) if options.reference else None, tuple(rows))


def _prepare(
    models: Sequence[Path], text: str | None, options: EvaluationOptions, *, progress: Progress
) -> _EvaluationJob:
    """Read and check everything that needs no model in memory."""
    if not models:
        raise EvaluationError("expected at least one model, found none")
    saved = None
    if options.reference is not None and is_saved_reference(Path(options.reference)):
        saved = SavedReference(Path(options.reference))
        text, options = _of_saved(saved, text, options)
    if text is None:
        raise EvaluationError("expected a text, found none")
    if options.save_reference is not None:
        _check_saving(Path(options.save_reference), models, options)
    for spec in options.kv_caches:
        check_spec(spec)
    compared = [read_model(path) for path in models]
    base = [] if options.reference is None or saved else [read_model(Path(options.reference))]
    folders = [*base, *compared]
    for folder in compared if options.packed else ():
        check_packed(folder)
    check_options(folders, device=options.device, dtype=options.dtype, has_kv_cache=bool(options.kv_caches))
    device = choose_device(options.device, folders)
    windows = choose_windows(folders, options)
    if base or saved:
        _check_same_vocabulary(saved.facts.vocabulary if saved else base[0].vocabulary, compared)
    ids, bos, characters = _encoded(folders, text, options, saved)
    windows = replace(windows, bos=bos)
    return _EvaluationJob(
        folders=tuple(folders),
        sizes=tuple(size(folder.path) for folder in folders),
        saved=saved,
        text=text,
        characters=characters,
        ids=ids,
        windows=windows,
        starts=windows.starts(len(ids), max_tokens=options.max_tokens),
        device=device,
        options=options,
        progress=progress,
    )


def _score_all(job: _EvaluationJob) -> list[ModelScores]:
    """Score all models; the reference comes first if there is one. Only the figures stay in memory."""
    loaded = None if job.base is None else job.open(job.base, 0)
    several = len(job.compared) * max(1, len(job.options.kv_caches)) > 1
    with contextlib.nullcontext(loaded) if loaded is None or not several else remembered(loaded) as base:
        result = [row for number in range(len(job.compared)) for row in _score(job, number, base)]
    losses = result[0].scores.reference_losses
    if base is not None and job.base is not None and losses is not None:
        result.insert(0, _row(job, job.base, base, Scores(losses)))
    if job.saved is not None and losses is not None:
        result.insert(0, _row_of_saved(job.saved, losses))
    return result


def _score(job: _EvaluationJob, number: int, base: Model | None) -> list[ModelScores]:
    """Load one of the compared models and score it. It is freed on return, before the next one is loaded."""
    if number > 0:
        gc.collect()  # models of compressed-tensors are in cycles
        give_back_memory()
    folder, specs = job.compared[number], job.options.kv_caches
    before = number * len(job.starts) * max(1, len(specs))
    model = job.open(folder, before)
    if specs:
        return _score_caches(job, folder, model, base=base, before=before)
    saves = job.options.save_reference is not None and number == 0
    with _saving(job, job.base or folder, base or model) if saves else contextlib.nullcontext() as save:
        scores = _compared(job, folder, model, base=base, before=before, save=save)
    return [_row(job, folder, model, scores)]


@contextlib.contextmanager
def _saving(job: _EvaluationJob, folder: Folder, model: Model) -> Iterator[Save]:
    """Yield what saves the distributions of a reference, which has its name once all are there."""
    row, settings = _row(job, folder, model, Scores(())), _settings(job)
    facts = Facts(
        name=base_name(folder.path),
        fingerprint=fingerprint(folder.path),
        runtime=row.runtime,
        dtype=row.dtype,
        device=row.device,
        bytes=row.size.bytes,
        parameters=row.size.parameters,
        text=base_name(settings.text),
        text_sha256=hashlib.sha256(job.text.encode()).hexdigest(),
        window=settings.window,
        stride=settings.stride,
        score_first=settings.score_first,
        bos=job.windows.bos,
        vocabulary=model.logits(job.ids[:2], 1).shape[1],
    )
    writer = ReferenceWriter(
        Path(str(job.options.save_reference)),
        facts,
        text=job.text[: job.characters],
        ids=job.ids,
        scored=settings.scored_tokens,
    )
    with contextlib.closing(writer):
        yield writer.add
        writer.finish()


def _row_of_saved(saved: SavedReference, losses: tuple[Loss, ...]) -> ModelScores:
    """Return the row of a saved reference in the report."""
    facts = saved.facts
    return ModelScores(
        model=str(saved.path),
        runtime=facts.runtime,
        device=facts.device,
        dtype=facts.dtype,
        size=Size(facts.bytes, facts.parameters, None),
        scores=Scores(losses),
    )


def _row(
    job: _EvaluationJob, folder: Folder, model: Model, scores: Scores, *, kv_cache: CacheFigures | None = None
) -> ModelScores:
    """Return the row of a model in the report."""
    return ModelScores(
        model=str(folder.path),
        runtime=model.runtime,
        device=None if folder.runtime == MLX else job.device,
        dtype=model.dtype,
        size=job.sizes[job.folders.index(folder)],
        scores=scores,
        kv_cache=kv_cache,
    )


def _compared(
    job: _EvaluationJob, folder: Folder, model: Model, *, base: Model | None, before: int, save: Save | None = None
) -> Scores:
    """Score a model beside the reference. before: the steps done"""

    def show(done: int, total: int) -> None:
        job.report(before + done, str(folder.path))

    try:
        return compare(model, base or job.saved, ids=job.ids, windows=job.windows, save=save, progress=show)
    except EvaluationError as error:
        raise EvaluationError(f"{folder.path}: {error}") from None


def _score_caches(
    job: _EvaluationJob, folder: Folder, model: Model, *, base: Model | None, before: int
) -> list[ModelScores]:
    """Score a model with each of the quantized caches; without a reference, beside and after itself."""
    runs = [CachedRun(model.net, spec) for spec in job.options.kv_caches]
    rows, is_alone = [], base is None and job.saved is None
    with remembered(model) if is_alone and len(runs) > 1 else contextlib.nullcontext(base or model) as reference:
        for number, run in enumerate(runs):
            with_cache = replace(model, logits=run.logits, logits_of=run.logits_of)
            steps = before + number * len(job.starts)
            scores = _compared(job, folder, with_cache, base=None if job.saved else reference, before=steps)
            rows.append(_row(job, folder, model, scores, kv_cache=run.figures()))
    losses = rows[0].scores.reference_losses
    if is_alone and losses is not None:
        rows.insert(0, _row(job, folder, model, Scores(losses)))
    return rows


def _settings(job: _EvaluationJob) -> EvaluationSettings:
    windows, options = job.windows, job.options
    return EvaluationSettings(
        text=options.text_name,
        tokens=len(job.ids),
        windows=len(job.starts),
        window=windows.size,
        stride=windows.stride,
        score_first=windows.score_first,
        bos=windows.bos is not None,
        scored_tokens=sum(windows.scored(start) for start in job.starts),
        dtype=options.dtype,
        device=job.device,
        packed=options.packed,
        reference=None if options.reference is None else str(options.reference),
    )


def choose_windows(folders: Sequence[Folder], options: EvaluationOptions) -> TextWindows:
    """Return windows of the size that was asked for, or of the default size if all models can take it.

    Raises EvaluationError if a model takes fewer tokens than was asked for.
    """
    limits = [(folder.context, folder) for folder in folders if folder.context is not None]
    shortest, folder = min(limits, key=lambda limit: (limit[0], limit[1].path), default=(None, None))
    window = options.window
    if window is None:
        window = min(DEFAULT_WINDOW, shortest or DEFAULT_WINDOW)
    elif shortest is not None and folder is not None and window > shortest:
        raise EvaluationError(
            f"`window` {window}: {folder.path} takes at most {shortest} tokens (by its {folder.stated_in})"
        )
    stride = options.stride or min(DEFAULT_STRIDE, max(1, window // 4))
    return TextWindows(size=window, stride=stride, score_first=options.score_first)


def _check_saving(path: Path, models: Sequence[Path], options: EvaluationOptions) -> None:
    """Raise EvaluationError if there is no reference to save, or no place to save it."""
    if path.suffix != SUFFIX:
        raise EvaluationError(f"`save_reference` {path}: expected a name that ends with {SUFFIX}")
    if not path.absolute().parent.is_dir():
        raise EvaluationError(f"`save_reference` {path}: {path.absolute().parent} is not a folder; make it first")
    if options.reference is None and len(models) > 1:
        raise EvaluationError(f"`save_reference`: expected one model, or a `reference`, found {len(models)} models")
    if options.kv_caches or (options.reference is not None and is_saved_reference(Path(options.reference))):
        other = "`kv_cache`" if options.kv_caches else "a saved `reference`"
        raise EvaluationError(f"`save_reference`: expected a model to compute, found {other}; leave one of them out")


def _of_saved(saved: SavedReference, text: str | None, options: EvaluationOptions) -> tuple[str, EvaluationOptions]:
    """Return the text of a saved reference, and options with its windows.

    Raises EvaluationError if another text or other windows were asked for.
    """
    facts, path = saved.facts, saved.path
    if text is not None and hashlib.sha256(text.encode()).hexdigest() != facts.text_sha256:
        raise EvaluationError(
            f"{path}: it was saved on another text, {facts.text} (sha256 {facts.text_sha256}); leave the text out to "
            "evaluate on that"
        )
    tokens = len(saved.encoded.ids)
    has_other_tokens = options.max_tokens not in (None, tokens)
    for name, given, stated, differs in (
        ("window", options.window, facts.window, options.window not in (None, facts.window)),
        ("stride", options.stride, facts.stride, options.stride not in (None, facts.stride)),
        ("max_tokens", options.max_tokens, tokens, has_other_tokens),
        ("score_first", True, facts.score_first, options.score_first and not facts.score_first),
        ("no_bos", True, facts.bos is None, options.no_bos and facts.bos is not None),
    ):
        if differs:
            raise EvaluationError(f"`{name}` {given}: {path} was saved with {stated}; leave it out")
    return saved.text, replace(
        options,
        window=facts.window,
        stride=facts.stride,
        score_first=facts.score_first,
        max_tokens=tokens,
        no_bos=facts.bos is None,
        text_name=facts.text if text is None else options.text_name,
    )


def _check_same_vocabulary(expected: int | None, others: Sequence[Folder]) -> None:
    """Raise EvaluationError if a model's vocabulary differs in size from the reference's, where both are known."""
    for folder in others:
        if None not in (folder.vocabulary, expected) and folder.vocabulary != expected:
            raise EvaluationError(
                f"{folder.path}: its {folder.stated_in} has {folder.vocabulary} tokens, that of the reference "
                f"{expected}: expected models with the same vocabulary"
            )


def _encoded(
    folders: Sequence[Folder], text: str, options: EvaluationOptions, saved: SavedReference | None
) -> EncodedText:
    """Return the tokens of a text, which must be the same for all models, and those of a saved reference.

    Raises EvaluationError if tokenizers differ, or if a model does not know one of the tokens.
    """
    tokenizer = path_of(options.tokenizer)
    tokenizers = [folder.path for folder in folders] if tokenizer is None else [tokenizer]
    of_each = [(path, encode(path, text, options.max_tokens, bos=not options.no_bos)) for path in tokenizers]
    other, first = of_each[0] if saved is None else (saved.path, saved.encoded)
    for path, own in of_each:
        _check_same_tokens(path, own.ids, other=other, expected=first.ids)
        _check_same_bos(path, own.bos, other=other, expected=first.bos)
    for folder in folders:
        check_vocabulary(folder, first.ids, first.bos)
    return first


def _check_same_bos(path: Path, bos: int | None, *, other: Path, expected: int | None) -> None:
    """Raise EvaluationError if the tokenizers of two models put other tokens before a text."""
    if bos != expected:
        ours, theirs = ("no token" if token is None else f"token {token}" for token in (bos, expected))
        raise EvaluationError(
            f"{path}: its tokenizer puts {ours} before a text, that of {other} {theirs}, so losses cannot "
            "be compared; choose one of them with `tokenizer`, or pass `no_bos`"
        )


def _check_same_tokens(path: Path, ids: Ids, *, other: Path, expected: Ids) -> None:
    """Raise EvaluationError if a model's tokenizer makes other tokens than that of another model.

    ids, expected: what both make of the text, [tokens].
    other: the other model, or the saved reference.
    """
    if np.array_equal(ids, expected):
        return
    shared = min(len(ids), len(expected))
    differing = np.flatnonzero(ids[:shared] != expected[:shared])
    place = int(differing[0]) if len(differing) else shared
    counts = "" if len(ids) == len(expected) else f"{len(ids)} tokens against {len(expected)}, "
    raise EvaluationError(
        f"{path}: its tokenizer splits the text differently from that of {other} ({counts}the first "
        f"difference is at token {place}), so losses per token cannot be compared; evaluate the models separately"
    )


@contextmanager
def remembered(model: Model) -> Iterator[Model]:
    """Yield a model that keeps its logits in a temporary file, [tokens, vocabulary] f32, as long as there is room."""
    # By window and how many of its last tokens are asked for: where the logits lie, and their shape.
    places: dict[tuple[bytes, int], tuple[int, tuple[int, ...]]] = {}
    with tempfile.TemporaryFile() as file:

        def logits(ids: Ids, last: int) -> Floats:
            key = ids.tobytes(), last
            if key in places:
                offset, shape = places[key]
                file.seek(offset)
                return np.fromfile(file, dtype=np.float32, count=math.prod(shape)).reshape(shape)
            result = np.ascontiguousarray(model.logits(ids, last))
            if free_bytes(Path(tempfile.gettempdir())) - result.nbytes > ROOM_LEFT_BYTES:
                places[key] = file.seek(0, os.SEEK_END), result.shape
                result.tofile(file)
            return result

        yield replace(model, logits=logits)
