"""Weights whose codes are ready before a run: the files in which a calibration leaves them.

A file is safetensors with the stored tensors of some weights (docs/format.md, sections 10 and 12). Its metadata have a
description: what was measured of each weight, and the hash of each of its stored tensors. So everything that a run
states is known from headers, and damaged codes are found when they are copied.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.digests import PIECE_BYTES, CheckedReads, digests_of_pieces, hash_of_pieces
from pqweights.checkpoint.header import StoredTensor, TensorSpec, build_header
from pqweights.checkpoint.master import column_specs
from pqweights.checkpoint.readers import PlainTensor
from pqweights.checkpoint.source import Checkpoint, read_header
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.writer import write_whole
from pqweights.common.documents import Number, as_json, read_document
from pqweights.common.strict_json import rounded
from pqweights.convert.jobs import CopyJob
from pqweights.convert.records import TensorRecord
from pqweights.errors import SourceError
from pqweights.formats.columns import (
    ColumnCodes,
    ColumnCut,
    TrellisColumns,
    bits_of,
)
from pqweights.planning.layout import QUANTIZE, TensorPlan, stored_bytes

KEY = "pqweights_codes"
SUFFIX = ".safetensors"


class CodeMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration measured of a weight; see TensorRecord."""

    relative_mse: Number
    energy: Number
    weighed_mse: Number | None = None


class _ReadyWeight(CodeMeasures, frozen=True, kw_only=True):
    """And what its file says of it.

    digests: the hash of each stored tensor, in their order
    transposed: see ColumnCut
    """

    shape: tuple[int, ...]
    digests: tuple[str, ...]
    transposed: bool = False

    @property
    def cut(self) -> ColumnCut:
        """How the weight is cut."""
        return ColumnCut.of(self.shape, transposed=self.transposed)


def write_ready(path: Path, weights: Mapping[str, tuple[ColumnCodes, CodeMeasures]]) -> None:
    """Write a file of ready weights, by name; it is there only when it is whole.

    Raises OutputError for a disk error.
    """
    specs: list[TensorSpec] = []
    parts: dict[str, npt.NDArray[np.uint8]] = {}
    described: dict[str, Any] = {}
    for name, (codes, measured) in weights.items():
        own = column_specs(name, codes.cut, len(codes.trellis))
        data = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in codes.parts]
        specs += own
        parts |= {spec.name: raw for spec, raw in zip(own, data, strict=True)}
        digests = tuple(_digest(raw) for raw in data)
        measures = {key: of if of is None else rounded(of) for key, of in as_json(measured).items()}
        described[name] = {**measures, "shape": codes.cut.shape, "digests": digests, "transposed": codes.transposed}
    header, stored = build_header(path.name, specs, {KEY: json.dumps(described)})

    def pieces() -> Iterator[bytes]:
        yield header
        for tensor in stored:
            yield parts[tensor.name].tobytes()

    write_whole(path.parent, path, pieces())


def _names(name: str) -> tuple[str, ...]:
    """Return the names of the stored tensors of a weight."""
    return tuple(name + suffix for suffix in TrellisColumns.suffixes)


def _damaged(path: Path) -> Callable[[str], SourceError]:
    return lambda problem: SourceError(f"{path}: {problem}; calibrate again")


