"""The layout of a result: every name, shape, dtype and byte, decided from headers before a weight is read.

The files are safetensors or GGUF, and a manifest says enough of them for verify to find every byte again.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pqweights.checkpoint.header import StoredTensor, TensorSpec, aligned, encode_header, in_file_order, stored_tensors
from pqweights.checkpoint.names import INDEX_FILE, awq_name, shard_name
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.formats import UNRATED, get_codec
from pqweights.formats.master import BlockFormat, MasterFormat

DEFAULT_MAX_SHARD_BYTES = 2_000_000_000
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

    @staticmethod
    def of(
        tensor: LogicalTensor,
        stored: tuple[TensorSpec, ...],
        *,
        role: str,
        action: str,
        reason: str,
        codec: str | None = None,
        bits: float | None = None,
    ) -> TensorPlan:
        """Return what becomes of a tensor. stored: what it becomes"""
        size = stored_bytes(stored)
        return TensorPlan(tensor.name, tensor.shape, tensor.dtype, role, action, codec, bits, reason, size, stored)

    @property
    def weights(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def rate(self) -> float | None:
        """The bits by which weights can be told apart: None for one of a codec whose weights take what they take."""
        return None if self.codec in UNRATED else self.bits

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
    tensors: which of Plan.tensors it holds
    specs: its stored tensors, in the order of the file
    header: its first bytes; None if they do not follow from a manifest, which then states how many they are and their
        sha256 (`stated`)
    alignment: the data of each tensor fill a multiple of this number of bytes, with zeros at the end
    group: the number of the files that are made together, since they are made of the same tensors of the source
    """

    file: str
    tensors: range
    specs: tuple[TensorSpec, ...] = ()
    header: bytes | None = None
    stated: tuple[int, str] = (0, "")
    alignment: int = 1
    group: int = 0

    @property
    def header_bytes(self) -> int:
        """How many bytes come before the tensors."""
        return self.stated[0] if self.header is None else len(self.header)

    @property
    def header_sha256(self) -> str:
        """The hash of those bytes."""
        return self.stated[1] if self.header is None else hashlib.sha256(self.header).hexdigest()

    @functools.cached_property
    def file_bytes(self) -> int:
        """The size of the finished file, in bytes."""
        return self.header_bytes + sum(aligned(spec.byte_count, self.alignment) for spec in self.specs)

    @functools.cached_property
    def stored(self) -> tuple[StoredTensor, ...]:
        """Where the data of each tensor go; computed on demand, because a dry run does not need it."""
        return stored_tensors(self.file, self.header_bytes, self.specs, alignment=self.alignment)


def in_groups(shards: Iterable[ShardPlan]) -> list[list[ShardPlan]]:
    """Return files in the groups in which they are made, in the order of the groups."""
    groups: dict[int, list[ShardPlan]] = {}
    for shard in shards:
        groups.setdefault(shard.group, []).append(shard)
    return [groups[number] for number in sorted(groups)]


def in_making_order(shards: Iterable[ShardPlan]) -> list[int]:
    """Return which tensors of a plan are made for files, in the order in which their sources are read."""
    return [index for group in in_groups(shards) for alike in indices_together(group) for index in alike]


def indices_together(group: Sequence[ShardPlan]) -> Iterator[tuple[int, ...]]:
    """Yield the tensors of the files of a group that are made together, of the same tensor of the source."""
    return zip(*(shard.tensors for shard in group), strict=True)


def cuts(sizes: Sequence[int], max_shard_bytes: int) -> list[range]:
    """Divide tensors, given the bytes of each, into runs of at most max_shard_bytes, or of one larger tensor."""
    first, size, runs = 0, 0, []
    for index, tensor_bytes in enumerate(sizes):
        if size and size + tensor_bytes > max_shard_bytes:
            runs.append(range(first, index))
            first, size = index, 0
        size += tensor_bytes
    return [*runs, range(first, len(sizes))]


