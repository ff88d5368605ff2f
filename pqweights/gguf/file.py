"""What a GGUF file holds, strictly parsed: metadata, tensors, and the parts of a model that is split over files.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, with the rules of llama.cpp's reader
(ggml/src/gguf.cpp): the data of tensors follow each other in the order of their entries, each padded to the alignment.
A long list, such as a vocabulary, is counted and not kept.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pqweights.checkpoint.storage import LocalStorage, read_bytes
from pqweights.errors import SourceError
from pqweights.gguf.cursor import Cursor
from pqweights.gguf.types import ARRAY, BOOL, NUMBER_FORMATS, STRING, TENSOR_TYPES, VALUE_TYPES, StoredType
from pqweights.strict_json import MAX_ELEMENTS

MAGIC = b"GGUF"
SUFFIX = ".gguf"
VERSIONS = (2, 3)  # they differ in nothing that is read here
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
# No model is near these numbers; without limits, a damaged file could ask for any amount of memory.
MAX_KEYS, MAX_TENSORS = 100_000, 1_000_000
# The fewest bytes of an entry: a key or name of one letter, its length, and what follows it.
KEY_BYTES, TENSOR_BYTES = 8 + 1 + 4 + 1, 8 + 1 + 4 + 4 + 8
# ggml has names of up to 63 bytes, and up to four dimensions.
MAX_NAME_BYTES, MAX_DIMENSIONS = 63, 4
# How many items of a list are kept; lists with a number for each layer are kept whole.
ITEMS_KEPT = 1024
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class MetadataList(NamedTuple):
    """A list in the metadata.

    kind: the type of its items: uint32, string, ...
    length: how many there are
    first: the first of them, at most ITEMS_KEPT
    """

    kind: str
    length: int
    first: tuple[str | int | float | bool, ...]


MetadataValue = str | int | float | bool | MetadataList


class GgufTensor(NamedTuple):
    """A tensor in a GGUF file.

    shape: in the order of torch, rows before columns
    type: Q4_K, F32, ...
    offset: where its data begin, in bytes from the start of the file
    """

    name: str
    shape: tuple[int, ...]
    type: str
    file: str
    offset: int
    byte_count: int

    @property
    def weights(self) -> int:
        """How many weights it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class GgufContents:
    """What a GGUF file holds, or all parts of a model that is split over several.

    files: the names of the files, in order; model.gguf, or model-00001-of-00002.gguf and so on
    folder: where they lie
    version: of the format, 2 or 3
    metadata: that of the first file
    tensors: those of all files, in the order of their data
    file_bytes: the size of all files
    """

    folder: Path
    files: tuple[str, ...]
    version: int
    metadata: dict[str, MetadataValue]
    tensors: tuple[GgufTensor, ...]
    file_bytes: int

    @property
    def path(self) -> Path:
        """The first file, from which llama.cpp finds the others."""
        return self.folder / self.files[0]

    @functools.cached_property
    def architecture(self) -> str:
        """What llama.cpp calls the model: llama, qwen2, ...; an empty text if the file does not say."""
        return self.text("general.architecture") or ""

    def text(self, key: str) -> str | None:
        """Return a text of the metadata, if there is one."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """Return a whole number of the metadata, if there is one."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def context(self) -> int | None:
        """The most tokens that the model takes at once, if the file says."""
        return self.number(f"{self.architecture}.context_length") or None

    @property
    def vocabulary(self) -> int | None:
        """How many token ids the model knows, if the file says."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, MetadataList):
            return tokens.length or None
        return self.number(f"{self.architecture}.vocab_size") or None

    @property
    def weights(self) -> int:
        """How many weights all tensors have."""
        return sum(tensor.weights for tensor in self.tensors)


# Which files there are.


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder with GGUF files and no other weights."""
    if path.is_dir():
        return bool(_names(path)) and next(path.glob("*.safetensors"), None) is None
    if path.suffix.lower() == SUFFIX:
        return path.is_file()
    return path.is_file() and _starts_with_magic(path)


