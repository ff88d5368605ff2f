"""pqweights.json: what a folder of ours was made from, how, with which errors, and what every byte must hash to.

docs/format.md, section "pqweights.json". It holds no time, host, absolute path or thread count, so that the same source
and recipe give the same bytes everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.model_card import checked_facts
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.source import SURROGATE_ESCAPE
from pqweights.checkpoint.storage import Origin
from pqweights.codecs import CODECS, get_codec
from pqweights.codecs.weight import exceeds_promise
from pqweights.dtypes import DTYPE_BITS
from pqweights.errors import MasterError
from pqweights.planning.plan import DECODE, DEFAULT_METADATA, INTEGER, KEEP, QUANTIZE, TensorPlan
from pqweights.strict_json import json_bytes, rounded

MANIFEST_VERSION = 1
# What transforms say of themselves, see Transform.describe.
MADE_BY_KEYS = (
    "recipe", "target", "dtype", "packing", "mode", "bits", "group_size", "basis", "qparams", "original_fingerprint",
    "master_errors", "awq", "fit",
)  # fmt: skip


@dataclass(frozen=True)
class TensorRecord:
    """What a run measured of one tensor. sha256: by stored name. Measures are None where they mean nothing.

    relative_mse: squared error over `energy`, the sum of squares of the weight that was read. Of weights in an export:
    total_mse, the same against the original weight, measured where that was read, else computed from what the master's
    manifest says; master_mse: what total_mse would be, or is, by way of the master.
    """

    name: str
    sha256: dict[str, str]
    rotation: str | None = None
    norm_exponent: int | None = None
    relative_mse: float | None = None
    energy: float | None = None
    total_mse: float | None = None
    master_mse: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As in the journal."""
        return dict(vars(self))


@dataclass(frozen=True)
class FileRecord:
    """Size and sha256 of a file that holds no tensors."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The whole file. made_by: what the transform says of itself (a recipe, or an export's target).

    metadata: the __metadata__ of the safetensors files. left_out: tensors that were not carried over, with the reason.
    origin: the Hub repository that was read, None for a local folder. model: what is known of the original model (see
    model_card.model_facts). master: of an export, what its master's manifest says of itself.
    """

    kind: str
    made_by: dict[str, Any]
    source_bytes: int
    source_fingerprint: str
    max_shard_bytes: int
    tensors: tuple[TensorPlan, ...]
    records: tuple[TensorRecord, ...]
    files: dict[str, FileRecord]
    metadata: dict[str, str] = field(default_factory=lambda: DEFAULT_METADATA)
    left_out: dict[str, str] = field(default_factory=dict)
    origin: Origin | None = None
    model: dict[str, Any] = field(default_factory=dict)
    master: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "manifest_version": MANIFEST_VERSION,
            "kind": self.kind,
            **self.made_by,
            "source": {
                "id": None,
                **({} if self.origin is None else self.origin._asdict()),
                "bytes": self.source_bytes,
                "fingerprint": self.source_fingerprint,
            },
            **({"model": self.model} if self.model else {}),
            **({"master": self.master} if self.master else {}),
            "max_shard_bytes": self.max_shard_bytes,
            **error_totals(self.tensors, self.records),
            **({"metadata": self.metadata} if self.metadata != DEFAULT_METADATA else {}),
            **({"left_out": self.left_out} if self.left_out else {}),
            "exceeding": [t.name for t, r in zip(self.tensors, self.records, strict=True) if exceeds(t, r)],
            "tensors": [_tensor_json(t, r) for t, r in zip(self.tensors, self.records, strict=True)],
            "files": {name: vars(record) for name, record in sorted(self.files.items())},
        }

    def to_bytes(self) -> bytes:
        """The file's content."""
        return json_bytes(self.to_json())


def total_relative_mse(records: Sequence[TensorRecord]) -> float | None:
    """Summed squared error over summed squares of all quantized tensors; None without any."""
    return mean_error(records, "relative_mse")


