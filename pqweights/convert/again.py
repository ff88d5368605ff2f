"""A conversion made once more, of which nothing stays but what its manifest would state."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pqweights.checkpoint.ahead import Stop
from pqweights.checkpoint.shard_file import Bytes, ShardFile
from pqweights.convert.conversion import Conversion
from pqweights.convert.convert import stated
from pqweights.convert.manifest import Manifest
from pqweights.convert.run import Run, ShardMark
from pqweights.convert.shard import make_shards
from pqweights.convert.task import RunOptions
from pqweights.planning.plan import ShardPlan
from pqweights.storage import Store
from pqweights.storage.store import default_scratch, make_scratch


def made_again(conversion: Conversion, store: Store, options: RunOptions) -> Manifest:
    """Make every tensor and every file of a result, hash them, and return the manifest of that result.

    store: a folder on this machine for what waits on the disk meanwhile, which the caller removes: fetched files of the
        source, columns of weights, and the files without tensors

    Raises SourceError, MasterError, OutputError or HubError.
    """
    run = _Unkept(store=store, key="again", shards={}, marks={}, journal=conversion.journal)
    run.folder.mkdir(parents=True, exist_ok=True)
    conversion.learn(options.progress)
    shards = conversion.plan.shards
    marks = make_shards(conversion, run, shards, threads=options.threads, progress=options.progress)
    conversion.finish_checks()
    records = tuple(record for shard in shards for record in marks[shard.file].records)
    manifest = stated(conversion, run, records)
    options.check()
    return manifest


@contextlib.contextmanager
def unkept_store() -> Iterator[Store]:
    """Yield a store in a folder that goes in the end."""
    scratch = default_scratch()
    make_scratch(scratch)
    with tempfile.TemporaryDirectory(prefix="again-", dir=scratch) as folder:
        yield Store(Path(folder))


class _Unkept(Run):
    """A run that keeps no shard."""

    def begin(self, shard: ShardPlan) -> ShardFile:
        """Return a file that takes bytes and keeps none."""
        return _Hashed(self.folder / Path(shard.file).name)

    def add(self, shard: str, path: Path, mark: ShardMark, stop: Stop) -> None:
        """Keep nothing: the mark says what was made."""


class _Hashed(ShardFile):
    """A file of which nothing is written: a sink hashes what comes before it is."""

    def __init__(self, path: Path) -> None:
        """Name it: columns are gathered beside it."""
        self.path = path

    def write(self, offset: int, data: Bytes) -> None:
        """Write nothing."""

    def finish(self) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""
