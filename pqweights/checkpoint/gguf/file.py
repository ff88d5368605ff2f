"""GGUF files: their headers, strictly parsed, and the parts of a model that is split over several.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, with the rules of llama.cpp's reader
(ggml/src/gguf.cpp): the data of tensors follow each other in the order of their entries, each padded to the alignment.
gguf.GGUFReader is not used: it takes 27 s for a vocabulary of Llama 3's size where this takes 0.5 s, accepts files with
holes, overlaps and foreign bytes, and does not end for a list that claims 2**62 items.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pqweights.checkpoint.gguf.contents import (
    ARRAY,
    BOOL,
    ITEMS_KEPT,
    NUMBER_FORMATS,
    STRING,
    TENSOR_TYPES,
    VALUE_TYPES,
    GgufContents,
    GgufTensor,
    MetadataList,
    MetadataValue,
)
from pqweights.checkpoint.header import ByteReads, aligned, overflows
from pqweights.checkpoint.storage import Storage, read_bytes
from pqweights.errors import SourceError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # they differ in nothing that is read here
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
# No model is near these numbers; without limits, a damaged file could ask for any amount of memory.
MAX_KEYS, MAX_TENSORS, MAX_ITEMS = 100_000, 1_000_000, 50_000_000
# The fewest bytes of an entry: a key or name of one letter, its length, and what follows it.
LENGTH_BYTES = 8
KEY_BYTES, TENSOR_BYTES = LENGTH_BYTES + 1 + 4 + 1, LENGTH_BYTES + 1 + 4 + 4 + 8
MAX_PARTS = 10_000
# A header is read in pieces of this size. A model with a large vocabulary has about 20 MB of it.
PIECE_BYTES = 1 << 20
# A tokenizer.json that is stored as one text has up to 40 MB.
MAX_STRING_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")
# ggml has names of up to 63 bytes, and up to four dimensions; files of image and video models, which it does not load,
# have names of up to 127 and weights of convolutions in three dimensions.
MAX_NAME_BYTES, MAX_DIMENSIONS = 127, 5


def parse_gguf(
    folder: Path, name: str, stream: BinaryIO, file_bytes: int, *, items_kept: int = ITEMS_KEPT
) -> GgufContents:
    """Parse the header of a GGUF file in a folder, given its content and its size. items_kept: of each list

    Raises SourceError for every way in which a header can be wrong: magic, version, counts, lengths, types, shapes,
    alignment, holes, and data that do not end where the file does.
    """
    cursor = _Cursor(str(folder / name), stream, file_bytes)
    version, tensor_count, key_count = _read_start(cursor)
    metadata: dict[str, MetadataValue] = {}
    for number in range(key_count):
        key = _read_name(cursor, f"key {number}")
        if key in metadata:
            raise cursor.damaged(f"key {key!r} appears twice")
        metadata[key] = _read_value(cursor, key, items_kept)
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.damaged(f"{ALIGNMENT_KEY}: expected a power of two, found {str(alignment)[:40]}")
    entries = [_read_tensor(cursor, number) for number in range(tensor_count)]
    return GgufContents(
        folder=folder,
        files=(name,),
        version=version,
        metadata=metadata,
        tensors=_located(cursor, name, entries, file_bytes=file_bytes, alignment=alignment),
        file_bytes=file_bytes,
    )


def _read_start(cursor: _Cursor) -> tuple[int, int, int]:
    """Read the magic bytes, and return the version, the number of tensors and that of keys."""
    if cursor.left < len(MAGIC):
        raise cursor.damaged(f"expected the bytes {MAGIC.decode()}, found a file of {cursor.left} bytes")
    magic = cursor.read(len(MAGIC), "the magic bytes")
    if magic != MAGIC:
        raise cursor.damaged(f"expected the bytes {MAGIC.decode()} at the start, found {magic!r}")
    (version,) = cursor.numbers("I", "the version")
    if version & 0xFFFF == 0 and version:
        raise SourceError(
            f"{cursor.file}: the file is big-endian, which pqweights does not read; get the little-endian one"
        )
    if version not in VERSIONS:
        raise cursor.damaged(f"version: expected {' or '.join(map(str, VERSIONS))}, found {version}")
    tensors, keys = cursor.numbers("QQ", "the number of tensors and of keys")
    for what, count, most in (
        ("tensors", tensors, min(MAX_TENSORS, cursor.left // TENSOR_BYTES)),
        ("keys", keys, min(MAX_KEYS, cursor.left // KEY_BYTES)),
    ):
        if count > most:
            raise cursor.damaged(f"number of {what}: expected what {cursor.left} bytes can hold, found {count}")
    return version, tensors, keys


def _read_name(cursor: _Cursor, what: str) -> str:
    raw = cursor.string(what)
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise cursor.damaged(f"{what}: expected UTF-8 text, found {raw[:40]!r}") from None
    if not name or not name.isprintable():
        raise cursor.damaged(f"{what}: expected a printable name, found {ascii(name)[:80]}")
    return name


def _read_value(cursor: _Cursor, key: str, items_kept: int) -> MetadataValue:
    (code,) = cursor.numbers("I", f"the type of {key!r}")
    if code != ARRAY:
        return _read_items(cursor, key, code, 1)[0]
    code, count = cursor.numbers("IQ", f"the type and length of {key!r}")
    if code == ARRAY:
        raise cursor.damaged(f"{key!r}: expected a list of numbers or texts, found a list of lists")
    _check_type(cursor, key, code)
    item_bytes = LENGTH_BYTES if code == STRING else struct.calcsize(f"<{NUMBER_FORMATS[code]}")
    if count > min(MAX_ITEMS, cursor.left // item_bytes):
        raise cursor.damaged(f"{key!r}: expected a list that {cursor.left} bytes can hold, found {count} items")
    kept = min(count, items_kept)
    first = _read_items(cursor, key, code, kept)
    if code == STRING:
        item = f"an item of {key!r}"
        for _ in range(count - kept):
            cursor.string(item)
    else:
        cursor.skip((count - kept) * item_bytes, f"{key!r}")
    return MetadataList(VALUE_TYPES[code], count, first)


def _check_type(cursor: _Cursor, key: str, code: int) -> None:
    if code not in VALUE_TYPES:
        raise cursor.damaged(f"{key!r}: expected a type from 0 to {max(VALUE_TYPES)}, found {code}")


def _read_items(cursor: _Cursor, key: str, code: int, count: int) -> tuple[str | int | float | bool, ...]:
    """Read values of one type that follow each other."""
    if code == STRING:
        # A vocabulary may have pieces of characters.
        return tuple(cursor.string(f"{key!r}").decode(errors="replace") for _ in range(count))
    _check_type(cursor, key, code)
    numbers = cursor.numbers(f"{count}{NUMBER_FORMATS[code]}", f"{key!r}")
    if code != BOOL:
        return numbers
    if any(value > 1 for value in numbers):
        raise cursor.damaged(f"{key!r}: expected 0 or 1, found {max(numbers)}")
    return tuple(map(bool, numbers))


def _read_tensor(cursor: _Cursor, number: int) -> GgufTensor:
    """Read what a header says of a tensor, with its offset from the start of all data."""
    name = _read_name(cursor, f"the name of tensor {number}")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise cursor.damaged(f"tensor {name[:80]!r}: expected a name of at most {MAX_NAME_BYTES} bytes")
    what = f"tensor {name!r}"
    (dimensions,) = cursor.numbers("I", what)
    if dimensions > MAX_DIMENSIONS:
        raise cursor.damaged(f"{what}: expected at most {MAX_DIMENSIONS} dimensions, found {dimensions}")
    *sizes, code, offset = cursor.numbers(f"{dimensions}QIQ", what)
    shape = tuple(reversed(sizes))
    if overflows(shape):
        raise cursor.damaged(f"{what}: shape {str(list(shape))[:80]} overflows")
    if code not in TENSOR_TYPES:
        raise SourceError(
            f"{cursor.file}: {what}: expected a type of llama.cpp, found {code}; the file is damaged, or newer than "
            "this pqweights"
        )
    type_name, block_size, block_bytes = TENSOR_TYPES[code]
    if (shape[-1] if shape else 1) % block_size:
        raise cursor.damaged(f"{what}: expected rows of a multiple of {block_size} for {type_name}, found "
                             f"{str(list(shape))[:80]}")  # fmt: skip
    return GgufTensor(name, shape, type_name, math.prod(shape) // block_size * block_bytes, offset=offset)


def _located(
    cursor: _Cursor, file: str, listed: list[GgufTensor], *, file_bytes: int, alignment: int
) -> tuple[GgufTensor, ...]:
    """Check that data follow each other up to the end of the file, and return where each tensor lies in it."""
    start = aligned(cursor.offset, alignment) if listed else cursor.offset
    names: set[str] = set()
    tensors, offset, end = [], 0, start
    for tensor in listed:
        if tensor.name in names:
            raise cursor.damaged(f"tensor {tensor.name!r} appears twice")
        names.add(tensor.name)
        if tensor.offset != offset:
            fault = "overlaps the one before it" if tensor.offset < offset else "leaves a hole before it"
            raise cursor.damaged(
                f"tensor {tensor.name!r} {fault}: expected data offset {offset}, found {tensor.offset}"
            )
        tensors.append(tensor._replace(file=file, offset=start + offset))
        end = start + offset + tensor.byte_count
        offset += aligned(tensor.byte_count, alignment)
    # Writers differ in whether they pad the last tensor, too.
    if not end <= file_bytes <= max(aligned(end, alignment), start + offset):
        state = "truncated" if file_bytes < end else "followed by foreign bytes"
        raise cursor.damaged(f"data is {state}: expected {start + offset} bytes in the file, found {file_bytes}")
    return tuple(tensors)


class _Cursor:
    """A file that is read forward and never beyond its end. file: what messages call it. left: the bytes that follow"""

    def __init__(self, file: str, stream: BinaryIO, file_bytes: int) -> None:
        self.file, self._stream, self.left, self._file_bytes = file, stream, file_bytes, file_bytes

    @property
    def offset(self) -> int:
        """The offset of the next byte in the file."""
        return self._file_bytes - self.left

    def damaged(self, what: str) -> SourceError:
        """Return the error for a file that is not as the format says."""
        return SourceError(f"{self.file}: {what}; the file is damaged, or not a GGUF file: fetch it again")

    def read(self, count: int, what: str) -> bytes:
        """Read bytes. what: their name, for messages"""
        raw = self._stream.read(count) if count <= self.left else b""
        if len(raw) < count:
            raise self.damaged(f"{what}: expected {count} bytes at offset {self.offset}, found {max(self.left, 0)}")
        self.left -= count
        return raw

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        """Read numbers. form: their types, as struct writes them"""
        packed = struct.Struct(f"<{form}")
        return packed.unpack(self.read(packed.size, what))

    def string(self, what: str) -> bytes:
        """Read a string: its length in 8 bytes, and so many bytes."""
        (length,) = _LENGTH.unpack(self.read(LENGTH_BYTES, f"the length of {what}"))
        if length > MAX_STRING_BYTES:
            raise self.damaged(f"{what}: expected at most {MAX_STRING_BYTES} bytes, found {length}")
        return self.read(length, what)

    def skip(self, count: int, what: str) -> None:
        """Pass over bytes."""
        while count:
            count -= len(self.read(min(count, PIECE_BYTES), what))


SUFFIX = ".gguf"
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
# Towers for images, each beside its text model, the most precise ones first.
TOWER_FILE = re.compile(r"mmproj.*\.gguf|.*[-_.]mmproj([-_.].*)?\.gguf", re.IGNORECASE)
_PRECISE = ("f32", "bf16", "f16", "fp16", "")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder with GGUF files and no other weights."""
    if path.is_dir():
        return holds_gguf(entry.name for entry in path.iterdir() if entry.is_file())
    return path.is_file() and is_gguf_file(Storage(path.parent, only=[path.name]), path.name)


