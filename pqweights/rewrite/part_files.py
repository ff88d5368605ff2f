"""What the parts of a run keep in its work folder: each a lock, a journal and fingerprints of its own.

Several processes then write into one work folder, each the shards of its part (parts.py). Whoever continues the run
waits for the locks, and joins the journals with that of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pqweights.checkpoint.names import JOURNAL_FILE
from pqweights.checkpoint.writer import disk_errors, write_whole
from pqweights.notices import slow_step
from pqweights.rewrite.file_lock import take_lock
from pqweights.rewrite.journal import FinishedTensor, add_line, read_records, record_line

FINGERPRINTS_FILE = "fingerprints.json"
FETCHED_FOLDER = "fetched"
PART_LOCK = "lock"
PART_JOURNALS = "part-*-" + JOURNAL_FILE
# A file whose name only the processes of the present run know, so that those of an earlier one begin no part any more.
TOKEN_PREFIX = "run-"
# Processes of a run that was killed end when they notice it, and file servers keep the locks of a machine that is gone.
WAIT_SECONDS = 120.0


def part_prefix(number: int) -> str:
    """Return what the names of a part's files begin with."""
    return f"part-{number:05d}-"


@contextlib.contextmanager
def locked_parts(work: Path, out: Path) -> Iterator[tuple[str, ...]]:
    """Hold the locks of all parts in a work folder, and return the prefixes of their files.

    Raises OutputError if a process goes on writing one of them.
    """
    found = sorted(path.name.removesuffix(PART_LOCK) for path in work.glob("part-*-" + PART_LOCK))
    with contextlib.ExitStack() as held:
        for prefix in found:
            with slow_step("waiting for processes of the interrupted run"):
                lock = take_lock(work / (prefix + PART_LOCK), out, wait_seconds=WAIT_SECONDS)
            held.callback(os.close, lock)
        yield tuple(found)


def join_parts(work: Path, prefixes: tuple[str, ...]) -> dict[str, FinishedTensor]:
    """Move what the journals of parts state into that of the run, and return it by tensor; a kill may repeat it."""
    joined: dict[str, FinishedTensor] = {}
    fingerprints: dict[str, str] = {}
    for prefix in prefixes:
        with contextlib.suppress(FileNotFoundError):
            joined |= read_records(work / (prefix + JOURNAL_FILE))
        with contextlib.suppress(FileNotFoundError, ValueError):
            fingerprints |= json.loads((work / (prefix + FINGERPRINTS_FILE)).read_bytes())
    if fingerprints:
        with contextlib.suppress(FileNotFoundError, ValueError):
            fingerprints |= json.loads((work / FINGERPRINTS_FILE).read_bytes())
        write_whole(work, work / FINGERPRINTS_FILE, [json.dumps(fingerprints).encode()])
    path = work / JOURNAL_FILE
    with disk_errors(path):
        journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            for finished in joined.values():
                add_line(journal, record_line(finished.record), path)
            os.fsync(journal)
        finally:
            os.close(journal)
    for prefix in prefixes:
        remove_part(work, prefix)
    return joined


def remove_part(work: Path, prefix: str) -> None:
    """Remove the files of a part that is joined; the lock goes last."""
    shutil.rmtree(work / (prefix + FETCHED_FOLDER), ignore_errors=True)
    for name in (JOURNAL_FILE, FINGERPRINTS_FILE, PART_LOCK):
        (work / (prefix + name)).unlink(missing_ok=True)
