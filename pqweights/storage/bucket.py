"""A folder in object storage: listings, ranges, uploads and moves by fsspec, whose failures become one line.

fsspec's file systems are opened with bounded waiting and without caches; credentials and endpoints are those that they
find themselves. Their clients send requests again that failed. Replies that are cut are requested again here, and each
is checked to be of the version that was listed, where the storage tells.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pqweights.checkpoint.ahead import Stop, TransferStopped
from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER
from pqweights.checkpoint.storage import Remote
from pqweights.common.advice import pip_install
from pqweights.errors import MissingDependencyError, OptionError, SourceChangedError, StorageError
from pqweights.storage import requests
from pqweights.storage.addresses import Address, check_inside
from pqweights.storage.requests import Result, Truncated, expected_errors, reason, repeated, status_and_code

# Schemes that fsspec knows, and that cannot list a folder or are not a place for models.
NOT_STORAGE = ("http", "https", "hf", "data", "file", "local", "reference", "zip", "tar", "git", "github")
EXTRAS = {"s3": "s3", "gs": "gcs"}  # that install what these schemes need
GIVE_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or log in with `aws configure`",
    "gs": "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
}
# What credentials must permit, to read and to write.
PERMISSIONS = {
    "s3": ("s3:GetObject and s3:ListBucket", "s3:GetObject, s3:PutObject and s3:DeleteObject"),
    "gs": ("storage.objects.get and list", "storage.objects.get, create and delete"),
}

CONNECT_SECONDS = 10
READ_SECONDS = 60
# Connections to a server at once, of one process and folder.
CONNECTIONS = 16
# A part of an upload to S3, of which few wait in memory, and of a copy on the server.
PART_BYTES = 16_000_000
PARTS_AT_ONCE = 4
COPY_PART_BYTES = 1 << 30
# Larger objects are copied in parts, by s3fs.
SINGLE_COPY_BYTES = 150 << 20

# What tells one version of a file from another, in the names that file systems give it, the best first; and when it was
# written.
VERSION_KEYS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "modified",
    "created",
)
TIME_KEYS = ("LastModified", "updated", "mtime", "last_modified", "modified", "created")
MOST_FIRST_LINE_BYTES = 1 << 20  # of a journal

# File systems that do nothing asynchronously share open files between threads.
_ONE_AT_A_TIME = threading.RLock()


def upload_bytes_held() -> int:
    """Return how many bytes an upload holds in memory at most: its parts, and the next one."""
    return (PARTS_AT_ONCE + 1) * PART_BYTES


class RemoteFolder(Remote):
    """One folder in object storage. Threads may share it, and other processes get it pickled.

    address: where it is

    It connects when it is first used. Every method raises StorageError for what the storage refuses, OptionError for an
    unknown scheme, and MissingDependencyError if a package is missing.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._opened: Any = None

    def __reduce__(self) -> tuple[type[RemoteFolder], tuple[Address]]:
        """Pickle the address alone: connections and credentials belong to a process."""
        return type(self), (self.address,)

    def __str__(self) -> str:
        return str(self.address)

    def states(self, only: Sequence[str] | None = None, *, recursive: bool = True) -> dict[str, FileState]:
        """Return what its files are now. Raises SourceError for a name that cannot be that of a file inside of it."""
        states = self.files(recursive=recursive) if only is None else {name: self.state(name) for name in only}
        check_inside(self, states)
        return {name: state for name, state in states.items() if state is not None}

    def journal_line(self) -> bytes | None:
        """Return the first line of the journal that an unfinished run into this folder left, see unfinished.py."""
        journal, files = f"{WORK_FOLDER}/{JOURNAL_FILE}", self.files(WORK_FOLDER)
        if journal not in files:
            return b"" if files else None
        return self.read(journal, 0, min(files[journal].byte_count, MOST_FIRST_LINE_BYTES)).partition(b"\n")[0] or b"\n"

    def files(self, below: str = "", *, recursive: bool = True) -> dict[str, FileState]:
        """List all files, by their path from this folder, in sorted order; an empty dict if there is no such folder.

        below: a folder inside of this one, to which the list is limited
        recursive: whether the files in folders inside of it are listed, too

        Hidden files and folders are left out, except `below` itself.
        """
        root = self._path("")
        depth = None if recursive else 1
        listed = self._request(
            "read", below, lambda: self._system.find(self._path(below), maxdepth=depth, detail=True), optional=True
        )
        files = {}
        for path, info in (listed or {}).items():
            if not str(path).strip("/").startswith(root.strip("/") + "/"):
                continue  # something else whose name begins alike
            name = str(path).removeprefix(root).strip("/")
            inner = name.removeprefix(below).strip("/")
            is_file = info.get("type") == "file" and not str(path).endswith("/") and str(path) != root
            if is_file and inner and not any(part.startswith(".") for part in inner.split("/")):
                files[name] = _state(info)
        return dict(sorted(files.items()))

    def state(self, name: str) -> FileState | None:
        """Return the size and the stamp of a file; None if it is not there."""
        info = self._request("read", name, lambda: self._system.info(self._path(name)), optional=True)
        return _state(info) if info is not None and info.get("type") == "file" else None

    def read(self, name: str, start: int, end: int, *, expected: FileState | None = None) -> bytes:
        """Return the bytes [start, end) of a file.

        expected: what the file was when it was listed, if the answer is to be of that version

        Raises StorageError also if the file is not there or ends early, SourceChangedError if it is another version.
        """
        if start >= end:
            return b""
        data, version = self._request("read", name, lambda: self._range(name, start, end))
        if expected is not None and version and version != expected.stamp:
            raise SourceChangedError(
                f"{self.address / name}: it was replaced while it was being read: leave the source as it is, and run "
                "the same command again"
            )
        return bytes(data)

    def read_whole(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is not there."""
        state = self.state(name)
        return None if state is None else self.read(name, 0, state.byte_count)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file; it is there with all of its content, or not at all."""
        self._request("write", name, lambda: self._system.pipe_file(self._path(name), data))
        self._check_size(name, len(data))

    def upload(self, name: str, path: Path, *, stop: Stop = lambda: False) -> None:
        """Write a local file, in parts if it is large; it is there with all of its content, or not at all.

        stop: asked between parts

        Raises TransferStopped once `stop` returns True.
        """
        from fsspec.callbacks import Callback

        def check(*_: object, **__: object) -> None:
            if stop():
                raise TransferStopped

        options = {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE} if self._is_s3 else {}

        def put() -> None:
            check()
            callback = Callback(hooks={"stop": check})
            self._system.put_file(str(path), self._path(name), callback=callback, **options)

        self._request("write", name, put, in_parts=True)
        self._check_size(name, path.stat().st_size)

    def move(self, source: str, target: str) -> None:
        """Rename a file on the server. Nothing happens if that was done before.

        Raises StorageError also if neither is there.
        """
        state, there = self.state(source), self.state(target)
        if state is None:
            if there is None:
                raise StorageError(f"{self.address / source}: expected this file, to rename it, found none")
            return
        options = {"block": COPY_PART_BYTES} if self._is_s3 and state.byte_count > SINGLE_COPY_BYTES else {}
        paths = self._path(source), self._path(target)
        self._request("write", source, lambda: self._system.cp_file(*paths, **options), in_parts=True)
        self._check_size(target, state.byte_count)
        self.remove([source])

    def remove(self, names: Iterable[str]) -> None:
        """Delete files; those that are not there are no problem."""
        for name in names:
            self._request("write", name, functools.partial(self._system.rm_file, self._path(name)), optional=True)

    def _check_size(self, name: str, expected: int) -> None:
        """Raise StorageError unless a file that was written has its size."""
        state = self.state(name)
        if state is None or state.byte_count != expected:
            size = "no such file" if state is None else f"{state.byte_count} bytes"
            raise StorageError(
                f"{self.address / name}: expected {expected} bytes after they were written, found {size}: run the same "
                "command again"
            )

    def _range(self, name: str, start: int, end: int) -> tuple[bytes, str]:
        """Return bytes of a file, and what tells its version; an empty text if the file system does not say."""
        path, version = self._path(name), ""
        if not self._is_s3:
            data = self._system.cat_file(path, start=start, end=end)
        else:
            from fsspec.asyn import sync

            bucket, key, _ = self._system.split_path(path)
            reply = self._system.call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
            try:
                data, version = sync(self._system.loop, reply["Body"].read), str(reply.get("ETag", "")).strip('"')
            except expected_errors() as error:
                raise Truncated(f"the reply ended with a {type(error).__name__}") from None
            finally:
                reply["Body"].close()
        if len(data) != end - start:
            raise Truncated(f"expected {end - start} bytes at offset {start}, found {len(data)}")
        return data, version

    @property
    def _system(self) -> Any:
        """The file system, opened when it is first needed."""
        with self._lock:
            if self._opened is None:
                self._opened = _opened(self.address)
            return self._opened

    @property
    def _is_s3(self) -> bool:
        return self.address.family == "s3"

    def _path(self, name: str) -> str:
        """Return the path under which the file system knows a file, or the folder."""
        url = (self.address / name if name else self.address).url
        return str(self._system._strip_protocol(url)).rstrip("/")

    def _request(
        self, action: str, name: str, send: Callable[[], Result], *, in_parts: bool = False, optional: bool = False
    ) -> Any:
        """Send a request, again if the reply is cut, and return its result.

        in_parts: whether it consists of several, of which the last may be found done: then all are sent once more
        optional: whether to return None if there is no such file; otherwise that is an error
        """
        address = self.address / name if name else self.address

        def explained(error: Exception) -> Exception:
            is_missing = isinstance(error, FileNotFoundError) and status_and_code(error)[1] != "NoSuchBucket"
            return error if is_missing else self._failed(error, address, action)

        try:
            with self._alone:
                return repeated(send, explained)
        except FileNotFoundError:
            if in_parts:
                return self._request(action, name, send)
            if not optional:
                raise StorageError(f"{address}: there is no such file") from None
            return None

    @property
    def _alone(self) -> contextlib.AbstractContextManager[Any]:
        """What a request runs in: alone, unless the file system may be shared by threads."""
        return contextlib.nullcontext() if getattr(self._system, "async_impl", False) else _ONE_AT_A_TIME

    def _failed(self, error: Exception, address: Address, action: str) -> StorageError:
        """Return what to tell the user about a request that failed for good. action: read or write"""
        return failed(error, address, action, _endpoint_of(self._system))


def _state(info: dict[str, Any]) -> FileState:
    """Return the state of a file from what a listing says of it."""
    version = next((info[key] for key in VERSION_KEYS if info.get(key)), "")
    times = (_seconds(info[key]) for key in TIME_KEYS if info.get(key))
    modified = next((seconds for seconds in times if seconds is not None), 0.0)
    return FileState(int(info.get("size") or 0), str(_seconds(version) or version).strip('"'), int(modified * 1e9))


def _seconds(time: Any) -> float | None:
    """Return a time of a listing in seconds since 1970; None for what is not a time."""
    if isinstance(time, str):
        try:
            time = datetime.datetime.fromisoformat(time)
        except ValueError:
            return None
    if isinstance(time, datetime.datetime):
        return time.timestamp()
    return float(time) if isinstance(time, int | float) else None


def _opened(address: Address) -> Any:
    """Return fsspec's file system for an address, which belongs to the caller alone.

    Raises OptionError for a scheme that nobody knows, MissingDependencyError if its package is not installed,
    StorageError if its configuration is wrong.
    """
    try:
        import fsspec
        from fsspec.config import conf
        from fsspec.registry import known_implementations, registry
    except ImportError:
        raise MissingDependencyError(f"{address}: needs fsspec, which is not installed: pip install fsspec") from None
    scheme, family = address.scheme, address.family
    if scheme in NOT_STORAGE or (scheme not in known_implementations and scheme not in registry):
        raise OptionError(
            f"{address}: expected an address in storage that fsspec can list, such as s3://BUCKET/FOLDER "
            f"({pip_install('s3')}) or gs://BUCKET/FOLDER ({pip_install('gcs')}), found the scheme {scheme!r}"
        )
    try:
        file_system: Any = fsspec.get_filesystem_class(scheme)
    except ImportError:
        extra = EXTRAS.get(family)
        install = pip_install(extra) if extra else "install the package of fsspec for this storage"
        raise MissingDependencyError(
            f"{address}: fsspec needs another package for {scheme}://, which is not installed: {install}"
        ) from None
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    options |= file_system._get_kwargs_from_urls(address.url)  # the host and the user, of schemes that have them
    if family == "s3":
        ours = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "max_pool_connections": CONNECTIONS,
            # The mode that takes 429 for throttling.
            "retries": {"mode": "legacy", "total_max_attempts": requests.ATTEMPTS},
        }
        options["config_kwargs"] = ours | conf.get("s3", {}).get("config_kwargs", {})
    try:
        opened = file_system(**options)
        if family == "s3":
            opened.retries = 1  # botocore sends requests again
            opened.connect()
    except (ValueError, KeyError, TypeError) as error:
        hint = ": check AWS_ENDPOINT_URL and the configuration" if family == "s3" else ""
        raise StorageError(
            f"{address}: the storage cannot be opened with its configuration ({type(error).__name__}){hint}"
        ) from None
    except expected_errors() as error:
        raise failed(error, address, "read") from None
    return opened


def _endpoint_of(file_system: Any) -> str:
    """Return the server of a file system without credentials, as far as it is known."""
    endpoint = getattr(getattr(getattr(file_system, "_s3", None), "meta", None), "endpoint_url", None)
    server = urllib.parse.urlsplit(endpoint if isinstance(endpoint, str) else "")
    return f"{server.scheme}://{server.netloc.rpartition('@')[2]}" if server.netloc else ""


def failed(error: Exception, address: Address, action: str, endpoint: str = "") -> StorageError:
    """Return what to tell the user about a request that failed for good.

    address: what the request was about
    action: read or write
    endpoint: the server as far as it is known, without credentials
    """
    family, bucket = address.family, str(Address(address.scheme, address.bucket))
    needed = PERMISSIONS[family][action == "write"] if family in PERMISSIONS else f"permission to {action}"
    why = reason(
        error,
        service="the storage",
        at=f" at {endpoint}" if endpoint else "",
        bucket=bucket,
        credentials=GIVE_CREDENTIALS.get(family, "give those of the storage in its configuration"),
        permission=f"expected credentials with {needed}; ask the owner of {bucket}",
        settings=" and AWS_ENDPOINT_URL" if family == "s3" else "",
    )
    return StorageError(f"{address}: {why}")