def cuts_together(results: Sequence[Sequence[TensorPlan]], max_shard_bytes: int) -> list[range]:
    """Divide the tensors of several results at the same ones, so that no run of any has more than max_shard_bytes."""
    return cuts([max(planned.bytes for planned in alike) for alike in zip(*results, strict=True)], max_shard_bytes)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over tensors, with the sizes of files.

    tensors: how many there are
    quantized_tensors: how many of them are quantized
    weights: elements of all tensors, buffers not counted
    quantized_weights: elements of the quantized tensors
    quantized_bytes: bytes of the quantized tensors, with norms, scales and padding
    source_bytes, output_bytes: sizes of the weight files that are read, and of the safetensors files that are written
    """

    tensors: int
    quantized_tensors: int
    weights: int
    quantized_weights: int
    quantized_bytes: int
    source_bytes: int
    output_bytes: int

    @property
    def coverage(self) -> float:
        """The share of weights that are quantized."""
        return self.quantized_weights / self.weights if self.weights else 0.0

    @property
    def bits_per_weight(self) -> float | None:
        """The mean over the quantized weights, with norms, scales and padding; None if there are none."""
        return 8 * self.quantized_bytes / self.quantized_weights if self.quantized_weights else None

    @property
    def bits_per_parameter(self) -> float | None:
        """The mean over the whole checkpoint: all bytes of the safetensors files, headers included, over all weights,
        quantized or not; None if there are none.
        """
        return 8 * self.output_bytes / self.weights if self.weights else None

    def __str__(self) -> str:
        per_weight, per_parameter = self.bits_per_weight, self.bits_per_parameter
        sizes = f"{self.tensors} tensors, {self.source_bytes} -> {self.output_bytes} bytes"
        if per_weight is None or per_parameter is None:
            return f"{sizes}, nothing is quantized"
        return f"{sizes}, {per_weight:.4f} bits per quantized weight, {per_parameter:.4f} per parameter"

    def to_json(self) -> dict[str, Any]:
        """Return the totals as plan --json and inspect --json print them."""
        return {
            "tensors": self.tensors,
            "quantized_tensors": self.quantized_tensors,
            "weights": self.weights,
            "quantized_weights": self.quantized_weights,
            "coverage": self.coverage,
            "bits_per_weight": self.bits_per_weight,
            "bits_per_parameter": self.bits_per_parameter,
            "source_bytes": self.source_bytes,
            "output_bytes": self.output_bytes,
        }


def total(tensors: Sequence[TensorPlan], *, source_bytes: int, output_bytes: int) -> Totals:
    """Return counts over tensors with the sizes of files."""
    quantized = [(tensor.weights, tensor.bytes) for tensor in tensors if tensor.bits is not None]
    return Totals(
        tensors=len(tensors),
        quantized_tensors=len(quantized),
        weights=sum(tensor.weights for tensor in tensors if tensor.role != "buffer"),
        quantized_weights=sum(weights for weights, _ in quantized),
        quantized_bytes=sum(byte_count for _, byte_count in quantized),
        source_bytes=source_bytes,
        output_bytes=output_bytes,
    )


def block_format_of(tensor: TensorPlan, effort: int | None = None) -> BlockFormat:
    """Return the format in which a weight is encoded first, sized for it; an effort matters for encoding alone."""
    assert tensor.action == QUANTIZE and tensor.codec is not None and tensor.bits is not None
    return get_codec(tensor.codec).at(tensor.bits, effort).sized(tensor.weights)


def format_of(tensor: TensorPlan, settings: Mapping[str, Any] | None = None) -> MasterFormat:
    """Return the format of a quantized tensor. settings: what a record states of its last pass

    Raises RecipeError for a codec or bits that there are not.
    """
    if tensor.codec in UNRATED and tensor.bits is not None:
        format = UNRATED[tensor.codec].at(tensor.bits)
    else:
        format = block_format_of(tensor)
    return format if settings is None else format.with_settings(settings)


def index_json(shards: Sequence[ShardPlan], folder: str = "") -> dict[str, Any]:
    """Return the content of model.safetensors.index.json.

    folder: that of the index, with a slash, with which names of files and tensors begin; others are not listed
    """
    stored = [tensor for shard in shards if shard.file.startswith(folder) for tensor in shard.stored]
    placed = {tensor.name.removeprefix(folder): tensor.file.removeprefix(folder) for tensor in stored}
    total = sum(tensor.byte_count for tensor in stored)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}


GGUF = "gguf"


@dataclass(frozen=True)
class Safetensors:
    """Files of safetensors with an index, or folders of such files of the same tensors in several formats.

    by_folder: the `__metadata__` of the files of each folder, by its name with a slash, or "" if there is one alone; in
        a plan, names of tensors begin with it, which the files themselves do not have
    stem: what a file is called that is the only one of its folder
    """

    by_folder: dict[str, dict[str, str]] = field(default_factory=lambda: {"": DEFAULT_METADATA})
    stem: str | None = None

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of files that lie in no folder of their own."""
        return self.by_folder.get("", DEFAULT_METADATA)

    @property
    def folders(self) -> tuple[str, ...]:
        """Those with an index, a configuration and copied files."""
        return tuple(self.by_folder)

    def shards(self, tensors: Sequence[TensorPlan], max_shard_bytes: int) -> tuple[ShardPlan, ...]:
        """Return the files of each folder, which are cut at the same tensors.

        Raises ValueError if the folders do not hold the same tensors.
        """
        count = len(tensors) // len(self.by_folder)
        held = {folder: tensors[number * count :][:count] for number, folder in enumerate(self.by_folder)}
        names = {tuple(tensor.name.removeprefix(folder) for tensor in of) for folder, of in held.items()}
        if len(names) > 1 or count * len(self.by_folder) < len(tensors):
            raise ValueError("the folders do not hold the same tensors")
        runs = cuts_together([*held.values()], max_shard_bytes)
        return tuple(
            shard
            for number, (folder, of) in enumerate(held.items())
            for shard in _shards(of, runs, self.by_folder[folder], folder, number * count, self.stem)
        )

    @property
    def index_files(self) -> tuple[str, ...]:
        """The names of the indexes."""
        return tuple(f"{folder}{INDEX_FILE}" for folder in self.by_folder)

    def to_json(self) -> dict[str, Any]:
        """Return nothing: a manifest lists the folders."""
        return {}


