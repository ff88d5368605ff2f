"""A file at an http(s) address of any server: its ranges, each checked to be of one version.

Such a server has no list of its files, so that a file is named, with the parts that belong to it.
"""

from __future__ import annotations

import contextlib
import urllib.parse
import weakref
from collections.abc import Sequence
from typing import Any

from pqweights.checkpoint.file_reader import FileState
from pqweights.errors import SourceError, StorageError
from pqweights.storage.addresses import Address
from pqweights.storage.bucket import CONNECTIONS, RemoteFolder, failed
from pqweights.storage.requests import read_range

MISSING = (404, 410)


class WebFolder(RemoteFolder):
    """The folder of a file on a server, of which files are read by their names. The query of its address is theirs."""

    _alone = contextlib.nullcontext()

    def states(self, only: Sequence[str] | None = None, *, recursive: bool = True) -> dict[str, FileState]:
        """Return what the named files are now, as there is no list. Those that are not there lack."""
        states = {name: self.state(name) for name in only or ()}
        return {name: state for name, state in states.items() if state is not None}

    def journal_line(self) -> None:
        """Return nothing: no result is made there."""

    def state(self, name: str) -> FileState | None:
        """Return the size and the stamp of a file; None if it is not there.

        Raises SourceError if the server sends whole files alone.
        """
        reply = self._request("read", name, lambda: self._get(name, 0, 1), optional=True)
        return None if reply is None else reply[1]

    def _range(self, name: str, start: int, end: int) -> tuple[bytes, str]:
        """Return bytes of a file, and what tells its version."""
        data, state = self._get(name, start, end)
        return data, state.stamp

    def _get(self, name: str, start: int, end: int) -> tuple[bytes, FileState]:
        """Return bytes of a file, and what it is. Raises FileNotFoundError if there is none."""
        from httpx2 import InvalidURL

        address = self.address / urllib.parse.quote(name)

        def check(response: Any) -> None:
            if response.status_code in MISSING:
                raise FileNotFoundError
            response.raise_for_status()

        try:
            return read_range(self._system, address.url, start, end, shown=str(address), check=check)
        except InvalidURL:
            raise SourceError(f"{address}: expected a valid address, http(s)://SERVER/PATH") from None

    def _failed(self, error: Exception, address: Address, action: str) -> StorageError:
        return failed(error, address, action, f"{address.scheme}://{urllib.parse.urlsplit(str(address)).netloc}")

    @property
    def _system(self) -> Any:
        """The client, made when it is first needed."""
        import httpx2

        with self._lock:
            if self._opened is None:
                limits = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
                self._opened = httpx2.Client(follow_redirects=True, limits=limits)
                weakref.finalize(self, self._opened.close)
            return self._opened
