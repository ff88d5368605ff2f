"""Which files of a folder hold the weights, and the index that places tensors in them.

As in transformers, the weights are in model.safetensors, or else in the files that the index names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint import pickled
from pqweights.checkpoint.companions import WEIGHT_SUFFIXES
from pqweights.checkpoint.header import StoredTensor, gguf_refused
from pqweights.checkpoint.names import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE, is_inside
from pqweights.checkpoint.storage import LocalStorage, Storage, read_file
from pqweights.common.strict_json import parse_json
from pqweights.errors import SourceError


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint. weight_map: for each tensor, the file that holds it."""

    file: str
    weight_map: dict[str, str]


def find_weight_files(
    storage: Storage, *, allow_pickle: bool, single_file: bool
) -> tuple[tuple[str, ...], Index | None]:
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
        return indexed_files(storage, INDEX_FILE, (".safetensors",))
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
        return indexed_files(storage, pickled.PICKLE_INDEX_FILE, PICKLE_SUFFIXES)
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
        "`allow_pickle` to read them through torch's weights_only loader"
    )


def indexed_files(storage: Storage, index: str, suffixes: tuple[str, ...]) -> tuple[tuple[str, ...], Index]:
    """Read an index, and return the weight files that it names; they must exist and have one of the suffixes."""
    weight_map = read_json_object(storage, index).get("weight_map")
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


def check_index(folder: Path, stored: dict[str, StoredTensor]) -> None:
    """Check the tensors of the weight files of a folder against its index, if these are the files that it names.

    Raises SourceError if they differ.
    """
    files = sorted({tensor.file for tensor in stored.values()})
    if SINGLE_FILE not in files and (folder / INDEX_FILE).is_file():
        storage = LocalStorage(folder, only=[INDEX_FILE, *files])
        check_tensors(indexed_files(storage, INDEX_FILE, (".safetensors",))[1], stored)


def check_tensors(index: Index, stored: dict[str, StoredTensor]) -> None:
    """Raise SourceError if a tensor is not in the file where the index places it."""
    for name, file in index.weight_map.items():
        tensor = stored.get(name)
        if tensor is None:
            raise SourceError(
                f"{file}: expected the tensor {name!r}, which {index.file} places there, found no such tensor"
            )
        if tensor.file != file:
            raise SourceError(f"tensor {name!r}: {index.file} places it in {file}, found it in {tensor.file}")


def read_json_object(storage: Storage, name: str) -> dict[str, Any]:
    """Read a file that holds a JSON object; raises SourceError if it does not."""
    try:
        value = parse_json(read_file(storage, name))
    except ValueError as error:
        raise SourceError(f"{name}: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{name}: expected a JSON object, found {type(value).__name__}")
    return value
