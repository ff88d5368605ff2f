"""The plan: every output name, shape, dtype and byte, decided from headers before a weight is read.

A dry run prints it, a finished run is it fulfilled, a resumed run compares its journal with it, verify rebuilds it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from pqweights.checkpoint.header import StoredTensor, TensorSpec, encode_header, in_file_order, stored_tensors
from pqweights.checkpoint.names import awq_name, shard_name

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
# quantize: encode with a codec of ours. keep: as it is. decode: to the plain weight. integer: to what a runtime computes with.
QUANTIZE, KEEP, DECODE, INTEGER = "quantize", "keep", "decode", "integer"
DEFAULT_METADATA = {"format": "pt"}  # the __metadata__ of safetensors files, unless a runtime asks for another


class TensorPlan(NamedTuple):
    """What becomes of one logical tensor.

    dtype: of the source. action: quantize, keep, decode or integer. codec, bits: of a weight that is stored as codes.
    stored: what it is in the output.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    action: str
    codec: str | None
    bits: float | None
    reason: str
    stored: tuple[TensorSpec, ...]

    @property
    def weights(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_scaled(self) -> bool:
        """Whether its input channels are scaled before it is quantized: it is stored with the scales then."""
        return self.action == QUANTIZE and any(spec.name == awq_name(self.name) for spec in self.stored)

    @property
    def bytes(self) -> int:
        """Bytes in the output, headers not counted."""
        total = 0
        for spec in self.stored:
            total += spec.byte_count
        return total

    def to_json(self) -> dict[str, Any]:
        """The entry of plan --json."""
        return {
            "name": self.name, "shape": list(self.shape), "dtype": self.dtype, "role": self.role, "action": self.action,
            "codec": self.codec, "bits": self.bits, "bytes": self.bytes, "reason": self.reason,
        }  # fmt: skip


@dataclass(frozen=True)
class ShardPlan:
    """One output file: its first bytes, its tensors in their order there, and their positions in Plan.tensors."""

    file: str
    header: bytes
    specs: tuple[TensorSpec, ...]
    data_bytes: int
    tensors: range

    @property
    def file_bytes(self) -> int:
        """Size of the finished file."""
        return len(self.header) + self.data_bytes

    @functools.cached_property
    def stored(self) -> tuple[StoredTensor, ...]:
        """Where each tensor goes: left to those who write or check the file, as a dry run has no use for it."""
        return stored_tensors(self.file, len(self.header), self.specs)


@dataclass(frozen=True)
class Plan:
    """A whole rewrite. companions: other files that are copied. source_bytes: of the source's weight files.

    left_out: files, left_out_tensors: tensors that the result does not carry, each with the reason. metadata: the
    __metadata__ of its safetensors files.
    """

    tensors: tuple[TensorPlan, ...]
    shards: tuple[ShardPlan, ...]
    companions: tuple[str, ...]
    left_out: dict[str, str]
    left_out_tensors: dict[str, str]
    metadata: dict[str, str]
    source_bytes: int
    companion_bytes: int
    max_shard_bytes: int

    @property
    def output_bytes(self) -> int:
        """Size of the safetensors files, headers included."""
        return sum(shard.file_bytes for shard in self.shards)

    def totals(self) -> dict[str, Any]:
        """The totals of plan --json."""
        return totals(self.tensors) | {"source_bytes": self.source_bytes, "output_bytes": self.output_bytes}


def totals(tensors: Sequence[TensorPlan]) -> dict[str, Any]:
    """Counts over tensors. bits_per_weight: of the quantized ones, with codes, norms and padding; None without any."""
    weights = quantized_tensors = quantized_weights = quantized_bytes = 0
    for tensor in tensors:
        of_tensor = tensor.weights
        if tensor.role != "buffer":
            weights += of_tensor
        if tensor.bits is not None:
            quantized_tensors += 1
            quantized_weights += of_tensor
            quantized_bytes += tensor.bytes
    return {
        "tensors": len(tensors),
        "quantized_tensors": quantized_tensors,
        "weights": weights,
        "quantized_weights": quantized_weights,
        "coverage": quantized_weights / weights if weights else 0.0,
        "bits_per_weight": 8 * quantized_bytes / quantized_weights if quantized_weights else None,
    }


def index_json(shards: Sequence[ShardPlan]) -> dict[str, Any]:
    """model.safetensors.index.json."""
    placed = {stored.name: shard.file for shard in shards for stored in shard.stored}
    total = sum(stored.byte_count for shard in shards for stored in shard.stored)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}


def plan_shards(tensors: Sequence[TensorPlan], max_shard_bytes: int, metadata: dict[str, str]) -> tuple[ShardPlan, ...]:
    """Cut the tensors, in their order, into files of at most max_shard_bytes of data (more only for a single tensor)."""
    cuts, sizes = [0], [0]
    for place, tensor in enumerate(tensors):
        byte_count = tensor.bytes
        if sizes[-1] and sizes[-1] + byte_count > max_shard_bytes:
            cuts.append(place)
            sizes.append(0)
        sizes[-1] += byte_count
    cuts.append(len(tensors))
    shards = []
    for number, ((first, last), size) in enumerate(zip(pairwise(cuts), sizes, strict=True)):
        specs = in_file_order([spec for tensor in tensors[first:last] for spec in tensor.stored])
        header = encode_header(specs, metadata)
        shards.append(ShardPlan(shard_name(number, len(sizes)), header, tuple(specs), size, range(first, last)))
    return tuple(shards)
