"""The shards of a plan, made on this machine: tensors through a pool of threads, chunk by chunk, into files.

`make_shards` makes those of a group together, and `LocalEngine` the groups of a run, one after the other. A bounded
number of chunks is under way at a time, so memory grows neither with the checkpoint nor with its largest tensor. A
thread reads, computes, hashes and writes its chunks. Errors are added up in the order of the chunks, by any thread, and
tensors finished in that of the plan, so nothing depends on the number of threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.column_spool import ColumnSpool
from pqweights.checkpoint.digests import PieceHasher
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import FileUse, file_uses
from pqweights.checkpoint.shard_file import ShardFile, memory_for
from pqweights.checkpoint.writer import check_room
from pqweights.common.threads import Progress
from pqweights.convert.conversion import Conversion
from pqweights.convert.finished_shards import ShardMark
from pqweights.convert.jobs import Job, ReadingJob
from pqweights.convert.records import TensorRecord
from pqweights.convert.run import Run
from pqweights.convert.task import ClusterWork, Engine, RunOptions, result_need
from pqweights.planning.plan import ShardPlan, in_groups, in_making_order, places_together

# Beside the threads that compute: those that wait for the disk meanwhile.
WAITING_THREADS = 2
# Chunks are given to a thread in batches, which cost the main thread as much as a chunk: of this many, while there are
# so many source bytes left for the thread for each of them. So all threads have something to do until the end.
BATCH_CHUNKS, BYTES_LEFT_PER_CHUNK = 4, 1 << 25
# Progress is told at most this often.
PROGRESS_SECONDS = 0.1

Bytes = npt.NDArray[np.uint8]


class Workers:
    """The threads that make chunks: a given number computes at a time, while some more wait for the disk."""

    def __init__(self, threads: int) -> None:
        """Start them. threads: how many compute."""
        self._threads = threads
        self.most_batches = 2 * threads + WAITING_THREADS  # under way at a time
        self.pool = ThreadPoolExecutor(threads + WAITING_THREADS, "pqweights")
        self._turns = threading.Semaphore(threads)
        self._given_up: list[ShardFile] = []
        self._thread = threading.local()

    def submit(self, make: Callable[[range], None], chunks: int, bytes_left: int) -> Iterator[Future[None]]:
        """Have chunks made, a batch for each step of the iterator. bytes_left: of the source, for all threads."""
        step = max(1, min(BATCH_CHUNKS, bytes_left // (self._threads * BYTES_LEFT_PER_CHUNK)))
        for begin in range(0, chunks, step):
            yield self.pool.submit(self._run, make, range(begin, min(begin + step, chunks)))

    def _run(self, make: Callable[[range], None], batch: range) -> None:
        self._thread.computes = True
        with self._turns:
            make(batch)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let another thread compute while this one waits, if it is one of these."""
        computes = getattr(self._thread, "computes", False)
        if computes:
            self._turns.release()
        try:
            yield
        finally:
            if computes:
                self._turns.acquire()

    def give_up(self, file: ShardFile) -> None:
        """Close a file when no thread writes to it any more; one may be waiting for a source that does not answer."""
        self._given_up.append(file)

    def close(self) -> None:
        """End the threads; chunks that none has begun are dropped."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        for file in self._given_up:
            file.close()


class ShardSink:
    """Where one pass over one tensor writes: the places of its stored tensors in a shard."""

    def __init__(self, file: ShardFile, stored: tuple[StoredTensor, ...], workers: Workers) -> None:
        self._file, self._stored, self._workers = file, stored, workers
        self._columns = {tensor.name: ColumnSpool(file.path.parent) for tensor in stored}
        self._places = {tensor.name: (tensor.offset, PieceHasher(tensor.byte_count)) for tensor in stored}

    def memory(self, purpose: str, stored_name: str, offset: int, byte_count: int) -> Bytes:
        """Return memory from which `write` of the same place makes no copy, contents undefined.

        The memory is that of shard_file.py.
        """
        return memory_for(purpose, self._places[stored_name][0] + offset, byte_count)

    def write(self, stored_name: str, offset: int, data: Bytes) -> None:
        """Write data at `offset` bytes from the start of a stored tensor, in any order and from any thread."""
        start, hasher = self._places[stored_name]
        assert offset + len(data) <= hasher.byte_count, stored_name
        hasher.add(offset, data)
        with self._workers.waiting():  # also for few bytes: a file system lets one writer wait for another
            self._file.write(start + offset, data)

    def write_columns(self, stored_name: str, offset: int, data: Bytes) -> None:
        """Write columns of a stored tensor, [its rows, bytes], at `offset` bytes from the start of each row."""
        with self._workers.waiting():
            self._columns[stored_name].add(offset, data)

    def put_columns(self) -> None:
        """Write the rows of what came by columns."""
        for name, spool in self._columns.items():
            for offset, rows in spool.take_rows():
                self.write(name, offset, rows)

    def again(self) -> ShardSink:
        """Return the sink of another pass over the tensor."""
        return ShardSink(self._file, self._stored, self._workers)

    def digests(self) -> dict[str, str]:
        """Return the hash of each stored tensor, all of which must have been written."""
        return {name: hasher.hexdigest() for name, (_, hasher) in self._places.items()}


class SourceFiles:
    """When fetched files of a source are begun and let go of, while tensors are read in the order of the plan."""

    def __init__(self, conversion: Conversion, shards: Iterable[ShardPlan]) -> None:
        """Look ahead.

        shards: the files that are made
        """
        self._checkpoint = conversion.checkpoint
        storage, places = conversion.checkpoint.storage, in_making_order(shards)
        self._order = {place: number for number, place in enumerate(places)}
        read = [conversion.checkpoint.tensors[place] for place in places] if storage.origin is not None else []
        self._uses: dict[str, FileUse] = file_uses(read)
        self._first_uses = {use.first for use in self._uses.values()} if storage.frees else set()
        self._last_uses: dict[int, list[str]] = {}
        for file, use in self._uses.items():
            self._last_uses.setdefault(use.last, []).append(file)

    @property
    def needed(self) -> dict[str, int]:
        """How many files are needed together when each file is first read, in the order of reading."""
        return {file: use.together for file, use in self._uses.items()}

    def needs_room(self, place: int) -> bool:
        """Whether a file is first read for a tensor, which may have to wait until earlier ones are let go of."""
        return self._order[place] in self._first_uses

    def release(self, place: int) -> dict[str, str]:
        """Let go of the files that no tensor after this one reads, and return their fingerprints.

        Raises MasterError if what was read of them is damaged, SourceChangedError if they were changed meanwhile.
        """
        files = self._last_uses.pop(self._order[place], [])
        if not files:
            return {}
        self._checkpoint.finish_checks(part for part in self._checkpoint.stored if part.file in files)
        self._checkpoint.storage.check_read()
        fingerprints = {file: self._checkpoint.file_fingerprint(file) for file in files}
        for file in files:
            self._checkpoint.storage.release(file)
        return fingerprints


def make_shards(
    conversion: Conversion,
    group: Sequence[ShardPlan],
    paths: Sequence[Path],
    workers: Workers,
    files: SourceFiles,
    progress: Progress,
) -> list[ShardMark]:
    """Make shards of a plan that are made together as new files; return what is known of each once it is on the disk.

    paths: the files
    progress: called with the source bytes done of the shards, those in all, and the name of a tensor

    Raises SourceError if the source cannot deliver the tensors or is not what it was, StrictError if the transform
    does not accept the result, OutputError for a disk error.
    """
    return _ShardsUnderWay(conversion, group, paths, workers, files, progress).marks()


class _Part:
    """A pass over a tensor for one file, whose chunks are made in any order and collected in theirs."""

    def __init__(self, place: int, job: Job, sink: ShardSink, number: int) -> None:
        """Prepare it. place: of the tensor in the plan. number: of the file in its group"""
        self.place, self.job, self.sink, self.number = place, job, sink, number
        self.collected = 0  # chunks
        self._results: dict[int, Any] = {}  # by chunk
        self._collecting = threading.Lock()

    def take(self, chunk: int, result: Any) -> None:
        """Take what was made of a chunk, and collect all whose turn it is, also those of other threads."""
        with self._collecting:
            self._results[chunk] = result
            while self.collected in self._results:
                self.job.collect(self._results.pop(self.collected))
                self.collected += 1


class _Pass:
    """A pass over a tensor, for one file or for several whose jobs read the same."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts, self.first = parts, parts[0]
        self.chunks = self.first.job.chunks

    def make(self, batch: range) -> None:
        """Make some chunks; what several files need is read once."""
        for chunk in batch:
            if len(self.parts) == 1:
                self.first.take(chunk, self.first.job.run(chunk, self.first.sink))
                continue
            values = None
            for part in self.parts:
                assert isinstance(part.job, ReadingJob)
                values = part.job.read(chunk) if values is None else values
                part.take(chunk, part.job.write(chunk, values, part.sink))


