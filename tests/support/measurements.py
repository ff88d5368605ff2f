"""Made-up measurements of results, recorded as `eval` records them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.writer import sha256_of_file
from pqweights.results.evaluation_record import EvaluationRecord, Figure, RecordedDivergence, ResultFolder, write_record


def record(kl: float | None, **changes: Any) -> EvaluationRecord:
    """A measurement that a card shows. kl: of the mean; None for one without a reference"""
    reference = None if kl is None else "original"
    fields: dict[str, Any] = {
        "text": "words.txt",
        "text_sha256": "ab" * 32,
        "tokenizer": None,
        "tokens": 20_000,
        "windows": 30,
        "window": 512,
        "stride": 512,
        "masked": 0,
        "score_first": False,
        "scored_tokens": 15_330,
        "runtime": "llama.cpp",
        "dtype": "mixed precision",
        "device": "cpu",
        "packed": False,
        "reference": reference,
        "reference_fingerprint": None,
        "perplexity": Figure(20 + 10 * (kl or 0), 0.1),
        "log_perplexity": Figure(3.0, 0.01),
        "perplexity_change": None if kl is None else Figure(10 * kl, 0.01),
        "log_perplexity_change": None if kl is None else Figure(kl, 0.001),
        "kl": None if kl is None else _divergence(kl),
        "top1_agreement": None if kl is None else Figure(1 - kl, 0.001),
    }
    return EvaluationRecord(**fields | changes)


def _divergence(kl: float) -> RecordedDivergence:
    percentiles = {"median": kl / 2, "percentile_99": 9 * kl, "percentile_99_9": 20 * kl, "maximum": 90 * kl}
    return RecordedDivergence(mean=Figure(kl, kl / 50), **percentiles)


def measure(folder: Path, divergences: Mapping[str | None, float | None], **changes: Any) -> None:
    """Record a divergence for each type or format of a result; the key of a result with one type is None."""
    for part, kl in divergences.items():
        place = ResultFolder(folder, sha256_of_file(folder / MANIFEST_FILE), part)
        write_record(place, record(kl, **changes))