def error_totals(tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]) -> dict[str, float | None]:
    """The errors of a whole result, by name: of an integer export also those against the original."""
    names = ["relative_mse"]
    if any(tensor.action == INTEGER for tensor in tensors):
        names += ["total_mse", "master_mse"]
    return {name: mean_error(records, name) for name in names}


def mean_error(records: Sequence[TensorRecord], of: str) -> float | None:
    """A measure of TensorRecord over all tensors that have an energy; None where one of them lacks it.

    It is weighted by the squares of the weights that it refers to: of the original's, for errors against them, which are
    energy / (1 - m), if m is the master's error.
    """
    errors = []
    for r in records:
        if r.energy is not None and r.relative_mse is not None:
            against_original = of != "relative_mse" and r.total_mse is not None and r.total_mse < 1
            share = (1 - r.relative_mse) / (1 - (r.total_mse or 0)) if against_original else 1.0
            errors.append((getattr(r, of), r.energy * share))
    pairs = [(error, energy) for error, energy in errors if error is not None]
    if len(pairs) < len(errors):
        return None
    energy = math.fsum(e for _, e in pairs)  # exactly rounded: sum() differs between versions of Python
    return rounded(math.fsum(m * e for m, e in pairs) / energy if energy else 0.0) if pairs else None


def exceeds(tensor: TensorPlan, record: TensorRecord) -> bool:
    """Whether a weight's error is above 1.25 times what its codec promises although every rotation was tried."""
    if tensor.action != QUANTIZE or record.relative_mse is None:
        return False
    assert tensor.codec is not None and tensor.bits is not None
    return exceeds_promise(get_codec(tensor.codec), tensor.bits, record.relative_mse)


