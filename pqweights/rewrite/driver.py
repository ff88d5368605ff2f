"""The one driver: plan -> (read -> transform -> write)* -> finish. Quantizing and every export run through it."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pqweights import __version__
from pqweights.checkpoint.names import CARD_FILE, CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, WORK_FOLDER
from pqweights.checkpoint.source import Checkpoint, file_uses, most_fetched
from pqweights.checkpoint.storage import Storage, read_bytes
from pqweights.checkpoint.writer import COPY_BYTES, partial_path, sync_folder, write_whole
from pqweights.errors import OutputError, SourceError
from pqweights.kernels.devices import resolve_device
from pqweights.planning.plan import Plan, index_json, plan_shards
from pqweights.rewrite.manifest import FileRecord, Manifest, TensorRecord, read_manifest
from pqweights.rewrite.stream import Progress, Stream
from pqweights.rewrite.transform import Transform
from pqweights.rewrite.workspace import (
    FETCHED_FOLDER,
    RunIdentity,
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


@dataclass(frozen=True)
class Report:
    """What a rewrite did. already_done: the folder held the finished result; resumed: tensors taken from the journal."""

    transform: Transform
    plan: Plan
    records: tuple[TensorRecord, ...]
    already_done: bool
    resumed: int
    source_bytes_read: int


@dataclass(frozen=True)
class Lineage:
    """What a result descends from, for its manifest, which see: the original model, and the master of an export."""

    model: dict[str, Any] = field(default_factory=dict)
    master: dict[str, Any] = field(default_factory=dict)


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
        tensors,
        plan_shards(tensors, max_shard_bytes, metadata),
        checkpoint.companions,
        checkpoint.left_out,
        transform.left_out,
        metadata,
        checkpoint.weight_file_bytes,
        sum(files[name].byte_count for name in checkpoint.companions),
        max_shard_bytes,
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


def rewrite(
    checkpoint: Checkpoint,
    source: Path | None,
    transform: Transform,
    plan: Plan,
    out: Path,
    *,
    lineage: Lineage,
    threads: int,
    device: str = "cpu",
    overwrite: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> Report:
    """Fulfil a plan in the folder `out`, continuing what the same command left there, on whatever device that ran.

    source: where the checkpoint lies, None for the Hub. Raises SourceError, OutputError, HubError, DeviceError; after any of
    them no incomplete file stands under a final name.
    """
    device = resolve_device(device)
    if source is not None:
        check_paths(source, out)
    if not overwrite and (done := _finished(out, checkpoint, transform, plan, lineage)):
        for planned, record in zip(plan.tensors, done.records, strict=True):
            transform.accept(planned, record)
        tidy(out)
        return Report(transform, plan, done.records, True, len(done.records), _bytes_read(checkpoint, transform))
    check_output(out, overwrite)
    storage = checkpoint.storage
    _check_space(
        plan, out, most_fetched(file_uses(checkpoint.tensors), storage.files(), storage.frees) if storage.frees else 0
    )
    outputs = [*(shard.file for shard in plan.shards), *plan.companions, INDEX_FILE, CONFIG_FILE, MANIFEST_FILE]
    read = [*checkpoint.weight_files, *plan.companions]
    read += [name for name in (CONFIG_FILE, CARD_FILE) if name in checkpoint.storage.files()]
    inputs: dict[str, tuple[Storage, Sequence[str]]] = {"": (checkpoint.storage, read)}
    inputs |= {option: (other.storage, other.weight_files) for option, other in transform.also_reads.items()}
    # What the bytes depend on, and strictness, which decides whether they may stand.
    described = {
        "plan": [t.to_json() for t in plan.tensors],
        "shards": plan.max_shard_bytes,
        "transform": repr(transform),
        "made_by": transform.describe(),
        "lineage": vars(lineage),
        "version": __version__,
    }
    identity = RunIdentity.of(described, inputs, outputs)
    with open_workspace(out, identity, overwrite) as workspace:
        resumed = len(workspace.records)
        checkpoint.restore_fingerprints(workspace.fingerprints())
        try:
            records = Stream(checkpoint, transform, plan, workspace, threads, device, progress).run()
        except SourceError:
            workspace.discard()
            raise
        workspace.publish([shard.file for shard in plan.shards])
        with storage.fetching(workspace.fetched, dict.fromkeys(plan.companions, 1)):
            files = _write_small_files(checkpoint, transform, plan, records, workspace)
            fingerprint = checkpoint.fingerprint()
        manifest = Manifest(
            transform.kind,
            transform.describe(),
            plan.source_bytes,
            fingerprint,
            plan.max_shard_bytes,
            plan.tensors,
            records,
            files,
            plan.metadata,
            plan.left_out_tensors,
            checkpoint.storage.origin,
            lineage.model,
            lineage.master,
        )
        write_whole(workspace.folder, out / MANIFEST_FILE, [manifest.to_bytes()])
        sync_folder(out)
        workspace.finish()
    return Report(transform, plan, records, False, resumed, _bytes_read(checkpoint, transform))


def _bytes_read(checkpoint: Checkpoint, transform: Transform) -> int:
    return sum(read.storage.bytes_read for read in (checkpoint, *transform.also_reads.values()))


def _finished(out: Path, checkpoint: Checkpoint, transform: Transform, plan: Plan, lineage: Lineage) -> Manifest | None:
    """The manifest of `out` where it already is the result of this very rewrite."""
    manifest = out / MANIFEST_FILE
    if not manifest.is_file() or is_under_way(out):
        return None
    local = [c for c in (checkpoint, *transform.also_reads.values()) if c.storage.origin is None]
    stamps = [c.storage.files()[name].stamp for c in local for name in c.weight_files]
    if max(stamps, default=0) > manifest.stat().st_mtime_ns:
        return None  # the source may have changed since where its fingerprint does not look
    found = read_manifest(out)
    same = (
        found.kind == transform.kind
        and found.made_by == transform.describe()
        and (found.source_bytes, found.origin) == (plan.source_bytes, checkpoint.storage.origin)
        and (found.model, found.master) == (lineage.model, lineage.master)
        # a commit is what it was; a folder may have been exchanged
        and (found.origin is not None or found.source_fingerprint == checkpoint.fingerprint())
        and found.max_shard_bytes == plan.max_shard_bytes
        and (found.tensors, found.metadata, found.left_out) == (plan.tensors, plan.metadata, plan.left_out_tensors)
        and all((out / s.file).is_file() and (out / s.file).stat().st_size == s.file_bytes for s in plan.shards)
        and all((out / name).is_file() for name in found.files)
    )
    if not same:
        return None
    contents = _small_files(checkpoint, transform, plan, found.records)
    digests = {name: _sha256_of_pieces(pieces) for name, pieces in contents.items()}
    return found if digests == {name: record.sha256 for name, record in found.files.items()} else None


def _check_space(plan: Plan, out: Path, fetched_bytes: int) -> None:
    """Refuse a result that does not fit on the disk beside what it replaces; what it continues counts as there.

    fetched_bytes: of the source, at most at once, on the same disk.
    """
    needed = plan.output_bytes + plan.companion_bytes + fetched_bytes
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


def _small_files(
    checkpoint: Checkpoint, transform: Transform, plan: Plan, records: Sequence[TensorRecord]
) -> dict[str, Iterable[bytes]]:
    """Companions, index and configuration: name -> content in pieces."""
    contents: dict[str, Iterable[bytes]] = {name: _pieces(checkpoint, name) for name in plan.companions}
    contents[INDEX_FILE] = [json_bytes(index_json(plan.shards))]
    config = transform.config(checkpoint, plan.tensors, records)
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
    checkpoint: Checkpoint, transform: Transform, plan: Plan, records: Sequence[TensorRecord], workspace: Workspace
) -> dict[str, FileRecord]:
    """Write them, and return what the manifest says of them."""
    files = {}
    for name, pieces in _small_files(checkpoint, transform, plan, records).items():
        digest = write_whole(workspace.folder, workspace.out / name, pieces)
        files[name] = FileRecord((workspace.out / name).stat().st_size, digest)
    return files
