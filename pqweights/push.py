"""Push: a finished folder to a repository on the Hub, verified first, in one commit, with its card.

What the repository has already is not sent again, large files whose commit did not come about included: the same command
goes on where it stopped. Of what lies there only the files of an earlier push are replaced or deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pqweights.card import Card, CardOptions, check_names, make_card, read_card, save_card
from pqweights.checkpoint.model_card import MAX_CARD_BYTES
from pqweights.checkpoint.names import CARD_FILE, EVALUATION_FILE, MANIFEST_FILE
from pqweights.checkpoint.source import is_weight_file
from pqweights.errors import HubError, MasterError
from pqweights.hub.client import Hub, RemoteFile, Repository, pieces_of
from pqweights.hub.ids import is_repository_id
from pqweights.hub.sources import Access
from pqweights.results.verify import verify
from pqweights.rewrite.manifest import parse_manifest, read_manifest, shards_of
from pqweights.rewrite.task import usable_cores

NEW, CHANGED, SAME, DELETED = "new", "changed", "same", "deleted"
MAIN = "main"
MAX_MANIFEST_BYTES = 256_000_000  # of one there; what a larger one lists is not looked at
_COMMIT = re.compile(r"[0-9a-fA-F]{40}")
_PULL_REQUEST = re.compile(r"refs/pr/\d+")

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, name


@dataclass(frozen=True)
class Change:
    """What becomes of one file of the repository: new, changed, same or deleted."""

    name: str
    kind: str
    byte_count: int


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """What is asked of a push.

    private: of a repository that is made; one that is there must be. create_pr: as a pull request against the branch, which
    must be there. message: title of the commit. base_model, adopt: see CardOptions. dry_run: change nothing, there or here.
    threads: for verifying. verifying, progress: called with bytes done, bytes in all, and a name.
    """

    private: bool = False
    create_pr: bool = False
    message: str | None = None
    base_model: str | None = None
    adopt: bool = False
    dry_run: bool = False
    threads: int = field(default_factory=usable_cores)
    verifying: Progress = lambda done, total, name: None
    progress: Progress = lambda done, total, name: None


def push(folder: Path, repository: str, access: Access, options: PushOptions = PushOptions()) -> PushReport:
    """Verify a master or an export, write its card, and bring both to a branch (access.revision, main by default).

    Raises MasterError for a folder that is broken, HubError, OutputError.
    """
    branch = _checked_branch(repository, access, options)
    read_manifest(folder)
    old = read_card(folder)
    hub = access.hub()
    hub.log_in()
    there = _look(hub, repository, branch, private=options.private, create_pr=options.create_pr)
    checked = verify(folder, threads=options.threads, progress=options.verifying)
    if not checked.ok:
        raise MasterError(
            f"{folder}: {checked.problems[0]} ({len(checked.problems)} problem(s)): nothing was pushed; pqweights verify lists them"
        )
    ours = _pushed_before(hub, there.remote)
    _check_weights(there.remote, ours, folder)
    card = make_card(
        folder,
        CardOptions(
            repository=there.remote.id,
            revision=MAIN if _PULL_REQUEST.fullmatch(branch) else branch,
            base_model=options.base_model,
            adopt=options.adopt,
        ),
        old=old,
        pushed=_card_there(hub, there.remote),
    )
    report = PushReport(
        repository=there.remote.id,
        branch=branch,
        created=not there.exists,
        changes=_changes(folder, card, there.remote, ours),
        commit=None,
        url=f"{hub.endpoint}/{there.remote.id}",
        card=card,
    )
    if any(change.name == CARD_FILE and change.kind != SAME for change in report.changes):
        _validate(hub, there.remote.id, card)
    return report if options.dry_run else _carry_out(hub, folder, repository, there, report, options)


def _checked_branch(repository: str, access: Access, options: PushOptions) -> str:
    """The branch that is meant. Raises HubError, OutputError for names that cannot be pushed to."""
    if not is_repository_id(repository):
        raise HubError(f"{repository}: expected ORG/NAME; the namespace is not guessed")
    branch = (access.revision or MAIN).removeprefix("refs/heads/")
    check_names(options.base_model, branch)
    if _COMMIT.fullmatch(branch):
        raise HubError(
            f"{repository}: --revision {branch}: expected a branch, found a commit, which nothing can be added to"
        )
    return branch


def _carry_out(
    hub: Hub, folder: Path, repository: str, there: _There, report: PushReport, options: PushOptions
) -> PushReport:
    """Save the card, make what is not there, and send what is not the same."""
    save_card(folder, report.card)
    if all(change.kind == SAME for change in report.changes):
        return report
    remote = there.remote
    if not there.exists:
        hub.call(repository, lambda: hub.api.create_repo(repository, private=options.private, exist_ok=True))
        remote = hub.repository(repository)
        _check_private(remote, options.private)
    if not there.has_branch:
        hub.call(repository, lambda: hub.api.create_branch(remote.id, branch=report.branch, exist_ok=True))
        remote = hub.repository(repository, report.branch)
    commit, url = _send(hub, folder, remote, report, options)
    return replace(report, commit=commit, url=url or report.url)


@dataclass(frozen=True)
class _There:
    """remote: what the branch holds; main, where it is to be made, and nothing, where the repository is."""

    remote: Repository
    exists: bool
    has_branch: bool


def _look(hub: Hub, repository: str, branch: str, *, private: bool, create_pr: bool) -> _There:
    """What is there. Raises HubError for a repository or branch that cannot take this push."""
    exists = hub.exists(repository)
    has_branch = branch == MAIN or (exists and _has_branch(hub, repository, branch))
    if create_pr and not has_branch:
        raise HubError(
            f"{repository}: has no branch {branch!a}, and a pull request is opened against one that is there: make it, or leave out "
            "--revision or --create-pr"
        )
    if not exists:
        return _There(Repository(repository, "", {}), False, has_branch)
    remote = hub.repository(repository, branch if has_branch else MAIN)
    _check_private(remote, private)
    return _There(remote, True, has_branch)


def _has_branch(hub: Hub, repository: str, branch: str) -> bool:
    """Raises HubError for a tag."""
    found = hub.call(repository, lambda: hub.api.list_repo_refs(repository, include_pull_requests=True))
    if any(branch in (ref.name, ref.ref) for ref in [*found.branches, *(found.pull_requests or [])]):
        return True
    if any(branch in (ref.name, ref.ref) for ref in found.tags):
        raise HubError(
            f"{repository}: --revision {branch}: expected a branch, found a tag, which nothing can be added to"
        )
    return False


def _check_private(remote: Repository, private: bool) -> None:
    if private and not remote.private:
        raise HubError(
            f"{remote.id}: is there, and public: make it private in its settings on the Hub, choose another one, or leave out "
            "--private; nothing was pushed"
        )


def _manifest_files(folder: Path) -> dict[str, int]:
    """The files that a manifest lists, and itself, with their sizes."""
    manifest = read_manifest(folder)
    files = {shard.file: shard.file_bytes for shard in shards_of(manifest)}
    files |= {name: record.bytes for name, record in manifest.files.items()}
    return files | {MANIFEST_FILE: (folder / MANIFEST_FILE).stat().st_size}


def _local_files(folder: Path, card: Card) -> dict[str, int]:
    """What is pushed, with sizes."""
    files = _manifest_files(folder)
    if (folder / EVALUATION_FILE).is_file():
        files[EVALUATION_FILE] = (folder / EVALUATION_FILE).stat().st_size
    return files | {CARD_FILE: len(card.text.encode())}


def _pushed_before(hub: Hub, remote: Repository) -> Set[str]:
    """The files of an earlier push: those that are what the manifest there says of them.

    None where there is none that can be read: it may be anybody's, and hold anything.
    """
    manifest = remote.files.get(MANIFEST_FILE)
    if manifest is None or manifest.byte_count > MAX_MANIFEST_BYTES:
        return frozenset()
    try:
        found = parse_manifest(hub.read_whole(remote, manifest))
        shards = shards_of(found)
    except (MasterError, ValueError, TypeError, OverflowError, RecursionError):
        return frozenset()
    listed: dict[str, tuple[int, str | None]] = {
        name: (record.bytes, record.sha256) for name, record in found.files.items()
    }
    listed |= {shard.file: (shard.file_bytes, None) for shard in shards}
    ours = {MANIFEST_FILE, EVALUATION_FILE} & remote.files.keys()
    for name, (byte_count, sha256) in listed.items():
        there = remote.files.get(name)
        if (
            there is not None
            and there.byte_count == byte_count
            and (None in (there.sha256, sha256) or there.sha256 == sha256)
        ):
            ours.add(name)
    return {name for name in ours if name != CARD_FILE and not any(part.startswith(".") for part in name.split("/"))}


def _check_weights(remote: Repository, ours: Set[str], folder: Path) -> None:
    """Refuse a repository with weights of others: a loader might take those."""
    foreign = [name for name in remote.files if is_weight_file(name)]
    foreign = sorted(set(foreign) - ours - _manifest_files(folder).keys())
    if foreign:
        raise HubError(
            f"{remote.id}: holds {foreign[0]!a}, which no push of pqweights put there ({len(foreign)} such file(s)): choose another "
            "repository or branch, or delete them there"
        )


def _card_there(hub: Hub, remote: Repository) -> str | None:
    """Raises HubError for one that is no text."""
    file = remote.files.get(CARD_FILE)
    if file is None:
        return None
    if file.byte_count > MAX_CARD_BYTES:
        raise HubError(
            f"{remote.id}: {CARD_FILE}: expected a card, found {file.byte_count} bytes; delete it there, or choose another repository"
        )
    try:
        return hub.read_whole(remote, file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise HubError(
            f"{remote.id}: {CARD_FILE}: expected UTF-8 text, found another byte at {error.start}; correct it there, or delete it"
        ) from None


def _validate(hub: Hub, repository: str, card: Card) -> None:
    """Ask the Hub whether it takes this front matter.

    The client asks the same with the commit, when all else was sent. Its ModelCard.validate sends not the text itself, but what
    it would write. Raises HubError.
    """

    def ask() -> str | None:
        reply = hub.utils.get_session().post(
            f"{hub.api.endpoint}/api/validate-yaml", json={"content": card.text, "repoType": "model"},
            headers=hub.utils.build_hf_headers(token=hub.token),
        )  # fmt: skip
        if reply.status_code == 400:
            return str(reply.text)
        hub.utils.hf_raise_for_status(reply)
        return None

    refused = hub.call(repository, ask, f": {CARD_FILE}")
    if refused is None:
        return
    try:
        said = "; ".join(str(error["message"]) for error in json.loads(refused)["errors"])
    except (ValueError, TypeError, KeyError):
        said = refused
    raise HubError(
        f"{repository}: {CARD_FILE}: the Hub refuses its front matter: {hub.clean(said)[:300]}; correct it in the {CARD_FILE} of the "
        "folder; nothing was pushed"
    )


def _changes(folder: Path, card: Card, remote: Repository, ours: Set[str]) -> tuple[Change, ...]:
    """ours: what of the repository an earlier push brought there."""
    local = _local_files(folder, card)
    changes = []
    for name, byte_count in sorted(local.items()):
        there = remote.files.get(name)
        kind = NEW if there is None else SAME if _is_same(there, name, byte_count, folder, card) else CHANGED
        changes.append(Change(name, kind, byte_count))
    # As long as the manifest stays, all that it lists does, and the evaluations there are of it.
    stays = any(change.name == MANIFEST_FILE and change.kind == SAME for change in changes)
    gone = [] if stays else sorted(ours - local.keys())
    return (*changes, *(Change(name, DELETED, 0) for name in gone))


def _is_same(there: RemoteFile, name: str, byte_count: int, folder: Path, card: Card) -> bool:
    if there.byte_count != byte_count:
        return False
    if name == CARD_FILE:
        return there.is_of([card.text.encode()])
    return there.is_of(pieces_of(folder / name))


def _send(hub: Hub, folder: Path, remote: Repository, report: PushReport, options: PushOptions) -> tuple[str, str]:
    """Commit and address of it, or of the pull request."""
    operations = _operations(hub, folder, remote, report, options)
    title = options.message or f"pqweights push: {read_manifest(folder).kind}"

    def commit() -> Any:
        try:
            return hub.api.create_commit(
                remote.id,
                operations,
                commit_message=title,
                revision=report.branch,
                parent_commit=remote.commit or None,
                create_pr=options.create_pr,
            )
        except ValueError as error:
            if type(error) is not ValueError:
                raise  # another one is a refusal, or not an answer
            raise HubError(f"{remote.id}: the commit is refused: {hub.clean(str(error))[:300]}") from None

    try:
        info = hub.call(remote.id, commit, attempts=1 if options.create_pr else None)
    except HubError:
        # The reply may have been lost, not the commit.
        after = None if options.create_pr else hub.repository(remote.id, report.branch)
        if after is None or any(c.kind != SAME for c in _changes(folder, report.card, after, frozenset())):
            raise
        return after.commit, f"{hub.endpoint}/{remote.id}"
    return str(info.oid), str(info.pr_url if options.create_pr else f"{hub.endpoint}/{remote.id}")


def _operations(hub: Hub, folder: Path, remote: Repository, report: PushReport, options: PushOptions) -> list[Any]:
    """What the commit does. Large files are sent here, one by one: each is kept if the next one fails."""
    library: Any = hub.library
    total, done = report.sent_bytes, 0
    operations: list[Any] = []
    for change in report.changes:
        if change.kind == DELETED:
            operations.append(library.CommitOperationDelete(path_in_repo=change.name))
        elif change.kind != SAME:
            options.progress(done, total, change.name)
            content = report.card.text.encode() if change.name == CARD_FILE else str(folder / change.name)
            operations.append(hub.upload(remote, report.branch, change.name, content, options.create_pr))
            done += change.byte_count
            options.progress(done, total, change.name)
    return operations
