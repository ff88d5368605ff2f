"""The shards of a plan, made by the threads of one process: chunk by chunk, into files that the store takes over.

A bounded number of chunks is under way at a time, so memory grows neither with the checkpoint nor with its largest
tensor. A thread reads, computes, hashes and writes its chunks. Errors are added up in the order of the chunks, and
tensors finished in that of the plan, so nothing depends on the number of threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pqweights.checkpoint.readers import file_uses
from pqweights.checkpoint.shard_file import ShardFile
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.threads import Progress
from pqweights.convert.jobs import Job
from pqweights.convert.plan import Plan
from pqweights.convert.records import TensorRecord
from pqweights.convert.run import Mark, Run
from pqweights.planning.layout import ShardPlan, in_groups, in_making_order, indices_together

# Beside the threads that compute: those that wait for the disk meanwhile.
WAITING_THREADS = 2
# Chunks are given to a thread in batches, which cost the main thread as much as a chunk: of this many, while there are
# so many source bytes left for the thread for each of them. So all threads have something to do until the end.
BATCH_CHUNKS, BYTES_LEFT_PER_CHUNK = 4, 1 << 25
# Progress is told at most this often.
PROGRESS_SECONDS = 0.1

# Jobs that read the same chunks of the same tensor, for one file or for several: the index in the plan, the job and the
# file of each.
Parts = Sequence[tuple[int, Job, ShardFile]]
# For each chunk, what `write` of each job returned.
Results = list[list[Any]]
Batch = tuple[range, Future[Results]]


def make_shards(
    plan: Plan,
    run: Run,
    shards: Sequence[ShardPlan],
    *,
    threads: int,
    progress: Progress,
    fetched: Path | None = None,
    made: Container[str] = (),
) -> dict[str, Mark]:
    """Make shards, those of a group together, and return their marks by name.

    threads: how many compute
    progress: called with the source bytes done, the source bytes in all, and the name of a tensor
    fetched: where fetched files of the source lie; by default where the run keeps them
    made: the shards that are finished, which progress counts

    Raises SourceError if the source cannot deliver the tensors or is not what it was, StrictError if the result is not
    to be accepted, OutputError for a disk error.
    """
    storage, tell = plan.checkpoint.storage, _telling(plan, made, progress)
    needed, first_uses, last_uses = _uses_of_files(plan, in_making_order(shards))
    marks: dict[str, Mark] = {}
    with (
        contextlib.closing(Workers(threads)) as workers,
        # It ends before the threads do: none then waits for a file that is still to come.
        storage.fetching(fetched or run.fetched, needed),
    ):
        for group in in_groups(shards):
            records, fingerprints = dict[int, TensorRecord](), dict[str, str]()
            with _files_of(group, run, workers) as files:
                with contextlib.closing(_under_way(plan, group, files, first_uses, workers)) as under_way:
                    for parts, batch in under_way:
                        workers.check_sent()
                        if batch is not None:
                            chunks, results = batch
                            _collect(parts, results.result())
                            if chunks.stop < (total := parts[0][1].chunks):
                                tell(parts[0][0], chunks.stop / total)
                            continue
                        for index, job, file in parts:
                            records[index] = _finished(plan, workers, index, job, file)
                            tell(index, 1)
                            fingerprints |= _released(plan.checkpoint, last_uses.pop(index, ()))
                for file in files:
                    file.finish()
                _check_sources(plan, group, workers)
            of_group = {shard.file: (tuple(records[index] for index in shard.tensors), fingerprints) for shard in group}
            paths = {name: file.path for name, file in zip(of_group, files, strict=True)}
            workers.send(partial(_hand_over, run, paths, of_group))
            marks |= of_group
        workers.check_sent(wait=True)
    return marks


def _under_way(
    plan: Plan,
    group: Sequence[ShardPlan],
    files: Sequence[ShardFile],
    first_uses: Container[int],
    workers: Workers,
) -> Generator[tuple[Parts, Batch | None]]:
    """Give the chunks of the tensors of a group to the threads, and yield what is to be waited for, the oldest first.

    After the last batch of a tensor it comes without one.

    first_uses: the tensors that may have to wait until earlier ones have let go of files
    """
    under_way: deque[tuple[Parts, Batch | None]] = deque()
    left = sum(map(plan.source_bytes_of, in_making_order(group)))
    try:
        for indices in indices_together(group):
            if any(index in first_uses for index in indices):
                while under_way:
                    yield under_way.popleft()
            made = []
            for index, file in zip(indices, files, strict=True):
                planned = plan.tensors[index]
                file.begin(of.name for of in planned.stored)
                made.append((index, plan.encode(planned, plan.checkpoint.tensors[index]), file))
            for parts in _reading_alike(made):
                for batch in workers.batches(parts, left):
                    under_way.append((parts, batch))
                    while len(under_way) > workers.most_batches:
                        yield under_way.popleft()
                under_way.append((parts, None))
            left -= sum(map(plan.source_bytes_of, indices))
        while under_way:
            yield under_way.popleft()
    finally:
        for _, left_over in under_way:
            if left_over is not None:
                left_over[1].cancel()


def _collect(parts: Parts, results: Results) -> None:
    """Have the jobs collect the results of chunks."""
    for of_chunk in results:
        for (_, job, _), result in zip(parts, of_chunk, strict=True):
            job.collect(result)


def _reading_alike(made: Parts) -> Iterable[Parts]:
    """Return jobs in groups that read alike."""
    alike: dict[object, list[tuple[int, Job, ShardFile]]] = {}
    for index, job, file in made:
        alike.setdefault(index if job.reads is None else job.reads, []).append((index, job, file))
    return alike.values()


def _finished(plan: Plan, workers: Workers, index: int, job: Job, file: ShardFile) -> TensorRecord:
    """Make the further passes that a job asks for, and return what was measured of the tensor."""
    stored = [of.name for of in plan.tensors[index].stored]
    while not isinstance(outcome := job.finish(), TensorRecord):
        job = outcome
        file.begin(stored)
        parts = [(index, job, file)]
        for _, results in list(workers.batches(parts)):
            _collect(parts, results.result())
    record = replace(outcome, digests=file.finish_tensors(stored))
    plan.accept(plan.tensors[index], record)
    return record


def _check_sources(plan: Plan, group: Sequence[ShardPlan], workers: Workers) -> None:
    """Check what the tensors were made of, of which nothing may be stated before."""
    indices = in_making_order(group)
    parts = {part.name: part for index in indices for part in plan.checkpoint.tensors[index].parts}
    plan.checkpoint.finish_checks(parts.values(), run=workers.pool.map)
    for checkpoint in plan.checkpoints:
        checkpoint.storage.check_read()


@contextlib.contextmanager
def _files_of(group: Sequence[ShardPlan], run: Run, workers: Workers) -> Iterator[list[ShardFile]]:
    """Begin the files of a group; they go if they are not finished."""
    files = [run.begin(shard, workers.waiting) for shard in group]
    is_whole = False
    try:
        yield files
        is_whole = True
    finally:
        for file in () if is_whole else files:
            workers.give_up(file)
            file.path.unlink(missing_ok=True)


def _hand_over(run: Run, paths: Mapping[str, Path], marks: Mapping[str, Mark], is_ending: Callable[[], bool]) -> None:
    """Hand the complete files of shards to the store."""
    for shard, path in paths.items():
        run.add(shard, path, marks[shard], is_ending)


class Workers:
    """The threads that make chunks, of which a number computes while some wait, and one that hands over what is made.

    threads: how many compute
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.most_batches = 2 * threads + WAITING_THREADS  # under way at a time
        self.pool = ThreadPoolExecutor(threads + WAITING_THREADS, "pqweights")
        self._turns = threading.Semaphore(threads)
        self._thread = threading.local()
        self._sender, self._sent = ThreadPoolExecutor(1, "pqweights-store"), list[Future[None]]()
        self._ending = threading.Event()
        self._given_up: list[ShardFile] = []

    def batches(self, parts: Parts, bytes_left: int = 0) -> Iterator[Batch]:
        """Give batches of chunks to the threads, one by one. bytes_left: of the source, for all threads"""
        step = max(1, min(BATCH_CHUNKS, bytes_left // (self._threads * BYTES_LEFT_PER_CHUNK)))
        chunks = parts[0][1].chunks
        for begin in range(0, chunks, step):
            batch = range(begin, min(begin + step, chunks))
            yield batch, self.pool.submit(self._make, parts, batch)

    def _make(self, parts: Parts, batch: range) -> Results:
        """Make some chunks one after the other, each read once and written for all jobs."""
        _, job, file = parts[0]
        results = []
        self._thread.computes = True
        with self._turns:
            for chunk in batch:
                values, of_chunk = job.read(chunk, file), []
                for _, own, to in parts:
                    of_chunk.append(own.write(chunk, values, to))
                results.append(of_chunk)
        return results

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

    def send(self, hand_over: Callable[[Callable[[], bool]], None]) -> None:
        """Hand over what is made, once what was made before is handed over. hand_over: asks whether it is to end"""
        self.check_sent(wait=True)
        self._sent.append(self._sender.submit(hand_over, self._ending.is_set))

    def check_sent(self, *, wait: bool = False) -> None:
        """Raise what kept a shard from being handed over. wait: for the last one"""
        if self._sent and (wait or self._sent[-1].done()):
            self._sent.pop().result()

    def give_up(self, file: ShardFile) -> None:
        """Close a file when no thread writes to it any more; one may be waiting for a source that does not answer."""
        self._given_up.append(file)

    def close(self) -> None:
        """End the threads; chunks that none has begun are dropped."""
        self._ending.set()
        self._sender.shutdown(wait=True)
        self.pool.shutdown(wait=True, cancel_futures=True)
        for file in self._given_up:
            file.close()


def _uses_of_files(plan: Plan, indices: Sequence[int]) -> tuple[dict[str, int], set[int], dict[int, list[str]]]:
    """Return when the fetched files of a source are used while tensors are read in this order.

    Returns how many files are needed together when each is first read, in the order of reading; the tensors for which
    one is first read, if earlier ones are let go of; and the files that are let go of after a tensor.
    """
    storage = plan.checkpoint.storage
    uses = {} if storage.origin is None else file_uses([plan.checkpoint.tensors[index] for index in indices])
    last_uses: dict[int, list[str]] = {}
    for file, use in uses.items():
        last_uses.setdefault(indices[use.last], []).append(file)
    first_uses = {indices[use.first] for use in uses.values()} if storage.frees else set[int]()
    return {file: use.together for file, use in uses.items()}, first_uses, last_uses


def _released(checkpoint: Checkpoint, files: Sequence[str]) -> dict[str, str]:
    """Let go of files that no tensor reads any more, and return their fingerprints.

    Raises MasterError if what was read of them is damaged, SourceChangedError if they were changed meanwhile.
    """
    if files:
        checkpoint.finish_checks(part for part in checkpoint.stored if part.file in files)
        checkpoint.storage.check_read()
    fingerprints = {file: checkpoint.file_fingerprint(file) for file in files}
    for file in files:
        checkpoint.storage.release(file)
    return fingerprints


def _telling(plan: Plan, made: Container[str], progress: Progress) -> Callable[[int, float], None]:
    """Return what tells, a few times in a second at most, how many bytes of the source are done, of all shards.

    It is called with a tensor, by its index, and its share that is done; with all of it once.

    made: the shards that are finished
    """
    total = sum(map(plan.source_bytes_of, in_making_order(plan.shards)))
    finished = (shard for shard in plan.shards if shard.file in made)
    done = sum(map(plan.source_bytes_of, (index for shard in finished for index in shard.tensors)))
    told = time.monotonic()

    def tell(index: int, share: float) -> None:
        nonlocal done, told
        now, part = time.monotonic(), round(plan.source_bytes_of(index) * share)
        done += part if share == 1 else 0
        if now - told >= PROGRESS_SECONDS or done == total:
            told = now
            progress(done if share == 1 else done + part, total, plan.tensors[index].name)

    return tell
