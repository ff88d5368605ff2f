"""pqweights.json, the manifest: what a result was made from, how, with which errors, and the hash of every byte.

It holds no time, host, absolute path or thread count, so that the same source and recipe give the same bytes
everywhere. docs/format.md, section "pqweights.json", has the format.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pqweights.checkpoint.companions import leads_outside, outside, top_level_files
from pqweights.checkpoint.config import known_facts
from pqweights.checkpoint.gguf.file import SUFFIX as GGUF_SUFFIX
from pqweights.checkpoint.gguf.file import is_gguf
from pqweights.checkpoint.header import ONLY_GGUF_READERS
from pqweights.checkpoint.names import EVALUATION_FILE, MANIFEST_FILE, is_inside
from pqweights.checkpoint.storage import Origin, Storage, read_file
from pqweights.checkpoint.unfinished import describe_interrupted
from pqweights.common.documents import ClosedDocument, Count, Number, as_document
from pqweights.common.strict_json import json_pieces, parse_json
from pqweights.convert.manifest_entries import TensorEntry, damaged, parse_tensor, tensor_json
from pqweights.convert.records import TensorRecord, error_totals, exceeds
from pqweights.errors import MasterError, SourceError
from pqweights.planning.layout import (
    DEFAULT_METADATA,
    Container,
    GgufFiles,
    Safetensors,
    ShardPlan,
    TensorPlan,
)
from pqweights.storage.store import FileRecord

MANIFEST_VERSION = 1
# The first version that makes the same bytes as this one: a run is continued, and a finished result left alone, only by
# a version that agrees. To be raised with every change of what a codec, a recipe or an export writes.
SAME_BYTES_SINCE = "0.3.0"
# Of a manifest; that of a model with a million tensors has fewer.
MOST_BYTES = 4_000_000_000
# The key of what made a result (Plan.made_by) that tells which kind of result it makes.
KINDS = {"recipe": "master", "target": "export"}


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    id: str | None
    revision: str | None = None
    bytes: Count
    fingerprint: str


class _GgufFile(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    tensors: Count
    group: Count
    header_bytes: Count
    header_sha256: str


class _Container(msgspec.Struct, frozen=True, kw_only=True):
    """The format of files that are not safetensors."""

    format: Literal["gguf"]
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    alignment: Annotated[int, Meta(ge=1)]
    files: tuple[_GgufFile, ...]


class ManifestFile(ClosedDocument, frozen=True, kw_only=True):
    """The keys of the file, but for those of `made_by`, which stand between `kind` and `source`."""

    manifest_version: int
    kind: Literal["master", "export"]
    source: _Source
    model: dict[str, Any] = {}
    master: dict[str, Any] = {}
    max_shard_bytes: Annotated[int, Meta(ge=1)]
    same_bytes_since: str
    relative_mse: Number | None = None
    total_mse: Number | None = None
    master_mse: Number | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=lambda: DEFAULT_METADATA)
    container: _Container | None = None
    folders: dict[str, dict[str, str]] = {}
    left_out: dict[str, str] = {}
    remarks: tuple[str, ...] = ()
    exceeding: tuple[str, ...] = ()
    tensors: tuple[TensorEntry, ...]
    files: dict[str, FileRecord]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of pqweights.json; of a result that is not made yet, what it will state without what is measured.

    kind: the kind of the result: "master" or "export"
    made_by: how it is made: a recipe, or a target with its options
    source_bytes: size of the weight files that are read
    max_shard_bytes: data bytes after which a new output file begins
    tensors: what becomes of each tensor
    origin: the Hub repository that is read, with its commit; None for a local folder
    metadata: the `__metadata__` of the safetensors files
    container: what there is to say of another format of the files (Container.to_json)
    folders: of a result in several folders, the `__metadata__` of the files of each (Safetensors)
    left_out: tensors that are not carried over, each with the reason
    remarks: where the files and config.json of the source do not say the same (Checkpoint.remarks)
    model: what is known of the original model (checkpoint.config.model_facts)
    master: for an export, what the master's manifest states about the master
    same_bytes_since: the first version that makes the same bytes
    source_fingerprint: that of the checkpoint that was read (Checkpoint.fingerprint)
    records: what was measured of each tensor, in the order of `tensors`
    files: the files without tensors, by name
    """

    kind: str
    made_by: dict[str, Any]
    source_bytes: int
    max_shard_bytes: int
    tensors: tuple[TensorPlan, ...]
    origin: Origin | None = None
    metadata: dict[str, str] = field(default_factory=lambda: DEFAULT_METADATA)
    container: dict[str, Any] = field(default_factory=dict)
    folders: dict[str, dict[str, str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    master: dict[str, Any] = field(default_factory=dict)
    same_bytes_since: str = field(default_factory=lambda: SAME_BYTES_SINCE)
    source_fingerprint: str = ""
    records: tuple[TensorRecord, ...] = ()
    files: dict[str, FileRecord] = field(default_factory=dict)

    @property
    def is_of_master(self) -> bool:
        """Whether the result was made from a master, and not from the source."""
        return bool(self.master)

    @property
    def decisive(self) -> Manifest:
        """What decides, together with the content of the source, every byte: two runs are the same if this is equal.

        Left out are what was measured, and every text that is written for people: why a tensor is treated as it is,
        what a recipe is for.
        """
        return replace(
            self,
            tensors=tuple([tensor._replace(reason="") for tensor in self.tensors]),
            left_out=dict.fromkeys(self.left_out, ""),
            remarks=(),
            made_by=_without_prose(self.made_by),
            master=_without_prose(self.master),
            source_fingerprint="",
            records=(),
            files={},
        )

    def digest(self) -> str:
        """Return the sha256 over all that is decisive."""
        # In JSON, tensors and origin are the lists of their fields.
        return hashlib.sha256(json.dumps(vars(self.decisive), sort_keys=True).encode()).hexdigest()

    @property
    def pairs(self) -> list[tuple[TensorPlan, TensorRecord]]:
        """Each tensor with what was measured of it."""
        return list(zip(self.tensors, self.records, strict=True))

    @property
    def exceeding(self) -> list[str]:
        """The names of the weights whose error is above 1.25 times what their codec promises."""
        return [tensor.name for tensor, record in self.pairs if exceeds(tensor, record)]

    def to_pieces(self) -> Iterator[bytes]:
        """Yield the content of the file."""
        return json_pieces(self._document())

    def _document(self) -> dict[str, Any]:
        """Return the JSON of the file; the tensors, of which there may be many, are made as they are asked for."""
        origin = {"id": None} if self.origin is None else self.origin._asdict()
        metadata = {"metadata": self.metadata} if self.metadata != DEFAULT_METADATA else {}
        return {
            "manifest_version": MANIFEST_VERSION,
            "kind": self.kind,
            **self.made_by,
            "source": {**origin, "bytes": self.source_bytes, "fingerprint": self.source_fingerprint},
            **({"model": self.model} if self.model else {}),
            **({"master": self.master} if self.master else {}),
            "max_shard_bytes": self.max_shard_bytes,
            "same_bytes_since": self.same_bytes_since,
            **error_totals(self.tensors, self.records),
            **metadata,
            **({"container": self.container} if self.container else {}),
            **({"folders": self.folders} if self.folders else {}),
            **({"left_out": self.left_out} if self.left_out else {}),
            **({"remarks": list(self.remarks)} if self.remarks else {}),
            "exceeding": self.exceeding,
            "tensors": map(tensor_json, self.tensors, self.records),
            "files": {name: vars(record) for name, record in sorted(self.files.items())},
        }


def _without_prose(made_by: dict[str, Any]) -> dict[str, Any]:
    """Return what made a result, or its master, without what a recipe says for people."""
    recipe = made_by.get("recipe")
    if not isinstance(recipe, dict):
        return made_by
    stated = {key: value for key, value in recipe.items() if key != "description"}
    if isinstance(rules := recipe.get("rules"), list):
        stated["rules"] = [_without_reason(rule) for rule in rules]
    return made_by | {"recipe": stated}


def _without_reason(rule: Any) -> Any:
    return {key: value for key, value in rule.items() if key != "reason"} if isinstance(rule, dict) else rule


def shards_of(manifest: Manifest) -> tuple[ShardPlan, ...]:
    """Return the files that hold the tensors of a finished result.

    Raises MasterError if the manifest does not describe files.
    """
    try:
        return container_of(manifest).shards(manifest.tensors, manifest.max_shard_bytes)
    except ValueError as error:
        raise damaged(f"{len(manifest.tensors)} tensors: {error}") from None


def container_of(manifest: Manifest) -> Container:
    """Return the format of the files of a finished result. Raises MasterError if the manifest does not describe one."""
    if manifest.container:
        return _container(as_document(manifest.container, _Container, damaged))
    stem = manifest.made_by.get("file")
    if stem is not None and (not isinstance(stem, str) or "/" in stem or not is_inside(stem)):
        raise damaged(f"file: expected a file name, found {str(stem)[:80]!r}")
    return Safetensors(manifest.folders or {"": manifest.metadata}, stem)


def manifest_beside(manifest: Manifest) -> str:
    """Return the name of the manifest of GGUF files in a repository in which pqweights.json is another's."""
    return f"{manifest.container.get('name', '')}.{MANIFEST_FILE}"


def manifests_beside(storage: Storage) -> Iterator[tuple[str, ...]]:
    """Yield the files of each export that was pushed beside another, as far as their manifests can be read."""
    for name in storage.files():
        if name.endswith(f".{MANIFEST_FILE}") and "/" not in name:
            try:
                manifest = parse_manifest(read_file(storage, name, limit=MOST_BYTES))
                files = (*(shard.file for shard in shards_of(manifest)), *manifest.files)
            except (MasterError, SourceError):
                continue
            yield (name, evaluations_of(name), *files)


def evaluations_of(manifest_file: str) -> str:
    """Return the name of the recorded evaluations that belong to a manifest of a repository."""
    return manifest_file.removesuffix(MANIFEST_FILE) + EVALUATION_FILE


def read_manifest(result: Path | Storage) -> Manifest:
    """Read the manifest of a finished result: of a folder on this machine, or of one anywhere.

    Raises MasterError if there is none, or if this version would not have written it.
    """
    storage = _top_level(result) if isinstance(result, Path) else result
    if MANIFEST_FILE not in storage.files():
        raise MasterError(f"{storage}: {_why_no_manifest(storage)}")
    return parse_manifest(read_file(storage, MANIFEST_FILE, limit=MOST_BYTES))


def find_manifest(result: Path | Storage) -> Manifest | None:
    """Read the manifest of a result, or return None if there is none. Raises MasterError for a damaged one."""
    is_there = (result / MANIFEST_FILE).is_file() if isinstance(result, Path) else MANIFEST_FILE in result.files()
    return read_manifest(result) if is_there else None


def _top_level(folder: Path) -> Storage:
    """List the files of a folder without those in folders inside of it. Raises MasterError if it is not a folder."""
    if not folder.exists():
        address = re.sub(r"^(\w+):/", r"\1://", str(folder))  # a Path has one slash less
        is_address = address != str(folder)
        hint = " on this machine: this command takes no address; copy it to a folder first" if is_address else ""
        raise MasterError(f"{address}: no such folder{hint}")
    if not folder.is_dir():
        what = ONLY_GGUF_READERS if is_gguf(folder) else "a file"
        raise MasterError(f"{folder}: expected a folder, found {what}")
    return Storage(folder, only=top_level_files(folder))


def _why_no_manifest(storage: Storage) -> str:
    if (journal := storage.journal_line()) is not None:
        return describe_interrupted(journal)
    folder, names = storage.local_folder(), [name for name in storage.files() if "/" not in name]
    if not storage.files() and folder is None:
        return "no such folder, or nothing in it"
    if folder is not None and leads_outside(folder, folder / MANIFEST_FILE):
        return outside(MANIFEST_FILE)
    problem = f"expected a folder that pqweights finished, found no {MANIFEST_FILE} in it"
    if any(name.endswith(".safetensors") for name in names):
        return f"{problem}; if it is an ordinary checkpoint, pqweights plan {storage} shows what would become of it"
    if any(name.endswith(GGUF_SUFFIX) for name in names):
        return f"{problem}: it holds {ONLY_GGUF_READERS}"
    return problem


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest from the content of its file.

    Raises MasterError for anything that this version would not have written.
    """
    try:
        document = parse_json(data, strict=True)
    except ValueError as error:
        raise MasterError(f"{MANIFEST_FILE}: {error}; restore it, or delete the folder") from None
    version = document.get("manifest_version") if isinstance(document, dict) else type(document).__name__
    if type(version) is not int or version != MANIFEST_VERSION:
        raise MasterError(
            f"{MANIFEST_FILE}: manifest_version: expected {MANIFEST_VERSION}, found {version!r}; a newer "
            "pqweights may read it"
        )
    return _parsed(document)


def _parsed(document: dict[str, Any]) -> Manifest:
    made_by = _made_by(document)
    file = as_document({key: value for key, value in document.items() if key not in made_by}, ManifestFile, damaged)
    expected = next((KINDS[key] for key in KINDS if key in made_by), None)
    if file.kind != expected:
        raise damaged(f"kind: expected {expected}, found {file.kind!r}")
    if file.model != (facts := known_facts(file.model)):
        raise damaged(f"model: expected what a model card may say, {facts}, found {str(file.model)[:80]}")
    entries = list(map(parse_tensor, file.tensors, document["tensors"]))
    origin = file.source
    if (origin.id is None) != (origin.revision is None):
        raise damaged("source: expected id and revision, found only one of them")
    return Manifest(
        kind=file.kind,
        made_by=made_by,
        source_bytes=file.source.bytes,
        max_shard_bytes=file.max_shard_bytes,
        tensors=tuple(tensor for tensor, _ in entries),
        origin=None if origin.id is None else Origin(origin.id, origin.revision or ""),
        metadata=file.metadata,
        container={} if file.container is None else _container(file.container).to_json(),
        folders=_checked_folders(file.folders),
        left_out=file.left_out,
        remarks=file.remarks,
        model=file.model,
        master=file.master,
        same_bytes_since=file.same_bytes_since,
        source_fingerprint=file.source.fingerprint,
        records=tuple(record for _, record in entries),
        files=file.files,
    )


def _made_by(document: dict[str, Any]) -> dict[str, Any]:
    """Return what made a result: what stands between `kind` and `source`."""
    keys = list(document)
    if not {"kind", "source"} <= document.keys():
        return {}
    return {key: document[key] for key in keys[keys.index("kind") + 1 : keys.index("source")]}


def _checked_folders(folders: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the folders of a result. Raises MasterError for a name that is not that of a folder in it."""
    for name in folders:
        if not name.endswith("/") or "/" in name[:-1] or not is_inside(name[:-1]):
            raise damaged(f"folders: expected the name of a folder with a slash, found {name!r}")
    return folders


def _container(stated: _Container) -> GgufFiles:
    """Return the format of files that are not safetensors."""
    names = [file.name for file in stated.files]
    for name in (stated.name, *names):
        if "/" in name or not is_inside(name):
            raise damaged(f"container: expected a file name, found {name!r}")
    if len(set(names)) < len(names):
        raise damaged("container: expected different names of files")
    ends = itertools.accumulate(file.tensors for file in stated.files)
    files = [
        ShardPlan(
            file=file.name,
            tensors=range(end - file.tensors, end),
            stated=(file.header_bytes, file.header_sha256),
            group=file.group,
        )
        for file, end in zip(stated.files, ends, strict=True)
    ]
    return GgufFiles(name=stated.name, alignment=stated.alignment, files=tuple(files))
