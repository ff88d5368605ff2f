"""Opening a checkpoint from its headers: its files, its logical tensors, and every reason to refuse it.

No weight is read here. As in transformers, the weights of a folder are in model.safetensors, or else in the files that
its index names.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pqweights.checkpoint import master, pickled, quantized
from pqweights.checkpoint.checked_reads import CheckedReads
from pqweights.checkpoint.companions import NOT_GIVEN, WEIGHT_SUFFIXES, check_links, companions
from pqweights.checkpoint.header import StoredTensor, gguf_refused, parse_header
from pqweights.checkpoint.interrupted import check_not_interrupted
from pqweights.checkpoint.links import links_outside, top_level_files
from pqweights.checkpoint.names import (
    CONFIG_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
    is_inside,
)
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.storage import LocalStorage, Origin, Storage, read_bytes, read_file
from pqweights.errors import SourceError
from pqweights.strict_json import is_utf8, parse_json

# A fingerprint covers this many bytes at each end of a tensor.
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint. weight_map: for each tensor, the file that holds it."""

    file: str
    weight_map: dict[str, str]


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint:
    """An opened checkpoint.

    storage: where its files lie
    config: the parsed config.json, or None
    stored: the stored tensors
    tensors: the logical tensors, in the order of files and offsets
    weight_files: the files that hold the tensors
    companions: other files of the model, which are copied as they are
    left_out: files that are not copied, each with the reason
    is_master: whether it is a master of pqweights
    checked: what its tensors are read through, if each is checked against a known hash
    left_out_tensors: stored tensors that are not part of the model, each with the reason
    """

    storage: Storage
    config: dict[str, Any] | None
    stored: tuple[StoredTensor, ...]
    tensors: tuple[LogicalTensor, ...]
    weight_files: tuple[str, ...]
    companions: tuple[str, ...]
    left_out: dict[str, str]
    is_master: bool
    checked: CheckedReads | None = None
    left_out_tensors: dict[str, str] = field(default_factory=dict)
    _fingerprints: dict[str, str] = field(default_factory=dict)  # by file

    def finish_checks(self, parts: Iterable[StoredTensor] | None = None) -> None:
        """Check those stored tensors of which something was read and not everything; by default among all of them.

        Until then, what was read may be damaged. Raises MasterError if it is.
        """
        if self.checked is not None:
            self.checked.finish(parts)

    @property
    def weight_file_bytes(self) -> int:
        """The size of the weight files in bytes, headers included."""
        files = self.storage.files()
        return sum(files[name].byte_count for name in self.weight_files)

    def fingerprint(self) -> str:
        """Return a sha256 over the fingerprints of all weight files.

        It tells one model from another, fine-tunes included, without reading all of it. It does not prove that all
        bytes are equal.
        """
        digest = hashlib.sha256()
        for file in self.weight_files:
            digest.update(f"{self.file_fingerprint(file)}\n".encode())
        return digest.hexdigest()

    def file_fingerprint(self, file: str) -> str:
        """Return a sha256 over a weight file's size and its tensors: names, dtypes, shapes, first and last 4096 bytes.

        It is computed once, so that the file may be deleted afterwards.
        """
        if file not in self._fingerprints:
            digest = hashlib.sha256(f"{self.storage.files()[file].byte_count}\n".encode())
            tensors = self._by_file[file]
            with ThreadPoolExecutor(self.storage.reads_at_once, "pqweights-samples") as pool:
                for stored, sample in zip(tensors, pool.map(self._sample, tensors), strict=True):
                    digest.update(f"{stored.name}\n{stored.dtype}\n{stored.shape}\n".encode())
                    digest.update(sample)
            self._fingerprints[file] = digest.hexdigest()
        return self._fingerprints[file]

    def _sample(self, stored: StoredTensor) -> bytes:
        """Return the first and the last bytes of a tensor."""
        count = min(stored.byte_count, SAMPLE_BYTES)
        sample = read_bytes(self.storage, stored.file, stored.offset, count)
        if stored.byte_count > SAMPLE_BYTES:
            end = stored.offset + stored.byte_count - SAMPLE_BYTES
            sample += read_bytes(self.storage, stored.file, end, SAMPLE_BYTES)
        return sample

    @functools.cached_property
    def _by_file(self) -> dict[str, list[StoredTensor]]:
        """The stored tensors of each weight file, sorted by name."""
        found: dict[str, list[StoredTensor]] = {file: [] for file in self.weight_files}
        for stored in sorted(self.stored, key=operator.attrgetter("name")):
            found[stored.file].append(stored)
        return found

    def check_unchanged(self) -> None:
        """Raise SourceChangedError if a file of the model is not what it was when the checkpoint was opened."""
        there = self.storage.files()
        named = [name for name in (CONFIG_FILE, INDEX_FILE, MANIFEST_FILE) if name in there]
        self.storage.check_unchanged((*self.weight_files, *self.companions, *named))

    @property
    def known_fingerprints(self) -> dict[str, str]:
        """The fingerprints of files that are known so far, by name."""
        return dict(self._fingerprints)

    def restore_fingerprints(self, known: dict[str, str]) -> None:
        """Take over the fingerprints of files that an interrupted run computed."""
        self._fingerprints.update(known)


