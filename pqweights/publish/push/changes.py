"""What a push changes in a repository: the files of the folder, compared with those that the repository holds."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from pqweights.checkpoint.names import CARD_FILE, EVALUATION_FILE, MANIFEST_FILE
from pqweights.publish.card import Card
from pqweights.publish.push.folder import FinishedFolder
from pqweights.storage.hub.repository import RemoteFile, Repository, pieces_of

NEW, CHANGED, SAME, DELETED = "new", "changed", "same", "deleted"
UNKNOWN = "unknown"  # of a file that could not be compared with the repository


@dataclass(frozen=True)
class Change:
    """What happens to one file of the repository.

    name: its path
    kind: new, changed, same, deleted or unknown
    byte_count: its size after the push; 0 if it is deleted
    """

    name: str
    kind: str
    byte_count: int


def find_changes(
    folder: FinishedFolder, card: Card, remote: Repository, *, pushed: Set[str], hashes: Mapping[str, str]
) -> tuple[Change, ...]:
    """Return what happens to each file of the folder, and to the files of an earlier push that the folder lacks.

    pushed: the files of the repository that an earlier push put there
    hashes: the SHA-256, in hex, of files of the folder; another file is read if it may be the one in the repository
    """
    local = _local_files(folder, card)
    changes = []
    for name, byte_count in sorted(local.items()):
        there = remote.files.get(name)
        if there is None:
            kind = NEW
        elif name == CARD_FILE:
            kind = SAME if has_card(remote, card) else CHANGED
        else:
            same = there.byte_count == byte_count and _has_content(there, folder, hashes.get(name))
            kind = SAME if same else CHANGED
        changes.append(Change(name, kind, byte_count))
    # While the manifest stays, so does everything that it lists, and so do the evaluations of it.
    stays = any(change.name == MANIFEST_FILE and change.kind == SAME for change in changes)
    deleted = [] if stays else sorted(pushed - local.keys())
    return (*changes, *(Change(name, DELETED, 0) for name in deleted))


def has_card(remote: Repository, card: Card) -> bool:
    """Return whether the repository has exactly this card."""
    there = remote.files.get(CARD_FILE)
    return there is not None and there.has_content([card.text.encode()])


def _local_files(folder: FinishedFolder, card: Card) -> dict[str, int]:
    """The sizes of the files that a push puts into the repository, in bytes."""
    files = folder.sizes
    if (folder.path / EVALUATION_FILE).is_file():
        files[EVALUATION_FILE] = (folder.path / EVALUATION_FILE).stat().st_size
    return files | {CARD_FILE: len(card.text.encode())}


def _has_content(there: RemoteFile, folder: FinishedFolder, sha256: str | None) -> bool:
    """Whether a file in the repository has the content of the local one of the same size."""
    if sha256 is not None and there.sha256 is not None:
        return sha256 == there.sha256
    return there.has_content(pieces_of(folder.path / there.name))
