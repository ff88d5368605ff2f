"""The shards of a plan, made on this machine: tensors through a pool of threads, chunk by chunk, into a file.

`make_shard` makes one, and `LocalEngine` those of a run, one after the other. A bounded number of chunks is under way
at a time, so memory grows neither with the checkpoint nor with its largest tensor. A thread reads, computes, hashes and
writes its chunks. Errors are added up in the order of the chunks, by any thread, and tensors finished in that of the
plan, so nothing depends on the number of threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.column_spool import ColumnSpool
from pqweights.checkpoint.digests import PieceHasher
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import FileUse, file_uses
from pqweights.checkpoint.shard_file import ShardFile, memory_for
from pqweights.checkpoint.writer import check_room
from pqweights.common.threads import Progress
from pqweights.planning.plan import ShardPlan
from pqweights.rewrite.finished_shards import ShardMark
from pqweights.rewrite.jobs import Job
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.run import Run
from pqweights.rewrite.task import ClusterWork, Engine, RewriteTask, RunOptions, result_need

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

    def __init__(self, task: RewriteTask, places: list[int]) -> None:
        """Look ahead.

        places: which tensors of the plan are made
        """
        self._checkpoint = task.checkpoint
        storage = task.checkpoint.storage
        is_fetched = storage.origin is not None
        self._uses: dict[str, FileUse] = file_uses(task.checkpoint.tensors, places) if is_fetched else {}
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
        return place in self._first_uses

    def release(self, place: int) -> dict[str, str]:
        """Let go of the files that no tensor after this one reads, and return their fingerprints.

        Raises MasterError if what was read of them is damaged, SourceChangedError if they were changed meanwhile.
        """
        files = self._last_uses.pop(place, [])
        if not files:
            return {}
        self._checkpoint.finish_checks(part for part in self._checkpoint.stored if part.file in files)
        self._checkpoint.storage.check_read()
        fingerprints = {file: self._checkpoint.file_fingerprint(file) for file in files}
        for file in files:
            self._checkpoint.storage.release(file)
        return fingerprints


def make_shard(
    task: RewriteTask, shard: ShardPlan, path: Path, workers: Workers, files: SourceFiles, progress: Progress
) -> ShardMark:
    """Make a shard of a plan as a new file, and return what is known of it once it is on the disk.

    path: the file
    progress: called with the source bytes done of the shard, the source bytes of the shard, and the name of a tensor

    Raises SourceError if the source cannot deliver the tensors or is not what it was, StrictError if the transform
    does not accept the result, OutputError for a disk error.
    """
    return _ShardUnderWay(task, shard, path, workers, files, progress).mark()


class _Pass:
    """A pass over a tensor, whose chunks are made in any order and collected in theirs."""

    def __init__(self, place: int, job: Job, sink: ShardSink) -> None:
        """Prepare it. place: of the tensor in the plan."""
        self.place, self.job, self.sink = place, job, sink
        self.collected = 0  # chunks
        self._results: dict[int, Any] = {}  # by chunk
        self._collecting = threading.Lock()

    def make(self, batch: range) -> None:
        """Make some chunks, and collect all whose turn it is, also those of other threads."""
        for chunk in batch:
            result = self.job.run(chunk, self.sink)
            with self._collecting:
                self._results[chunk] = result
                while self.collected in self._results:
                    self.job.collect(self._results.pop(self.collected))
                    self.collected += 1


class _ShardUnderWay:
    """A shard while it is made, with the parameters of make_shard."""

    def __init__(
        self, task: RewriteTask, shard: ShardPlan, path: Path, workers: Workers, files: SourceFiles, progress: Progress
    ) -> None:
        self._task, self._shard, self._workers, self._files, self._progress = task, shard, workers, files, progress
        assert shard.header.content is not None
        self._file = ShardFile(path, shard.header.content, shard.file_bytes, shown=path.with_name(shard.file))
        self._under_way: deque[tuple[_Pass, Future[None] | None]] = deque()  # the oldest first
        self._records: list[TensorRecord] = []
        self._fingerprints: dict[str, str] = {}
        self._told = time.monotonic()
        self._done_bytes = 0
        self._total_bytes = sum(task.source_bytes(place) for place in shard.tensors)

    def mark(self) -> ShardMark:
        """Make the shard."""
        is_whole = False
        try:
            for offset, count in self._shard.gaps:
                self._file.write(offset, np.zeros(count, dtype=np.uint8))
            stored = {tensor.name: tensor for tensor in self._shard.stored}
            for place in self._shard.tensors:
                self._begin(place, tuple(stored[spec.name] for spec in self._task.plan.tensors[place].stored))
            self._wait(most_left=0)
            self._file.finish()
            self._check_sources()
            is_whole = True
        finally:
            for _, future in self._under_way:
                if future is not None:
                    future.cancel()
            if not is_whole:
                self._workers.give_up(self._file)
        return ShardMark(records=tuple(self._records), fingerprints=self._fingerprints)

    def _begin(self, place: int, stored: tuple[StoredTensor, ...]) -> None:
        """Give the chunks of a tensor to the threads, as earlier ones are finished."""
        if self._files.needs_room(place):
            self._wait(most_left=0)
        job = self._task.transform.job(self._task.plan.tensors[place], self._task.checkpoint.tensors[place])
        tensor = _Pass(place, job, ShardSink(self._file, stored, self._workers))
        for future in self._submit(tensor):
            self._under_way.append((tensor, future))
            self._wait(most_left=self._workers.most_batches)
        self._under_way.append((tensor, None))  # the end of the tensor

    def _submit(self, tensor: _Pass) -> Iterator[Future[None]]:
        return self._workers.submit(tensor.make, tensor.job.chunks, self._total_bytes - self._done_bytes)

    def _wait(self, most_left: int) -> None:
        """Wait for the oldest batches, until no more than some are under way."""
        while len(self._under_way) > most_left:
            tensor, future = self._under_way[0]
            if future is None:
                self._finish(tensor)
            else:
                future.result()
                self._tell(tensor.place, tensor.collected / tensor.job.chunks)
            self._under_way.popleft()

    def _finish(self, tensor: _Pass) -> None:
        """Finish a tensor, after as many further passes as its job asks for."""
        place, transform = tensor.place, self._task.transform
        while not isinstance(outcome := tensor.job.finish(tensor.sink), TensorRecord):
            tensor = _Pass(place, outcome, tensor.sink.again())
            for future in list(self._submit(tensor)):
                future.result()
        tensor.sink.put_columns()
        record = replace(outcome, digests=tensor.sink.digests())
        transform.accept(self._task.plan.tensors[place], record)
        self._records.append(record)
        self._done_bytes += self._task.source_bytes(place)
        self._tell(place, 0.0)
        self._fingerprints |= self._files.release(place)

    def _tell(self, place: int, share: float) -> None:
        """Tell progress: the tensors that are finished, and a share of the one at a place."""
        now = time.monotonic()
        if now - self._told >= PROGRESS_SECONDS or self._done_bytes == self._total_bytes:
            self._told = now
            done = self._done_bytes + round(self._task.source_bytes(place) * share)
            self._progress(done, self._total_bytes, self._task.plan.tensors[place].name)

    def _check_sources(self) -> None:
        """Check what the tensors were made of, of which nothing may be stated before."""
        task = self._task
        parts = {part.name: part for place in self._shard.tensors for part in task.checkpoint.tensors[place].parts}
        task.checkpoint.finish_checks(parts.values(), run=self._workers.pool.map)
        for checkpoint in task.checkpoints:
            checkpoint.storage.check_read()


class LocalEngine(Engine):
    """Makes shards with the threads of this process. See Engine."""

    threads = None

    def each(self, work: ClusterWork, numbers: Sequence[int], memory_bytes: int) -> Iterator[tuple[int, Any]]:
        """Do tasks, one after the other."""
        for number in numbers:
            yield number, work.make(number)

    def check(self, task: RewriteTask, run: Run) -> None:
        """Check that there is room on the disks. Raises OutputError."""
        check_room([result_need(task, run), *task.fetch_needs])

    def make(
        self, task: RewriteTask, run: Run, shards: Sequence[ShardPlan], options: RunOptions
    ) -> dict[str, ShardMark]:
        """Make shards, and return their marks by name. The next one is made while one is handed to the store."""
        files = SourceFiles(task, [place for shard in shards for place in shard.tensors])
        sizes = {shard.file: sum(task.source_bytes(place) for place in shard.tensors) for shard in task.plan.shards}
        total, done = sum(sizes.values()), sum(sizes.values()) - sum(sizes[shard.file] for shard in shards)
        marks: dict[str, ShardMark] = {}
        is_given_up, sent = threading.Event(), Future[None]()
        sent.set_result(None)

        def send(shard: str, path: Path, mark: ShardMark) -> None:
            run.check_lock()
            run.shards.add(shard, path, mark, is_given_up.is_set)

        def progress(shard_done: int, of: int, name: str) -> None:
            if sent.done():
                sent.result()  # raises what kept a shard from being taken over
            options.progress(done + shard_done, total, name)

        workers, sender = Workers(options.threads), ThreadPoolExecutor(1, "pqweights-store")
        try:
            # `fetching` ends before the threads do: none then waits for a file that is still to come.
            with task.checkpoint.storage.fetching(run.fetched, files.needed):
                for shard in shards:
                    path = run.shards.new_path(shard.file)
                    marks[shard.file] = make_shard(task, shard, path, workers, files, progress)
                    sent.result()
                    sent = sender.submit(send, shard.file, path, marks[shard.file])
                    done += sizes[shard.file]
                sent.result()
        finally:
            is_given_up.set()
            sender.shutdown(wait=True)
            workers.close()
        return marks
