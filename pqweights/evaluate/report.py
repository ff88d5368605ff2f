"""What an evaluation found: the settings that all models share, a row for each, and both as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pqweights.evaluate.protocol import Estimate, Scores
from pqweights.evaluate.speed import Speed
from pqweights.runtimes.folders import Size


@dataclass(frozen=True)
class EvaluationSettings:
    """What all models of a run have in common. tokens: of the text, those that were left out not counted."""

    text: str
    tokens: int
    windows: int
    window: int
    stride: int
    score_first: bool
    scored_tokens: int
    dtype: str
    device: str
    packed: bool
    reference: str | None

    @property
    def masked(self) -> int:
        """Tokens that a window reads without being scored on them."""
        return self.window - self.stride


@dataclass(frozen=True)
class ModelScores:
    """One model. runtime: how it was computed, in words; dtype: in what. speed: where that was asked for."""

    model: str
    runtime: str
    dtype: str
    size: Size
    scores: Scores
    speed: Speed | None

    def to_json(self) -> dict[str, Any]:
        """As in eval --json."""
        scores, found = self.scores, self.scores.divergence
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
            "kl": None if found is None else {
                "mean": to_json(found.mean), "median": _finite(found.median), "percentile_99": _finite(found.percentile_99),
                "percentile_99_9": _finite(found.percentile_99_9), "maximum": _finite(found.maximum),
            },
            "top1_agreement": None if found is None else to_json(found.top1),
            "speed": None if self.speed is None else self.speed.to_json(),
        }  # fmt: skip


@dataclass(frozen=True)
class EvaluationReport:
    """All models, in the order that was asked for, and the reference, which is compared with nothing."""

    settings: EvaluationSettings
    reference: ModelScores | None
    rows: tuple[ModelScores, ...]

    def renamed(self, names: Mapping[str, str]) -> EvaluationReport:
        """With other names for models, by those that they have."""

        def row(old: ModelScores) -> ModelScores:
            return replace(old, model=names.get(old.model, old.model))

        reference = self.settings.reference
        settings = replace(self.settings, reference=None if reference is None else names.get(reference, reference))
        return EvaluationReport(
            settings, None if self.reference is None else row(self.reference), tuple(map(row, self.rows))
        )

    def to_json(self) -> dict[str, Any]:
        """eval --json."""
        return {
            "settings": vars(self.settings) | {"masked": self.settings.masked},
            "reference": None if self.reference is None else self.reference.to_json(),
            "models": [row.to_json() for row in self.rows],
        }


def to_json(estimate: Estimate | None) -> dict[str, float | None] | None:
    """A measure as JSON holds it; None for what is not finite."""
    if estimate is None:
        return None
    return {"value": _finite(estimate.value), "standard_error": _finite(estimate.standard_error)}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
