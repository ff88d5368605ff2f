"""The plan: one result of a checkpoint, known to the byte before a weight is read, which convert fulfils.

Quantizing and every export make one. A dry run prints it, a run fulfils it, and a resumed run compares its journal with
it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pqweights.checkpoint.config import original_of
from pqweights.checkpoint.names import CARD_FILE, CONFIG_FILE, INDEX_FILE, MANIFEST_FILE
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import Storage, read_bytes
from pqweights.checkpoint.writer import COPY_BYTES, DiskNeed
from pqweights.common.dtypes import FLOAT8_DTYPES, PACKED_DTYPES
from pqweights.common.strict_json import json_pieces
from pqweights.common.threads import Progress
from pqweights.convert.jobs import Job
from pqweights.convert.journal import Journal
from pqweights.convert.manifest import Manifest
from pqweights.convert.records import TensorRecord, exceeds
from pqweights.errors import SourceError, StrictError
from pqweights.formats.native import Native
from pqweights.planning.fit import Fit
from pqweights.planning.layout import (
    DEFAULT_MAX_SHARD_BYTES,
    INTEGER,
    QUANTIZE,
    Container,
    Safetensors,
    ShardPlan,
    TensorPlan,
    Totals,
    in_making_order,
    index_json,
    total,
)

# What manifests call the two kinds of results.
MASTER, EXPORT = "master", "export"
# Names of files, and functions that return their content once the tensors are written.
SmallFiles = Mapping[str, Callable[[], bytes]]
Config = Callable[[Checkpoint, Sequence[TensorPlan], Sequence[TensorRecord]], dict[str, Any]]


def no_files(shards: Sequence[ShardPlan]) -> SmallFiles:
    """Return nothing: a result has no files but those that are copied, and its configuration."""
    return {}


def nothing_to_learn(progress: Progress) -> None:
    """Do nothing: the tensors say all that is needed."""


@dataclass(kw_only=True, eq=False)
class Plan:
    """What becomes of a checkpoint, and how. It may be pickled.

    kind: what manifests call the result: MASTER or EXPORT
    made_by: what they say of how it is made: a recipe, or a target with its options; equal ones turn the same tensors
        into the same bytes
    checkpoint: what is read, with the tensors as the result holds them
    tensors: what becomes of each of them
    encode: returns the first pass over a tensor of the plan
    configs: return the config.json of the finished result, or of each of its folders, by name
    container: the format of the files
    max_shard_bytes: data bytes after which a new shard begins
    not_held: further tensors that the result cannot hold, each with the reason
    small_files: returns the other files that are made, given those of the plan
    reads: what is read besides the checkpoint, by the option that names it
    learn: reads what must be known before the first tensor is encoded
    strict: whether weights are refused whose errors exceed what their codecs promise
    warnings: what the user should know of the result, a sentence each
    fit: how bit widths were chosen, if they were
    learned: what its report says of what was learned of the source, by key
    memory_bytes: what it holds in memory, whatever the number of threads
    disk_bytes: what waits on the disk beside the result: what comes by columns, of the largest weights
    model, master: what the result descends from, see Manifest

    Raises SourceError for a name that two tensors of the result would have.
    """

    kind: str
    made_by: dict[str, Any]
    checkpoint: Checkpoint
    tensors: tuple[TensorPlan, ...]
    encode: Callable[[TensorPlan, LogicalTensor], Job]
    configs: Mapping[str, Config]
    container: Container = field(default_factory=Safetensors)
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    not_held: Mapping[str, str] = field(default_factory=dict)
    small_files: Callable[[Sequence[ShardPlan]], SmallFiles] = no_files
    reads: Mapping[str, Checkpoint] = field(default_factory=dict)
    learn: Callable[[Progress], None] = nothing_to_learn
    strict: bool = False
    warnings: tuple[str, ...] = ()
    fit: Fit | None = None
    learned: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: int = 0
    disk_bytes: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    master: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = Counter(spec.name for tensor in self.tensors for spec in tensor.stored)
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise SourceError(f"tensor {twice!r}: two tensors of the output would have this name")
        self.shards = self.container.shards(self.tensors, self.max_shard_bytes)  # the files that hold tensors
        # The model that the source says it was made from: a master of that is rounded only once.
        self.original = original_of(self.checkpoint.storage) if self.already_quantized() else None

    @property
    def companions(self) -> tuple[str, ...]:
        """Files of the source that are copied."""
        return self.checkpoint.companions

    @property
    def left_out(self) -> dict[str, str]:
        """Files of the source that are not copied, each with the reason."""
        return self.checkpoint.left_out

    @functools.cached_property
    def companion_bytes(self) -> int:
        """Their size, in all folders of the result."""
        files = self.checkpoint.storage.files()
        return sum(files[name].byte_count for name in self.companions) * len(self.container.folders)

    @property
    def left_out_tensors(self) -> dict[str, str]:
        """Tensors that the result does not hold, each with the reason."""
        return self.checkpoint.left_out_tensors | dict(self.not_held)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know of the source, a sentence each."""
        return (*self.checkpoint.remarks, *(pair.seems for pair in self.checkpoint.unproven))

    def already_quantized(self, exact: Collection[str] = ()) -> list[dict[str, Any]]:
        """The formats in which weights were that are rounded again: the squared errors of both add up.

        Each has `format`, what users call it, `bits`, those of a code, and `tensors`, how many there are.

        exact: the names of tensors whose values the result has, all of them, as measured
        """
        formats = {**PACKED_DTYPES, **dict.fromkeys(FLOAT8_DTYPES, (8, "FP8"))}
        again = (t for t in self.tensors if t.action in (QUANTIZE, INTEGER) and t.codec != Native.codec)
        # Of several results in one, each has the weight under a name of its own, behind a slash.
        names = {
            t.name.rpartition("/")[2]: formats[t.dtype] for t in again if t.dtype in formats and t.name not in exact
        }
        of = Counter(names.values())
        return [{"format": name, "bits": bits, "tensors": count} for (bits, name), count in of.items()]

    def quantized_before(self, exact: Collection[str] = ()) -> dict[str, Any]:
        """Return what plan --json, quantize --json and export --json say about it. exact: see already_quantized"""
        formats = self.already_quantized(exact)
        return {"already_quantized": {"formats": formats, "original": self.original}} if formats else {}

    @property
    def output_bytes(self) -> int:
        """The size of the files that hold tensors in bytes, headers included."""
        return sum(shard.file_bytes for shard in self.shards)

    @functools.cached_property
    def totals(self) -> Totals:
        """Counts, sizes and bits per weight."""
        return total(self.tensors, source_bytes=self.checkpoint.weight_file_bytes, output_bytes=self.output_bytes)

    @functools.cached_property
    def manifest(self) -> Manifest:
        """What the manifest will state, without what is measured."""
        adapters = [adapter.describe() for adapter in self.checkpoint.adapters]
        changed = {"adapters": adapters, "leave_out": [*self.checkpoint.leave_out]}
        by_folder = self.container.by_folder if isinstance(self.container, Safetensors) else {}
        return Manifest(
            kind=self.kind,
            made_by=self.made_by | {key: value for key, value in changed.items() if value},
            source_bytes=self.checkpoint.weight_file_bytes,
            max_shard_bytes=self.max_shard_bytes,
            tensors=self.tensors,
            origin=self.checkpoint.storage.origin,
            metadata=self.container.metadata,
            container=self.container.to_json(),
            folders={folder: of for folder, of in by_folder.items() if folder},
            left_out=self.left_out_tensors,
            remarks=self.remarks,
            model=self.model,
            master=self.master,
        )

    @functools.cached_property
    def journal(self) -> Journal:
        """What a run states before it begins: the files that it reads and writes."""
        storage = self.checkpoint.storage
        others = [name for name in (CONFIG_FILE, CARD_FILE) if name in storage.files()]
        read = _states(storage, [*self.checkpoint.weight_files, *others, *self.companions])
        for option, other in self._beside.items():
            read |= _states(other.storage, other.weight_files, f"{option} ")
        copied = [f"{folder}{name}" for name in self.companions for folder in self.container.folders]
        written = [*(shard.file for shard in self.shards), *copied, *self.small_files(self.shards)]
        written += [*self.container.index_files, *self.configs, MANIFEST_FILE]
        return Journal(
            work=self.manifest.digest(),
            origin=storage.origin,
            source=read,
            outputs=tuple(written),
            kind=self.kind,
            target=str(self.made_by.get("target", "")),
        )

    def contents(self, records: Sequence[TensorRecord]) -> dict[str, Callable[[], Iterable[bytes]]]:
        """Return the files without tensors by name: companions, index, configuration, and those that the target adds.

        A call returns the content, in pieces. records: what was measured
        """
        *first, last = self.container.folders
        contents: dict[str, Callable[[], Iterable[bytes]]] = {}
        for name in self.companions:
            contents |= {f"{folder}{name}": functools.partial(_pieces, self.checkpoint, name) for folder in first}
            contents[f"{last}{name}"] = functools.partial(_pieces, self.checkpoint, name, is_last=True)
        for name in self.container.index_files:
            contents[name] = functools.partial(self._index, name.removesuffix(INDEX_FILE))
        for name, config in self.configs.items():
            contents[name] = functools.partial(self._config, config, records)
        added = self.small_files(self.shards)
        return contents | {name: functools.partial(_whole, content) for name, content in added.items()}

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """Raise StrictError for a finished tensor that the user asked to refuse."""
        if self.strict and exceeds(planned, record):
            raise StrictError(
                f"tensor {planned.name!r}: `strict`: relative error {record.relative_mse} at {planned.bits} bits "
                "exceeds what the codec promises, even with its rescue; keep the tensor with a rule, or give it more "
                "bits"
            )

    def _index(self, folder: str) -> Iterator[bytes]:
        return json_pieces(index_json(self.shards, folder))

    def _config(self, config: Config, records: Sequence[TensorRecord]) -> Iterator[bytes]:
        return json_pieces(config(self.checkpoint, self.tensors, records))

    @property
    def in_making_order(self) -> list[LogicalTensor]:
        """The tensors that are read, in order; of a result with several files of each perhaps several times."""
        return [self.checkpoint.tensors[index] for index in in_making_order(self.shards)]

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Everything that is read."""
        return (self.checkpoint, *self._beside.values())

    @property
    def _beside(self) -> dict[str, Checkpoint]:
        """What is read beside the checkpoint, by what messages call it."""
        adapters = {f"adapter {adapter.name}": adapter.files for adapter in self.checkpoint.adapters}
        return {**adapters, **self.reads}

    def source_bytes_of(self, index: int) -> int:
        """Return how many bytes of the source a tensor of the plan is made of."""
        return sum(part.byte_count for part in self.checkpoint.tensors[index].parts)

    def finish_checks(self) -> None:
        """Check what was read in part of everything that is checked. Raises MasterError if something is damaged."""
        for checkpoint in self.checkpoints:
            checkpoint.finish_checks()

    @property
    def fetch_needs(self) -> list[DiskNeed]:
        """What fetching files takes on disks of this machine, besides what is fetched into the work folder."""
        needs = (each.storage.disk_need(each.weight_files) for each in self.checkpoints)
        return [need for need in needs if need is not None]

    def check_sources(self) -> None:
        """Raise SourceChangedError if a file of any checkpoint that is read is not what it was when it was opened."""
        for each in self.checkpoints:
            each.check_unchanged()

    @property
    def bytes_read(self) -> int:
        """Bytes read so far from all checkpoints."""
        return sum(each.storage.bytes_read for each in self.checkpoints)


def _pieces(checkpoint: Checkpoint, name: str, *, is_last: bool = False) -> Iterator[bytes]:
    """Yield the content of a companion. is_last: whether it is not needed again"""
    size = checkpoint.storage.files()[name].byte_count
    for offset in range(0, max(size, 1), COPY_BYTES):  # an empty file is read, too, which checks that it is there
        yield read_bytes(checkpoint.storage, name, offset, min(COPY_BYTES, size - offset))
    if is_last:
        checkpoint.storage.release(name)


def _whole(content: Callable[[], bytes]) -> Iterator[bytes]:
    yield content()


def _states(storage: Storage, names: Iterable[str], before: str = "") -> dict[str, tuple[int, str]]:
    """Return size and stamp of files by name. before: what messages say before each name"""
    states = storage.files()
    return {f"{before}{name}": (states[name].byte_count, states[name].stamp) for name in names}
