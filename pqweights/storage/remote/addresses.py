"""Addresses of folders and files in object storage: SCHEME://BUCKET/FOLDER.

hf://ORG/NAME is not one of them: pqweights/hub reads the Hub. file:// means a local path.
"""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

from pqweights.errors import OptionError

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
HUB = "hf"
# Schemes of which the credentials come from the environment or from configuration files, never from the address.
BUCKETS = ("s3", "s3a", "gs", "gcs")
# Two names of one storage.
SAME_SCHEMES = {"s3a": "s3", "gcs": "gs"}
# Schemes that fsspec knows, and that cannot list a folder or are not a place for models.
NOT_STORAGE = ("http", "https", "hf", "data", "file", "local", "reference", "zip", "tar", "git", "github")


@dataclass(frozen=True, repr=False)
class Address:
    """The address of a folder or a file in object storage. `str()` shows it without credentials.

    scheme: in lower case
    place: the bucket, or user:password@host, or an empty text
    path: the folder inside of it, without a slash at either end; may be empty
    query: what follows a question mark, for schemes whose addresses have one
    """

    scheme: str
    place: str
    path: str = ""
    query: str = field(default="", kw_only=True)

    @property
    def url(self) -> str:
        """The whole address, which may hold credentials: for fsspec alone."""
        return _joined(self.scheme, self.place, self.path) + (f"?{self.query}" if self.query else "")

    @property
    def name(self) -> str:
        """The last part: the name of the folder or the file."""
        return self.path.rpartition("/")[2] or self.place.rpartition("@")[2]

    @property
    def parent(self) -> Address:
        """The folder around it."""
        return Address(self.scheme, self.place, self.path.rpartition("/")[0], query=self.query)

    def __truediv__(self, name: str) -> Address:
        """Return the address of something inside the folder."""
        return Address(self.scheme, self.place, f"{self.path}/{name}".strip("/"), query=self.query)

    def overlaps(self, other: Address) -> bool:
        """Whether one of two addresses is, or holds, the other."""
        ours, theirs = ([SAME_SCHEMES.get(a.scheme, a.scheme), a.place, *a.path.split("/")] for a in (self, other))
        shorter, longer = sorted(([part for part in parts if part] for parts in (ours, theirs)), key=len)
        return longer[: len(shorter)] == shorter

    def __str__(self) -> str:
        """Return the address without credentials and without a query."""
        return _joined(self.scheme, self.place.rpartition("@")[2], self.path)

    def __repr__(self) -> str:
        """Return it without credentials, too."""
        return f"Address({str(self)!r})"


def _joined(scheme: str, place: str, path: str) -> str:
    return f"{scheme}://" + "/".join(part for part in (place, path) if part)


def is_address(text: str | Path) -> bool:
    """Whether a text is an address in object storage, and not a local path, or a repository on the Hub."""
    found = SCHEME.match(text) if isinstance(text, str) else None
    return found is not None and found[1].lower() not in (HUB, "file", "local")


def parse_address(text: str) -> Address:
    """Return the address that a text is. It must be one, see `is_address`.

    Raises OptionError for one that cannot be that of a folder or a file.
    """
    found = SCHEME.match(text)
    assert found is not None
    scheme, rest = found[1].lower(), text[found.end() :]
    rest, _, query = rest.partition("?") if scheme not in BUCKETS else (rest, "", "")
    place, _, path = rest.partition("/")
    address = Address(scheme, place, path.strip("/"), query=query)
    if scheme in BUCKETS and "@" in place:
        raise OptionError(
            f"{address}: expected {scheme}://BUCKET/FOLDER, found credentials in the address: leave them out, and give "
            "them in the environment or in a configuration file"
        )
    parts = address.path.split("/") if address.path else []
    if not address.place and (scheme in BUCKETS or not parts):
        raise OptionError(f"{address}: expected {scheme}://BUCKET/FOLDER, found no bucket")
    if any(part in ("", ".", "..") for part in parts) or not address.path.isprintable():
        raise OptionError(
            f"{str(address)[:200]!a}: expected {scheme}://BUCKET/FOLDER, found an empty part, '.', '..' or characters "
            "that cannot be printed"
        )
    return address


def is_inside(name: str) -> bool:
    """Whether a name that a server lists leads to a file inside of the folder, and means what it displays."""
    parts = name.split("/")
    is_plain = "\\" not in name and ":" not in parts[0] and name.isprintable()
    return is_plain and not any(part in ("", ".", "..") for part in parts)


def local_path(text: str | Path) -> str | Path:
    """Return what the user gave, with file:// turned into a local path.

    Raises OptionError for a file on another machine.
    """
    found = SCHEME.match(text) if isinstance(text, str) else None
    if found is None or found[1].lower() not in ("file", "local"):
        return text
    parts = urllib.parse.urlsplit(str(text))
    if parts.netloc not in ("", "localhost"):
        raise OptionError(f"{text}: expected file:///PATH, found a host: give the path alone")
    return urllib.parse.unquote(parts.path)
