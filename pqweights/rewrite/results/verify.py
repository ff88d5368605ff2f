"""Verify: every stored byte of a finished folder against its manifest, index, headers, configuration and plan.

The checks of files with tensors can be sent to other processes, part by part; `joined` puts together what they found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.checkpoint.companions import outside
from pqweights.checkpoint.digests import SHA256, TensorHash, pieces_of
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.master import Encoding
from pqweights.checkpoint.names import (
    CARD_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    WORK_FOLDER,
    is_inside,
)
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_folder
from pqweights.checkpoint.storage import LocalStorage, Storage, describe_interrupted, read_bytes, read_file
from pqweights.common.strict_json import json_pieces
from pqweights.errors import MasterError, PqweightsError, StorageError
from pqweights.exports import EXPORTS, get_target, target_name
from pqweights.planning.plan import QUANTIZE, ShardPlan, index_json
from pqweights.quantizing import encodings
from pqweights.rewrite.manifest import MOST_BYTES, Manifest, read_manifest, shards_of
from pqweights.rewrite.results.evaluation_record import read_records

Progress = Callable[[int, int, str], None]  # bytes checked, bytes in all, name of the tensor


class ShardFindings(NamedTuple):
    """What checks found.

    good: the files whose size and header are right
    damaged: the others, a line each, in order
    wrong: tensors with another hash, in files that are good, a line each, in order
    """

    good: tuple[str, ...]
    damaged: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ShardChecks:
    """Files that are to be checked.

    storage: where they lie
    shards: the files
    tensor_hash: the hash of tensors in the manifest
    digests: the hash that each stored tensor must have, by name
    """

    storage: Storage
    shards: tuple[ShardPlan, ...]
    tensor_hash: TensorHash
    digests: dict[str, str]

    def part(self, files: Collection[str]) -> ShardChecks:
        """Return the checks of some of the files, which are in the same order whatever that of `files`."""
        shards = tuple(shard for shard in self.shards if shard.file in files)
        names = {stored.name for shard in shards for stored in shard.stored}
        return replace(
            self, shards=shards, digests={name: self.digests[name] for name in self.digests if name in names}
        )

    def run(self, threads: int, progress: Progress = lambda done, total, name: None) -> ShardFindings:
        """Check the files.

        threads: how many threads compute hashes
        progress: called with the bytes hashed, the bytes in all, and the name of a tensor

        Raises StorageError if they cannot be read.
        """
        damaged = {shard.file: problem for shard in self.shards if (problem := self._problem(shard)) is not None}
        good = tuple(shard for shard in self.shards if shard.file not in damaged)
        wrong = self._wrong_hashes(good, threads, progress)
        return ShardFindings(tuple(shard.file for shard in good), tuple(damaged.values()), tuple(wrong))

    def _problem(self, shard: ShardPlan) -> str | None:
        """Check the size and the header of a file, whose bytes follow from the manifest."""
        state = self.storage.files().get(shard.file)
        if state is None:
            return f"{shard.file}: missing"
        if state.byte_count != shard.file_bytes:
            return f"{shard.file}: expected {shard.file_bytes} bytes, found {state.byte_count}"
        header = read_bytes(self.storage, shard.file, 0, shard.header.byte_count)
        if header != shard.header.content and hashlib.sha256(header).hexdigest() != shard.header.sha256:
            return f"{shard.file}: the header is not the one that the manifest plans"
        return None

    def _wrong_hashes(self, shards: Sequence[ShardPlan], threads: int, progress: Progress) -> list[str]:
        """Check the hash of every tensor in some files."""
        tensor_hash, stored = self.tensor_hash, [tensor for shard in shards for tensor in shard.stored]
        work = [(tensor, *part) for tensor in stored for part in tensor_hash.parts(tensor.byte_count)]

        def of_part(part: tuple[StoredTensor, int, int]) -> bytes:
            tensor, begin, end = part
            return tensor_hash.of_part(pieces_of(self.storage, tensor.file, tensor.offset + begin, end - begin))

        total, done = sum(tensor.byte_count for tensor in stored), 0
        wrong: list[str] = []
        digests: list[bytes] = []
        with ThreadPoolExecutor(threads) as pool:
            for (tensor, begin, end), digest in zip(work, pool.map(of_part, work), strict=True):
                digests.append(digest)
                done += end - begin
                progress(done, total, tensor.name)
                if end == tensor.byte_count:
                    whole, digests = tensor_hash.combined(digests), []
                    expected = self.digests[tensor.name]
                    if whole != expected:
                        differs = f"{tensor_hash.key}: expected {expected}, found {whole}"
                        wrong.append(f"{tensor.file}: tensor {tensor.name!r}: {differs}")
        return wrong


def shard_checks(storage: Storage, manifest: Manifest, shards: tuple[ShardPlan, ...]) -> ShardChecks:
    """Return the checks of all files with tensors of a result."""
    digests = {name: digest for record in manifest.records for name, digest in record.digests.items()}
    return ShardChecks(storage=storage, shards=shards, tensor_hash=manifest.tensor_hash, digests=digests)


def joined(parts: Sequence[ShardFindings]) -> ShardFindings:
    """Put together what the checks of all parts found, in the order of the files."""
    return ShardFindings(
        tuple(name for part in parts for name in part.good),
        tuple(line for part in parts for line in part.damaged),
        tuple(line for part in parts for line in part.wrong),
    )


RunChecks = Callable[[ShardChecks, int, Progress], ShardFindings]  # with so many threads

# The keys under which a manifest says how a result was made; an export's also has the options of its target.
ACCOUNT_KEYS = {
    "master": {"recipe", "awq", "fit", "fold"},
    "export": {"target", "original_fingerprint", "master_errors"},
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
    progress: Progress = lambda done, total, name: None,
    run: RunChecks = ShardChecks.run,
) -> Verification:
    """Check a master or an export.

    result: a folder on this machine, or one anywhere
    threads: how many threads compute hashes
    beside: files that are only in the repository from which the folder was fetched
    progress: called with the bytes checked, the bytes in all, and the name of a tensor
    run: what checks the shards; by default this process

    Raises MasterError if the folder has no readable manifest, StorageError if a folder in object storage cannot be
    read; everything else is a problem in the result.
    """
    manifest = read_manifest(result)
    storage = LocalStorage(result) if isinstance(result, Path) else result
    shards = shards_of(manifest)
    findings = run(shard_checks(storage, manifest, shards), threads, progress)
    problems = [*_check_state(storage, manifest), *findings.damaged, *findings.wrong]
    problems += _check_index(storage, manifest, shards)
    of_files = dict(_check_files(storage, manifest))
    problems += of_files.values()
    unlisted = tuple(_unlisted(storage, manifest, shards=shards, beside=beside))
    problems += [*(f"{name}: is not in the manifest" for name in unlisted), *_check_records(storage)]
    if manifest.kind == "master" and not (findings.damaged or findings.wrong or CONFIG_FILE in of_files):
        problems += _check_config(storage, manifest)
    good = [shard for shard in shards if shard.file in findings.good]
    hashed = {stored.name for shard in good for stored in shard.stored}
    files = [record.bytes for name, record in manifest.files.items() if _size_of(storage, name) == record.bytes]
    return Verification(
        tensors=sum(all(spec.name in hashed for spec in tensor.stored) for tensor in manifest.tensors),
        files=len(good) + len(files),
        bytes=sum(shard.file_bytes for shard in good) + sum(files),
        problems=tuple(dict.fromkeys(problems)),  # opening the folder may find one again
        unlisted=unlisted,
    )


def _size_of(storage: Storage, name: str) -> int | None:
    """Return the size of a file in the folder in bytes; None if there is none of this name."""
    state = storage.files().get(name)
    return None if state is None else state.byte_count


def _check_state(storage: Storage, manifest: Manifest) -> Iterator[str]:
    """Check that the manifest is as pqweights writes it, and that no run is unfinished."""
    if not _is(storage, MANIFEST_FILE, manifest.to_pieces()):
        yield f"{MANIFEST_FILE}: is not what pqweights writes for these tensors: its sums or sizes were changed"
    yield from _check_account(manifest)
    if (work := storage.work_folder()) is not None:
        yield f"{WORK_FOLDER}: the folder {describe_interrupted(work)}"


def _is(storage: Storage, name: str, pieces: Iterable[bytes]) -> bool:
    """Whether the pieces, one after the other, are the content of a file."""
    content, at = memoryview(read_file(storage, name, limit=MOST_BYTES)), 0
    for piece in pieces:
        if content[at : at + len(piece)] != piece:
            return False
        at += len(piece)
    return at == len(content)


def _check_account(manifest: Manifest) -> Iterator[str]:
    """Check that what the manifest says about how it was made has the keys of its kind, and of its target."""
    known = ACCOUNT_KEYS[manifest.kind]
    if manifest.kind == "export":
        stated = manifest.made_by["target"]
        target = target_name(stated)
        if target is None:
            yield f"{MANIFEST_FILE}: target: expected one of {', '.join(EXPORTS)}, found {str(stated)[:80]!r}"
            return
        chosen = get_target(target)
        known = {*known, *chosen.options, *chosen.account}
    for key in manifest.made_by:
        if key not in known:
            yield f"{MANIFEST_FILE}: expected {', '.join(sorted(known))}, found {key[:80]!r}"


def _check_index(storage: Storage, manifest: Manifest, shards: tuple[ShardPlan, ...]) -> Iterator[str]:
    """Check the index, and the names in the manifest."""
    if INDEX_FILE in storage.files() and not _is(storage, INDEX_FILE, json_pieces(index_json(shards))):
        yield f"{INDEX_FILE}: is not the index of the tensors in the manifest"
    names = [tensor.name for tensor in manifest.tensors]
    for tensor in manifest.tensors:
        for spec in tensor.stored:
            if tensor.action == QUANTIZE and not spec.name.startswith(tensor.name):
                yield f"{MANIFEST_FILE}: tensor {tensor.name!r} lists the foreign name {spec.name!r}"
    if len(set(names)) != len(names):
        yield f"{MANIFEST_FILE}: a tensor is there twice"


def _check_files(storage: Storage, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Check the files without tensors; yield what is wrong with each of them."""
    if not manifest.identity.container and INDEX_FILE not in manifest.files:
        yield INDEX_FILE, f"{MANIFEST_FILE}: does not list {INDEX_FILE}"
    for name, record in manifest.files.items():
        size = _size_of(storage, name)
        if not is_inside(name):
            yield name, f"{MANIFEST_FILE}: lists {name!r}, which lies outside the folder"
        elif name in storage.links.outside:
            yield name, outside(name)
        elif size is None:
            yield name, f"{name}: missing"
        elif size != record.bytes:
            yield name, f"{name}: expected {record.bytes} bytes, found {size}"
        elif (digest := _sha256(storage, name, size)) != record.sha256:
            yield name, f"{name}: sha256: expected {record.sha256}, found {digest}"


def _sha256(storage: Storage, name: str, size: int) -> str:
    return SHA256.of_part(pieces_of(storage, name, 0, size)).hex()


def _unlisted(
    storage: Storage, manifest: Manifest, *, shards: tuple[ShardPlan, ...], beside: Sequence[str]
) -> Iterator[str]:
    """Yield files that are not listed. A card and figures may be added; hidden files belong to version control."""
    known = {shard.file for shard in shards} | set(manifest.files) | {MANIFEST_FILE, CARD_FILE, EVALUATION_FILE}
    for name in sorted({*storage.files(), *storage.links.outside, *beside} - known):
        if not any(part.startswith(".") for part in name.split("/")):
            yield name


def _check_records(storage: Storage) -> Iterator[str]:
    """Check the figures of evaluations."""
    try:
        read_records(storage, "")
    except MasterError as error:
        yield str(error)


def _check_config(storage: Storage, manifest: Manifest) -> Iterator[str]:
    """Check that the configuration describes the weights as the manifest does, with the tables of their codecs."""
    try:
        checkpoint = open_folder(storage)
    except StorageError:
        raise
    except PqweightsError as error:
        yield str(error)
        return
    if not checkpoint.is_master or checkpoint.config is None:
        yield f"{CONFIG_FILE}: has no quantization_config of pqweights"
        return
    configured = {t.name: t for t in checkpoint.tensors if isinstance(t, EncodedTensor)}
    expected = {e.name: e for e in encodings(manifest.tensors, manifest.records)}
    for name in sorted(expected.keys() ^ configured.keys()):
        yield f"{CONFIG_FILE}: weight {name!r} is quantized in only one of configuration and manifest"
    for name in sorted(expected.keys() & configured.keys()):
        yield from _check_weight(expected[name], configured[name])
    kept = checkpoint.config["quantization_config"].get("kept")
    if kept != [t.name for t in manifest.tensors if t.action != QUANTIZE]:
        yield f"{CONFIG_FILE}: kept: is not the list of kept tensors in the manifest"


def _check_weight(expected: Encoding, configured: EncodedTensor) -> Iterator[str]:
    """Check what a configuration states about a weight. expected: by the manifest. configured: by the configuration."""
    ours, theirs = _stated(expected), _stated(_encoding(configured))
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            yield f"{CONFIG_FILE}: weight {expected.name!r}: {key}: expected {ours[key]!r}, found {theirs[key]!r}"
    coder = expected.coder
    if ours["codec"] == theirs["codec"] and configured.coder.tables() != coder.tables():
        yield f"{CONFIG_FILE}: levels of {coder.codec} at {coder.bits} bits are not those of the codec"


def _encoding(tensor: EncodedTensor) -> Encoding:
    """Return how a configuration says that a weight is stored."""
    return Encoding(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        coder=tensor.coder,
        state=tensor.state.to_json(),
    )


def _stated(encoding: Encoding) -> dict[str, Any]:
    """Return the statements in which two encodings may differ, by name."""
    coder = encoding.coder
    stated = {"shape": encoding.shape, "dtype": encoding.dtype, "codec": coder.codec, "bits": coder.bits}
    return stated | dict(encoding.state)
