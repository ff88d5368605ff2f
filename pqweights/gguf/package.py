"""The gguf package, which has the keys, tensor names and vocabularies of the format, and writes headers of files.

It is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pqweights.checkpoint.header import aligned
from pqweights.common.installing import pip_install
from pqweights.errors import MissingDependencyError

# What llama.cpp assumes unless a file says otherwise.
ALIGNMENT = 32


def gguf_package() -> Any:
    """Import the gguf package, untyped.

    Raises MissingDependencyError.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise MissingDependencyError(f"the gguf target needs gguf: {pip_install('gguf')}") from None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress what the package logs: it warns of what is decided here."""
    logger = logging.getLogger("gguf")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class MetadataEntry(NamedTuple):
    """One entry of the metadata.

    key: its name
    value: a number, a text, a truth value, or a list of those
    value_type: its type, a number of gguf.GGUFValueType
    item_type: for a list, the type of its items
    """

    key: str
    value: Any
    value_type: int
    item_type: int | None = None


class GgufTensor(NamedTuple):
    """What a header says of a tensor. type: the name of its type. byte_count: the size of its data."""

    name: str
    shape: tuple[int, ...]
    type: str
    byte_count: int


class FilePart(NamedTuple):
    """Which file this is, of how many, and how many tensors all of them have."""

    number: int
    parts: int
    tensors: int


def encode_header(metadata: Sequence[MetadataEntry], tensors: Sequence[GgufTensor], part: FilePart) -> bytes:
    """Return the bytes before the data of a file, padded to ALIGNMENT.

    metadata: all but what says which part this is; a file of several has it only in the first
    """
    gguf = gguf_package()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header"
        writer = gguf.GGUFWriter(path, "")
        writer.kv_data[0].clear()
        for entry in metadata if part.number == 0 else ():
            items = None if entry.item_type is None else gguf.GGUFValueType(entry.item_type)
            writer.add_key_value(entry.key, entry.value, gguf.GGUFValueType(entry.value_type), items)
        if part.parts > 1:
            split, types = gguf.Keys.Split, gguf.GGUFValueType
            writer.add_key_value(split.LLM_KV_SPLIT_NO, part.number, types.UINT16)
            writer.add_key_value(split.LLM_KV_SPLIT_COUNT, part.parts, types.UINT16)
            writer.add_key_value(split.LLM_KV_SPLIT_TENSORS_COUNT, part.tensors, types.INT32)
        for tensor in tensors:
            type_number = gguf.GGMLQuantizationType[tensor.type]
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.byte_count, type_number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        content = path.read_bytes()
    return content + bytes(aligned(len(content), ALIGNMENT) - len(content))
