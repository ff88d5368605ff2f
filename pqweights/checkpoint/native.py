"""Weights of a master in the source's own numbers: its stored tensors, coded or as they are, read as from the source.

A master of the codec `native` holds an image of the source's stored tensors. The readers of sources find the weights in
it, as in the source itself: plain ones here, those of other tools in formats/packed.py. So what decodes a
source decodes its master. docs/format.md, section 11, has the format.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.blocks import BlocksTensor
from pqweights.checkpoint.digests import Reads
from pqweights.checkpoint.header import StoredTensor, TensorSpec, read_stored
from pqweights.checkpoint.readers import EncodedTensor, PlainTensor
from pqweights.formats.native import CODED, LENGTHS, REASONS, Native, item_width
from pqweights.formats.packed import QuantizedTensor
from pqweights.formats.weight import damaged_master
from pqweights.kernels import lossless
from pqweights.kernels.lossless import CHUNK_ITEMS
from pqweights.kernels.workers import scratch

Bytes = npt.NDArray[np.uint8]
# A weight of a source that is made of stored tensors alone, or of the blocks that its numbers were decoded from.
SourceTensor = PlainTensor | QuantizedTensor | BlocksTensor


def coded_specs(spec: TensorSpec, total: int) -> tuple[TensorSpec, TensorSpec]:
    """Return what a stored tensor of a source becomes if it is coded in `total` bytes."""
    chunks = lossless.chunk_count(spec.byte_count // item_width(spec.dtype))
    return TensorSpec(spec.name + CODED, "U8", (total,)), TensorSpec(spec.name + LENGTHS, "I32", (chunks,))


class NativePart(NamedTuple):
    """A stored tensor of the source, in a master.

    tensor: as it was in the source, at a place in the image
    held: what the master holds of it: the tensor itself, or its chunks and their lengths
    """

    tensor: StoredTensor
    held: tuple[StoredTensor, ...]

    @property
    def width(self) -> int:
        """The bytes of an item."""
        return item_width(self.tensor.dtype)

    @property
    def spec(self) -> TensorSpec:
        """What the source said of it."""
        return TensorSpec(*self.tensor[:3])


@dataclass(frozen=True, eq=False)
class NativeImage:
    """The stored tensors of the source one after the other, as if they lay in one file, which its readers read.

    storage: where the stored tensors of the master lie
    parts: those of the source, by their places in the image
    """

    storage: Reads
    parts: Sequence[NativePart]
    _ends: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)

    def read_into(self, file: str, offset: int, buffer: Bytes) -> None:
        """Fill the buffer with bytes of one of the tensors, from a place in the image on.

        Raises MasterError for chunks that cannot be decoded.
        """
        if not len(buffer):
            return
        part = self.parts[bisect.bisect_right(self.parts, offset, key=lambda part: part.tensor.offset) - 1]
        start = offset - part.tensor.offset
        if len(part.held) == 1:
            self.storage.read_into(part.held[0].file, part.held[0].offset + start, buffer)
        else:
            self._decode(part, start, buffer)

    def _decode(self, part: NativePart, start: int, out: Bytes) -> None:
        """Decode bytes of a tensor, straight into `out` if they are those of whole chunks."""
        of_chunk, stop = CHUNK_ITEMS * part.width, start + len(out)
        first, last = start // of_chunk, -(-stop // of_chunk)
        begin, end = first * of_chunk, min(last * of_chunk, part.tensor.byte_count)
        values = out if (begin, end) == (start, stop) else scratch("native chunks", end - begin)
        ends, stream = self._ends_of(part), part.held[0]
        coded = scratch("native stream", int(ends[last] - ends[first]))
        self.storage.read_into(stream.file, stream.offset + int(ends[first]), coded)
        lengths = np.diff(ends[first : last + 1]).astype(np.int32)
        damaged, reason = lossless.decode(coded, lengths, values, part.width)
        if damaged >= 0:
            place = f"{stream.file}: tensor {stream.name!r}: chunk {first + damaged}"
            raise damaged_master(f"{place}: {REASONS[reason]}")
        if values is not out:
            out[:] = values[start - begin : stop - begin]

    def _ends_of(self, part: NativePart) -> npt.NDArray[np.int64]:
        """Where the chunks of a tensor end, from 0 on: [1 + chunks]. Raises MasterError for lengths that are none."""
        if part.tensor.name not in self._ends:
            stream, stored = part.held
            lengths = read_stored(self.storage, stored).view("<i4")
            if lengths.min() < 1 or int(lengths.sum(dtype=np.int64)) != stream.byte_count:
                expected = f"lengths from 1 on whose sum is {stream.byte_count} bytes"
                raise damaged_master(f"{stored.file}: tensor {stored.name!r}: expected {expected}, found others")
            self._ends[part.tensor.name] = np.append(0, np.cumsum(lengths, dtype=np.int64))
        return self._ends[part.tensor.name]


@dataclass(frozen=True, kw_only=True)
class NativeTensor(EncodedTensor):
    """A weight in the source's own numbers.

    source: the weight, as a reader of sources found it in an image
    source_parts: its stored tensors in the source
    """

    format: Native
    source: SourceTensor
    source_parts: tuple[NativePart, ...]

    @property
    def plain_dtype(self) -> str:
        """That of the source."""
        return self.source.plain_dtype

    @property
    def unit(self) -> int:
        """How many elements, from a multiple of this number on, are decoded together."""
        return CHUNK_ITEMS

    def read(self, start: int, count: int, dtype: str, out: Bytes) -> None:
        """Read elements as from the source. Raises MasterError if they cannot be decoded."""
        self.carried.read(start, count, dtype, out)

    @functools.cached_property
    def carried(self) -> SourceTensor:
        """The weight with the stored tensors that it has in the source, which are read from the master."""
        image = NativeImage(self.storage, sorted(self.source_parts, key=lambda part: part.tensor.offset))
        if isinstance(self.source, PlainTensor):
            return self.source._replace(storage=image)
        return replace(self.source, storage=image)