def is_gguf_file(storage: Storage, file: str) -> bool:
    """Whether a file is GGUF, by its name or its first bytes."""
    if file.lower().endswith(SUFFIX):
        return True
    return storage.files()[file].byte_count >= len(MAGIC) and read_bytes(storage, file, 0, len(MAGIC)) == MAGIC


def holds_gguf(names: Iterable[str]) -> bool:
    """Whether there are GGUF files and no other weights among files."""
    suffixes = {Path(name).suffix for name in names if "/" not in name and name[0] != "."}
    return SUFFIX in suffixes and ".safetensors" not in suffixes


def open_gguf(path: Path) -> GgufContents:
    """Read what a GGUF file holds, or a folder with one model of it; of a split model all parts, whichever is given.

    Raises SourceError for a damaged file, and if parts are missing or do not belong together.
    """
    folder, file = (path, "") if path.is_dir() else (path.parent, path.name)
    if file and not path.is_file():
        raise SourceError(f"{path}: no such file or folder")
    return gguf_in(Storage(folder, only=[entry.name for entry in folder.iterdir() if entry.is_file()]), file)


def gguf_in(storage: Storage, file: str = "") -> GgufContents:
    """Read what a GGUF file in a storage holds, as `open_gguf` does. file: by default the only model at its top"""
    file = file or _only_model(storage)
    if file not in storage.files():
        raise SourceError(f"{storage}: expected the file {file}, found no such file")
    first = _read_part(storage, file)
    count = first.number(SPLIT_COUNT) or 1
    return first if count == 1 else _joined([_read_part(storage, part) for part in _parts(storage, file, count)])


def _only_model(storage: Storage) -> str:
    """Return the only GGUF file at the top of a storage, or the first part of its only model."""
    names = gguf_models(storage)
    if len(names) > 1:
        raise SourceError(
            f"{storage}: expected one GGUF model, found {len(names)} ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}): give the file{_on_hub(storage, names[0])}"
        )
    if not names:
        raise SourceError(f"{storage}: expected a GGUF file, found none")
    return names[0]


def gguf_models(storage: Storage) -> list[str]:
    """Return the first file of each GGUF model at the top of a storage; towers are not models."""
    names = [name for name in storage.files() if "/" not in name and name.endswith(SUFFIX) and name[0] != "."]
    first: dict[tuple[str, str], str] = {}
    for name in sorted(name for name in names if not TOWER_FILE.match(name)):
        part = _PART.fullmatch(name)
        first.setdefault((name, "") if part is None else (part[1], part[3]), name)
    return list(first.values())


def tower_beside(storage: Storage) -> str | None:
    """Return the most precise file at the top of a storage that is called as a tower is; None if there is none."""
    names = sorted(name for name in storage.files() if "/" not in name and TOWER_FILE.fullmatch(name))
    return min(names, key=lambda name: next(n for n, kind in enumerate(_PRECISE) if kind in name.lower()), default=None)


