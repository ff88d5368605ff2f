"""What a repository on the Hub holds: its files at one commit, and the hashes that their content must have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pqweights.checkpoint.storage import Origin
from pqweights.checkpoint.writer import COPY_BYTES


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file of a repository, as the Hub lists it.

    name: its path in the repository
    byte_count: its size
    sha256: the hash of its content; None unless it is stored as a large file
    blob_id: the SHA-1 that git gives it; counts if there is no sha256; None in a cache that does not say it
    """

    name: str
    byte_count: int
    sha256: str | None
    blob_id: str | None

    @property
    def content_hash(self) -> str:
        """The hash that the content must have: the SHA-256, or the SHA-1 of git."""
        return self.sha256 or self.blob_id or ""

    def has_content(self, pieces: Iterable[bytes]) -> bool:
        """Return whether the pieces, one after the other, are the content of this file, if a hash of it is known."""
        if not self.content_hash:  # in a cache without links
            return True
        digest = hashlib.sha256() if self.sha256 is not None else hashlib.sha1(usedforsecurity=False)
        if self.sha256 is None:
            digest.update(b"blob %d\0" % self.byte_count)
        for piece in pieces:
            digest.update(piece)
        return digest.hexdigest() == self.content_hash


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository at one commit. Every request names the commit, so later commits change nothing.

    id: ORG/NAME
    commit: the SHA-1 of the commit
    files: its files by name, in sorted order
    private: whether only its owner and those they let in can see it
    """

    id: str
    commit: str
    files: dict[str, RemoteFile]
    private: bool = False

    @property
    def origin(self) -> Origin:
        """The id and the commit."""
        return Origin(self.id, self.commit)


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yield the content of a local file, piece by piece."""
    with open(path, "rb", buffering=0) as stream:
        while data := stream.read(COPY_BYTES):
            yield data
