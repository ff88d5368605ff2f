"""GGUF files in a folder: which there are, and the parts of a model that is split over several."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from pqweights.checkpoint.storage import LocalStorage, read_bytes
from pqweights.errors import SourceError
from pqweights.gguf.contents import GgufContents
from pqweights.gguf.parsing import MAGIC, parse_gguf

SUFFIX = ".gguf"
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


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
    return _joined([_read_part(part) for part in _parts(file, count)])


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
    match = _PART.fullmatch(file)
    return match[1] + match[3] if match else file


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


def _read_part(path: Path) -> GgufContents:
    storage = LocalStorage(path.parent, only=[path.name])
    file_bytes = storage.files()[path.name].byte_count
    return parse_gguf(path, file_bytes, functools.partial(read_bytes, storage, path.name))
