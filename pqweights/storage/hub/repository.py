"""What a repository on the Hub holds: its files at one commit, and the hashes that their content must have."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pqweights.checkpoint.storage import Origin
from pqweights.checkpoint.writer import COPY_BYTES
from pqweights.errors import OptionError

# The form of a name, as in huggingface_hub.utils.validate_repo_id.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?:{_PART}/)?{_PART}")
MAX_LENGTH = 96
PREFIX = "hf://"
HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co", "www.hf.co")
# What follows the name of a repository in the addresses of its pages.
PAGES = ("tree", "blob", "resolve", "raw", "commit", "commits", "edit")


def is_repository_id(text: str, namespace: bool = True) -> bool:
    """Return whether a text can name a repository.

    namespace: whether to accept only ORG/NAME, not the bare NAME that some of the oldest models have
    """
    return (
        _ID.fullmatch(text) is not None
        and len(text) <= MAX_LENGTH
        and "--" not in text
        and ".." not in text
        and not text.endswith(".git")
        and ("/" in text or not namespace)
    )


class NamedRepository(NamedTuple):
    """A repository that a user names, and the branch, tag or commit, if it is named, too."""

    id: str
    revision: str | None = None


def repository_named(text: str) -> NamedRepository | None:
    """Return the repository that a text names, or None for what is, or could only be, something else.

    That is ORG/NAME, unless there is such a local path, hf://ORG/NAME[@REVISION], or the address of a page of it.

    Raises OptionError for an address on the Hub that is not that of a model, or of a folder inside of it.
    """
    if text.startswith(PREFIX):
        id, _, revision = text.removeprefix(PREFIX).removeprefix("models/").rstrip("/").partition("@")
        return NamedRepository(id, revision or None)
    with contextlib.suppress(ValueError):  # no address
        bare = text.partition("/")[0].lower() in HOSTS and not Path(text).exists()
        parts = urllib.parse.urlsplit(f"https://{text}" if bare else text)
        if parts.scheme.lower() in ("http", "https"):
            return _of_page(text, parts.path) if parts.netloc.lower() in _hosts() else None
    id = text.rstrip("/")
    return NamedRepository(id) if is_repository_id(id) and not Path(text).exists() else None


def _hosts() -> set[str]:
    """The hosts of the Hub, and of another one that HF_ENDPOINT names."""
    own = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.rpartition("@")[2]
    return {*HOSTS, own.lower()} - {""}


def _of_page(text: str, path: str) -> NamedRepository:
    """Return the repository of a page: /ORG/NAME, /ORG/NAME/tree/REVISION, or /ORG/NAME/blob/REVISION/FILE."""
    parts = [urllib.parse.unquote(part) for part in path.split("/") if part]
    parts = parts[1:] if parts[:1] == ["models"] else parts
    place = next((at for at in (1, 2) if len(parts) > at and parts[at] in PAGES), len(parts))
    id, rest = "/".join(parts[:place]), parts[place:]
    wanted = rest[1:4] if rest[1:2] == ["refs"] else rest[1:2]
    inside = rest[1 + len(wanted) :]
    if parts[:1] in (["datasets"], ["spaces"]) or not is_repository_id(id, namespace=False):
        raise OptionError(f"{text[:200]}: expected the address of a model, such as https://huggingface.co/ORG/NAME")
    if len(inside) > (rest[:1] != ["tree"]):
        raise OptionError(
            f"{text[:200]}: leads into a folder of the repository, of which models are not read; give {id} if its "
            "model is at the top, or fetch the folder and give that"
        )
    return NamedRepository(id, "/".join(wanted) or None)


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
