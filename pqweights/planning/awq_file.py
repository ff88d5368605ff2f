"""The file of activation-aware scales that `calibrate` writes and `quantize --awq` applies.

It holds one float16 scale for each input channel of a weight (Lin et al., arXiv:2306.00978) as `X_awq_scale`, in
safetensors. The JSON under `pqweights_awq` in its metadata says for which checkpoint the scales are, and for each
weight for which codec and bit width they were searched, and what they gained. docs/awq.md has the format and the
method.
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

from pqweights.checkpoint.header import StoredTensor, TensorSpec, encode_header
from pqweights.checkpoint.names import AWQ_SUFFIX, awq_name
from pqweights.checkpoint.scales import SMALLEST_SCALE, scale_shape
from pqweights.checkpoint.source import Checkpoint, open_local, read_header
from pqweights.checkpoint.writer import sha256_of_file, write_whole
from pqweights.codecs.protocol import exact_rate
from pqweights.dtypes import to_float32
from pqweights.errors import SourceError
from pqweights.planning.calibration_json import SCALES
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.strict_json import Fields

# A safetensors file of ours holds at least one tensor: this empty one if no weight is scaled.
NO_SCALES = "no_weight_is_scaled"


@dataclass(frozen=True, eq=False, kw_only=True)
class AwqScales:
    """An opened file of scales.

    path: where it lies
    file: the file as a checkpoint, from which the scales are read
    sha256: that of the file
    any_codec: apply the scales even if they were searched for another codec or bit width
    checkpoint: the fingerprint of the checkpoint that the scales are for
    searched: for each weight, the codec and the bit width that its scales were searched for
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
        """Return the manifest's account of the scales."""
        return {"sha256": self.sha256, "weights": len(self.searched), "any_codec": self.any_codec}

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read the scales [..., K] of a weight, as the bytes of float16.

        Raises SourceError if one of them is not a positive normal number.
        """
        stored = self._stored[awq_name(name)]
        raw = np.empty(stored.byte_count, dtype=np.uint8)
        self.file.storage.read_into(stored.file, stored.offset, raw)
        values = to_float32(raw, "F16")
        if not (np.isfinite(values) & (values >= SMALLEST_SCALE)).all():
            raise SCALES.damaged(self.path, f"{stored.name!r}: expected finite scales from {SMALLEST_SCALE} on")
        return raw

    def check(self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan]) -> None:
        """Raise SourceError if the scales are of another checkpoint, or for other codecs or bit widths than planned."""
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
                raise SCALES.damaged(self.path, f"{name!r}: expected scales for a weight of the checkpoint")
            assert tensor is not None
            if (tensor.codec, tensor.bits) != (codec, bits) and not self.any_codec:
                now = f"{tensor.codec} at {tensor.bits} bits" if tensor.action == QUANTIZE else "nothing (it is kept)"
                raise SourceError(
                    f"{self.path}: {name!r}: expected scales for {now}, as the recipe has it, found scales that were "
                    f"searched for {codec} at {bits} bits; run pqweights calibrate with the same recipe, or pass "
                    "--awq-any-codec"
                )


def open_awq(path: Path, any_codec: bool = False) -> AwqScales:
    """Open a file of scales.

    Raises SourceError if it does not exist, or if `calibrate` did not write it.
    """
    if not path.is_file():
        raise SourceError(f"{path}: no such file; expected scales that pqweights calibrate wrote")
    file = open_local(path)
    (name,) = file.weight_files
    _, metadata = read_header(file.storage, name)
    about = SCALES.fields(path, metadata)
    checkpoint, searched = about.text("checkpoint"), _searched(about)
    stored = {part.name.removesuffix(AWQ_SUFFIX): part for part in file.stored}
    if stored.keys() != searched.keys() and (searched or stored.keys() != {NO_SCALES}):
        raise SCALES.damaged(path, "its metadata does not describe its tensors")
    if any(part.dtype != "F16" for part in stored.values()):
        raise SCALES.damaged(path, "expected float16 scales")
    return AwqScales(
        path=path,
        file=file,
        sha256=sha256_of_file(path),
        any_codec=any_codec,
        checkpoint=checkpoint,
        searched=searched,
    )


def _searched(about: Fields) -> dict[str, tuple[str, float]]:
    """Return the codec and bit width of each scaled weight, by name."""
    weights = about.fields("weights")
    found = {}
    for name in about.mapping("weights"):
        entry = weights.fields(name)
        if entry.flag("scaled"):
            found[name] = (entry.text("codec"), exact_rate(entry.number("bits")))
    return found


def write_awq(
    path: Path,
    *,
    checkpoint: str,
    about: Mapping[str, Any],
    weights: Mapping[str, Mapping[str, Any]],
    scales: Mapping[str, npt.NDArray[np.float32]],
) -> None:
    """Write a file of scales, whole or not at all.

    checkpoint: the fingerprint of the checkpoint that the scales are for
    about: how they were found
    weights: for every weight that was considered, codec, bits, whether it is scaled, and more
    scales: [..., K] by the name of the weight

    Raises OutputError.
    """
    specs = [TensorSpec(awq_name(name), "F16", values.shape) for name, values in scales.items()]
    specs = specs or [TensorSpec(NO_SCALES + AWQ_SUFFIX, "F16", (0,))]
    entry = {"version": SCALES.version, "checkpoint": checkpoint, **about, "weights": weights}
    metadata = {"format": "pt", SCALES.key: json.dumps(entry, ensure_ascii=False)}
    pieces = (values.astype("<f2").tobytes() for values in scales.values())
    write_whole(path.absolute().parent, path, itertools.chain([encode_header(specs, metadata)], pieces))