def _shards(
    tensors: Sequence[TensorPlan],
    runs: Sequence[range],
    metadata: dict[str, str],
    folder: str,
    first: int,
    stem: str | None,
) -> Iterator[ShardPlan]:
    """Yield files of safetensors, whose headers follow from their tensors.

    runs: which of the tensors each file holds
    folder: where they lie, with a slash, with which names of tensors begin; the headers are without it
    first: the place of the first of these tensors in the plan
    stem: what one alone is called; None to number it, as several are
    """
    for number, run in enumerate(runs):
        specs = in_file_order([spec for index in run for spec in tensors[index].stored])
        named = [spec._replace(name=spec.name.removeprefix(folder)) for spec in specs] if folder else specs
        yield ShardPlan(
            file=folder + (f"{stem}.safetensors" if stem and len(runs) == 1 else shard_name(number, len(runs))),
            header=encode_header(named, metadata),
            specs=tuple(specs),
            tensors=range(first + run.start, first + run.stop),
            group=number,
        )


@dataclass(frozen=True, kw_only=True)
class GgufFiles:
    """Files of GGUF: of one type or of several, each in one file or in several that llama.cpp reads as one.

    name: that of all of them together
    alignment: each tensor fills a multiple of this number of bytes
    files: the files, without their stored tensors, in the order of the tensors of the plan
    """

    name: str
    alignment: int
    files: tuple[ShardPlan, ...]

    @property
    def metadata(self) -> dict[str, str]:
        """What safetensors files would have by default."""
        return DEFAULT_METADATA

    folders = ("",)  # those with a configuration and copied files
    index_files = ()  # there are none: each file lists its tensors

    def shards(self, tensors: Sequence[TensorPlan], max_shard_bytes: int) -> tuple[ShardPlan, ...]:
        """Return the files.

        Raises ValueError if they do not hold as many tensors as there are.
        """
        if (self.files[-1].tensors.stop if self.files else 0) != len(tensors):
            raise ValueError("the files hold another number of tensors")
        return tuple(
            replace(
                file,
                specs=tuple(spec for index in file.tensors for spec in tensors[index].stored),
                alignment=self.alignment,
            )
            for file in self.files
        )

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest says of the files."""
        files = [
            {
                "name": file.file,
                "tensors": len(file.tensors),
                "group": file.group,
                "header_bytes": file.header_bytes,
                "header_sha256": file.header_sha256,
            }
            for file in self.files
        ]
        return {"format": GGUF, "name": self.name, "alignment": self.alignment, "files": files}


Container = Safetensors | GgufFiles  # the format of a result's files: how they are named, begin and hold tensors
