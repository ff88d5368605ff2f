"""The folder in which a calibration works: locked, private, kept when it does not reach its end, and gone when it does.

What lies in it took hours, so only three things remove it: the end of the calibration, a calibration of something else,
and a source of which it is proven that it changed. No other error does: a disk that failed, or memory that another
program took, is there again the next time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.writer import PARTIAL_SUFFIX, DiskNeed, check_room, disk_errors, write_whole
from pqweights.common.units import size_text
from pqweights.convert.journal import is_under_way
from pqweights.convert.manifest import Manifest, parse_manifest
from pqweights.errors import OutputError, PqweightsError, SourceChangedError
from pqweights.runtime.packages import is_out_of_memory, memory_shortage
from pqweights.storage import Store
from pqweights.storage.local import LOCK_FILE, locked, make_private

# States that the folder is ours, and what is calibrated.
MARK_FILE = "identity"
_MARK = "pqweights calibration "
# What is there of a calibration that has not begun.
_NOT_WORK = {LOCK_FILE, MARK_FILE, MARK_FILE + PARTIAL_SUFFIX}
# What a calibration makes.
_OURS = ("*.safetensors", "*.safetensors.*", "codes-*", "draft", "passes", "tried")


def folder_beside(out: Store) -> Path:
    """Return where a calibration for a result works. That for a remote one lies among the user's scratch folders."""
    local = out.work if out.is_elsewhere else out.work.parent
    return local.parent / f".{local.name}.calibration"


@contextlib.contextmanager
def worked_on_in(
    folder: Path, out: object, key: str, threads: int, is_same: Callable[[], bool] = lambda: True
) -> Iterator[Path]:
    """Yield a locked folder for a calibration, which goes at the end. After an error it stays, if it holds anything.

    out: the result, for messages
    key: what the calibration depends on: what is there of another one goes first
    threads: with how many torch computes meanwhile
    is_same: asked after an error about a source that changed: whether what was learned may be true of it all the same

    Raises OutputError for a folder that is not ours; errors of the calibration say where its work is.
    """
    import torch  # others only look for the folder

    before = torch.get_num_threads()
    make_private(folder)
    _check_ours(folder)
    with locked(folder, out):
        if _key_in(folder) != key:
            with disk_errors(folder):
                _clear(folder)
            write_whole(folder, folder / MARK_FILE, [f"{_MARK}{key}\n".encode()])
        is_over = False
        try:
            torch.set_num_threads(threads)
            with _saying_where(folder, is_same):
                yield folder
            is_over = True
        except SourceChangedError:
            is_over = not is_same()
            raise
        finally:
            torch.set_num_threads(before)
            if is_over or not _holds_work(folder):
                _remove(folder)


def _check_ours(folder: Path) -> None:
    """Raise OutputError for a folder that something else made."""
    if _key_in(folder) is None and (others := sorted({path.name for path in folder.iterdir()} - _NOT_WORK)):
        raise OutputError(
            f"{folder}: holds {others[0]!a}, which no calibration made: move the folder away, or choose another name "
            "for the result"
        )


def _key_in(folder: Path) -> str | None:
    """Return which calibration a folder is of; None if it is of none."""
    try:
        stated = (folder / MARK_FILE).read_text(errors="replace")
    except OSError:
        return None
    return stated.removeprefix(_MARK).strip() if stated.startswith(_MARK) else None


def _holds_work(folder: Path) -> bool:
    return not {path.name for path in folder.iterdir()} <= _NOT_WORK


@contextlib.contextmanager
def _saying_where(folder: Path, is_same: Callable[[], bool]) -> Iterator[None]:
    """Have errors say where the work is that a calibration leaves, and that the same command goes on with it."""
    try:
        yield
    except (PqweightsError, OSError, MemoryError, RuntimeError) as error:
        expected = error if isinstance(error, PqweightsError) else _expected(error)
        is_over = not _holds_work(folder) or (isinstance(error, SourceChangedError) and not is_same())
        if expected is None or (is_over and expected is error):
            raise
        if is_over:
            raise expected from error
        kept = f"finished work is kept in {folder}; the same command continues it"
        raise type(expected)(f"{expected}; {kept}") from error


def _expected(error: OSError | MemoryError | RuntimeError) -> PqweightsError | None:
    """Return the line for an error of the system; None for a bug."""
    if isinstance(error, OSError):
        return OutputError(f"{error.filename or 'input or output'}: {error.strerror or error}")
    return memory_shortage("the calibration", error) if is_out_of_memory(error) else None


def _clear(folder: Path) -> None:
    """Remove what a calibration made, and nothing else that somebody may have put there."""
    for path in (path for pattern in _OURS for path in folder.glob(pattern)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove a folder whose lock is held, unless it holds something that is not ours."""
    with contextlib.suppress(OSError):
        _clear(folder)
        if not _holds_work(folder):
            for name in (MARK_FILE + PARTIAL_SUFFIX, MARK_FILE, LOCK_FILE):
                (folder / name).unlink(missing_ok=True)
            os.rmdir(folder)


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


def finished_manifest(out: Store, *, overwrite: bool) -> Manifest | None:
    """Return the manifest of a finished result that is to stay; None if there is none."""
    if overwrite or MANIFEST_FILE not in out.names() or is_under_way(out):
        return None
    data = out.read(MANIFEST_FILE)
    return None if data is None else parse_manifest(data)


def stated_by_result(out: Store, what: str, key: str, *, overwrite: bool) -> dict[str, Any] | None:
    """Return what the manifest of a finished result says of something that was learned; None without a result.

    what: its key in the manifest
    key: on what it depends

    Raises OutputError for another result.
    """
    manifest = finished_manifest(out, overwrite=overwrite)
    if manifest is None:
        return None
    stated = manifest.made_by.get(what)
    if what == "fit" and isinstance(stated, dict):
        stated = stated.get("sensitivity")
    if not isinstance(stated, dict) or stated.get("identity") != key:
        raise OutputError(
            f"{out}: holds another result, which this calibration did not make; pass `overwrite` to replace it, or "
            "choose another folder"
        )
    return stated
