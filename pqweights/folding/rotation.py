"""Rotating the residual stream and the value heads by Hadamard matrices (QuaRot: Ashkboos et al., arXiv:2404.00456).

Every norm of the stream is folded into its readers first, so that it has no gain left; then the mean of squares that it
divides by does not change if the stream is multiplied by an orthogonal matrix. That matrix is diagonal signs times
Hadamard blocks of the largest power of two that divides the width. What writes to the stream gets it on its rows, what
reads it on its columns. Value heads get a Hadamard matrix between v and o.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.folding import turning
from pqweights.folding.families import Family
from pqweights.folding.fold import Fold
from pqweights.folding.folded import TensorFactors
from pqweights.folding.links import Link, Links, Side, family_of, layers_of
from pqweights.folding.search import find_links
from pqweights.folding.sizes import Progress
from pqweights.folding.turning import RowBlocks, Turn, TurnedFiles, signs

STREAM = "residual stream"
LARGEST_HEAD = 1024


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What takes part in a rotation.

    width, block: the width of the stream, and the size of its blocks
    readers: the tensors that read it, each with the norm between
    embedding: the tensor that writes it first
    writers: the other tensors that write it
    heads: v and o, by pairs
    """

    width: int
    block: int
    readers: Mapping[str, Link]
    embedding: str
    writers: Collection[str]
    heads: tuple[tuple[Side, Side], ...]


@dataclass
class _PartSearch:
    """The search for what takes part; `reason` says why nothing does."""

    tensors: Mapping[str, LogicalTensor]
    family: Family
    links: Links
    plain: Collection[str]
    reason: str = ""
    writers: list[str] = field(default_factory=list)

    def parts(self) -> _Parts | None:
        """Return what takes part, or None."""
        norms = [link for link in self.links.links if link.norm is not None]
        head = next((link for link in norms if any("lm_head" in side.tensor for side in link.readers)), None)
        if not self.family.residual_writers:
            self.reason = "its family has norms or routers on the residual stream that no rotation passes"
        elif head is None:
            self.reason = "the head does not read the last norm alone: it is tied to the embedding, or stays plain"
        else:
            self._check_links(norms)
            self._find_writers()
        if self.reason or head is None:
            return None
        embedding = head.name.removesuffix("norm") + "embed_tokens.weight"
        self._check_rest(embedding, head)
        width = head.channels
        if any(link.channels != width for link in norms):
            self.reason = "its norms have different widths"
        readers = {side.tensor: link for link in norms for side in link.readers}
        block = width & -width
        if block < 2:
            self.reason = f"no power of two divides the width {width}"
        return (
            None
            if self.reason
            else _Parts(
                width=width,
                block=block,
                readers=readers,
                embedding=embedding,
                writers=self.writers,
                heads=self._heads(),
            )
        )

    def _check_links(self, norms: list[Link]) -> None:
        """Every norm of every layer must be folded into coded weights alone."""
        linked = {link.name for link in norms}
        for layer in layers_of(tuple(self.tensors.values())):
            for norm in self.family.norms:
                name = layer.prefix + norm.norm
                if norm.norm in layer.modules and name not in linked:
                    self.reason = f"the gain of {name} cannot be folded"
                    return
        for link in norms:
            if link.exact:
                self.reason = f"a reader of {link.name} stays plain, and rotating would round it"

    def _find_writers(self) -> None:
        for layer in layers_of(tuple(self.tensors.values())):
            for module in layer.modules:
                if not any(re.fullmatch(expression, module) for expression in self.family.residual_writers):
                    continue
                weight = layer.weight(module)
                if weight is None or layer.bias(module) is not None:
                    self.reason = f"{layer.prefix}{module} has a bias, which rotating would round"
                elif weight.name in self.plain:
                    self.reason = f"{weight.name} stays plain, and rotating would round it"
                else:
                    self.writers.append(weight.name)

    def _check_rest(self, embedding: str, head: Link) -> None:
        """Nothing outside of the layers may touch the stream but the embedding, the last norm and the head."""
        inside = {layer.prefix for layer in layers_of(tuple(self.tensors.values()))}
        known = {embedding, head.norm, *(side.tensor for side in head.readers)}
        for name in self.tensors:
            if name not in known and not any(name.startswith(prefix) for prefix in inside) and "rotary" not in name:
                self.reason = f"{name} may read or write the residual stream, too"
        if embedding not in self.tensors:
            self.reason = f"found no {embedding}"
        elif embedding in self.plain:
            self.reason = f"{embedding} stays plain, and rotating would round it"

    def _heads(self) -> tuple[tuple[Side, Side], ...]:
        """Return v and o of the layers whose heads can be rotated."""
        result = []
        for link in self.links.links:
            if link.norm is None and not link.exact and "attn" in link.name:
                (written,), (read,) = link.writers, link.readers
                width = written.width
                if width & (width - 1) == 0 and 1 < width <= LARGEST_HEAD and written.first % width == 0:
                    result.append((written, read))
        return tuple(result)


