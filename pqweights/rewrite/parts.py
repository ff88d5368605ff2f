"""Parts of a run: some of its shards, written into its work folder by a process of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER
from pqweights.checkpoint.writer import disk_errors
from pqweights.errors import OutputError
from pqweights.rewrite.file_lock import take_lock
from pqweights.rewrite.journal import FinishedTensor, read_first_line, read_records
from pqweights.rewrite.part_files import PART_LOCK, TOKEN_PREFIX, part_prefix
from pqweights.rewrite.workspace import Workspace

# How long to wait for the process that had a part before, which the cluster believes to be dead.
WAIT_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class PartInputs:
    """Which part of which run a process makes.

    number: which part, from 0
    work: the digest of the run's identity
    key: see RunInputs
    token: what ResultWorkspace.part_token returned
    shards: the shards of the part, with their sizes in bytes
    known: tensors of the part that the run's own journal calls finished
    """

    number: int
    work: str
    key: str
    token: str
    shards: Mapping[str, int]
    known: Mapping[str, FinishedTensor]


@contextlib.contextmanager
def open_part(out: Path, inputs: PartInputs) -> Iterator[Workspace]:
    """Lock a part of the run into the folder `out`, and continue what another process left of it.

    Raises LockedError if another process goes on writing the part, OutputError if the run is no longer under way.
    """
    work, prefix = out / WORK_FOLDER, part_prefix(inputs.number)
    try:
        with disk_errors(out):
            lock = take_lock(work / (prefix + PART_LOCK), out, wait_seconds=WAIT_SECONDS, make_folder=False)
    except FileNotFoundError:
        raise _ended(out) from None
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, lock)
        _check_run(out, inputs)
        path = work / (prefix + JOURNAL_FILE)
        with disk_errors(path):
            journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        opened.callback(os.close, journal)
        records = {**inputs.known, **read_records(path)}
        yield Workspace(out, records=records, journal=journal, part=prefix)


def _check_run(out: Path, inputs: PartInputs) -> None:
    """Raise OutputError if the run that has this part is not under way any more."""
    journal = out / WORK_FOLDER / JOURNAL_FILE
    first = read_first_line(journal) if journal.exists() else None
    is_ours = (out / WORK_FOLDER / (TOKEN_PREFIX + inputs.token)).exists()
    if first is None or first.get("work") != inputs.work or not is_ours:
        raise _ended(out)


def _ended(out: Path) -> OutputError:
    return OutputError(f"{out}: the run that this part belongs to is no longer under way there")
