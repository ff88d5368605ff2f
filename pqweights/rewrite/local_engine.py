"""The shards of a run, made one after the other on this machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pqweights.checkpoint.writer import check_room
from pqweights.planning.plan import ShardPlan
from pqweights.rewrite.finished_shards import ShardMark
from pqweights.rewrite.needs import result_need
from pqweights.rewrite.run import Run
from pqweights.rewrite.shard import SourceFiles, Workers, make_shard
from pqweights.rewrite.task import Engine, RewriteTask, RunOptions


class LocalEngine(Engine):
    """Makes shards with the threads of this process. See Engine."""

    def check(self, task: RewriteTask, run: Run) -> None:
        """Check that there is room on the disks. Raises OutputError."""
        check_room([result_need(task, run), *task.fetch_needs])

    def make(
        self, task: RewriteTask, run: Run, shards: Sequence[ShardPlan], options: RunOptions
    ) -> dict[str, ShardMark]:
        """Make shards, and return their marks by name. The next one is made while one is sent elsewhere."""
        files = SourceFiles(task, [place for shard in shards for place in shard.tensors])
        total = sum(task.source_bytes(place) for place in range(len(task.plan.tensors)))
        left = sum(task.source_bytes(place) for shard in shards for place in shard.tensors)
        marks: dict[str, ShardMark] = {}
        workers, sender = Workers(options.threads), _Sender(run)
        try:
            # `fetching` ends before the threads do: none then waits for a file that is still to come.
            with task.checkpoint.storage.fetching(run.fetched, files.needed):
                for shard in shards:

                    def progress(done: int, of: int, name: str, before: int = total - left) -> None:
                        sender.check()
                        options.progress(before + done, total, name)

                    path = run.shards.new_path(shard.file)
                    mark = make_shard(task, shard, path, workers, files, progress)
                    sender.send(shard.file, path, mark)
                    marks[shard.file] = mark
                    left -= sum(task.source_bytes(place) for place in shard.tensors)
                sender.wait()
        finally:
            sender.close()
            workers.close()
        return marks


class _Sender:
    """Hands finished shards to the store, one at a time, in the background."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(1, "pqweights-store")
        self._sent: Future[None] | None = None
        self._stopped = threading.Event()

    def send(self, shard: str, path: Path, mark: ShardMark) -> None:
        """Have a shard taken over once the one before it is. Raises what kept that from being so."""
        self.wait()
        self._sent = self._thread.submit(self._send, shard, path, mark)

    def _send(self, shard: str, path: Path, mark: ShardMark) -> None:
        self._run.check_lock()
        self._run.shards.add(shard, path, mark, self._stopped.is_set)

    def check(self) -> None:
        """Raise what kept a shard from being taken over."""
        if self._sent is not None and self._sent.done():
            self._sent.result()

    def wait(self) -> None:
        """Return when the last shard is taken over."""
        if self._sent is not None:
            self._sent.result()

    def close(self) -> None:
        """End the thread; what is under way is given up."""
        self._stopped.set()
        self._thread.shutdown(wait=True)
