"""The record of an evaluation that is kept beside its model, made from a row of a report.

Figures are recorded as they were measured: a card that rounds them shows what `eval` showed.
The format of the file is in results/evaluation_record.py.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from pqweights.checkpoint.source import open_local
from pqweights.errors import MasterError, SourceError
from pqweights.evaluate.report import EvaluationReport, ModelScores
from pqweights.results.evaluation_record import EvaluationRecord, Figure, RecordedDivergence

# How the name of mlx-lm's runtime begins; it chooses its device itself.
CHOOSES_ITS_DEVICE = "mlx"
# Fields of a record that are those of the settings, and fields that hold an estimate.
SETTINGS = ("tokens", "windows", "window", "stride", "masked", "score_first", "bos", "scored_tokens", "packed")
FIGURES = ("perplexity", "log_perplexity", "perplexity_change", "log_perplexity_change", "top1_agreement")


def make_record(
    report: EvaluationReport,
    row: ModelScores,
    text: str,
    *,
    tokenizer: Path | None = None,
    reference: str | None = None,
) -> EvaluationRecord:
    """Make the record of one row of a report.

    text: the text that was evaluated.
    tokenizer: the folder of the tokenizer, if it was not the model's own.
    reference: the name of the reference, if it is not that of its folder.
    """
    settings, found = report.settings, row.to_json()
    fingerprint = None
    if settings.reference is not None:
        reference = reference or _base_name(settings.reference)
        fingerprint = _fingerprint(Path(settings.reference))
    figures = {name: None if found[name] is None else _figure(found[name]) for name in FIGURES}
    return EvaluationRecord(
        text=_base_name(settings.text),
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        tokenizer=None if tokenizer is None else _base_name(tokenizer),
        runtime=row.runtime,
        dtype=row.dtype,
        device=None if row.runtime.startswith(CHOOSES_ITS_DEVICE) else settings.device,
        reference=reference,
        reference_fingerprint=fingerprint,
        kl=_divergence(found["kl"]),
        **{name: getattr(settings, name) for name in SETTINGS},
        **figures,  # type: ignore[arg-type]  # perplexities are never None
    )


def _divergence(found: dict[str, Any] | None) -> RecordedDivergence | None:
    if found is None:
        return None
    numbers = {name: value for name, value in found.items() if name != "mean"}
    return RecordedDivergence(mean=_figure(found["mean"]), **numbers)


def _figure(found: dict[str, float | None]) -> Figure:
    return Figure(found["value"], found["standard_error"])


def _base_name(path: str | Path) -> str:
    """Return the last component of a path, which may be relative."""
    return os.path.basename(os.path.abspath(path))


def _fingerprint(reference: Path) -> str | None:
    try:
        return open_local(reference).fingerprint()
    except (SourceError, MasterError, OSError):  # its format is one that only its runtime reads
        return None
