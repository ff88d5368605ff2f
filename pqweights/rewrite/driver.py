"""The one driver: plan -> (read -> transform -> write)* -> finish. Quantizing and every export run through it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import CARD_FILE, CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, WORK_FOLDER
from pqweights.checkpoint.source import Checkpoint, file_uses, most_fetched
from pqweights.checkpoint.storage import read_bytes
from pqweights.checkpoint.writer import COPY_BYTES, partial_path, sync_folder, write_whole
from pqweights.errors import OutputError, SourceError
from pqweights.kernels.devices import resolve_device
from pqweights.planning.plan import Plan, index_json, plan_shards
from pqweights.rewrite.identity import RunIdentity
from pqweights.rewrite.manifest import FileRecord, Manifest, TensorRecord, read_manifest
from pqweights.rewrite.stream import Stream
from pqweights.rewrite.transform import Transform
from pqweights.rewrite.workspace import (
    FETCHED_FOLDER,
    RunInputs,
    Workspace,
    check_output,
    check_paths,
    is_under_way,
    open_workspace,
    tidy,
)
from pqweights.strict_json import json_bytes

MEMORY_FLOOR_BYTES = 220_000_000
# A thread's input chunk in float32 with its temporaries, and its share of the results that wait to be collected.
MEMORY_PER_THREAD_BYTES = 32_000_000


@dataclass(frozen=True, kw_only=True)
class RewriteReport:
    """What a rewrite did. already_done: the folder held the finished result; resumed: tensors taken from the journal."""

    transform: Transform
    plan: Plan
    records: tuple[TensorRecord, ...]
    already_done: bool
    resumed: int
    source_bytes_read: int


@dataclass(frozen=True)
class Lineage:
    """What a result descends from, for its manifest: the original model, and the master of an export. See RunIdentity."""

    model: dict[str, Any] = field(default_factory=dict)
    master: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class RewriteTask:
    """A rewrite of which everything is decided. source: where the checkpoint lies, None for the Hub."""

    checkpoint: Checkpoint
    source: Path | None
    transform: Transform
    plan: Plan
    out: Path
    lineage: Lineage

    @functools.cached_property
    def identity(self) -> RunIdentity:
        """What makes another run the same as this one."""
        plan = self.plan
        return RunIdentity(
            kind=self.transform.kind,
            made_by=self.transform.describe(),
            source_bytes=plan.source_bytes,
            max_shard_bytes=plan.max_shard_bytes,
            tensors=plan.tensors,
            origin=self.checkpoint.storage.origin,
            metadata=plan.metadata,
            left_out=plan.left_out_tensors,
            model=self.lineage.model,
            master=self.lineage.master,
        )

    @property
    def bytes_read(self) -> int:
        """So far, of the checkpoint and of what is read besides."""
        read = (self.checkpoint, *self.transform.also_reads.values())
        return sum(each.storage.bytes_read for each in read)


def usable_cores() -> int:
    """The cores that this process may use."""
    # macOS has no affinity
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a task is carried out; none of this shows in the bytes.

    threads: by default one for each core. device: cpu, cuda, or auto for cuda where there is one. overwrite: replace a result
    of pqweights in the output folder. progress: called with source bytes done, source bytes in all, and the name of a tensor.
    """

    threads: int = field(default_factory=usable_cores)
    device: str = "cpu"
    overwrite: bool = False
    progress: Callable[[int, int, str], None] = lambda done, total, name: None


def make_plan(checkpoint: Checkpoint, transform: Transform, max_shard_bytes: int) -> Plan:
    """Decide everything from the headers.

    Raises SourceError or RecipeError for what cannot be done.
    """
    tensors = tuple(transform.plan(checkpoint))
    names = [spec.name for tensor in tensors for spec in tensor.stored]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"tensor {twice!r}: two tensors of the output would have this name")
    files, metadata = checkpoint.storage.files(), transform.metadata
    return Plan(
        tensors=tensors,
        shards=plan_shards(tensors, max_shard_bytes, metadata),
        companions=checkpoint.companions,
        left_out=checkpoint.left_out,
        left_out_tensors=transform.left_out,
        metadata=metadata,
        source_bytes=checkpoint.weight_file_bytes,
        companion_bytes=sum(files[name].byte_count for name in checkpoint.companions),
        max_shard_bytes=max_shard_bytes,
    )


