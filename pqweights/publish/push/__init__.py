"""Push: verify a finished folder, write its card, and bring both to a repository on the Hub in one commit.

What the repository has already is not sent again, and neither are large files that were sent before a commit failed:
the same command continues where it stopped. Of the files in the repository, only those of an earlier push are replaced
or deleted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pqweights.common.units import counted
from pqweights.errors import HubUnavailableError, MasterError
from pqweights.publish.card import Card, make_card, read_card, save_card
from pqweights.publish.options import CardOptions, PushOptions
from pqweights.publish.push.changes import UNKNOWN, Change, find_changes, has_card
from pqweights.publish.push.destination import (
    Destination,
    card_on_hub,
    check_weights,
    checked_branch,
    files_of_earlier_push,
    find_destination,
    unknown_destination,
)
from pqweights.publish.push.folder import FinishedFolder, read_folder
from pqweights.publish.push.hashing import hash_files
from pqweights.publish.push.sending import PushTask, check_card, repository_url, send, sent_bytes
from pqweights.rewrite.results.verify import verify
from pqweights.rewrite.task import usable_cores
from pqweights.storage.hub.client import Hub
from pqweights.storage.hub.sources import Access

__all__ = ["PushReport", "push"]


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What a push did, or would do.

    repository, branch: where it went
    created: whether the repository did not exist before; None if that was not checked
    changes: what happened to each file
    commit: the commit; None if nothing was pushed
    url: the address of the repository or of the pull request
    card: README.md as it was pushed
    not_checked: of a dry run, why the Hub was not asked what it holds; None if it was
    before: the commit that the branch had; empty if there was none
    """

    repository: str
    branch: str
    created: bool | None
    changes: tuple[Change, ...]
    commit: str | None
    url: str
    card: Card
    not_checked: str | None = None
    before: str = ""

    @property
    def sent_bytes(self) -> int:
        """The size of the files that the repository did not have, in bytes."""
        return sent_bytes(self.changes)

    def to_json(self) -> dict[str, Any]:
        """Return the document of push --json."""
        return {
            "repository": self.repository,
            "branch": self.branch,
            "created": self.created,
            "commit": self.commit,
            "url": self.url,
            "bytes": self.sent_bytes,
            "not_checked": self.not_checked,
            "files": [{"name": c.name, "change": c.kind, "bytes": c.byte_count} for c in self.changes],
        }


def push(folder: Path, repository: str, access: Access, *, options: PushOptions = PushOptions()) -> PushReport:
    """Verify a master or an export, write its card, and upload both to a branch of a repository.

    folder: the master or export
    repository: ORG/NAME; created if it does not exist
    access: how the Hub is used; its revision is the branch, by default main, created if it does not exist
    options: what is asked of the push

    Raises MasterError for a broken folder, HubError, OutputError.
    """
    branch = checked_branch(repository, access.revision)
    finished = read_folder(folder)
    old_card = read_card(folder)
    hub = access.hub()
    try:
        hub.log_in()
        destination = find_destination(hub, repository, branch=branch, options=options)
    except HubUnavailableError as error:
        if not options.dry_run:
            raise
        return _without_hub(finished, hub, unknown_destination(repository, branch), options=options, why=str(error))
    _check_folder(folder, options)
    task = _prepare(finished, hub, destination, options=options, old_card=old_card)
    report = _report(task)
    if options.dry_run:
        return report
    save_card(folder, task.card)
    if not task.changes_something:
        return report
    pushed = send(task)
    return replace(report, commit=pushed.commit, url=pushed.url)


def _report(task: PushTask) -> PushReport:
    """Return what a push would do."""
    remote = task.destination.remote
    return PushReport(
        repository=remote.id,
        branch=task.destination.branch,
        created=not task.destination.exists,
        changes=task.changes,
        commit=None,
        url=repository_url(task.hub, remote),
        card=task.card,
        before=remote.commit,
    )


def _prepare(
    folder: FinishedFolder, hub: Hub, destination: Destination, *, options: PushOptions, old_card: str | None
) -> PushTask:
    """Check what the Hub holds and says of the card, and decide what changes. Hashing takes long, so it comes last."""
    remote = destination.remote
    pushed = files_of_earlier_push(hub, remote)
    check_weights(remote, pushed, folder.sizes.keys())
    card = make_card(folder.path, _card_options(destination, options), old=old_card, pushed=card_on_hub(hub, remote))
    if not has_card(remote, card):
        check_card(hub, remote.id, card)
    hashes = hash_files(folder, remote, options)
    return PushTask(
        hub=hub,
        folder=folder,
        destination=destination,
        card=card,
        hashes=hashes,
        changes=find_changes(folder, card, remote, pushed=pushed, hashes=hashes),
        options=options,
    )


def _without_hub(
    folder: FinishedFolder, hub: Hub, destination: Destination, *, options: PushOptions, why: str
) -> PushReport:
    """Do what a dry run can do without the Hub: verify the folder, make the card, list the files."""
    _check_folder(folder.path, options)
    card = make_card(folder.path, _card_options(destination, options), old=read_card(folder.path))
    changes = find_changes(folder, card, destination.remote, pushed=frozenset(), hashes={})
    task = PushTask(
        hub=hub, folder=folder, destination=destination, card=card, hashes={}, changes=changes, options=options
    )
    unknown = tuple(replace(change, kind=UNKNOWN) for change in changes)
    return replace(_report(task), created=None, changes=unknown, not_checked=why)


def _card_options(destination: Destination, options: PushOptions) -> CardOptions:
    return CardOptions(
        repository=destination.remote.id,
        revision=destination.card_branch,
        base_model=options.base_model,
        adopt=options.adopt,
    )


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
