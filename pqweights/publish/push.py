"""Push: verify a finished folder, make its card, and bring both to a repository on the Hub in one commit.

What the repository has already is not sent again, and neither are large files that were sent before a commit failed:
the same command continues where it stopped. Of the files in the repository, only those of an earlier push are replaced
or deleted. Nothing is written to the folder.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import CARD_FILE, EVALUATION_FILE, MANIFEST_FILE
from pqweights.common.units import counted
from pqweights.errors import HubError, HubUnavailableError, MasterError
from pqweights.publish.card import Card, make_card, read_card
from pqweights.publish.destination import (
    Destination,
    card_on_hub,
    check_private,
    check_weights,
    checked_branch,
    empty_repository,
    files_of_earlier_push,
    find_destination,
)
from pqweights.publish.options import CardOptions, PushOptions
from pqweights.rewrite.manifest import read_manifest, shards_of
from pqweights.rewrite.results.verify import verify
from pqweights.rewrite.task import usable_cores
from pqweights.storage.hub.client import Hub
from pqweights.storage.hub.repository import Repository, pieces_of
from pqweights.storage.hub.sources import Access
from pqweights.storage.hub.transfers import Upload, upload

NEW, CHANGED, SAME, DELETED = "new", "changed", "same", "deleted"
UNKNOWN = "unknown"  # of a file that could not be compared with the repository

# The size of a file, and what changes when it is replaced or written to; None if it cannot be looked at.
Stamp = tuple[int, ...] | None


@dataclass(frozen=True)
class Change:
    """What happens to one file of the repository.

    name: its path
    change: new, changed, same, deleted or unknown
    byte_count: its size after the push; 0 if it is deleted
    """

    name: str
    change: str
    byte_count: int


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What a push did, or would do.

    destination: where it went
    url: the address of the repository
    changes: what happened to each file
    card: README.md as it was pushed
    commit: the commit; None if nothing was pushed
    not_checked: of a dry run, why the Hub was not asked what it holds; None if it was
    """

    destination: Destination
    url: str
    changes: tuple[Change, ...]
    card: Card
    commit: str | None = None
    not_checked: str | None = None

    @property
    def repository(self) -> str:
        """The id of the repository."""
        return self.destination.remote.id

    @property
    def created(self) -> bool | None:
        """Whether the repository did not exist before; None if that was not checked."""
        return None if self.destination.exists is None else not self.destination.exists

    @property
    def sent_bytes(self) -> int:
        """The size of the files that the repository does not have, or may not have, in bytes."""
        return sum(change.byte_count for change in self.changes if change.change in (NEW, CHANGED, UNKNOWN))

    def to_json(self) -> dict[str, Any]:
        """Return the document of push --json."""
        return {
            "repository": self.repository,
            "branch": self.destination.branch,
            "created": self.created,
            "commit": self.commit,
            "url": self.url,
            "bytes": self.sent_bytes,
            "not_checked": self.not_checked,
            "files": [{"name": c.name, "change": c.change, "bytes": c.byte_count} for c in self.changes],
        }


def push(folder: Path, repository: str, access: Access, *, options: PushOptions = PushOptions()) -> PushReport:
    """Verify a master or an export, make its card, and upload both to a branch of a repository.

    folder: the master or export
    repository: ORG/NAME; created if it does not exist
    access: how the Hub is used; its revision is the branch, by default main, created if it does not exist
    options: what is asked of the push

    Raises MasterError for a broken folder, HubError, OutputError.
    """
    branch = checked_branch(repository, access.revision)
    stamps = _stamps(folder)
    old_card = read_card(folder)
    hub, not_checked = access.hub(), None
    try:
        hub.log_in()
        to = find_destination(hub, repository, branch, private=options.private)
    except HubUnavailableError as error:
        if not options.dry_run:
            raise
        to = Destination(branch=branch, remote=empty_repository(repository), exists=None, has_branch=None)
        not_checked = str(error)
    _check_folder(folder, options)
    asked = CardOptions(repository=to.remote.id, revision=to.card_branch, base_model=options.base_model)
    earlier = files_of_earlier_push(hub, to.remote)
    check_weights(to.remote, earlier | stamps.keys())
    card = make_card(folder, asked, old=old_card, pushed=card_on_hub(hub, to.remote))
    local = _Local(folder, stamps, card)
    report = PushReport(
        destination=to,
        url=f"{hub.endpoint}/{to.remote.id}",
        changes=_find_changes(local, to.remote, earlier, options),
        card=card,
        not_checked=not_checked,
    )
    if not_checked is not None:
        return replace(report, changes=tuple(replace(change, change=UNKNOWN) for change in report.changes))
    if any(change.name == CARD_FILE and change.change != SAME for change in report.changes):
        _check_card(hub, to.remote.id, card)
    if options.dry_run or all(change.change == SAME for change in report.changes):
        return report
    return _send(hub, local, report, options)


def _check_folder(folder: Path, options: PushOptions) -> None:
    """Verify the folder. Raises MasterError for the first problem."""
    checked = verify(folder, threads=options.threads or usable_cores(), progress=options.verifying)
    if not checked.ok:
        first = checked.problems[0]
        remedy = "; remove that file from the folder" if len(checked.unlisted) == len(checked.problems) else ""
        raise MasterError(
            f"{folder}: {first}{remedy} ({counted(len(checked.problems), 'problem')}): nothing was pushed; "
            "pqweights verify lists them all"
        )


