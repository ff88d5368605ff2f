"""Checks of the files that hold tensors: size, header, and the hash of every tensor, for all of them or for some.

What is checked can be sent to other processes, part by part; `joined` puts together what they found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from pqweights.checkpoint.digests import TensorHash, pieces_of
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import Storage, read_bytes
from pqweights.planning.plan import ShardPlan
from pqweights.rewrite.manifest import Manifest

Progress = Callable[[int, int, str], None]  # bytes checked, bytes in all, name of the tensor


class ShardFindings(NamedTuple):
    """What checks found.

    good: the files whose size and header are right
    damaged: the others, a line each, in order
    wrong: tensors with another hash, in files that are good, a line each, in order
    """

    good: tuple[str, ...]
    damaged: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ShardChecks:
    """Files that are to be checked.

    storage: where they lie
    shards: the files
    tensor_hash: the hash of tensors in the manifest
    digests: the hash that each stored tensor must have, by name
    """

    storage: Storage
    shards: tuple[ShardPlan, ...]
    tensor_hash: TensorHash
    digests: dict[str, str]

    def part(self, files: Collection[str]) -> ShardChecks:
        """Return the checks of some of the files, which are in the same order whatever that of `files`."""
        shards = tuple(shard for shard in self.shards if shard.file in files)
        names = {stored.name for shard in shards for stored in shard.stored}
        return replace(
            self, shards=shards, digests={name: self.digests[name] for name in self.digests if name in names}
        )

    def run(self, threads: int, progress: Progress = lambda done, total, name: None) -> ShardFindings:
        """Check the files.

        threads: how many threads compute hashes
        progress: called with the bytes hashed, the bytes in all, and the name of a tensor

        Raises StorageError if they cannot be read.
        """
        damaged = {shard.file: problem for shard in self.shards if (problem := self._problem(shard)) is not None}
        good = tuple(shard for shard in self.shards if shard.file not in damaged)
        wrong = self._wrong_hashes(good, threads, progress)
        return ShardFindings(tuple(shard.file for shard in good), tuple(damaged.values()), tuple(wrong))

    def _problem(self, shard: ShardPlan) -> str | None:
        """Check the size and the header of a file, whose bytes follow from the manifest."""
        state = self.storage.files().get(shard.file)
        if state is None:
            return f"{shard.file}: missing"
        if state.byte_count != shard.file_bytes:
            return f"{shard.file}: expected {shard.file_bytes} bytes, found {state.byte_count}"
        header = read_bytes(self.storage, shard.file, 0, shard.header.byte_count)
        if header != shard.header.content and hashlib.sha256(header).hexdigest() != shard.header.sha256:
            return f"{shard.file}: the header is not the one that the manifest plans"
        return None

    def _wrong_hashes(self, shards: Sequence[ShardPlan], threads: int, progress: Progress) -> list[str]:
        """Check the hash of every tensor in some files."""
        tensor_hash, stored = self.tensor_hash, [tensor for shard in shards for tensor in shard.stored]
        work = [(tensor, *part) for tensor in stored for part in tensor_hash.parts(tensor.byte_count)]

        def of_part(part: tuple[StoredTensor, int, int]) -> bytes:
            tensor, begin, end = part
            return tensor_hash.of_part(pieces_of(self.storage, tensor.file, tensor.offset + begin, end - begin))

        total, done = sum(tensor.byte_count for tensor in stored), 0
        wrong: list[str] = []
        digests: list[bytes] = []
        with ThreadPoolExecutor(threads) as pool:
            for (tensor, begin, end), digest in zip(work, pool.map(of_part, work), strict=True):
                digests.append(digest)
                done += end - begin
                progress(done, total, tensor.name)
                if end == tensor.byte_count:
                    found, digests = tensor_hash.combined(digests), []
                    expected = self.digests[tensor.name]
                    if found != expected:
                        differs = f"{tensor_hash.key}: expected {expected}, found {found}"
                        wrong.append(f"{tensor.file}: tensor {tensor.name!r}: {differs}")
        return wrong


def shard_checks(storage: Storage, manifest: Manifest, shards: tuple[ShardPlan, ...]) -> ShardChecks:
    """Return the checks of all files with tensors of a result."""
    digests = {name: digest for record in manifest.records for name, digest in record.digests.items()}
    return ShardChecks(storage=storage, shards=shards, tensor_hash=manifest.tensor_hash, digests=digests)


def joined(parts: Sequence[ShardFindings]) -> ShardFindings:
    """Put together what the checks of all parts found, in the order of the files."""
    return ShardFindings(
        tuple(name for part in parts for name in part.good),
        tuple(line for part in parts for line in part.damaged),
        tuple(line for part in parts for line in part.wrong),
    )
