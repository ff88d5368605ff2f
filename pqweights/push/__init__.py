"""Push: verify a finished folder, write its card, and bring both to a repository on the Hub in one commit.

What the repository has already is not sent again, and neither are large files that were sent before a commit failed:
the same command continues where it stopped. Of the files in the repository, only those of an earlier push are replaced
or deleted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pqweights.card import Card, CardOptions, make_card, read_card, save_card
from pqweights.errors import MasterError
from pqweights.hub.sources import Access
from pqweights.push.changes import Change, find_changes, manifest_files
from pqweights.push.destination import (
    card_on_hub,
    check_weights,
    checked_branch,
    files_of_earlier_push,
    find_destination,
)
from pqweights.push.options import PushOptions
from pqweights.push.sending import PushTask, check_card, repository_url, send, sent_bytes
from pqweights.results.verify import verify
from pqweights.rewrite.manifest import read_manifest
from pqweights.units import counted

__all__ = ["PushOptions", "PushReport", "push"]


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What a push did, or would do.

    repository, branch: where it went
    created: whether the repository did not exist before
    changes: what happened to each file
    commit: the commit; None if nothing was pushed
    url: the address of the repository or of the pull request
    card: README.md as it was pushed
    """

    repository: str
    branch: str
    created: bool
    changes: tuple[Change, ...]
    commit: str | None
    url: str
    card: Card

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
    task = _prepare(folder, repository, access, options=options)
    remote = task.destination.remote
    report = PushReport(
        repository=remote.id,
        branch=task.destination.branch,
        created=not task.destination.exists,
        changes=task.changes,
        commit=None,
        url=repository_url(task.hub, remote),
        card=task.card,
    )
    if options.dry_run:
        return report
    save_card(folder, task.card)
    if not task.changes_something:
        return report
    pushed = send(task)
    return replace(report, commit=pushed.commit, url=pushed.url)


def _prepare(folder: Path, repository: str, access: Access, *, options: PushOptions) -> PushTask:
    """Check everything, here and on the Hub, and decide what changes."""
    branch = checked_branch(repository, access.revision, options.base_model)
    read_manifest(folder)
    old_card = read_card(folder)
    hub = access.hub()
    hub.log_in()
    destination = find_destination(hub, repository, branch=branch, options=options)
    remote = destination.remote
    _check_folder(folder, options)
    pushed = files_of_earlier_push(hub, remote)
    check_weights(remote, pushed, manifest_files(folder).keys())
    card = make_card(
        folder,
        CardOptions(
            repository=remote.id,
            revision=destination.card_branch,
            base_model=options.base_model,
            adopt=options.adopt,
        ),
        old=old_card,
        pushed=card_on_hub(hub, remote),
    )
    changes = find_changes(folder, card, remote, pushed=pushed)
    task = PushTask(hub=hub, folder=folder, destination=destination, card=card, changes=changes, options=options)
    if task.changes_card:
        check_card(hub, remote.id, card)
    return task


def _check_folder(folder: Path, options: PushOptions) -> None:
    """Verify the folder. Raises MasterError for the first problem."""
    checked = verify(folder, threads=options.threads, progress=options.verifying)
    if not checked.ok:
        raise MasterError(
            f"{folder}: {checked.problems[0]} ({counted(len(checked.problems), 'problem')}): nothing was pushed; "
            "pqweights verify lists them all"
        )
