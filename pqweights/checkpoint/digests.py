"""Hashes of stored tensors, and reads of tensors whose hashes are known, so that damage does not pass through.

A hash of pieces is BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) of the BLAKE3 digests of a tensor's pieces of
128 KiB, so threads hash pieces as they come, in any order. docs/format.md, section 6, defines it for other readers.

A tensor is checked once, by the bytes that its readers get, in whichever order and however often. When its last byte
has come, its hash is compared; `finish` reads what was left unread of a tensor of which something was used.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import Storage
from pqweights.common.threads import ProcessLock
from pqweights.errors import MasterError

PIECE_BYTES = 1 << 17
# What is read at once, and the work that is given to a thread at once; both are whole pieces.
READ_BYTES = 1 << 20
PART_BYTES = 1 << 23

# Of each tensor, so many pieces are held of which threads have read a part; others are read again.
MOST_OPEN_PIECES = 32
REMEDY = "fetch or copy the folder again, or make it again; pqweights verify lists all damage"

Bytes = npt.NDArray[np.uint8]
MapFunction = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]  # as `map` does


KEY = "blake3_of_pieces"  # in manifests


def parts_of(byte_count: int) -> list[tuple[int, int]]:
    """Return the parts of a tensor that can be hashed apart, at least one: where each begins and ends, in bytes."""
    return [(begin, min(begin + PART_BYTES, byte_count)) for begin in range(0, max(byte_count, 1), PART_BYTES)]


def digests_of_pieces(data: Iterable[Bytes]) -> bytes:
    """Return the hashes of the pieces of a part, which comes READ_BYTES at a time and fewer at its end."""
    digests = []
    for read in data:
        digests += [blake3(read[at : at + PIECE_BYTES].data).digest() for at in range(0, len(read), PIECE_BYTES)]
    return b"".join(digests)


def hash_of_pieces(digests: Iterable[bytes]) -> str:
    """Return the hash of a tensor. digests: those of the pieces of all its parts"""
    return blake3(b"".join(digests)).hexdigest()


def pieces_of(storage: Storage, file: str, offset: int, count: int) -> Iterator[Bytes]:
    """Yield bytes of a file in a storage as `digests_of_pieces` takes them, in memory that is used again."""
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

    def add(self, offset: int, data: Bytes) -> None:
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

    def _fill(self, number: int, size: int, *, at: int, part: Bytes) -> None:
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
        return hash_of_pieces(self._digests)


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


class CheckedReads:
    """Reads of the tensors of a storage. A pickled one begins anew elsewhere: each process checks what it reads.

    storage: where the files lie
    """

    def __init__(self, storage: Storage, stored: Iterable[StoredTensor], *, digests: Mapping[str, str]) -> None:
        """Know the tensors that may be read, and the hash of each of them, by name."""
        self.storage = storage
        self._digests = digests
        self._by_file: dict[str, list[StoredTensor]] = {}
        for tensor in sorted(stored, key=operator.attrgetter("offset")):
            if tensor.byte_count:
                self._by_file.setdefault(tensor.file, []).append(tensor)
        self._lock = ProcessLock()
        self._begun: dict[str, PieceHasher] = {}  # tensors of which something was read, by name
        self._checked: dict[str, str] = {}  # what is wrong with a tensor that was read whole; nothing if it is right

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_begun": {}, "_checked": {}}

    def read_into(self, file: str, offset: int, buffer: Bytes) -> None:
        """Fill the buffer with bytes of a file from `offset` on, see Storage.

        Raises MasterError if these are the last bytes of a tensor to be read, and it is damaged.
        """
        self.storage.read_into(file, offset, buffer)
        tensor = self._tensor_at(file, offset)
        hasher = None if tensor is None or not len(buffer) else self._begin(tensor)
        if tensor is not None and hasher is not None:
            hasher.add(offset - tensor.offset, buffer)
            if hasher.is_whole:
                self._compare(tensor, hasher.hexdigest())

    def mapped(self, file: str) -> Bytes:
        """Return the bytes of a file, see Storage; `check` checks what is used of them."""
        return self.storage.mapped(file)

    def finish(self, parts: Iterable[StoredTensor] | None = None, *, run: MapFunction = map) -> None:
        """Check those of some tensors of which something was read, reading the rest.

        parts: the tensors; by default all
        run: as `map`; may use several threads

        Raises MasterError if one of them is damaged, also if that was found before.
        """
        for tensor in [t for tensors in self._by_file.values() for t in tensors] if parts is None else parts:
            hasher = self._begun.get(tensor.name)
            if hasher is not None:
                self._compare(tensor, self._whole(tensor, hasher, run))
            elif problem := self._checked.get(tensor.name):
                raise MasterError(problem)

    def check(self, parts: Iterable[StoredTensor], *, run: MapFunction = map) -> None:
        """Check tensors that are used without being read through here, once. The arguments are those of `finish`."""
        for tensor in parts:
            if tensor.byte_count:
                self._begin(tensor)
                self.finish([tensor], run=run)

    def _tensor_at(self, file: str, offset: int) -> StoredTensor | None:
        """Return the tensor that has a byte of a file."""
        tensors = self._by_file.get(file, [])
        index = bisect.bisect_right(tensors, offset, key=operator.attrgetter("offset")) - 1
        return tensors[index] if index >= 0 and offset < tensors[index].offset + tensors[index].byte_count else None

    def _begin(self, tensor: StoredTensor) -> PieceHasher | None:
        """Note that a tensor is used; None if it is checked already."""
        with self._lock:
            if tensor.name in self._checked:
                return None
            if tensor.name not in self._begun:
                self._begun[tensor.name] = PieceHasher(tensor.byte_count, MOST_OPEN_PIECES)
            return self._begun[tensor.name]

    def _whole(self, tensor: StoredTensor, hasher: PieceHasher, run: MapFunction) -> str:
        """Return the hash of a tensor, of which everything is read that has not been read."""

        def read(span: tuple[int, int]) -> None:
            begin, end = span
            for data in pieces_of(self.storage, tensor.file, tensor.offset + begin, end - begin):
                hasher.add(begin, data)
                begin += len(data)

        list(run(read, hasher.missing()))
        return hasher.hexdigest()

    def _compare(self, tensor: StoredTensor, digest: str) -> None:
        """Note whether a tensor is right. Raises MasterError if it is not."""
        expected = self._digests[tensor.name]
        problem = ""
        if digest != expected:
            problem = (
                f"{self.storage}: {tensor.file}: tensor {tensor.name!r}: {KEY}: expected {expected}, "
                f"found {digest}: its bytes are damaged; {REMEDY}"
            )
        with self._lock:
            self._checked[tensor.name] = problem
            self._begun.pop(tensor.name, None)
        if problem:
            raise MasterError(problem)


Reads = Storage | CheckedReads  # what a tensor is read through: a storage, or one whose tensors are checked
