"""pqweights-eval.json: what `eval` measured of the very result that it lies beside. docs/card.md has the format.

It names the manifest by its sha256: figures of another result in the same folder are passed over, and dropped by the next
write. Speeds are left out, which are of the machine; so are times, hosts and paths.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.checkpoint.names import EVALUATION_FILE, MANIFEST_FILE
from pqweights.checkpoint.source import SURROGATE_ESCAPE
from pqweights.checkpoint.writer import sha256_of_file, write_whole
from pqweights.errors import MasterError, OutputError
from pqweights.strict_json import json_bytes

EVALUATION_VERSION = 1
MAX_BYTES = 50_000_000


class Figure(NamedTuple):
    """A measure, None where it is not finite, and its standard error over windows, None for a single one."""

    value: float | None
    standard_error: float | None


@dataclass(frozen=True)
class Divergence:
    """See protocol.Divergence."""

    mean: Figure
    median: float | None
    percentile_99: float | None
    percentile_99_9: float | None
    maximum: float | None


@dataclass(frozen=True)
class Record:
    """One model on one text. The fields are the keys in the file, in this order.

    text, reference, tokenizer: names, without folders; tokenizer is None where the model's own made the tokens. device:
    None where the runtime chooses it. reference_fingerprint: of the reference's checkpoint, where its kind has one.
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
    kl: Divergence | None
    top1_agreement: Figure | None

    @property
    def protocol(self) -> tuple[Any, ...]:
        """All but what was measured: a record takes the place of another of the same protocol on the same text."""
        values = list(vars(self).values())
        return tuple(values[1 : list(vars(self)).index("perplexity")])

    def to_json(self) -> dict[str, Any]:
        """The entry of the file."""
        return {name: _json_of(value) for name, value in vars(self).items()}


class Place(NamedTuple):
    """A result that figures may be written beside: its folder, and the sha256 of its manifest before it was evaluated."""

    folder: Path
    manifest_sha256: str


def find_place(folder: Path) -> Place | None:
    """Where figures of a model belong; None for what is no result of ours, or lies in a cache, as links.

    To be called before the model is evaluated, so that it is known what was.
    """
    manifest = folder / MANIFEST_FILE
    if not manifest.is_file() or manifest.is_symlink():
        return None
    return Place(folder, sha256_of_file(manifest))


def write_record(place: Place, record: Record) -> Path:
    """Add a record to the file of a folder, in the place of an earlier one of the same protocol; its path.

    Raises OutputError where the folder cannot be written or holds another result than before, MasterError where the file
    that is there is damaged.
    """
    path = place.folder / EVALUATION_FILE
    if find_place(place.folder) != place:
        raise OutputError(f"{place.folder}: {MANIFEST_FILE} changed while it was evaluated; evaluate it again")
    records = {each.protocol: each for each in read_records(*place)}
    records[record.protocol] = record
    data = {
        "evaluation_version": EVALUATION_VERSION,
        "manifest_sha256": place.manifest_sha256,
        "evaluations": [each.to_json() for each in records.values()],
    }
    write_whole(place.folder, path, [json_bytes(data)])
    return path


def read_records(folder: Path, manifest_sha256: str) -> tuple[Record, ...]:
    """What was measured of the result whose manifest has this sha256; nothing where the figures are of another one.

    Raises MasterError for a file that this version would not have written.
    """
    path = folder / EVALUATION_FILE
    if not path.is_file():
        return ()
    if path.stat().st_size > MAX_BYTES:
        raise _damaged("its size", path.stat().st_size)
    data = path.read_bytes()
    try:
        found = json.loads(data)
        if SURROGATE_ESCAPE.search(data):
            json.dumps(found, ensure_ascii=False).encode("utf-8")  # a UnicodeEncodeError is a ValueError
    except (ValueError, RecursionError) as error:
        raise _damaged("expected JSON", error) from None
    version = found.get("evaluation_version") if isinstance(found, dict) else found
    if not _is_a(version, int) or version != EVALUATION_VERSION:
        raise _damaged(f"evaluation_version: expected {EVALUATION_VERSION}", version)
    assert isinstance(found, dict)
    entries = found.get("evaluations")
    if not isinstance(entries, list):
        raise _damaged("evaluations", entries)
    records = tuple(_parse(entry) for entry in entries)
    return records if _field(found, "manifest_sha256", str) == manifest_sha256 else ()


def _parse(entry: Any) -> Record:
    if not isinstance(entry, dict) or entry.keys() != PARSERS.keys():
        raise _damaged("the keys of an entry", sorted(map(str, entry)) if isinstance(entry, dict) else entry)
    return Record(**{name: parse(entry, name) for name, parse in PARSERS.items()})


def _field(entry: dict[str, Any], name: str, kind: type) -> Any:
    value: Any = entry.get(name)
    if not _is_a(value, kind) or (kind is int and value < 0):
        raise _damaged(name, value)
    return value


def _is_a(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _of(kind: type) -> Callable[[dict[str, Any], str], Any]:
    return lambda entry, name: _field(entry, name, kind)


def _or_none(parse: Callable[[dict[str, Any], str], Any]) -> Callable[[dict[str, Any], str], Any]:
    return lambda entry, name: None if entry[name] is None else parse(entry, name)


def _parse_figure(entry: dict[str, Any], name: str) -> Figure:
    found = entry.get(name)
    if not isinstance(found, dict) or found.keys() != {"value", "standard_error"}:
        raise _damaged(name, found)
    return Figure(_number(found, "value"), _number(found, "standard_error"))


def _parse_divergence(entry: dict[str, Any], name: str) -> Divergence:
    found = entry[name]
    if not isinstance(found, dict) or found.keys() != Divergence.__dataclass_fields__.keys():
        raise _damaged(name, found)
    rest = [key for key in found if key != "mean"]
    return Divergence(_parse_figure(found, "mean"), **{key: _number(found, key) for key in rest})


def _number(entry: dict[str, Any], name: str) -> float | None:
    value = entry[name]
    if value is None:
        return None
    if (
        not isinstance(value, float | int) or isinstance(value, bool) or not abs(value) < 1e300
    ):  # nor NaN, nor a huge int
        raise _damaged(name, value)
    return float(value)


_TEXT, _COUNT, _FLAG = _of(str), _of(int), _of(bool)
# How each field of Record is read.
PARSERS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "text": _TEXT, "text_sha256": _TEXT, "tokenizer": _or_none(_TEXT), "tokens": _COUNT, "windows": _COUNT, "window": _COUNT,
    "stride": _COUNT, "masked": _COUNT, "score_first": _FLAG, "scored_tokens": _COUNT, "runtime": _TEXT, "dtype": _TEXT,
    "device": _or_none(_TEXT), "packed": _FLAG, "reference": _or_none(_TEXT), "reference_fingerprint": _or_none(_TEXT),
    "perplexity": _parse_figure, "log_perplexity": _parse_figure, "perplexity_change": _or_none(_parse_figure),
    "log_perplexity_change": _or_none(_parse_figure), "kl": _or_none(_parse_divergence),
    "top1_agreement": _or_none(_parse_figure),
}  # fmt: skip


def _json_of(value: Any) -> Any:
    if isinstance(value, Figure):
        return value._asdict()
    return {name: _json_of(each) for name, each in vars(value).items()} if isinstance(value, Divergence) else value


def _damaged(what: str, found: object) -> MasterError:
    return MasterError(
        f"{EVALUATION_FILE}: damaged: {what}: found {' '.join(str(found).split())[:80]!r}; delete it, and evaluate again"
    )
