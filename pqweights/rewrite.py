"""The one streaming driver: plan -> (read -> transform -> write)* -> finish. Quantizing and every export run through it.

Chunks of all tensors flow through a pool of threads in plan order with a bounded number under way, so memory does not
grow with the checkpoint or its largest tensor. Results are collected in order: hashes, errors and the journal do not
depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pqweights import __version__
from pqweights.checkpoint.names import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, WORK_FOLDER
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import read_bytes
from pqweights.checkpoint.writer import COPY_BYTES, ShardWriter, partial_path, sync_folder, write_whole
from pqweights.errors import OutputError, SourceError
from pqweights.jobs import Job
from pqweights.manifest import FileRecord, Manifest, TensorRecord, json_bytes, read_manifest
from pqweights.plan import Plan, ShardPlan, TensorPlan, index_json, plan_shards
from pqweights.workspace import RunIdentity, Workspace, check_output, check_paths, is_under_way, open_workspace, tidy

Progress = Callable[[int, int, str], None]  # source bytes done, source bytes in all, name of the tensor
SHARD_METADATA = {"format": "pt"}
MEMORY_FLOOR_BYTES = 220_000_000
# A thread's input chunk in float32 with its temporaries, and its share of the results that wait to be collected.
MEMORY_PER_THREAD_BYTES = 32_000_000


class Transform(Protocol):
    """What a rewrite does with each tensor."""

    @property
    def kind(self) -> str:
        """What the manifest calls the result: master or export."""
        ...

    def describe(self) -> dict[str, Any]:
        """The manifest's account of it: a recipe, or a target and its options."""
        ...

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """One entry per logical tensor, in order."""
        ...

    def job(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """The first pass over one tensor."""
        ...

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """Raise SourceError where the user asked to refuse a result like this one."""
        ...

    def config(
        self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
    ) -> dict[str, Any] | None:
        """config.json of the result, or None for none."""
        ...


@dataclass(frozen=True)
class Report:
    """What a rewrite did. already_done: the folder held the finished result; resumed: tensors taken from the journal."""

    plan: Plan
    records: tuple[TensorRecord, ...]
    already_done: bool
    resumed: int
    source_bytes_read: int


def make_plan(checkpoint: Checkpoint, transform: Transform, max_shard_bytes: int) -> Plan:
    """Decide everything from the headers.

    Raises SourceError or RecipeError for what cannot be done.
    """
    tensors = tuple(transform.plan(checkpoint))
    names = [spec.name for tensor in tensors for spec in tensor.stored]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"tensor {twice!r}: two tensors of the output would have this name")
    files = checkpoint.storage.files()
    return Plan(
        tensors,
        plan_shards(tensors, max_shard_bytes, SHARD_METADATA),
        checkpoint.companions,
        checkpoint.left_out,
        checkpoint.weight_file_bytes,
        sum(files[name].byte_count for name in checkpoint.companions),
        max_shard_bytes,
    )


def resource_needs(plan: Plan, threads: int) -> dict[str, int]:
    """What fulfilling a plan takes at most: peak_disk_bytes in the output folder, peak_memory_bytes of the process.

    Memory: a floor for interpreter, libraries and compiled kernels (measured, benchmarks/memory.py), what is under way
    in each thread, the parsed headers, and the largest output header.
    """
    largest_header = max((len(shard.header) for shard in plan.shards), default=0)
    memory = MEMORY_FLOOR_BYTES + threads * MEMORY_PER_THREAD_BYTES + len(plan.tensors) * 12_000 + 2 * largest_header
    json_files = 1024 * len(plan.tensors) + 65536
    return {
        "peak_disk_bytes": plan.output_bytes + plan.companion_bytes + json_files,
        "peak_memory_bytes": memory,
    }


