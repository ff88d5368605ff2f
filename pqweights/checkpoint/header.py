"""The safetensors header: strict parsing of headers from anywhere, and the exact bytes of those that we write.

Format: 8-byte little-endian length, that many bytes of JSON, then the data without holes
(https://github.com/huggingface/safetensors). Our layout is that of the safetensors library: tensors by falling element
size, so that every tensor is aligned, and the header padded with spaces to a multiple of 8.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from pqweights.common.documents import ClosedDocument, Count, as_document
from pqweights.common.dtypes import DTYPE_BITS
from pqweights.common.strict_json import MAX_ELEMENTS, unique_keys
from pqweights.errors import SourceError

# The expressions that tell the role of a tensor take time that grows with the square of its name.
MAX_NAME = 512
# The largest dimension of a tensor without elements, whose size no bytes of a file confirm.
MOST_OF_NOTHING = 1 << 16
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
ONLY_GGUF_READERS = "GGUF, which only pqweights eval, export, inspect, plan and quantize read (local files)"
# The digits of the two offsets of a tensor, in files of gigabytes.
OFFSET_DIGITS = 20


class ByteReads(Protocol):
    """What tensors are read through."""

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer with bytes of a file from `offset` on."""
        ...


def read_stored(storage: ByteReads, stored: StoredTensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a small stored tensor."""
    raw = np.empty(stored.byte_count, dtype=np.uint8)
    storage.read_into(stored.file, stored.offset, raw)
    return raw


class TensorSpec(NamedTuple):
    """The name, dtype and shape of a tensor in a safetensors file.

    This class, StoredTensor and TensorPlan are named tuples, which are made several times as fast as frozen
    dataclasses: a model may have a hundred thousand of each.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        """The size of the data, in bytes."""
        return byte_count(self.dtype, self.shape)


class StoredTensor(NamedTuple):
    """A tensor in a file. offset: where its data begin, in bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    byte_count: int


@functools.lru_cache(maxsize=4096)
def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor's data in bytes, cached because a model has many tensors in a dozen shapes."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def parse_header(
    file: str, file_bytes: int, read: Callable[[int, int], bytes]
) -> tuple[list[StoredTensor], dict[str, str]]:
    """Parse the header of a safetensors file.

    file: what messages call the file
    file_bytes: its size
    read: read(offset, count) returns bytes of the file

    Returns the tensors in the order of their data, and the metadata. Raises SourceError for every way in which a header
    can be wrong: lengths, JSON, dtypes, shapes, overflow, holes, overlaps, and data that do not end where the file
    does.
    """
    header, data_start = _read_json(file, file_bytes, read)
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # the safetensors library takes null for none, too
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(file, "__metadata__: expected an object of strings")
    tensors = _parse_entries(file, header, data_start)
    tensors.sort(key=operator.attrgetter("offset", "byte_count"))
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            wrong = "overlaps the one before it" if tensor.offset < position else "leaves a hole before it"
            raise _damaged(
                file,
                f"tensor {tensor.name!r} {wrong}: expected data offset {position - data_start}, found "
                f"{tensor.offset - data_start}",
            )
        position += tensor.byte_count
    if position != file_bytes:
        state = "truncated" if position > file_bytes else "followed by foreign bytes"
        raise _damaged(file, f"data is {state}: expected {position} bytes in the file, found {file_bytes}")
    return tensors, metadata


def _damaged(file: str, what: str) -> SourceError:
    return SourceError(f"{file}: {what}; the file is damaged, or not a safetensors file: fetch it again")


def gguf_refused(file: str) -> SourceError:
    """Return the error for a GGUF file where a checkpoint or a master is expected. file: what the message calls it"""
    return SourceError(
        f"{file}: {ONLY_GGUF_READERS}; give the original safetensors checkpoint or a master made from it"
    )


def _read_json(file: str, file_bytes: int, read: Callable[[int, int], bytes]) -> tuple[dict[str, Any], int]:
    """Read the JSON object of a header, and return it with the offset at which the data begin."""
    start = read(0, min(8, file_bytes))
    if start.startswith(b"GGUF"):
        raise gguf_refused(file)
    if start == b"version ":
        raise SourceError(f"{file}: a Git LFS pointer, not the file that it stands for: fetch the file (git lfs pull)")
    if file_bytes < 8:
        raise _damaged(file, f"expected a safetensors header of at least 8 bytes, found a file of {file_bytes} bytes")
    header_bytes = int.from_bytes(start, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise _damaged(file, f"header length: expected at most {MAX_HEADER_BYTES} bytes, found {header_bytes}")
    if 8 + header_bytes > file_bytes:
        left = file_bytes - 8
        raise _damaged(file, f"header length: expected at most the {left} bytes that follow it, found {header_bytes}")
    try:
        header = _parse_json(read(8, header_bytes))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"header: expected a JSON object, found {str(error)[:120]!r}") from None
    if not isinstance(header, dict):
        raise _damaged(file, f"header: expected a JSON object, found {type(header).__name__}")
    return header, 8 + header_bytes


def _parse_json(data: bytes) -> Any:
    """Parse JSON whose objects have no key twice; raises ValueError or RecursionError.

    Most headers are what msgspec makes of their value, so no key is there twice. Only others, such as those with spaces
    between their items, need the slower parser, which looks for such keys.
    """
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        value = msgspec.json.decode(data)
        if msgspec.json.encode(value) == data.rstrip(b" "):
            return value
    return json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys)


class _Entry(ClosedDocument, frozen=True, gc=False):  # without gc, which would take as long as all the rest
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def _parse_entries(file: str, header: dict[str, Any], data_start: int) -> list[StoredTensor]:
    """Check each entry by itself, and return the tensors in the order of the header."""
    try:
        entries = msgspec.convert(header, dict[str, _Entry])
    except msgspec.ValidationError:
        entries = {name: _checked_entry(file, name, entry) for name, entry in header.items()}
    tensors = []
    for name, entry in entries.items():
        dtype, shape, (begin, end) = entry.dtype, entry.shape, entry.data_offsets
        if not name.isprintable() or len(name) > MAX_NAME:
            raise _damaged(
                file, f"tensor {ascii(name)[:80]}: expected a printable name of at most {MAX_NAME} characters"
            )
        if dtype not in DTYPE_BITS:
            raise _damaged(file, f"tensor {name!r}: expected a safetensors dtype, found {dtype[:40]!r}")
        if overflows(shape):
            raise _damaged(file, f"tensor {name!r}: shape {str(shape)[:80]} overflows")
        bits = math.prod(shape) * DTYPE_BITS[dtype]
        if 8 * (end - begin) != bits:
            raise _damaged(
                file,
                f"tensor {name!r}: expected {bits / 8:g} bytes for shape {str(shape)[:80]} of {dtype}, found "
                f"{end - begin} in its offsets",
            )
        tensors.append(StoredTensor(name, dtype, shape, file, data_start + begin, end - begin))
    return tensors


def overflows(shape: Sequence[int]) -> bool:
    """Whether a shape has more elements than can be counted, or none although its dimensions claim many."""
    elements = math.prod(shape)
    return elements > MAX_ELEMENTS or (elements == 0 and max(shape) > MOST_OF_NOTHING)


def _checked_entry(file: str, name: str, entry: Any) -> _Entry:
    return as_document(entry, _Entry, lambda problem: _damaged(file, f"tensor {ascii(name)[:200]}: {problem}"))


def build_header(
    file: str, specs: Sequence[TensorSpec], metadata: dict[str, str]
) -> tuple[bytes, tuple[StoredTensor, ...]]:
    """Return the first bytes of a safetensors file that will hold these tensors, and where the data of each must go."""
    ordered = in_file_order(specs)
    header = encode_header(ordered, metadata)
    return header, stored_tensors(file, len(header), ordered)


def in_file_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return tensors in the order in which a file holds them: by falling element size, else as given."""
    return sorted(specs, key=lambda spec: -DTYPE_BITS[spec.dtype])


def encode_header(ordered: Sequence[TensorSpec], metadata: dict[str, str]) -> bytes:
    """Return the first bytes of a safetensors file with these tensors, which must be in the order of the file."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for spec in ordered:
        begin, end = end, end + spec.byte_count
        entries[spec.name] = _Entry(spec.dtype, spec.shape, (begin, end))
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@functools.lru_cache(maxsize=4096)
def entry_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor takes in a header beside its name, up to some digits of its offsets."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": []}
    return len(msgspec.json.encode(entry)) + len(":,,") + OFFSET_DIGITS


def aligned(byte_count: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not below a number of bytes."""
    return -(-byte_count // alignment) * alignment


def stored_tensors(
    file: str, header_bytes: int, ordered: Sequence[TensorSpec], *, alignment: int = 1
) -> tuple[StoredTensor, ...]:
    """Return where the data of tensors lie, which follow a header of `header_bytes` in the given order.

    alignment: each tensor fills a multiple of this number of bytes
    """
    stored, offset = [], header_bytes
    for spec in ordered:
        stored.append(StoredTensor(spec.name, spec.dtype, spec.shape, file, offset, spec.byte_count))
        offset += aligned(spec.byte_count, alignment)
    return tuple(stored)