def _reading_alike(parts: Iterable[_Part]) -> Iterator[_Pass]:
    """Yield passes, one for all jobs that read the same chunks of the same tensor."""
    alike: dict[object, list[_Part]] = {}
    for part in parts:
        key = part.job.reads if isinstance(part.job, ReadingJob) else part.place
        alike.setdefault(key, []).append(part)
    return map(_Pass, alike.values())


class _File(NamedTuple):
    """A file of a group under way."""

    shard: ShardPlan
    file: ShardFile
    stored: Mapping[str, StoredTensor]
    records: list[TensorRecord]

    @staticmethod
    def of(shard: ShardPlan, path: Path) -> _File:
        """Begin it."""
        assert shard.header.content is not None
        file = ShardFile(path, shard.header.content, shard.file_bytes, shown=path.with_name(shard.file))
        return _File(shard, file, {tensor.name: tensor for tensor in shard.stored}, [])


class _ShardsUnderWay:
    """See make_shards, whose parameters these are."""

    def __init__(
        self,
        conversion: Conversion,
        group: Sequence[ShardPlan],
        paths: Sequence[Path],
        workers: Workers,
        files: SourceFiles,
        progress: Progress,
    ) -> None:
        self._conversion, self._group, self._workers, self._sources, self._progress = (
            conversion,
            group,
            workers,
            files,
            progress,
        )
        self._files = [_File.of(shard, path) for shard, path in zip(group, paths, strict=True)]
        self._under_way: deque[tuple[_Pass, Future[None] | None]] = deque()  # the oldest first
        self._fingerprints: dict[str, str] = {}
        self._told = time.monotonic()
        self._done_bytes = 0
        self._total_bytes = sum(conversion.source_bytes(place) for place in in_making_order(group))

    def marks(self) -> list[ShardMark]:
        """Make the shards."""
        is_whole = False
        try:
            for of in self._files:
                for offset, count in of.shard.gaps:
                    of.file.write(offset, np.zeros(count, dtype=np.uint8))
            for places in places_together(self._group):
                self._begin(places)
            self._wait(most_left=0)
            for of in self._files:
                of.file.finish()
            self._check_sources()
            is_whole = True
        finally:
            for _, future in self._under_way:
                if future is not None:
                    future.cancel()
            if not is_whole:
                for of in self._files:
                    self._workers.give_up(of.file)
        return [ShardMark(records=tuple(of.records), fingerprints=self._fingerprints) for of in self._files]

    def _begin(self, places: Sequence[int]) -> None:
        """Give the chunks of a tensor to the threads, as earlier ones are finished."""
        if any(self._sources.needs_room(place) for place in places):
            self._wait(most_left=0)
        for tensor in _reading_alike(self._part(number, place) for number, place in enumerate(places)):
            for future in self._submit(tensor):
                self._under_way.append((tensor, future))
                self._wait(most_left=self._workers.most_batches)
            self._under_way.append((tensor, None))  # the end of the tensor

    def _part(self, number: int, place: int) -> _Part:
        of, planned = self._files[number], self._conversion.plan.tensors[place]
        job = self._conversion.encode(planned, self._conversion.checkpoint.tensors[place])
        stored = tuple(of.stored[spec.name] for spec in planned.stored)
        return _Part(place, job, ShardSink(of.file, stored, self._workers), number)

    def _submit(self, tensor: _Pass) -> Iterator[Future[None]]:
        return self._workers.submit(tensor.make, tensor.chunks, self._total_bytes - self._done_bytes)

    def _wait(self, most_left: int) -> None:
        """Wait for the oldest batches, until no more than some are under way."""
        while len(self._under_way) > most_left:
            tensor, future = self._under_way[0]
            if future is None:
                for part in tensor.parts:
                    self._finish(part)
            else:
                future.result()
                self._tell(tensor.first.place, tensor.first.collected / tensor.chunks)
            self._under_way.popleft()

    def _finish(self, part: _Part) -> None:
        """Finish a tensor of a file, after as many further passes as its job asks for."""
        place, planned = part.place, self._conversion.plan.tensors[part.place]
        while not isinstance(outcome := part.job.finish(part.sink), TensorRecord):
            part = _Part(place, outcome, part.sink.again(), part.number)
            for future in list(self._submit(_Pass([part]))):
                future.result()
        part.sink.put_columns()
        record = replace(outcome, digests=part.sink.digests())
        self._conversion.accept(planned, record)
        self._files[part.number].records.append(record)
        self._done_bytes += self._conversion.source_bytes(place)
        self._tell(place, 0.0)
        self._fingerprints |= self._sources.release(place)

    def _tell(self, place: int, share: float) -> None:
        """Tell progress: the tensors that are finished, and a share of the one at a place."""
        now = time.monotonic()
        if now - self._told >= PROGRESS_SECONDS or self._done_bytes == self._total_bytes:
            self._told = now
            done = self._done_bytes + round(self._conversion.source_bytes(place) * share)
            self._progress(done, self._total_bytes, self._conversion.plan.tensors[place].name)

    def _check_sources(self) -> None:
        """Check what the tensors were made of, of which nothing may be stated before."""
        conversion = self._conversion
        places = in_making_order(self._group)
        parts = {part.name: part for place in places for part in conversion.checkpoint.tensors[place].parts}
        conversion.checkpoint.finish_checks(parts.values(), run=self._workers.pool.map)
        for checkpoint in conversion.checkpoints:
            checkpoint.storage.check_read()


