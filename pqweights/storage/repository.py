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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.ahead import Stop, TransferStopped
from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.storage import Origin
from pqweights.checkpoint.writer import COPY_BYTES, disk_errors, partial_path, sync_folder
from pqweights.errors import HubError, HubUnavailableError, SourceError
from pqweights.storage.addresses import is_inside
from pqweights.storage.hub import TIMEOUT_SECONDS, Hub
from pqweights.storage.requests import Truncated

WRONG_CONTENT_ATTEMPTS = 3  # of a file whose content does not have the hash that the Hub lists
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
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


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yield the content of a local file, piece by piece."""
    with open(path, "rb", buffering=0) as stream:
        while data := stream.read(COPY_BYTES):
            yield data


def _remote_file(repository: str, listed: Any) -> RemoteFile:
    """Return an entry of the Hub's list of files. Raises HubError if it lacks a size or a hash."""
    sha256 = None if listed.lfs is None else listed.lfs.sha256
    file = RemoteFile(listed.rfilename, listed.size, sha256, listed.blob_id)
    if not isinstance(file.byte_count, int) or file.byte_count < 0 or not HASH.fullmatch(str(file.content_hash)):
        raise HubError(f"{repository}: {file.name!a}: the Hub does not list its size and its hash")
    return file


def _cached_file(name: str, path: Path) -> RemoteFile:
    """Return a file of a snapshot in the cache. It is a link to a blob, which is called by its hash."""
    blob = path.resolve().name if path.is_symlink() else ""
    hashes = (blob if re.fullmatch(f"[0-9a-f]{{{length}}}", blob) else None for length in (64, 40))
    return RemoteFile(name, path.stat().st_size, *hashes)


class Repository:
    """A repository at one commit, as a Remote and its Cache. Every request names the commit: later ones change nothing.

    id: ORG/NAME
    commit: the SHA-1 of the commit
    files: its files by name, in sorted order, as the Hub lists them
    private: whether only its owner and those they let in can see it
    folder: the cache that all users of the official client share; it may not exist yet
    """

    def __init__(
        self, hub: Hub, id: str, commit: str = "", files: Sequence[RemoteFile] = (), *, private: bool = False
    ) -> None:
        self.hub, self.id, self.commit, self.private = hub, id, commit, private
        self.files = {file.name: file for file in sorted(files, key=lambda file: file.name)}
        self.folder = Path(str(hub.client.constants.HF_HUB_CACHE))
        self.origin: Origin | None = Origin(id, commit)
        self.address: Any = None

    def __str__(self) -> str:
        return self.id

    @property
    def cache(self) -> Repository:
        """It is its own Cache."""
        return self

    def states(self, only: Sequence[str] | None = None, *, recursive: bool = True) -> dict[str, FileState]:
        """Return what its files are, without hidden ones, as in a local folder.

        Raises SourceError for a name that would lead out of a folder, or that does not mean what it displays.
        """
        if strange := next((name for name in self.files if not is_inside(name)), None):
            raise SourceError(
                f"{self}: lists a file {strange[:80]!a}: expected a path inside the repository, in printable "
                "characters; do not use this repository"
            )
        return {
            name: FileState(file.byte_count, int(file.content_hash[:15] or "0", 16))
            for name, file in self.files.items()
            if not any(part.startswith(".") for part in name.split("/")) and (only is None or name in only)
        }

    def work_folder(self) -> None:
        """Nothing unfinished is on the Hub."""

    def read(self, file: str, start: int, end: int, *, expected: FileState | None = None) -> bytes:
        """Return bytes of a file: from the cache, or by one request for the range. Raises HubError."""
        path = self.path(file)
        if path is None:
            return self._request(file, start, end)
        with open(path, "rb") as stream:
            stream.seek(start)
            return stream.read(end - start)

    def _request(self, file: str, start: int, end: int) -> bytes:
        """Return bytes of a file by one request for the range."""
        url = self.hub.client.hf_hub_url(self.id, file, revision=self.commit)
        utils, count = self.hub.client.utils, end - start
        headers = utils.build_hf_headers(token=self.hub.token)
        headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}

        def fetch() -> bytes:
            data = bytearray()
            with utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
                if response.status_code >= 400:
                    response.read()  # the message of the server, which the exception holds
                utils.hf_raise_for_status(response)
                is_range = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
                if not is_range and (start or response.status_code == 206):
                    raise Truncated("the reply is of another range")
                for chunk in response.iter_raw():
                    data += chunk
                    if len(data) >= count:
                        break
            if len(data) < count or (is_range and len(data) > count):
                raise Truncated(f"expected {count} bytes, found {len(data)}")
            return bytes(data[:count])

        if not count:
            return b""
        self._refuse_offline(file)
        return self.hub.call(self.id, fetch, about=f": {file}")

    def read_small(self, file: str) -> bytes:
        """Return the content of a small file, checked against its hash. Raises HubError."""
        path, there = self.path(file), self.files[file]
        if path is not None and there.has_content([data := path.read_bytes()]):
            return data
        for _ in range(WRONG_CONTENT_ATTEMPTS):
            if there.has_content([data := self._request(file, 0, there.byte_count)]):
                return data
        raise self._wrong_content(there)

    def path(self, file: str) -> Path | None:
        """Return where a file lies in the cache; None if it is not there or has another size."""
        path = self.hub.client.try_to_load_from_cache(self.id, file, revision=self.commit)
        is_there = isinstance(path, str) and Path(path).stat().st_size == self.files[file].byte_count
        return Path(path) if is_there else None

    def check_cached(self, files: Iterable[str]) -> None:
        """Raise HubError for the first of some files that cannot be had, because the Hub is switched off."""
        for file in files if self.hub.is_offline else ():
            if self.path(file) is None:
                self._refuse_offline(file)

    def _refuse_offline(self, file: str) -> None:
        if self.hub.is_offline:
            raise HubError(
                f"{self}: {file}: not in the cache ({self.folder}), and HF_HUB_OFFLINE switches the Hub off; unset it "
                "to fetch the file"
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
                path = self._download(there, incoming, stop=stop, show=show)
                if there.has_content(pieces_of(path)):
                    return path if target is None else _moved(path, target)
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
        raise self._wrong_content(there)

    def _download(self, file: RemoteFile, folder: Path | None, *, stop: Stop, show: Callable[[int], None]) -> Path:
        """Have the official client fetch a file, and return its path. folder: where it goes; by default, the cache"""
        client, tqdm_class = self.hub.client, self.hub.client.utils.tqdm
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
                with disk_errors(Path(file.name)):
                    return Path(client.hf_hub_download(self.id, file.name, tqdm_class=DownloadBar, **options))
            except client.errors.LocalEntryNotFoundError as error:  # around the real error
                raise error.__cause__ or error from None
            except OSError as error:
                if type(error) is OSError and error.errno is None:  # the reply is shorter than the file
                    raise Truncated(f"expected {file.byte_count} bytes, found fewer") from None
                raise
            except RuntimeError as error:  # of xet
                failed = f"{self}: {file.name}: the download failed: {self.hub.clean(str(error))[:200]}"
                raise HubUnavailableError(failed) from None
            except ValueError as error:
                if type(error) is not ValueError or file.byte_count <= client.constants.MAX_HTTP_DOWNLOAD_SIZE:
                    raise
                raise HubError(
                    f"{self}: {file.name}: {file.byte_count} bytes, which is more than the Hub sends by HTTP: pip "
                    "install hf_xet"
                ) from None

        return self.hub.call(self.id, fetch, about=f": {file.name}", stop=stop)

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

    def _wrong_content(self, file: RemoteFile) -> HubError:
        return HubError(
            f"{self}: {file.name}: fetched {WRONG_CONTENT_ATTEMPTS} times, and its content never had the hash that the "
            f"Hub lists ({file.content_hash[:16]}...); run the same command again, and if that does not help, tell the "
            "owner of the repository"
        )


def _moved(path: Path, target: Path) -> Path:
    with disk_errors(target):
        os.replace(path, target)
        sync_folder(target.parent)
    return target


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
    files = [_remote_file(id, sibling) for sibling in info.siblings or ()]
    return Repository(hub, str(info.id), str(info.sha), files, private=bool(info.private))


def _in_cache(hub: Hub, id: str, revision: str | None) -> Repository:
    """Return what the cache says of a repository. Raises HubError if it does not have it.

    The list of its files is in the cache if somebody has fetched all of them at once; else those count that are
    there, whose blobs are called by their hashes.
    """
    folder = Path(str(hub.client.constants.HF_HUB_CACHE)) / f"models--{id.replace('/', '--')}"
    wanted = revision or "main"
    if not HASH.fullmatch(wanted):
        reference = folder / "refs" / wanted
        wanted = reference.read_text().strip() if is_inside(wanted) and reference.is_file() else ""
    snapshot = folder / "snapshots" / wanted
    if not HASH.fullmatch(wanted) or not snapshot.is_dir():
        raise HubError(
            f"{id}{f' at revision {revision}' if revision else ''}: not in the cache "
            f"({folder.parent}), and HF_HUB_OFFLINE switches the Hub off; unset it"
        )
    paths = (path for path in snapshot.rglob("*") if path.is_file())
    there = {path.relative_to(snapshot).as_posix(): path for path in paths}
    files = {name: _cached_file(name, path) for name, path in there.items()}
    with contextlib.suppress(hub.client.errors.CachedRepoTreeNotFoundError):
        for file in hub.client.get_cached_repo_tree(id, revision=wanted):
            if file.path not in files or files[file.path].byte_count != file.size:
                files[file.path] = RemoteFile(file.path, file.size, None, file.blob_id)
    return Repository(hub, id, wanted, list(files.values()))