def _digest(data: Any) -> str:
    pieces = (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
    return hash_of_pieces(digests_of_pieces([piece]) for piece in pieces)


@dataclass(frozen=True, kw_only=True)
class ReadyWeights:
    """The ready weights of a folder.

    files: the files as a checkpoint, whose tensors are checked when they are read
    weights: what is known of each weight, by name
    about: what the manifest says of the sample
    warnings: a line for each of what a calibration could not do
    """

    files: Checkpoint
    weights: Mapping[str, _ReadyWeight]
    about: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    @staticmethod
    def open(folder: Path, *, about: Mapping[str, Any] | None = None) -> ReadyWeights:
        """Open all files of a folder from their headers.

        Raises SourceError for files that `write_ready` did not write.
        """
        names = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
        storage = Storage(folder, only=names)
        stored: dict[str, StoredTensor] = {}
        weights: dict[str, _ReadyWeight] = {}
        for file in names:
            tensors, metadata = read_header(storage, file)
            stored |= {tensor.name: tensor for tensor in tensors}
            weights |= read_document(metadata.get(KEY, "").encode(), dict[str, _ReadyWeight], _damaged(folder / file))
        digests: dict[str, str] = {}
        for name, weight in weights.items():
            total = stored[first].byte_count if (first := _names(name)[0]) in stored else 0
            fits = len(weight.shape) in (2, 3) and min(weight.shape) > 0
            specs = column_specs(name, weight.cut, total) if fits else ()
            there = [stored[spec.name] for spec in specs if spec.name in stored]
            if not specs or [(t.name, t.dtype, t.shape) for t in there] != [tuple(spec) for spec in specs]:
                raise _damaged(folder)(f"tensor {name!r}: expected the codes of a weight {list(weight.shape)}")
            digests |= dict(zip([spec.name for spec in specs], weight.digests, strict=True))
        checked = CheckedReads(storage, stored.values(), digests=digests)
        files = Checkpoint(
            storage=storage,
            stored=tuple(stored.values()),
            tensors=tuple(PlainTensor.of(checked, tensor) for tensor in stored.values()),
            weight_files=tuple(names),
            checked=checked,
        )
        return ReadyWeights(files=files, weights=weights, about=about or {})

    def describe(self) -> dict[str, Any]:
        """Return what manifests say of them: how many there are, and a digest of all codes."""
        stated = json.dumps({name: weight.digests for name, weight in self.weights.items()}, sort_keys=True)
        return {**self.about, "weights": len(self.weights), "sha256": hashlib.sha256(stated.encode()).hexdigest()}

    @functools.cached_property
    def _tensors(self) -> dict[str, PlainTensor]:
        return {tensor.name: tensor for tensor in self.files.tensors if isinstance(tensor, PlainTensor)}

    def _parts(self, name: str) -> list[PlainTensor]:
        return [self._tensors[part] for part in _names(name)]

    @property
    def bits_per_weight(self) -> float:
        """The mean of what the weights take, to a thousandth."""
        stored = sum(part.stored.byte_count for name in self.weights for part in self._parts(name))
        return round(8 * stored / sum(math.prod(weight.shape) for weight in self.weights.values()), 3)

    def planned(self, tensors: Sequence[TensorPlan]) -> list[TensorPlan]:
        """Return the plans of the tensors of a checkpoint, with these codes for the weights that they are of.

        Raises SourceError for codes of a weight that is not there, or has another shape.
        """
        if missing := self.weights.keys() - {tensor.name for tensor in tensors}:
            raise SourceError(
                f"{self.files.storage}: tensor {min(missing)!r}: the checkpoint has no such weight; calibrate again"
            )
        return [self._planned(tensor) if tensor.name in self.weights else tensor for tensor in tensors]

    def _planned(self, tensor: TensorPlan) -> TensorPlan:
        weight = self.weights[tensor.name]
        if weight.shape != tensor.shape:
            raise SourceError(
                f"{self.files.storage}: tensor {tensor.name!r}: expected codes of a weight {list(tensor.shape)}, found "
                f"those of {list(weight.shape)}; calibrate again"
            )
        cut, total = weight.cut, self._parts(tensor.name)[0].stored.byte_count
        stored = column_specs(tensor.name, cut, total)
        return tensor._replace(
            action=QUANTIZE,
            codec=TrellisColumns.codec,
            bits=bits_of(cut, total),
            reason="calibrated",
            bytes=stored_bytes(stored),
            stored=stored,
        )

    def job(self, planned: TensorPlan) -> CopyJob:
        """Return the job that stores a weight, of a plan by `planned`, with what the calibration measured."""
        weight = self.weights[planned.name]
        record = TensorRecord(
            name=planned.name,
            state=TrellisColumns(bits=1, transposed=weight.transposed).stated(),
            relative_mse=weight.relative_mse,
            energy=weight.energy,
            weighed_mse=weight.weighed_mse,
        )
        return CopyJob(planned, *self._parts(planned.name), record=record)
