"""The header of a GGUF file, strictly parsed, in pieces.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, with the rules of llama.cpp's reader
(ggml/src/gguf.cpp): the data of tensors follow each other in the order of their entries, each padded to the alignment.
gguf.GGUFReader is not used: it takes 27 s for a vocabulary of Llama 3's size where this takes 0.5 s, accepts files with
holes, overlaps and foreign bytes, and does not end for a list that claims 2**62 items.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.common.strict_json import MAX_ELEMENTS
from pqweights.errors import SourceError
from pqweights.gguf.contents import (
    ARRAY,
    BOOL,
    ITEMS_KEPT,
    NUMBER_FORMATS,
    STRING,
    TENSOR_TYPES,
    VALUE_TYPES,
    FileTensor,
    GgufContents,
    MetadataList,
    MetadataValue,
    StoredType,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # they differ in nothing that is read here
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
# No model is near these numbers; without limits, a damaged file could ask for any amount of memory.
MAX_KEYS, MAX_TENSORS, MAX_ITEMS = 100_000, 1_000_000, 50_000_000
# The fewest bytes of an entry: a key or name of one letter, its length, and what follows it.
LENGTH_BYTES = 8
KEY_BYTES, TENSOR_BYTES = LENGTH_BYTES + 1 + 4 + 1, LENGTH_BYTES + 1 + 4 + 4 + 8
# A header is read in pieces of this size. A model with a large vocabulary has about 20 MB of it.
PIECE_BYTES = 1 << 20
# A tokenizer.json that is stored as one text has up to 40 MB.
MAX_STRING_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")
# ggml has names of up to 63 bytes, and up to four dimensions.
MAX_NAME_BYTES, MAX_DIMENSIONS = 63, 4


def parse_gguf(path: Path, file_bytes: int, read: Callable[[int, int], bytes]) -> GgufContents:
    """Parse the header of a GGUF file.

    path: the file
    file_bytes: its size
    read: read(offset, count) returns bytes of the file

    Raises SourceError for every way in which a header can be wrong: magic, version, counts, lengths, types, shapes,
    alignment, holes, and data that do not end where the file does.
    """
    cursor = _Cursor(str(path), file_bytes, read)
    version, tensor_count, key_count = _read_start(cursor)
    metadata: dict[str, MetadataValue] = {}
    for number in range(key_count):
        key = _read_name(cursor, f"key {number}")
        if key in metadata:
            raise cursor.damaged(f"key {key!r} appears twice")
        metadata[key] = _read_value(cursor, key)
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.damaged(f"{ALIGNMENT_KEY}: expected a power of two, found {str(alignment)[:40]}")
    entries = [_read_tensor(cursor, number) for number in range(tensor_count)]
    return GgufContents(
        folder=path.parent,
        files=(path.name,),
        version=version,
        metadata=metadata,
        tensors=_located(cursor, path.name, entries, file_bytes=file_bytes, alignment=alignment),
        file_bytes=file_bytes,
    )


def _read_start(cursor: _Cursor) -> tuple[int, int, int]:
    """Read the magic bytes, and return the version, the number of tensors and that of keys."""
    if cursor.left < len(MAGIC):
        raise cursor.damaged(f"expected the bytes {MAGIC.decode()}, found a file of {cursor.left} bytes")
    (magic,) = cursor.numbers("4s", "the magic bytes")
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
    for what, count, most, least in (
        ("tensors", tensors, MAX_TENSORS, TENSOR_BYTES),
        ("keys", keys, MAX_KEYS, KEY_BYTES),
    ):
        if count > min(most, cursor.left // least):
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


def _read_value(cursor: _Cursor, key: str) -> MetadataValue:
    (code,) = cursor.numbers("I", f"the type of {key!r}")
    if code != ARRAY:
        return _read_items(cursor, key, code, 1)[0]
    code, count = cursor.numbers("IQ", f"the type and length of {key!r}")
    if code == ARRAY:
        raise cursor.damaged(f"{key!r}: expected a list of numbers or texts, found a list of lists")
    if code not in VALUE_TYPES:
        raise _unknown_type(cursor, key, code)
    item_bytes = LENGTH_BYTES if code == STRING else struct.calcsize(f"<{NUMBER_FORMATS[code]}")
    if count > min(MAX_ITEMS, cursor.left // item_bytes):
        raise cursor.damaged(f"{key!r}: expected a list that {cursor.left} bytes can hold, found {count} items")
    kept = min(count, ITEMS_KEPT)
    first = _read_items(cursor, key, code, kept)
    if code == STRING:
        cursor.skip_strings(count - kept, f"an item of {key!r}")
    else:
        cursor.skip((count - kept) * item_bytes, f"{key!r}")
    return MetadataList(VALUE_TYPES[code], count, first)


def _read_items(cursor: _Cursor, key: str, code: int, count: int) -> tuple[str | int | float | bool, ...]:
    """Read values of one type that follow each other."""
    if code == STRING:
        # A vocabulary may have pieces of characters.
        return tuple(cursor.string(f"{key!r}").decode(errors="replace") for _ in range(count))
    if code not in NUMBER_FORMATS:
        raise _unknown_type(cursor, key, code)
    numbers = cursor.numbers(f"{count}{NUMBER_FORMATS[code]}", f"{key!r}")
    if code != BOOL:
        return numbers
    if any(value > 1 for value in numbers):
        raise cursor.damaged(f"{key!r}: expected 0 or 1, found {max(numbers)}")
    return tuple(map(bool, numbers))


def _unknown_type(cursor: _Cursor, key: str, code: int) -> SourceError:
    return cursor.damaged(f"{key!r}: expected a type from 0 to {max(VALUE_TYPES)}, found {code}")


class _TensorEntry(NamedTuple):
    """What a header says of a tensor. offset: where its data begin, in bytes from the start of all data"""

    name: str
    shape: tuple[int, ...]
    type: StoredType
    offset: int

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes


def _read_tensor(cursor: _Cursor, number: int) -> _TensorEntry:
    name = _read_name(cursor, f"the name of tensor {number}")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise cursor.damaged(f"tensor {name[:80]!r}: expected a name of at most {MAX_NAME_BYTES} bytes")
    what = f"tensor {name!r}"
    (dimensions,) = cursor.numbers("I", what)
    if dimensions > MAX_DIMENSIONS:
        raise cursor.damaged(f"{what}: expected at most {MAX_DIMENSIONS} dimensions, found {dimensions}")
    *sizes, code, offset = cursor.numbers(f"{dimensions}QIQ", what)
    shape = tuple(reversed(sizes))
    if max(shape, default=0) > MAX_ELEMENTS or math.prod(shape) > MAX_ELEMENTS:
        raise cursor.damaged(f"{what}: shape {str(list(shape))[:80]} overflows")
    if code not in TENSOR_TYPES:
        raise SourceError(
            f"{cursor.file}: {what}: expected a type of llama.cpp, found {code}; the file is damaged, or newer than "
            "this pqweights"
        )
    stored = TENSOR_TYPES[code]
    if (shape[-1] if shape else 1) % stored.block_size:
        raise cursor.damaged(f"{what}: expected rows of a multiple of {stored.block_size} for {stored.name}, found "
                             f"{str(list(shape))[:80]}")  # fmt: skip
    return _TensorEntry(name, shape, stored, offset)


def _located(
    cursor: _Cursor, file: str, entries: list[_TensorEntry], *, file_bytes: int, alignment: int
) -> tuple[FileTensor, ...]:
    """Check that data follow each other up to the end of the file, and return where each tensor lies."""
    start = _padded(cursor.offset, alignment) if entries else cursor.offset
    names: set[str] = set()
    tensors, offset, end = [], 0, start
    for entry in entries:
        if entry.name in names:
            raise cursor.damaged(f"tensor {entry.name!r} appears twice")
        names.add(entry.name)
        if entry.offset != offset:
            fault = "overlaps the one before it" if entry.offset < offset else "leaves a hole before it"
            raise cursor.damaged(f"tensor {entry.name!r} {fault}: expected data offset {offset}, found {entry.offset}")
        count = entry.byte_count
        tensors.append(FileTensor(entry.name, entry.shape, entry.type.name, file, start + offset, count))
        end = start + offset + count
        offset += _padded(count, alignment)
    # Writers differ in whether they pad the last tensor, too.
    if not end <= file_bytes <= max(_padded(end, alignment), start + offset):
        state = "truncated" if file_bytes < end else "followed by foreign bytes"
        raise cursor.damaged(f"data is {state}: expected {start + offset} bytes in the file, found {file_bytes}")
    return tuple(tensors)


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


class _Cursor:
    """A position in a file, read forward and never beyond its end.

    Everything is little endian and nothing is aligned, so the offset of a field is known only once all fields before it
    were read.

    file: what messages call the file
    file_bytes: its size
    read: read(offset, count) returns bytes of the file
    """

    def __init__(self, file: str, file_bytes: int, read: Callable[[int, int], bytes]) -> None:
        self.file, self._file_bytes, self._read = file, file_bytes, read
        # The piece that was read last, the offset of its first byte in the file, and the position in it.
        self._piece, self._start, self._position = b"", 0, 0

    @property
    def offset(self) -> int:
        """The offset of the next byte in the file."""
        return self._start + self._position

    @property
    def left(self) -> int:
        """How many bytes of the file follow."""
        return self._file_bytes - self.offset

    def damaged(self, what: str) -> SourceError:
        """Return the error for a file that is not as the format says."""
        return SourceError(f"{self.file}: {what}; the file is damaged, or not a GGUF file: fetch it again")

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        """Read numbers. form: their types, as struct writes them; what: their name, for messages"""
        packed = struct.Struct(f"<{form}")
        self._need(packed.size, what)
        numbers = packed.unpack_from(self._piece, self._position)
        self._position += packed.size
        return numbers

    def string(self, what: str) -> bytes:
        """Read a string: its length in 8 bytes, and so many bytes."""
        (length,) = self.numbers("Q", f"the length of {what}")
        if length > MAX_STRING_BYTES:
            raise self.damaged(f"{what}: expected at most {MAX_STRING_BYTES} bytes, found {length}")
        self._need(length, what)
        text = self._piece[self._position : self._position + length]
        self._position += length
        return text

    def skip(self, count: int, what: str) -> None:
        """Pass over bytes."""
        self._check(count, what)
        self._position += count
        if self._position > len(self._piece):
            self._start, self._piece, self._position = self.offset, b"", 0

    def skip_strings(self, count: int, what: str) -> None:
        """Pass over strings; a vocabulary has hundreds of thousands, so those of a piece are passed in one loop."""
        while count:
            piece, position, last = self._piece, self._position, len(self._piece) - _LENGTH.size
            while count and position <= last:
                end = position + _LENGTH.size + _LENGTH.unpack_from(piece, position)[0]
                if end > len(piece):
                    break
                position, count = end, count - 1
            self._position = position
            if count:
                self.string(what)
                count -= 1

    def _need(self, count: int, what: str) -> None:
        """Have the next bytes in the piece."""
        self._check(count, what)
        if self._position + count > len(self._piece):
            start = self.offset
            self._piece = self._read(start, min(max(count, PIECE_BYTES), self._file_bytes - start))
            self._start, self._position = start, 0

    def _check(self, count: int, what: str) -> None:
        if count > self.left:
            raise self.damaged(f"{what}: expected {count} bytes at offset {self.offset}, found {max(self.left, 0)}")
