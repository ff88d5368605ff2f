"""pqweights.json: what a folder of ours was made from, how, with which errors, and what every byte must hash to.

docs/format.md, section "pqweights.json". It holds no time, host, absolute path or thread count, so that the same source
and recipe give the same bytes everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.codecs import get_codec
from pqweights.dtypes import DTYPE_BITS
from pqweights.errors import MasterError
from pqweights.plan import TensorPlan
from pqweights.weight import exceeds_promise

MANIFEST_VERSION = 1


@dataclass(frozen=True)
class TensorRecord:
    """What a run measured of one tensor. sha256: by stored name. The four measures are None for tensors not quantized."""

    name: str
    sha256: dict[str, str]
    rotation: str | None = None
    norm_exponent: int | None = None
    relative_mse: float | None = None
    energy: float | None = None

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
    """The whole file. made_by: what the transform says of itself (a recipe, or an export's target)."""

    kind: str
    made_by: dict[str, Any]
    source_fingerprint: str
    max_shard_bytes: int
    tensors: tuple[TensorPlan, ...]
    records: tuple[TensorRecord, ...]
    files: dict[str, FileRecord]

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "manifest_version": MANIFEST_VERSION,
            "kind": self.kind,
            **self.made_by,
            "source": {"id": None, "fingerprint": self.source_fingerprint},
            "max_shard_bytes": self.max_shard_bytes,
            "relative_mse": total_relative_mse(self.records),
            "exceeding": [t.name for t, r in zip(self.tensors, self.records, strict=True) if exceeds(t, r)],
            "tensors": [_tensor_json(t, r) for t, r in zip(self.tensors, self.records, strict=True)],
            "files": {name: vars(record) for name, record in sorted(self.files.items())},
        }

    def to_bytes(self) -> bytes:
        """The file's content."""
        return json_bytes(self.to_json())


def json_bytes(value: Any) -> bytes:
    """JSON as pqweights writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def rounded(value: float) -> float:
    """A measure with the seven significant digits that files hold."""
    return float(f"{value:.6e}")


def total_relative_mse(records: Sequence[TensorRecord]) -> float | None:
    """Summed squared error over summed squares of all quantized tensors; None without any."""
    pairs = [(r.relative_mse, r.energy) for r in records if r.relative_mse is not None and r.energy is not None]
    energy = sum(e for _, e in pairs)
    return rounded(sum(m * e for m, e in pairs) / energy if energy else 0.0) if pairs else None


def exceeds(tensor: TensorPlan, record: TensorRecord) -> bool:
    """Whether a weight's error is above 1.25 times what its codec promises although every rotation was tried."""
    if tensor.codec is None or tensor.bits is None or record.relative_mse is None:
        return False
    return exceeds_promise(get_codec(tensor.codec), tensor.bits, record.relative_mse)


def _tensor_json(tensor: TensorPlan, record: TensorRecord) -> dict[str, Any]:
    entry = tensor.to_json()
    if record.relative_mse is not None:
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


def _parse_spec(entry: dict[str, Any]) -> TensorSpec:
    name, dtype, shape = entry["name"], entry["dtype"], entry["shape"]
    if not isinstance(name, str) or dtype not in DTYPE_BITS or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise TypeError(f"stored tensor {name!r}: dtype {dtype!r}, shape {shape!r}")
    return TensorSpec(name, dtype, tuple(shape))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder.

    Raises MasterError where there is none, or where it is not what this version writes.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise MasterError(f"{folder}: expected a folder that pqweights finished, found no {MANIFEST_FILE} in it")
    try:
        return parse_manifest(json.loads(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise MasterError(f"{MANIFEST_FILE}: expected JSON, found {str(error)[:120]!r}") from None


def parse_manifest(data: Any) -> Manifest:
    """A manifest from its JSON."""
    if not isinstance(data, dict) or data.get("manifest_version") != MANIFEST_VERSION:
        found = data.get("manifest_version") if isinstance(data, dict) else type(data).__name__
        raise MasterError(f"{MANIFEST_FILE}: manifest_version: expected {MANIFEST_VERSION}, found {found!r}")
    try:
        tensors, records = [], []
        for entry in data["tensors"]:
            stored = tuple(_parse_spec(s) for s in entry["stored"])
            plain = ("name", "dtype", "role", "action", "codec", "bits", "reason")
            tensors.append(TensorPlan(shape=tuple(entry["shape"]), stored=stored, **{key: entry[key] for key in plain}))
            measures = {key: entry.get(key) for key in ("rotation", "norm_exponent", "relative_mse", "energy")}
            records.append(TensorRecord(entry["name"], {s["name"]: s["sha256"] for s in entry["stored"]}, **measures))
        made_by = {key: data[key] for key in ("recipe", "target", "dtype") if key in data}
        return Manifest(
            data["kind"], made_by, data["source"]["fingerprint"], data["max_shard_bytes"], tuple(tensors),
            tuple(records), {name: FileRecord(**record) for name, record in data["files"].items()},
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise MasterError(f"{MANIFEST_FILE}: damaged: {type(error).__name__} {str(error)[:120]}") from None
