"""What an interrupted measurement leaves beside its file, so that the same command continues it.

The folder FILE.unfinished holds a journal: its first line states which measurement it belongs to, and each further line
what was found for one weight or group. `calibrate` adds what it has collected of the inputs. The folder is
removed when FILE is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pqweights import __version__
from pqweights.checkpoint.names import CONFIG_FILE, UNFINISHED_SUFFIX
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import read_bytes
from pqweights.checkpoint.writer import PARTIAL_SUFFIX, disk_errors, write_whole
from pqweights.common.journal import append_line, journal_line, read_journal
from pqweights.errors import EvaluationError, OutputError, PqweightsError, SourceChangedError
from pqweights.inference.runtimes.texts import Ids

JOURNAL_FILE, STATE_FILE, SAMPLES_FILE, MOMENTS_FILE = "journal", "activations", "samples", "moments"
# Everything that the folder may hold, the journal last.
OWN_FILES = tuple(
    f"{name}{suffix}"
    for suffix in (PARTIAL_SUFFIX, "")
    for name in (STATE_FILE, SAMPLES_FILE, MOMENTS_FILE, JOURNAL_FILE)
)
UNFINISHED_VERSION = 1
# What the fields of the first line are called in messages; those of the checkpoint have a message of their own.
SHOWN = {
    "recipe": "another recipe (`recipe`, `bits`, `keep`, `set_bits`)",
    "text": "another text (`text`)",
    "tokens": "other tokens (`tokens`, `max_tokens`, `tokenizer`)",
    "window": "another window (`window`)",
    "dtype": "another `dtype`",
    "device_map": "another `device_map`",
    "libraries": "other versions of pqweights, torch or transformers",
}


def inputs_of(
    checkpoint: Checkpoint, *, recipe: Mapping[str, Any], text: str | None, windows: Sequence[Ids], **options: Any
) -> dict[str, Any]:
    """Return everything that decides the result of a measurement, as the first line of the journal states it.

    checkpoint: the checkpoint that is measured
    recipe: the recipe, as JSON
    text: the text that is read; None for tokens that are drawn at random
    windows: the tokens that the model reads
    options: how the model runs
    """
    files = checkpoint.storage.files()
    ids = hashlib.sha256()
    for window in windows:
        ids.update(window.astype("<i8").tobytes())
    return {
        "unfinished_version": UNFINISHED_VERSION,
        "libraries": {"pqweights": __version__, **_versions("torch", "transformers")},
        "checkpoint": checkpoint.fingerprint(),
        "files": {name: [files[name].byte_count, files[name].stamp] for name in checkpoint.weight_files},
        "model": {name: _sha256(checkpoint, name) for name in files if name == CONFIG_FILE or name.endswith(".py")},
        "recipe": recipe,
        "text": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        "tokens": ids.hexdigest(),
        "window": len(windows[0]),
        **options,
    }


def _versions(*packages: str) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    installed = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def _sha256(checkpoint: Checkpoint, name: str) -> str:
    """Return the hash of a small file of the checkpoint."""
    size = checkpoint.storage.files()[name].byte_count
    return hashlib.sha256(read_bytes(checkpoint.storage, name, 0, size)).hexdigest()


class Unfinished:
    """The work folder of a measurement under way, made by `open_unfinished`.

    folder: where it lies
    found: what is known of each weight or group, as JSON, by its name
    state: the file of what was collected of the inputs, besides the sampled rows
    samples: the file of the sampled rows of inputs
    moments: the file of finished moments
    """

    def __init__(self, folder: Path, found: dict[str, Any], checkpoint: Checkpoint) -> None:
        self.folder, self.found, self._checkpoint = folder, found, checkpoint
        self.state, self.samples, self.moments = (folder / name for name in (STATE_FILE, SAMPLES_FILE, MOMENTS_FILE))
        self._turn = threading.Lock()

    def keep(self, name: str, entry: Mapping[str, Any]) -> None:
        """Keep what was found for one weight or group; threads may call it at the same time.

        Raises SourceChangedError if it may have been found on other files than those that the journal states.
        """
        self._checkpoint.check_unchanged()
        record = {"name": name, **entry}
        with self._turn:
            append_line(self.folder / JOURNAL_FILE, record)
            self.found[name] = json.loads(json.dumps(record))

    def remove(self) -> None:
        """Remove the folder, the journal last: without one there is nothing to continue."""
        _clear(self.folder)
        with contextlib.suppress(OSError):  # the folder stays if it holds other files
            self.folder.rmdir()


def _clear(folder: Path) -> None:
    """Remove our files from a folder, but not the folder, which is locked."""
    for name in OWN_FILES:
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def open_unfinished(
    out: Path, inputs: Mapping[str, Any], checkpoint: Checkpoint, *, overwrite: bool
) -> Iterator[Unfinished]:
    """Continue what the same measurement left beside its file, or start; leave it if this run is interrupted, too.

    out: the file of the result, which the body writes
    inputs: what decides the result
    checkpoint: what is measured
    overwrite: whether what another measurement left may be removed

    Raises OutputError or SourceChangedError if another measurement left something there.
    """
    folder = out.with_name(out.name + UNFINISHED_SUFFIX)
    with disk_errors(out):
        lock = _lock(folder)
    try:
        work = Unfinished(folder, _found(folder, inputs, out=out, overwrite=overwrite), checkpoint)
        try:
            yield work
        except EvaluationError:  # the input cannot be measured: the same command would fail again
            work.remove()
            raise
        else:
            work.remove()
        finally:
            if folder.exists() and not work.found and not work.state.exists():
                work.remove()
    finally:
        os.close(lock)


def _lock(folder: Path) -> int:
    """Make the folder and lock it; return its descriptor, which releases the lock when it is closed.

    Raises OutputError if another run holds the lock.
    """
    while True:
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"{folder}: expected a folder of an interrupted run, or none; move it away")
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(f"{folder}: another run is writing there; wait for it, or choose another file") from None
        # The run that held the lock may have removed the folder between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        os.close(descriptor)


def _found(folder: Path, inputs: Mapping[str, Any], *, out: Path, overwrite: bool) -> dict[str, Any]:
    """Return what the continued run had found; begin a new journal if there is none."""
    wanted = json.loads(json.dumps(inputs))
    journal = folder / JOURNAL_FILE
    if journal.exists():
        first, *records = read_journal(journal) or [None]
        if first == wanted:
            return {record["name"]: record for record in records}
        has_something = first is None or records or (folder / STATE_FILE).exists()
        if has_something and not overwrite:
            raise _other_run(first, wanted, folder=folder, out=out)
        _clear(folder)
    else:  # a run that was interrupted before it had a journal may have left files of ours
        if any(path.name not in OWN_FILES for path in folder.iterdir()):
            raise OutputError(f"{folder}: expected a folder of an interrupted run, or none; move it away")
        _clear(folder)
    write_whole(folder, journal, [journal_line(wanted)])
    return {}


def _other_run(first: dict[str, Any] | None, wanted: dict[str, Any], *, folder: Path, out: Path) -> PqweightsError:
    """Return the error for what another run left; `first` is the first line of its journal."""
    if first is None:
        return OutputError(
            f"{folder}: {JOURNAL_FILE} is damaged, so the interrupted run cannot be continued; pass `overwrite` to "
            "start again"
        )
    if any(first.get(key) != wanted[key] for key in ("checkpoint", "files", "model")):
        return SourceChangedError(
            f"{out}: the checkpoint is not the one that the interrupted run in {folder.name} was reading; pass "
            "`overwrite` to start again"
        )
    other = [shown for key, shown in SHOWN.items() if first.get(key) != wanted.get(key)]
    return OutputError(
        f"{folder}: holds an interrupted run with {', '.join(other) or 'other options'}; repeat that command to "
        "continue it, or pass `overwrite` to start again"
    )