def open_local(
    path: Path, allow_pickle: bool = False, *, origin: Origin | None = None, include: Sequence[str] = ()
) -> Checkpoint:
    """Open the checkpoint in a folder, or in a single safetensors file.

    allow_pickle: also open pickled weights
    origin: where the folder was fetched from
    include: patterns of files to copy, see companions.py

    Raises SourceError, also for a path that does not exist; MasterError for a damaged master or an unfinished one.
    """
    if path.is_dir():
        return open_folder(LocalStorage(path, origin=origin), allow_pickle, include=include)
    if path.is_file():
        storage = LocalStorage(path.parent, only=[path.name])
        opened = open_checkpoint(storage, allow_pickle, single_file=True, include=include)
        return replace(opened, left_out=dict.fromkeys(files_beside(path), NOT_GIVEN))
    if path.exists():
        raise SourceError(f"{path}: expected a folder or a file, found neither")
    raise SourceError(f"{path}: no such file or folder; give a local checkpoint folder or a .safetensors file")


def open_folder(storage: Storage, allow_pickle: bool = False, *, include: Sequence[str] = ()) -> Checkpoint:
    """Open the checkpoint in a folder, wherever that is; the arguments are those of `open_local`.

    Raises SourceError, MasterError for a damaged master or an unfinished one.
    """
    check_not_interrupted(storage)
    check_links(storage.broken_links, storage.outside_links)
    return open_checkpoint(storage, allow_pickle, include=include)


def files_beside(file: Path) -> tuple[str, ...]:
    """Return what `others_of_model` does of a single file on this machine."""
    if not file.name.lower().endswith(WEIGHT_SUFFIXES):
        return ()
    names = [name for name in top_level_files(file.parent) if not name.startswith(".")]
    return others_of_model(LocalStorage(file.parent, only=names), file.name)


