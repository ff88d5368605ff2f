"""Transfers of files from and to the Hub: ranges, whole files that continue where they stopped, uploads.

The official client's hf_hub_download fetches only the files that the Hub does not send by HTTP: version 2.4 throws away
what had come when a process ends. (Of a 40 MB file, 40 MB came again after a kill at 30 MB; here it is 10 MB.)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.checkpoint.writer import disk_errors, partial_path, sync_folder
from pqweights.errors import HubError, HubUnavailableError
from pqweights.storage.hub.client import Hub, Show
from pqweights.storage.hub.repository import RemoteFile, Repository, pieces_of
from pqweights.storage.hub.session import TIMEOUT_SECONDS
from pqweights.storage.remote.attempts import Stop, TransferStopped

WRONG_CONTENT_ATTEMPTS = 3  # of a file whose content does not have the hash that the Hub lists
MOST_HTTP_BYTES = 50_000_000_000  # of a file; the Hub sends larger ones by xet only


def read_range(hub: Hub, repository: Repository, file: str, *, start: int, count: int) -> bytes:
    """Return `count` bytes of a file from `start` on, by one request for the range.

    Raises HubError.
    """
    if count == 0:
        return b""

    def fetch() -> bytes:
        data = bytearray()
        for chunk in _stream(hub, repository, file, start=start, count=count):
            data += chunk
            if len(data) > count:
                raise HubError(f"{repository.id}: {file}: expected {count} bytes, found more in the reply of the Hub")
        _check_length(hub, count, len(data))
        return bytes(data)

    return hub.call(repository.id, fetch, about=f": {file}")


def read_whole(hub: Hub, repository: Repository, file: RemoteFile) -> bytes:
    """Return the content of a small file, checked against its hash. Raises HubError."""
    for _ in range(WRONG_CONTENT_ATTEMPTS):
        data = read_range(hub, repository, file.name, start=0, count=file.byte_count)
        if file.has_content([data]):
            return data
    raise _wrong_content(repository, file)


def download(
    hub: Hub,
    repository: Repository,
    file: RemoteFile,
    *,
    target: Path,
    show: Show = lambda count: None,
    stop: Stop = lambda: False,
) -> None:
    """Fetch a file to `target`, from where an earlier attempt or process stopped, and check it against its hash.

    show: called with the bytes of each chunk
    stop: asked between chunks

    Raises HubError, OutputError for the disk, TransferStopped once `stop` returns True.
    """
    partial = partial_path(target)
    by_http = file.byte_count <= MOST_HTTP_BYTES

    def fetch() -> None:
        fetch_it = _fetch_rest if by_http else _fetch_by_client
        fetch_it(hub, repository, file, target=target, show=show, stop=stop)

    def how_far() -> int:
        return partial.stat().st_size if partial.exists() else 0

    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(WRONG_CONTENT_ATTEMPTS):
        hub.call(repository.id, fetch, about=f": {file.name}", stop=stop, how_far=how_far)
        if file.has_content(pieces_of(partial)):
            with disk_errors(target):
                os.replace(partial, target)
                sync_folder(target.parent)
            return
        partial.unlink()
    raise _wrong_content(repository, file)


def _fetch_rest(hub: Hub, repository: Repository, file: RemoteFile, *, target: Path, show: Show, stop: Stop) -> None:
    """Append to the partial file of `target` what it lacks."""
    with disk_errors(target), open(partial_path(target), "ab") as stream:
        if stream.tell() > file.byte_count:
            stream.seek(stream.truncate(0))
        missing = file.byte_count - stream.tell()
        for chunk in _stream(hub, repository, file.name, start=stream.tell(), count=missing):
            if stop():
                raise TransferStopped
            stream.write(chunk)
            stream.flush()  # a killed process loses nothing that came
            show(len(chunk))
        _check_length(hub, file.byte_count, stream.tell())
        os.fsync(stream.fileno())


def _fetch_by_client(
    hub: Hub, repository: Repository, file: RemoteFile, *, target: Path, show: Show, stop: Stop
) -> None:
    """Fetch the partial file of `target` by the official client, which speaks xet."""
    official, cache = hub.official, target.with_name(f"{target.name}.xet")
    tqdm: Any = official.utils.tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def update(self, count: float | None = 1) -> None:
            if stop():
                raise TransferStopped
            show(int(count or 0))

    try:
        path = official.library.hf_hub_download(
            repository.id, file.name, revision=repository.commit, token=hub.token, cache_dir=cache, tqdm_class=Bar
        )
        with disk_errors(target):
            os.replace(os.path.realpath(path), partial_path(target))
    except official.errors.LocalEntryNotFoundError as error:  # around the real error
        raise error.__cause__ or error from None
    except RuntimeError as error:  # of xet
        failed = f"{repository.id}: {file.name}: the download failed: {hub.clean(str(error))[:200]}"
        raise HubUnavailableError(failed) from None
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise HubError(
            f"{repository.id}: {file.name}: {file.byte_count} bytes, which is more than the Hub sends by HTTP: pip "
            "install hf_xet"
        ) from None
    finally:
        shutil.rmtree(cache, ignore_errors=True)


class Upload(NamedTuple):
    """A file that is sent.

    name: its path in the repository
    content: the path of the local file, or the bytes
    """

    name: str
    content: str | bytes


def upload(hub: Hub, repository: Repository, file: Upload, *, branch: str) -> Any:
    """Return the operation that adds a file to a commit. A large file is sent here, before the commit.

    Raises HubError.
    """
    official = hub.official

    def send() -> Any:
        addition = official.library.CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file.content)
        try:
            hub.api.preupload_lfs_files(repository.id, additions=[addition], revision=branch)
        except RuntimeError as error:  # the client raises it around the real error; xet raises nothing else
            if isinstance(error.__cause__, official.http.HTTPError | OSError):
                raise error.__cause__ from None
            failed = f"{repository.id}: {file.name}: the upload failed: {hub.clean(str(error))[:200]}"
            raise HubUnavailableError(failed) from None  # xet does not tell a refusal from a lost connection
        return addition

    # The official client makes six attempts of its own.
    return hub.call(repository.id, send, about=f": {file.name}", attempts=1)


def _stream(hub: Hub, repository: Repository, file: str, *, start: int, count: int) -> Iterator[bytes]:
    """Yield `count` bytes from `start` on, as they come; fewer if the reply is short."""
    if count == 0:
        return
    official = hub.official
    url = official.library.hf_hub_url(repository.id, file, revision=repository.commit)
    headers = official.utils.build_hf_headers(token=hub.token)
    headers |= {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
    with official.utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
        if response.status_code >= 400:
            response.read()  # the message of the server, which the exception holds
        official.utils.hf_raise_for_status(response)
        skip = 0
        if response.status_code != 206:
            skip = start  # the server sends the whole file
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise official.http.RemoteProtocolError("the reply is of another range")
        left = count
        for chunk in response.iter_raw():
            passed = min(skip, len(chunk))
            skip -= passed
            part = chunk[passed : passed + left]
            left -= len(part)
            if part:
                yield part
            if not left:
                return


def _check_length(hub: Hub, expected: int, found: int) -> None:
    """Raise an error after which the request is sent again, unless everything came."""
    if found != expected:
        raise hub.official.http.RemoteProtocolError(f"expected {expected} bytes, found {found}")


def _wrong_content(repository: Repository, file: RemoteFile) -> HubError:
    return HubError(
        f"{repository.id}: {file.name}: fetched {WRONG_CONTENT_ATTEMPTS} times, and its content never had the hash "
        f"that the Hub lists ({file.content_hash[:16]}...); run the same command again, and if that does not help, "
        "tell the owner of the repository"
    )