def resource_needs(plan: Plan, threads: int) -> dict[str, int]:
    """What fulfilling a plan takes at most: peak_disk_bytes in the output folder, peak_memory_bytes of the process.

    Memory: a floor for interpreter and libraries while kernels are compiled (measured; without that it is half), what is
    under way in each thread, the parsed headers, and the largest output header.
    """
    largest_header = max((len(shard.header) for shard in plan.shards), default=0)
    memory = MEMORY_FLOOR_BYTES + threads * MEMORY_PER_THREAD_BYTES + len(plan.tensors) * 12_000 + 2 * largest_header
    json_files = 1024 * len(plan.tensors) + 65536
    return {
        "peak_disk_bytes": plan.output_bytes + plan.companion_bytes + json_files,
        "peak_memory_bytes": memory,
    }


def rewrite(task: RewriteTask, run: RunOptions) -> RewriteReport:
    """Fulfil a plan in the folder `task.out`, continuing what the same command left there, on whatever device that ran.

    Raises SourceError, OutputError, HubError, DeviceError; after any of them no incomplete file stands under a final name.
    """
    run = replace(run, device=resolve_device(run.device))
    if task.source is not None:
        check_paths(task.source, task.out)
    if not run.overwrite and (done := _finished(task)):
        for planned, record in done.pairs:
            task.transform.accept(planned, record)
        tidy(task.out)
        return _report(task, done.records, already_done=True, resumed=len(done.records))
    check_output(task.out, run.overwrite)
    _check_space(task)
    with open_workspace(task.out, _inputs(task), run.overwrite) as workspace:
        resumed = len(workspace.records)
        task.checkpoint.restore_fingerprints(workspace.fingerprints())
        records = _stream(task, workspace, run)
        workspace.publish([shard.file for shard in task.plan.shards])
        _finish(task, records, workspace)
    return _report(task, records, already_done=False, resumed=resumed)


def _report(task: RewriteTask, records: tuple[TensorRecord, ...], *, already_done: bool, resumed: int) -> RewriteReport:
    return RewriteReport(
        transform=task.transform,
        plan=task.plan,
        records=records,
        already_done=already_done,
        resumed=resumed,
        source_bytes_read=task.bytes_read,
    )


def _inputs(task: RewriteTask) -> RunInputs:
    """The files that a run reads and writes, for its journal."""
    plan, checkpoint = task.plan, task.checkpoint
    outputs = [*(shard.file for shard in plan.shards), *plan.companions, INDEX_FILE, CONFIG_FILE, MANIFEST_FILE]
    read = [*checkpoint.weight_files, *plan.companions]
    read += [name for name in (CONFIG_FILE, CARD_FILE) if name in checkpoint.storage.files()]
    files = {"": (checkpoint.storage, read)}
    files |= {option: (other.storage, list(other.weight_files)) for option, other in task.transform.also_reads.items()}
    return RunInputs.of(task.identity, files, outputs)


def _stream(task: RewriteTask, workspace: Workspace, run: RunOptions) -> tuple[TensorRecord, ...]:
    """All tensors into staged shards; what was written goes where the source turns out to be unusable."""
    try:
        return Stream(
            task.checkpoint,
            task.transform,
            task.plan,
            workspace=workspace,
            threads=run.threads,
            device=run.device,
            progress=run.progress,
        ).run()
    except SourceError:
        workspace.discard()
        raise


def _finish(task: RewriteTask, records: tuple[TensorRecord, ...], workspace: Workspace) -> None:
    """Small files, then the manifest, which makes the folder a finished one."""
    storage = task.checkpoint.storage
    with storage.fetching(workspace.fetched, dict.fromkeys(task.plan.companions, 1)):
        files = _write_small_files(task, records, workspace)
        fingerprint = task.checkpoint.fingerprint()
    manifest = Manifest(identity=task.identity, source_fingerprint=fingerprint, records=records, files=files)
    write_whole(workspace.folder, task.out / MANIFEST_FILE, [manifest.to_bytes()])
    sync_folder(task.out)
    workspace.finish()


