"""What a user gives as SRC or DIR: a local folder or file, a repository on the Hub, or an address in object storage."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pqweights.checkpoint.adapters import open_adapter, with_adapters
from pqweights.checkpoint.gguf.file import SUFFIX, holds_gguf, parts_by_name
from pqweights.checkpoint.gguf.sources import needed_of_gguf, open_any
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.source import Adapter, Checkpoint, files_at, needed_files
from pqweights.checkpoint.storage import Origin, Storage, check_not_interrupted
from pqweights.checkpoint.writer import disk_errors
from pqweights.common.options import Options
from pqweights.common.threads import Progress, no_progress
from pqweights.errors import OptionError, OutputError, SourceError
from pqweights.storage.addresses import HUB_PREFIX, WEB, Address, RepositoryName, is_inside, parse_location
from pqweights.storage.bucket import RemoteFolder
from pqweights.storage.hub import Hub
from pqweights.storage.repository import Repository, open_repository
from pqweights.storage.store import Store
from pqweights.storage.web import WebFolder

# An adapter with its weight.
_WEIGHED = re.compile(r"(?P<name>.+):(?P<weight>-?(\d+(\.\d*)?|\.\d+))")
# The commands that copy folders from object storage.
COPIES = {"s3": "`aws s3 sync`", "gs": "`gcloud storage rsync -r`"}


class Fetched(NamedTuple):
    """A folder with a model or a result.

    where: the local folder, or the first file of a GGUF model; a folder in object storage, which is read where it is
    origin: the repository that it was fetched from; None for a folder that the user named
    not_fetched: the other files that the repository lists
    """

    where: Path | Storage
    origin: Origin | None = None
    not_fetched: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The local folder or file."""
        assert isinstance(self.where, Path)
        return self.where


def _located(source: str | Path, hub: Options, low_disk: bool = False) -> Path | Address | RepositoryName:
    """Return what a text means; of a repository, the revision that is meant, if one is named.

    Raises OptionError for two revisions, SourceError for options that mean something only for the Hub.
    """
    location = parse_location(source)
    if isinstance(location, RepositoryName):
        if None not in (location.revision, hub.revision) and location.revision != hub.revision:
            raise OptionError(f"`revision` {hub.revision}: {source} names {location.revision}; leave one of them out")
        return location._replace(revision=location.revision or hub.revision)
    for option, given in (("`revision`", hub.revision is not None), ("`low_disk`", low_disk)):
        if given:
            raise SourceError(
                f"{option}: expected a repository on the Hub (ORG/NAME), found {source}: leave the option out, or "
                f"write {HUB_PREFIX}ORG/NAME if a local folder has the same name"
            )
    return location


def _opened(named: RepositoryName, hub: Options) -> Repository:
    return open_repository(Hub(hub.token, hub.tell), named.id, named.revision)


def _files_of(source: str | Path, hub: Options, *, low_disk: bool = False) -> tuple[Storage, str]:
    """Return the files that a text means, and the one among them that it names, if it names one.

    Raises SourceError if there are none, OptionError, HubError, StorageError.
    """
    location = _located(source, hub, low_disk)
    if isinstance(location, RepositoryName):
        storage = Storage(_opened(location, hub), low_disk=low_disk)
        if location.file and location.file not in storage.files():
            raise SourceError(f"{storage}: expected the file {location.file}, found no such file")
        return storage, location.file
    if isinstance(location, Path):
        return files_at(location)
    if location.scheme in WEB:
        return _web_files(location)
    storage = Storage(RemoteFolder(location))
    if storage.files():
        return storage, ""
    check_not_interrupted(storage)
    around = RemoteFolder(location.parent)
    if not location.path or not around.states([location.name]):
        raise SourceError(
            f"{location}: no such file or folder, or nothing in it; give the address of a checkpoint folder or of a "
            ".safetensors file"
        )
    return Storage(around, recursive=False), location.name


def _web_files(address: Address) -> tuple[Storage, str]:
    """Return the GGUF file at an http(s) address, with all parts of its model, or the single .safetensors file."""
    name = urllib.parse.unquote(address.name)
    if not name.lower().endswith((SUFFIX, ".safetensors")) or not is_inside(name) or "/" in name:
        raise SourceError(
            f"{address}: expected the address of a {SUFFIX} or .safetensors file, as a server has no list of a folder: "
            "fetch the folder, and give that"
        )
    storage = Storage(WebFolder(address.parent), only=parts_by_name(name))
    if name not in storage.files():
        raise SourceError(f"{address}: no such file on the server")
    return storage, name


def open_source(
    source: str | Path,
    hub: Options = Options(),
    *,
    low_disk: bool = False,
    allow_pickle: bool = False,
    include: Sequence[str] = (),
    open_master: Callable[[Storage], Checkpoint | None] = lambda storage: None,
) -> Checkpoint:
    """Open a local checkpoint, one on the Hub, or one in object storage; only its headers are read.

    low_disk: see Storage
    allow_pickle: whether to open weights in PyTorch's pickle files
    include: patterns of files to copy, see checkpoint/companions.py
    open_master: opens a folder that is a master; returns None for another one

    Raises SourceError, HubError, StorageError; MasterError for a damaged master or an unfinished one.
    """
    storage, file = _files_of(source, hub, low_disk=low_disk)
    checkpoint = None if file else open_master(storage)
    checkpoint = checkpoint or open_any(storage, file, allow_pickle=allow_pickle, include=include)
    needed = (*checkpoint.weight_files, *checkpoint.companions)
    storage.refuse_offline(name for name in needed if name in storage.files())
    return checkpoint


