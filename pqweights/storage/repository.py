"""A repository on the Hub: the files that it holds at one commit, fetching and uploading them.

The official client's `hf_hub_download` fetches whole files, by xet where it is installed, and goes on where a transfer
was cut. It does not check the content, which must have the hash that the Hub lists. Ranges are requested directly: the
client's HfFileSystem needs two requests more for each repository, and does not limit how much a reply holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pqweights.checkpoint.ahead import Stop, TransferStopped
from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.storage import Origin, Remote
from pqweights.checkpoint.writer import COPY_BYTES, disk_errors, partial_path, sync_folder
from pqweights.errors import HubError, HubUnavailableError
from pqweights.storage.addresses import check_inside
from pqweights.storage.hub import Hub
from pqweights.storage.requests import TIMEOUT_SECONDS, Truncated, read_range

WRONG_CONTENT_ATTEMPTS = 3  # of a file whose content does not have the hash that the Hub lists
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def has_content(file: FileState, pieces: Iterable[bytes]) -> bool:
    """Return whether the pieces, one after the other, are the content of a file of the Hub, if its hash is known.

    The stamp of a file of the Hub is the SHA-256 of a large file, the SHA-1 that git gives another one; it is empty in
    a cache without links.
    """
    is_large = len(file.stamp) == 64
    digest = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % file.byte_count, usedforsecurity=False)
    for piece in pieces if file.stamp else ():
        digest.update(piece)
    return digest.hexdigest() == file.stamp or not file.stamp


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yield the content of a local file, piece by piece."""
    with open(path, "rb", buffering=0) as stream:
        while data := stream.read(COPY_BYTES):
            yield data


