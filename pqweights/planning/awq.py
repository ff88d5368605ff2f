"""The activation-aware scales of a file of statistics, as `quantize --awq` applies them (docs/awq.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.names import awq_name
from pqweights.checkpoint.readers import SMALLEST_SCALE, scale_shape
from pqweights.checkpoint.source import Checkpoint
from pqweights.codecs.protocol import exact_rate
from pqweights.common.dtypes import to_float32
from pqweights.errors import SourceError
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.planning.statistics_file import SCALES, Statistics, open_statistics


@dataclass(frozen=True, eq=False, kw_only=True)
class AwqScales:
    """The scales of a file.

    file: the file
    any_codec: apply the scales even if they were searched for another codec or bit width
    """

    file: Statistics
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
        self.file.check({"this checkpoint": checkpoint.fingerprint()}, SCALES)
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
                    "pass --awq-any-codec"
                )


def open_awq(path: Path, any_codec: bool = False) -> AwqScales:
    """Open the scales of a file. Raises SourceError if it holds none."""
    return AwqScales(file=open_statistics(path, SCALES), any_codec=any_codec)
