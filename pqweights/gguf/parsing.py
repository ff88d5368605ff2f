"""The header of a GGUF file, strictly parsed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, with the rules of llama.cpp's reader
(ggml/src/gguf.cpp): the data of tensors follow each other in the order of their entries, each padded to the alignment.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pqweights.errors import SourceError
from pqweights.gguf.contents import ITEMS_KEPT, FoundTensor, GgufContents, MetadataList, MetadataValue
from pqweights.gguf.cursor import Cursor
from pqweights.gguf.types import ARRAY, BOOL, NUMBER_FORMATS, STRING, TENSOR_TYPES, VALUE_TYPES, StoredType
from pqweights.strict_json import MAX_ELEMENTS

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # they differ in nothing that is read here
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
# No model is near these numbers; without limits, a damaged file could ask for any amount of memory.
MAX_KEYS, MAX_TENSORS, MAX_ITEMS = 100_000, 1_000_000, 50_000_000
# The fewest bytes of an entry: a key or name of one letter, its length, and what follows it.
LENGTH_BYTES = 8
KEY_BYTES, TENSOR_BYTES = LENGTH_BYTES + 1 + 4 + 1, LENGTH_BYTES + 1 + 4 + 4 + 8
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
    cursor = Cursor(str(path), file_bytes, read)
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
        tensors=_placed(cursor, path.name, entries, file_bytes=file_bytes, alignment=alignment),
        file_bytes=file_bytes,
    )


def _read_start(cursor: Cursor) -> tuple[int, int, int]:
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


def _read_name(cursor: Cursor, what: str) -> str:
    found = cursor.string(what)
    try:
        name = found.decode()
    except UnicodeDecodeError:
        raise cursor.damaged(f"{what}: expected UTF-8 text, found {found[:40]!r}") from None
    if not name or not name.isprintable():
        raise cursor.damaged(f"{what}: expected a printable name, found {ascii(name)[:80]}")
    return name


def _read_value(cursor: Cursor, key: str) -> MetadataValue:
    (kind,) = cursor.numbers("I", f"the type of {key!r}")
    if kind != ARRAY:
        return _read_items(cursor, key, kind, 1)[0]
    kind, count = cursor.numbers("IQ", f"the type and length of {key!r}")
    if kind == ARRAY:
        raise cursor.damaged(f"{key!r}: expected a list of numbers or texts, found a list of lists")
    if kind not in VALUE_TYPES:
        raise _unknown_type(cursor, key, kind)
    item_bytes = LENGTH_BYTES if kind == STRING else struct.calcsize(f"<{NUMBER_FORMATS[kind]}")
    if count > min(MAX_ITEMS, cursor.left // item_bytes):
        raise cursor.damaged(f"{key!r}: expected a list that {cursor.left} bytes can hold, found {count} items")
    kept = min(count, ITEMS_KEPT)
    first = _read_items(cursor, key, kind, kept)
    if kind == STRING:
        cursor.skip_strings(count - kept, f"an item of {key!r}")
    else:
        cursor.skip((count - kept) * item_bytes, f"{key!r}")
    return MetadataList(VALUE_TYPES[kind], count, first)


def _read_items(cursor: Cursor, key: str, kind: int, count: int) -> tuple[str | int | float | bool, ...]:
    """Read values of one type that follow each other."""
    if kind == STRING:
        # A vocabulary may have pieces of characters.
        return tuple(cursor.string(f"{key!r}").decode(errors="replace") for _ in range(count))
    if kind not in NUMBER_FORMATS:
        raise _unknown_type(cursor, key, kind)
    found = cursor.numbers(f"{count}{NUMBER_FORMATS[kind]}", f"{key!r}")
    if kind != BOOL:
        return found
    if any(value > 1 for value in found):
        raise cursor.damaged(f"{key!r}: expected 0 or 1, found {max(found)}")
    return tuple(map(bool, found))


def _unknown_type(cursor: Cursor, key: str, kind: int) -> SourceError:
    return cursor.damaged(f"{key!r}: expected a type from 0 to {max(VALUE_TYPES)}, found {kind}")


class _TensorEntry(NamedTuple):
    """What a header says of a tensor. place: where its data begin, in bytes from the start of all data"""

    name: str
    shape: tuple[int, ...]
    type: StoredType
    place: int

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes


def _read_tensor(cursor: Cursor, number: int) -> _TensorEntry:
    name = _read_name(cursor, f"the name of tensor {number}")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise cursor.damaged(f"tensor {name[:80]!r}: expected a name of at most {MAX_NAME_BYTES} bytes")
    what = f"tensor {name!r}"
    (dimensions,) = cursor.numbers("I", what)
    if dimensions > MAX_DIMENSIONS:
        raise cursor.damaged(f"{what}: expected at most {MAX_DIMENSIONS} dimensions, found {dimensions}")
    *sizes, kind, place = cursor.numbers(f"{dimensions}QIQ", what)
    shape = tuple(reversed(sizes))
    if max(shape, default=0) > MAX_ELEMENTS or math.prod(shape) > MAX_ELEMENTS:
        raise cursor.damaged(f"{what}: shape {str(list(shape))[:80]} overflows")
    if kind not in TENSOR_TYPES:
        raise SourceError(
            f"{cursor.file}: {what}: expected a type of llama.cpp, found {kind}; the file is damaged, or newer than "
            "this pqweights"
        )
    stored = TENSOR_TYPES[kind]
    if (shape[-1] if shape else 1) % stored.block_size:
        raise cursor.damaged(f"{what}: expected rows of a multiple of {stored.block_size} for {stored.name}, found "
                             f"{str(list(shape))[:80]}")  # fmt: skip
    return _TensorEntry(name, shape, stored, place)


def _placed(
    cursor: Cursor, file: str, entries: list[_TensorEntry], *, file_bytes: int, alignment: int
) -> tuple[FoundTensor, ...]:
    """Check that data follow each other up to the end of the file, and return where each tensor lies."""
    start = _padded(cursor.offset, alignment) if entries else cursor.offset
    names: set[str] = set()
    tensors, place, end = [], 0, start
    for entry in entries:
        if entry.name in names:
            raise cursor.damaged(f"tensor {entry.name!r} appears twice")
        names.add(entry.name)
        if entry.place != place:
            kind = "overlaps the one before it" if entry.place < place else "leaves a hole before it"
            raise cursor.damaged(f"tensor {entry.name!r} {kind}: expected data offset {place}, found {entry.place}")
        count = entry.byte_count
        tensors.append(FoundTensor(entry.name, entry.shape, entry.type.name, file, start + place, count))
        end = start + place + count
        place += _padded(count, alignment)
    # Writers differ in whether they pad the last tensor, too.
    if not end <= file_bytes <= max(_padded(end, alignment), start + place):
        state = "truncated" if file_bytes < end else "followed by foreign bytes"
        raise cursor.damaged(f"data is {state}: expected {start + place} bytes in the file, found {file_bytes}")
    return tuple(tensors)


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment
