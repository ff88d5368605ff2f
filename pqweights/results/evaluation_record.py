"""pqweights-eval.json: what `eval` measured of the result beside which the file lies. docs/card.md has the format.

The file names the manifest of the result by its sha256: figures of another result in the same folder are ignored, and
dropped by the next write. Speeds are not recorded, because they depend on the machine; nor are times, hosts and paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.checkpoint.names import EVALUATION_FILE, MANIFEST_FILE
from pqweights.checkpoint.storage import LocalStorage, Storage, read_file
from pqweights.checkpoint.writer import sha256_of_file, write_whole
from pqweights.errors import MasterError, OutputError
from pqweights.strict_json import Fields, json_bytes, parse_json

# A file in which a record says `bos` has the second version, which earlier ones of pqweights do not read.
EVALUATION_VERSION, VERSION_WITH_BOS = 1, 2
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


class Figure(NamedTuple):
    """A measure, None if it is not finite, and its standard error over windows, None for a single window."""

    value: float | None
    standard_error: float | None


@dataclass(frozen=True, kw_only=True)
class RecordedDivergence:
    """The figures of a KL divergence, in nats per token (protocol.Divergence); None if one is not finite."""

    mean: Figure
    median: float | None
    percentile_99: float | None
    percentile_99_9: float | None
    maximum: float | None


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """The figures of one model on one text. The fields are the keys in the file, in this order.

    text, text_sha256: the name of the text, without its folder, and its hash
    tokenizer: the name of the folder of another tokenizer; None for the model's own
    tokens, windows, window, stride, masked, score_first, bos, scored_tokens: how the text was divided and scored; bos
        is whether each window begins with the token BOS, and is in the file only if it does
    runtime, dtype, device, packed: what computed the model; device is None if the runtime chooses it
    reference, reference_fingerprint: the name of the reference, and the fingerprint of its checkpoint, if there is one
    perplexity, log_perplexity, perplexity_change, log_perplexity_change, kl, top1_agreement: what was measured
    """

    text: str
    text_sha256: str
    tokenizer: str | None
    tokens: int
    windows: int
    window: int
    stride: int
    masked: int
    score_first: bool
    bos: bool
    scored_tokens: int
    runtime: str
    dtype: str
    device: str | None
    packed: bool
    reference: str | None
    reference_fingerprint: str | None
    perplexity: Figure
    log_perplexity: Figure
    perplexity_change: Figure | None
    log_perplexity_change: Figure | None
    kl: RecordedDivergence | None
    top1_agreement: Figure | None

    @property
    def protocol(self) -> tuple[Any, ...]:
        """Everything but the measures: a record replaces another with the same protocol on the same text."""
        return tuple(value for key, value in vars(self).items() if key not in NOT_OF_THE_PROTOCOL)

    @property
    def is_for_card(self) -> bool:
        """Whether the model card shows the figures."""
        return self.scored_tokens >= FEWEST_TOKENS_FOR_CARD

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the file."""
        return {name: _json_of(value) for name, value in vars(self).items() if name != "bos" or value}


class Place(NamedTuple):
    """A result that figures may be written beside: its folder, and the sha256 of its manifest before the evaluation."""

    folder: Path
    manifest_sha256: str


def find_place(folder: Path) -> Place | None:
    """Return where the figures of a model belong; None for a folder that is not ours, or that is a cache of links.

    Call it before the model is evaluated, so that a result that changes meanwhile is noticed.
    """
    manifest = folder / MANIFEST_FILE
    if not manifest.is_file() or manifest.is_symlink():
        return None
    return Place(folder, sha256_of_file(manifest))


def write_record(place: Place, record: EvaluationRecord) -> Path:
    """Add a record to the file of a folder, in place of an earlier one with the same protocol, and return the path.

    Raises OutputError if the folder cannot be written, or holds another result than before the evaluation; MasterError
    if the file is damaged.
    """
    path = place.folder / EVALUATION_FILE
    if find_place(place.folder) != place:
        raise OutputError(f"{place.folder}: {MANIFEST_FILE} changed while it was evaluated; evaluate it again")
    records = {each.protocol: each for each in read_records(*place)}
    records[record.protocol] = record
    data = {
        "evaluation_version": VERSION_WITH_BOS if any(each.bos for each in records.values()) else EVALUATION_VERSION,
        "manifest_sha256": place.manifest_sha256,
        "evaluations": [each.to_json() for each in records.values()],
    }
    write_whole(place.folder, path, [json_bytes(data)])
    return path


