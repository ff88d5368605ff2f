"""Weights in blocks of llama.cpp's, of which any elements are decoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import ByteReads, StoredTensor, TensorSpec
from pqweights.common.dtypes import from_float32, to_float32
from pqweights.formats.packed import check_decoded
from pqweights.kernels import VALUE_DTYPES
from pqweights.kernels.gguf_encoding import BLOCK_TYPES, decode_blocks
from pqweights.kernels.recovery import RECOVERED_TYPES
from pqweights.kernels.workers import scratch


def grid_spec(name: str, shape: tuple[int, ...], kind: str) -> TensorSpec:
    """Return the stored tensor for a weight on the grid of a type: the blocks of each row, one after the other."""
    block = BLOCK_TYPES[kind]
    return TensorSpec(f"{name}_{kind.lower()}", "U8", (*shape[:-1], shape[-1] // block.group_size * block.block_bytes))


def grid_of_stored(name: str) -> tuple[str, str] | None:
    """Return the weight and the type that the name of a stored tensor says, if it is one of `grid_spec`."""
    kind = next((kind for kind in RECOVERED_TYPES if name.endswith("_" + kind.lower())), None)
    return None if kind is None else (name[: -len(kind) - 1], kind)


@dataclass(frozen=True, kw_only=True)
class BlocksTensor:
    """A tensor in blocks of llama.cpp's; see LogicalTensor.

    kind: the name of their type
    dtype: the type again; or one of VALUE_DTYPES, to which the numbers are rounded, of a weight on the type's grid
    """

    # Elements decoded at once.
    BAND_ELEMENTS = 1 << 20

    storage: ByteReads
    stored: StoredTensor
    name: str
    shape: tuple[int, ...]
    kind: str
    dtype: str
    plain_dtype: str

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The blocks."""
        return (self.stored,)

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Decode the blocks that hold the elements, and round."""
        kind, done = BLOCK_TYPES[self.kind], 0
        while done < count:
            first, skip = divmod(start + done, kind.group_size)
            blocks = min(-(-(skip + count - done) // kind.group_size), max(1, self.BAND_ELEMENTS // kind.group_size))
            raw = scratch("blocks", blocks * kind.block_bytes)
            self.storage.read_into(self.stored.file, self.stored.offset + first * kind.block_bytes, raw)
            decoded = decode_blocks(self.kind, raw.reshape(blocks, -1)).reshape(-1)[skip : skip + count - done]
            check_decoded(decoded, self.name, self.stored)
            if self.dtype in VALUE_DTYPES:
                decoded = to_float32(from_float32(decoded, self.dtype), self.dtype)
            converted = from_float32(decoded, dtype)
            width = len(converted) // len(decoded)
            out[done * width : done * width + len(converted)] = converted
            done += len(decoded)
