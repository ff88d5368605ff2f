"""What a user gives as SRC or DIR: a local folder or file, a repository on the Hub, or an address in object storage."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pqweights.checkpoint.adapters import open_adapter, with_adapters
from pqweights.checkpoint.companions import NOT_GIVEN, WEIGHT_SUFFIXES
from pqweights.checkpoint.gguf.file import SUFFIX, holds_gguf, parts_by_name
from pqweights.checkpoint.gguf.sources import needed_of_gguf, open_gguf_source, open_local_source
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.source import Adapter, Checkpoint, needed_files, open_checkpoint, open_folder, others_of_model
from pqweights.checkpoint.storage import Origin, Storage, check_not_interrupted
from pqweights.checkpoint.writer import disk_errors
from pqweights.common.threads import Progress
from pqweights.errors import OptionError, OutputError, SourceError
from pqweights.storage.addresses import HUB_PREFIX, WEB, Address, RepositoryName, is_inside, parse_location
from pqweights.storage.bucket import RemoteFolder
from pqweights.storage.hub import Hub, Tell
from pqweights.storage.repository import open_repository
from pqweights.storage.store import Store
from pqweights.storage.web import WebFolder

# An adapter with its weight.
_WEIGHED = re.compile(r"(?P<name>.+):(?P<weight>-?(\d+(\.\d*)?|\.\d+))")
# The commands that copy folders from object storage.
COPIES = {
    "s3": "`aws s3 sync`",
    "s3a": "`aws s3 sync`",
    "gs": "`gcloud storage rsync -r`",
    "gcs": "`gcloud storage rsync -r`",
}


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


def _located(
    source: str | Path, access: Access, low_disk: bool = False
) -> tuple[Path | Address | RepositoryName, Access]:
    """Return what a text means, and how to read the revision that is meant.

    Raises OptionError for two revisions, SourceError for options that mean something only for the Hub.
    """
    location = parse_location(source)
    if isinstance(location, RepositoryName):
        if location.revision is None or access.revision == location.revision:
            return location, access
        if access.revision is not None:
            raise OptionError(
                f"`revision` {access.revision}: {source} names {location.revision}; leave one of them out"
            )
        return location, replace(access, revision=location.revision)
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
    open_master: Callable[[Storage], Checkpoint | None] = lambda storage: None,
) -> Checkpoint:
    """Open a local checkpoint, one on the Hub, or one in object storage; only its headers are read.

    low_disk: see Storage
    allow_pickle: whether to open weights in PyTorch's pickle files
    include: patterns of files to copy, see checkpoint/companions.py
    open_master: opens a folder that is a master; returns None for another one

    Raises SourceError, HubError, StorageError.
    """
    location, access = _located(source, access, low_disk)
    if isinstance(location, Address) and location.scheme in WEB:
        return open_web_file(location, include=include)
    if isinstance(location, Address):
        master = open_master(Storage(RemoteFolder(location)))
        return master or open_address(location, allow_pickle, include=include)
    if isinstance(location, Path):
        master = open_master(Storage(location)) if location.is_dir() else None
        return master or open_local_source(location, allow_pickle=allow_pickle, include=include)
    repository = open_repository(access.hub(), location.id, access.revision)
    storage = Storage(repository, low_disk=low_disk)
    if (master := open_master(storage)) is not None:
        checkpoint = master
    elif location.file or holds_gguf(storage.files()):
        checkpoint = open_gguf_source(storage, location.file, include)
    else:
        checkpoint = open_checkpoint(storage, allow_pickle, include=include)
    needed = (*checkpoint.weight_files, *checkpoint.companions)
    repository.refuse_offline(name for name in needed if name in storage.files())
    return checkpoint


def merged(checkpoint: Checkpoint, adapters: Sequence[str], access: Access) -> Checkpoint:
    """Return a checkpoint into which adapters are merged: folders, repositories or addresses, each with :WEIGHT or not.

    Raises OptionError for a weight that is none, SourceError for an adapter that does not fit, HubError, StorageError.
    """
    return with_adapters(checkpoint, [_open_adapter(given, access) for given in adapters])


def _open_adapter(given: str, access: Access) -> Adapter:
    """Open an adapter. given: what names it, and perhaps a colon and by how much its changes are multiplied"""
    name, weight = given, 1.0
    if (match := _WEIGHED.fullmatch(given)) is not None and not Path(given).exists():
        name, weight = match["name"], float(match["weight"])
    location, access = _located(name, access)
    if isinstance(location, Path):
        if not location.is_dir():
            raise SourceError(f"adapter {name}: no such folder; give the folder of an adapter, or ORG/NAME")
        return open_adapter(Storage(location), given, location.name, weight)
    if isinstance(location, Address):
        return open_adapter(Storage(RemoteFolder(location)), given, location.name, weight)
    return open_adapter(
        Storage(open_repository(access.hub(), location.id, access.revision)), given, location.id, weight
    )


def open_address(address: Address, allow_pickle: bool = False, *, include: Sequence[str] = ()) -> Checkpoint:
    """Open the checkpoint in a folder in object storage, or in a single file; only its headers are read.

    allow_pickle: also open pickled weights
    include: patterns of files to copy, see checkpoint/companions.py

    Raises StorageError, SourceError also if there is nothing; MasterError for a damaged master or an unfinished one.
    """
    storage = Storage(RemoteFolder(address))
    if holds_gguf(storage.files()):
        return open_gguf_source(storage, include=include)
    if storage.files():
        return open_folder(storage, allow_pickle, include=include)
    check_not_interrupted(storage)
    around = RemoteFolder(address.parent)
    single = Storage(around, only=[address.name]) if address.path else storage
    if not single.files():
        raise SourceError(
            f"{address}: no such file or folder, or nothing in it; give the address of a checkpoint folder or of a "
            ".safetensors file"
        )
    if address.name.lower().endswith(SUFFIX):
        return open_gguf_source(Storage(around, recursive=False), address.name, include)
    opened = open_checkpoint(single, allow_pickle, single_file=True)
    beside: tuple[str, ...] = ()
    if address.name.lower().endswith(WEIGHT_SUFFIXES):
        beside = others_of_model(Storage(around, recursive=False), address.name)
    return replace(opened, left_out=dict.fromkeys(beside, NOT_GIVEN))


def open_web_file(address: Address, *, include: Sequence[str] = ()) -> Checkpoint:
    """Open the GGUF file at an http(s) address, with all parts of its model, or the single .safetensors file.

    Raises StorageError, SourceError also for anything else.
    """
    folder = WebFolder(address.parent)
    name = urllib.parse.unquote(address.name)
    if not name.lower().endswith((SUFFIX, ".safetensors")) or not is_inside(name) or "/" in name:
        raise SourceError(
            f"{address}: expected the address of a {SUFFIX} or .safetensors file, as a server has no list of a folder: "
            "fetch the folder, and give that"
        )
    storage = Storage(folder, only=parts_by_name(name))
    if name not in storage.files():
        raise SourceError(f"{address}: no such file on the server")
    if name.lower().endswith(SUFFIX):
        return open_gguf_source(storage, name, include)
    return open_checkpoint(storage, single_file=True)


def local_folder(
    source: str | Path,
    access: Access,
    *,
    only: Sequence[str] = (),
    ours: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> Fetched:
    """Return a local folder with a model: the folder that is named, or a repository fetched into the cache.

    Of a GGUF model in a repository it is the file, or the first of its parts.

    only: the names of the files to fetch; by default all that are needed
    ours: whether to refuse a repository that pqweights did not push, before anything is fetched

    Raises SourceError, HubError.
    """
    location, access = _located(source, access)
    if isinstance(location, Address):
        copy = COPIES.get(location.scheme, "the tool of that storage")
        raise SourceError(
            f"{location}: expected a local folder or a repository on the Hub, found an address in object storage, "
            f"which this command does not read: copy it to a folder first, with {copy}, and give that"
        )
    if isinstance(location, Path):
        return Fetched(location)
    repository = open_repository(access.hub(), location.id, access.revision)
    storage = Storage(repository)
    wanted, file = _needed(storage, location.file, only, ours)
    repository.refuse_offline(wanted)
    folder = storage.fetch(wanted, progress)
    if not repository.hub.is_offline:
        _remember(folder, access.revision or "main")
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
    if file or (holds_gguf(files) and not is_result):
        parts = needed_of_gguf(storage, file)
        return parts, parts[0]
    return needed_files(storage), ""


def find_result(
    source: str | Path,
    access: Access,
    *,
    only: Sequence[str] = (),
    ours: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> Fetched:
    """Return a folder as `local_folder` does, or one in object storage, of which nothing is fetched.

    The arguments are those of `local_folder`.

    Raises SourceError, HubError, StorageError.
    """
    address, _ = _located(source, access)
    if isinstance(address, Address):
        return Fetched(Storage(RemoteFolder(address)))
    return local_folder(source, access, only=only, ours=ours, progress=progress)


def place_apart(source: str | Path, checkpoint: Checkpoint, out: Store) -> Path | Address | None:
    """Return where a checkpoint lies, which may not be the folder of the result; None for a repository on the Hub.

    Raises OutputError for a result in the place of its source, or in a folder that is called like its repository.
    """
    if checkpoint.storage.origin is not None:
        if str(Path(source)) == str(out):
            raise OutputError(
                f"{out}: expected a folder whose name is not that of the repository, or later commands would read the "
                "folder in its place; choose another folder"
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
