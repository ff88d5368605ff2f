"""The section of a card on what eval measured: a table of figures, and the protocol of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pqweights.common.markdown import code, table, words
from pqweights.common.units import counted
from pqweights.quality.evaluate.report import beginning, masked_tokens
from pqweights.rewrite.manifest import Manifest
from pqweights.rewrite.results.evaluation_record import EvaluationRecord, Figure


def evaluation(records: Sequence[EvaluationRecord], manifest: Manifest) -> list[str]:
    """Return the section, or nothing without records."""
    if not records:
        return []
    original = manifest.made_by.get("original_fingerprint")
    if manifest.kind == "master":
        original = manifest.source_fingerprint
    compared = any(record.reference is not None for record in records)
    titles = ["no.", "text", "perplexity"]
    titles += ["change", "KL mean (nats)", "KL 99%", "top-1 agreement"] if compared else []
    rows = [[str(place), *_cells(record, compared)] for place, record in enumerate(records, start=1)]
    meaning = "The figure after ± is the standard error over windows."
    if compared:
        meaning += (
            " The change is that of the perplexity, paired by window. KL is KL(reference, model) of the next token; "
            "top-1 agreement is the share of tokens for which both rank the same token first."
        )
    protocols = [f"{place}. {_protocol(record, original)}" for place, record in enumerate(records, start=1)]
    return [table(titles, rows, [0, *range(2, len(titles))]), meaning, "\n".join(protocols)]


def _cells(record: EvaluationRecord, compared: bool) -> list[str]:
    cells = [code(record.text), _estimate(record.perplexity, ".4f")]
    if not compared:
        return cells
    return [
        *cells,
        _estimate(record.perplexity_change, "+.4f"),
        "-" if record.kl is None else _estimate(record.kl.mean, ".5f"),
        "-" if record.kl is None else _finite(record.kl.percentile_99, ".4f"),
        _estimate(record.top1_agreement, ".2%"),
    ]


def _protocol(record: EvaluationRecord, original: Any) -> str:
    """Return how a row was measured. original: the fingerprint of the checkpoint that was quantized."""
    tokenizer = "" if record.tokenizer is None else f" by the tokenizer of {code(record.tokenizer)}"
    parts = [
        f"{code(record.text)} (sha256 {code(record.text_sha256)}), {record.tokens} tokens{tokenizer}",
        f"{counted(record.windows, 'window')} of {record.window}, stride {record.stride}{beginning(record)}, "
        f"{masked_tokens(record)}, "
        f"{record.scored_tokens} tokens scored",
        f"{words(record.dtype)}" + ("" if record.device is None else f" on {words(record.device)}"),
        f"computed by {words(record.runtime)}" + (", weights packed in memory" if record.packed else ""),
    ]
    if record.reference is not None:
        fingerprint = record.reference_fingerprint
        shown = "" if fingerprint is None else f" (fingerprint {code(fingerprint)})"
        if fingerprint is not None and fingerprint == original:
            shown = ", which has the fingerprint of the checkpoint that was quantized"
        parts.append(f"reference {code(record.reference)}{shown}")
    return "; ".join(parts) + "."


def _estimate(figure: Figure | None, form: str) -> str:
    if figure is None:
        return "-"
    error = figure.standard_error
    return _finite(figure.value, form) + ("" if error is None else f" ± {error:{form.lstrip('+')}}")


def _finite(value: float | None, form: str) -> str:
    return "not finite" if value is None else f"{value:{form}}"
