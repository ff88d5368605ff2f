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
from pqweights.storage.hub.client import Hub, Tell
from pqweights.storage.hub.repository import PREFIX, repository_named
from pqweights.storage.hub.storage import HubStorage
from pqweights.storage.hub.transfers import fetch_to_cache
from pqweights.storage.remote.addresses import Address, is_address, local_path, parse_address
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


def repository_id(source: str | Path) -> str | None:
    """Return the repository that is meant, or None for what is, or could only be, a local path.

    Raises OptionError for an address on the Hub that is not that of a repository of a model.
    """
    named = repository_named(source) if isinstance(source, str) else None
    return None if named is None else named.id


def _named(source: str | Path, access: Access) -> tuple[str | None, Access]:
    """Return the repository that is meant, as `repository_id` does, and how to read the revision that is meant.

    Raises OptionError for two revisions.
    """
    named = repository_named(source) if isinstance(source, str) else None
    if named is None or named.revision is None:
        return None if named is None else named.id, access
    if access.revision not in (None, named.revision):
        raise OptionError(f"`revision` {access.revision}: {source} names {named.revision}; leave one of them out")
    return named.id, replace(access, revision=named.revision)


def address_of(source: str | Path) -> Address | None:
    """Return the address in object storage that is meant, or None for anything else.

    Raises OptionError for an address that cannot be one.
    """
    if not isinstance(source, str) or not is_address(source) or repository_named(source) is not None:
        return None
    return parse_address(source)


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
    repository, access = _named(source, access)
    if repository is None:
        check_local(source, access, low_disk)
        address = address_of(source)
        if address is not None:
            return open_address(address, allow_pickle, include=include)
        return open_local_source(Path(local_path(source)), allow_pickle=allow_pickle, include=include)
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
    repository, access = _named(source, access)
    if repository is None:
        check_local(source, access)
        _refuse_address(source)
        return Fetched(Path(local_path(source)))
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
    address = address_of(source)
    if address is None:
        return FoundResult(*local_folder(source, access, only=only, ours=ours, progress=progress))
    check_local(source, access)
    return FoundResult(RemoteStorage(RemoteFolder(address)))


def find_original(
    source: str | Path, access: Access, progress: Progress = lambda done, total, name: None
) -> Path | Address:
    """Return the folder or the file of an original model, a repository as `local_folder` does, or an address.

    Raises SourceError, HubError.
    """
    address = address_of(source)
    return address or local_folder(source, access, progress=progress).path


def _refuse_address(source: str | Path) -> None:
    """Raise SourceError for an address in object storage."""
    address = address_of(source)
    if address is not None:
        copy = COPIES.get(address.scheme, "the tool of that storage")
        raise SourceError(
            f"{address}: expected a local folder or a repository on the Hub, found an address in object storage, which "
            f"this command does not read: copy it to a folder first, with {copy}, and give that"
        )


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


def check_local(source: str | Path, access: Access, low_disk: bool = False) -> None:
    """Refuse options that mean something only for the Hub. Raises SourceError."""
    for option, given in (("`revision`", access.revision is not None), ("`low_disk`", low_disk)):
        if given:
            raise SourceError(
                f"{option}: expected a repository on the Hub (ORG/NAME), found {source}: leave the option out, or "
                f"write {PREFIX}ORG/NAME if a local folder has the same name"
            )
