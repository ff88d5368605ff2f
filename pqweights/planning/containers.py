"""The file formats of results: safetensors, and GGUF. A manifest says enough of them to find every byte again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pqweights.checkpoint.header import encode_header, in_file_order
from pqweights.checkpoint.names import INDEX_FILE, gguf_name, shard_name
from pqweights.planning.plan import DEFAULT_METADATA, FileHeader, ShardPlan, TensorPlan, cuts

GGUF = "gguf"


@dataclass(frozen=True)
class Safetensors:
    """Files of safetensors with an index. metadata: their `__metadata__`."""

    metadata: dict[str, str]

    @property
    def index_file(self) -> str:
        """The name of the index."""
        return INDEX_FILE

    def shards(self, tensors: Sequence[TensorPlan], max_shard_bytes: int) -> tuple[ShardPlan, ...]:
        """Return the files; the header of each follows from its tensors."""
        runs, result = cuts(tensors, max_shard_bytes), []
        for number, run in enumerate(runs):
            specs = in_file_order([spec for place in run for spec in tensors[place].stored])
            header = FileHeader.of(encode_header(specs, self.metadata))
            file = shard_name(number, len(runs))
            result.append(ShardPlan(file=file, header=header, specs=tuple(specs), tensors=run))
        return tuple(result)

    def to_json(self) -> dict[str, Any]:
        """Return nothing: a manifest says nothing of the usual format but its metadata."""
        return {}


@dataclass(frozen=True, kw_only=True)
class GgufFiles:
    """One file of GGUF, or several that llama.cpp reads as one.

    name: the file name without number and ending
    alignment: each tensor fills a multiple of this number of bytes
    headers: the header of each file
    """

    name: str
    alignment: int
    headers: tuple[FileHeader, ...]

    @property
    def metadata(self) -> dict[str, str]:
        """What safetensors files would have by default."""
        return DEFAULT_METADATA

    @property
    def index_file(self) -> None:
        """There is none: each file lists its tensors."""
        return

    def shards(self, tensors: Sequence[TensorPlan], max_shard_bytes: int) -> tuple[ShardPlan, ...]:
        """Return the files.

        Raises ValueError if there are not as many as headers.
        """
        runs = cuts(tensors, max_shard_bytes)
        return tuple(
            ShardPlan(
                file=gguf_name(self.name, number, len(runs)),
                header=header,
                specs=tuple(spec for place in run for spec in tensors[place].stored),
                tensors=run,
                alignment=self.alignment,
            )
            for number, (run, header) in enumerate(zip(runs, self.headers, strict=True))
        )

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest says of the files."""
        headers = [{"bytes": header.byte_count, "sha256": header.sha256} for header in self.headers]
        return {"format": GGUF, "name": self.name, "alignment": self.alignment, "headers": headers}
