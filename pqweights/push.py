"""Push: a finished folder to a repository on the Hub, verified first, in one commit, with its card.

What the repository has already is not sent again, large files whose commit did not come about included: the same command
goes on where it stopped. Of what lies there only the files of an earlier push are replaced or deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.card import Card, make_card, save_card
from pqweights.checkpoint.names import CARD_FILE, EVALUATION_FILE, MANIFEST_FILE
from pqweights.checkpoint.source import is_weight_file
from pqweights.errors import HubError, MasterError
from pqweights.hub.client import Hub, RemoteFile, Repository, pieces_of
from pqweights.hub.ids import is_repository_id
from pqweights.hub.sources import Access
from pqweights.manifest import parse_manifest, read_manifest
from pqweights.plan import plan_shards
from pqweights.verify import verify

NEW, CHANGED, SAME, DELETED = "new", "changed", "same", "deleted"
MAIN = "main"

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, name


@dataclass(frozen=True)
class Change:
    """What becomes of one file of the repository: new, changed, same or deleted."""

    name: str
    kind: str
    byte_count: int


@dataclass(frozen=True)
class PushReport:
    """What a push did, or would do. created: the repository was not there. commit: None where nothing was pushed.

    url: where to look at it. card: README.md as it was pushed.
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
        """Size of the files that the repository did not have."""
        return sum(change.byte_count for change in self.changes if change.kind in (NEW, CHANGED))

    def to_json(self) -> dict[str, Any]:
        """push --json."""
        return {
            "repository": self.repository,
            "branch": self.branch,
            "created": self.created,
            "commit": self.commit,
            "url": self.url,
            "bytes": self.sent_bytes,
            "files": [{"name": c.name, "change": c.kind, "bytes": c.byte_count} for c in self.changes],
        }


def push(
    folder: Path,
    repository: str,
    access: Access,
    *,
    private: bool = False,
    create_pr: bool = False,
    message: str | None = None,
    base_model: str | None = None,
    adopt: bool = False,
    dry_run: bool = False,
    threads: int,
    verifying: Progress = lambda done, total, name: None,
    progress: Progress = lambda done, total, name: None,
) -> PushReport:
    """Verify a master or an export, write its card, and bring both to a branch (access.revision, main by default).

    private: of a repository that is made. create_pr: as a pull request. base_model, adopt: see make_card. dry_run: change
    nothing, there or here.

    Raises MasterError for a folder that is broken, HubError, OutputError.
    """
    if not is_repository_id(repository):
        raise HubError(f"{repository}: expected ORG/NAME; the namespace is not guessed")
    read_manifest(folder)
    hub = access.hub()
    hub.log_in()
    branch = access.revision or MAIN
    checked = verify(folder, threads=threads, progress=verifying)
    if not checked.ok:
        raise MasterError(
            f"{folder}: {checked.problems[0]} ({len(checked.problems)} problem(s)): nothing was pushed; pqweights verify lists them"
        )
    remote, exists = _remote(hub, repository, branch)
    _check_remote(hub, remote, folder)
    card = make_card(folder, repository, base_model=base_model, old=_old_card(hub, remote, folder), adopt=adopt)
    local = _local_files(folder, card)
    changes = _changes(hub, folder, card, local, remote)
    url = f"{hub.endpoint}/{repository}"
    report = PushReport(repository, branch, not exists, changes, None, url, card)
    if dry_run or all(change.kind == SAME for change in changes):
        return report
    save_card(folder, card)
    if not exists:
        hub.call(repository, lambda: hub.api.create_repo(repository, private=private, exist_ok=True))
        remote = hub.repository(repository)
    if branch not in (MAIN, remote.commit) and not _has_branch(hub, repository, branch):
        hub.call(repository, lambda: hub.api.create_branch(repository, branch=branch, exist_ok=True))
        remote = hub.repository(repository, branch)
    commit, url = _send(hub, folder, card, remote, branch, changes, create_pr, message, progress)
    return PushReport(repository, branch, not exists, changes, commit, url or report.url, card)


def _remote(hub: Hub, repository: str, branch: str) -> tuple[Repository, bool]:
    """What is there, and whether the repository exists; a branch that does not holds what main does."""
    if not hub.exists(repository):
        return Repository(repository, "", {}), False
    if branch != MAIN and not _has_branch(hub, repository, branch):
        branch = MAIN
    return hub.repository(repository, branch), True


def _has_branch(hub: Hub, repository: str, branch: str) -> bool:
    found = hub.call(repository, lambda: hub.api.list_repo_refs(repository, include_pull_requests=True))
    return any(branch in (ref.name, ref.ref) for ref in [*found.branches, *(found.pull_requests or [])])


