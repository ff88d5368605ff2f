"""Transfers of files from and to the Hub, whose content is checked against the hash that the Hub lists.

The official client fetches and uploads whole files, by xet where it is installed. Ranges are requested here.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.checkpoint.writer import disk_errors, partial_path, sync_folder
from pqweights.errors import HubError, HubUnavailableError
from pqweights.storage.hub.client import TIMEOUT_SECONDS, Hub, Show
from pqweights.storage.hub.repository import RemoteFile, Repository, pieces_of
from pqweights.storage.remote.failures import Stop, TransferStopped

WRONG_CONTENT_ATTEMPTS = 3  # of a file whose content does not have the hash that the Hub lists


def read_range(hub: Hub, repository: Repository, file: str, *, start: int, count: int) -> bytes:
    """Return `count` bytes of a file from `start` on, by one request for the range.

    Raises HubError.
    """
    if count == 0:
        return b""
    official = hub.official
    url = official.library.hf_hub_url(repository.id, file, revision=repository.commit)
    headers = official.utils.build_hf_headers(token=hub.token)
    headers |= {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}

    def fetch() -> bytes:
        data = bytearray()
        with official.utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
            if response.status_code >= 400:
                response.read()  # the message of the server, which the exception holds
            official.utils.hf_raise_for_status(response)
            is_range = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            if not is_range and (start or response.status_code == 206):
                raise official.http.RemoteProtocolError("the reply is of another range")
            for chunk in response.iter_raw():
                data += chunk
                if len(data) >= count:
                    break
        if len(data) < count or (is_range and len(data) > count):
            raise official.http.RemoteProtocolError(f"expected {count} bytes, found {len(data)}")
        return bytes(data[:count])

    refuse_offline(hub, repository, file)
    return hub.call(repository.id, fetch, about=f": {file}")


def refuse_offline(hub: Hub, repository: Repository, file: str) -> None:
    """Raise HubError for a file that is wanted of the Hub while it is switched off."""
    if hub.is_offline:
        raise HubError(
            f"{repository.id}: {file}: not in the cache ({cache_folder(hub)}), and HF_HUB_OFFLINE switches the Hub "
            "off; unset it to fetch the file"
        )


def read_whole(hub: Hub, repository: Repository, file: RemoteFile) -> bytes:
    """Return the content of a small file, checked against its hash. Raises HubError."""
    for _ in range(WRONG_CONTENT_ATTEMPTS):
        data = read_range(hub, repository, file.name, start=0, count=file.byte_count)
        if file.has_content([data]):
            return data
    raise _wrong_content(repository, file)


def cache_folder(hub: Hub) -> Path:
    """Return the cache that all users of the official client share; it may not exist yet."""
    return Path(str(hub.official.constants.HF_HUB_CACHE))


def cached(hub: Hub, repository: Repository, file: RemoteFile) -> Path | None:
    """Return the path of a file in the cache, or None if it is not there or has another size."""
    path = hub.official.library.try_to_load_from_cache(repository.id, file.name, revision=repository.commit)
    return Path(path) if isinstance(path, str) and Path(path).stat().st_size == file.byte_count else None


def fetch_to_cache(
    hub: Hub, repository: Repository, file: RemoteFile, *, show: Show = lambda count: None, stop: Stop = lambda: False
) -> Path:
    """Fetch a whole file into the cache, unless it is there, check it against its hash, and return its path.

    show: called with the bytes that came
    stop: asked between chunks

    Raises HubError, OutputError for the disk, TransferStopped once `stop` returns True.
    """
    for _ in range(WRONG_CONTENT_ATTEMPTS):
        path = _fetch(hub, repository, file, show=show, stop=stop)
        if file.has_content(pieces_of(path)):
            return path
        if hub.is_offline:
            raise HubError(
                f"{repository.id}: {file.name}: damaged in the cache ({path}), and HF_HUB_OFFLINE switches the Hub "
                "off; unset it, and the file is fetched again"
            )
        path.resolve().unlink()
        path.unlink(missing_ok=True)  # the link to it
    raise _wrong_content(repository, file)


def fetch_to(hub: Hub, repository: Repository, file: RemoteFile, target: Path, *, stop: Stop = lambda: False) -> None:
    """Fetch a whole file to `target`, where it is once it was checked against its hash.

    stop, errors: see fetch_to_cache
    """
    incoming = partial_path(target)
    try:
        for _ in range(WRONG_CONTENT_ATTEMPTS):
            shutil.rmtree(incoming, ignore_errors=True)  # what a run that was killed has fetched of it
            path = _fetch(hub, repository, file, folder=incoming, stop=stop)
            if file.has_content(pieces_of(path)):
                with disk_errors(target):
                    os.replace(path, target)
                    sync_folder(target.parent)
                return
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    raise _wrong_content(repository, file)


def _fetch(
    hub: Hub,
    repository: Repository,
    file: RemoteFile,
    *,
    folder: Path | None = None,
    show: Show = lambda count: None,
    stop: Stop,
) -> Path:
    """Have the official client fetch a file, and return its path.

    folder: where it goes; by default, the cache
    """
    official, where = hub.official, {} if folder is None else {"local_dir": folder}
    tqdm: Any = official.utils.tqdm

    class DownloadBar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | {"disable": True}))

        def update(self, count: float | None = 1) -> None:
            if stop():
                raise TransferStopped
            show(int(count or 0))

    def fetch() -> Path:
        try:
            with disk_errors(Path(file.name)):
                return Path(
                    official.library.hf_hub_download(
                        repository.id,
                        file.name,
                        revision=repository.commit,
                        token=hub.token,
                        tqdm_class=DownloadBar,
                        **where,
                    )
                )
        except official.errors.LocalEntryNotFoundError as error:  # around the real error
            raise error.__cause__ or error from None
        except OSError as error:
            if type(error) is OSError and error.errno is None:  # the reply is shorter than the file
                raise official.http.RemoteProtocolError(f"expected {file.byte_count} bytes, found fewer") from None
            raise
        except RuntimeError as error:  # of xet
            failed = f"{repository.id}: {file.name}: the download failed: {hub.clean(str(error))[:200]}"
            raise HubUnavailableError(failed) from None
        except ValueError as error:
            if type(error) is not ValueError or file.byte_count <= official.constants.MAX_HTTP_DOWNLOAD_SIZE:
                raise
            raise HubError(
                f"{repository.id}: {file.name}: {file.byte_count} bytes, which is more than the Hub sends by HTTP: pip "
                "install hf_xet"
            ) from None

    return hub.call(repository.id, fetch, about=f": {file.name}", stop=stop)


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

    return hub.call(repository.id, send, about=f": {file.name}")


def _wrong_content(repository: Repository, file: RemoteFile) -> HubError:
    return HubError(
        f"{repository.id}: {file.name}: fetched {WRONG_CONTENT_ATTEMPTS} times, and its content never had the hash "
        f"that the Hub lists ({file.content_hash[:16]}...); run the same command again, and if that does not help, "
        "tell the owner of the repository"
    )
