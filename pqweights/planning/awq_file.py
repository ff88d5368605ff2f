"""The file of activation-aware scales that `calibrate` writes and `quantize --awq` applies: reading it, and what it is for.

One float16 scale for each input channel of a weight (Lin et al., arXiv:2306.00978), in safetensors as `X_awq_scale`; the
JSON under `pqweights_awq` in its metadata says for which checkpoint, codec and width each was searched, and what it gained.
docs/awq.md has the format and the method.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor, TensorSpec, encode_header, parse_header
from pqweights.checkpoint.names import AWQ_SUFFIX, awq_name
from pqweights.checkpoint.scales import SMALLEST_SCALE, scale_shape
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.checkpoint.storage import read_bytes
from pqweights.checkpoint.writer import sha256_of_file, write_whole
from pqweights.dtypes import to_float32
from pqweights.errors import OutputError, SourceError
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.strict_json import is_number

METADATA_KEY = "pqweights_awq"
AWQ_VERSION = 1


@dataclass(frozen=True, eq=False)
class AwqScales:
    """An opened file. any_codec: apply the scales whatever they were searched for.

    file: what holds them. searched: codec and bits, by weight. checkpoint: the fingerprint of the one that was run.
    """

    path: Path
    file: Checkpoint
    sha256: str
    any_codec: bool
    checkpoint: str
    searched: dict[str, tuple[str, float]]

    @functools.cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        return {part.name: part for part in self.file.stored}

    def describe(self) -> dict[str, Any]:
        """The manifest's account of it."""
        return {"sha256": self.sha256, "weights": len(self.searched), "any_codec": self.any_codec}

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """The scales [..., K] of a weight, as the bytes of float16.

        Raises SourceError for one that is no positive normal number.
        """
        stored = self._stored[awq_name(name)]
        raw = np.empty(stored.byte_count, dtype=np.uint8)
        self.file.storage.read_into(stored.file, stored.offset, raw)
        values = to_float32(raw, "F16")
        if not (np.isfinite(values) & (values >= SMALLEST_SCALE)).all():
            raise _damaged(self.path, f"{stored.name!r}: expected finite scales from {SMALLEST_SCALE} on")
        return raw

    def check(self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan]) -> None:
        """Raises SourceError where the scales are not for this checkpoint, or not for this recipe's codec and width."""
        found = checkpoint.fingerprint()
        if found != self.checkpoint:
            raise SourceError(
                f"{self.path}: expected scales of this checkpoint (fingerprint {found[:12]}), found those of another "
                f"({self.checkpoint[:12]}); run pqweights calibrate on this one"
            )
        planned = {tensor.name: tensor for tensor in tensors}
        for name, (codec, bits) in self.searched.items():
            tensor = planned.get(name)
            shape = () if tensor is None else tensor.shape
            if len(shape) < 2 or not math.prod(shape) or self._stored[awq_name(name)].shape != scale_shape(shape):
                raise _damaged(self.path, f"{name!r}: expected scales for a weight of the checkpoint")
            assert tensor is not None
            if (tensor.codec, tensor.bits) != (codec, bits) and not self.any_codec:
                now = f"{tensor.codec} at {tensor.bits} bits" if tensor.action == QUANTIZE else "nothing (it is kept)"
                raise SourceError(
                    f"{self.path}: {name!r}: expected scales for {now}, as the recipe has it, found scales that were searched "
                    f"for {codec} at {bits} bits; run pqweights calibrate with the same recipe, or pass --awq-any-codec"
                )


def open_awq(path: Path, any_codec: bool = False) -> AwqScales:
    """Open a file of scales.

    Raises SourceError for one that is not there or that `calibrate` did not write.
    """
    if not path.is_file():
        raise SourceError(f"{path}: no such file; expected scales that pqweights calibrate wrote")
    file = open_local(path)
    (name,) = file.weight_files
    size = file.storage.files()[name].byte_count
    _, metadata = parse_header(name, size, lambda at, count: read_bytes(file.storage, name, at, count))
    try:
        about = json.loads(metadata[METADATA_KEY])
        version, checkpoint, weights = about["version"], about["checkpoint"], about["weights"]
        searched = {
            weight: (entry["codec"], entry["bits"]) for weight, entry in weights.items() if entry["scaled"] is True
        }
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        raise SourceError(f"{path}: expected scales that pqweights calibrate wrote, found another file") from None
    if type(version) is not int or version != AWQ_VERSION:
        raise SourceError(f"{path}: version: expected {AWQ_VERSION}, found {version!r}; a newer pqweights may read it")
    there = {part.name.removesuffix(AWQ_SUFFIX): part for part in file.stored}
    whole = there.keys() == searched.keys() or (not searched and there.keys() == {NO_SCALES})
    typed = all(type(codec) is str and is_number(bits) for codec, bits in searched.values())
    if not whole or not typed or not isinstance(checkpoint, str):
        raise _damaged(path, "its metadata does not fit its tensors")
    if any(part.dtype != "F16" for part in there.values()):
        raise _damaged(path, "expected float16 scales")
    return AwqScales(path, file, sha256_of_file(path), any_codec, checkpoint, searched)


def check_free(path: Path, overwrite: bool) -> None:
    """Raises OutputError where a file of scales must not be written."""
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{path}: its folder is not there; make it first")
    if path.is_dir():
        raise OutputError(f"{path}: expected the name of a file, found a folder")
    if path.exists():
        if not overwrite:
            raise OutputError(f"{path}: there already; choose another name, or pass --overwrite")
        try:
            open_awq(path)
        except SourceError as error:
            raise OutputError(
                f"{error}: --overwrite replaces only a file of scales; move it away, or choose another name"
            ) from None


def write_awq(
    path: Path,
    checkpoint: str,
    about: Mapping[str, Any],
    weights: Mapping[str, Mapping[str, Any]],
    scales: Mapping[str, npt.NDArray[np.float32]],
) -> None:
    """Write a file of scales: whole, or not at all.

    checkpoint: the fingerprint of the one that was run. about: how. weights: of every weight that was looked at, codec, bits,
    whether it is scaled, and more. scales: [..., K] by name. Raises OutputError.
    """
    specs = [TensorSpec(awq_name(name), "F16", values.shape) for name, values in scales.items()]
    specs = specs or [TensorSpec(NO_SCALES + AWQ_SUFFIX, "F16", (0,))]
    entry = {"version": AWQ_VERSION, "checkpoint": checkpoint, **about, "weights": weights}
    metadata = {"format": "pt", METADATA_KEY: json.dumps(entry, ensure_ascii=False)}
    pieces = (values.astype("<f2").tobytes() for values in scales.values())
    write_whole(path.absolute().parent, path, itertools.chain([encode_header(specs, metadata)], pieces))


# A safetensors file of ours holds at least one tensor: this empty one where no weight is scaled.
NO_SCALES = "no_weight_is_scaled"


def _damaged(path: Path, what: str) -> SourceError:
    return SourceError(f"{path}: damaged: {what}; run pqweights calibrate again")