def others_of_model(storage: Storage, file: str) -> tuple[str, ...]:
    """Return the files of the same model in the folder of a single file, which are not read if that file is given.

    They are its configuration, the other files that an index names beside it, and what would be copied with it.
    """
    names = [name for name in storage.files() if "/" not in name]
    weights: tuple[str, ...] = ()
    if INDEX_FILE in names:
        with contextlib.suppress(SourceError):
            weights, _ = _indexed_files(storage, INDEX_FILE, (".safetensors",))
    if file not in weights:
        weights = ()
        if CONFIG_FILE not in names:
            return ()
    of_model = {CONFIG_FILE, INDEX_FILE, *weights, *companions(names, ()).copied}
    return tuple(name for name in names if name in of_model and name != file)


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the parsed config.json of a folder, or None if there is none.

    Raises SourceError if it does not hold a JSON object.
    """
    storage = LocalStorage(folder, only=[CONFIG_FILE] if (folder / CONFIG_FILE).is_file() else [])
    check_links((), links_outside(folder, storage.files()))
    return _read_json_object(storage, CONFIG_FILE) if storage.files() else None


def open_checkpoint(
    storage: Storage, allow_pickle: bool = False, *, single_file: bool = False, include: Sequence[str] = ()
) -> Checkpoint:
    """Read headers and configuration, check them against each other, and find the logical tensors.

    allow_pickle: also open pickled weights
    single_file: the storage holds one weight file and nothing else
    include: patterns of files to copy, see companions.py

    Raises SourceError for a checkpoint that cannot be read, MasterError for a damaged master.
    """
    files = storage.files()
    for name in files:
        if not is_utf8(name):
            raise SourceError(f"{name!a}: the name of this file is not UTF-8 text; rename or remove it")
    config = _read_json_object(storage, CONFIG_FILE) if CONFIG_FILE in files else None
    weight_files, index = _weight_files(storage, allow_pickle=allow_pickle, single_file=single_file)
    stored = stored_tensors(storage, weight_files)
    if index is not None:
        _check_index(index, stored)
    if master.is_master(config):
        assert config is not None
        found = quantized.Found(master.logical_tensors(storage, stored, config), {})
    else:
        found = quantized.logical_tensors(storage, stored, config)
    beside = companions(files, weight_files, include, outside_links=storage.outside_links)
    return Checkpoint(
        storage=storage,
        config=config,
        stored=tuple(stored.values()),
        tensors=_in_file_order(found.tensors, weight_files),
        weight_files=weight_files,
        companions=beside.copied,
        left_out=beside.left_out,
        is_master=master.is_master(config),
        left_out_tensors=found.left_out,
    )


def _in_file_order(tensors: list[LogicalTensor], weight_files: tuple[str, ...]) -> tuple[LogicalTensor, ...]:
    """Sort tensors by the file and offset of their first part."""
    order = {name: place for place, name in enumerate(weight_files)}

    def place(tensor: LogicalTensor) -> tuple[int, int, str]:
        first = tensor.parts[0]
        return order[first.file], first.offset, tensor.name

    return tuple(sorted(tensors, key=place))


def needed_files(storage: Storage) -> tuple[str, ...]:
    """Return what must be fetched of a checkpoint that lies elsewhere: configuration, companions and weights.

    Of a result of pqweights, the companions are the files that its manifest lists.

    Raises SourceError if there are no weights that can be read.
    """
    files = storage.files()
    weight_files, index = _weight_files(storage, allow_pickle=False, single_file=False)
    others = (CONFIG_FILE, MANIFEST_FILE, *([index.file] if index is not None else []))
    listed = _listed_files(storage) if MANIFEST_FILE in files else None
    copied = companions(files, weight_files).copied if listed is None else listed
    wanted = [name for name in dict.fromkeys((*others, *copied)) if name in files and name not in weight_files]
    return (*wanted, *weight_files)


def _listed_files(storage: Storage) -> tuple[str, ...] | None:
    """Return the files without tensors that a manifest lists; None for one that cannot be read."""
    try:
        listed = _read_json_object(storage, MANIFEST_FILE).get("files")
    except SourceError:
        return None
    return tuple(listed) if isinstance(listed, dict) else None


def _read_json_object(storage: Storage, name: str) -> dict[str, Any]:
    """Read a file that holds a JSON object; raises SourceError if it does not."""
    try:
        value = parse_json(read_file(storage, name))
    except ValueError as error:
        raise SourceError(f"{name}: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{name}: expected a JSON object, found {type(value).__name__}")
    return value


def _weight_files(storage: Storage, *, allow_pickle: bool, single_file: bool) -> tuple[tuple[str, ...], Index | None]:
    """Return the files that hold the weights, and the index that names them, if one does."""
    files = storage.files()
    if single_file:
        (only,) = files
        if not only.lower().endswith(WEIGHT_SUFFIXES):
            raise SourceError(f"{only}: expected a folder, or a safetensors file; give the folder")
        if pickled.is_pickle(only) and not allow_pickle:
            raise _pickle_refused(only)
        return (only,), None
    if SINGLE_FILE in files:
        return (SINGLE_FILE,), None
    if INDEX_FILE in files:
        return _indexed_files(storage, INDEX_FILE, (".safetensors",))
    here = [name for name in files if "/" not in name]
    safetensors = [name for name in here if name.endswith(".safetensors")]
    if len(safetensors) == 1:
        return (safetensors[0],), None
    if safetensors:
        raise SourceError(
            f"{INDEX_FILE}: missing, although there are {len(safetensors)} safetensors files "
            f"({safetensors[0]}, ...); fetch the index, or give one file"
        )
    gguf = [name for name in here if name.endswith(".gguf")]
    if gguf:
        raise gguf_refused(gguf[0])
    return _pickled_files(storage, [name for name in here if pickled.is_pickle(name)], allow_pickle)


def _pickled_files(storage: Storage, pickles: list[str], allow_pickle: bool) -> tuple[tuple[str, ...], Index | None]:
    """Return the weight files of a folder without safetensors, and their index, if there is one."""
    if pickles and not allow_pickle:
        raise _pickle_refused(pickles[0])
    if pickled.PICKLE_INDEX_FILE in storage.files():
        return _indexed_files(storage, pickled.PICKLE_INDEX_FILE, PICKLE_SUFFIXES)
    if pickled.PICKLE_FILE in pickles:
        return (pickled.PICKLE_FILE,), None
    if len(pickles) > 1:
        raise SourceError(
            f"expected {pickled.PICKLE_INDEX_FILE} or {pickled.PICKLE_FILE}, found {', '.join(pickles[:4])}: give one "
            "file"
        )
    if pickles:
        return (pickles[0],), None
    raise SourceError(f"no weights found: expected {INDEX_FILE}, {SINGLE_FILE} or one other safetensors file")


def _pickle_refused(file: str) -> SourceError:
    return SourceError(
        f"{file}: pickled weights can run code when they are loaded; convert them to safetensors, or pass "
        "--allow-pickle to read them through torch's weights_only loader"
    )


def _indexed_files(storage: Storage, index: str, suffixes: tuple[str, ...]) -> tuple[tuple[str, ...], Index]:
    """Read an index, and return the weight files that it names; they must exist and have one of the suffixes."""
    weight_map = _read_json_object(storage, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index}: expected a weight_map of tensor names to files, found none")
    first_tensors: dict[str, str] = {}  # by file: each file is checked once, and the message names its first tensor
    for tensor, name in weight_map.items():
        if isinstance(name, str) and name in first_tensors:
            continue
        if not isinstance(name, str) or not is_inside(name) or "/" in name or "\\" in name:
            raise SourceError(
                f"{index}: tensor {tensor!r} is placed in {str(name)[:80]!r}; expected a file in the same folder"
            )
        first_tensors[name] = tensor
    for name, tensor in first_tensors.items():
        if name not in storage.files():
            raise SourceError(f"{name}: missing; {index} places {tensor!r} in it: fetch it")
        if not name.endswith(suffixes):
            raise SourceError(f"{index}: tensor {tensor!r} is placed in {name!r}; expected a {suffixes[0]} file")
    return tuple(sorted(first_tensors)), Index(index, weight_map)


def stored_tensors(storage: Storage, weight_files: tuple[str, ...]) -> dict[str, StoredTensor]:
    """Return the tensors that the weight files hold, by name.

    Raises SourceError for a damaged file, and for a name that is there twice.
    """
    stored: dict[str, StoredTensor] = {}
    storage.expect(weight_files)
    for file in weight_files:
        tensors = pickled.stored_tensors(storage, file) if pickled.is_pickle(file) else read_header(storage, file)[0]
        for tensor in tensors:
            first = stored.setdefault(tensor.name, tensor)
            if first is not tensor:
                raise SourceError(f"tensor {tensor.name!r} is there twice, in {first.file} and {file}")
    if not stored:
        raise SourceError(f"{weight_files[0]}: expected tensors, found none")
    return stored


def read_header(storage: Storage, file: str) -> tuple[list[StoredTensor], dict[str, str]]:
    """Return the tensors of a safetensors file in the order of their data, and its metadata.

    Raises SourceError for a damaged file.
    """
    size = storage.files()[file].byte_count
    return parse_header(file, size, lambda offset, count: read_bytes(storage, file, offset, count))


def check_index(folder: Path, stored: dict[str, StoredTensor]) -> None:
    """Check the tensors of the weight files of a folder against its index, if these are the files that it names.

    Raises SourceError if they differ.
    """
    files = sorted({tensor.file for tensor in stored.values()})
    if SINGLE_FILE not in files and (folder / INDEX_FILE).is_file():
        storage = LocalStorage(folder, only=[INDEX_FILE, *files])
        _check_index(_indexed_files(storage, INDEX_FILE, (".safetensors",))[1], stored)


def _check_index(index: Index, stored: dict[str, StoredTensor]) -> None:
    """Raise SourceError if a tensor is not in the file where the index places it."""
    for name, file in index.weight_map.items():
        found = stored.get(name)
        if found is None:
            raise SourceError(
                f"{file}: expected the tensor {name!r}, which {index.file} places there, found no such tensor"
            )
        if found.file != file:
            raise SourceError(f"tensor {name!r}: {index.file} places it in {file}, found it in {found.file}")


def find_non_finite(tensor: LogicalTensor, start: int, count: int) -> int:
    """Return the index of the first NaN or infinity among elements [start, start + count), or -1."""
    raw = np.empty(count * 4, dtype=np.uint8)
    tensor.read(start, count, "F32", raw)
    bad = np.flatnonzero(~np.isfinite(raw.view(np.float32)))
    return start + int(bad[0]) if len(bad) else -1