def _tensor_json(tensor: TensorPlan, record: TensorRecord) -> dict[str, Any]:
    entry = tensor.to_json()
    if tensor.action == INTEGER:
        entry |= {"relative_mse": record.relative_mse, "energy": record.energy}
        entry |= {"total_mse": record.total_mse, "master_mse": record.master_mse}
    elif record.relative_mse is not None:
        entry |= {
            "rotation": record.rotation, "norm_exponent": record.norm_exponent, "relative_mse": record.relative_mse,
            "energy": record.energy,
        }  # fmt: skip
    entry["stored"] = [
        {
            "name": s.name,
            "dtype": s.dtype,
            "shape": list(s.shape),
            "bytes": s.byte_count,
            "sha256": record.sha256[s.name],
        }
        for s in tensor.stored
    ]
    return entry


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder.

    Raises MasterError where there is none, or where it is not what this version writes.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise MasterError(f"{folder}: expected a folder that pqweights finished, found no {MANIFEST_FILE} in it")
    data = path.read_bytes()
    try:
        if SURROGATE_ESCAPE.search(data):
            json.dumps(json.loads(data), ensure_ascii=False).encode("utf-8")  # a UnicodeEncodeError is a ValueError
        return parse_manifest(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise MasterError(
            f"{MANIFEST_FILE}: expected JSON, found {str(error)[:120]!r}; restore it, or delete the folder"
        ) from None


def parse_manifest(data: Any) -> Manifest:
    """A manifest from its JSON.

    Raises MasterError for whatever this version would not have written.
    """
    if not isinstance(data, dict) or data.get("manifest_version") != MANIFEST_VERSION:
        found = data.get("manifest_version") if isinstance(data, dict) else type(data).__name__
        raise MasterError(f"{MANIFEST_FILE}: manifest_version: expected {MANIFEST_VERSION}, found {found!r}")
    entries = [_parse_tensor(_typed(entry, dict, "tensors")) for entry in _field(data, "tensors", list)]
    files = {
        name: FileRecord(_count(record, "bytes"), _field(record, "sha256", str))
        for name, record in _field(data, "files", dict).items()
    }
    source = _field(data, "source", dict)
    kind = _field(data, "kind", str)
    if kind != {"recipe": "master", "target": "export"}.get(next((k for k in ("recipe", "target") if k in data), "")):
        raise _damaged("kind", kind)
    max_shard_bytes = _count(data, "max_shard_bytes")
    if max_shard_bytes == 0:
        raise _damaged("max_shard_bytes", 0)
    return Manifest(
        kind,
        {key: data[key] for key in MADE_BY_KEYS if key in data},
        _count(source, "bytes"),
        _field(source, "fingerprint", str),
        max_shard_bytes,
        tuple(tensor for tensor, _ in entries),
        tuple(record for _, record in entries),
        files,
        _strings(data, "metadata", DEFAULT_METADATA),
        _strings(data, "left_out", {}),
        None if source.get("id") is None else Origin(_field(source, "id", str), _field(source, "revision", str)),
        _parse_model(data),
        _typed(data.get("master", {}), dict, "master"),
    )


def _parse_model(data: dict[str, Any]) -> dict[str, Any]:
    model: dict[str, Any] = _typed(data.get("model", {}), dict, "model")
    expected = {key: _field(model, key, str) for key in ("id", "revision") if key in model} | checked_facts(model)
    if model != expected:
        raise _damaged("model", model)
    return expected


def _parse_tensor(entry: dict[str, Any]) -> tuple[TensorPlan, TensorRecord]:
    name, action = _field(entry, "name", str), _field(entry, "action", str)
    stored = [_typed(s, dict, "stored") for s in _field(entry, "stored", list)]
    specs = tuple(TensorSpec(_field(s, "name", str), _field(s, "dtype", str), _shape(s)) for s in stored)
    for spec in specs:
        if spec.dtype not in DTYPE_BITS:
            raise _damaged(f"dtype of {spec.name!r}", spec.dtype)
    codec, bits = entry.get("codec"), entry.get("bits")
    measures: dict[str, Any] = {}
    if action == QUANTIZE:
        if not isinstance(codec, str) or codec not in CODECS or bits not in CODECS[codec].widths:
            raise _damaged(f"codec and bits of {name!r}", (codec, bits))
        measures = {
            "rotation": _field(entry, "rotation", str),
            "norm_exponent": _field(entry, "norm_exponent", int),
            "relative_mse": _measure(entry, "relative_mse"),
            "energy": _measure(entry, "energy"),
        }
    elif action == INTEGER:
        if not isinstance(codec, str) or type(bits) is not int or not 1 <= bits <= 8:
            raise _damaged(f"codec and bits of {name!r}", (codec, bits))
        measures = {key: _measure(entry, key) for key in ("relative_mse", "energy")}
        for key in ("total_mse", "master_mse"):
            measures[key] = None if entry.get(key) is None else _measure(entry, key)
    elif action not in (KEEP, DECODE) or codec is not None or bits is not None:
        raise _damaged(f"action, codec and bits of {name!r}", (action, codec, bits))
    plan = TensorPlan(
        name, _shape(entry), _field(entry, "dtype", str), _field(entry, "role", str), action, codec, bits,
        _field(entry, "reason", str), specs,
    )  # fmt: skip
    return plan, TensorRecord(name, {s["name"]: _field(s, "sha256", str) for s in stored}, **measures)


def _field(entry: Any, key: str, kind: Any) -> Any:
    return _typed(entry.get(key) if isinstance(entry, dict) else None, kind, key)


def _typed(value: Any, kind: Any, what: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _damaged(what, value)
    return value


def _measure(entry: dict[str, Any], key: str) -> float:
    value = _field(entry, key, float | int)
    if not abs(value) < 1e300:  # nor NaN; an int may be too large for a float
        raise _damaged(key, value)
    return float(value)


def _strings(data: dict[str, Any], key: str, default: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = _typed(data.get(key, default), dict, key)
    for value in found.values():
        _typed(value, str, key)
    return found


def _count(entry: Any, key: str) -> int:
    value: int = _field(entry, key, int)
    if value < 0:
        raise _damaged(key, value)
    return value


def _shape(entry: dict[str, Any]) -> tuple[int, ...]:
    shape = _field(entry, "shape", list)
    return tuple(_count({"shape": n}, "shape") for n in shape)


def _damaged(what: str, found: Any) -> MasterError:
    return MasterError(f"{MANIFEST_FILE}: damaged: {what}: found {str(found)[:80]!r}; restore it, or delete the folder")
