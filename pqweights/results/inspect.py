"""Inspect: what a finished folder holds, from its manifest; `verify` tells whether the files are as it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.codecs import get_codec
from pqweights.codecs.weight import RESCUE_FACTOR
from pqweights.planning.plan import INTEGER, QUANTIZE, TensorPlan, plan_shards, totals
from pqweights.rewrite.manifest import Manifest, TensorRecord, exceeds, read_manifest, total_relative_mse


@dataclass(frozen=True)
class Inspection:
    """A manifest with its totals."""

    manifest: Manifest
    totals: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """inspect --json."""
        return {
            "kind": self.manifest.kind,
            **self.manifest.made_by,
            "totals": self.totals,
            "tensors": [
                tensor_json(tensor, record)
                for tensor, record in zip(self.manifest.tensors, self.manifest.records, strict=True)
            ],
        }


def inspect(folder: Path) -> Inspection:
    """Read a master or an export.

    Raises MasterError where the folder is not finished or not ours.
    """
    manifest = read_manifest(folder)
    shards = plan_shards(manifest.tensors, manifest.max_shard_bytes, manifest.metadata)
    summed = totals(manifest.tensors) | {
        "source_bytes": manifest.source_bytes,
        "output_bytes": sum(shard.file_bytes for shard in shards),
        "relative_mse": total_relative_mse(manifest.records),
        "rescued": sum(is_rescued(t, r) for t, r in zip(manifest.tensors, manifest.records, strict=True)),
        "exceeding": [t.name for t, r in zip(manifest.tensors, manifest.records, strict=True) if exceeds(t, r)],
    }
    return Inspection(manifest, summed)


def tensor_json(tensor: TensorPlan, record: TensorRecord) -> dict[str, Any]:
    """A tensor's plan and what was measured of it."""
    errors = {"total_mse": record.total_mse, "master_mse": record.master_mse} if tensor.action == INTEGER else {}
    return tensor.to_json() | errors | {
        "rotation": record.rotation, "norm_exponent": record.norm_exponent, "relative_mse": record.relative_mse,
        "exceeds": exceeds(tensor, record),
    }  # fmt: skip


def is_rescued(tensor: TensorPlan, record: TensorRecord) -> bool:
    """Whether a weight was encoded with another rotation than its codec's default."""
    if tensor.action != QUANTIZE:
        return False
    assert tensor.codec is not None
    return record.rotation != get_codec(tensor.codec).rotations[0]


def promise(tensor: TensorPlan) -> float | None:
    """The largest relative error that passes without rescue; None for a tensor that is not quantized."""
    if tensor.action != QUANTIZE:
        return None
    assert tensor.codec is not None and tensor.bits is not None
    return RESCUE_FACTOR * get_codec(tensor.codec).distortion(tensor.bits)
