"""Verify: every stored byte of a finished folder against its manifest, index, headers, configuration and plan."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.companions import outside
from pqweights.checkpoint.digests import KEY, digests_of_pieces, hash_of_pieces, parts_of, pieces_of
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.names import (
    CARD_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    PICTURE_FILE,
    WORK_FOLDER,
    is_inside,
)
from pqweights.checkpoint.source import open_files
from pqweights.checkpoint.storage import Storage, read_bytes, read_file
from pqweights.checkpoint.unfinished import describe_interrupted
from pqweights.checkpoint.writer import sha256_of
from pqweights.common.strict_json import json_pieces
from pqweights.common.threads import Progress, no_progress
from pqweights.convert.listed_files import config_problems
from pqweights.convert.manifest import MOST_BYTES, Manifest, container_of, manifests_beside, read_manifest, shards_of
from pqweights.errors import MasterError, PqweightsError, StorageError
from pqweights.planning.layout import QUANTIZE, ShardPlan, index_json
from pqweights.results.evaluation_record import read_records
from pqweights.targets import EXPORTS, get_target, target_name

# The keys under which a manifest says how a result was made; an export's also has the options of its target.
MADE_BY_KEYS = {
    "master": {"adapters", "leave_out", "recipe", "calibrated", "awq", "fit"},
    "export": {"adapters", "leave_out", "target", "results", "master_errors", "calibration"},
}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The outcome of a verification.

    tensors, files, bytes: how many were checked; what is missing or has another size is not counted
    problems: one line each
    unlisted: the files of the folder that are not in the manifest, which are among the problems
    """

    tensors: int
    files: int
    bytes: int
    problems: tuple[str, ...]
    unlisted: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the folder has no problems."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return what `verify --json` prints."""
        checked = {"tensors": self.tensors, "files": self.files, "bytes": self.bytes}
        return {"ok": self.ok, "checked": checked, "problems": list(self.problems)}


def verify(
    result: Path | Storage,
    *,
    threads: int,
    beside: Sequence[str] = (),
    sent: Container[str] = (),
    progress: Progress = no_progress,
) -> Verification:
    """Check a master or an export.

    result: a folder on this machine, or one anywhere
    threads: how many threads compute hashes
    beside: files that are only in the repository from which the folder was fetched
    sent: files with tensors that the run that made them has sent to a repository; they are not looked at
    progress: called with the bytes checked, the bytes in all, and the name of a tensor

    Raises MasterError if the folder has no readable manifest, StorageError if a folder in object storage cannot be
    read; everything else is a problem in the result.
    """
    manifest = read_manifest(result)
    storage = Storage(result) if isinstance(result, Path) else result
    shards = shards_of(manifest)
    here = [shard for shard in shards if shard.file not in sent]
    damaged = {shard.file: problem for shard in here if (problem := _check_header(storage, shard)) is not None}
    good = [shard for shard in here if shard.file not in damaged]
    wrong = _check_hashes(storage, manifest, good, threads, progress)
    problems = [*_check_state(storage, manifest), *damaged.values(), *wrong]
    problems += _check_index(storage, manifest, shards)
    of_files = dict(_check_files(storage, manifest))
    problems += of_files.values()
    unlisted = tuple(_unlisted(storage, manifest, shards=shards, beside=beside))
    problems += [*(f"{name}: is not in the manifest" for name in unlisted), *_check_records(storage)]
    if manifest.kind == "master" and not (damaged or wrong or CONFIG_FILE in of_files):
        problems += _check_config(storage, manifest)
    hashed = {stored.name for shard in good for stored in shard.stored}
    files = [record.bytes for name, record in manifest.files.items() if _size_of(storage, name) == record.bytes]
    return Verification(
        tensors=sum(all(spec.name in hashed for spec in tensor.stored) for tensor in manifest.tensors),
        files=len(good) + len(files),
        bytes=sum(shard.file_bytes for shard in good) + sum(files),
        problems=tuple(dict.fromkeys(problems)),  # opening the folder may find one again
        unlisted=unlisted,
    )


def _check_header(storage: Storage, shard: ShardPlan) -> str | None:
    """Say what is wrong with the size or the header of a file; None if nothing is."""
    size = _size_of(storage, shard.file)
    if size is None:
        return f"{shard.file}: missing"
    if size != shard.file_bytes:
        return f"{shard.file}: expected {shard.file_bytes} bytes, found {size}"
    header = read_bytes(storage, shard.file, 0, shard.header_bytes)
    if header != shard.header and hashlib.sha256(header).hexdigest() != shard.header_sha256:
        return f"{shard.file}: the header is not the one that the manifest plans"
    return None


def _check_hashes(
    storage: Storage, manifest: Manifest, shards: Sequence[ShardPlan], threads: int, progress: Progress
) -> list[str]:
    """Return the tensors in some files whose hash is another than the manifest states, a line each."""
    stored = [tensor for shard in shards for tensor in shard.stored]
    expected = {name: digest for record in manifest.records for name, digest in record.digests.items()}
    work = [(tensor, *part) for tensor in stored for part in parts_of(tensor.byte_count)]

    def of_part(part: tuple[StoredTensor, int, int]) -> bytes:
        tensor, begin, end = part
        return digests_of_pieces(pieces_of(storage, tensor.file, tensor.offset + begin, end - begin))

    total, done = sum(tensor.byte_count for tensor in stored), 0
    wrong: list[str] = []
    digests: list[bytes] = []
    with ThreadPoolExecutor(threads) as pool:
        for (tensor, begin, end), digest in zip(work, pool.map(of_part, work), strict=True):
            digests.append(digest)
            done += end - begin
            progress(done, total, tensor.name)
            if end == tensor.byte_count:
                whole, digests = hash_of_pieces(digests), []
                if whole != expected[tensor.name]:
                    differs = f"{KEY}: expected {expected[tensor.name]}, found {whole}"
                    wrong.append(f"{tensor.file}: tensor {tensor.name!r}: {differs}")
    return wrong


