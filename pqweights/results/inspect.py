"""Inspect: what a finished folder holds according to its manifest. Whether the files agree is for `verify` to tell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.codecs.protocol import largest_error
from pqweights.planning.plan import INTEGER, QUANTIZE, TensorPlan, file_totals
from pqweights.rewrite.manifest import (
    Manifest,
    TensorRecord,
    coder_of,
    exceeds,
    read_manifest,
    shards_of,
    state_of,
    total_relative_mse,
)


@dataclass(frozen=True)
class Inspection:
    """A manifest with its totals."""

    manifest: Manifest
    totals: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return what `inspect --json` prints."""
        return {
            "kind": self.manifest.kind,
            **self.manifest.made_by,
            "totals": self.totals,
            "tensors": [tensor_json(tensor, record) for tensor, record in self.manifest.pairs],
        }


def inspect(folder: Path) -> Inspection:
    """Read the manifest of a master or an export, and add up its figures.

    Raises MasterError if the folder is unfinished, or not a result of pqweights.
    """
    manifest = read_manifest(folder)
    summed = file_totals(
        manifest.tensors,
        source_bytes=manifest.identity.source_bytes,
        output_bytes=sum(shard.file_bytes for shard in shards_of(manifest)),
    ) | {
        "relative_mse": total_relative_mse(manifest.records),
        "rescued": sum(is_rescued(tensor, record) for tensor, record in manifest.pairs),
        "exceeding": [tensor.name for tensor, record in manifest.pairs if exceeds(tensor, record)],
    }
    return Inspection(manifest, summed)


def tensor_json(tensor: TensorPlan, record: TensorRecord) -> dict[str, Any]:
    """Return the JSON of a tensor: its plan, and what was measured of it."""
    errors = {"total_mse": record.total_mse, "master_mse": record.master_mse} if tensor.action == INTEGER else {}
    measured = {"relative_mse": record.relative_mse, "exceeds": exceeds(tensor, record)}
    return tensor.to_json() | errors | (record.state or {}) | measured


def is_rescued(tensor: TensorPlan, record: TensorRecord) -> bool:
    """Whether a weight was encoded in another way than the first choice of its codec."""
    return tensor.action == QUANTIZE and state_of(tensor, record).rescued


def promise(tensor: TensorPlan) -> float | None:
    """Return the largest relative error that needs no rescue; None for a tensor that is not quantized."""
    return largest_error(coder_of(tensor)) if tensor.action == QUANTIZE else None
