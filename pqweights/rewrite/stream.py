"""All tensors of a task through a pool of threads, chunk by chunk, into the shards.

A bounded number of chunks is under way at a time, so memory grows neither with the checkpoint nor with its largest
tensor. Results are collected in the order of the plan, so hashes, errors and the journal do not depend on the number of
threads. One more thread flushes what the others have written, so that little is left to flush at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.buffers import BufferPool
from pqweights.checkpoint.file_uses import file_uses
from pqweights.checkpoint.writer import ShardWriter
from pqweights.kernels import DEVICES, load_backend
from pqweights.kernels.workers import compute_on
from pqweights.planning.plan import ShardPlan
from pqweights.rewrite import jobs
from pqweights.rewrite.jobs import Job
from pqweights.rewrite.manifest import TensorRecord
from pqweights.rewrite.task import RewriteTask, RunOptions
from pqweights.rewrite.workspace import Workspace

# A flush begins when this many bytes have been written since the last one.
FLUSH_BYTES = 1 << 27
# At most this many complete shards wait for the disk; each holds a file open.
MOST_UNFINISHED = 4


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """A chunk that a thread is working on or has finished. place: the position of its tensor in the plan."""

    place: int
    number: int
    job: Job
    sink: _ShardSink
    result: Future[Any]


@dataclass(frozen=True)
class _LastChunkDone:
    """All chunks of a tensor have been collected."""

    place: int
    job: Job
    sink: _ShardSink


@dataclass(frozen=True)
class _Known:
    """A tensor that an earlier run finished. writer: that of its shard, unless the shard is complete."""

    place: int
    record: TensorRecord
    writer: ShardWriter | None = None


@dataclass(frozen=True)
class _ShardDone:
    """All tensors of a shard are finished."""

    writer: ShardWriter


@dataclass(frozen=True)
class _Drain:
    """All earlier steps are taken before the next one begins, because it may need the room that they free."""


_Step = _Chunk | _LastChunkDone | _Known | _ShardDone | _Drain


class _ShardSink:
    """The sink that writes a tensor's bytes to their places in a shard."""

    def __init__(self, writer: ShardWriter, shard: ShardPlan) -> None:
        self.writer = writer
        self._stored = {stored.name: stored for stored in shard.stored}

    def write(self, stored_name: str, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Write data at `offset` bytes from the start of a stored tensor."""
        stored = self._stored[stored_name]
        assert offset + data.nbytes <= stored.byte_count, stored_name
        self.writer.write(stored.offset + offset, data)

    def sha256(self, stored_name: str) -> str:
        """Return the sha256 of a stored tensor."""
        stored = self._stored[stored_name]
        return self.writer.sha256(stored.offset, stored.byte_count)

    def holds(self, record: TensorRecord) -> bool:
        """Whether the partial file holds every byte of a tensor that the journal calls finished."""
        return all(self.sha256(name) == digest for name, digest in record.sha256.items())


class Stream:
    """The tensors of one task under way. A stream runs once."""

    def __init__(self, task: RewriteTask, workspace: Workspace, run: RunOptions) -> None:
        self._checkpoint, self._transform, self._plan = task.checkpoint, task.transform, task.plan
        self._tensors = task.checkpoint.tensors
        self._workspace = workspace
        self._progress = run.progress
        self._window = 2 * run.threads  # steps under way: bounds the memory
        capacity = jobs.CHUNK_WEIGHTS * jobs.OUTPUT_BYTES_PER_WEIGHT
        self._buffers = BufferPool(capacity, load_backend(DEVICES[run.device]).empty)
        self._pool = ThreadPoolExecutor(run.threads, "pqweights", compute_on, (run.device,))
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="pqweights-flush")
        self._flushes: deque[Future[None]] = deque()
        self._part_bytes = [sum(part.byte_count for part in tensor.parts) for tensor in self._tensors]
        self._total_bytes = sum(self._part_bytes)
        self._passed_bytes = 0
        # Of files that are fetched: the places of tensors that are the first to read one, and after which tensor each
        # file is no longer read.
        self._uses = file_uses(self._tensors) if self._checkpoint.storage.origin is not None else {}
        self._first_uses: set[int] = set()
        self._last_uses: dict[int, list[str]] = {}
        for file, use in self._uses.items():
            self._last_uses.setdefault(use.last, []).append(file)
            if self._checkpoint.storage.frees:
                self._first_uses.add(use.first)

    def run(self) -> tuple[TensorRecord, ...]:
        """Write all tensors, and return their records in the order of the plan."""
        records: list[TensorRecord] = []
        writers: list[ShardWriter] = []
        try:
            # `fetching` ends before the pool is shut down: no thread then waits for a file that is still to come.
            with self._checkpoint.storage.fetching(self._workspace.fetched, self._needed_files()):
                for step in self._ahead(self._steps(writers)):
                    self._take(step, records)
                for flush in self._flushes:
                    flush.result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._flusher.shutdown(wait=True)  # a shard that is complete counts as complete when the run is continued
            for writer in writers:
                writer.close()
        return tuple(records)

    def _needed_files(self) -> dict[str, int]:
        """How many files are needed together when each file is first read, in the order of reading."""
        known = self._workspace.records
        needed = {part.file for t in self._tensors if t.name not in known for part in t.parts} if self._uses else set()
        return {file: use.together for file, use in self._uses.items() if file in needed}

    def _steps(self, writers: list[ShardWriter]) -> Iterator[_Step]:
        """Yield all steps in order; a chunk is given to the threads when its step is asked for."""
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
                    continue
                if place in self._first_uses:
                    yield _Drain()
                job = self._transform.job(self._plan.tensors[place], self._tensors[place], self._buffers)
                yield from self._chunks(place, job, sink)
                yield _LastChunkDone(place, job, sink)
            yield _ShardDone(writer)

    def _chunks(self, place: int, job: Job, sink: _ShardSink) -> Iterator[_Chunk]:
        """Yield the chunks of a job; each is given to the threads when it is asked for."""
        for number in range(job.chunks):
            result = self._pool.submit(job.run, number, sink)
            yield _Chunk(place=place, number=number, job=job, sink=sink, result=result)

    def _ahead(self, steps: Iterator[_Step]) -> Iterator[_Step]:
        """Yield the same steps, with a window of them begun before the first is handed over."""
        under_way: deque[_Step] = deque()
        for step in steps:
            under_way.append(step)
            while len(under_way) > (0 if isinstance(step, _Drain) else self._window):
                yield under_way.popleft()
        yield from under_way

    def _take(self, step: _Step, records: list[TensorRecord]) -> None:
        """Do the part of a step that is done in order and in this thread."""
        match step:
            case _Chunk():
                step.job.collect(step.result.result())
                self._show(step.place, (step.number + 1) / step.job.chunks)
                self._flush_behind(step.sink.writer)
            case _LastChunkDone():
                record = self._finished(step)
                self._workspace.record(record)
                self._show(step.place, 1.0)
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

    def _finished(self, step: _LastChunkDone) -> TensorRecord:
        """Return the record of a tensor, after as many further passes as its job asks for."""
        outcome = step.job.finish()
        while not isinstance(outcome, TensorRecord):
            job = outcome
            for chunk in self._ahead(self._chunks(step.place, job, step.sink)):
                assert isinstance(chunk, _Chunk)
                job.collect(chunk.result.result())
                self._flush_behind(step.sink.writer)
            outcome = job.finish()
        return outcome

    def _pass(self, place: int, record: TensorRecord, records: list[TensorRecord]) -> None:
        """Add the record of a finished tensor, if the transform accepts it."""
        self._transform.accept(self._plan.tensors[place], record)
        records.append(record)
        self._passed_bytes += self._part_bytes[place]

    def _show(self, place: int, share: float) -> None:
        """Report progress: the tensors passed, and a share of this one; those of an earlier run are only counted."""
        done = self._passed_bytes + round(self._part_bytes[place] * share)
        self._progress(done, self._total_bytes, self._plan.tensors[place].name)

    def _flush_behind(self, writer: ShardWriter) -> None:
        """Begin to flush a file if enough was written to it. A failed flush raises here or at the end of the run."""
        while self._flushes and self._flushes[0].done():
            self._flushes.popleft().result()
        if not self._flushes and writer.unflushed_bytes >= FLUSH_BYTES:
            self._flushes.append(self._flusher.submit(writer.flush))

    def _release_files(self, place: int, writer: ShardWriter | None) -> None:
        """Release the files of the source that no tensor after this one reads.

        What was made of them is flushed first: the shard being written here, and earlier shards by the flushes that are
        queued before this one.
        """

        def release(files: list[str]) -> None:
            try:
                if writer is not None and self._checkpoint.storage.frees:
                    writer.flush()
                self._workspace.sync_records()
                known = self._workspace.fingerprints()
                self._workspace.keep_fingerprints(known | {f: self._checkpoint.file_fingerprint(f) for f in files})
            finally:  # also if the disk failed, which the next step reports: a thread may be waiting for this room
                for file in files:
                    self._checkpoint.storage.release(file)

        if files := self._last_uses.pop(place, None):
            self._flushes.append(self._flusher.submit(release, files))
