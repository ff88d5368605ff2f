"""The one driver: plan -> (read -> transform -> write)* -> finish. Quantizing and every export run through it.

`make_plan` decides every output byte from headers; `rewrite` fulfils the plan in an output folder. The manifest is
written last: a folder with a manifest is a finished result, and in a folder without one, every file with a final name
is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence

from pqweights.checkpoint.names import CONFIG_FILE, MANIFEST_FILE
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import read_bytes
from pqweights.checkpoint.writer import COPY_BYTES
from pqweights.common.strict_json import json_pieces
from pqweights.errors import (
    ClusterError,
    MasterError,
    OutputError,
    SourceChangedError,
    SourceError,
    SourceReadError,
)
from pqweights.planning.plan import Plan, index_json
from pqweights.rewrite.differences import difference
from pqweights.rewrite.finished_shards import records_of
from pqweights.rewrite.local_engine import LocalEngine
from pqweights.rewrite.manifest import Manifest, parse_manifest, version_of
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.run import Run, check_output, open_run
from pqweights.rewrite.statement import is_under_way
from pqweights.rewrite.task import RewriteReport, RewriteTask, RunOptions
from pqweights.rewrite.transform import Preparation, Transform
from pqweights.storage import Store
from pqweights.storage.protocol import FileRecord


def make_plan(checkpoint: Checkpoint, transform: Transform, max_shard_bytes: int) -> Plan:
    """Decide from the headers every output name, shape, dtype and byte.

    Raises SourceError or RecipeError if the transform cannot be applied to the checkpoint.
    """
    tensors = tuple(transform.plan(checkpoint))
    names = [spec.name for tensor in tensors for spec in tensor.stored]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"tensor {twice!r}: two tensors of the output would have this name")
    files, container = checkpoint.storage.files(), transform.output.container(tensors, max_shard_bytes)
    return Plan(
        tensors=tensors,
        shards=container.shards(tensors, max_shard_bytes),
        companions=checkpoint.companions,
        left_out=checkpoint.left_out,
        left_out_tensors=checkpoint.left_out_tensors | dict(transform.output.left_out),
        container=container,
        source_bytes=checkpoint.weight_file_bytes,
        companion_bytes=sum(files[name].byte_count for name in checkpoint.companions),
        max_shard_bytes=max_shard_bytes,
    )


def rewrite(task: RewriteTask, options: RunOptions) -> RewriteReport:
    """Fulfil the plan of a task in its store, continuing what an interrupted run of the same task left there.

    Raises SourceError, OutputError or HubError; after any of them every file under a final name is complete.
    """
    if task.source is not None:
        task.out.check_apart(task.source)
    if not options.overwrite and (done := _finished_result(task)):
        for planned, record in done.pairs:
            task.transform.accept(planned, record)
        task.out.tidy(lambda: is_under_way(task.out))
        return _report(task, done.records, already_done=True, resumed=len(done.records))
    check_output(task.out, options.overwrite, lambda: difference(task, _manifest_in(task.out)))
    with open_run(task.out, task.statement, overwrite=options.overwrite) as run:
        resumed = sum(len(mark.records) for mark in run.marks.values())
        with _leaving_what_is_finished(run):
            records = _make_shards(task, run, options)
            task.check_sources()
            run.publish()
            _finish(task, records, run)
    return _report(task, records, already_done=False, resumed=resumed)


def _report(task: RewriteTask, records: tuple[TensorRecord, ...], *, already_done: bool, resumed: int) -> RewriteReport:
    return RewriteReport(
        transform=task.transform,
        plan=task.plan,
        records=records,
        already_done=already_done,
        resumed=resumed,
        source_bytes_read=task.bytes_read,
        unchecked=task.checkpoint.is_master and task.checkpoint.checked is None,
    )


def _finished_result(task: RewriteTask) -> Manifest | None:
    """Return the manifest in the output folder if the folder already holds the finished result of this task."""
    if MANIFEST_FILE not in task.out.names() or is_under_way(task.out):
        return None
    newest = max(_newest(checkpoint) for checkpoint in task.checkpoints)
    if newest > task.out.modified(MANIFEST_FILE):
        return None  # the source may have changed since, in bytes that its fingerprint does not cover
    found = _manifest_in(task.out)
    if found.identity.decisive != task.identity.decisive or not _all_files_exist(task, found):
        return None
    # The content of a commit never changes; that of a local folder may.
    if found.identity.origin is None and found.source_fingerprint != task.checkpoint.fingerprint():
        return None
    contents = _small_files(task, found.records)
    digests = {name: _sha256_of_pieces(pieces) for name, pieces in contents.items()}
    # What the transform adds follows from its account of itself, which the manifests have in common.
    stated = {name: record.sha256 for name, record in found.files.items() if name not in task.small_files}
    return found if digests == stated and task.small_files.keys() <= found.files.keys() else None


def _newest(checkpoint: Checkpoint) -> int:
    """Return when the last weight file was changed, in nanoseconds since 1970; those of a commit never are."""
    storage = checkpoint.storage
    times = (storage.files()[name].modified for name in checkpoint.weight_files)
    return max(times, default=0) if storage.origin is None else 0


def _manifest_in(store: Store) -> Manifest:
    """Read the manifest of a store that has one. Raises MasterError."""
    data = store.read(MANIFEST_FILE)
    if data is None:
        raise MasterError(f"{store}: {MANIFEST_FILE} was removed while it was read; run the same command again")
    return parse_manifest(data)


def _all_files_exist(task: RewriteTask, found: Manifest) -> bool:
    """Whether all files of a result exist, and its shards have the sizes of the plan."""
    shards = {shard.file: shard.file_bytes for shard in task.plan.shards}
    sizes = task.out.sizes()
    return all(sizes.get(name) == size for name, size in shards.items()) and found.files.keys() <= sizes.keys()


def _make_shards(task: RewriteTask, run: Run, options: RunOptions) -> tuple[TensorRecord, ...]:
    """Make the shards that are not finished, and return the records of all tensors.

    Content that no run can use is found again by every run over the same files, so a run that began here removes what
    it wrote. One that continues another leaves that, and a read that failed leaves what was finished before.
    """
    engine = options.engine or LocalEngine()
    plans = {planned.name: planned for planned in task.plan.tensors}
    marks = dict(run.marks)
    try:
        engine.check(task, run)
        for mark in marks.values():
            task.checkpoint.restore_fingerprints(dict(mark.fingerprints))
            for record in mark.records:
                task.transform.accept(plans[record.name], record)
        preparation = Preparation(
            folder=run.folder, fetched=run.fetched, threads=options.threads, progress=options.progress
        )
        task.transform.prepare(preparation)
        marks |= engine.make(task, run, [shard for shard in task.plan.shards if shard.file not in marks], options)
        task.finish_checks()
    except (SourceError, MasterError, ClusterError, OutputError) as error:
        may_pass = not isinstance(error, SourceError | MasterError) or isinstance(
            error, SourceReadError | SourceChangedError
        )
        if not (run.holds_work() if may_pass else run.marks):
            run.discard()
        raise
    return records_of((shard.file for shard in task.plan.shards), marks)


@contextlib.contextmanager
def _leaving_what_is_finished(run: Run) -> Iterator[None]:
    """Say what to do if the source changed after tensors were finished.

    They were all made of the files that the journal states: what has changed is checked before each is recorded. So
    they count as long as the files are those, and no run mixes them with tensors of others.
    """
    try:
        yield
    except SourceChangedError as error:
        if not is_under_way(run.store):
            raise
        raise SourceChangedError(
            f"{error}, with `overwrite` for the files as they are now: what is finished was made of the former ones, "
            "and stays for them"
        ) from None


def _finish(task: RewriteTask, records: tuple[TensorRecord, ...], run: Run) -> None:
    """Write the small files, then the manifest, which marks the folder as finished."""
    storage = task.checkpoint.storage
    with storage.fetching(run.fetched, dict.fromkeys(task.plan.companions, 1)):
        files = _write_small_files(task, records, run)
        fingerprint = task.checkpoint.fingerprint()
        task.check_sources()  # after everything was read, and before anything states what it was
    fold = task.transform.inputs.fold
    manifest = Manifest(
        identity=task.identity,
        source_fingerprint=fingerprint,
        records=records,
        files=files,
        factors=None if fold is None else fold.digest(),
        version=version_of(task.identity),
    )
    run.complete(manifest.to_pieces())


def _write_small_files(task: RewriteTask, records: Sequence[TensorRecord], run: Run) -> dict[str, FileRecord]:
    """Write the files without tensors, and return what the manifest states about each."""
    contents = {**_small_files(task, records), **{name: [content()] for name, content in task.small_files.items()}}
    return {name: run.store.write(name, pieces) for name, pieces in contents.items()}


def _small_files(task: RewriteTask, records: Sequence[TensorRecord]) -> dict[str, Iterable[bytes]]:
    """Return companions, index and configuration: the content of each, in pieces, by name."""
    plan = task.plan
    contents: dict[str, Iterable[bytes]] = {name: _pieces(task.checkpoint, name) for name in plan.companions}
    if plan.container.index_file is not None:
        contents[plan.container.index_file] = json_pieces(index_json(plan.shards))
    if (config := task.transform.output.config) is not None:
        contents[CONFIG_FILE] = json_pieces(config(task.checkpoint, plan.tensors, records))
    return contents


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
    size = checkpoint.storage.files()[name].byte_count
    for offset in range(0, max(size, 1), COPY_BYTES):  # an empty file is read, too, which checks that it is there
        yield read_bytes(checkpoint.storage, name, offset, min(COPY_BYTES, size - offset))
    checkpoint.storage.release(name)


def _sha256_of_pieces(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
