"""What a push changes in a repository: the files of the folder, compared with those that the repository holds."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from pqweights.card import Card
from pqweights.checkpoint.names import CARD_FILE, EVALUATION_FILE, MANIFEST_FILE
from pqweights.hub.repository import RemoteFile, Repository, pieces_of
from pqweights.rewrite.manifest import read_manifest, shards_of

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


def find_changes(folder: Path, card: Card, remote: Repository, *, pushed: Set[str]) -> tuple[Change, ...]:
    """Return what happens to each file of the folder, and to the files of an earlier push that the folder lacks.

    pushed: the files of the repository that an earlier push put there
    """
    local = _local_files(folder, card)
    changes = []
    for name, byte_count in sorted(local.items()):
        there = remote.files.get(name)
        kind = NEW if there is None else SAME if _is_same(there, folder, card, byte_count=byte_count) else CHANGED
        changes.append(Change(name, kind, byte_count))
    # While the manifest stays, so does everything that it lists, and so do the evaluations of it.
    stays = any(change.name == MANIFEST_FILE and change.kind == SAME for change in changes)
    deleted = [] if stays else sorted(pushed - local.keys())
    return (*changes, *(Change(name, DELETED, 0) for name in deleted))


def manifest_files(folder: Path) -> dict[str, int]:
    """Return the sizes of the manifest and of the files that it lists, in bytes."""
    manifest = read_manifest(folder)
    files = {shard.file: shard.file_bytes for shard in shards_of(manifest)}
    files |= {name: record.bytes for name, record in manifest.files.items()}
    return files | {MANIFEST_FILE: (folder / MANIFEST_FILE).stat().st_size}


def _local_files(folder: Path, card: Card) -> dict[str, int]:
    """The sizes of the files that a push puts into the repository, in bytes."""
    files = manifest_files(folder)
    if (folder / EVALUATION_FILE).is_file():
        files[EVALUATION_FILE] = (folder / EVALUATION_FILE).stat().st_size
    return files | {CARD_FILE: len(card.text.encode())}


def _is_same(there: RemoteFile, folder: Path, card: Card, *, byte_count: int) -> bool:
    if there.byte_count != byte_count:
        return False
    if there.name == CARD_FILE:
        return there.has_content([card.text.encode()])
    return there.has_content(pieces_of(folder / there.name))
