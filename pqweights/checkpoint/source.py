"""Opening a checkpoint from its headers: its files, its logical tensors, and every reason to refuse it.

No weight is read here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint import master, quantized
from pqweights.checkpoint.companions import (
    NOT_GIVEN,
    WEIGHT_SUFFIXES,
    check_links,
    companions,
    leads_outside,
    top_level_files,
)
from pqweights.checkpoint.config_schema import check_layers, model_config
from pqweights.checkpoint.digests import CheckedReads, MapFunction
from pqweights.checkpoint.header import StoredTensor, parse_header
from pqweights.checkpoint.names import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, PICKLE_SUFFIXES
from pqweights.checkpoint.promise import Pair, checked_config, same_values, with_differing, with_embeddings
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, PlainTensor
from pqweights.checkpoint.storage import (
    Storage,
    check_not_interrupted,
    read_bytes,
    read_json_object,
)
from pqweights.checkpoint.weight_files import (
    check_tensors,
    find_weight_files,
    holds_weights,
    index_of,
    indexed_files,
    pickled_tensors,
)
from pqweights.checkpoint.wrapped import check_adapter_files, unwrapped
from pqweights.common.strict_json import is_utf8
from pqweights.common.threads import Progress
from pqweights.errors import SourceError

# A fingerprint covers this many bytes at each end of a tensor.
SAMPLE_BYTES = 4096
# How many are read at once: where the files are elsewhere, each waits for a reply.
SAMPLES_AT_ONCE = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint:
    """An opened checkpoint.

    storage: where its files lie
    stored: the stored tensors
    tensors: the logical tensors, in the order of files and offsets
    weight_files: the files that hold the tensors
    config: the parsed config.json, or None
    companions: other files of the model, which are copied as they are
    left_out: files that are not copied, each with the reason
    is_master: whether it is a master of pqweights
    checked: what its tensors are read through, if each is checked against a known hash
    left_out_tensors: stored tensors that are not part of the model, each with the reason
    weights: names of the tensors that an export may round: those that a master holds as codes; of another checkpoint,
        those that planning has chosen
    remarks: where the files and config.json do not say the same, and what was made of it, a sentence each
    unproven: tensors that are to be the same, and are in the places that were read: `proven` reads all of them
    adapters: what is merged into the tensors as they are read (adapters.py)
    leave_out: patterns of the tensors that the user left out
    """

    storage: Storage
    stored: tuple[StoredTensor, ...]
    tensors: tuple[LogicalTensor, ...]
    weight_files: tuple[str, ...]
    config: dict[str, Any] | None = None
    companions: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    is_master: bool = False
    checked: CheckedReads | None = None
    left_out_tensors: dict[str, str] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    remarks: tuple[str, ...] = ()
    unproven: tuple[Pair, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    leave_out: tuple[str, ...] = ()
    _fingerprints: dict[str, str] = field(default_factory=dict)  # by file

    def finish_checks(self, parts: Iterable[StoredTensor] | None = None, *, run: MapFunction = map) -> None:
        """Check those stored tensors of which something was read and not everything; by default among all of them.

        run: as `map`; may use several threads

        Until then, what was read may be damaged. Raises MasterError if it is.
        """
        if self.checked is not None:
            self.checked.finish(parts, run=run)

    @property
    def weight_file_bytes(self) -> int:
        """The size of the weight files in bytes, headers included."""
        files = self.storage.files()
        return sum(files[name].byte_count for name in self.weight_files)

    def fingerprint(self) -> str:
        """Return a sha256 over the fingerprints of all weight files.

        It tells one model from another without reading all of it, and does not prove that all bytes are equal.
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
            with ThreadPoolExecutor(SAMPLES_AT_ONCE, "pqweights-samples") as pool:
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
        by_file: dict[str, list[StoredTensor]] = {file: [] for file in self.weight_files}
        for stored in sorted(self.stored, key=operator.attrgetter("name")):
            by_file[stored.file].append(stored)
        return by_file

    def check_unchanged(self) -> None:
        """Raise SourceChangedError if a file of the model is not what it was when the checkpoint was opened."""
        there = self.storage.files()
        named = [name for name in (CONFIG_FILE, INDEX_FILE, MANIFEST_FILE) if name in there]
        self.storage.check_unchanged((*self.weight_files, *self.companions, *named))

    def restore_fingerprints(self, known: Mapping[str, str]) -> None:
        """Take over the fingerprints of files that an interrupted run computed."""
        self._fingerprints.update(known)


