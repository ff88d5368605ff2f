"""What the text that names a source or a result means: a local path, a repository on the Hub, or object storage.

ORG/NAME, hf://ORG/NAME[@REVISION], https://huggingface.co/ORG/NAME/...   a repository
hf://ORG/NAME[@REVISION]/FILE.gguf, or .safetensors, and its page's address   a file in a repository
https://SERVER/PATH/FILE.gguf, or .safetensors                            a file on another server
s3://BUCKET/FOLDER, gs://..., and other schemes that fsspec knows         a folder or a file in object storage
file:///PATH, and all else                                               a local path
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pqweights.errors import OptionError, SourceError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
HUB_PREFIX = "hf://"
_LOCAL = ("file", "local")
WEB = ("http", "https")
HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co", "www.hf.co")
# What follows the name of a repository in the addresses of its pages.
_PAGES = ("tree", "blob", "resolve", "raw", "commit", "commits", "edit")
# Schemes of which the credentials come from the environment or from configuration files, never from the address.
BUCKETS = ("s3", "s3a", "gs", "gcs")
# Two names of one storage.
SAME_SCHEMES = {"s3a": "s3", "gcs": "gs"}
# The form of a name, as in huggingface_hub.utils.validate_repo_id.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?:{_PART}/)?{_PART}")
_MAX_ID = 96
# A file in a repository, behind hf://.
_FILE = re.compile(
    r"(?P<repository>[^/@]+/[^/@]+(@(refs/[^/]+/)?[^/]+)?)/(?P<file>.+\.(gguf|safetensors))", re.IGNORECASE
)


class RepositoryName(NamedTuple):
    """A repository that a user names, and the branch, tag or commit and the file, if these are named, too."""

    id: str
    revision: str | None = None
    file: str = ""


@dataclass(frozen=True, repr=False)
class Address:
    """The address of a folder or a file in object storage. `str()` shows it without credentials.

    scheme: in lower case
    bucket: the bucket, or user:password@host, or an empty text
    path: the folder inside of it, without a slash at either end; may be empty
    query: what follows a question mark, for schemes whose addresses have one
    """

    scheme: str
    bucket: str
    path: str = ""
    query: str = field(default="", kw_only=True)

    @property
    def family(self) -> str:
        """The scheme, by one of the names of its storage."""
        return SAME_SCHEMES.get(self.scheme, self.scheme)

    @property
    def url(self) -> str:
        """The whole address, which may hold credentials: for fsspec alone."""
        return _joined(self.scheme, self.bucket, self.path) + (f"?{self.query}" if self.query else "")

    @property
    def name(self) -> str:
        """The last part: the name of the folder or the file."""
        return self.path.rpartition("/")[2] or self.bucket.rpartition("@")[2]

    @property
    def parent(self) -> Address:
        """The folder around it."""
        return Address(self.scheme, self.bucket, self.path.rpartition("/")[0], query=self.query)

    def __truediv__(self, name: str) -> Address:
        """Return the address of something inside the folder."""
        return Address(self.scheme, self.bucket, f"{self.path}/{name}".strip("/"), query=self.query)

    def overlaps(self, other: Address) -> bool:
        """Whether one of two addresses is, or holds, the other."""
        ours, theirs = ([a.family, a.bucket, *a.path.split("/")] for a in (self, other))
        shorter, longer = sorted(([part for part in parts if part] for parts in (ours, theirs)), key=len)
        return longer[: len(shorter)] == shorter

    def __str__(self) -> str:
        """Return the address without credentials and without a query."""
        return _joined(self.scheme, self.bucket.rpartition("@")[2], self.path)

    def __repr__(self) -> str:
        """Return it without credentials, too."""
        return f"Address({str(self)!r})"


def _joined(scheme: str, bucket: str, path: str) -> str:
    return f"{scheme}://" + "/".join(part for part in (bucket, path) if part)


def parse_location(given: str | Path) -> Path | RepositoryName | Address:
    """Return what a user's text means. A Path is a local path, and so is ORG/NAME if there is such a path.

    Raises OptionError for an address that cannot be one: of the Hub, but not of a model; without a bucket; with
    credentials; with one slash; file:// on another machine.
    """
    if isinstance(given, Path):
        return _with_two_slashes(given)
    match = _SCHEME.match(given)
    scheme = match[1].lower() if match else ""
    if scheme == "hf":
        rest, file = given[len(HUB_PREFIX) :].removeprefix("models/").rstrip("/"), ""
        if (match := _FILE.fullmatch(rest)) is not None and is_inside(match["file"]):
            rest, file = match["repository"], match["file"]
        id, _, revision = rest.partition("@")
        return RepositoryName(id, revision or None, file)
    bare = not scheme and given.partition("/")[0].lower() in HOSTS and not Path(given).exists()
    if bare or scheme in ("http", "https"):
        parts = _split(f"https://{given}" if bare else given)
        if parts is not None and parts.netloc.rpartition("@")[2].lower().removesuffix(":443") in _hosts():
            return _of_page(given, parts.path)
    if scheme in _LOCAL:
        return _local_path(given)
    if match:
        return _address(scheme, given[match.end() :])
    id = given.rstrip("/")
    if is_repository_id(id) and not Path(given).exists():
        return RepositoryName(id)
    return _with_two_slashes(Path(given))


def repository_named(given: str | Path) -> RepositoryName | None:
    """Return the repository that a text means; None for anything else. Raises OptionError, see `parse_location`."""
    location = parse_location(given)
    return location if isinstance(location, RepositoryName) else None


def repository_id(given: str | Path) -> str | None:
    """Return the name of the repository that a text means; None for anything else."""
    named = repository_named(given)
    return None if named is None else named.id


def is_repository_id(text: str, namespace: bool = True) -> bool:
    """Return whether a text can name a repository.

    namespace: whether to accept only ORG/NAME, not the bare NAME that some of the oldest models have
    """
    return (
        _ID.fullmatch(text) is not None
        and len(text) <= _MAX_ID
        and "--" not in text
        and ".." not in text
        and not text.endswith(".git")
        and ("/" in text or not namespace)
    )


def is_inside(name: str) -> bool:
    """Whether a name that a server lists leads to a file inside of the folder, and means what it displays."""
    parts = name.split("/")
    is_plain = "\\" not in name and ":" not in parts[0] and name.isprintable()
    return is_plain and not any(part in ("", ".", "..") for part in parts)


def check_inside(where: object, names: Iterable[str]) -> None:
    """Raise SourceError for a name that a server lists, but that is not one of a file inside, see `is_inside`.

    where: what holds the files, as messages call it
    """
    if strange := next((name for name in names if not is_inside(name)), None):
        raise SourceError(
            f"{where}: holds a file {strange[:80]!a}: expected a path inside of it, in printable characters; do not "
            "use this repository or folder, or rename the file if it is yours"
        )


def _split(url: str) -> urllib.parse.SplitResult | None:
    try:
        return urllib.parse.urlsplit(url)
    except ValueError:
        return None


def _hosts() -> set[str]:
    """The hosts of the Hub, and of another one that HF_ENDPOINT names."""
    own = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.rpartition("@")[2]
    return {*HOSTS, own.lower()} - {""}


def _of_page(text: str, path: str) -> RepositoryName:
    """Return the repository of a page: /ORG/NAME, /ORG/NAME/tree/REVISION, or /ORG/NAME/blob/REVISION/FILE.

    Of the files, those of GGUF are models, and in folders those in safetensors; one at the top is of the repository's.
    """
    parts = [urllib.parse.unquote(part) for part in path.split("/") if part]
    parts = parts[1:] if parts[:1] == ["models"] else parts
    page = next((at for at in (1, 2) if len(parts) > at and parts[at] in _PAGES), len(parts))
    id, rest = "/".join(parts[:page]).removesuffix(".git"), parts[page:]
    wanted = rest[1:4] if rest[1:2] == ["refs"] else rest[1:2]
    inside = rest[1 + len(wanted) :]
    if parts[:1] in (["datasets"], ["spaces"]) or not is_repository_id(id, namespace=False):
        raise OptionError(f"{text[:200]}: expected the address of a model, such as https://huggingface.co/ORG/NAME")
    kinds = (".gguf", ".safetensors") if len(inside) > 1 else (".gguf",)
    if inside and inside[-1].lower().endswith(kinds) and is_inside("/".join(inside)):
        return RepositoryName(id, "/".join(wanted) or None, "/".join(inside))
    if len(inside) > (rest[:1] != ["tree"]):
        raise OptionError(
            f"{text[:200]}: points into a folder of the repository, but only the model at its top can be "
            f"read; give {id}, or fetch the folder and give that"
        )
    return RepositoryName(id, "/".join(wanted) or None)


def _with_two_slashes(path: Path) -> Path:
    """Return a local path. Raises OptionError for an address that lost a slash, as it does when it becomes a Path."""
    scheme = path.parts[0].removesuffix(":") if path.parts else ""
    if path.parts[:1] == (f"{scheme}:",) and scheme.lower() in (*BUCKETS, "hf", "http", "https"):
        raise OptionError(f"{path}: expected a local path, or an address with two slashes as a text: {scheme}://...")
    return path


def _address(scheme: str, rest: str) -> Address:
    """Return the address in object storage whose text goes on with `rest` after the scheme."""
    rest, _, query = rest.partition("?") if scheme not in BUCKETS else (rest, "", "")
    bucket, _, path = rest.partition("/")
    address = Address(scheme, bucket, path.strip("/"), query=query)
    form = f"expected {scheme}://BUCKET/FOLDER, found"
    parts = address.path.split("/") if address.path else []
    if scheme in BUCKETS and "@" in bucket:
        raise OptionError(
            f"{address}: {form} credentials in the address: leave them out, and give them in the environment or in a "
            "configuration file"
        )
    if not bucket and (scheme in BUCKETS or not parts):
        raise OptionError(f"{address}: {form} no bucket")
    if any(part in ("", ".", "..") for part in parts) or not address.path.isprintable():
        shown = ascii(str(address)[:200])
        raise OptionError(f"{shown}: {form} an empty part, '.', '..' or characters that cannot be printed")
    return address


def _local_path(text: str) -> Path:
    """Return the path of a file:// address."""
    parts = urllib.parse.urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise OptionError(f"{text}: expected file:///PATH, found a host: give the path alone")
    return Path(urllib.parse.unquote(parts.path))
