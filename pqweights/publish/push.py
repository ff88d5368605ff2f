"""Push: verify a finished folder, make its card, and bring both to a repository on the Hub in one commit.

What the repository has already is not sent again, and neither are large files that were sent before a commit failed:
the same command continues where it stopped. Of the files in the repository, only those of an earlier push of the same
export are deleted; those of other exports stay, and so do their manifests. Nothing is written to the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.names import CARD_FILE, EVALUATION_FILE, MANIFEST_FILE, PICTURE_FILE
from pqweights.common.options import Options
from pqweights.common.threads import usable_cores
from pqweights.common.units import counted
from pqweights.convert.manifest import Manifest, evaluations_of, manifest_beside, read_manifest, shards_of
from pqweights.errors import HubError, HubUnavailableError, MasterError
from pqweights.publish.card import MAIN, Card, PublishOptions, make_card, read_card
from pqweights.publish.destination import (
    Pushed,
    card_branch,
    card_on_hub,
    check_private,
    check_room_for,
    check_weights,
    checked_destination,
    earlier_pushes,
    export_of,
    find_destination,
)
from pqweights.results.evaluation_record import MAX_BYTES, EvaluationRecord, parse_records
from pqweights.results.verify import verify
from pqweights.storage.hub import Hub
from pqweights.storage.repository import Repository, Sending, has_content, open_repository, pieces_of

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

    repository, branch: where it went
    created: whether the repository did not exist before; None if that was not checked
    replaced: the commit that the branch had; empty if there was none
    url: the address of the repository
    changes: what happened to each file
    card: README.md as it was pushed
    commit: the commit; None if nothing was pushed
    not_checked: of a dry run, why the Hub was not asked what it holds; None if it was
    """

    repository: str
    branch: str
    created: bool | None
    replaced: str
    url: str
    changes: tuple[Change, ...]
    card: Card
    commit: str | None = None
    not_checked: str | None = None

    @property
    def sent_bytes(self) -> int:
        """The size of the files that the repository does not have, or may not have, in bytes."""
        return sum(change.byte_count for change in self.changes if change.change in (NEW, CHANGED, UNKNOWN))

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
            "files": [{"name": c.name, "change": c.change, "bytes": c.byte_count} for c in self.changes],
        }


def begin_sending(repository: str, reached: Options, manifest: Manifest, *, private: bool) -> Sending:
    """Return where a run sends its files, one by one; the repository is created if it does not exist.

    manifest: what the manifest of the result will state
    private: see PublishOptions

    Raises HubError if the repository cannot take the result.
    """
    repository, branch = checked_destination(repository, reached.revision)
    hub = Hub(reached.token, reached.tell)
    hub.call("login", lambda: hub.api.whoami())
    remote, has_branch = find_destination(hub, repository, branch, private=private)
    _earlier(remote, manifest, {shard.file for shard in shards_of(manifest)})
    return Sending(_made_ready(remote, branch, has_branch, private=private), branch)


def push(
    folder: Path,
    repository: str,
    reached: Options,
    *,
    options: PublishOptions = PublishOptions(),
    sent: Mapping[str, FileState] = {},
) -> PushReport:
    """Verify a master or an export, make its card, and upload both to a branch of a repository.

    folder: the master or export
    repository: ORG/NAME; created if it does not exist
    reached: how the Hub is used; its revision is the branch, by default main, created if it does not exist
    options: what is asked of the push
    sent: what the branch holds of a run that has sent its files with tensors; those that are not in the folder are
        taken for sent if they have their sizes

    Raises MasterError for a broken folder, HubError, OutputError.
    """
    repository, branch = checked_destination(repository, reached.revision)
    stamps = _stamps(folder)
    old_card = read_card(folder)
    hub = Hub(reached.token, reached.tell)
    remote, has_branch, not_checked = _destination(hub, repository, branch, options)
    manifest = read_manifest(folder)
    there = _sent_before(manifest, stamps, sent)
    _check_folder(folder, options, there)
    same, others = _earlier(remote, manifest, stamps.keys())
    card_options = PublishOptions(repository=remote.id, revision=card_branch(branch), base_model=options.base_model)
    beside = [(one.manifest, _records(remote, one)) for one in others]
    card = make_card(folder, card_options, old=old_card, pushed=card_on_hub(remote), beside=beside)
    files = _files(remote, folder, manifest, card=card, same=same, others=others)
    files = {name: content for name, content in files.items() if name not in there}
    changes = list(_changes(files, remote, options))
    if any(change.change != SAME and files[change.name] == folder / MANIFEST_FILE for change in changes):
        # While the manifest stays, so does everything that it lists, and so do the evaluations of it.
        left = sorted(_left_behind(remote, same, others) - files.keys() - there.keys())
        changes += [Change(name, DELETED, 0) for name in left]
    if not_checked is not None:
        changes = [replace(change, change=UNKNOWN) for change in changes]
    changes += [Change(name, SAME, byte_count) for name, byte_count in there.items()]
    report = PushReport(
        repository=remote.id,
        branch=branch,
        created=None if not_checked else not remote.commit,
        replaced=remote.commit,
        url=f"{hub.endpoint}/{remote.id}",
        changes=tuple(changes),
        card=card,
        not_checked=not_checked,
    )
    if not_checked is None and any(change.name == CARD_FILE and change.change != SAME for change in changes):
        _check_card(hub, remote.id, card)
    if options.dry_run or all(change.change == SAME for change in changes):
        return report
    _check_unchanged(folder, stamps)
    remote = _made_ready(remote, branch, has_branch, private=options.private)
    operations = _operations(remote, files, report, options)
    _check_unchanged(folder, stamps)
    title = options.message or f"pqweights push: {manifest.kind}"
    return replace(report, commit=_commit(remote, branch, operations, title, files, options))