def _starts_with_magic(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*{SUFFIX}") if path.is_file() and path.name[0] != ".")


def open_gguf(path: Path) -> GgufContents:
    """Read what a GGUF file holds, or a folder with one model of it; of a split model all parts, whichever is given.

    Raises SourceError for a damaged file, and if parts are missing or do not belong together.
    """
    file = _only_model(path) if path.is_dir() else path
    if not file.is_file():
        raise SourceError(f"{path}: no such file or folder")
    first = _read_part(file)
    count = first.number(SPLIT_COUNT) or 1
    if count == 1:
        return first
    return _joined([_read_part(each) for each in _parts(file, count)])


def _only_model(folder: Path) -> Path:
    """Return the only GGUF file of a folder, or the first part of its only model."""
    names = _names(folder)
    models = {_model_name(name) for name in names}
    if len(models) > 1:
        raise SourceError(
            f"{folder}: expected one GGUF model, found {len(models)} ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}): give the file"
        )
    if not names:
        raise SourceError(f"{folder}: expected a GGUF file, found none")
    return folder / names[0]


def _model_name(file: str) -> str:
    found = _PART.fullmatch(file)
    return found[1] + found[3] if found else file


def _parts(file: Path, count: int) -> list[Path]:
    """Return the files of a split model, of which `file` is one."""
    name = _PART.fullmatch(file.name)
    if name is None or int(name[3]) != count:
        raise SourceError(
            f"{file}: it is a part of a model in {count} files: expected a name such as "
            f"model-00001-of-{count:05d}{SUFFIX}, by which llama.cpp finds the others"
        )
    paths = [file.with_name(f"{name[1]}-{number + 1:05d}-of-{count:05d}{SUFFIX}") for number in range(count)]
    for path in paths:
        if not path.is_file():
            raise SourceError(f"{path}: missing; {file.name} is a part of a model in {count} files: fetch it")
    return paths


def _joined(parts: list[GgufContents]) -> GgufContents:
    """Check that parts belong together, and return what all of them hold."""
    first = parts[0]
    for number, part in enumerate(parts):
        found = part.number(SPLIT_NUMBER), part.number(SPLIT_COUNT)
        if found != (number, len(parts)):
            raise SourceError(
                f"{part.path}: expected part {number} of {len(parts)} ({SPLIT_NUMBER}, {SPLIT_COUNT}), found "
                f"{found[0]} of {found[1]}: fetch all parts again"
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


def _read_part(path: Path) -> GgufContents:
    storage = LocalStorage(path.parent, only=[path.name])
    file_bytes = storage.files()[path.name].byte_count
    return parse_gguf(path, file_bytes, functools.partial(read_bytes, storage, path.name))


# A single file.


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
    kept = min(count, ITEMS_KEPT)
    first = _read_items(cursor, key, kind, kept)
    if kind == STRING:
        cursor.skip_strings(count - kept, f"an item of {key!r}")
    else:
        cursor.skip((count - kept) * struct.calcsize(f"<{NUMBER_FORMATS[kind]}"), f"{key!r}")
    return MetadataList(VALUE_TYPES[kind], count, first)


def _read_items(cursor: Cursor, key: str, kind: int, count: int) -> tuple[str | int | float | bool, ...]:
    """Read values of one type that follow each other."""
    if kind == STRING:
        # A vocabulary may have pieces of characters.
        return tuple(cursor.string(f"{key!r}").decode(errors="replace") for _ in range(count))
    if kind not in NUMBER_FORMATS:
        raise cursor.damaged(f"{key!r}: expected a type from 0 to {max(VALUE_TYPES)}, found {kind}")
    found = cursor.numbers(f"{count}{NUMBER_FORMATS[kind]}", f"{key!r}")
    if kind != BOOL:
        return found
    if any(value > 1 for value in found):
        raise cursor.damaged(f"{key!r}: expected 0 or 1, found {max(found)}")
    return tuple(map(bool, found))


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
) -> tuple[GgufTensor, ...]:
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
        tensors.append(GgufTensor(entry.name, entry.shape, entry.type.name, file, start + place, count))
        end = start + place + count
        place += _padded(count, alignment)
    # Writers differ in whether they pad the last tensor, too.
    if not end <= file_bytes <= max(_padded(end, alignment), start + place):
        state = "truncated" if file_bytes < end else "followed by foreign bytes"
        raise cursor.damaged(f"data is {state}: expected {start + place} bytes in the file, found {file_bytes}")
    return tuple(tensors)


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment
