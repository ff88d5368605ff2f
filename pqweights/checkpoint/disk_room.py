"""Room on the disks of this machine: how much is free, and whether that is enough for all that one run writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pqweights.errors import OutputError


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """What a run writes into a folder.

    folder: the folder, which may not exist yet
    byte_count: how many bytes it writes there at most
    present: how many of them an interrupted run has already taken
    what: whose they are, and what for, as messages begin
    remedy: what to do if there is no room, besides freeing some
    """

    folder: Path
    byte_count: int
    what: str
    remedy: str
    present: int = 0

    @property
    def missing(self) -> int:
        """How many bytes must be free."""
        return max(0, self.byte_count - self.present)


def free_bytes(folder: Path) -> int:
    """Return how many bytes are free on the disk on which a folder is, or will be made."""
    return shutil.disk_usage(_existing(folder)).free


def check_room(needs: Sequence[DiskNeed]) -> None:
    """Check that there is room for all needs together; several may be of one disk.

    Raises OutputError.
    """
    for need in needs:
        _check_disk([need])
    by_disk: dict[int, list[DiskNeed]] = {}
    for need in needs:
        by_disk.setdefault(os.stat(_existing(need.folder)).st_dev, []).append(need)
    for together in by_disk.values():
        _check_disk(together)


def _check_disk(needs: Sequence[DiskNeed]) -> None:
    free, missing = free_bytes(needs[0].folder), sum(need.missing for need in needs)
    if missing > free:
        same = " on the same disk" if len(needs) > 1 else ""
        raise OutputError(
            f"{', and '.join(need.what for need in needs)}{same}, but {free} are free; free {missing - free} bytes "
            f"more, or {', or '.join(need.remedy for need in needs)}"
        )


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest one around it that exists."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