class Repository(Remote):
    """A repository at one commit. Every request names the commit: later ones change nothing.

    id: ORG/NAME
    commit: the SHA-1 of the commit
    files: its files by name, in sorted order, as the Hub lists them, with their hashes as stamps
    private: whether only its owner and those they let in can see it
    """

    def __init__(
        self, hub: Hub, id: str, commit: str = "", files: Mapping[str, FileState] = {}, *, private: bool = False
    ) -> None:
        self.hub, self.id, self.commit, self.private = hub, id, commit, private
        self.files = dict(sorted(files.items()))
        self.cache = Path(str(hub.client.constants.HF_HUB_CACHE))
        self.origin = Origin(id, commit)

    def __str__(self) -> str:
        return self.id

    def states(self, only: Sequence[str] | None = None, *, recursive: bool = True) -> dict[str, FileState]:
        """Return what its files are.

        Raises SourceError for a name that would lead out of a folder, or that does not mean what it displays.
        """
        check_inside(self, self.files)
        return {
            name: file
            for name, file in self.files.items()
            if not any(part.startswith(".") for part in name.split("/")) and (only is None or name in only)
        }

    def read(self, file: str, start: int, end: int, *, expected: FileState | None = None) -> bytes:
        """Return bytes of a file: from the cache, or by one request. A whole file is checked. Raises HubError."""
        there, path = self.files[file], self.path(file)
        is_whole = (start, end) == (0, there.byte_count)
        if path is not None:
            with open(path, "rb") as stream:
                stream.seek(start)
                data = stream.read(end - start)
            if not is_whole or has_content(there, [data]):
                return data
        for _ in range(WRONG_CONTENT_ATTEMPTS):
            data = self._request(file, start, end)
            if not is_whole or has_content(there, [data]):
                return data
        raise self._wrong_content(file)

    def read_whole(self, file: str) -> bytes:
        """Return the content of a small file. Raises HubError."""
        return self.read(file, 0, self.files[file].byte_count)

    def _request(self, file: str, start: int, end: int) -> bytes:
        """Return bytes of a file by one request for the range."""
        if start == end:
            return b""
        self.refuse_offline([file])
        utils, url = self.hub.client.utils, self.hub.client.hf_hub_url(self.id, file, revision=self.commit)
        headers = utils.build_hf_headers(token=self.hub.token)

        def check(response: Any) -> None:
            if response.status_code >= 400:
                response.read()  # the message of the server, which the exception holds
            utils.hf_raise_for_status(response)

        def fetch() -> bytes:
            session, shown = utils.get_session(), f"{self}: {file}"
            return read_range(session, url, start, end, shown=shown, check=check, headers=headers)[0]

        return self.hub.call(self.id, fetch, about=f": {file}")

    def path(self, file: str) -> Path | None:
        """Return where a file lies in the cache; None if it is not there or has another size."""
        path = self.hub.client.try_to_load_from_cache(self.id, file, revision=self.commit)
        is_there = isinstance(path, str) and Path(path).stat().st_size == self.files[file].byte_count
        return Path(path) if is_there else None

    def refuse_offline(self, files: Iterable[str]) -> None:
        """Raise HubError for the first of some files that cannot be had, because the Hub is switched off."""
        for file in files if self.hub.is_offline else ():
            if self.path(file) is None:
                raise HubError(
                    f"{self}: {file}: not in the cache ({self.cache}), and HF_HUB_OFFLINE switches the Hub off; unset "
                    "it to fetch the file"
                )

    def fetch(
        self,
        file: str,
        target: Path | None = None,
        *,
        stop: Stop = lambda: False,
        show: Callable[[int], None] = lambda count: None,
    ) -> Path:
        """Fetch a whole file, unless it is in the cache, check it against its hash, and return its path.

        target: where it is then; by default in the cache
        stop: asked between chunks
        show: called with the bytes that came

        Raises HubError, OutputError for the disk, TransferStopped once `stop` returns True.
        """
        there, incoming = self.files[file], None if target is None else partial_path(target)
        try:
            for _ in range(WRONG_CONTENT_ATTEMPTS):
                if incoming is not None:
                    shutil.rmtree(incoming, ignore_errors=True)  # what a run that was killed has fetched of it
                path = self._download(file, incoming, stop=stop, show=show)
                if has_content(there, pieces_of(path)):
                    if target is not None:
                        with disk_errors(target):
                            os.replace(path, target)
                            sync_folder(target.parent)
                    return target or path
                if self.hub.is_offline:
                    raise HubError(
                        f"{self}: {file}: damaged in the cache ({path}), and HF_HUB_OFFLINE switches the Hub off; "
                        "unset it, and the file is fetched again"
                    )
                path.resolve().unlink()
                path.unlink(missing_ok=True)  # the link to it
        finally:
            if incoming is not None:
                shutil.rmtree(incoming, ignore_errors=True)
        raise self._wrong_content(file)

    def _download(self, file: str, folder: Path | None, *, stop: Stop, show: Callable[[int], None]) -> Path:
        """Have the official client fetch a file, and return its path. folder: where it goes; by default, the cache"""
        client, tqdm_class = self.hub.client, self.hub.client.utils.tqdm
        byte_count = self.files[file].byte_count
        options = {"revision": self.commit, "token": self.hub.token} | ({} if folder is None else {"local_dir": folder})

        class DownloadBar(tqdm_class):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **(options | {"disable": True}))

            def update(self, count: float | None = 1) -> None:
                if stop():
                    raise TransferStopped
                show(int(count or 0))

        def fetch() -> Path:
            try:
                with disk_errors(Path(file)):
                    return Path(client.hf_hub_download(self.id, file, tqdm_class=DownloadBar, **options))
            except client.errors.LocalEntryNotFoundError as error:  # around the real error
                raise error.__cause__ or error from None
            except OSError as error:
                if type(error) is OSError and error.errno is None:  # the reply is shorter than the file
                    raise Truncated(f"expected {byte_count} bytes, found fewer") from None
                raise
            except RuntimeError as error:  # of xet
                failed = f"{self}: {file}: the download failed: {self.hub.clean(str(error))[:200]}"
                raise HubUnavailableError(failed) from None
            except ValueError as error:
                if type(error) is not ValueError or byte_count <= client.constants.MAX_HTTP_DOWNLOAD_SIZE:
                    raise
                raise HubError(
                    f"{self}: {file}: {byte_count} bytes, which is more than the Hub sends by HTTP: pip install hf_xet"
                ) from None

        return self.hub.call(self.id, fetch, about=f": {file}", stop=stop)

    def upload(self, name: str, content: Path | bytes, branch: str) -> Any:
        """Return the operation that adds a file to a commit. A large file is sent here, before the commit.

        name: its path in the repository
        content: the local file, or the bytes

        Raises HubError.
        """

        def send() -> Any:
            from httpx2 import HTTPError

            data = content if isinstance(content, bytes) else str(content)
            addition = self.hub.client.CommitOperationAdd(path_in_repo=name, path_or_fileobj=data)
            try:
                self.hub.api.preupload_lfs_files(self.id, additions=[addition], revision=branch)
            except RuntimeError as error:  # the client raises it around the real error; xet raises nothing else
                if isinstance(error.__cause__, HTTPError | OSError):
                    raise error.__cause__ from None
                failed = f"{self}: {name}: the upload failed: {self.hub.clean(str(error))[:200]}"
                raise HubUnavailableError(failed) from None  # xet does not tell a refusal from a lost connection
            return addition

        return self.hub.call(self.id, send, about=f": {name}")

    def _wrong_content(self, file: str) -> HubError:
        return HubError(
            f"{self}: {file}: fetched {WRONG_CONTENT_ATTEMPTS} times, and its content never had the hash that the Hub "
            f"lists ({self.files[file].stamp[:16]}...); run the same command again, and if that does not help, tell "
            "the owner of the repository"
        )