@dataclass(frozen=True, eq=False, kw_only=True)
class Adapter:
    """An opened adapter of PEFT or mlx-lm, which is merged into a checkpoint (adapters.py).

    given: what names it, with its weight
    name: what messages call it
    files: its files, opened as a checkpoint without a configuration
    settings: adapter_config.json
    weight: by how much its changes are multiplied
    """

    given: str
    name: str
    files: Checkpoint
    settings: Mapping[str, Any]
    weight: float = 1.0

    def describe(self) -> dict[str, Any]:
        """Return what a manifest says of it: where on the Hub it is from, what it holds, and its weight."""
        origin = self.files.storage.origin
        where = {} if origin is None else {"id": origin.id, "revision": origin.revision}
        return {**where, "fingerprint": self.files.fingerprint(), "weight": self.weight}

    def refused(self, why: str) -> SourceError:
        """Return the error for an adapter that cannot be merged."""
        return SourceError(f"adapter {self.name}: {why}")

    def values(self, stored: StoredTensor, start: int = 0, count: int | None = None) -> npt.NDArray[np.float32]:
        """Read elements [start, start + count) of one of its tensors; by default all of them."""
        count = math.prod(stored.shape) - start if count is None else count
        out = np.empty(count * 4, dtype=np.uint8)
        PlainTensor.of(self.files.storage, stored).read(start, count, "F32", out)
        return out.view(np.float32)


def described_folder(checkpoint: Checkpoint, source: Path) -> Path:
    """Return the folder that has the configuration and the tokenizer of a model: of a GGUF file, one that is made.

    source: what the checkpoint was opened from
    """
    return checkpoint.storage.described((CONFIG_FILE, *checkpoint.companions)) or source


def files_at(path: Path) -> tuple[Storage, str]:
    """Return the files of a folder; or of a file, those at the top of its folder, and its name.

    Raises SourceError for a path that does not exist.
    """
    if path.is_dir():
        return Storage(path), ""
    if path.is_file():
        beside = [name for name in top_level_files(path.parent) if name[0] != "."]
        return Storage(path.parent, only=sorted({*beside, path.name})), path.name
    if path.exists():
        raise SourceError(f"{path}: expected a folder or a file, found neither")
    raise SourceError(f"{path}: no such file or folder; give a local checkpoint folder or a .safetensors file")


def open_local(path: Path, allow_pickle: bool = False) -> Checkpoint:
    """Open the checkpoint in a folder on this machine, or in a single safetensors file; see `open_files`."""
    return open_files(*files_at(path), allow_pickle)


def open_files(
    storage: Storage, file: str = "", allow_pickle: bool = False, *, include: Sequence[str] = ()
) -> Checkpoint:
    """Open the checkpoint in a folder, wherever that is, or in one of its files.

    file: its name; by default the whole folder is one checkpoint
    allow_pickle: also open pickled weights
    include: patterns of files to copy, see companions.py

    Raises SourceError, MasterError for a damaged master or an unfinished one.
    """
    if file:
        alone = storage.with_made({}, storage.files().keys() - {file})
        opened = open_checkpoint(alone, allow_pickle, single_file=True, include=include)
        return replace(opened, left_out=dict.fromkeys(others_of_model(storage, file), NOT_GIVEN))
    check_not_interrupted(storage)
    check_links(storage.broken_links, storage.outside_links)
    return open_checkpoint(storage, allow_pickle, include=include)


