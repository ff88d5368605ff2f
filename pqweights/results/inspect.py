"""Inspect: what a finished folder holds according to its manifest. Whether the files agree is for `verify` to tell.

And what a GGUF file holds, whoever wrote it; its weights are not read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.checkpoint.gguf.contents import FILE_TYPES, GgufContents, GgufTensor, MetadataList, MetadataValue
from pqweights.checkpoint.gguf.file import open_gguf
from pqweights.checkpoint.storage import Storage
from pqweights.convert.manifest import Manifest, read_manifest, shards_of
from pqweights.convert.records import TensorReport, mean_error, tensor_reports
from pqweights.planning.layout import Totals, total


@dataclass(frozen=True, repr=False)
class Inspection:
    """What a master or an export holds.

    manifest: what it was made from and how, its tensors and its files
    totals: counts, sizes and bits per weight
    """

    manifest: Manifest
    totals: Totals

    @property
    def kind(self) -> str:
        """What it is: "master" or "export"."""
        return self.manifest.kind

    @property
    def made_by(self) -> Mapping[str, Any]:
        """How it was made: a recipe, with the scales and the fit if there are any, or a target with its options."""
        return self.manifest.made_by

    @functools.cached_property
    def tensors(self) -> tuple[TensorReport, ...]:
        """Each tensor with its error."""
        return tensor_reports(self.manifest.pairs)

    @property
    def relative_mse(self) -> float | None:
        """The squared error over the sum of squares of all weights that were quantized; None if there are none."""
        return mean_error(self.manifest.records, "relative_mse")

    @property
    def exceeding(self) -> list[str]:
        """The tensors whose error is above what their codec promises."""
        return [tensor.name for tensor in self.tensors if tensor.exceeds]

    def __repr__(self) -> str:
        return f"<Inspection of the {self.kind}: {self.totals}>"

    def to_json(self) -> dict[str, Any]:
        """Return what `inspect --json` prints."""
        measured = {
            "relative_mse": self.relative_mse,
            "rescued": sum(tensor.rescued for tensor in self.tensors),
            "exceeding": self.exceeding,
        }
        return {
            "kind": self.manifest.kind,
            **self.manifest.made_by,
            "totals": self.totals.to_json() | measured,
            "warnings": list(self.manifest.remarks),
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }


def inspect(result: Path | Storage) -> Inspection:
    """Read the manifest of a master or an export, on this machine or anywhere, and add up its figures.

    Raises MasterError if the folder is unfinished, or not a result of pqweights.
    """
    manifest = read_manifest(result)
    output_bytes = sum(shard.file_bytes for shard in shards_of(manifest))
    source_bytes = manifest.source_bytes
    return Inspection(manifest, total(manifest.tensors, source_bytes=source_bytes, output_bytes=output_bytes))


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
        items = self.contents.metadata.items()
        return {key.removeprefix(start): value for key, value in items if key.startswith(start)}

    @property
    def tokenizer(self) -> dict[str, Any]:
        """What the metadata say of the tokenizer.

        model: its kind: gpt2 (byte-level BPE), llama (SentencePiece), ...; None without one
        splitter: the rule that splits a text before it, if it has one
        tokens: how many there are
        begin, end: the tokens that begin and end a text
        has_chat_template: whether it can write conversations
        """
        contents = self.contents
        return {
            "model": contents.text("tokenizer.ggml.model"),
            "splitter": contents.text("tokenizer.ggml.pre"),
            "tokens": contents.vocabulary,
            "begin": contents.number("tokenizer.ggml.bos_token_id"),
            "end": contents.number("tokenizer.ggml.eos_token_id"),
            "has_chat_template": contents.text("tokenizer.chat_template") is not None,
        }

    @functools.cached_property
    def types(self) -> tuple[TypeTotal, ...]:
        """The types of tensors, those with the most bytes first."""
        by_type: dict[str, list[GgufTensor]] = {}
        for tensor in self.contents.tensors:
            by_type.setdefault(tensor.type, []).append(tensor)
        totals = (_total(name, tensors) for name, tensors in by_type.items())
        return tuple(sorted(totals, key=lambda total: (-total.bytes, total.type)))

    @property
    def totals(self) -> TypeTotal:
        """All tensors together."""
        return _total("all", list(self.contents.tensors))

    def __repr__(self) -> str:
        return f"<GgufInspection of {self.contents.path.name}: {self.totals.tensors} tensors>"

    def to_json(self) -> dict[str, Any]:
        """Return what `inspect --json` prints."""
        contents, totals = self.contents, self.totals.to_json()
        del totals["type"]
        return {
            "kind": "gguf",
            "files": list(contents.files),
            "version": contents.version,
            "architecture": contents.architecture,
            "name": self.name,
            "file_type": self.file_type,
            "tokenizer": self.tokenizer,
            "metadata": {key: _json_of(value) for key, value in contents.metadata.items()},
            "totals": totals | {"file_bytes": contents.file_bytes},
            "types": [total.to_json() for total in self.types],
            "tensors": [
                {
                    "name": tensor.name,
                    "shape": list(tensor.shape),
                    "type": tensor.type,
                    "file": tensor.file,
                    "offset": tensor.offset,
                    "bytes": tensor.byte_count,
                }
                for tensor in contents.tensors
            ],
        }


def inspect_gguf(path: Path) -> GgufInspection:
    """Read what a GGUF file holds, or a folder with one model of it.

    Raises SourceError for a damaged file, and if parts of a split model are missing.
    """
    return GgufInspection(open_gguf(path))


def _total(name: str, tensors: list[GgufTensor]) -> TypeTotal:
    weights = sum(tensor.weights for tensor in tensors)
    return TypeTotal(name, len(tensors), weights, sum(tensor.byte_count for tensor in tensors))


def _json_of(value: MetadataValue) -> Any:
    """Return a value of the metadata as JSON: a list that was kept whole, or else its type and length."""
    if isinstance(value, MetadataList):
        if value.length > len(value.first):
            return {"list_of": value.item_type, "length": value.length}
        return [_json_of(item) for item in value.first]
    return None if isinstance(value, float) and not math.isfinite(value) else value
