"""What a result offers to choose from: a row for each of its types, formats, or for all of it, with what was measured.

Types of GGUF are files in one folder, formats are folders in it; the manifest puts the type before names of tensors.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pqweights.convert.manifest import Manifest, shards_of
from pqweights.convert.records import figures_by_type, mean_error
from pqweights.planning.context_memory import DEFAULT_CONTEXT, VALUE_BYTES
from pqweights.planning.layout import ShardPlan
from pqweights.results.evaluation_record import EvaluationRecord
from pqweights.results.parts import parts
from pqweights.targets import target_name
from pqweights.targets.memory import GIB, WORKING_BYTES

# The projections of keys and values, whose rows are what a token keeps in each layer, by the ends of their names.
_KEYS_AND_VALUES = re.compile(r"\.(attn_k|attn_v|k_proj|v_proj)\.weight$")
# The memories that computers and cards have, in GB.
MEMORIES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class Offer(NamedTuple):
    """One of the files, or sets of files, of which a user takes one.

    kind: the type or format, or what the whole result is
    files: the files with its weights
    bytes: of these files
    bits: per parameter
    relative_mse: over all of its rounded weights; None if there are none, or if it is not known
    context_bytes: the keys and values of DEFAULT_CONTEXT tokens, as far as the shapes of projections tell
    record: what was measured of it, in the protocol that all offers share; None without
    """

    kind: str
    files: tuple[str, ...]
    bytes: int
    bits: float
    relative_mse: float | None
    context_bytes: int
    record: EvaluationRecord | None

    @property
    def kl(self) -> float | None:
        """The mean KL divergence from the reference, in nats per token; None if it was not measured."""
        return None if self.record is None or self.record.kl is None else self.record.kl.mean.value

    @property
    def memory_gb(self) -> int | None:
        """The smallest usual memory, in GB, that has room for weights, context and working memory."""
        needed = (self.bytes + self.context_bytes + WORKING_BYTES) / GIB
        return next((memory for memory in MEMORIES if needed <= memory), None)


def offers(results: Iterable[tuple[Manifest, Sequence[EvaluationRecord]]]) -> list[Offer]:
    """Return what several results offer together, the smallest first. results: manifests, and what was measured"""
    results = list(results)
    shared = _shared_protocol([record for _, records in results for record in records])
    rows: list[Offer] = []
    for manifest, records in results:
        measured = {record.part: record for record in records if _protocol(record) == shared}
        shards = shards_of(manifest)
        files = parts(manifest)
        rows += [
            Offer(
                kind=of.type,
                files=files[of.type],
                bytes=of.bytes,
                bits=of.bits,
                relative_mse=of.relative_mse,
                context_bytes=_context_bytes(manifest, f"{of.type}/"),
                record=measured.get(of.type),
            )
            for of in figures_by_type(manifest.made_by, manifest.pairs, shards)
        ]
        if not files:
            rows.append(_whole(manifest, shards, measured.get(None)))
    return sorted(rows, key=lambda offer: (offer.bytes, offer.kind))


def offers_in(manifest: Manifest, records: Sequence[EvaluationRecord] = ()) -> list[Offer]:
    """Return what one result offers."""
    return offers([(manifest, records)])


def _whole(manifest: Manifest, shards: Sequence[ShardPlan], record: EvaluationRecord | None) -> Offer:
    """Return the offer of a result that has one type."""
    made_by, weights = manifest.made_by, sum(tensor.weights for tensor in manifest.tensors)
    size = sum(shard.file_bytes for shard in shards)
    target = target_name(made_by.get("target", "")) if manifest.kind != "master" else None
    named = [made_by.get(key) for key in ("type", "format", "mode")]
    kind = next((name for name in named if isinstance(name, str) and name), target or manifest.kind)
    is_integer = any(record.total_mse is not None for record in manifest.records)
    return Offer(
        kind=kind,
        files=tuple(shard.file for shard in shards),
        bytes=size,
        bits=8 * size / max(1, weights),
        relative_mse=mean_error(manifest.records, "total_mse" if is_integer else "relative_mse"),
        context_bytes=_context_bytes(manifest, ""),
        record=record,
    )


def _context_bytes(manifest: Manifest, prefix: str) -> int:
    rows = (t.shape[0] for t in manifest.tensors if t.name.startswith(prefix) and _KEYS_AND_VALUES.search(t.name))
    return DEFAULT_CONTEXT * VALUE_BYTES * sum(rows)


def _protocol(record: EvaluationRecord) -> tuple[Any, ...]:
    """Return what figures must share to stand in one table: the text, how it was cut, and the reference."""
    return (
        *(record.text_sha256, record.tokens, record.window, record.stride, record.score_first, record.bos),
        record.reference_fingerprint or record.reference,
    )


def _shared_protocol(records: Sequence[EvaluationRecord]) -> tuple[Any, ...] | None:
    """Return the protocol of most records; of several, the one with a divergence, and the one that scored more."""
    times = Counter(map(_protocol, records))
    best = max(records, key=lambda r: (r.kl is not None, times[_protocol(r)], r.scored_tokens), default=None)
    return None if best is None else _protocol(best)


def finite_points(offered: Sequence[Offer]) -> list[tuple[Offer, float]]:
    """Return the offers with a divergence that a picture can show, and it."""
    return [(offer, offer.kl) for offer in offered if offer.kl is not None and 0 < offer.kl < math.inf]
