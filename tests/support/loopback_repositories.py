"""What the loopback Hub stores: files, commits and repositories, with the hashes that git and LFS give them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Content = bytes | Path

# Some of the suffixes in .gitattributes of a new repository; files above MAX_REGULAR_BYTES are stored with LFS too.
LFS_SUFFIXES = (
    ".arrow",
    ".bin",
    ".gguf",
    ".gz",
    ".h5",
    ".model",
    ".npz",
    ".onnx",
    ".parquet",
    ".pt",
    ".safetensors",
    ".zip",
)
MAX_REGULAR_BYTES = 1_000_000
MAX_HASHED_BYTES = 1_000_000_000  # of larger files on disk, the sha256 is made up unless it is given
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A file's content, and what listings say of it.

    content: bytes, or a file on disk
    size: the size of the content
    sha256: the hash of the content
    oid: the hash that git gives the content, or its LFS pointer
    lfs: whether it is stored with LFS
    """

    content: Content
    size: int
    sha256: str
    oid: str
    lfs: bool

    @classmethod
    def of(cls, name: str, content: Content, sha256: str | None = None) -> Blob:
        """Return a file as the Hub would store it. sha256: the hash of a large file, if it is known."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        if not is_lfs(name, size):
            return cls.regular(content if isinstance(content, bytes) else content.read_bytes())
        if sha256 is None:
            invent = isinstance(content, Path) and size > MAX_HASHED_BYTES
            sha256 = hashlib.sha256(f"{name}:{size}".encode()).hexdigest() if invent else _sha256(content, size)
        return cls.large(content, size, sha256)

    @classmethod
    def regular(cls, content: bytes) -> Blob:
        sha256 = hashlib.sha256(content).hexdigest()
        return cls(content=content, size=len(content), sha256=sha256, oid=_git_sha1(content), lfs=False)

    @classmethod
    def large(cls, content: Content, size: int, sha256: str) -> Blob:
        return cls(content=content, size=size, sha256=sha256, oid=_git_sha1(lfs_pointer(sha256, size)), lfs=True)

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid

    def read(self) -> bytes:
        return b"".join(bytes(piece) for piece in pieces(self.content, 0, self.size))


def is_lfs(name: str, size: int) -> bool:
    """Return whether a file is stored with LFS. Empty files never are."""
    return size > MAX_REGULAR_BYTES or (size > 0 and name.endswith(LFS_SUFFIXES))


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A state of a repository, and the commit before it."""

    sha: str
    parent: str | None
    title: str
    files: Mapping[str, Blob]


class Repository:
    """Branches and pull requests (refs/pr/N), which point to commits.

    access: whether the user "me" is let in if the repository is private or gated
    """

    def __init__(self, id: str, private: bool = False, gated: bool | str = False) -> None:
        self.id = id
        self.private = private
        self.gated = gated
        self.access = True
        self.branches: dict[str, str] = {}
        self.commits: dict[str, Commit] = {}

    def sha(self, revision: str = "main") -> str:
        """Return the commit of a branch, of refs/pr/N, or of 7 or more digits of its hash.

        Raises KeyError if there is none.
        """
        if revision in self.branches:
            return self.branches[revision]
        found = [sha for sha in self.commits if len(revision) >= 7 and sha.startswith(revision)]
        if len(found) != 1:
            raise KeyError(revision)
        return found[0]

    def blobs(self, revision: str = "main") -> Mapping[str, Blob]:
        return self.commits[self.sha(revision)].files

    def files(self, revision: str = "main") -> dict[str, Content]:
        return {name: blob.content for name, blob in self.blobs(revision).items()}

    def read(self, name: str, revision: str = "main") -> bytes:
        return self.blobs(revision)[name].read()

    def advance(self, branch: str, changes: Mapping[str, Blob | None], *, title: str = "commit") -> str:
        """Commit to a branch, which is created if there is none. None deletes a file."""
        parent = self.branches.get(branch)
        files = dict(self.commits[parent].files) if parent else {}
        for name, blob in changes.items():
            if blob is None:
                files.pop(name, None)
            else:
                files[name] = blob
        state = [self.id, len(self.commits), parent, title, [[name, blob.oid] for name, blob in sorted(files.items())]]
        sha = hashlib.sha1(json.dumps(state).encode()).hexdigest()
        self.commits[sha] = Commit(sha=sha, parent=parent, title=title, files=files)
        self.branches[branch] = sha
        return sha


def pieces(content: Content, start: int, stop: int) -> Iterator[memoryview | bytes | bytearray]:
    """Yield the bytes [start, stop); fewer if a file on disk has become shorter."""
    if isinstance(content, bytes):
        view = memoryview(content)[:stop]
        for position in range(start, stop, PIECE_BYTES):
            yield view[position : position + PIECE_BYTES]
        return
    descriptor = os.open(content, os.O_RDONLY)
    try:
        while start < stop and (piece := os.pread(descriptor, min(PIECE_BYTES, stop - start), start)):
            yield piece
            start += len(piece)
    finally:
        os.close(descriptor)


def _sha256(content: Content, size: int) -> str:
    digest = hashlib.sha256()
    for piece in pieces(content, 0, size):
        digest.update(piece)
    return digest.hexdigest()


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    """Return the text that git keeps in place of an LFS file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