def rewrite(
    checkpoint: Checkpoint,
    source: Path,
    transform: Transform,
    plan: Plan,
    out: Path,
    *,
    threads: int,
    overwrite: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> Report:
    """Fulfil a plan in the folder `out`, continuing what the same command left there.

    Raises SourceError, OutputError; after any of them no incomplete file stands under a final name.
    """
    check_paths(source, out)
    fingerprint = checkpoint.fingerprint()
    if not overwrite and (done := _finished(out, checkpoint, transform, plan, fingerprint)):
        for planned, record in zip(plan.tensors, done.records, strict=True):
            transform.accept(planned, record)
        tidy(out)
        return Report(plan, done.records, True, len(done.records), checkpoint.storage.bytes_read)
    check_output(out, overwrite)
    _check_space(plan, out)
    outputs = [*(shard.file for shard in plan.shards), *plan.companions, INDEX_FILE, CONFIG_FILE, MANIFEST_FILE]
    read = [*checkpoint.weight_files, *plan.companions, *([CONFIG_FILE] if checkpoint.config is not None else [])]
    # What the bytes depend on, and strictness, which decides whether they may stand.
    described = {
        "plan": [t.to_json() for t in plan.tensors],
        "shards": plan.max_shard_bytes,
        "transform": repr(transform),
        "version": __version__,
    }
    identity = RunIdentity.of(described, checkpoint.storage, read, outputs)
    with open_workspace(out, identity, overwrite) as workspace:
        resumed = len(workspace.records)
        try:
            records = _Run(checkpoint, transform, plan, workspace, threads, progress).run()
        except SourceError:
            workspace.discard()
            raise
        workspace.publish([shard.file for shard in plan.shards])
        files = _write_small_files(checkpoint, transform, plan, records, workspace)
        manifest = Manifest(
            transform.kind,
            transform.describe(),
            plan.source_bytes,
            fingerprint,
            plan.max_shard_bytes,
            plan.tensors,
            records,
            files,
        )
        write_whole(workspace.folder, out / MANIFEST_FILE, [manifest.to_bytes()])
        sync_folder(out)
        workspace.finish()
    return Report(plan, records, False, resumed, checkpoint.storage.bytes_read)


def _finished(out: Path, checkpoint: Checkpoint, transform: Transform, plan: Plan, fingerprint: str) -> Manifest | None:
    """The manifest of `out` where it already is the result of this very rewrite."""
    manifest = out / MANIFEST_FILE
    if not manifest.is_file() or is_under_way(out):
        return None
    files = checkpoint.storage.files()
    if max(files[name].stamp for name in checkpoint.weight_files) > manifest.stat().st_mtime_ns:
        return None  # the source may have changed since where its fingerprint does not look
    found = read_manifest(out)
    same = (
        found.kind == transform.kind
        and found.made_by == transform.describe()
        and (found.source_bytes, found.source_fingerprint) == (plan.source_bytes, fingerprint)
        and found.max_shard_bytes == plan.max_shard_bytes
        and found.tensors == plan.tensors
        and all((out / s.file).is_file() and (out / s.file).stat().st_size == s.file_bytes for s in plan.shards)
        and all((out / name).is_file() for name in found.files)
    )
    if not same:
        return None
    contents = _small_files(checkpoint, transform, plan, found.records)
    digests = {name: _sha256_of_pieces(pieces) for name, pieces in contents.items()}
    return found if digests == {name: record.sha256 for name, record in found.files.items()} else None


def _check_space(plan: Plan, out: Path) -> None:
    """Refuse a result that does not fit on the disk beside what it replaces; what it continues counts as there."""
    needed = plan.output_bytes + plan.companion_bytes
    present = 0
    for shard in plan.shards:
        staged = out / WORK_FOLDER / shard.file
        for path in (partial_path(staged), staged):
            with contextlib.suppress(FileNotFoundError):
                present += path.stat().st_blocks * 512
    existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > present + free:
        raise OutputError(
            f"{out}: the result needs {needed} bytes on the disk, {free} are free; free {needed - present - free} bytes more, "
            "or choose a folder on another disk"
        )


def _small_files(
    checkpoint: Checkpoint, transform: Transform, plan: Plan, records: Sequence[TensorRecord]
) -> dict[str, Iterable[bytes]]:
    """Companions, index and configuration: name -> content in pieces."""
    contents: dict[str, Iterable[bytes]] = {name: _pieces(checkpoint, name) for name in plan.companions}
    contents[INDEX_FILE] = [json_bytes(index_json(plan.shards))]
    config = transform.config(checkpoint, plan.tensors, records)
    if config is not None:
        contents[CONFIG_FILE] = [json_bytes(config)]
    return contents


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
    size = checkpoint.storage.files()[name].byte_count
    for offset in range(0, size, COPY_BYTES):
        yield read_bytes(checkpoint.storage, name, offset, min(COPY_BYTES, size - offset))


def _sha256_of_pieces(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _write_small_files(
    checkpoint: Checkpoint, transform: Transform, plan: Plan, records: Sequence[TensorRecord], workspace: Workspace
) -> dict[str, FileRecord]:
    """Write them, and return what the manifest says of them."""
    files = {}
    for name, pieces in _small_files(checkpoint, transform, plan, records).items():
        digest = write_whole(workspace.folder, workspace.out / name, pieces)
        files[name] = FileRecord((workspace.out / name).stat().st_size, digest)
    return files


@dataclass(frozen=True)
class _Chunk:
    """A chunk of a tensor that a thread is working on, or has finished."""

    place: int
    number: int
    job: Job
    result: Future[Any]


@dataclass(frozen=True)
class _LastChunkDone:
    """All chunks of a tensor went by."""

    place: int
    job: Job
    sink: _ShardSink


@dataclass(frozen=True)
class _Known:
    """A tensor that an earlier run finished."""

    place: int
    record: TensorRecord


@dataclass(frozen=True)
class _ShardDone:
    """All tensors of a shard went by."""

    writer: ShardWriter


_Step = _Chunk | _LastChunkDone | _Known | _ShardDone


class _ShardSink:
    """Places a tensor's bytes in its shard."""

    def __init__(self, writer: ShardWriter, shard: ShardPlan) -> None:
        self._writer = writer
        self._stored = {stored.name: stored for stored in shard.stored}

    def write(self, stored_name: str, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """See jobs.Sink."""
        stored = self._stored[stored_name]
        assert offset + data.nbytes <= stored.byte_count, stored_name
        self._writer.write(stored.offset + offset, data)

    def holds(self, record: TensorRecord) -> bool:
        """Whether a tensor that the journal calls finished is in the partial file, byte for byte."""
        return all(
            self._writer.sha256(self._stored[name].offset, self._stored[name].byte_count) == digest
            for name, digest in record.sha256.items()
        )


class _Run:
    """The tensors of one rewrite under way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        transform: Transform,
        plan: Plan,
        workspace: Workspace,
        threads: int,
        progress: Progress,
    ) -> None:
        self._tensors = checkpoint.tensors
        self._transform = transform
        self._plan = plan
        self._workspace = workspace
        self._progress = progress
        self._window = 2 * threads  # steps under way: bounds the memory
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pqweights")
        self._part_bytes = [sum(part.byte_count for part in tensor.parts) for tensor in self._tensors]
        self._total_bytes = sum(self._part_bytes)
        self._passed_bytes = 0

    def run(self) -> tuple[TensorRecord, ...]:
        """All tensors; the records in plan order."""
        records: list[TensorRecord] = []
        writers: list[ShardWriter] = []
        finishing: list[Future[None]] = []
        try:
            for step in self._ahead(self._steps(writers)):
                match step:
                    case _Chunk():
                        step.job.collect(step.result.result())
                        self._show(step.place, (step.number + 1) / step.job.chunks)
                    case _LastChunkDone():
                        record = self._finish(step)
                        self._workspace.record(record)
                        self._pass(step.place, record, records)
                    case _Known():
                        self._pass(step.place, step.record, records)
                    case _ShardDone():
                        finishing.append(self._pool.submit(step.writer.finish))
            for future in finishing:
                future.result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            for writer in writers:
                writer.close()
        return tuple(records)

    def _steps(self, writers: list[ShardWriter]) -> Iterator[_Step]:
        """Everything that is to be done, in order; a chunk is given to the threads when it is asked for."""
        known = self._workspace.records
        for shard in self._plan.shards:
            names = [self._plan.tensors[place].name for place in shard.tensors]
            if self._workspace.is_complete(shard.file) and all(name in known for name in names):
                yield from (_Known(place, known[name]) for place, name in zip(shard.tensors, names, strict=True))
                continue
            writer = ShardWriter(self._workspace.folder / shard.file, shard.header, shard.file_bytes)
            writers.append(writer)
            sink = _ShardSink(writer, shard)
            for place, name in zip(shard.tensors, names, strict=True):
                if name in known and sink.holds(known[name]):
                    yield _Known(place, known[name])
                else:
                    job = self._transform.job(self._plan.tensors[place], self._tensors[place])
                    for number in range(job.chunks):
                        yield _Chunk(place, number, job, self._pool.submit(job.run, number, sink))
                    yield _LastChunkDone(place, job, sink)
            yield _ShardDone(writer)

    def _ahead(self, steps: Iterator[_Step]) -> Iterator[_Step]:
        """The same steps, with a window of them begun before the first is handed over."""
        under_way: deque[_Step] = deque()
        for step in steps:
            under_way.append(step)
            if len(under_way) > self._window:
                yield under_way.popleft()
        yield from under_way

    def _finish(self, step: _LastChunkDone) -> TensorRecord:
        """The record of a tensor, after as many further passes as it asks for."""
        outcome = step.job.finish()
        while not isinstance(outcome, TensorRecord):
            job = outcome
            chunks = (
                _Chunk(step.place, number, job, self._pool.submit(job.run, number, step.sink))
                for number in range(job.chunks)
            )
            for chunk in self._ahead(chunks):
                assert isinstance(chunk, _Chunk)
                job.collect(chunk.result.result())
            outcome = job.finish()
        return outcome

    def _show(self, place: int, share: float) -> None:
        done = self._passed_bytes + round(self._part_bytes[place] * share)
        self._progress(done, self._total_bytes, self._plan.tensors[place].name)

    def _pass(self, place: int, record: TensorRecord, records: list[TensorRecord]) -> None:
        self._transform.accept(self._plan.tensors[place], record)
        records.append(record)
        self._show(place, 1.0)
        self._passed_bytes += self._part_bytes[place]