def _destination(
    hub: Hub, repository: str, branch: str, options: PublishOptions
) -> tuple[Repository, bool, str | None]:
    """Return the repository, whether it has the branch, and why that could not be checked in a dry run."""
    try:
        hub.call("login", lambda: hub.api.whoami())
        return *find_destination(hub, repository, branch, private=options.private), None
    except HubUnavailableError as error:
        if not options.dry_run:
            raise
        return Repository(hub, repository), False, str(error)


def _sent_before(manifest: Manifest, stamps: Mapping[str, Stamp], sent: Mapping[str, FileState]) -> dict[str, int]:
    """Return the files with tensors that a run has sent and that are not in the folder, with their sizes."""
    sizes = {shard.file: shard.file_bytes for shard in shards_of(manifest) if stamps[shard.file] is None}
    return {name: size for name, size in sizes.items() if name in sent and sent[name].byte_count == size}


def _earlier(remote: Repository, manifest: Manifest, names: Set[str]) -> tuple[list[Pushed], list[Pushed]]:
    """Return the earlier pushes of the same export, and those of others.

    names: the files of the result

    Raises HubError if the repository cannot take the result beside them.
    """
    pushed = earlier_pushes(remote)
    same = [one for one in pushed if export_of(one.manifest) == export_of(manifest)]
    others = [one for one in pushed if one not in same]
    check_room_for(manifest, others, remote)
    if not manifest.container:
        check_weights(remote, {name for one in pushed for name in one.files} | names)
    return same, others


def _records(remote: Repository, pushed: Pushed) -> tuple[EvaluationRecord, ...]:
    """Return what was measured of a result in the repository; nothing if its file cannot be read. Raises HubError."""
    name = evaluations_of(pushed.manifest_file)
    if name not in remote.files or remote.files[name].byte_count > MAX_BYTES:
        return ()
    with contextlib.suppress(MasterError):
        return parse_records(remote.read_whole(name), hashlib.sha256(pushed.content).hexdigest())
    return ()


def _check_folder(folder: Path, options: PublishOptions, sent: Container[str]) -> None:
    """Verify the folder, without files that were sent. Raises MasterError for the first problem."""
    checked = verify(folder, threads=options.threads or usable_cores(), sent=sent, progress=options.verifying)
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


def _files(
    remote: Repository,
    folder: Path,
    manifest: Manifest,
    *,
    card: Card,
    same: Sequence[Pushed],
    others: Sequence[Pushed],
) -> dict[str, Path | bytes]:
    """Return what is pushed by its name in the repository: paths, or the content itself.

    same: the earlier pushes of this export
    others: those of other exports. One in safetensors keeps its manifest and its card; the manifest of GGUF files gets
        another name beside the new one.

    Raises HubError.
    """
    listed = (*(shard.file for shard in shards_of(manifest)), *manifest.files)
    files: dict[str, Path | bytes] = {name: folder / name for name in listed}
    own = manifest_beside(manifest) if any(other.is_folder for other in others) else MANIFEST_FILE
    files[own], evaluations = folder / MANIFEST_FILE, folder / EVALUATION_FILE
    if evaluations.is_file():
        files[evaluations_of(own)] = evaluations
    moved = {one.manifest_file: (one, manifest_beside(one.manifest)) for one in others if not one.is_folder}
    content = (folder / MANIFEST_FILE).read_bytes()
    moved |= {one.manifest_file: (one, own) for one in same if one.content == content}
    for one, name in moved.values():
        there = evaluations_of(one.manifest_file)
        if one.manifest_file != name and name not in files:
            files[name] = one.content
        if one.manifest_file != name and there in remote.files and evaluations_of(name) not in files:
            files[evaluations_of(name)] = remote.read_whole(there)
    if own == MANIFEST_FILE:
        files |= {CARD_FILE: card.text.encode()} | ({PICTURE_FILE: card.picture.encode()} if card.picture else {})
    return dict(sorted(files.items()))