def _finished(task: RewriteTask) -> Manifest | None:
    """The manifest of the output folder where it already is the result of this very task."""
    manifest = task.out / MANIFEST_FILE
    if not manifest.is_file() or is_under_way(task.out):
        return None
    checkpoints = (task.checkpoint, *task.transform.also_reads.values())
    local = [each for each in checkpoints if each.storage.origin is None]
    stamps = [each.storage.files()[name].stamp for each in local for name in each.weight_files]
    if max(stamps, default=0) > manifest.stat().st_mtime_ns:
        return None  # the source may have changed since where its fingerprint does not look
    found = read_manifest(task.out)
    if found.identity != task.identity or not _files_stand(task, found):
        return None
    # A commit is what it was; a folder may have been exchanged.
    if found.identity.origin is None and found.source_fingerprint != task.checkpoint.fingerprint():
        return None
    contents = _small_files(task, found.records)
    digests = {name: _sha256_of_pieces(pieces) for name, pieces in contents.items()}
    return found if digests == {name: record.sha256 for name, record in found.files.items()} else None


def _files_stand(task: RewriteTask, found: Manifest) -> bool:
    """Whether all files are there, those of tensors with their size."""
    shards = ((task.out / shard.file, shard.file_bytes) for shard in task.plan.shards)
    return all(path.is_file() and path.stat().st_size == size for path, size in shards) and all(
        (task.out / name).is_file() for name in found.files
    )


def _check_space(task: RewriteTask) -> None:
    """Refuse a result that does not fit on the disk beside what it replaces; what it continues counts as there."""
    plan, out, storage = task.plan, task.out, task.checkpoint.storage
    needed = plan.output_bytes + plan.companion_bytes
    if storage.frees:  # of the source, at most so much at once, on the same disk
        needed += most_fetched(file_uses(task.checkpoint.tensors), storage.files(), storage.frees)
    fetched = out / WORK_FOLDER / FETCHED_FOLDER
    present = sum(path.stat().st_blocks * 512 for path in fetched.iterdir()) if fetched.is_dir() else 0
    for shard in plan.shards:
        staged = out / WORK_FOLDER / shard.file
        published = [out / shard.file] if is_under_way(out) else []
        for path in (partial_path(staged), staged, *published):
            with contextlib.suppress(FileNotFoundError):  # not there, or moved on by the run that is writing
                present += path.stat().st_blocks * 512
                break
    existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > present + free:
        raise OutputError(
            f"{out}: the result needs {needed} bytes on the disk, {free} are free; free {needed - present - free} bytes more, "
            "or choose a folder on another disk"
        )


def _small_files(task: RewriteTask, records: Sequence[TensorRecord]) -> dict[str, Iterable[bytes]]:
    """Companions, index and configuration: name -> content in pieces."""
    plan = task.plan
    contents: dict[str, Iterable[bytes]] = {name: _pieces(task.checkpoint, name) for name in plan.companions}
    contents[INDEX_FILE] = [json_bytes(index_json(plan.shards))]
    config = task.transform.config(task.checkpoint, plan.tensors, records)
    if config is not None:
        contents[CONFIG_FILE] = [json_bytes(config)]
    return contents


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
    size = checkpoint.storage.files()[name].byte_count
    for offset in range(0, max(size, 1), COPY_BYTES):  # an empty one is read, too: that checks it
        yield read_bytes(checkpoint.storage, name, offset, min(COPY_BYTES, size - offset))
    checkpoint.storage.release(name)


def _sha256_of_pieces(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _write_small_files(
    task: RewriteTask, records: Sequence[TensorRecord], workspace: Workspace
) -> dict[str, FileRecord]:
    """Write them, and return what the manifest says of them."""
    files = {}
    for name, pieces in _small_files(task, records).items():
        digest = write_whole(workspace.folder, workspace.out / name, pieces)
        files[name] = FileRecord((workspace.out / name).stat().st_size, digest)
    return files