def _manifest_files(folder: Path) -> dict[str, int]:
    """The files that a manifest lists, and itself, with their sizes."""
    manifest = read_manifest(folder)
    shards = plan_shards(manifest.tensors, manifest.max_shard_bytes, manifest.metadata)
    files = {shard.file: shard.file_bytes for shard in shards}
    files |= {name: record.bytes for name, record in manifest.files.items()}
    return files | {MANIFEST_FILE: (folder / MANIFEST_FILE).stat().st_size}


def _local_files(folder: Path, card: Card) -> dict[str, int]:
    """What is pushed, with sizes."""
    files = _manifest_files(folder)
    if (folder / EVALUATION_FILE).is_file():
        files[EVALUATION_FILE] = (folder / EVALUATION_FILE).stat().st_size
    return files | {CARD_FILE: len(card.text.encode())}


def _replaced(hub: Hub, remote: Repository) -> set[str]:
    """The files of an earlier push, by the manifest that lies there; none where there is none that can be read."""
    manifest = remote.files.get(MANIFEST_FILE)
    if manifest is None:
        return set()
    try:
        found = parse_manifest(json.loads(hub.read_whole(remote, manifest)))
    except (MasterError, ValueError, RecursionError):
        return set()
    shards = plan_shards(found.tensors, found.max_shard_bytes, found.metadata)
    return {*(shard.file for shard in shards), *found.files, MANIFEST_FILE, EVALUATION_FILE} & remote.files.keys()


def _check_remote(hub: Hub, remote: Repository, folder: Path) -> None:
    """Refuse a repository with weights of others: a loader might take those."""
    foreign = [name for name in remote.files if is_weight_file(name)]
    foreign = sorted(set(foreign) - _replaced(hub, remote) - _manifest_files(folder).keys())
    if foreign:
        raise HubError(
            f"{remote.id}: holds {foreign[0]!a}, which no push of pqweights put there ({len(foreign)} such file(s)): choose another "
            "repository or branch, or delete them there"
        )


def _old_card(hub: Hub, remote: Repository, folder: Path) -> str | None:
    """The card whose notes are kept: the one here, else the one there."""
    if (folder / CARD_FILE).is_file():
        return (folder / CARD_FILE).read_text(encoding="utf-8", errors="replace")
    file = remote.files.get(CARD_FILE)
    return None if file is None else hub.read_whole(remote, file).decode("utf-8", "replace")


def _changes(hub: Hub, folder: Path, card: Card, local: dict[str, int], remote: Repository) -> tuple[Change, ...]:
    changes = []
    for name, byte_count in sorted(local.items()):
        there = remote.files.get(name)
        kind = NEW if there is None else SAME if _is_same(there, name, byte_count, folder, card) else CHANGED
        changes.append(Change(name, kind, byte_count))
    gone = sorted(_replaced(hub, remote) - local.keys())
    return (*changes, *(Change(name, DELETED, 0) for name in gone))


def _is_same(there: RemoteFile, name: str, byte_count: int, folder: Path, card: Card) -> bool:
    if there.byte_count != byte_count:
        return False
    if name == CARD_FILE:
        return there.is_of([card.text.encode()])
    return there.is_of(pieces_of(folder / name))


def _send(
    hub: Hub,
    folder: Path,
    card: Card,
    remote: Repository,
    branch: str,
    changes: Sequence[Change],
    create_pr: bool,
    message: str | None,
    progress: Progress,
) -> tuple[str, str]:
    """Commit and address of it, or of the pull request. Large files go first, one by one: each is kept if the next fails."""
    library: Any = hub.library
    total = sum(change.byte_count for change in changes if change.kind in (NEW, CHANGED))
    done = 0
    operations: list[Any] = []
    for change in changes:
        if change.kind == DELETED:
            operations.append(library.CommitOperationDelete(path_in_repo=change.name))
        elif change.kind != SAME:
            progress(done, total, change.name)
            content = card.text.encode() if change.name == CARD_FILE else str(folder / change.name)
            operations.append(hub.upload(remote, branch, change.name, content, create_pr))
            done += change.byte_count
            progress(done, total, change.name)
    title = message or f"pqweights push: {read_manifest(folder).kind}"
    try:
        info = hub.call(
            remote.id,
            lambda: hub.api.create_commit(
                remote.id, operations, commit_message=title, revision=branch, parent_commit=remote.commit or None,
                create_pr=create_pr,
            ),
            attempts=1 if create_pr else None,
        )  # fmt: skip
    except HubError:
        # The reply may have been lost, not the commit.
        after = None if create_pr else hub.repository(remote.id, branch)
        if after is None or any(c.kind != SAME for c in _changes(hub, folder, card, _local_files(folder, card), after)):
            raise
        return after.commit, f"{hub.endpoint}/{remote.id}"
    return str(info.oid), str(info.pr_url if create_pr else f"{hub.endpoint}/{remote.id}")
