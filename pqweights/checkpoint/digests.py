"""Hashes of stored tensors: the one that manifests state, and that of manifests of version 1.

A hash of pieces is BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) of the BLAKE3 digests of a tensor's pieces of
128 KiB, so threads hash pieces as they come, in any order. docs/format.md, section 6, defines it for other readers.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from pqweights.checkpoint.storage import Storage

PIECE_BYTES = 1 << 17
# What is read at once, and the work that is given to a thread at once; both are whole pieces.
READ_BYTES = 1 << 20
PART_BYTES = 1 << 23

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TensorHash:
    """A hash of stored tensors, computed part by part.

    key: what manifests call it
    part_bytes: the size of the parts that can be hashed apart; None if the whole tensor is one
    of_part: hashes the bytes of a part, READ_BYTES at a time and fewer at its end; fewer bytes have another hash
    combined: returns the hash of a tensor from those of its parts
    """

    key: str
    part_bytes: int | None
    of_part: Callable[[Iterable[Bytes]], bytes]
    combined: Callable[[Sequence[bytes]], str]

    def parts(self, byte_count: int) -> list[tuple[int, int]]:
        """Return the parts of a tensor that can be hashed apart, at least one: where each begins and ends, in bytes."""
        if self.part_bytes is None:
            return [(0, byte_count)]
        begins = range(0, max(byte_count, 1), self.part_bytes)
        return [(begin, min(begin + self.part_bytes, byte_count)) for begin in begins]


def _digests_of_pieces(data: Iterable[Bytes]) -> bytes:
    """Return the BLAKE3 digests of the pieces, one after the other."""
    digests = []
    for read in data:
        digests += [blake3(read[at : at + PIECE_BYTES].data).digest() for at in range(0, len(read), PIECE_BYTES)]
    return b"".join(digests)


def _blake3_of_digests(digests: Sequence[bytes]) -> str:
    return blake3(b"".join(digests)).hexdigest()


def _sha256_of_whole(data: Iterable[Bytes]) -> bytes:
    digest = hashlib.sha256()
    for read in data:
        digest.update(read.data)
    return digest.digest()


def _only(digests: Sequence[bytes]) -> str:
    (digest,) = digests
    return digest.hex()


HASH_OF_PIECES = TensorHash("blake3_of_pieces", PART_BYTES, _digests_of_pieces, _blake3_of_digests)
# Of whole tensors, which no two threads can share: that of manifests of version 1, and of files without tensors.
SHA256 = TensorHash("sha256", None, _sha256_of_whole, _only)


def pieces_of(storage: Storage, file: str, offset: int, count: int) -> Iterator[Bytes]:
    """Yield bytes of a file in a storage as `TensorHash.of_part` takes them, in memory that is used again."""
    memory = np.empty(min(READ_BYTES, count), dtype=np.uint8)
    for begin in range(0, count, READ_BYTES):
        data = memory[: min(READ_BYTES, count - begin)]
        storage.read_into(file, offset + begin, data)
        yield data


class PieceHasher:
    """The hash of pieces of one tensor whose bytes come in any order, from any thread, and some of them repeatedly.

    Of bytes that come repeatedly, those count that come while their piece is not whole.
    """

    def __init__(self, byte_count: int, most_open: int | None = None) -> None:
        """Begin a tensor.

        byte_count: its size
        most_open: of how many pieces parts are held until the rest comes; of others, all bytes must come again. By
            default all are held, which takes little memory only if bytes come roughly in order
        """
        self.byte_count = byte_count
        self._most_open = most_open
        self._digests = [b""] * -(-byte_count // PIECE_BYTES)
        self._left = len(self._digests)
        self._open: dict[int, _OpenPiece] = {}
        self._lock = threading.Lock()

    def add(self, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Take the bytes from `offset` on; those of pieces that are whole already are ignored."""
        begin, count = 0, len(data)
        while begin < count:
            number, at = divmod(offset + begin, PIECE_BYTES)
            size = min(PIECE_BYTES, self.byte_count - number * PIECE_BYTES)
            part = data[begin : begin + size - at]
            if len(part) < size:
                self._fill(number, size, at=at, part=part)
            elif not self._digests[number]:
                self._set(number, part)
            begin += len(part)

    def _fill(self, number: int, size: int, *, at: int, part: npt.NDArray[np.uint8]) -> None:
        """Take some bytes of a piece, and hash it if they were the last ones."""
        with self._lock:
            if self._digests[number]:
                return
            piece = self._open.get(number)
            if piece is None:
                if self._most_open is not None and len(self._open) >= self._most_open:
                    del self._open[next(iter(self._open))]
                piece = self._open[number] = _OpenPiece(np.empty(size, dtype=np.uint8))
            if not piece.fill(at, part):
                return
            del self._open[number]
        self._set(number, piece.data)

    def _set(self, number: int, piece: Bytes) -> None:
        """Hash a whole piece, outside of the lock, so that threads do so side by side."""
        digest = blake3(piece.data).digest()
        with self._lock:
            self._open.pop(number, None)
            self._left -= not self._digests[number]
            self._digests[number] = digest

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have come."""
        return self._left == 0

    def missing(self) -> list[tuple[int, int]]:
        """Return the parts of the tensor that must still come: where each begins and ends, in bytes; whole pieces."""
        numbers = (number for number, digest in enumerate(self._digests) if not digest)
        # Consecutive numbers have the same difference from their places.
        runs = itertools.groupby(
            enumerate(numbers), lambda pair: (pair[1] - pair[0], pair[1] * PIECE_BYTES // PART_BYTES)
        )
        spans = [[number for _, number in run] for _, run in runs]
        return [(span[0] * PIECE_BYTES, min((span[-1] + 1) * PIECE_BYTES, self.byte_count)) for span in spans]

    def hexdigest(self) -> str:
        """Return the hash; all bytes must have come."""
        assert self.is_whole, "bytes of the tensor are missing"
        return HASH_OF_PIECES.combined(self._digests)


class _OpenPiece:
    """A piece of which some bytes have come. data: the piece."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self._spans: list[tuple[int, int]] = []  # what has come, in order, apart from each other

    def fill(self, at: int, part: Bytes) -> bool:
        """Take bytes from `at` on; return whether all have come."""
        self.data[at : at + len(part)] = part
        spans: list[tuple[int, int]] = []
        for begin, end in sorted([*self._spans, (at, at + len(part))]):
            if spans and begin <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], end))
            else:
                spans.append((begin, end))
        self._spans = spans
        return spans == [(0, len(self.data))]
