"""The cache that all users of the official client share.

Each file lies under its hash, and links to it lie under the commit and its name; see
https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pqweights.checkpoint.writer import disk_errors
from pqweights.errors import HubError
from pqweights.storage.hub.client import Hub, Show
from pqweights.storage.hub.repository import RemoteFile, Repository, pieces_of
from pqweights.storage.hub.transfers import download
from pqweights.storage.remote.attempts import Stop


def cached(hub: Hub, repository: Repository, file: RemoteFile) -> Path | None:
    """Return the path of a file in the cache, or None if it is not there or has another size."""
    path = _folder(hub, repository) / "snapshots" / repository.commit / file.name
    return path if path.is_file() and path.stat().st_size == file.byte_count else None


def cache_folder(hub: Hub) -> Path:
    """Return the folder of the cache, which may not exist yet."""
    return Path(str(hub.official.constants.HF_HUB_CACHE))


def download_to_cache(
    hub: Hub,
    repository: Repository,
    file: RemoteFile,
    *,
    show: Show = lambda count: None,
    stop: Stop = lambda: False,
) -> Path:
    """Fetch a file into the cache, unless it is there; check it against its hash either way, and return its path.

    show, stop: see download

    The lock is the official client's. Raises HubError, OutputError, TransferStopped.
    """
    there = cached(hub, repository, file)
    if there is not None and file.has_content(pieces_of(there)):
        return there
    cache = _folder(hub, repository)
    blob, link = cache / "blobs" / file.content_hash, cache / "snapshots" / repository.commit / file.name
    lock = cache.parent / ".locks" / cache.name / f"{file.content_hash}.lock"
    with disk_errors(blob):
        lock.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
    with hub.official.utils.WeakFileLock(lock):
        if not (blob.is_file() and file.has_content(pieces_of(blob))):
            download(hub, repository, file, target=blob, show=show, stop=stop)
        with disk_errors(link):
            link.unlink(missing_ok=True)
            try:
                link.symlink_to(os.path.relpath(blob, link.parent))
            except OSError:  # a file system without links
                shutil.copyfile(blob, link)
    return link


def remember(hub: Hub, repository: Repository, revision: str | None) -> None:
    """Note in the cache which commit a branch is at, so that the official client finds it without a network."""
    if revision != repository.commit:
        ref = _folder(hub, repository) / "refs" / (revision or "main")
        with disk_errors(ref):
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(repository.commit)


def snapshot(hub: Hub, repository: str, revision: str | None) -> Path:
    """Return the folder of a repository in the cache, without asking the Hub.

    Raises HubError if it is not there.
    """
    try:
        return Path(hub.official.library.snapshot_download(repository, revision=revision, local_files_only=True))
    except hub.official.errors.LocalEntryNotFoundError:
        raise HubError(f"{repository}: not in the cache, and HF_HUB_OFFLINE switches the Hub off; unset it") from None


def _folder(hub: Hub, repository: Repository) -> Path:
    """The folder of a repository in the cache."""
    name: str = hub.official.file_download.repo_folder_name(repo_id=repository.id, repo_type="model")
    return cache_folder(hub) / name
