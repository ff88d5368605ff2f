"""What a GGUF file holds: metadata and tensors, and the numbers that it uses for their types and for mixes.

A long list, such as a vocabulary, is counted and not kept. Format: https://github.com/ggml-org/llama.cpp
(ggml/include/gguf.h, ggml/include/ggml.h and include/llama.h). The tables are not taken from the gguf package, so that
a file is read without it, also one of a type that it lacks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pqweights.kernels.gguf_encoding import BLOCK_TYPES

# How many items of a list are kept; lists with a number for each layer are kept whole.
ITEMS_KEPT = 1024


class MetadataList(NamedTuple):
    """A list in the metadata.

    item_type: the type of its items: uint32, string, ...
    length: how many there are
    first: the first of them, at most ITEMS_KEPT
    """

    item_type: str
    length: int
    first: tuple[str | int | float | bool, ...]


MetadataValue = str | int | float | bool | MetadataList


class GgufTensor(NamedTuple):
    """A tensor in a GGUF file.

    shape: in the order of torch, rows before columns
    type: Q4_K, F32, ...
    byte_count: the size of its data
    file, offset: of a file that is there, its name, and where the data begin, in bytes from the start
    """

    name: str
    shape: tuple[int, ...]
    type: str
    byte_count: int
    file: str = ""
    offset: int = 0

    @property
    def weights(self) -> int:
        """How many weights it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class GgufContents:
    """What a GGUF file holds, or all parts of a model that is split over several.

    files: their names in the folder, in order; model.gguf, or model-00001-of-00002.gguf and so on
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


# By the number of a type of tensors: its name, and how many weights and bytes a block of it has.
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 9: ("Q8_1", 32, 40), 15: ("Q8_K", 256, 292), 24: ("I8", 1, 1),
    25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 30: ("BF16", 1, 2),
} | {of.number: (of.kind, of.group_size, of.block_bytes) for of in BLOCK_TYPES.values()}  # fmt: skip
TYPE_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}

# general.file_type: the mix of types that the writer of a file was asked for.
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0",
    37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip

# Values of metadata: the name of each type, and how struct reads a number of it.
STRING, ARRAY, BOOL = 8, 9, 7
VALUE_TYPES = {
    0: "uint8", 1: "int8", 2: "uint16", 3: "int16", 4: "uint32", 5: "int32", 6: "float32", BOOL: "bool",
    STRING: "string", ARRAY: "array", 10: "uint64", 11: "int64", 12: "float64",
}  # fmt: skip
NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