class LocalEngine(Engine):
    """Makes shards with the threads of this process. See Engine."""

    threads = None

    def each(self, work: ClusterWork, numbers: Sequence[int], memory_bytes: int) -> Iterator[tuple[int, Any]]:
        """Do tasks, one after the other."""
        for number in numbers:
            yield number, work.make(number)

    def check(self, conversion: Conversion, run: Run) -> None:
        """Check that there is room on the disks. Raises OutputError."""
        check_room([result_need(conversion, run), *conversion.fetch_needs])

    def make(
        self, conversion: Conversion, run: Run, shards: Sequence[ShardPlan], options: RunOptions
    ) -> dict[str, ShardMark]:
        """Make shards, and return their marks by name. The next one is made while one is handed to the store."""
        files = SourceFiles(conversion, shards)
        sizes = {
            shard.file: sum(conversion.source_bytes(place) for place in shard.tensors)
            for shard in conversion.plan.shards
        }
        total, done = sum(sizes.values()), sum(sizes.values()) - sum(sizes[shard.file] for shard in shards)
        marks: dict[str, ShardMark] = {}
        is_given_up, sent = threading.Event(), Future[None]()
        sent.set_result(None)

        def send(group: Sequence[ShardPlan], paths: Sequence[Path], made: Sequence[ShardMark]) -> None:
            for shard, path, mark in zip(group, paths, made, strict=True):
                run.check_lock()
                run.shards.add(shard.file, path, mark, is_given_up.is_set)

        def progress(shard_done: int, of: int, name: str) -> None:
            if sent.done():
                sent.result()  # raises what kept a shard from being taken over
            options.progress(done + shard_done, total, name)

        workers, sender = Workers(options.threads), ThreadPoolExecutor(1, "pqweights-store")
        try:
            # `fetching` ends before the threads do: none then waits for a file that is still to come.
            with conversion.checkpoint.storage.fetching(run.fetched, files.needed):
                for group in in_groups(shards):
                    paths = [run.shards.new_path(shard.file) for shard in group]
                    made = make_shards(conversion, group, paths, workers, files, progress)
                    marks |= {shard.file: mark for shard, mark in zip(group, made, strict=True)}
                    sent.result()
                    sent = sender.submit(send, group, paths, made)
                    done += sum(sizes[shard.file] for shard in group)
                sent.result()
        finally:
            is_given_up.set()
            sender.shutdown(wait=True)
            workers.close()
        return marks
