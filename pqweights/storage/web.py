"""A file at an http(s) address of any server: its ranges, by requests that are sent again, each checked to be of one
version.

Such a server has no list of its files, so that a file is named, with the parts that belong to it.
"""

from __future__ import annotations

import threading
import urllib.parse
import weakref
from collections.abc import Sequence
from typing import Any

from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.storage import Remote
from pqweights.errors import SourceChangedError, SourceError
from pqweights.storage import requests
from pqweights.storage.addresses import Address
from pqweights.storage.bucket import ATTEMPTS, CONNECT_SECONDS, CONNECTIONS, READ_SECONDS, failed
from pqweights.storage.requests import TEMPORARY_STATUSES, Truncated, repeated, status_and_code

# What tells one version of a file from another, the best first.
VERSIONS = ("ETag", "Last-Modified")
MISSING = (404, 410)


class WebFolder(Remote):
    """The folder of a file on a server. Threads may share it, and other processes get it pickled.

    address: that of the folder; its query is that of each file

    Every method raises StorageError for what the server refuses.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._opened: Any = None

    def __reduce__(self) -> tuple[type[WebFolder], tuple[Address]]:
        """Pickle the address alone: connections belong to a process."""
        return WebFolder, (self.address,)

    def __str__(self) -> str:
        return str(self.address)

    def states(self, only: Sequence[str] | None = None, *, recursive: bool = True) -> dict[str, FileState]:
        """Return what files are now; of those that are named, as there is no list. Those that are not there lack."""
        states = {name: self.state(name) for name in only or ()}
        return {name: state for name, state in states.items() if state is not None}

    def state(self, name: str) -> FileState | None:
        """Return the size and the stamp of a file; None if it is not there.

        Raises SourceError if the server sends whole files alone.
        """
        reply = self._get(name, 0, 1, optional=True)
        return None if reply is None else reply[1]

    def read(self, name: str, start: int, end: int, *, expected: FileState | None = None) -> bytes:
        """Return the bytes [start, end) of a file. expected: what the file was when it was opened

        Raises SourceChangedError if it is another version now.
        """
        if start >= end:
            return b""
        reply = self._get(name, start, end)
        assert reply is not None
        data, state = reply
        if expected is not None and (state.stamp, state.byte_count) != (expected.stamp, expected.byte_count):
            raise SourceChangedError(
                f"{self.address / name}: it was replaced while it was being read: leave the source as it is, and run "
                "the same command again"
            )
        return data

    def _get(self, name: str, start: int, end: int, *, optional: bool = False) -> tuple[bytes, FileState] | None:
        """Return bytes of a file, and what it is. optional: whether to return None if there is no such file"""
        address = self.address / urllib.parse.quote(name)
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}

        def fetch() -> tuple[bytes, FileState]:
            data = bytearray()
            with self._client.stream("GET", address.url, headers=headers) as response:
                response.raise_for_status()
                unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
                places, _, size = rest.partition("/")
                if response.status_code == 200 and response.headers.get("Content-Length") == str(end) and not start:
                    unit, places, size = "bytes", f"0-{end - 1}", str(end)  # all of it is a part, too
                elif response.status_code != 206 or unit != "bytes" or not size.isdecimal():
                    raise SourceError(
                        f"{address}: the server sends the whole file where a part is asked for: fetch it, and give "
                        "the local file"
                    )
                if places != f"{start}-{end - 1}":
                    raise Truncated(f"expected bytes {start}-{end - 1}, found {places[:40]} of {size[:20]}")
                for chunk in response.iter_raw():
                    data += chunk
                    if len(data) > end - start:
                        break
                version = next((response.headers[key] for key in VERSIONS if key in response.headers), "")
            if len(data) != end - start:
                raise Truncated(f"expected {end - start} bytes at offset {start}, found {len(data)}")
            return bytes(data), FileState(int(size), version)

        def pause(error: Exception, attempt: int) -> float:
            from httpx2 import TransportError

            status, _ = status_and_code(error)
            if optional and status in MISSING:
                raise error
            if attempt < ATTEMPTS and (status in TEMPORARY_STATUSES or isinstance(error, TransportError | Truncated)):
                return float(requests.FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
            raise failed(error, address, "read", f"{self.address.scheme}://{_host(self.address)}") from None

        from httpx2 import InvalidURL

        try:
            return repeated(fetch, pause)
        except InvalidURL:
            raise SourceError(f"{address}: expected an address that can be one, as http(s)://SERVER/PATH") from None
        except requests.expected_errors() as error:
            if optional and status_and_code(error)[0] in MISSING:
                return None
            raise

    @property
    def _client(self) -> Any:
        """The client, made when it is first needed."""
        import httpx2

        with self._lock:
            if self._opened is None:
                limits = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
                timeout = httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
                self._opened = httpx2.Client(follow_redirects=True, limits=limits, timeout=timeout)
                weakref.finalize(self, self._opened.close)
            return self._opened


def _host(address: Address) -> str:
    return urllib.parse.urlsplit(str(address)).netloc
