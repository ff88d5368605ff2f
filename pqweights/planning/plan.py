"""The plan: every output name, shape, dtype and byte, decided from headers before a weight is read.

A dry run prints the plan, a run fulfils it, a resumed run compares its journal with it, and verify rebuilds it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from pqweights.checkpoint.header import (
    StoredTensor,
    TensorSpec,
    encode_header,
    in_file_order,
    stored_tensors,
)
from pqweights.checkpoint.names import awq_name, shard_name
from pqweights.codecs import get_codec
from pqweights.codecs.protocol import Coder
from pqweights.planning.totals import Totals, total

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
# What becomes of a tensor: it is encoded with a codec, kept as it is, decoded to a plain weight, or rounded to
# integers.
QUANTIZE, KEEP, DECODE, INTEGER = "quantize", "keep", "decode", "integer"
# The `__metadata__` of safetensors files, unless a runtime asks for another.
DEFAULT_METADATA = {"format": "pt"}


class TensorPlan(NamedTuple):
    """What becomes of one logical tensor.

    name, shape: those of the tensor
    dtype: the dtype in the source
    role: what the tensor is for (roles.py)
    action: QUANTIZE, KEEP, DECODE or INTEGER
    codec, bits: of a weight that is stored as codes; else None
    reason: why, for the user
    bytes: the size of the stored tensors; as a field, because a plan adds it up several times
    stored: the stored tensors that it becomes
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    action: str
    codec: str | None
    bits: float | None
    reason: str
    bytes: int
    stored: tuple[TensorSpec, ...]

    @property
    def weights(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def is_scaled(self) -> bool:
        """Whether its input channels are scaled before it is quantized; then the scales are stored beside it."""
        return self.action == QUANTIZE and any(spec.name == awq_name(self.name) for spec in self.stored)

    @property
    def kind(self) -> tuple[object, ...]:
        """Everything but the names; thousands of experts have it in common."""
        return self[1:-1]

    def named(self, name: str) -> TensorPlan:
        """Return the same plan for a tensor of another name. The name of this one must be empty."""
        stored = tuple([TensorSpec(name + suffix, dtype, shape) for suffix, dtype, shape in self.stored])
        return TensorPlan._make((name, *self[1:-1], stored))

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `plan --json`."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "role": self.role,
            "action": self.action,
            "codec": self.codec,
            "bits": self.bits,
            "bytes": self.bytes,
            "reason": self.reason,
        }


def stored_bytes(stored: Sequence[TensorSpec]) -> int:
    """Return the size of stored tensors in bytes, headers not counted."""
    return sum(spec.byte_count for spec in stored)


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One output file.

    file: its name
    header: its first bytes
    specs: its stored tensors, in the order of the file
    data_bytes: size of the data behind the header
    tensors: which of Plan.tensors it holds
    """

    file: str
    header: bytes
    specs: tuple[TensorSpec, ...]
    data_bytes: int
    tensors: range

    @property
    def file_bytes(self) -> int:
        """The size of the finished file, in bytes."""
        return len(self.header) + self.data_bytes

    @functools.cached_property
    def stored(self) -> tuple[StoredTensor, ...]:
        """Where the data of each tensor go; computed on demand, because a dry run does not need it."""
        return stored_tensors(self.file, len(self.header), self.specs)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole rewrite.

    tensors: what becomes of each tensor
    shards: the safetensors files of the result
    companions: other files that are copied
    left_out: files that are not copied, each with the reason
    left_out_tensors: tensors that the result does not hold, each with the reason
    metadata: the `__metadata__` of the safetensors files
    source_bytes: size of the source's weight files
    companion_bytes: size of the companions
    max_shard_bytes: data bytes after which a new shard begins
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
        """The size of the safetensors files in bytes, headers included."""
        return sum(shard.file_bytes for shard in self.shards)

    @functools.cached_property
    def totals(self) -> Totals:
        """Counts, sizes and bits per weight."""
        return total(self.tensors, source_bytes=self.source_bytes, output_bytes=self.output_bytes)


def coder_of(tensor: TensorPlan, effort: int | None = None) -> Coder:
    """Return the coder of a quantized tensor, sized for it; an effort matters for encoding alone."""
    assert tensor.action == QUANTIZE and tensor.codec is not None and tensor.bits is not None
    return get_codec(tensor.codec).coder(tensor.bits, effort).sized(tensor.weights)


def index_json(shards: Sequence[ShardPlan]) -> dict[str, Any]:
    """Return the content of model.safetensors.index.json."""
    placed = {stored.name: shard.file for shard in shards for stored in shard.stored}
    total = sum(stored.byte_count for shard in shards for stored in shard.stored)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}


def plan_shards(tensors: Sequence[TensorPlan], max_shard_bytes: int, metadata: dict[str, str]) -> tuple[ShardPlan, ...]:
    """Divide tensors, in their order, into files of at most max_shard_bytes of data, or of one larger tensor."""
    cuts, sizes = [0], [0]
    for place, tensor in enumerate(tensors):
        size = tensor.bytes
        if sizes[-1] and sizes[-1] + size > max_shard_bytes:
            cuts.append(place)
            sizes.append(0)
        sizes[-1] += size
    cuts.append(len(tensors))
    shards = []
    for number, ((first, last), size) in enumerate(zip(pairwise(cuts), sizes, strict=True)):
        specs = in_file_order([spec for tensor in tensors[first:last] for spec in tensor.stored])
        header = encode_header(specs, metadata)
        shards.append(
            ShardPlan(
                file=shard_name(number, len(sizes)),
                header=header,
                specs=tuple(specs),
                data_bytes=size,
                tensors=range(first, last),
            )
        )
    return tuple(shards)
