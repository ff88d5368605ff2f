"""Chunks of all tensors through a pool of threads, in plan order, a bounded number of them under way.

So memory does not grow with the checkpoint or its largest tensor. Results are collected in order: hashes, errors and the
journal do not depend on the number of threads. One more thread brings to the disk what they have written, so that little
is left to wait for at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.buffers import BufferPool
from pqweights.checkpoint.source import Checkpoint, file_uses
from pqweights.checkpoint.writer import ShardWriter
from pqweights.kernels import DEVICES, load_backend
from pqweights.kernels.workers import compute_on
from pqweights.planning.plan import Plan, ShardPlan
from pqweights.rewrite import jobs
from pqweights.rewrite.jobs import Job
from pqweights.rewrite.manifest import TensorRecord
from pqweights.rewrite.transform import Transform
from pqweights.rewrite.workspace import Workspace

# Written bytes that are worth a flush.
FLUSH_BYTES = 1 << 27
# Complete shards that wait for the disk; each holds a file open.
MOST_UNFINISHED = 4

Progress = Callable[[int, int, str], None]  # source bytes done, source bytes in all, name of the tensor


@dataclass(frozen=True)
class _Chunk:
    """A chunk of a tensor that a thread is working on, or has finished."""

    place: int
    number: int
    job: Job
    sink: _ShardSink
    result: Future[Any]


@dataclass(frozen=True)
class _LastChunkDone:
    """All chunks of a tensor went by."""

    place: int
    job: Job
    sink: _ShardSink


@dataclass(frozen=True)
class _Known:
    """A tensor that an earlier run finished. writer: of the file that it is in, where that is not complete."""

    place: int
    record: TensorRecord
    writer: ShardWriter | None = None


@dataclass(frozen=True)
class _ShardDone:
    """All tensors of a shard went by."""

    writer: ShardWriter


@dataclass(frozen=True)
class _Drain:
    """Everything before is to be done first: what comes next may need room on the disk that it gives back."""


_Step = _Chunk | _LastChunkDone | _Known | _ShardDone | _Drain


class _ShardSink:
    """Places a tensor's bytes in its shard."""

    def __init__(self, writer: ShardWriter, shard: ShardPlan) -> None:
        self.writer = writer
        self._stored = {stored.name: stored for stored in shard.stored}

    def write(self, stored_name: str, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """See jobs.Sink."""
        stored = self._stored[stored_name]
        assert offset + data.nbytes <= stored.byte_count, stored_name
        self.writer.write(stored.offset + offset, data)

    def sha256(self, stored_name: str) -> str:
        """See jobs.Sink."""
        stored = self._stored[stored_name]
        return self.writer.sha256(stored.offset, stored.byte_count)

    def holds(self, record: TensorRecord) -> bool:
        """Whether a tensor that the journal calls finished is in the partial file, byte for byte."""
        return all(self.sha256(name) == digest for name, digest in record.sha256.items())


class Stream:
    """The tensors of one rewrite under way; used once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        transform: Transform,
        plan: Plan,
        *,
        workspace: Workspace,
        threads: int,
        device: str,
        progress: Progress,
    ) -> None:
        self._checkpoint = checkpoint
        self._tensors = checkpoint.tensors
        self._transform = transform
        self._plan = plan
        self._workspace = workspace
        self._progress = progress
        self._window = 2 * threads  # steps under way: bounds the memory
        capacity = jobs.CHUNK_WEIGHTS * jobs.OUTPUT_BYTES_PER_WEIGHT
        self._buffers = BufferPool(capacity, load_backend(DEVICES[device]).empty)
        self._pool = ThreadPoolExecutor(threads, "pqweights", compute_on, (device,))
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="pqweights-flush")
        self._flushes: deque[Future[None]] = deque()
        self._part_bytes = [sum(part.byte_count for part in tensor.parts) for tensor in self._tensors]
        self._total_bytes = sum(self._part_bytes)
        self._passed_bytes = 0
        # Places of tensors where files of the source are read for the first time, and those that nothing after reads.
        self._uses = file_uses(self._tensors) if checkpoint.storage.origin is not None else {}
        self._first_uses: set[int] = set()
        self._last_uses: dict[int, list[str]] = {}
        for file, use in self._uses.items():
            self._last_uses.setdefault(use.last, []).append(file)
            if checkpoint.storage.frees:
                self._first_uses.add(use.first)

    def run(self) -> tuple[TensorRecord, ...]:
        """All tensors; the records in plan order."""
        records: list[TensorRecord] = []
        writers: list[ShardWriter] = []
        try:
            # Left first: nobody waits any longer for a file that is still to come.
            with self._checkpoint.storage.fetching(self._workspace.fetched, self._needed_files()):
                for step in self._ahead(self._steps(writers)):
                    self._take(step, records)
                for flush in self._flushes:
                    flush.result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._flusher.shutdown(wait=True)  # what is complete counts as complete when the run is continued
            for writer in writers:
                writer.close()
        return tuple(records)

    def _needed_files(self) -> dict[str, int]:
        """Files of the source, in the order in which they are read; of each, how many are needed together."""
        known = self._workspace.records
        needed = {part.file for t in self._tensors if t.name not in known for part in t.parts} if self._uses else set()
        return {file: use.together for file, use in self._uses.items() if file in needed}

    def _take(self, step: _Step, records: list[TensorRecord]) -> None:
        """Do what is left to be done, in this thread and in order."""
        match step:
            case _Chunk():
                step.job.collect(step.result.result())
                self._show(step.place, (step.number + 1) / step.job.chunks)
                self._flush_behind(step.sink.writer)
            case _LastChunkDone():
                record = self._finish(step)
                self._workspace.record(record)
                self._pass(step.place, record, records)
                self._release_files(step.place, step.sink.writer)
            case _Known():
                self._pass(step.place, step.record, records)
                self._release_files(step.place, step.writer)
            case _Drain():
                pass
            case _ShardDone():
                self._flushes.append(self._flusher.submit(step.writer.finish))
                while len(self._flushes) > MOST_UNFINISHED:
                    self._flushes.popleft().result()

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
                    yield _Known(place, known[name], writer)
                else:
                    if place in self._first_uses:
                        yield _Drain()
                    job = self._transform.job(self._plan.tensors[place], self._tensors[place], self._buffers)
                    for number in range(job.chunks):
                        yield _Chunk(place, number, job, sink, self._pool.submit(job.run, number, sink))
                    yield _LastChunkDone(place, job, sink)
            yield _ShardDone(writer)

    def _ahead(self, steps: Iterator[_Step]) -> Iterator[_Step]:
        """The same steps, with a window of them begun before the first is handed over."""
        under_way: deque[_Step] = deque()
        for step in steps:
            under_way.append(step)
            while len(under_way) > (0 if isinstance(step, _Drain) else self._window):
                yield under_way.popleft()
        yield from under_way

    def _flush_behind(self, writer: ShardWriter) -> None:
        """Have a file flushed once enough of it was written; a flush that failed is an error here or at the end."""
        while self._flushes and self._flushes[0].done():
            self._flushes.popleft().result()
        if not self._flushes and writer.unflushed_bytes >= FLUSH_BYTES:
            self._flushes.append(self._flusher.submit(writer.flush))

    def _release_files(self, place: int, writer: ShardWriter | None) -> None:
        """Have the files of the source released that nothing after this tensor reads.

        First what was made of them is brought to the disk: the file being written here, those before it by flushes that
        stand before this one.
        """

        def release(files: list[str]) -> None:
            try:
                if writer is not None and self._checkpoint.storage.frees:
                    writer.flush()
                self._workspace.sync_records()
                known = self._workspace.fingerprints()
                self._workspace.keep_fingerprints(known | {f: self._checkpoint.file_fingerprint(f) for f in files})
            finally:  # after a failure of the disk, too, of which the next step hears: nobody may wait for room that never comes
                for file in files:
                    self._checkpoint.storage.release(file)

        if files := self._last_uses.pop(place, None):
            self._flushes.append(self._flusher.submit(release, files))

    def _finish(self, step: _LastChunkDone) -> TensorRecord:
        """The record of a tensor, after as many further passes as it asks for."""
        outcome = step.job.finish()
        while not isinstance(outcome, TensorRecord):
            job = outcome
            chunks = (
                _Chunk(step.place, number, job, step.sink, self._pool.submit(job.run, number, step.sink))
                for number in range(job.chunks)
            )
            for chunk in self._ahead(chunks):
                assert isinstance(chunk, _Chunk)
                job.collect(chunk.result.result())
                self._flush_behind(step.sink.writer)
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
