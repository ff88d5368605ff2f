"""Inspect: what a finished folder holds according to its manifest. Whether the files agree is for `verify` to tell."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.storage import Storage
from pqweights.codecs.protocol import largest_error
from pqweights.planning.plan import QUANTIZE, TensorPlan, coder_of
from pqweights.planning.totals import Totals, total
from pqweights.rewrite.manifest import Manifest, read_manifest, shards_of
from pqweights.rewrite.records import total_relative_mse
from pqweights.rewrite.tensor_report import TensorReport, tensor_reports


@dataclass(frozen=True, repr=False)
class Inspection:
    """What a master or an export holds.

    manifest: what it was made from and how, its tensors and its files
    totals: counts, sizes and bits per weight
    """

    manifest: Manifest
    totals: Totals

    @property
    def kind(self) -> str:
        """What it is: "master" or "export"."""
        return self.manifest.kind

    @property
    def made_by(self) -> Mapping[str, Any]:
        """How it was made: a recipe, with the scales and the fit if there are any, or a target with its options."""
        return self.manifest.made_by

    @functools.cached_property
    def tensors(self) -> tuple[TensorReport, ...]:
        """Each tensor with its error."""
        return tensor_reports(self.manifest.pairs)

    @property
    def relative_mse(self) -> float | None:
        """The squared error over the sum of squares of all weights that were quantized; None if there are none."""
        return total_relative_mse(self.manifest.records)

    @property
    def exceeding(self) -> list[str]:
        """The tensors whose error is above what their codec promises."""
        return [tensor.name for tensor in self.tensors if tensor.exceeds]

    def __repr__(self) -> str:
        return f"<Inspection of the {self.kind}: {self.totals}>"

    def to_json(self) -> dict[str, Any]:
        """Return what `inspect --json` prints."""
        measured = {
            "relative_mse": self.relative_mse,
            "rescued": sum(tensor.rescued for tensor in self.tensors),
            "exceeding": self.exceeding,
        }
        return {
            "kind": self.manifest.kind,
            **self.manifest.account,
            "totals": self.totals.to_json() | measured,
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }


def inspect(result: Path | Storage) -> Inspection:
    """Read the manifest of a master or an export, on this machine or anywhere, and add up its figures.

    Raises MasterError if the folder is unfinished, or not a result of pqweights.
    """
    manifest = read_manifest(result)
    output_bytes = sum(shard.file_bytes for shard in shards_of(manifest))
    source_bytes = manifest.identity.source_bytes
    return Inspection(manifest, total(manifest.tensors, source_bytes=source_bytes, output_bytes=output_bytes))


def promise(tensor: TensorPlan) -> float | None:
    """Return the largest relative error that needs no rescue; None for a tensor that is not quantized."""
    return largest_error(coder_of(tensor)) if tensor.action == QUANTIZE else None
