"""Where a push goes: the repository and branch, what they hold, and whether they can take it."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import NamedTuple

from pqweights.checkpoint.companions import is_weight_file
from pqweights.checkpoint.config import MAX_CARD_BYTES
from pqweights.checkpoint.gguf.file import SUFFIX as GGUF_SUFFIX
from pqweights.checkpoint.names import CARD_FILE, MANIFEST_FILE
from pqweights.common.units import counted
from pqweights.convert.manifest import Manifest, evaluations_of, manifest_beside, parse_manifest, shards_of
from pqweights.convert.plan import EXPORT
from pqweights.errors import HubError, MasterError
from pqweights.publish.card import MAIN, card_text, check_branch
from pqweights.storage.addresses import RepositoryName, is_repository_id, repository_named
from pqweights.storage.hub import Hub
from pqweights.storage.repository import Repository, open_repository
from pqweights.targets import target_name

MAX_MANIFEST_BYTES = 256_000_000  # what a larger manifest on the Hub lists is not looked at
_COMMIT = re.compile(r"[0-9a-fA-F]{40}")
_PULL_REQUEST = re.compile(r"refs/pr/\d+")


def checked_destination(repository: str, revision: str | None) -> tuple[str, str]:
    """Return the repository and the branch that is pushed to.

    Raises HubError, OptionError, OutputError for names that cannot be pushed to.
    """
    named = repository_named(repository) or RepositoryName(repository.rstrip("/"))
    if is_repository_id(named.id) and not named.file:
        repository, revision = named.id, revision or named.revision
    else:
        hint = "" if "/" in repository else "; include the user or organization"
        raise HubError(f"{repository}: expected ORG/NAME{hint}")
    branch = (revision or MAIN).removeprefix("refs/heads/")
    check_branch(branch)
    if _COMMIT.fullmatch(branch):
        raise HubError(
            f"{repository}: `revision` {branch}: expected a branch, found a commit; name a branch to push to"
        )
    return repository, branch


def card_branch(branch: str) -> str:
    """Return the branch that the card names; a pull request is made to be merged into main."""
    return MAIN if _PULL_REQUEST.fullmatch(branch) else branch


def find_destination(hub: Hub, repository: str, branch: str, *, private: bool) -> tuple[Repository, bool]:
    """Return what a branch holds, and whether it exists; if it does not, what main holds, or an empty repository.

    Raises HubError if they cannot take this push.
    """
    exists = bool(hub.call(repository, lambda: hub.api.repo_exists(repository)))
    has_branch = exists and (branch == MAIN or _has_branch(hub, repository, branch))
    if not exists:
        return Repository(hub, repository), has_branch
    remote = open_repository(hub, repository, branch if has_branch else MAIN)
    check_private(remote, private)
    return remote, has_branch


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


class Pushed(NamedTuple):
    """A result that an earlier push brought.

    manifest_file: the name of its manifest in the repository
    content: of that
    manifest: what it says
    files: those of the repository that are what it says, itself and its evaluations included
    """

    manifest_file: str
    content: bytes
    manifest: Manifest
    files: Set[str]

    @property
    def is_folder(self) -> bool:
        """Whether it has a configuration, of which a repository has one; a GGUF file needs nothing beside it."""
        return not self.manifest.container


def earlier_pushes(remote: Repository) -> list[Pushed]:
    """Return the results in a repository, as far as their manifests can be read. Raises HubError.

    The manifests are not trusted, because anybody may have written them.
    """
    names = [name for name in remote.files if name == MANIFEST_FILE or name.endswith(f".{MANIFEST_FILE}")]
    pushed = []
    for file in (name for name in names if "/" not in name):
        if remote.files[file].byte_count > MAX_MANIFEST_BYTES:
            continue
        content = remote.read_whole(file)
        try:
            manifest = parse_manifest(content)
            files = _files_of(manifest, file, remote)
        except (MasterError, ValueError, TypeError, OverflowError, RecursionError):
            continue
        if file in (MANIFEST_FILE, manifest_beside(manifest)):
            pushed.append(Pushed(file, content, manifest, files))
    return pushed


def _files_of(manifest: Manifest, manifest_file: str, remote: Repository) -> set[str]:
    """Return the files of a repository that are what a manifest in it says of them."""
    listed: dict[str, tuple[int, str | None]] = {
        **{name: (record.bytes, record.sha256) for name, record in manifest.files.items()},
        **{shard.file: (shard.file_bytes, None) for shard in shards_of(manifest)},
    }
    pushed = {manifest_file, evaluations_of(manifest_file)} & remote.files.keys()
    for name, (byte_count, sha256) in listed.items():
        there = remote.files.get(name)
        if there is None or there.byte_count != byte_count:
            continue
        # The Hub lists the SHA-256 of large files only, and the manifest that of other files than shards.
        if sha256 is None or len(there.stamp) != len(sha256) or there.stamp == sha256:
            pushed.add(name)
    return {name for name in pushed if name != CARD_FILE and not any(part.startswith(".") for part in name.split("/"))}


def export_of(manifest: Manifest) -> tuple[str, str, str]:
    """Return what two pushes of one export have in common: its kind, the target, and the name of GGUF files."""
    target = manifest.made_by.get("target", "") if manifest.kind == EXPORT else ""
    return manifest.kind, target_name(target) or str(target), str(manifest.container.get("name", ""))


def check_room_for(ours: Manifest, others: Sequence[Pushed], remote: Repository) -> None:
    """Refuse a repository that holds another result in safetensors: its configuration would be that of this one.

    others: the results in the repository, without earlier pushes of the same export

    Raises HubError.
    """
    folder = next((pushed for pushed in others if pushed.is_folder), None)
    if folder is not None and not ours.container:
        kind, target, _ = export_of(folder.manifest)
        raise HubError(
            f"{remote.id}: holds {f'an export for {target[:40]}' if target else f'a {kind}'}, which this one would "
            f"overwrite in part ({min(folder.files)!a}): choose another repository or branch, or delete its files there"
        )


def check_weights(remote: Repository, ours: Set[str]) -> None:
    """Refuse a repository with weights that pqweights did not push, because a loader might take those.

    ours: the files of earlier pushes, and those that this push replaces

    Raises HubError.
    """
    foreign = sorted({name for name in remote.files if is_weight_file(name) and not name.endswith(GGUF_SUFFIX)} - ours)
    if foreign:
        raise HubError(
            f"{remote.id}: holds {foreign[0]!a}, which pqweights did not push ({counted(len(foreign), 'such file')}): "
            "choose another repository or branch, or delete such files there"
        )


def card_on_hub(remote: Repository) -> str | None:
    """Return the card in the repository, or None if it has none. Raises HubError if it is not a text."""
    if CARD_FILE not in remote.files:
        return None
    is_too_large = remote.files[CARD_FILE].byte_count > MAX_CARD_BYTES
    try:
        return card_text(bytes(MAX_CARD_BYTES + 1) if is_too_large else remote.read_whole(CARD_FILE))
    except ValueError as error:
        raise HubError(f"{remote.id}: {CARD_FILE}: {error}; correct it there, or delete it") from None
