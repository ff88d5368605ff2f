"""Tensors of a task through a pool of threads, chunk by chunk, into their shards.

A bounded number of chunks is under way at a time, so memory grows neither with the checkpoint nor with its largest
tensor. The threads read, compute, hash, and hand blocks of the shards to one more thread, which writes them. Errors are
added up and tensors recorded in the order of the plan, so nothing depends on the number of threads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.digests import HASH_OF_PIECES, PieceHasher, TensorHash, digest_of
from pqweights.checkpoint.file_uses import file_uses
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.shard_writer import Disk, ShardWriter
from pqweights.errors import OutputError, SourceChangedError
from pqweights.planning.plan import ShardPlan
from pqweights.rewrite.jobs import Job
from pqweights.rewrite.places import ResultWorkspace
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.task import RewriteTask, RunOptions

# A kill loses the tensors under way, and those that were finished in this time.
SAVE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """A chunk that a thread is working on or has finished. place: the position of its tensor in the plan."""

    place: int
    number: int
    job: Job
    sink: _Sink
    result: Future[Any]


@dataclass(frozen=True)
class _LastChunkDone:
    """All chunks of a tensor have been collected."""

    place: int
    job: Job
    sink: _Sink


@dataclass(frozen=True)
class _Known:
    """A tensor that an earlier run finished. writer: that of its shard, unless the shard is complete."""

    place: int
    record: TensorRecord
    writer: ShardWriter | None = None


@dataclass(frozen=True)
class _ShardDone:
    """All tensors of a shard are finished. writer: None if it was complete before the run."""

    shard: ShardPlan
    writer: ShardWriter | None = None


@dataclass(frozen=True)
class _Drain:
    """All earlier steps are taken before the next one begins, because it may need the room that they free."""


_Step = _Chunk | _LastChunkDone | _Known | _ShardDone | _Drain


class _Sink:
    """The sink of one pass over one tensor, which writes its bytes to their places in a shard and hashes them."""

    def __init__(self, writer: ShardWriter, stored: tuple[StoredTensor, ...]) -> None:
        self.writer, self.stored = writer, stored
        self._places = {each.name: (each.offset, PieceHasher(each.byte_count)) for each in stored}

    def write(self, stored_name: str, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Write data at `offset` bytes from the start of a stored tensor."""
        start, hasher = self._places[stored_name]
        assert offset + len(data) <= hasher.byte_count, stored_name
        hasher.add(offset, data)
        self.writer.write(start + offset, data)

    def digests(self) -> dict[str, str]:
        """Return the hash of each stored tensor, all of which must have been written."""
        return {name: hasher.hexdigest() for name, (_, hasher) in self._places.items()}


