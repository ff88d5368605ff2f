"""Items of 1, 2 or 4 bytes without loss: chunks of 65,536 items to fewer bytes, and back to the same.

They run on the CPU alone. docs/format.md, section 11, has the bytes; native/lossless_*.cpp are the kernels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pqweights.kernels import native
from pqweights.kernels.workers import scratch

Bytes = npt.NDArray[np.uint8]
Lengths = npt.NDArray[np.int32]

CHUNK_ITEMS = 1 << 16
WIDTHS = (1, 2, 4)
# Rooms of native/lossless.hpp.
_STATES = 32
_WORDS = CHUNK_ITEMS + _STATES * 33


def chunk_count(items: int) -> int:
    """Return how many chunks hold some items."""
    return -(-items // CHUNK_ITEMS)


def encode(values: Bytes, width: int) -> tuple[Bytes, Lengths]:
    """Code items of `width` bytes each: return the chunks, one after the other, and the bytes of each.

    The chunks lie in memory that is valid until the thread encodes again. Raises ValueError for a width that is none.
    """
    count = _count(values, width)
    chunks = chunk_count(count)
    lengths = np.empty(chunks, dtype=np.int32)
    stream = scratch("lossless stream", chunks + len(values))
    native.call(
        "encode_lossless",
        native.array(values, np.uint8, len(values)),
        native.array(stream, np.uint8, len(stream), written=True),
        native.array(lengths, np.int32, chunks, written=True),
        native.room("lossless symbols", np.uint8, CHUNK_ITEMS + _STATES),
        native.room("lossless words", np.uint16, _WORDS),
        *(count, width),
    )
    return stream[: int(lengths.sum())], lengths


def decode(stream: Bytes, lengths: Lengths, values: Bytes, width: int) -> tuple[int, int]:
    """Decode items of `width` bytes each into `values`.

    lengths: the bytes of each chunk, as many as `values` has items for

    Returns the first chunk that is not sound, or -1, and what is wrong with it: 1 its length, 2 the frequencies of
    symbols, 3 what follows. The items of such a chunk mean nothing. Raises ValueError for arrays that do not fit
    together, and a width that is none.
    """
    count = _count(values, width)
    if len(lengths) and lengths.min() < 1:
        raise ValueError("expected chunks of at least a byte")
    status = np.empty(2, dtype=np.int64)
    native.call(
        "decode_lossless",
        native.array(stream, np.uint8, int(lengths.sum(dtype=np.int64))),
        native.array(lengths, np.int32, chunk_count(count)),
        native.array(values, np.uint8, count * width, written=True),
        native.room("lossless words", np.uint16, _WORDS),
        native.array(status, np.int64, 2, written=True),
        *(count, width),
    )
    return int(status[0]), int(status[1])


def _count(values: Bytes, width: int) -> int:
    count, rest = divmod(len(values), width)
    if width not in WIDTHS or rest:
        raise ValueError(f"expected items of {WIDTHS} bytes, found {len(values)} bytes for items of {width}")
    return count
