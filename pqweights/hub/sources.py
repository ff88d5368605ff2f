"""What a user gives as SRC or DIR: a folder or file here, or a repository on the Hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.source import Checkpoint, needed_files, open_checkpoint, open_local
from pqweights.checkpoint.storage import Origin
from pqweights.errors import SourceError
from pqweights.hub.client import Hub, Tell
from pqweights.hub.ids import is_repository_id
from pqweights.hub.storage import HubStorage

PREFIX = "hf://"

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, name of the file


@dataclass(frozen=True)
class Access:
    """How the Hub is used. token: None for the one that the user logged in with. revision: branch, tag or commit.

    tell: hears of every wait.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    tell: Tell = field(default=lambda line: None, repr=False)

    def hub(self) -> Hub:
        """The Hub, used so."""
        return Hub(self.token, self.tell)


class Fetched(NamedTuple):
    """A folder on this machine. origin: of what was fetched from the Hub. not_fetched: what else the repository lists."""

    path: Path
    origin: Origin | None = None
    not_fetched: tuple[str, ...] = ()


def repository_id(source: str | Path) -> str | None:
    """The repository that is meant; None for what is, or could only be, a path here. hf://ORG/NAME always means one."""
    if isinstance(source, Path):
        return None
    if source.startswith(PREFIX):
        return source.removeprefix(PREFIX)
    return source if is_repository_id(source) and not Path(source).exists() else None


def open_source(
    source: str | Path, access: Access, *, low_disk: bool = False, allow_pickle: bool = False
) -> Checkpoint:
    """A checkpoint here or on the Hub, from its headers. low_disk: see HubStorage.

    Raises SourceError, HubError.
    """
    repository = repository_id(source)
    if repository is None:
        check_local(source, access, low_disk)
        return open_local(Path(source), allow_pickle)
    hub = access.hub()
    return open_checkpoint(HubStorage(hub, hub.repository(repository, access.revision), low_disk), allow_pickle)


def local_folder(
    source: str | Path,
    access: Access,
    *,
    only: Sequence[str] = (),
    ours: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> Fetched:
    """A folder with a model: here as it is, of the Hub fetched into the cache, as far as it is needed or named by `only`.

    ours: refuse what pqweights did not push before it is fetched. Raises SourceError, HubError.
    """
    repository = repository_id(source)
    if repository is None:
        check_local(source, access)
        return Fetched(Path(source))
    hub = access.hub()
    if hub.is_offline:
        folder = hub.snapshot(repository, access.revision)
        return Fetched(folder, Origin(repository, folder.name))
    found = hub.repository(repository, access.revision)
    storage = HubStorage(hub, found)
    if ours and MANIFEST_FILE not in storage.files():
        raise SourceError(
            f"{repository}: expected a master or an export that pqweights pushed, found no {MANIFEST_FILE} in the repository"
        )
    wanted = [name for name in only if name in storage.files()] if only else needed_files(storage)
    if not wanted:
        raise SourceError(f"{repository}: expected {', '.join(only)} in the repository, found none")
    total = sum(found.files[name].byte_count for name in wanted)
    done = 0
    folder = Path()
    for name in wanted:

        def show(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            progress(min(done, total), total, name)

        path = hub.download_to_cache(found, found.files[name], show)
        folder = path.parents[name.count("/")]
    hub.remember(found, access.revision)
    return Fetched(folder, found.origin, tuple(name for name in storage.files() if name not in wanted))


def check_local(source: str | Path, access: Access, low_disk: bool = False) -> None:
    """Refuse options that mean something for the Hub alone."""
    for option, given in (("--revision", access.revision is not None), ("--low-disk", low_disk)):
        if given:
            raise SourceError(
                f"{option}: expected a repository on the Hub (ORG/NAME), found {source}, which is none: leave the option out, or "
                f"write {PREFIX}ORG/NAME where a folder here has the same name"
            )
