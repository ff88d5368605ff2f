"""The record of an evaluation that is kept beside its model, made from a row of a report.

Figures are recorded as they were measured: a card that rounds them shows what `eval` showed.
The format of the file is in rewrite/results/evaluation_record.py.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from msgspec import convert

from pqweights.checkpoint.source import open_local
from pqweights.errors import MasterError, SourceError
from pqweights.quality.evaluate.report import EvaluationReport, ModelScores
from pqweights.rewrite.results.evaluation_record import EvaluationRecord

# How the name of mlx-lm's runtime begins; it chooses its device itself.
CHOOSES_ITS_DEVICE = "mlx"


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
    settings, fingerprint = report.settings, None
    if settings.reference is not None:
        reference = reference or _base_name(settings.reference)
        fingerprint = _fingerprint(Path(settings.reference))
    known = report.to_json()["settings"] | row.to_json()
    known |= {
        "text": _base_name(settings.text),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokenizer": None if tokenizer is None else _base_name(tokenizer),
        "device": None if row.runtime.startswith(CHOOSES_ITS_DEVICE) else settings.device,
        "reference": reference,
        "reference_fingerprint": fingerprint,
    }
    return convert({name: known[name] for name in EvaluationRecord.__struct_fields__}, EvaluationRecord)


def _base_name(path: str | Path) -> str:
    """Return the last component of a path, which may be relative."""
    return os.path.basename(os.path.abspath(path))


def _fingerprint(reference: Path) -> str | None:
    try:
        return open_local(reference).fingerprint()
    except (SourceError, MasterError, OSError):  # its format is one that only its runtime reads
        return None