def _stamps(folder: Path) -> dict[str, Stamp]:
    """Return the files of a folder that is about to be verified: its manifest, and what that lists."""
    manifest = read_manifest(folder)
    names = [MANIFEST_FILE, *(shard.file for shard in shards_of(manifest)), *manifest.files]
    return {name: _stamp(folder / name) for name in names}


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True)
class _Local:
    """What is pushed: the files of a verified folder as they were before, the card, and recorded evaluations."""

    folder: Path
    stamps: dict[str, Stamp]
    card: Card

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the files by name, in bytes."""
        sizes = {name: stamp[0] for name, stamp in self.stamps.items() if stamp is not None}
        evaluations = self.folder / EVALUATION_FILE
        if evaluations.is_file():
            sizes[EVALUATION_FILE] = evaluations.stat().st_size
        return dict(sorted((sizes | {CARD_FILE: len(self.card.text.encode())}).items()))

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file, piece by piece."""
        return iter([self.card.text.encode()]) if name == CARD_FILE else pieces_of(self.folder / name)

    def check_unchanged(self) -> None:
        """Check that the files are those that were verified. Raises MasterError."""
        for name, stamp in self.stamps.items():
            if _stamp(self.folder / name) != stamp:
                raise MasterError(
                    f"{self.folder}: {name}: was changed after it was verified: nothing was pushed; run the same "
                    "command again once nothing writes to the folder"
                )


def _find_changes(local: _Local, remote: Repository, earlier: Set[str], options: PushOptions) -> tuple[Change, ...]:
    """Return what happens to each file that is pushed, and to the files of an earlier push that are not.

    earlier: the files of the repository that an earlier push put there
    """
    compared = {
        name: there
        for name, byte_count in local.sizes.items()
        if (there := remote.files.get(name)) is not None and there.byte_count == byte_count
    }
    total, done = sum(there.byte_count for there in compared.values()), 0

    def pieces(name: str) -> Iterator[bytes]:
        nonlocal done
        for piece in local.pieces(name):
            done += len(piece)
            options.comparing(done, total, name)
            yield piece

    same = {name for name, there in compared.items() if there.has_content(pieces(name))}
    changes = [
        Change(name, SAME if name in same else CHANGED if name in remote.files else NEW, byte_count)
        for name, byte_count in local.sizes.items()
    ]
    # While the manifest stays, so does everything that it lists, and so do the evaluations of it.
    deleted = [] if MANIFEST_FILE in same else sorted(earlier - local.sizes.keys())
    return (*changes, *(Change(name, DELETED, 0) for name in deleted))


def _check_card(hub: Hub, repository: str, card: Card) -> None:
    """Ask the Hub whether it accepts the front matter of a card.

    The official client asks only with the commit, when everything else was sent.

    Raises HubError.
    """

    def ask() -> str | None:
        try:
            hub.official.library.ModelCard(card.text).validate()
        except ValueError as error:
            if type(error) is not ValueError:
                raise  # its subclasses are failures of requests
            return str(error)
        return None

    refused = hub.call(repository, ask, about=f": {CARD_FILE}")
    if refused is not None:
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a text, or JSON
            refused = "; ".join(str(error["message"]) for error in json.loads(refused)["errors"])
        raise HubError(
            f"{repository}: {CARD_FILE}: the Hub refuses its front matter: {hub.clean(refused)[:300]}; correct it in "
            f"the {CARD_FILE} of the folder; nothing was pushed"
        )


def _send(hub: Hub, local: _Local, report: PushReport, options: PushOptions) -> PushReport:
    """Create what does not exist, send what the repository lacks, and commit it. Raises HubError, MasterError."""
    to, repository = report.destination, report.repository
    remote = to.remote
    local.check_unchanged()
    if not to.exists:
        hub.call(repository, lambda: hub.api.create_repo(repository, private=options.private, exist_ok=True))
        remote = hub.repository(repository)
        check_private(remote, options.private)
    if not to.has_branch:
        hub.call(repository, lambda: hub.api.create_branch(repository, branch=to.branch, exist_ok=True))
        remote = hub.repository(repository, to.branch)
    operations = _operations(hub, local, report, options)
    local.check_unchanged()
    title = options.message or f"pqweights push: {read_manifest(local.folder).kind}"

    def commit() -> Any:
        try:
            return hub.api.create_commit(
                repository, operations, commit_message=title, revision=to.branch, parent_commit=remote.commit or None
            )
        except ValueError as error:
            if type(error) is not ValueError:
                raise  # its subclasses are refusals, or not an answer of a Hub
            raise HubError(f"{repository}: the commit is refused: {hub.clean(str(error))[:300]}") from None

    try:
        return replace(report, commit=str(hub.call(repository, commit).oid))
    except HubError:
        after = hub.repository(repository, to.branch)
        if any(change.change != SAME for change in _find_changes(local, after, frozenset(), options)):
            raise
        return replace(report, commit=after.commit)  # only the reply to the commit was lost


def _operations(hub: Hub, local: _Local, report: PushReport, options: PushOptions) -> list[Any]:
    """Send the large files, one by one, and return the operations of the commit.

    Those that were sent stay on the Hub if a later one fails.
    """
    to, done = report.destination, 0
    operations: list[Any] = []
    for change in report.changes:
        if change.change == DELETED:
            operations.append(hub.official.library.CommitOperationDelete(path_in_repo=change.name))
        elif change.change != SAME:
            options.progress(done, report.sent_bytes, change.name)
            content = local.card.text.encode() if change.name == CARD_FILE else str(local.folder / change.name)
            file = Upload(change.name, content)
            operations.append(upload(hub, to.remote, file, branch=to.branch))
            done += change.byte_count
            options.progress(done, report.sent_bytes, change.name)
    return operations