class Rotation(Fold):
    """The rotation of one checkpoint."""

    def _find(self, plain: Collection[str]) -> Links:
        links = find_links(self.original.config, self.original.tensors, plain=plain)
        self._parts: _Parts | None = None
        self._files: TurnedFiles | None = None
        family = family_of(self.original.config)
        if family is None or links.unfolded:
            return links
        search = _PartSearch(tensors=self._tensors, family=family, links=links, plain=plain)
        self._parts = search.parts()
        if self._parts is None:
            return Links(unfolded=f"this model cannot be rotated: {search.reason}")
        return Links(links=links.links, notes=self._notes(self._parts))

    @staticmethod
    def _notes(parts: _Parts) -> dict[str, str]:
        notes = dict.fromkeys((*parts.readers, parts.embedding), "rotated: inputs")
        for name in parts.writers:
            notes[name] = "rotated: outputs"
        for written, read in parts.heads:
            for name in (written.tensor, read.tensor):
                notes[name] += ", value heads rotated"
        return notes | {link.norm: "its gain is folded" for link in parts.readers.values() if link.norm}

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the rotation."""
        return {"kind": self.kind, "block": 0 if self._parts is None else self._parts.block}

    @property
    def memory_bytes(self) -> int:
        """The memory that the weights of norms take; large turned tensors lie in files."""
        return self._gain_bytes

    @property
    def disk_bytes(self) -> int:
        """The room that the largest turned tensors take, as many as are kept."""
        parts = self._parts
        if parts is None:
            return 0
        sizes = [element_count(self._tensors[name]) for name in parts.writers]
        shapes = [self._tensors[name].shape for name in parts.writers]
        large = [
            size for size, shape in zip(sizes, shapes, strict=True) if parts.block * shape[-1] > turning.MOST_WEIGHTS
        ]
        return 4 * sum(sorted(large)[-turning.KEPT_FILES :])

    def measure(self, folder: Path, *, fetched: Path, threads: int, progress: Progress) -> None:
        """Prepare to read. Nothing depends on the weights; large turned tensors are kept in the folder for a while."""
        self._files = TurnedFiles(folder)
        self._read_gains()

    def close(self) -> None:
        """Free the room of the turned files."""
        if self._files is not None:
            self._files.close()

    @property
    def thread_bytes(self) -> int:
        """The memory of a thread: two blocks of rows in float32, and as they are read."""
        return 0 if self._parts is None else 12 * turning.MOST_WEIGHTS

    def links_of(self, tensor: str) -> tuple[str, ...]:
        """Return the vectors through which a tensor was folded."""
        return (STREAM,) if tensor in self.structure.notes else ()

    def _touches(self, tensor: str) -> bool:
        return tensor in self.structure.notes

    def _new_factors(self, tensor: str) -> TensorFactors:
        parts = self._parts
        assert parts is not None
        if tensor in self._norms:
            link = self.structure.links[self._norms[tensor]]
            return TensorFactors(values=np.full(link.channels, 0 if link.zero_centred else 1, dtype=np.float32))
        height, columns = self._tensors[tensor].shape[-2:]
        stack = int(np.prod(self._tensors[tensor].shape[:-2]))
        of_rows, of_columns = np.ones(height, dtype=np.float32), np.ones(columns, dtype=np.float32)
        turned_rows, turned_columns = None, None
        spread = signs(parts.width) * np.float32(parts.block**-0.5)
        if tensor in parts.readers or tensor == parts.embedding:
            gain = self._signed_gain(parts.readers[tensor]) if tensor in parts.readers else 1
            of_columns = (gain * spread).astype(np.float32)
            turned_columns = parts.block
        if tensor in parts.writers:
            of_rows = spread
            turned_rows = RowBlocks(size=parts.block, first=0, count=height * stack)
        for written, read in parts.heads:
            share = np.float32(written.width**-0.5)
            if written.tensor == tensor:
                of_rows[written.first : written.first + written.count] *= share
                turned_rows = RowBlocks(size=written.width, first=written.first, count=written.count)
            if read.tensor == tensor:
                of_columns = of_columns * share
                turned_columns = read.width
        return TensorFactors(
            rows=np.tile(of_rows, stack),
            columns=of_columns[None],
            turn=Turn(columns=turned_columns, rows=turned_rows),
            files=self._files,
        )

    def _signed_gain(self, link: Link) -> Any:
        assert link.norm is not None
        return self._gains[link.norm].astype(np.float64) + link.zero_centred
