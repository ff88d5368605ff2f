"""Carrying out a push: the card is checked, the repository and the branch created, and the files sent and committed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pqweights.checkpoint.names import CARD_FILE
from pqweights.errors import HubError
from pqweights.publish.card import Card
from pqweights.publish.options import PushOptions
from pqweights.publish.push.changes import CHANGED, DELETED, NEW, SAME, UNKNOWN, Change, find_changes
from pqweights.publish.push.destination import Destination, check_private
from pqweights.publish.push.folder import FinishedFolder
from pqweights.storage.hub.client import Hub
from pqweights.storage.hub.repository import Repository
from pqweights.storage.hub.transfers import Upload, upload


@dataclass(frozen=True, kw_only=True)
class PushTask:
    """A push whose every change is decided.

    hub: the Hub, where the user is logged in
    folder: the folder that is pushed
    destination: the repository and branch
    card: what README.md will be
    hashes: the SHA-256, in hex, of files that the Hub has or will have as large files
    changes: what happens to each file
    options: the options of the push
    """

    hub: Hub
    folder: FinishedFolder
    destination: Destination
    card: Card
    hashes: Mapping[str, str]
    changes: tuple[Change, ...]
    options: PushOptions

    @property
    def changes_something(self) -> bool:
        """Whether the repository lacks any of this."""
        return any(change.kind != SAME for change in self.changes)


class Pushed(NamedTuple):
    """A commit on the Hub, and the address of the repository or of the pull request."""

    commit: str
    url: str


def sent_bytes(changes: tuple[Change, ...]) -> int:
    """Return the size of the files that the repository does not have, or may not have, in bytes."""
    return sum(change.byte_count for change in changes if change.kind in (NEW, CHANGED, UNKNOWN))


def repository_url(hub: Hub, remote: Repository) -> str:
    """Return the address of a repository's page."""
    return f"{hub.endpoint}/{remote.id}"


def check_card(hub: Hub, repository: str, card: Card) -> None:
    """Ask the Hub whether it accepts the front matter of a card.

    The official client asks only with the commit, when everything else was sent. Its ModelCard.validate would not send
    the text itself, but its own rendering of it.

    Raises HubError.
    """
    utils = hub.official.utils

    def ask() -> str | None:
        reply = utils.get_session().post(
            f"{hub.api.endpoint}/api/validate-yaml",
            json={"content": card.text, "repoType": "model"},
            headers=utils.build_hf_headers(token=hub.token),
        )
        if reply.status_code == 400:
            return str(reply.text)
        utils.hf_raise_for_status(reply)
        return None

    refused = hub.call(repository, ask, about=f": {CARD_FILE}")
    if refused is None:
        return
    try:
        said = "; ".join(str(error["message"]) for error in json.loads(refused)["errors"])
    except (ValueError, TypeError, KeyError):
        said = refused
    raise HubError(
        f"{repository}: {CARD_FILE}: the Hub refuses its front matter: {hub.clean(said)[:300]}; correct it in the "
        f"{CARD_FILE} of the folder; nothing was pushed"
    )


def send(task: PushTask) -> Pushed:
    """Create what does not exist, send what the repository lacks, and commit it. Raises HubError."""
    hub, destination, private = task.hub, task.destination, task.options.private
    name, branch, remote = destination.name, destination.branch, destination.remote
    if not destination.exists:
        hub.call(name, lambda: hub.api.create_repo(name, private=private, exist_ok=True))
        remote = hub.repository(name)
        check_private(remote, private)
    if not destination.has_branch:
        hub.call(name, lambda: hub.api.create_branch(remote.id, branch=branch, exist_ok=True))
        remote = hub.repository(name, branch)
    return _commit(replace(task, destination=replace(destination, remote=remote)))


def _commit(task: PushTask) -> Pushed:
    hub, remote, create_pr = task.hub, task.destination.remote, task.options.create_pr
    operations = _operations(task)
    title = task.options.message or f"pqweights push: {task.folder.manifest.kind}"

    def commit() -> Any:
        try:
            return hub.api.create_commit(
                remote.id,
                operations,
                commit_message=title,
                revision=task.destination.branch,
                parent_commit=remote.commit or None,
                create_pr=create_pr,
            )
        except ValueError as error:
            if type(error) is not ValueError:
                raise  # its subclasses are refusals, or not an answer of a Hub
            raise HubError(f"{remote.id}: the commit is refused: {hub.clean(str(error))[:300]}") from None

    try:
        info = hub.call(remote.id, commit, attempts=1 if create_pr else None)
    except HubError:
        after = None if create_pr else _committed(task)
        if after is None:
            raise
        return Pushed(after.commit, repository_url(hub, remote))
    return Pushed(str(info.oid), str(info.pr_url) if create_pr else repository_url(hub, remote))


def _committed(task: PushTask) -> Repository | None:
    """Return what the branch holds after a commit without a reply, or None if that is not the commit."""
    after = task.hub.repository(task.destination.remote.id, task.destination.branch)
    changes = find_changes(task.folder, task.card, after, pushed=frozenset(), hashes=task.hashes)
    return None if any(change.kind != SAME for change in changes) else after


def _operations(task: PushTask) -> list[Any]:
    """Send the large files and return the operations of the commit.

    Files are sent one by one; those that were sent stay on the Hub if a later one fails.
    """
    library: Any = task.hub.official.library
    total, done = sent_bytes(task.changes), 0
    operations: list[Any] = []
    for change in task.changes:
        if change.kind == DELETED:
            operations.append(library.CommitOperationDelete(path_in_repo=change.name))
        elif change.kind != SAME:
            task.options.progress(done, total, change.name)
            operations.append(_send_file(task, change.name))
            done += change.byte_count
            task.options.progress(done, total, change.name)
    return operations


def _send_file(task: PushTask, name: str) -> Any:
    """Send a file if it is large, and return the operation that adds it."""
    destination = task.destination
    content = task.card.text.encode() if name == CARD_FILE else str(task.folder.path / name)
    file = Upload(name, content, task.hashes.get(name))
    return upload(task.hub, destination.remote, file, branch=destination.branch, create_pr=task.options.create_pr)
