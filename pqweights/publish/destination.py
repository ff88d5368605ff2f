"""Where a push goes: the repository and branch, what they hold, and whether they can take it."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

from pqweights.checkpoint.companions import is_weight_file
from pqweights.checkpoint.config import MAX_CARD_BYTES
from pqweights.checkpoint.names import CARD_FILE, EVALUATION_FILE, MANIFEST_FILE
from pqweights.common.units import counted
from pqweights.errors import HubError, MasterError
from pqweights.publish.card import MAIN, card_text, check_branch
from pqweights.rewrite.manifest import parse_manifest, shards_of
from pqweights.storage.hub.client import Hub
from pqweights.storage.hub.repository import Repository, is_repository_id
from pqweights.storage.hub.transfers import read_whole

MAX_MANIFEST_BYTES = 256_000_000  # what a larger manifest on the Hub lists is not looked at
_COMMIT = re.compile(r"[0-9a-fA-F]{40}")
_PULL_REQUEST = re.compile(r"refs/pr/\d+")


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The repository and branch of a push.

    branch: the branch that the commit is added to
    remote: what the branch holds; main if the branch will be created, empty if the repository will be
    exists, has_branch: whether the repository and the branch exist; None if that was not checked
    """

    branch: str
    remote: Repository
    exists: bool | None
    has_branch: bool | None

    @property
    def card_branch(self) -> str:
        """The branch that the card names; a pull request is made to be merged into main."""
        return MAIN if _PULL_REQUEST.fullmatch(self.branch) else self.branch


def checked_branch(repository: str, revision: str | None) -> str:
    """Return the branch that is pushed to. Raises HubError, OutputError for names that cannot be pushed to."""
    if not is_repository_id(repository):
        hint = "" if "/" in repository else "; include the user or organization"
        raise HubError(f"{repository}: expected ORG/NAME{hint}")
    branch = (revision or MAIN).removeprefix("refs/heads/")
    check_branch(branch)
    if _COMMIT.fullmatch(branch):
        raise HubError(
            f"{repository}: `revision` {branch}: expected a branch, found a commit; name a branch to push to"
        )
    return branch


def find_destination(hub: Hub, repository: str, branch: str, *, private: bool) -> Destination:
    """Look at the repository and the branch. Raises HubError if they cannot take this push."""
    exists = hub.exists(repository)
    has_branch = branch == MAIN or (exists and _has_branch(hub, repository, branch))
    remote = empty_repository(repository)
    if exists:
        remote = hub.repository(repository, branch if has_branch else MAIN)
        check_private(remote, private)
    return Destination(branch=branch, remote=remote, exists=exists, has_branch=has_branch)


def empty_repository(repository: str) -> Repository:
    """Return a repository that does not exist yet, or of which nothing is known."""
    return Repository(id=repository, commit="", files={})


def _has_branch(hub: Hub, repository: str, branch: str) -> bool:
    """Return whether there is such a branch. Raises HubError for a tag."""
    refs = hub.call(repository, lambda: hub.api.list_repo_refs(repository, include_pull_requests=True))
    if any(branch in (ref.name, ref.ref) for ref in [*refs.branches, *(refs.pull_requests or [])]):
        return True
    if any(branch in (ref.name, ref.ref) for ref in refs.tags):
        raise HubError(f"{repository}: `revision` {branch}: expected a branch, found a tag; name a branch to push to")
    return False


def check_private(remote: Repository, private: bool) -> None:
    """Check that a repository is private if the user wants it to be. Raises HubError."""
    if private and not remote.private:
        raise HubError(
            f"{remote.id}: exists and is public: make it private in its settings on the Hub, choose another "
            "repository, or leave out `private`; nothing was pushed"
        )


def files_of_earlier_push(hub: Hub, remote: Repository) -> Set[str]:
    """Return the files of an earlier push: those that are what the manifest in the repository says of them.

    There are none without a manifest that can be read. It is not trusted, because anybody may have written it.
    """
    file = remote.files.get(MANIFEST_FILE)
    if file is None or file.byte_count > MAX_MANIFEST_BYTES:
        return frozenset()
    try:
        manifest = parse_manifest(read_whole(hub, remote, file))
        shards = shards_of(manifest)
    except (MasterError, ValueError, TypeError, OverflowError, RecursionError):
        return frozenset()
    listed: dict[str, tuple[int, str | None]] = {
        **{name: (record.bytes, record.sha256) for name, record in manifest.files.items()},
        **{shard.file: (shard.file_bytes, None) for shard in shards},
    }
    pushed = {MANIFEST_FILE, EVALUATION_FILE} & remote.files.keys()
    for name, (byte_count, sha256) in listed.items():
        there = remote.files.get(name)
        if there is None or there.byte_count != byte_count:
            continue
        # The Hub lists the SHA-256 of large files only, and the manifest that of other files than shards.
        if None in (there.sha256, sha256) or there.sha256 == sha256:
            pushed.add(name)
    return {name for name in pushed if name != CARD_FILE and not any(part.startswith(".") for part in name.split("/"))}


def check_weights(remote: Repository, ours: Set[str]) -> None:
    """Refuse a repository with weights that pqweights did not push, because a loader might take those.

    ours: the files of an earlier push, and those that this push replaces

    Raises HubError.
    """
    foreign = sorted({name for name in remote.files if is_weight_file(name)} - ours)
    if foreign:
        raise HubError(
            f"{remote.id}: holds {foreign[0]!a}, which pqweights did not push ({counted(len(foreign), 'such file')}): "
            "choose another repository or branch, or delete such files there"
        )


def card_on_hub(hub: Hub, remote: Repository) -> str | None:
    """Return the card in the repository, or None if it has none. Raises HubError if it is not a text."""
    file = remote.files.get(CARD_FILE)
    if file is None:
        return None
    try:
        return card_text(
            bytes(MAX_CARD_BYTES + 1) if file.byte_count > MAX_CARD_BYTES else read_whole(hub, remote, file)
        )
    except ValueError as error:
        raise HubError(f"{remote.id}: {CARD_FILE}: {error}; correct it there, or delete it") from None
