"""Reads of stored tensors whose hashes are known: what is read is hashed, so that damage does not pass through.

A tensor is checked once, by the bytes that its readers get, in whichever order and however often. When the last of them
has come, its hash is compared; `finish` reads what was left unread of a tensor of which something was used.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.digests import HASH_OF_PIECES, PieceHasher, TensorHash, pieces_of
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import Storage
from pqweights.common.locks import ProcessLock
from pqweights.errors import MasterError

# Of each tensor, so many pieces of 128 KiB are held of which threads have read a part; others are read again.
MOST_OPEN_PIECES = 32
REMEDY = "fetch or copy the folder again, or make it again; pqweights verify lists all damage"

MapFunction = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]  # as `map` does


class CheckedReads:
    """Reads of the tensors of a storage. A pickled one begins anew elsewhere: each process checks what it reads.

    storage: where the files lie
    """

    def __init__(
        self,
        storage: Storage,
        stored: Iterable[StoredTensor],
        *,
        tensor_hash: TensorHash,
        digests: Mapping[str, str],
    ) -> None:
        """Know the tensors.

        stored: the tensors that may be read
        tensor_hash: the hash that `digests` has
        digests: the hash of each of them, by name
        """
        self.storage = storage
        self._tensor_hash, self._digests = tensor_hash, digests
        self._by_file: dict[str, list[StoredTensor]] = {}
        for tensor in sorted(stored, key=operator.attrgetter("offset")):
            if tensor.byte_count:
                self._by_file.setdefault(tensor.file, []).append(tensor)
        self._lock = ProcessLock()
        self._begun: dict[str, PieceHasher] = {}  # tensors of which something was read, by name
        self._checked: dict[str, str] = {}  # what is wrong with a tensor that was read whole; nothing if it is right

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_begun": {}, "_checked": {}}

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer with bytes of a file from `offset` on, see Storage.

        Raises MasterError if these are the last bytes of a tensor to be read, and it is damaged.
        """
        self.storage.read_into(file, offset, buffer)
        tensor = self._tensor_at(file, offset)
        hasher = None if tensor is None or not len(buffer) else self._begin(tensor)
        if tensor is not None and hasher is not None and self._tensor_hash == HASH_OF_PIECES:
            hasher.add(offset - tensor.offset, buffer)
            if hasher.is_whole:
                self._compare(tensor, hasher.hexdigest())

    def mapped(self, file: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a file, see Storage; `check` checks what is used of them."""
        return self.storage.mapped(file)

    def finish(self, parts: Iterable[StoredTensor] | None = None, *, run: MapFunction = map) -> None:
        """Check those of some tensors of which something was read, reading the rest.

        parts: the tensors; by default all
        run: as `map`; may use several threads

        Raises MasterError if one of them is damaged, also if that was found before.
        """
        for tensor in self._tensors() if parts is None else parts:
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

    def _tensors(self) -> list[StoredTensor]:
        return [tensor for tensors in self._by_file.values() for tensor in tensors]

    def _tensor_at(self, file: str, offset: int) -> StoredTensor | None:
        """Return the tensor that has a byte of a file."""
        tensors = self._by_file.get(file, [])
        place = bisect.bisect_right(tensors, offset, key=operator.attrgetter("offset")) - 1
        return tensors[place] if place >= 0 and offset < tensors[place].offset + tensors[place].byte_count else None

    def _begin(self, tensor: StoredTensor) -> PieceHasher | None:
        """Note that a tensor is used; None if it is checked already."""
        with self._lock:
            if tensor.name in self._checked:
                return None
            if tensor.name not in self._begun:
                self._begun[tensor.name] = PieceHasher(tensor.byte_count, MOST_OPEN_PIECES)
            return self._begun[tensor.name]

    def _whole(self, tensor: StoredTensor, hasher: PieceHasher, run: MapFunction) -> str:
        """Return the hash of a tensor, of which everything is read that has not been read.

        SHA-256 needs the bytes in their order, so of manifests of version 1 all are.
        """

        def read(span: tuple[int, int]) -> bytes:
            begin, end = span
            pieces = pieces_of(self.storage, tensor.file, tensor.offset + begin, end - begin)
            if self._tensor_hash != HASH_OF_PIECES:
                return self._tensor_hash.of_part(pieces)
            for data in pieces:
                hasher.add(begin, data)
                begin += len(data)
            return b""

        if self._tensor_hash != HASH_OF_PIECES:
            return self._tensor_hash.combined(list(run(read, self._tensor_hash.parts(tensor.byte_count))))
        for _ in run(read, hasher.missing()):
            pass
        return hasher.hexdigest()

    def _compare(self, tensor: StoredTensor, digest: str) -> None:
        """Note whether a tensor is right. Raises MasterError if it is not."""
        expected = self._digests[tensor.name]
        problem = ""
        if digest != expected:
            problem = (
                f"{self.storage}: {tensor.file}: tensor {tensor.name!r}: {self._tensor_hash.key}: expected {expected}, "
                f"found {digest}: its bytes are damaged; {REMEDY}"
            )
        with self._lock:
            self._checked[tensor.name] = problem
            self._begun.pop(tensor.name, None)
        if problem:
            raise MasterError(problem)


Reads = Storage | CheckedReads  # what a tensor is read through: a storage, or one whose tensors are checked
