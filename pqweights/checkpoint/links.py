"""Symbolic links in a folder that may come from anywhere: which of them are followed.

A folder that somebody else packed may hold `LICENSE -> ../../.ssh/id_rsa`. Copied into a result, and pushed, the target
would be public. So a link is followed only to files of the same folder that are not hidden, and in the cache of the
Hub, where every file is a link, to the blobs of its repository. Files of weights are an exception, because people keep
them on other disks: they are parsed, and nothing but tensors is taken from them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pqweights.checkpoint.names import PICKLE_SUFFIXES

# Files that are read as weights, and may therefore lie anywhere.
PARSED = (".safetensors", *PICKLE_SUFFIXES)
LEADS_OUTSIDE = "a link that leads out of the folder"


def leads_outside(root: Path, path: Path) -> bool:
    """Whether a path in `root` leads, through a link, to a hidden file or to what is not part of that folder.

    The folder itself may be reached through links.
    """
    folder, target = os.path.realpath(root), os.path.realpath(path)
    inner = os.path.relpath(target, folder).split(os.sep)
    if inner[0] != os.pardir:
        return any(part.startswith(".") and part != os.curdir for part in inner)
    return os.path.dirname(target) != _blobs(Path(folder))


def outside(name: str) -> str:
    """Return what is wrong with a file that is such a link."""
    return (
        f"{name}: {LEADS_OUTSIDE}: only weights may lie elsewhere; put the file itself in its place (cp -L copies it), "
        "or remove the link"
    )


def top_level_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder, but not of those in folders inside of it, nor of links out of it."""
    paths = (path for path in folder.iterdir() if path.is_file())
    return sorted(path.name for path in paths if not (path.is_symlink() and leads_outside(folder, path)))


def links_outside(root: Path, names: Iterable[str]) -> list[str]:
    """Return which of these files in a folder are links that lead out of it."""
    return [name for name in names if leads_outside(root, root / name)]


def _blobs(folder: Path) -> str | None:
    """Return where the files of a folder lie that is a snapshot in the cache of the Hub, or a part of one.

    Format: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    for snapshot in (folder, *folder.parents):
        snapshots = snapshot.parent
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
            return str(snapshots.parent / "blobs")
    return None
