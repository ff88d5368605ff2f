"""Scales of input channels (AWQ) that a search found, in the files where it left them; docs/awq.md has the method.

A file has one float16 scale for each input channel of a weight (Lin et al., arXiv:2306.00978) as `X_awq_scale`, and in
its metadata what was found of each weight that was searched.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor, read_stored
from pqweights.checkpoint.names import awq_name
from pqweights.checkpoint.source import Checkpoint, read_header
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.writer import write_whole

Floats = npt.NDArray[np.float32]
KEY = "pqweights_scales"


def write_scales(path: Path, reports: Mapping[str, Any], scales: Mapping[str, Floats]) -> None:
    """Write a file of scales, whole or not at all.

    reports: what was found of each weight, as JSON
    scales: [..., K] by the name of the weight, for those that have any

    Raises OutputError.
    """
    from safetensors.numpy import save

    values = {awq_name(name): of.astype("<f2") for name, of in scales.items()}
    digest = hashlib.sha256(b"".join(of.tobytes() for of in values.values())).hexdigest()
    told = json.dumps({"weights": reports, "sha256": digest})
    write_whole(path.parent, path, [save(values, {KEY: told})])


@dataclass(frozen=True, eq=False, kw_only=True)
class AwqScales:
    """The scales for a master.

    about: what its manifest says of them
    scaled: the weights that have any
    files: where they lie; None for those of a finished result
    reports: what was found of each weight
    bytes: their size
    """

    about: Mapping[str, Any]
    scaled: frozenset[str]
    files: Checkpoint | None = None
    reports: Mapping[str, Any] = field(default_factory=dict, repr=False)
    bytes: int = 0

    @staticmethod
    def open(files: Sequence[Path], about: Mapping[str, Any]) -> AwqScales:
        """Open the files of one folder, from their headers. about: what a manifest says of the search"""
        storage = Storage(files[0].parent, only=[path.name for path in files])
        stored: list[StoredTensor] = []
        reports: dict[str, Any] = {}
        digest = hashlib.sha256()
        for path in files:
            parts, metadata = read_header(storage, path.name)
            told = json.loads(metadata[KEY])
            stored += parts
            reports |= told["weights"]
            digest.update(told["sha256"].encode())
        there = {part.name for part in stored}
        return AwqScales(
            about={**about, "weights": {n: _summary(of) for n, of in reports.items()}, "sha256": digest.hexdigest()},
            scaled=frozenset(name for name in reports if awq_name(name) in there),
            files=Checkpoint(
                storage=storage,
                stored=tuple(stored),
                tensors=(),
                weight_files=tuple(path.name for path in files),
            ),
            reports=reports,
            bytes=sum(part.byte_count for part in stored),
        )

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read the scales [..., K] of a weight, as the bytes of float16."""
        assert self.files is not None  # a finished result is not made again
        stored = next(part for part in self.files.stored if part.name == awq_name(name))
        return read_stored(self.files.storage, stored)


def _summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest says of a weight: of a stack, the means over the matrices that are scaled."""
    matrices = report["matrices"]
    scaled = [matrix for matrix in matrices if matrix["scaled"]]
    told: dict[str, Any] = {"tokens": min(matrix["tokens"] for matrix in matrices)}
    if len(matrices) > 1:
        told |= {"matrices": len(matrices), "scaled": len(scaled)}
    if len(matrices) == 1 and scaled:
        told["exponents"] = [scaled[0]["input_exponent"], scaled[0]["weight_exponent"]]
    for key in ("gain", "held_back_gain") if scaled else ():
        told[key] = round(math.fsum(matrix[key] or 0.0 for matrix in scaled) / len(scaled), 6)
    return told
