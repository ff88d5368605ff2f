"""Where results are written: a folder on this machine, or one in object storage. `open_store` opens either."""

from __future__ import annotations

from pathlib import Path

from pqweights.errors import OptionError
from pqweights.storage.addresses import BUCKETS, Address, RepositoryName, parse_location
from pqweights.storage.bucket import RemoteFolder
from pqweights.storage.local import LocalStore
from pqweights.storage.protocol import Store
from pqweights.storage.store import BucketStore

__all__ = ["Store", "open_store"]


def open_store(where: str | Path | Store) -> Store:
    """Return the store that a path or an address names; a store is returned as it is.

    Raises OptionError for an address to which no result can be written.
    """
    if isinstance(where, Path) and where.parts and where.parts[0][:-1] in BUCKETS:
        raise OptionError(f"{where}: expected a folder, found an address as a Path: give it as a str, with two slashes")
    if not isinstance(where, str | Path):
        return where
    location = parse_location(where)
    if isinstance(location, RepositoryName) and "://" in str(where):
        raise OptionError(
            f"{where}: expected a folder, or an address in object storage: write the result to a folder, then send it "
            "to the Hub with pqweights push"
        )
    if isinstance(location, Address):
        return BucketStore(RemoteFolder(location))
    return LocalStore(Path(where) if isinstance(location, RepositoryName) else location)
