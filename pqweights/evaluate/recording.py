"""From a row of an evaluation to the record that is kept beside the result (results/evaluation_record.py)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pqweights.checkpoint.source import open_local
from pqweights.errors import MasterError, SourceError
from pqweights.evaluate.report import Report, Row
from pqweights.results.evaluation_record import Divergence, Figure, Record
from pqweights.strict_json import rounded

# mlx-lm chooses its device itself.
CHOOSES_ITS_DEVICE = "mlx"


def make_record(
    report: Report, row: Row, text: str, *, tokenizer: Path | None = None, reference: str | None = None
) -> Record:
    """Of one row of a report. text: what was evaluated on. reference: its name, if not that of its folder."""
    settings, found = report.settings, row.to_json()
    fingerprint = None
    if settings.reference is not None:
        reference = reference or _base_name(settings.reference)
        fingerprint = _fingerprint(Path(settings.reference))
    kl = found["kl"]
    figures = {
        name: None if found[name] is None else _figure(found[name])
        for name in ("perplexity_change", "log_perplexity_change", "top1_agreement")
    }
    return Record(
        _base_name(settings.text), hashlib.sha256(text.encode()).hexdigest(),
        None if tokenizer is None else _base_name(tokenizer),
        settings.tokens, settings.windows, settings.window, settings.stride, settings.masked, settings.score_first,
        settings.scored_tokens, row.runtime, row.dtype,
        None if row.runtime.startswith(CHOOSES_ITS_DEVICE) else settings.device, settings.packed,
        reference, fingerprint, _figure(found["perplexity"]), _figure(found["log_perplexity"]),
        figures["perplexity_change"], figures["log_perplexity_change"],
        None if kl is None else Divergence(
            _figure(kl["mean"]), *(_rounded(kl[name]) for name in ("median", "percentile_99", "percentile_99_9", "maximum"))
        ),
        figures["top1_agreement"],
    )  # fmt: skip


def _figure(found: dict[str, float | None]) -> Figure:
    return Figure(_rounded(found["value"]), _rounded(found["standard_error"]))


def _rounded(value: float | None) -> float | None:
    return None if value is None else rounded(value)


def _base_name(path: str | Path) -> str:
    """The last component, of "." too."""
    return os.path.basename(os.path.abspath(path))


def _fingerprint(reference: Path) -> str | None:
    try:
        return open_local(reference).fingerprint()
    except (SourceError, MasterError, OSError):  # of a kind that only its runtime reads
        return None
