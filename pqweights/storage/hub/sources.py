"""What a user gives as SRC or DIR: a local folder or file, a repository on the Hub, or an address in object storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pqweights.checkpoint.gguf.sources import open_local_source
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.source import Checkpoint, needed_files, open_checkpoint
from pqweights.checkpoint.storage import Origin, Storage
from pqweights.checkpoint.writer import disk_errors
from pqweights.errors import OptionError, SourceError
from pqweights.storage.addresses import HUB_PREFIX, Address, RepositoryName, parse_location
from pqweights.storage.hub.client import Hub, Tell
from pqweights.storage.hub.storage import HubStorage
from pqweights.storage.hub.transfers import fetch_to_cache
from pqweights.storage.remote.folder import RemoteFolder
from pqweights.storage.remote.storage import RemoteStorage, open_address

# The commands that copy folders from object storage.
COPIES = {
    "s3": "`aws s3 sync`",
    "s3a": "`aws s3 sync`",
    "gs": "`gcloud storage rsync -r`",
    "gcs": "`gcloud storage rsync -r`",
}

Progress = Callable[[int, int, str], None]  # called with the bytes done, the bytes in all, and the name of the file


@dataclass(frozen=True)
class Access:
    """How the Hub is used.

    revision: a branch, tag or commit; by default the branch main
    token: by default the one that the user logged in with
    tell: called with a line about every wait
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    tell: Tell = field(default=lambda line: None, repr=False)

    def hub(self) -> Hub:
        """Return the Hub with this token."""
        return Hub(self.token, self.tell)


class Fetched(NamedTuple):
    """A local folder with a model.

    path: the folder
    origin: the repository that it was fetched from; None for a folder that the user named
    not_fetched: the other files that the repository lists
    """

    path: Path
    origin: Origin | None = None
    not_fetched: tuple[str, ...] = ()


def _located(source: str | Path, access: Access, low_disk: bool = False) -> tuple[Path | Address | str, Access]:
    """Return what a text means, of a repository its id, and how to read the revision that is meant.

    Raises OptionError for two revisions, SourceError for options that mean something only for the Hub.
    """
    location = parse_location(source)
    if isinstance(location, RepositoryName):
        if location.revision is None or access.revision == location.revision:
            return location.id, access
        if access.revision is not None:
            raise OptionError(
                f"`revision` {access.revision}: {source} names {location.revision}; leave one of them out"
            )
        return location.id, replace(access, revision=location.revision)
    for option, given in (("`revision`", access.revision is not None), ("`low_disk`", low_disk)):
        if given:
            raise SourceError(
                f"{option}: expected a repository on the Hub (ORG/NAME), found {source}: leave the option out, or "
                f"write {HUB_PREFIX}ORG/NAME if a local folder has the same name"
            )
    return location, access


def open_source(
    source: str | Path,
    access: Access,
    *,
    low_disk: bool = False,
    allow_pickle: bool = False,
    include: Sequence[str] = (),
) -> Checkpoint:
    """Open a local checkpoint, one on the Hub, or one in object storage; only its headers are read.

    low_disk: see HubStorage
    allow_pickle: whether to open weights in PyTorch's pickle files
    include: patterns of files to copy, see checkpoint/companions.py

    Raises SourceError, HubError, StorageError.
    """
    repository, access = _located(source, access, low_disk)
    if isinstance(repository, Address):
        return open_address(repository, allow_pickle, include=include)
    if isinstance(repository, Path):
        return open_local_source(repository, allow_pickle=allow_pickle, include=include)
    hub = access.hub()
    storage = HubStorage(hub, hub.repository(repository, access.revision), low_disk)
    checkpoint = open_checkpoint(storage, allow_pickle, include=include)
    storage.check_cached((*checkpoint.weight_files, *checkpoint.companions))
    return checkpoint


def local_folder(
    source: str | Path,
    access: Access,
    *,
    only: Sequence[str] = (),
    ours: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> Fetched:
    """Return a local folder with a model: the folder that is named, or a repository fetched into the cache.

    only: the names of the files to fetch; by default all that are needed
    ours: whether to refuse a repository that pqweights did not push, before anything is fetched

    Raises SourceError, HubError.
    """
    repository, access = _located(source, access)
    if isinstance(repository, Address):
        copy = COPIES.get(repository.scheme, "the tool of that storage")
        raise SourceError(
            f"{repository}: expected a local folder or a repository on the Hub, found an address in object storage, "
            f"which this command does not read: copy it to a folder first, with {copy}, and give that"
        )
    if isinstance(repository, Path):
        return Fetched(repository)
    hub = access.hub()
    storage = HubStorage(hub, hub.repository(repository, access.revision))
    if ours and MANIFEST_FILE not in storage.files():
        raise SourceError(
            f"{repository}: expected a master or an export that pqweights pushed, found no {MANIFEST_FILE} in the "
            "repository"
        )
    wanted = [name for name in only if name in storage.files()] if only else needed_files(storage)
    if not wanted:
        raise SourceError(f"{repository}: expected {', '.join(only)} in the repository, found none")
    storage.check_cached(wanted)
    folder = _fetch(storage, wanted, progress)
    if not hub.is_offline:
        _remember(folder, access.revision or "main")
    return Fetched(folder, storage.origin, tuple(name for name in storage.files() if name not in wanted))


class FoundResult(NamedTuple):
    """A folder that is read where it is: on this machine, or in object storage. The fields are those of Fetched."""

    where: Path | Storage
    origin: Origin | None = None
    not_fetched: tuple[str, ...] = ()


def find_result(
    source: str | Path,
    access: Access,
    *,
    only: Sequence[str] = (),
    ours: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> FoundResult:
    """Return a local folder, a repository as `local_folder` does, or a folder in object storage.

    Of that nothing is fetched. The arguments are those of `local_folder`.

    Raises SourceError, HubError, StorageError.
    """
    address, _ = _located(source, access)
    if isinstance(address, Address):
        return FoundResult(RemoteStorage(RemoteFolder(address)))
    return FoundResult(*local_folder(source, access, only=only, ours=ours, progress=progress))


def find_original(
    source: str | Path, access: Access, progress: Progress = lambda done, total, name: None
) -> Path | Address:
    """Return the folder or the file of an original model, a repository as `local_folder` does, or an address.

    Raises SourceError, HubError.
    """
    address = parse_location(source)
    return address if isinstance(address, Address) else local_folder(source, access, progress=progress).path


def _fetch(storage: HubStorage, names: Sequence[str], progress: Progress) -> Path:
    """Fetch files into the cache, and return the folder in which they lie."""
    repository = storage.repository
    total = sum(repository.files[name].byte_count for name in names)
    done = 0
    folder = Path()
    for name in names:

        def show(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            progress(min(done, total), total, name)

        path = fetch_to_cache(storage.hub, repository, repository.files[name], show=show)
        folder = path.parents[name.count("/")]
    return folder


def _remember(snapshot: Path, revision: str) -> None:
    """Note in the cache which commit a branch is at, so that the official client finds it without a network.

    snapshot: the folder of the commit in the cache
    """
    if revision != snapshot.name:
        ref = snapshot.parents[1] / "refs" / revision
        with disk_errors(ref):
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(snapshot.name)
