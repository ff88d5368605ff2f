"""What a GGUF file holds: metadata and tensors.

A long list, such as a vocabulary, is counted and not kept.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# How many items of a list are kept; lists with a number for each layer are kept whole.
ITEMS_KEPT = 1024


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


class FoundTensor(NamedTuple):
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
    tensors: tuple[FoundTensor, ...]
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
