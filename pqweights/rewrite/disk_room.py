"""What an interrupted run has already taken on the disks of this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pqweights.checkpoint.writer import partial_path
from pqweights.rewrite.part_files import FETCHED_FOLDER


def fetched_bytes_in(work: Path) -> int:
    """Return how many bytes fetched files take in a work folder."""
    fetched = work / FETCHED_FOLDER
    return sum(path.stat().st_blocks * 512 for path in fetched.iterdir()) if fetched.is_dir() else 0


def bytes_of_shard(work: Path, shard: str, *published: Path) -> int:
    """Return how many bytes a shard takes, in a work folder partial or staged, or under its final name."""
    staged = work / shard
    for path in (partial_path(staged), staged, *published):
        with contextlib.suppress(FileNotFoundError):  # not begun yet, or just renamed by a run that is writing
            return path.stat().st_blocks * 512
    return 0
