"""The file of scales that `calibrate` writes: safetensors, with a JSON description in its metadata.

It has one float16 scale for each input channel of a weight (Lin et al., arXiv:2306.00978) as `X_awq_scale`. The
description, under `pqweights_statistics`, says of which checkpoint they are, and for which codec each was searched;
docs/awq.md has its keys. Files of earlier versions may hold moments as well, which are not read.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor, TensorSpec, encode_header
from pqweights.checkpoint.names import awq_name
from pqweights.checkpoint.readers import SMALLEST_SCALE, scale_shape
from pqweights.checkpoint.source import Checkpoint, open_local, read_header
from pqweights.checkpoint.writer import sha256_of_file, write_whole
from pqweights.codecs.protocol import exact_rate
from pqweights.common.documents import Document, Number, as_document, read_document
from pqweights.common.dtypes import to_float32
from pqweights.errors import SourceError
from pqweights.planning.plan import QUANTIZE, TensorPlan

Floats = npt.NDArray[np.float32]

KEY, VERSION = "pqweights_statistics", 1
SCALES = "scales"
COMMAND = "pqweights calibrate"
# A safetensors file of ours holds at least one tensor: this empty one if no weight is scaled.
NO_SCALES = awq_name("no_weight_is_scaled")


class _Version(Document, frozen=True):
    version: int


class _Searched(Document, frozen=True, kw_only=True):
    """What the description says of a weight."""

    scaled: bool = False


class _Scaled(Document, frozen=True, kw_only=True):
    """And of one that is scaled."""

    codec: str
    bits: Number


class _Description(Document, frozen=True, kw_only=True):
    checkpoint: str
    holds: tuple[str, ...]
    weights: dict[str, dict[str, Any]]


@dataclass(frozen=True, eq=False, kw_only=True)
class ScalesFile:
    """An opened file of scales.

    path: where it lies
    file: the file as a checkpoint, from which the tensors are read
    sha256: that of the file
    checkpoint: the fingerprint of the checkpoint that the scales are of
    searched: for each scaled weight, the codec and the bit width that its scales were searched for
    stored: the tensors by name
    """

    path: Path
    file: Checkpoint
    sha256: str
    checkpoint: str
    searched: dict[str, tuple[str, float]]
    stored: dict[str, StoredTensor] = field(repr=False)

    def damaged(self, what: str) -> SourceError:
        """Return the error for a damaged file."""
        return _damaged(self.path, what)

    def check(self, fingerprint: str) -> None:
        """Raise SourceError if the scales are of another checkpoint than that with this fingerprint."""
        if self.checkpoint != fingerprint:
            raise SourceError(
                f"{self.path}: expected scales of this checkpoint (fingerprint {fingerprint[:12]}), found those of "
                f"another checkpoint ({self.checkpoint[:12]}); run {COMMAND} on this one"
            )


def _damaged(path: Path, what: str) -> SourceError:
    return SourceError(f"{path}: damaged: {what}; run {COMMAND} again")


def open_scales(path: Path) -> ScalesFile:
    """Open a file of scales. Raises SourceError if it does not exist, or is none that `calibrate` wrote."""
    if not path.is_file():
        raise SourceError(f"{path}: no such file; expected scales that {COMMAND} wrote")
    file = open_local(path)
    (name,) = file.weight_files
    parts, metadata = read_header(file.storage, name)
    if KEY not in metadata:
        raise SourceError(f"{path}: expected scales that {COMMAND} wrote, found another file, or an earlier version's")

    def damaged(what: str) -> SourceError:
        return _damaged(path, what)

    told = metadata[KEY].encode("utf-8", "surrogatepass")
    version = read_document(told, _Version, damaged).version
    if version != VERSION:
        raise SourceError(f"{path}: version: expected {VERSION}, found {version!r}; a newer pqweights may read it")
    about = read_document(told, _Description, damaged)
    if SCALES not in about.holds:
        raise SourceError(
            f"{path}: expected scales that {COMMAND} wrote, found moments of an earlier version; exports sample the "
            "inputs themselves, with --calibrate"
        )
    searched = {}
    for weight, value in about.weights.items():

        def wrong(problem: str, weight: str = weight) -> SourceError:
            return damaged(f"{weight!r}: {problem}")

        if as_document(value, _Searched, wrong).scaled:
            scaled = as_document(value, _Scaled, wrong)
            searched[weight] = (scaled.codec, scaled.bits)
    stored = {part.name: part for part in parts if not part.name.startswith("inputs.")}
    expected = {awq_name(weight) for weight in searched}
    if len(stored) == len(parts) and not expected:
        expected = {NO_SCALES}
    if stored.keys() != expected:
        raise damaged("its metadata does not describe its tensors")
    if any(part.dtype != "F16" for part in stored.values()):
        raise damaged("expected float16 scales")
    return ScalesFile(
        path=path,
        file=file,
        sha256=sha256_of_file(path),
        checkpoint=about.checkpoint,
        searched=searched,
        stored=stored,
    )


def write_scales(
    path: Path,
    *,
    checkpoint: str,
    about: Mapping[str, Any],
    weights: Mapping[str, Mapping[str, Any]],
    scales: Mapping[str, Floats],
) -> None:
    """Write a file of scales, whole or not at all.

    checkpoint: the fingerprint of the checkpoint that they are of
    about: how they were found
    weights: for every weight that was considered, codec, bits, whether it is scaled, and more
    scales: [..., K] by the name of the weight

    Raises OutputError.
    """
    specs = [TensorSpec(awq_name(name), "F16", values.shape) for name, values in scales.items()]
    entry = {"version": VERSION, "holds": [SCALES], "checkpoint": checkpoint, **about, "weights": weights}
    metadata = {"format": "pt", KEY: json.dumps(entry, ensure_ascii=False)}
    header = encode_header(specs or [TensorSpec(NO_SCALES, "F16", (0,))], metadata)
    pieces = (values.astype("<f2").tobytes() for values in scales.values())
    write_whole(path.absolute().parent, path, itertools.chain([header], pieces))


@dataclass(frozen=True, eq=False, kw_only=True)
class AwqScales:
    """The scales of a file, as `quantize --awq` applies them (docs/awq.md).

    file: the file
    any_codec: apply the scales even if they were searched for another codec or bit width
    """

    file: ScalesFile
    any_codec: bool

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the scales."""
        return {"sha256": self.file.sha256, "weights": len(self.file.searched), "any_codec": self.any_codec}

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read the scales [..., K] of a weight, as the bytes of float16.

        Raises SourceError if one of them is not a positive normal number.
        """
        stored = self.file.stored[awq_name(name)]
        raw = np.empty(stored.byte_count, dtype=np.uint8)
        self.file.file.storage.read_into(stored.file, stored.offset, raw)
        values = to_float32(raw, "F16")
        if not (np.isfinite(values) & (values >= SMALLEST_SCALE)).all():
            raise self.file.damaged(f"{stored.name!r}: expected finite scales from {SMALLEST_SCALE} on")
        return raw

    def check(self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan]) -> None:
        """Raise SourceError if the scales are of another checkpoint, or for other codecs or bit widths than planned."""
        self.file.check(checkpoint.fingerprint())
        planned = {tensor.name: tensor for tensor in tensors}
        for name, (codec, bits) in self.file.searched.items():
            tensor = planned.get(name)
            shape = () if tensor is None else tensor.shape
            if len(shape) < 2 or not math.prod(shape) or self.file.stored[awq_name(name)].shape != scale_shape(shape):
                raise self.file.damaged(f"{name!r}: expected scales for a weight of the checkpoint")
            assert tensor is not None
            if (tensor.codec, tensor.bits) != (codec, exact_rate(bits)) and not self.any_codec:
                now = f"{tensor.codec} at {tensor.bits} bits" if tensor.action == QUANTIZE else "nothing (it is kept)"
                raise SourceError(
                    f"{self.file.path}: {name!r}: expected scales for {now}, as the recipe has it, found scales that "
                    f"were searched for {codec} at {bits:g} bits; run pqweights calibrate with the same recipe, or "
                    "pass `awq_any_codec`"
                )
