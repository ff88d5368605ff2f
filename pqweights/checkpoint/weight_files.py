"""Which files of a folder hold the weights, the index that places tensors in them, and the tensors of pickled files.

As in transformers, the weights are in model.safetensors, or else in the files that the index names. Pickles are read
only on request: torch's weights_only unpickler gives the layout, we read the bytes. It runs with fake tensors, so
nothing is loaded; torch notes for each storage where it lies in the zip file. The zip file itself is checked first,
because torch's loader does not check that its records are plain bytes.
"""

from __future__ import annotations

import pickle
import struct
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqweights.checkpoint.companions import WEIGHT_SUFFIXES
from pqweights.checkpoint.header import StoredTensor, gguf_refused
from pqweights.checkpoint.names import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE, is_inside
from pqweights.checkpoint.storage import LocalStorage, Storage, read_file
from pqweights.common.advice import pip_install
from pqweights.common.strict_json import parse_json
from pqweights.errors import MissingDependencyError, SourceError

if TYPE_CHECKING:
    from torch import Tensor

PICKLE_FILE = "pytorch_model.bin"
PICKLE_INDEX_FILE = "pytorch_model.bin.index.json"
# What torch's loader raises for a broken or hostile file.
REFUSALS = (
    *(pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError),
    OSError,
)
# The safetensors dtype of each dtype of torch that can be read, by its name in torch.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

Span = tuple[int, int]  # first byte, last byte + 1


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
        if only.endswith(PICKLE_SUFFIXES) and not allow_pickle:
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
    pickles = [name for name in here if name.endswith(PICKLE_SUFFIXES)]
    if pickles and not allow_pickle:
        raise _pickle_refused(pickles[0])
    if PICKLE_INDEX_FILE in files:
        return indexed_files(storage, PICKLE_INDEX_FILE, PICKLE_SUFFIXES)
    if PICKLE_FILE not in pickles and len(pickles) > 1:
        raise SourceError(
            f"expected {PICKLE_INDEX_FILE} or {PICKLE_FILE}, found {', '.join(pickles[:4])}: give one file"
        )
    if not pickles:
        raise SourceError(f"no weights found: expected {INDEX_FILE}, {SINGLE_FILE} or one other safetensors file")
    return (PICKLE_FILE if PICKLE_FILE in pickles else pickles[0],), None


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


# --- pickled files ---


def pickled_tensors(storage: Storage, file: str) -> list[StoredTensor]:
    """Return the tensors of a pickled file, as places in that file.

    Raises SourceError if torch refuses the pickle, or if the zip file or a tensor is not laid out plainly.
    """
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(f"{file}: reading pickled weights needs torch: {pip_install('torch')}") from None
    folder = storage.local_folder()
    if folder is None:
        raise SourceError(f"{file}: pickled weights can only be read from a local folder")
    records = _data_records(folder / file, file)
    state = _load_without_data(folder / file, file)
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise SourceError(f"{file}: expected a dictionary of tensors, found {type(state).__name__}")
    return [_stored(file, str(name), tensor, records=records) for name, tensor in state.items()]


def _load_without_data(path: Path, file: str) -> Any:
    """Unpickle a file into fake tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, weights_only=True, map_location="cpu")
    except REFUSALS as error:
        raise SourceError(
            f"{file}: torch's weights_only loader refuses it ({type(error).__name__}): it is damaged or holds more "
            "than tensors; convert it to safetensors if you trust it"
        ) from None


def _stored(file: str, name: str, tensor: Tensor, *, records: list[Span]) -> StoredTensor:
    """Return the place of a fake tensor in the file."""
    import torch

    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or dtype is None:
        raise SourceError(
            f"{file}: tensor {name!r} is not a contiguous tensor of a known dtype: convert to safetensors"
        )
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    offset = (start or 0) + int(tensor.storage_offset()) * tensor.element_size()
    count = tensor.numel() * tensor.element_size()
    if start is None or not any(first <= offset and offset + count <= end for first, end in records):
        raise SourceError(f"{file}: tensor {name!r} does not lie within one record of the file: fetch it again")
    return StoredTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), file=file, offset=offset, byte_count=count)


def _data_records(path: Path, file: str) -> list[Span]:
    """Return the span of every storage in the zip file.

    Raises SourceError for compressed or encrypted records, and for a byte order other than little-endian.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as stream:
            spans = []
            for entry in archive.infolist():
                if entry.filename.endswith("/byteorder") and archive.read(entry).strip() != b"little":
                    raise SourceError(f"{file}: expected little-endian data, found another byte order")
                if "/data/" not in entry.filename:
                    continue
                if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                    raise SourceError(
                        f"{file}: record {entry.filename!r} is compressed or encrypted: save it with torch"
                    )
                stream.seek(entry.header_offset + 26)
                name_bytes, extra_bytes = struct.unpack("<HH", stream.read(4))
                start = entry.header_offset + 30 + name_bytes + extra_bytes
                spans.append((start, start + entry.file_size))
    except (zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise SourceError(
            f"{file}: expected a file that torch.save wrote (a zip file), found {type(error).__name__}: it is damaged "
            "or older than torch 1.6; load and save it with a current torch"
        ) from None
    return spans