def _on_hub(storage: Storage, file: str) -> str:
    return "" if storage.origin is None else f", as hf://{storage.origin.id}/{file}"


def _parts(storage: Storage, file: str, count: int) -> list[str]:
    """Return the files of a split model, of which `file` is one."""
    folder = storage.local_folder() or Path()
    name = _PART.fullmatch(file)
    if name is None or int(name[3]) != count:
        raise SourceError(
            f"{folder / file}: it is a part of a model in {count} files: expected a name such as "
            f"model-00001-of-{count:05d}{SUFFIX}, by which llama.cpp finds the others"
        )
    names = parts_by_name(file)
    if missing := next((part for part in names if part not in storage.files()), None):
        raise SourceError(f"{folder / missing}: missing; {file} is a part of a model in {count} files: fetch it")
    return names


def parts_by_name(file: str) -> list[str]:
    """Return the files of a split model, of which one is named; else the file alone."""
    name = _PART.fullmatch(file)
    count = int(name[3]) if name is not None else 0
    if name is None or not 0 < count <= MAX_PARTS:
        return [file]
    return [f"{name[1]}-{number + 1:05d}-of-{name[3]}{SUFFIX}" for number in range(count)]


def _joined(parts: list[GgufContents]) -> GgufContents:
    """Check that parts belong together, and return what all of them hold."""
    first = parts[0]
    for number, part in enumerate(parts):
        stated = part.number(SPLIT_NUMBER), part.number(SPLIT_COUNT)
        if stated != (number, len(parts)):
            raise SourceError(
                f"{part.path}: expected part {number} of {len(parts)} ({SPLIT_NUMBER}, {SPLIT_COUNT}), found "
                f"{stated[0]} of {stated[1]}: fetch all parts again"
            )
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    expected = first.number(SPLIT_TENSORS)
    if expected is not None and expected != len(tensors):
        raise SourceError(
            f"{first.path}: expected {expected} tensors in {len(parts)} files, found {len(tensors)}: fetch all parts "
            "again"
        )
    twice = next((name for name, times in Counter(t.name for t in tensors).items() if times > 1), None)
    if twice is not None:
        raise SourceError(f"{first.path}: tensor {twice!r} is in two of its {len(parts)} files: fetch all parts again")
    files = tuple(part.files[0] for part in parts)
    return replace(first, files=files, tensors=tensors, file_bytes=sum(part.file_bytes for part in parts))


class _Stream(io.RawIOBase):
    """A file in a storage, read forward."""

    def __init__(self, storage: ByteReads, file: str, byte_count: int) -> None:
        self._storage, self._file, self._byte_count, self._offset = storage, file, byte_count, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        into = np.frombuffer(buffer, dtype=np.uint8)[: self._byte_count - self._offset]
        if len(into):
            self._storage.read_into(self._file, self._offset, into)
        self._offset += len(into)
        return len(into)


def _read_part(storage: Storage, file: str, items_kept: int = ITEMS_KEPT) -> GgufContents:
    byte_count = storage.files()[file].byte_count
    stream = io.BufferedReader(_Stream(storage, file, byte_count), PIECE_BYTES)
    return parse_gguf(storage.local_folder() or Path(), file, stream, byte_count, items_kept=items_kept)


def whole_metadata(storage: Storage, contents: GgufContents) -> dict[str, MetadataValue]:
    """Return the metadata of a file with all items of its lists, such as the tokens of a vocabulary."""
    return _read_part(storage, contents.files[0], MAX_ITEMS).metadata
