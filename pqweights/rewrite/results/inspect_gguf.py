"""Inspect: what a GGUF file holds, whoever wrote it. Its weights are not read."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.gguf.contents import FILE_TYPES, FileTensor, GgufContents, MetadataList, MetadataValue
from pqweights.gguf.file import open_gguf


class TypeTotal(NamedTuple):
    """All tensors of one type, or of all of them. bytes: of their data"""

    type: str
    tensors: int
    weights: int
    bytes: int

    @property
    def bits_per_weight(self) -> float | None:
        """Bits per weight, with scales; None without weights."""
        return 8 * self.bytes / self.weights if self.weights else None

    def to_json(self) -> dict[str, Any]:
        """Return the entry in inspect --json."""
        return {**self._asdict(), "bits_per_weight": self.bits_per_weight}


class GgufTokenizerFacts(NamedTuple):
    """What the metadata say of the tokenizer.

    model: its kind: gpt2 (byte-level BPE), llama (SentencePiece), ...; None without one
    splitter: the rule that splits a text before it, if it has one
    tokens: how many there are
    begin, end: the tokens that begin and end a text
    has_chat_template: whether it can write conversations
    """

    model: str | None
    splitter: str | None
    tokens: int | None
    begin: int | None
    end: int | None
    has_chat_template: bool


@dataclass(frozen=True, repr=False)
class GgufInspection:
    """What a GGUF file holds, or all files of a split model."""

    contents: GgufContents

    @property
    def name(self) -> str | None:
        """What the file calls the model."""
        return self.contents.text("general.name")

    @property
    def file_type(self) -> str | None:
        """The mix of types that the file was made as: Q4_K_M, ...; the number, for one that is not known."""
        number = self.contents.number("general.file_type")
        return None if number is None else FILE_TYPES.get(number, str(number))

    @property
    def hyper_parameters(self) -> dict[str, MetadataValue]:
        """The metadata of the architecture, without its name before each key."""
        start = f"{self.contents.architecture}."
        found = self.contents.metadata.items()
        return {key.removeprefix(start): value for key, value in found if key.startswith(start)}

    @property
    def tokenizer(self) -> GgufTokenizerFacts:
        """The tokenizer."""
        found = self.contents
        return GgufTokenizerFacts(
            model=found.text("tokenizer.ggml.model"),
            splitter=found.text("tokenizer.ggml.pre"),
            tokens=found.vocabulary,
            begin=found.number("tokenizer.ggml.bos_token_id"),
            end=found.number("tokenizer.ggml.eos_token_id"),
            has_chat_template=found.text("tokenizer.chat_template") is not None,
        )

    @functools.cached_property
    def types(self) -> tuple[TypeTotal, ...]:
        """The types of tensors, those with the most bytes first."""
        by_type: dict[str, list[FileTensor]] = {}
        for tensor in self.contents.tensors:
            by_type.setdefault(tensor.type, []).append(tensor)
        found = (_total(name, tensors) for name, tensors in by_type.items())
        return tuple(sorted(found, key=lambda each: (-each.bytes, each.type)))

    @property
    def totals(self) -> TypeTotal:
        """All tensors together."""
        return _total("all", list(self.contents.tensors))

    def __repr__(self) -> str:
        return f"<GgufInspection of {self.contents.path.name}: {self.totals.tensors} tensors>"

    def to_json(self) -> dict[str, Any]:
        """Return what `inspect --json` prints."""
        found, totals = self.contents, self.totals.to_json()
        del totals["type"]
        return {
            "kind": "gguf",
            "files": list(found.files),
            "version": found.version,
            "architecture": found.architecture,
            "name": self.name,
            "file_type": self.file_type,
            "tokenizer": self.tokenizer._asdict(),
            "metadata": {key: _json_of(value) for key, value in found.metadata.items()},
            "totals": totals | {"file_bytes": found.file_bytes},
            "types": [each.to_json() for each in self.types],
            "tensors": [
                {
                    "name": tensor.name,
                    "shape": list(tensor.shape),
                    "type": tensor.type,
                    "file": tensor.file,
                    "offset": tensor.offset,
                    "bytes": tensor.byte_count,
                }
                for tensor in found.tensors
            ],
        }


def inspect_gguf(path: Path) -> GgufInspection:
    """Read what a GGUF file holds, or a folder with one model of it.

    Raises SourceError for a damaged file, and if parts of a split model are missing.
    """
    return GgufInspection(open_gguf(path))


def _total(name: str, tensors: list[FileTensor]) -> TypeTotal:
    weights = sum(tensor.weights for tensor in tensors)
    return TypeTotal(name, len(tensors), weights, sum(tensor.byte_count for tensor in tensors))


def _json_of(value: MetadataValue) -> Any:
    """Return a value of the metadata as JSON: a list that was kept whole, or else its type and length."""
    if isinstance(value, MetadataList):
        if value.length > len(value.first):
            return {"list_of": value.item_type, "length": value.length}
        return [_json_of(item) for item in value.first]
    return None if isinstance(value, float) and not math.isfinite(value) else value