def open_repository(hub: Hub, id: str, revision: str | None = None) -> Repository:
    """Return what a repository holds at a branch, tag or commit, by default the branch main.

    Raises HubError.
    """
    try:
        hub.client.utils.validate_repo_id(id)
    except hub.client.errors.HFValidationError as error:
        raise HubError(f"{id}: not the name of a repository: {hub.clean(str(error))}") from None
    if hub.is_offline:
        return _in_cache(hub, id, revision)
    info = hub.call(
        id,
        lambda: hub.api.model_info(id, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS),
        about=f" at revision {revision}" if revision else "",
    )
    if not HASH.fullmatch(str(info.sha)):
        raise HubError(f"{id}: the Hub does not say which commit this is")
    files = {}
    for listed in info.siblings or ():
        size, content_hash = listed.size, listed.blob_id if listed.lfs is None else listed.lfs.sha256
        if not isinstance(size, int) or size < 0 or not HASH.fullmatch(str(content_hash)):
            raise HubError(f"{id}: {listed.rfilename!a}: the Hub does not list its size and its hash")
        files[listed.rfilename] = FileState(size, content_hash)
    return Repository(hub, str(info.id), str(info.sha), files, private=bool(info.private))


def _in_cache(hub: Hub, id: str, revision: str | None) -> Repository:
    """Return what the cache says of a repository. Raises HubError if it does not have it.

    The list of its files is in the cache if somebody has fetched all of them at once; else those count that are there.
    """
    try:  # no files, so that it is enough if some are there
        found = hub.client.snapshot_download(id, revision=revision, local_files_only=True, allow_patterns=[])
    except OSError:
        raise HubError(
            f"{id}{f' at revision {revision}' if revision else ''}: not in the cache "
            f"({hub.client.constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE switches the Hub off; unset it"
        ) from None
    snapshot = Path(found)
    files = {}
    for path in (path for path in snapshot.rglob("*") if path.is_file()):
        blob = path.resolve().name if path.is_symlink() else ""  # a blob is called by its hash
        files[path.relative_to(snapshot).as_posix()] = FileState(
            path.stat().st_size, blob if HASH.fullmatch(blob) else ""
        )
    with contextlib.suppress(hub.client.errors.CachedRepoTreeNotFoundError):
        for file in hub.client.get_cached_repo_tree(id, revision=snapshot.name):
            if file.path not in files or files[file.path].byte_count != file.size:
                files[file.path] = FileState(file.size, file.blob_id)
    return Repository(hub, id, snapshot.name, files)


class Sending:
    """A branch that gets each file in a commit of its own, which replaces a file of that name alone.

    files: what the branch holds, as far as is known
    """

    def __init__(self, remote: Repository, branch: str) -> None:
        self._remote, self._branch = remote, branch
        self.files: dict[str, FileState] = remote.files

    def send(self, name: str, path: Path, stop: Stop = lambda: False) -> None:
        """Bring a file to the branch. stop: see Store.put. Raises HubError."""
        remote, branch = self._remote, self._branch
        operation = remote.upload(name, path, branch)

        def commit() -> object:
            return remote.hub.api.create_commit(
                remote.id, [operation], commit_message=f"pqweights export: {name}", revision=branch
            )

        remote.hub.call(remote.id, commit, about=f": {name}", stop=stop)
        self.files = open_repository(remote.hub, remote.id, branch).files