def read_records(result: Path | Storage, manifest_sha256: str) -> tuple[EvaluationRecord, ...]:
    """Return the records of the result whose manifest has this sha256; none if the file is of another result.

    Raises MasterError for a file that this version would not have written.
    """
    storage = _file_of(result) if isinstance(result, Path) else result
    if EVALUATION_FILE not in storage.files():
        return ()
    size = storage.files()[EVALUATION_FILE].byte_count
    if size > MAX_BYTES:
        raise _damaged("its size", f"at most {MAX_BYTES} bytes", size)
    try:
        found = Fields(parse_json(read_file(storage, EVALUATION_FILE)), _damaged, "the file")
    except ValueError as error:
        raise MasterError(f"{EVALUATION_FILE}: damaged: {error}; delete it, and evaluate again") from None
    version = found.raw("evaluation_version")
    if type(version) is not int or version not in (EVALUATION_VERSION, VERSION_WITH_BOS):
        raise _damaged("evaluation_version", f"{EVALUATION_VERSION} or {VERSION_WITH_BOS}", version)
    records = tuple(_parse(entry, version) for entry in found.items("evaluations"))
    return records if found.text("manifest_sha256") == manifest_sha256 else ()


def _file_of(folder: Path) -> LocalStorage:
    return LocalStorage(folder, only=[EVALUATION_FILE] if (folder / EVALUATION_FILE).is_file() else [])


def _parse(entry: Any, version: int) -> EvaluationRecord:
    expected = EvaluationRecord.__dataclass_fields__.keys() - {"bos"}
    optional = {"bos"} if version == VERSION_WITH_BOS else set[str]()
    if not isinstance(entry, dict) or entry.keys() - optional != expected:
        found = sorted(map(str, entry)) if isinstance(entry, dict) else entry
        raise _damaged("an entry", "the keys of a record", found)
    fields = Fields(entry, _damaged)
    text, count, flag = fields.text, fields.count, fields.flag
    return EvaluationRecord(
        text=text("text"),
        text_sha256=text("text_sha256"),
        tokenizer=fields.optional("tokenizer", text, None),
        tokens=count("tokens"),
        windows=count("windows"),
        window=count("window"),
        stride=count("stride"),
        masked=count("masked"),
        score_first=flag("score_first"),
        bos=flag("bos") if "bos" in fields else False,
        scored_tokens=count("scored_tokens"),
        runtime=text("runtime"),
        dtype=text("dtype"),
        device=fields.optional("device", text, None),
        packed=flag("packed"),
        reference=fields.optional("reference", text, None),
        reference_fingerprint=fields.optional("reference_fingerprint", text, None),
        perplexity=_figure(fields, "perplexity"),
        log_perplexity=_figure(fields, "log_perplexity"),
        perplexity_change=_optional_figure(fields, "perplexity_change"),
        log_perplexity_change=_optional_figure(fields, "log_perplexity_change"),
        kl=_optional_divergence(fields, "kl"),
        top1_agreement=_optional_figure(fields, "top1_agreement"),
    )


def _figure(fields: Fields, key: str) -> Figure:
    found = fields.mapping(key)
    if found.keys() != set(Figure._fields):
        raise _damaged(key, "a value and its standard error", found)
    return Figure(**{name: _optional_number(fields.fields(key), name) for name in Figure._fields})


def _optional_figure(fields: Fields, key: str) -> Figure | None:
    return None if fields.raw(key) is None else _figure(fields, key)


def _optional_divergence(fields: Fields, key: str) -> RecordedDivergence | None:
    if fields.raw(key) is None:
        return None
    expected, inner = RecordedDivergence.__dataclass_fields__.keys(), fields.fields(key)
    if fields.mapping(key).keys() != expected:
        raise _damaged(key, "the figures of a divergence", fields.raw(key))
    numbers = {name: _optional_number(inner, name) for name in expected if name != "mean"}
    return RecordedDivergence(mean=_figure(inner, "mean"), **numbers)


def _optional_number(fields: Fields, key: str) -> float | None:
    return fields.optional(key, fields.number, None)


def _json_of(value: Any) -> Any:
    if isinstance(value, Figure):
        return value._asdict()
    if isinstance(value, RecordedDivergence):
        return {name: _json_of(each) for name, each in vars(value).items()}
    return value


def _damaged(what: str, expected: str, found: object) -> MasterError:
    shown = " ".join(str(found).split())[:80]
    return MasterError(
        f"{EVALUATION_FILE}: damaged: {what}: expected {expected}, found {shown!r}; delete it, and evaluate again"
    )
