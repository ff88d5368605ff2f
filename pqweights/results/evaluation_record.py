"""pqweights-eval.json: what `eval` measured of the result beside which the file lies. docs/card.md has the format.

The file names the manifest of the result by its sha256: figures of another result in the same folder are ignored, and
dropped by the next write. Speeds are not recorded, because they depend on the machine; nor are times, hosts and paths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import structs

from pqweights.checkpoint.names import EVALUATION_FILE, MANIFEST_FILE
from pqweights.checkpoint.storage import Storage, read_file
from pqweights.checkpoint.writer import sha256_of_file, write_whole
from pqweights.common.documents import ClosedDocument, Count, Number, as_json, read_document
from pqweights.common.strict_json import json_bytes
from pqweights.convert.manifest import read_manifest, shards_of
from pqweights.errors import MasterError, OutputError
from pqweights.results.parts import part_of

MAX_BYTES = 50_000_000
# An evaluation that scores fewer tokens is recorded, but the model card does not show it: a quick look at a model is
# not a figure to publish.
FEWEST_TOKENS_FOR_CARD = 10_000
# The fields that do not make another protocol: the measures, and the name of the text, which its hash identifies.
NOT_OF_THE_PROTOCOL = (
    "text",
    "perplexity",
    "log_perplexity",
    "perplexity_change",
    "log_perplexity_change",
    "kl",
    "top1_agreement",
)


class Figure(ClosedDocument, frozen=True):
    """A measure, None if it is not finite, and its standard error over windows, None for a single window."""

    value: Number | None
    standard_error: Number | None


class RecordedDivergence(ClosedDocument, frozen=True, kw_only=True):
    """The figures of a KL divergence, in nats per token (protocol.Divergence); None if one is not finite."""

    mean: Figure
    median: Number | None
    percentile_99: Number | None
    percentile_99_9: Number | None
    maximum: Number | None


class EvaluationRecord(ClosedDocument, frozen=True, kw_only=True, omit_defaults=True):
    """The figures of one model on one text. The fields are the keys in the file, in this order.

    part: the type or format that was measured, of a result with several; in the file only then
    text, text_sha256: the name of the text, without its folder, and its hash
    tokenizer: the name of the folder of another tokenizer; None for the model's own
    tokens, windows, window, stride, masked, score_first, bos, scored_tokens: how the text was divided and scored; bos
        is whether each window begins with the token BOS, and is in the file only if it does
    runtime, dtype, device, packed: what computed the model; device is None if the runtime chooses it
    reference, reference_fingerprint: the name of the reference, and the fingerprint of its checkpoint, if there is one
    reference_saved: whether its distributions came from a file, so that the divergence is an estimate; in the file only
        if they did
    perplexity, log_perplexity, perplexity_change, log_perplexity_change, kl, top1_agreement: what was measured
    """

    part: str | None = None
    text: str
    text_sha256: str
    tokenizer: str | None
    tokens: Count
    windows: Count
    window: Count
    stride: Count
    masked: Count
    score_first: bool
    bos: bool = False
    scored_tokens: Count
    runtime: str
    dtype: str
    device: str | None
    packed: bool
    reference: str | None
    reference_fingerprint: str | None
    reference_saved: bool = False
    perplexity: Figure
    log_perplexity: Figure
    perplexity_change: Figure | None
    log_perplexity_change: Figure | None
    kl: RecordedDivergence | None
    top1_agreement: Figure | None

    @property
    def protocol(self) -> tuple[Any, ...]:
        """Everything but the measures: a record replaces another with the same protocol on the same text."""
        return tuple(value for key, value in structs.asdict(self).items() if key not in NOT_OF_THE_PROTOCOL)

    @property
    def is_for_card(self) -> bool:
        """Whether the model card shows the figures."""
        return self.scored_tokens >= FEWEST_TOKENS_FOR_CARD


class _EvaluationFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    evaluation_version: Literal[1]
    manifest_sha256: str
    evaluations: tuple[EvaluationRecord, ...]


class ResultFolder(NamedTuple):
    """A result that figures may be written beside.

    folder, manifest_sha256: its folder, and the sha256 of its manifest before the evaluation
    part: the type or format that is evaluated, of a result with several
    """

    folder: Path
    manifest_sha256: str
    part: str | None = None


def result_folder_of(model: Path) -> ResultFolder | None:
    """Return where the figures of a folder, or of a file or folder in a result, belong.

    None for a model that is not in a result of ours, or in a cache of links. Call it before the model is evaluated, so
    that a result that changes meanwhile is noticed.
    """
    if (model / MANIFEST_FILE).is_file():
        return _result_folder(model)
    result = _result_folder(model.absolute().parent)
    if result is None:
        return None
    manifest = read_manifest(result.folder)
    part = part_of(model, manifest)
    is_listed = part is not None or any(shard.file == model.name for shard in shards_of(manifest))
    return result._replace(part=part) if is_listed else None


def _result_folder(folder: Path) -> ResultFolder | None:
    manifest = folder / MANIFEST_FILE
    is_there = manifest.is_file() and not manifest.is_symlink()
    return ResultFolder(folder, sha256_of_file(manifest)) if is_there else None


def write_record(result: ResultFolder, record: EvaluationRecord) -> Path:
    """Add a record to the file of a folder, in place of an earlier one with the same protocol, and return the path.

    Raises OutputError if the folder cannot be written, or holds another result than before the evaluation; MasterError
    if the file is damaged.
    """
    path = result.folder / EVALUATION_FILE
    if _result_folder(result.folder) != result._replace(part=None):
        raise OutputError(f"{result.folder}: {MANIFEST_FILE} changed while it was evaluated; evaluate it again")
    records = {known.protocol: known for known in read_records(result.folder, result.manifest_sha256)}
    record = structs.replace(record, part=result.part)
    records[record.protocol] = record
    file = _EvaluationFile(
        evaluation_version=1,
        manifest_sha256=result.manifest_sha256,
        evaluations=tuple(records.values()),
    )
    write_whole(result.folder, path, [json_bytes(as_json(file))])
    return path


def read_records(result: Path | Storage, manifest_sha256: str) -> tuple[EvaluationRecord, ...]:
    """Return the records of the result whose manifest has this sha256; none if the file is of another result.

    Raises MasterError for a file that this version would not have written.
    """
    storage = _file_of(result) if isinstance(result, Path) else result
    if EVALUATION_FILE not in storage.files():
        return ()
    return parse_records(read_file(storage, EVALUATION_FILE), manifest_sha256)


def parse_records(data: bytes, manifest_sha256: str) -> tuple[EvaluationRecord, ...]:
    """Return the records in a file, as read_records does."""
    file = read_document(data, _EvaluationFile, _damaged, max_bytes=MAX_BYTES)
    return file.evaluations if file.manifest_sha256 == manifest_sha256 else ()


def _file_of(folder: Path) -> Storage:
    return Storage(folder, only=[EVALUATION_FILE] if (folder / EVALUATION_FILE).is_file() else [])


def _damaged(problem: str) -> MasterError:
    return MasterError(f"{EVALUATION_FILE}: damaged: {problem}; delete it, and evaluate again")