class Stream:
    """The tensors of some shards of a task under way. A stream runs once."""

    def __init__(
        self,
        task: RewriteTask,
        workspace: ResultWorkspace,
        run: RunOptions,
        shards: Sequence[ShardPlan] | None = None,
    ) -> None:
        """Start the threads.

        shards: shards of the plan that follow one another; by default all
        """
        self._checkpoint, self._transform, self._plan = task.checkpoint, task.transform, task.plan
        self._tensors = task.checkpoint.tensors
        self._storages = [each.storage for each in task.checkpoints]
        self._shards = task.plan.shards if shards is None else shards
        self._places = range(self._shards[0].tensors.start, self._shards[-1].tensors.stop)
        self._workspace = workspace
        self._progress = run.progress
        self._window = 2 * run.threads  # steps under way: bounds the memory
        self._pool = ThreadPoolExecutor(run.threads, "pqweights")
        self._disk = Disk()
        self._writers: list[ShardWriter] = []
        # Tensors that are finished and not yet in the journal, and when the journal was last up to date.
        self._unsaved: deque[tuple[TensorRecord, ShardWriter, int]] = deque()  # with the place of each
        self._saved = time.monotonic()
        # The place at which each stored tensor of the source is read last.
        self._last_reads = {part.name: place for place in self._places for part in self._tensors[place].parts}
        self._part_bytes = [sum(part.byte_count for part in tensor.parts) for tensor in self._tensors]
        self._total_bytes = sum(self._part_bytes[place] for place in self._places)
        self._passed_bytes = 0
        # Of files that are fetched: the places of tensors that are the first to read one, and after which tensor each
        # file is no longer read.
        is_fetched = self._checkpoint.storage.origin is not None
        self._uses = file_uses(self._tensors, self._places) if is_fetched else {}
        self._first_uses: set[int] = set()
        self._last_uses: dict[int, list[str]] = {}
        for file, use in self._uses.items():
            self._last_uses.setdefault(use.last, []).append(file)
            if self._checkpoint.storage.frees:
                self._first_uses.add(use.first)

    def run(self) -> tuple[TensorRecord, ...]:
        """Write the tensors, and return their records in the order of the plan."""
        records: list[TensorRecord] = []
        try:
            # `fetching` ends before the pool is shut down: no thread then waits for a file that is still to come.
            with self._checkpoint.storage.fetching(self._workspace.fetched, self._needed_files()):
                for step in self._ahead(self._steps()):
                    self._take(step, records)
                self._disk.wait()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            try:
                with contextlib.suppress(OutputError, SourceChangedError):  # whatever ends the run counts
                    self._save()  # of an interrupted run: what is finished need not be done again
            finally:
                self._disk.close()  # a shard that is complete counts as complete when the run is continued
                for writer in self._writers:
                    writer.close()
        return tuple(records)

    def _needed_files(self) -> dict[str, int]:
        """How many files are needed together when each file is first read, in the order of reading."""
        known = self._workspace.records
        tensors = (self._tensors[place] for place in self._places) if self._uses else ()
        needed = {part.file for tensor in tensors if tensor.name not in known for part in tensor.parts}
        return {file: use.together for file, use in self._uses.items() if file in needed}

    def _steps(self) -> Iterator[_Step]:
        """Yield all steps in order; a chunk is given to the threads when its step is asked for."""
        for shard in self._shards:
            stored = {each.name: each for each in shard.stored}
            parts = {
                place: tuple(stored[spec.name] for spec in self._plan.tensors[place].stored) for place in shard.tensors
            }
            if (known := self._known_shard(shard, parts)) is not None:
                yield from known
                yield _ShardDone(shard)
                continue
            while not self._workspace.take_room(shard.file):
                yield _Drain()  # earlier shards are finished, or no room would ever come of them
                self._disk.wait()
                self._workspace.wait_for_room()
            assert shard.header.content is not None
            path = self._workspace.folder / shard.file
            writer = ShardWriter(path, shard.header.content, shard.file_bytes, self._disk)
            self._writers.append(writer)
            for offset, count in shard.gaps:
                writer.write(offset, np.zeros(count, dtype=np.uint8))
            for place in shard.tensors:
                record = self._held(place, writer.descriptor, parts[place])
                if record is not None:
                    for part in parts[place]:
                        writer.keep(part.offset, part.byte_count)
                    yield _Known(place, record, writer)
                    continue
                if place in self._first_uses:
                    yield _Drain()
                job = self._transform.job(self._plan.tensors[place], self._tensors[place])
                sink = _Sink(writer, parts[place])
                yield from self._chunks(place, job, sink)
                yield _LastChunkDone(place, job, sink)
            yield _ShardDone(shard, writer)

    def _known_shard(self, shard: ShardPlan, parts: dict[int, tuple[StoredTensor, ...]]) -> list[_Known] | None:
        """Return the steps of a shard that an earlier run completed; None for another one."""
        known = self._workspace.records
        if any(self._plan.tensors[place].name not in known for place in shard.tensors):
            return None
        if not self._workspace.is_complete(shard.file):
            return None
        finished = {place: known[self._plan.tensors[place].name] for place in shard.tensors}
        if all(each.tensor_hash is HASH_OF_PIECES for each in finished.values()):
            return [_Known(place, each.record) for place, each in finished.items()]
        path = self._workspace.complete_path(shard.file)
        if path is None:
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            records = [self._held(place, descriptor, parts[place]) for place in shard.tensors]
        finally:
            os.close(descriptor)
        steps = [_Known(place, record) for place, record in zip(shard.tensors, records, strict=True) if record]
        return steps if len(steps) == len(records) else None

    def _held(self, place: int, descriptor: int, parts: tuple[StoredTensor, ...]) -> TensorRecord | None:
        """Return the record of a tensor that the journal calls finished if a file holds its bytes.

        The digests of the record are of the present hash, whichever hash the journal has.
        """
        finished = self._workspace.records.get(self._plan.tensors[place].name)
        if finished is None:
            return None

        def digests(tensor_hash: TensorHash) -> dict[str, str]:
            return {p.name: digest_of(tensor_hash, descriptor, p.offset, p.byte_count, self._pool) for p in parts}

        if digests(finished.tensor_hash) != finished.record.digests:
            return None
        if finished.tensor_hash is HASH_OF_PIECES:
            return finished.record
        return replace(finished.record, digests=digests(HASH_OF_PIECES))

    def _chunks(self, place: int, job: Job, sink: _Sink) -> Iterator[_Chunk]:
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
                self._save_at_times()
            case _LastChunkDone():
                record = self._finished(step)
                self._check_source(step.place)
                self._unsaved.append((record, step.sink.writer, step.place))
                self._save_at_times()
                self._show(step.place, 1.0)
                self._pass(step.place, record, records)
                self._release_files(step.place, step.sink.writer)
            case _Known():
                self._check_source(step.place)
                self._pass(step.place, step.record, records)
                self._release_files(step.place, step.writer)
            case _Drain():
                pass
            case _ShardDone():
                if step.writer is not None:
                    self._save()
                    self._disk.do(step.writer.finish)
                done = tuple(records[len(records) - len(step.shard.tensors) :])
                self._disk.do(functools.partial(self._workspace.shard_finished, step.shard.file, done))

    def _finished(self, step: _LastChunkDone) -> TensorRecord:
        """Return the record of a tensor, after as many further passes as its job asks for."""
        sink = step.sink
        outcome = step.job.finish(sink)
        while not isinstance(outcome, TensorRecord):
            job, sink = outcome, _Sink(sink.writer, sink.stored)
            for chunk in self._ahead(self._chunks(step.place, job, sink)):
                assert isinstance(chunk, _Chunk)
                job.collect(chunk.result.result())
            outcome = job.finish(sink)
        return replace(outcome, digests=sink.digests(), folded=self._transform.folded(outcome.name))

    def _check_source(self, place: int) -> None:
        """Check what a tensor was made of, unless tensors after it read it as well: before the journal has the last."""
        parts = self._tensors[place].parts
        self._checkpoint.finish_checks(part for part in parts if self._last_reads[part.name] == place)

    def _save_at_times(self) -> None:
        if self._unsaved and time.monotonic() - self._saved >= SAVE_SECONDS:
            self._workspace.check()
            self._save()

    def _save(self) -> None:
        """Add finished tensors to the journal, once the system has all of their bytes.

        Raises SourceChangedError if they may have been read from other files than those that the journal states.
        """
        for writer in {writer for _, writer, _ in self._unsaved}:
            self._disk.do(writer.save).result()
        # Parts that later tensors read as well are not checked yet.
        self._checkpoint.finish_checks(part for *_, place in self._unsaved for part in self._tensors[place].parts)
        for storage in self._storages:
            storage.check_read()
        while self._unsaved:
            self._workspace.record(self._unsaved[0][0])
            self._unsaved.popleft()
        self._saved = time.monotonic()

    def _pass(self, place: int, record: TensorRecord, records: list[TensorRecord]) -> None:
        """Add the record of a finished tensor, if the transform accepts it."""
        self._transform.accept(self._plan.tensors[place], record)
        records.append(record)
        self._passed_bytes += self._part_bytes[place]

    def _show(self, place: int, share: float) -> None:
        """Report progress: the tensors passed, and a share of this one; those of an earlier run are only counted."""
        done = self._passed_bytes + round(self._part_bytes[place] * share)
        self._progress(done, self._total_bytes, self._plan.tensors[place].name)

    def _release_files(self, place: int, writer: ShardWriter | None) -> None:
        """Release the files of the source that no tensor after this one reads.

        What was made of them is flushed first: the shard being written here, and earlier shards by the tasks that the
        disk was given before this one.
        """

        def release(files: list[str]) -> None:
            try:
                if not self._disk.has_failed:
                    if writer is not None and self._checkpoint.storage.frees:
                        writer.flush()
                    self._workspace.sync_records()
                    known = self._workspace.fingerprints()
                    self._workspace.keep_fingerprints(known | {f: self._checkpoint.file_fingerprint(f) for f in files})
            finally:  # also if the disk failed, which the next step reports: a thread may be waiting for this room
                for file in files:
                    self._checkpoint.storage.release(file)

        if files := self._last_uses.pop(place, None):
            self._save()
            self._disk.do(functools.partial(release, files), always=True)
