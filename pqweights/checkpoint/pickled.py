"""Pickled PyTorch weights, read only on request: torch's weights_only unpickler gives the layout, we read the bytes.

The unpickler runs with fake tensors, so nothing is loaded; torch notes for each storage where it lies in the zip file.
The zip file itself is checked first, because torch's loader does not check that its records are plain bytes.
"""

from __future__ import annotations

import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.names import PICKLE_SUFFIXES
from pqweights.checkpoint.storage import Storage
from pqweights.common.installing import pip_install
from pqweights.errors import MissingDependencyError, SourceError

if TYPE_CHECKING:
    from torch import Tensor

PICKLE_FILE = "pytorch_model.bin"
PICKLE_INDEX_FILE = "pytorch_model.bin.index.json"
# What torch's loader raises for a broken or hostile file.
REFUSALS = (
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
    EOFError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OSError,
)
# The safetensors dtype of each dtype of torch that can be read, by its name in torch.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}

Span = tuple[int, int]  # first byte, last byte + 1


def is_pickle(file: str) -> bool:
    """Whether a weight file is a pickle, by its name."""
    return file.endswith(PICKLE_SUFFIXES)


def stored_tensors(storage: Storage, file: str) -> list[StoredTensor]:
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
