"""Verify: every stored byte of a finished folder against its manifest, index, headers, configuration and plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.interrupted import describe_interrupted
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
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.writer import sha256_of_file
from pqweights.errors import MasterError, PqweightsError
from pqweights.exports import EXPORTS, get_target
from pqweights.planning.plan import QUANTIZE, ShardPlan, index_json
from pqweights.quantizing import encodings
from pqweights.results.evaluation_record import read_records
from pqweights.rewrite.manifest import Manifest, read_manifest, shards_of
from pqweights.strict_json import json_pieces

NOT_IN_MANIFEST = "is not in the manifest"
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
    """

    tensors: int
    files: int
    bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the folder has no problems."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return what `verify --json` prints."""
        checked = {"tensors": self.tensors, "files": self.files, "bytes": self.bytes}
        return {"ok": self.ok, "checked": checked, "problems": list(self.problems)}


def verify(
    folder: Path,
    *,
    threads: int,
    beside: Sequence[str] = (),
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Verification:
    """Check a master or an export.

    folder: where it lies
    threads: how many threads compute hashes
    beside: files that are only in the repository from which the folder was fetched
    progress: called with the bytes checked, the bytes in all, and the name of a tensor

    Raises MasterError if the folder has no readable manifest; everything else is a problem in the result.
    """
    manifest = read_manifest(folder)
    problems = list(_check_state(folder, manifest))
    shards = shards_of(manifest)
    good = []
    for shard in shards:
        problem = _check_shard(folder, shard)
        if problem:
            problems.append(problem)
        else:
            good.append(shard)
    problems += _check_hashes(folder, manifest, shards=good, threads=threads, progress=progress)
    problems += _check_index(folder, manifest, shards)
    problems += _check_files(folder, manifest)
    problems += _check_foreign(folder, manifest, shards=shards, beside=beside)
    if manifest.kind == "master" and not any(p.startswith((CONFIG_FILE, "model-")) for p in problems):
        problems += _check_config(folder, manifest)
    hashed = {stored.name for shard in good for stored in shard.stored}
    files = [record.bytes for name, record in manifest.files.items() if _has_size(folder, name, record.bytes)]
    return Verification(
        tensors=sum(all(spec.name in hashed for spec in tensor.stored) for tensor in manifest.tensors),
        files=len(good) + len(files),
        bytes=sum(shard.file_bytes for shard in good) + sum(files),
        problems=tuple(problems),
    )


def _has_size(folder: Path, name: str, byte_count: int) -> bool:
    """Whether a listed file is there with its size, so that its content was compared."""
    return is_inside(name) and (folder / name).is_file() and (folder / name).stat().st_size == byte_count


def _check_state(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Check that the manifest is as pqweights writes it, and that no run is unfinished."""
    if not _is(folder / MANIFEST_FILE, manifest.to_pieces()):
        yield f"{MANIFEST_FILE}: is not what pqweights writes for these tensors: its sums or sizes were changed"
    yield from _check_account(manifest)
    if (folder / WORK_FOLDER).exists():
        yield f"{WORK_FOLDER}: the folder {describe_interrupted(folder)}"


def _is(path: Path, pieces: Iterable[bytes]) -> bool:
    """Whether the pieces, one after the other, are the content of a file."""
    with open(path, "rb") as stream:
        return all(stream.read(len(piece)) == piece for piece in pieces) and not stream.read(1)


def _check_account(manifest: Manifest) -> Iterator[str]:
    """Check that what the manifest says about how it was made has the keys of its kind, and of its target."""
    known = ACCOUNT_KEYS[manifest.kind]
    if manifest.kind == "export":
        target = manifest.made_by["target"]
        if not isinstance(target, str) or target not in EXPORTS:
            yield f"{MANIFEST_FILE}: target: expected one of {', '.join(EXPORTS)}, found {str(target)[:80]!r}"
            return
        found = get_target(target)
        known = {*known, *found.options, *found.account}
    for key in manifest.made_by:
        if key not in known:
            yield f"{MANIFEST_FILE}: expected {', '.join(sorted(known))}, found {key[:80]!r}"


def _check_shard(folder: Path, shard: ShardPlan) -> str | None:
    """Check the size and the header of a shard, whose bytes follow from the manifest."""
    path = folder / shard.file
    if not path.is_file():
        return f"{shard.file}: missing"
    size = path.stat().st_size
    if size != shard.file_bytes:
        return f"{shard.file}: expected {shard.file_bytes} bytes, found {size}"
    with open(path, "rb") as stream:
        header = stream.read(shard.header.byte_count)
        if header != shard.header.content and hashlib.sha256(header).hexdigest() != shard.header.sha256:
            return f"{shard.file}: the header is not the one that the manifest plans"
    return None


def _check_hashes(
    folder: Path,
    manifest: Manifest,
    *,
    shards: Sequence[ShardPlan],
    threads: int,
    progress: Callable[[int, int, str], None],
) -> Iterator[str]:
    """Check the hash of every tensor in some shards."""
    expected = {name: digest for record in manifest.records for name, digest in record.digests.items()}
    tensor_hash, stored = manifest.tensor_hash, [tensor for shard in shards for tensor in shard.stored]
    work = [(tensor, *part) for tensor in stored for part in tensor_hash.parts(tensor.byte_count)]

    def of_part(part: tuple[StoredTensor, int, int]) -> bytes:
        tensor, begin, end = part
        with open(folder / tensor.file, "rb", buffering=0) as stream:
            return tensor_hash.of_part(stream.fileno(), tensor.offset + begin, end - begin)

    total, done = sum(tensor.byte_count for tensor in stored), 0
    digests: list[bytes] = []
    with ThreadPoolExecutor(threads) as pool:
        for (tensor, begin, end), digest in zip(work, pool.map(of_part, work), strict=True):
            digests.append(digest)
            done += end - begin
            progress(done, total, tensor.name)
            if end == tensor.byte_count:
                found, digests = tensor_hash.combined(digests), []
                if found != expected[tensor.name]:
                    wrong = f"{tensor_hash.key}: expected {expected[tensor.name]}, found {found}"
                    yield f"{tensor.file}: tensor {tensor.name!r}: {wrong}"


def _check_index(folder: Path, manifest: Manifest, shards: tuple[ShardPlan, ...]) -> Iterator[str]:
    """Check the index, and the names in the manifest."""
    path = folder / INDEX_FILE
    if path.is_file() and not _is(path, json_pieces(index_json(shards))):
        yield f"{INDEX_FILE}: is not the index of the tensors in the manifest"
    names = [tensor.name for tensor in manifest.tensors]
    for tensor in manifest.tensors:
        for spec in tensor.stored:
            if tensor.action == QUANTIZE and not spec.name.startswith(tensor.name):
                yield f"{MANIFEST_FILE}: tensor {tensor.name!r} lists the foreign name {spec.name!r}"
    if len(set(names)) != len(names):
        yield f"{MANIFEST_FILE}: a tensor is there twice"


def _check_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Check the files without tensors."""
    if not manifest.identity.container and INDEX_FILE not in manifest.files:
        yield f"{MANIFEST_FILE}: does not list {INDEX_FILE}"
    for name, record in manifest.files.items():
        path = folder / name
        if not is_inside(name):
            yield f"{MANIFEST_FILE}: lists {name!r}, which lies outside the folder"
        elif not path.is_file():
            yield f"{name}: missing"
        elif path.stat().st_size != record.bytes:
            yield f"{name}: expected {record.bytes} bytes, found {path.stat().st_size}"
        elif (found := sha256_of_file(path)) != record.sha256:
            yield f"{name}: sha256: expected {record.sha256}, found {found}"


def _check_foreign(
    folder: Path, manifest: Manifest, *, shards: tuple[ShardPlan, ...], beside: Sequence[str]
) -> Iterator[str]:
    """Check that every file is listed. A card and figures may be added, and hidden files belong to version control."""
    known = {shard.file for shard in shards} | set(manifest.files) | {MANIFEST_FILE, CARD_FILE, EVALUATION_FILE}
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    for name in sorted({*names, *beside} - known):
        if not any(part.startswith(".") for part in name.split("/")):
            yield f"{name}: {NOT_IN_MANIFEST}"
    try:
        read_records(folder, "")
    except MasterError as error:
        yield str(error)


def _check_config(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Check that the configuration describes the weights as the manifest does, with the tables of their codecs."""
    try:
        checkpoint = open_local(folder)
    except PqweightsError as error:
        yield str(error)
        return
    if not checkpoint.is_master or checkpoint.config is None:
        yield f"{CONFIG_FILE}: has no quantization_config of pqweights"
        return
    found = {t.name: t for t in checkpoint.tensors if isinstance(t, EncodedTensor)}
    expected = {e.name: e for e in encodings(manifest.tensors, manifest.records)}
    for name in sorted(expected.keys() ^ found.keys()):
        yield f"{CONFIG_FILE}: weight {name!r} is quantized in only one of configuration and manifest"
    for name in sorted(expected.keys() & found.keys()):
        yield from _check_weight(expected[name], found[name])
    kept = checkpoint.config["quantization_config"].get("kept")
    if kept != [t.name for t in manifest.tensors if t.action != QUANTIZE]:
        yield f"{CONFIG_FILE}: kept: is not the list of kept tensors in the manifest"


def _check_weight(expected: Encoding, found: EncodedTensor) -> Iterator[str]:
    """Check what a configuration states about a weight. expected: by the manifest. found: by the configuration."""
    ours, theirs = _stated(expected), _stated(_encoding(found))
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            yield f"{CONFIG_FILE}: weight {expected.name!r}: {key}: expected {ours[key]!r}, found {theirs[key]!r}"
    coder = expected.coder
    if ours["codec"] == theirs["codec"] and found.coder.tables() != coder.tables():
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
