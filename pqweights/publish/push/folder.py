"""The folder of a push: its manifest, the files that this lists, and whether they stay as they were verified."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.errors import MasterError
from pqweights.planning.plan import ShardPlan
from pqweights.rewrite.manifest import Manifest, read_manifest, shards_of


class Stamp(NamedTuple):
    """What changes when a file is replaced or written to, with its size in bytes."""

    device: int
    inode: int
    byte_count: int
    modified_ns: int
    changed_ns: int


@dataclass(frozen=True, kw_only=True)
class FinishedFolder:
    """A finished folder, as it was before it was verified.

    path: where it lies
    manifest: its manifest
    shards: its files with tensors
    stamps: those of the manifest and of the files that it lists, by name; a file that is missing has none
    """

    path: Path
    manifest: Manifest
    shards: tuple[ShardPlan, ...]
    stamps: dict[str, Stamp]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the manifest and of the files that it lists, in bytes."""
        sizes = {shard.file: shard.file_bytes for shard in self.shards}
        sizes |= {name: record.bytes for name, record in self.manifest.files.items()}
        return sizes | {MANIFEST_FILE: self.stamps[MANIFEST_FILE].byte_count}

    def check_unchanged(self, name: str) -> None:
        """Check that a file is the one that was verified. Raises MasterError."""
        if _stamp(self.path / name) != self.stamps.get(name):
            raise MasterError(
                f"{self.path}: {name}: was changed after it was verified: nothing was pushed; run the same command "
                "again once nothing writes to the folder"
            )


def read_folder(path: Path) -> FinishedFolder:
    """Read the manifest of a folder that is about to be verified. Raises MasterError."""
    manifest = read_manifest(path)
    shards = shards_of(manifest)
    names = [MANIFEST_FILE, *(shard.file for shard in shards), *manifest.files]
    stamps = {name: stamp for name in names if (stamp := _stamp(path / name)) is not None}
    return FinishedFolder(path=path, manifest=manifest, shards=shards, stamps=stamps)


def _stamp(path: Path) -> Stamp | None:
    """Return the stamp of a file; None if it cannot be looked at."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
