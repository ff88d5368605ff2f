"""The report of an evaluation: the settings that all models share, a row for each model, and both as JSON.

A row also makes the record that is kept beside its model (results/evaluation_record.py), with figures as they
were measured: a card that rounds them shows what `eval` showed.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import convert

from pqweights.checkpoint.source import open_local
from pqweights.errors import MasterError, SourceError
from pqweights.results.evaluation_record import EvaluationRecord
from pqweights.runtime.cached import CacheFigures
from pqweights.runtime.folders import Size
from pqweights.runtime.protocol import Divergence, Estimate, Scores
from pqweights.runtime.saved_reference import SavedReference, is_saved_reference


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The settings that all models of a run share.

    text: the name of the text.
    tokens: how many tokens of the text were used.
    windows, window, stride: the number of windows, their size and the distance of their starts (tokens).
    score_first: whether the first window scores all its predictions.
    bos: whether each window begins with the token BOS, in place of its first.
    scored_tokens: how many tokens the windows score together.
    dtype, device: what the models were asked to compute in and on.
    packed: whether masters were computed with packed weights.
    reference: the name of the reference; None without one.
    """

    text: str
    tokens: int
    windows: int
    window: int
    stride: int
    score_first: bool
    bos: bool
    scored_tokens: int
    dtype: str
    device: str
    packed: bool
    reference: str | None

    @property
    def masked(self) -> int:
        """How many tokens a window reads but does not score."""
        return self.window - self.stride


@dataclass(frozen=True, kw_only=True)
class ModelScores:
    """The results of one model.

    model: its name.
    runtime: which library computed it, in words.
    device: cpu or cuda; None for a library that chooses it itself.
    dtype: the dtype of the arithmetic.
    size: the size of its files.
    scores: its losses, and its divergence from the reference.
    kv_cache: its quantized cache of keys and values; None if they stay as they are.
    """

    model: str
    runtime: str
    device: str | None
    dtype: str
    size: Size
    scores: Scores
    kv_cache: CacheFigures | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the model in eval --json."""
        scores, divergence = self.scores, self.scores.divergence
        return {
            "model": self.model,
            "runtime": self.runtime,
            "dtype": self.dtype,
            "bytes": self.size.bytes,
            "parameters": self.size.parameters,
            "bits_per_parameter": self.size.bits_per_parameter,
            "bits_per_weight": self.size.bits_per_weight,
            "perplexity": to_json(scores.perplexity),
            "log_perplexity": to_json(scores.log_perplexity),
            "perplexity_change": to_json(scores.perplexity_change),
            "log_perplexity_change": to_json(scores.change),
            "kl": None if divergence is None else _kl_json(divergence),
            "top1_agreement": None if divergence is None else to_json(divergence.top1),
            "kv_cache": None if self.kv_cache is None else self.kv_cache.to_json(),
        }


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation: its settings, the reference if there is one, and a row for each model, in the order given."""

    settings: EvaluationSettings
    reference: ModelScores | None
    rows: tuple[ModelScores, ...]

    def renamed(self, names: Mapping[str, str]) -> EvaluationReport:
        """Return the report with models renamed; `names` maps old names to new ones."""

        def row(old: ModelScores) -> ModelScores:
            return replace(old, model=names.get(old.model, old.model))

        reference = self.settings.reference
        settings = replace(self.settings, reference=None if reference is None else names.get(reference, reference))
        base = None if self.reference is None else row(self.reference)
        return EvaluationReport(settings, base, tuple(map(row, self.rows)))

    def to_json(self) -> dict[str, Any]:
        """Return the document of eval --json."""
        return {
            "settings": vars(self.settings) | {"masked": self.settings.masked},
            "reference": None if self.reference is None else self.reference.to_json(),
            "models": [row.to_json() for row in self.rows],
        }


def beginning(settings: EvaluationSettings | EvaluationRecord) -> str:
    """Return in words what windows begin with, if that is not the text."""
    return ", each begins with BOS" if settings.bos else ""


def masked_tokens(settings: EvaluationSettings | EvaluationRecord) -> str:
    """Return in words which tokens of the windows are read but not scored."""
    if not settings.masked:
        return "none masked"
    if settings.score_first:
        return f"the first {settings.masked} tokens of each but the first masked"
    return f"the first {settings.masked} tokens of each masked"


def to_json(estimate: Estimate | None) -> dict[str, float | None] | None:
    """Return an estimate as JSON, with null for values that are not finite."""
    if estimate is None:
        return None
    return {"value": _finite(estimate.value), "standard_error": _finite(estimate.standard_error)}


def _kl_json(divergence: Divergence) -> dict[str, Any]:
    return {
        "mean": to_json(divergence.mean),
        "median": _finite(divergence.median),
        "percentile_99": _finite(divergence.percentile_99),
        "percentile_99_9": _finite(divergence.percentile_99_9),
        "maximum": _finite(divergence.maximum),
    }


def _finite(value: float | None) -> float | None:
    """Return a value, or None if JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def make_record(
    report: EvaluationReport,
    row: ModelScores,
    text: str | None,
    *,
    tokenizer: Path | None = None,
    reference: str | None = None,
) -> EvaluationRecord:
    """Make the record of one row of a report.

    text: the text that was evaluated; None for that of a saved reference.
    tokenizer: the folder of the tokenizer, if it was not the model's own.
    reference: the name of the reference, if it is not that of its folder.
    """
    settings, identity, saved = report.settings, None, None
    if settings.reference is not None:
        path = Path(settings.reference)
        saved = SavedReference(path).facts if is_saved_reference(path) else None
        reference = saved.name if saved else reference or base_name(path)
        identity = saved.fingerprint if saved else fingerprint(path)
    known = report.to_json()["settings"] | row.to_json()
    known |= {
        "part": None,  # which write_record knows
        "text": base_name(settings.text),
        "text_sha256": saved.text_sha256 if saved else hashlib.sha256((text or "").encode()).hexdigest(),
        "tokenizer": None if tokenizer is None else base_name(tokenizer),
        "device": row.device,
        "reference": reference,
        "reference_fingerprint": identity,
        "reference_saved": saved is not None,
    }
    return convert({name: known[name] for name in EvaluationRecord.__struct_fields__}, EvaluationRecord)


def base_name(path: str | Path) -> str:
    """Return the last component of a path, which may be relative."""
    return os.path.basename(os.path.abspath(path))


def fingerprint(reference: Path) -> str | None:
    """Return the fingerprint of a checkpoint; None if its format is one that only its runtime reads."""
    try:
        return open_local(reference).fingerprint()
    except (SourceError, MasterError, OSError):
        return None