def others_of_model(storage: Storage, file: str) -> tuple[str, ...]:
    """Return the files of the same model in the folder of a single file, which are not read if that file is given.

    They are its configuration, the other files that an index names beside it, and what would be copied with it.
    """
    names = [name for name in storage.files() if "/" not in name] if file.lower().endswith(WEIGHT_SUFFIXES) else []
    weights: tuple[str, ...] = ()
    if INDEX_FILE in names:
        with contextlib.suppress(SourceError):
            weights, _ = indexed_files(storage)
    if file not in weights:
        weights = ()
        if CONFIG_FILE not in names:
            return ()
    of_model = {CONFIG_FILE, INDEX_FILE, *weights, *companions(names, ())[0]}
    return tuple(name for name in names if name in of_model and name != file)


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the parsed config.json of a folder, or None if there is none.

    Raises SourceError if it does not hold a JSON object with values of the right types and sizes.
    """
    if not (folder / CONFIG_FILE).is_file():
        return None
    check_links((), [CONFIG_FILE] if leads_outside(folder, folder / CONFIG_FILE) else [])
    return model_config(Storage(folder, only=[CONFIG_FILE]))


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
    config = model_config(storage)
    # Before pickles are refused for what they are.
    check_adapter_files(storage, [name for name in files if name.endswith(WEIGHT_SUFFIXES) and holds_weights(name)])
    weight_files, weight_map, unlike = find_weight_files(storage, allow_pickle=allow_pickle, single_file=single_file)
    check_adapter_files(storage, weight_files)
    stored, copies = stored_tensors(storage, weight_files)
    misplaced = check_tensors(index_of(weight_files), weight_map, stored)
    check_layers(config or {}, stored)
    is_master, remarks = config is not None and master.is_master(config), list[str]()
    if not is_master:
        stored, of_names = unwrapped(storage, stored, (config or {}).get("model_type"))
        stored, of_embeddings = with_embeddings(stored, config)
        remarks += [*of_names, *of_embeddings]
    if config is not None and is_master:
        tensors, no_weights = master.logical_tensors(storage, stored, config), dict[str, str]()
    else:
        tensors, no_weights, casts = quantized.logical_tensors(storage, stored, config)
        remarks += casts
    order = {name: number for number, name in enumerate(weight_files)}

    def place(tensor: LogicalTensor) -> tuple[int, int, str]:
        first = tensor.parts[0]
        return order[first.file], first.offset, tensor.name

    copied, left_out = companions(files, weight_files, include, outside_links=storage.outside_links)
    coded = frozenset(tensor.name for tensor in tensors if isinstance(tensor, EncodedTensor))
    config, differing, unproven = checked_config(storage, tensors, config)
    return Checkpoint(
        storage=storage,
        config=config,
        stored=tuple(stored.values()),
        tensors=tuple(sorted(tensors, key=place)),
        weight_files=weight_files,
        companions=copied,
        left_out=left_out | unlike | misplaced | copies,
        is_master=is_master,
        left_out_tensors=no_weights,
        weights=coded if is_master else frozenset(),
        remarks=(*remarks, *differing),
        unproven=unproven,
    )


def proven(checkpoint: Checkpoint, progress: Progress) -> Checkpoint:
    """Return a checkpoint of which all values were read that decide what its configuration says.

    Raises what reading raises.
    """
    for adapter in checkpoint.adapters:
        adapter.files.storage.keep(adapter.files.weight_files, progress)
    pairs = checkpoint.unproven
    if not pairs or checkpoint.config is None:
        return checkpoint
    files = dict.fromkeys(part.file for pair in pairs for of in (pair.one, pair.other) for part in of.parts)
    checkpoint.storage.keep(tuple(files), progress)
    differing = [pair for pair in pairs if not same_values(pair, progress)]
    config, remarks = with_differing(checkpoint.config, differing)
    return replace(checkpoint, config=config, remarks=(*checkpoint.remarks, *remarks), unproven=())


def needed_files(storage: Storage) -> tuple[str, ...]:
    """Return what must be fetched of a checkpoint that lies elsewhere: configuration, companions and weights.

    Of a result of pqweights, the companions are the files that its manifest lists. Its weights may be GGUF files.

    Raises SourceError if there are no weights that can be read.
    """
    files = storage.files()
    listed, gguf = _listed_files(storage) if MANIFEST_FILE in files else (None, ())
    if gguf and listed is not None:
        return tuple(name for name in (MANIFEST_FILE, *listed, *gguf) if name in files)
    weight_files, weight_map, _ = find_weight_files(storage, allow_pickle=False, single_file=False)
    others = (CONFIG_FILE, MANIFEST_FILE, *([INDEX_FILE] if weight_map else []))
    copied = companions(files, weight_files)[0] if listed is None else listed
    wanted = [name for name in dict.fromkeys((*others, *copied)) if name in files and name not in weight_files]
    return (*wanted, *weight_files)


def _listed_files(storage: Storage) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return the files without tensors that a manifest lists, with the manifests beside it, and the GGUF files of all.

    There is None in place of the former for one that cannot be read; another that cannot be lists nothing.
    """
    files = [name for name in storage.files() if "/" not in name]
    beside = [name for name in files if name.endswith(f".{MANIFEST_FILE}")]
    try:
        manifest = read_json_object(storage, MANIFEST_FILE)
    except SourceError:
        return None, ()
    listed, stated = manifest.get("files"), _container_files(manifest)
    for name in beside if stated else ():
        with contextlib.suppress(SourceError):
            stated += _container_files(read_json_object(storage, name))
    gguf = tuple(name for name in files if name in stated and name.lower().endswith(".gguf"))
    return (*listed, *beside) if isinstance(listed, dict) else None, gguf