def _left_behind(remote: Repository, same: Sequence[Pushed], others: Sequence[Pushed]) -> Set[str]:
    """Return the files of earlier pushes of an export that no other export in the repository needs.

    With the manifest of GGUF files, their evaluations get another name, too.
    """
    kept = {name for one in others for name in one.files}
    if any(one.manifest_file == MANIFEST_FILE and not one.is_folder for one in others):
        kept -= {EVALUATION_FILE}
        return {name for one in same for name in one.files} - kept | ({EVALUATION_FILE} & remote.files.keys())
    return {name for one in same for name in one.files} - kept


def _check_unchanged(folder: Path, stamps: Mapping[str, Stamp]) -> None:
    """Check that the files of a folder are those that were verified. Raises MasterError."""
    for name, stamp in stamps.items():
        if _stamp(folder / name) != stamp:
            raise MasterError(
                f"{folder}: {name}: was changed after it was verified: nothing was pushed; run the same command again "
                "once nothing writes to the folder"
            )


def _changes(files: Mapping[str, Path | bytes], remote: Repository, options: PublishOptions) -> tuple[Change, ...]:
    """Return what happens to each file that is pushed."""
    sizes = {
        name: content.stat().st_size if isinstance(content, Path) else len(content) for name, content in files.items()
    }
    compared = [name for name in files if name in remote.files and remote.files[name].byte_count == sizes[name]]
    total, done = sum(sizes[name] for name in compared), 0

    def pieces(name: str) -> Iterator[bytes]:
        nonlocal done
        content = files[name]
        for piece in pieces_of(content) if isinstance(content, Path) else [content]:
            done += len(piece)
            options.comparing(done, total, name)
            yield piece

    same = {name for name in compared if has_content(remote.files[name], pieces(name))}
    known = dict.fromkeys(remote.files, CHANGED) | dict.fromkeys(same, SAME)
    return tuple(Change(name, known.get(name, NEW), byte_count) for name, byte_count in sizes.items())


def _check_card(hub: Hub, repository: str, card: Card) -> None:
    """Ask the Hub whether it accepts the front matter of a card.

    The official client asks only with the commit, when everything else was sent.

    Raises HubError.
    """

    def ask() -> str | None:
        try:
            hub.client.ModelCard(card.text).validate()
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


def _made_ready(remote: Repository, branch: str, has_branch: bool, *, private: bool) -> Repository:
    """Create the repository and the branch if they do not exist, and return what the branch holds. Raises HubError."""
    hub, repository = remote.hub, remote.id
    if not remote.commit:
        hub.call(repository, lambda: hub.api.create_repo(repository, private=private, exist_ok=True))
        remote = open_repository(hub, repository)
        check_private(remote, private)
        has_branch = branch == MAIN
    if not has_branch:
        hub.call(repository, lambda: hub.api.create_branch(repository, branch=branch, exist_ok=True))
        remote = open_repository(hub, repository, branch)
    return remote


def _operations(
    remote: Repository, files: Mapping[str, Path | bytes], report: PushReport, options: PublishOptions
) -> list[Any]:
    """Send the large files, one by one, and return the operations of the commit.

    Those that were sent stay on the Hub if a later one fails.
    """
    hub, done = remote.hub, 0
    operations: list[Any] = []
    if deleted := [change.name for change in report.changes if change.change == DELETED]:
        hub.tell(f"{remote}: removing what an earlier push of this export left: {', '.join(deleted)}")
        operations += [hub.client.CommitOperationDelete(path_in_repo=name) for name in deleted]
    for change in (change for change in report.changes if change.change in (NEW, CHANGED)):
        options.progress(done, report.sent_bytes, change.name)
        operations.append(remote.upload(change.name, files[change.name], report.branch))
        done += change.byte_count
        options.progress(done, report.sent_bytes, change.name)
    return operations


def _commit(
    remote: Repository,
    branch: str,
    operations: Sequence[Any],
    title: str,
    files: Mapping[str, Path | bytes],
    options: PublishOptions,
) -> str:
    """Commit to a branch, and return the commit. Raises HubError."""
    hub, id = remote.hub, remote.id

    def commit() -> Any:
        try:
            return hub.api.create_commit(
                id, operations, commit_message=title, revision=branch, parent_commit=remote.commit or None
            )
        except ValueError as error:
            if type(error) is not ValueError:
                raise  # its subclasses are refusals, or not an answer of a Hub
            raise HubError(f"{id}: the commit is refused: {hub.clean(str(error))[:300]}") from None

    try:
        return str(hub.call(id, commit).oid)
    except HubError:
        after = open_repository(hub, id, branch)
        if any(change.change != SAME for change in _changes(files, after, options)):
            raise
        return after.commit  # only the reply to the commit was lost
