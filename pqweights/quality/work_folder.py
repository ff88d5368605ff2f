"""The folder in which a calibration works: locked, kept when it is interrupted, and gone when it is done."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pqweights.checkpoint.writer import DiskNeed, check_room, disk_errors
from pqweights.common.units import size_text
from pqweights.errors import EvaluationError, RecipeError, SourceError
from pqweights.storage import Store
from pqweights.storage.local import locked

# Errors that trying again repeats; and what is there of a calibration that has not begun.
REPEATED = (SourceError, RecipeError, EvaluationError)
_NOT_WORK = {"lock", "identity"}


def folder_beside(out: Store, key: str) -> Path:
    """Return where a calibration for a result works. key: what it depends on, of which a remote one has its name"""
    if out.is_elsewhere:
        return Path(tempfile.gettempdir()) / f"pqweights-{os.getuid()}-{key[:16]}.calibration"
    local = out.work.parent
    return local.parent / f".{local.name}.calibration"


@contextlib.contextmanager
def worked_on_in(folder: Path, out: object, key: str, threads: int) -> Iterator[Path]:
    """Yield a locked folder for a calibration, which goes at the end, or after an error that trying again repeats.

    One in which nothing was worked on goes after any error.

    out: the result, for messages
    key: what the calibration depends on: what is there of another one goes first
    threads: with how many torch computes meanwhile
    """
    import torch  # others only look for the folder

    before = torch.get_num_threads()
    with locked(folder, out):
        stated = folder / "identity"
        with disk_errors(folder):
            if not stated.exists() or stated.read_text() != key:
                _clear(folder)
                stated.write_text(key)
        is_over = False
        try:
            torch.set_num_threads(threads)
            yield folder
            is_over = True
        except REPEATED:
            is_over = True
            raise
        finally:
            torch.set_num_threads(before)
            if is_over or {path.name for path in folder.iterdir()} <= _NOT_WORK:
                shutil.rmtree(folder, ignore_errors=True)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name not in _NOT_WORK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_space(work: Path, needed: int, beside: Mapping[Path, int]) -> None:
    """Raise OutputError if there is no room for what a calibration works on, and for results on the same disk.

    beside: the bytes of a result, by where it is made
    """
    present = sum(path.stat().st_size for path in work.rglob("*.safetensors"))
    what = f"{work}: a calibration needs {size_text(needed)}"
    needs = [DiskNeed(folder=work, byte_count=needed, present=present, what=what, remedy="take fewer tokens")]
    for folder, result_bytes in beside.items():
        what = f"{folder.parent}: the result needs {size_text(result_bytes)}"
        needs.append(DiskNeed(folder=folder, byte_count=result_bytes, what=what, remedy="choose another disk"))
    check_room(needs)