def _size_of(storage: Storage, name: str) -> int | None:
    """Return the size of a file in the folder in bytes; None if there is none of this name."""
    state = storage.files().get(name)
    return None if state is None else state.byte_count


def _check_state(storage: Storage, manifest: Manifest) -> Iterator[str]:
    """Check that the manifest is as pqweights writes it, and that no run is unfinished."""
    if not _is(storage, MANIFEST_FILE, manifest.to_pieces()):
        yield f"{MANIFEST_FILE}: is not what pqweights writes for these tensors: its sums or sizes were changed"
    yield from _check_made_by(manifest)
    if (journal := storage.journal_line()) is not None:
        yield f"{WORK_FOLDER}: the folder {describe_interrupted(journal)}"


def _is(storage: Storage, name: str, pieces: Iterable[bytes]) -> bool:
    """Whether the pieces, one after the other, are the content of a file."""
    content, at = memoryview(read_file(storage, name, limit=MOST_BYTES)), 0
    for piece in pieces:
        if content[at : at + len(piece)] != piece:
            return False
        at += len(piece)
    return at == len(content)


def _check_made_by(manifest: Manifest) -> Iterator[str]:
    """Check that what the manifest says about how it was made has the keys of its kind, and of its target."""
    known = MADE_BY_KEYS[manifest.kind]
    if manifest.kind == "export":
        stated = manifest.made_by["target"]
        target = target_name(stated)
        if target is None:
            yield f"{MANIFEST_FILE}: target: expected one of {', '.join(EXPORTS)}, found {str(stated)[:80]!r}"
            return
        chosen = get_target(target)
        known = {*known, *chosen.options, *chosen.stated}
    results = manifest.made_by.get("results")
    of_results = (key for of in results.values() for key in of) if isinstance(results, dict) else ()
    for key in (*manifest.made_by, *of_results):
        if key not in known:
            yield f"{MANIFEST_FILE}: expected {', '.join(sorted(known))}, found {key[:80]!r}"


def _check_index(storage: Storage, manifest: Manifest, shards: tuple[ShardPlan, ...]) -> Iterator[str]:
    """Check the index, and the names in the manifest."""
    for file in container_of(manifest).index_files:
        index = index_json(shards, file.removesuffix(INDEX_FILE))
        if file in storage.files() and not _is(storage, file, json_pieces(index)):
            yield f"{file}: is not the index of the tensors in the manifest"
    names = [tensor.name for tensor in manifest.tensors]
    for tensor in manifest.tensors:
        for spec in tensor.stored:
            if tensor.action == QUANTIZE and not spec.name.startswith(tensor.name.removesuffix("weight")):
                yield f"{MANIFEST_FILE}: tensor {tensor.name!r} lists the foreign name {spec.name!r}"
    if len(set(names)) != len(names):
        yield f"{MANIFEST_FILE}: a tensor is there twice"


def _check_files(storage: Storage, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Check the files without tensors; yield what is wrong with each of them."""
    for file in container_of(manifest).index_files:
        if file not in manifest.files:
            yield file, f"{MANIFEST_FILE}: does not list {file}"
    for name, record in manifest.files.items():
        size = _size_of(storage, name)
        if not is_inside(name):
            yield name, f"{MANIFEST_FILE}: lists {name!r}, which lies outside the folder"
        elif name in storage.outside_links:
            yield name, outside(name)
        elif size is None:
            yield name, f"{name}: missing"
        elif size != record.bytes:
            yield name, f"{name}: expected {record.bytes} bytes, found {size}"
        elif (digest := sha256_of(read.data for read in pieces_of(storage, name, 0, size))) != record.sha256:
            yield name, f"{name}: sha256: expected {record.sha256}, found {digest}"


def _unlisted(
    storage: Storage, manifest: Manifest, *, shards: tuple[ShardPlan, ...], beside: Sequence[str]
) -> Iterator[str]:
    """Yield files that are not listed, here or by the manifests of other exports that were pushed beside this one.

    A card and figures may be added; hidden files belong to version control.
    """
    known = {shard.file for shard in shards} | set(manifest.files)
    known |= {MANIFEST_FILE, CARD_FILE, EVALUATION_FILE, PICTURE_FILE}
    known |= {name for other in manifests_beside(storage) for name in other}
    for name in sorted({*storage.files(), *storage.outside_links, *beside} - known):
        if not any(part.startswith(".") for part in name.split("/")):
            yield name


def _check_records(storage: Storage) -> Iterator[str]:
    """Check the figures of evaluations."""
    try:
        read_records(storage, "")
    except MasterError as error:
        yield str(error)


def _check_config(storage: Storage, manifest: Manifest) -> Iterator[str]:
    """Check that the configuration describes the weights as the manifest does."""
    try:
        checkpoint = open_files(storage)
    except StorageError:
        raise
    except PqweightsError as error:
        yield str(error)
        return
    if not checkpoint.is_master or checkpoint.config is None:
        yield f"{CONFIG_FILE}: has no quantization_config of pqweights"
        return
    yield from config_problems(checkpoint.config["quantization_config"], checkpoint.tensors, manifest)