def merged(checkpoint: Checkpoint, adapters: Sequence[str], hub: Options) -> Checkpoint:
    """Return a checkpoint into which adapters are merged: folders, repositories or addresses, each with :WEIGHT or not.

    hub: how the Hub is used; its revision is not that of the adapters

    Raises OptionError for a weight that is none, SourceError for an adapter that does not fit, HubError, StorageError.
    """
    main = Options(token=hub.token, tell=hub.tell)
    return with_adapters(checkpoint, [_open_adapter(given, main) for given in adapters])


def _open_adapter(given: str, hub: Options) -> Adapter:
    """Open an adapter. given: what names it, and perhaps a colon and by how much its changes are multiplied"""
    name, weight = given, 1.0
    if (match := _WEIGHED.fullmatch(given)) is not None and not Path(given).exists():
        name, weight = match["name"], float(match["weight"])
    location = _located(name, hub)
    if isinstance(location, Path) and not location.is_dir():
        raise SourceError(f"adapter {name}: no such folder; give the folder of an adapter, or ORG/NAME")
    storage, _ = _files_of(name, hub)
    return open_adapter(storage, given, location.id if isinstance(location, RepositoryName) else location.name, weight)


def local_folder(
    source: str | Path,
    hub: Options = Options(),
    *,
    only: Sequence[str] = (),
    ours: bool = False,
    progress: Progress = no_progress,
) -> Fetched:
    """Return a local folder with a model: the folder that is named, or a repository fetched into the cache.

    Of a GGUF model in a repository it is the file, or the first of its parts.

    only: the names of the files to fetch; by default all that are needed
    ours: whether to refuse a repository that pqweights did not push, before anything is fetched

    Raises SourceError, HubError.
    """
    location = _located(source, hub)
    if isinstance(location, Address):
        copy = COPIES.get(location.family, "the tool of that storage")
        raise SourceError(
            f"{location}: expected a local folder or a repository on the Hub, found an address in object storage, "
            f"which this command does not read: copy it to a folder first, with {copy}, and give that"
        )
    if isinstance(location, Path):
        return Fetched(location)
    repository = _opened(location, hub)
    storage = Storage(repository)
    wanted, file = _needed(storage, location.file, only, ours)
    storage.refuse_offline(wanted)
    folder = storage.fetch(wanted, progress)
    if not repository.hub.is_offline:
        _remember(folder, location.revision or "main")
    return Fetched(folder / file, storage.origin, tuple(name for name in storage.files() if name not in wanted))


def _needed(storage: Storage, file: str, only: Sequence[str], ours: bool) -> tuple[Sequence[str], str]:
    """Return which files of a repository to fetch, and the first of a GGUF model. See `local_folder`."""
    files = storage.files()
    is_result = MANIFEST_FILE in files
    if (ours and not is_result) or (file and (only or ours)):
        raise SourceError(
            f"{storage}: expected a master or an export that pqweights pushed, found "
            + (f"the file {file}" if file else f"no {MANIFEST_FILE} in the repository")
        )
    if only:
        if not (wanted := [name for name in only if name in files]):
            raise SourceError(f"{storage}: expected {', '.join(only)} in the repository, found none")
        return wanted, ""
    if file and not file.lower().endswith(SUFFIX):
        return [file], file
    if file or (holds_gguf(files) and not is_result):
        parts = needed_of_gguf(storage, file)
        return parts, parts[0]
    return needed_files(storage), ""


def find_result(
    source: str | Path,
    hub: Options,
    *,
    only: Sequence[str] = (),
    ours: bool = False,
    progress: Progress = no_progress,
) -> Fetched:
    """Return a folder as `local_folder` does, or one in object storage, of which nothing is fetched.

    The arguments are those of `local_folder`.

    Raises SourceError, HubError, StorageError.
    """
    location = _located(source, hub)
    if isinstance(location, Address):
        return Fetched(Storage(RemoteFolder(location)))
    return local_folder(source, hub, only=only, ours=ours, progress=progress)


def place_apart(source: str | Path, checkpoint: Checkpoint, out: Store) -> Path | Address | None:
    """Return where a checkpoint lies, which may not be the folder of the result; None for a repository on the Hub.

    Raises OutputError for a result in the place of its source, or in a folder that is called like its repository.
    """
    if checkpoint.storage.origin is not None:
        if str(Path(source)) == str(out):
            raise OutputError(
                f"{out}: expected a folder whose name is not that of the repository, or later commands would read the "
                "folder instead of the repository; choose another folder"
            )
        return None
    place = parse_location(source)
    assert not isinstance(place, RepositoryName)
    out.check_apart(place)
    return place


def _remember(snapshot: Path, revision: str) -> None:
    """Note in the cache which commit a branch is at, so that the official client finds it without a network.

    snapshot: the folder of the commit in the cache
    """
    if revision != snapshot.name:
        ref = snapshot.parents[1] / "refs" / revision
        with disk_errors(ref):
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(snapshot.name)