def _container_files(manifest: dict[str, Any]) -> list[Any]:
    """Return the names of the GGUF files that a manifest states, which may be damaged."""
    container = manifest.get("container")
    stated = container.get("files") if isinstance(container, dict) else None
    return [of.get("name") for of in stated if isinstance(of, dict)] if isinstance(stated, list) else []


def stored_tensors(storage: Storage, weight_files: tuple[str, ...]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors that the weight files hold, by name, and the copies of them that other files hold, as text.

    Raises SourceError for a damaged file, and for a name that two different tensors have.
    """
    stored: dict[str, StoredTensor] = {}
    copies = {}
    storage.expect(weight_files)
    for file in weight_files:
        is_pickle = file.endswith(PICKLE_SUFFIXES)
        tensors = pickled_tensors(storage, file) if is_pickle else read_header(storage, file)[0]
        for tensor in tensors:
            first = stored.setdefault(tensor.name, tensor)
            if first is tensor:
                continue
            pair = Pair(PlainTensor.of(storage, first), PlainTensor.of(storage, tensor), False)
            if first.dtype != tensor.dtype or not same_values(pair):
                raise SourceError(
                    f"tensor {tensor.name!r} is stored twice, in {first.file} and {file}, with different values; "
                    "remove the wrong file, or fetch both again"
                )
            copies[f"{tensor.name} in {file}"] = f"it is the same as in {first.file}"
    if not stored:
        raise SourceError(f"{weight_files[0]}: expected tensors, found none")
    return stored, copies


def read_header(storage: Storage, file: str) -> tuple[list[StoredTensor], dict[str, str]]:
    """Return the tensors of a safetensors file in the order of their data, and its metadata.

    Raises SourceError for a damaged file.
    """
    size = storage.files()[file].byte_count
    return parse_header(file, size, lambda offset, count: read_bytes(storage, file, offset, count))


def find_non_finite(tensor: LogicalTensor, start: int, count: int) -> int:
    """Return the index of the first NaN or infinity among elements [start, start + count), or -1."""
    raw = np.empty(count * 4, dtype=np.uint8)
    tensor.read(start, count, "F32", raw)
    bad = np.flatnonzero(~np.isfinite(raw.view(np.float32)))
    return start + int(bad[0]) if len(bad) else -1
