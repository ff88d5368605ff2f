"""The journal: one line in the work folder of a store that says which run is under way, until it is finished.

An interrupted run is continued only by a run that makes the same bytes (`work`, the digest of what its manifest will
state, see Manifest.decisive) of the same files: while a run is under way, the content of the source is compared by the
size and the time of its files.
"""

from __future__ import annotations

import hashlib
import json

import msgspec

from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER
from pqweights.checkpoint.storage import Origin
from pqweights.checkpoint.unfinished import command_of
from pqweights.common.documents import as_json, read_document
from pqweights.errors import OutputError, SourceChangedError
from pqweights.storage import Store

# It is written before anything else is changed in the work folder, so it tells what a killed run was about to make.
JOURNAL = f"{WORK_FOLDER}/{JOURNAL_FILE}"


class Journal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run states in its work folder until it is finished.

    work: the digest of all that decides its bytes, see Manifest.digest
    origin: the repository and commit that is read; None for a local folder
    source: size and stamp of every file that is read, by name
    outputs: every file to which the run gives its final name
    replaces: the files of earlier runs that the run removes or replaces
    kind, target: for messages: the kind of the result, and the target of an export
    """

    work: str
    origin: Origin | None = None
    source: dict[str, tuple[int, str]]
    outputs: tuple[str, ...]
    replaces: tuple[str, ...] = ()
    kind: str = ""
    target: str = ""

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(as_json(self)).encode() + b"\n"

    @property
    def key(self) -> str:
        """A short text that runs have in common if they make the same shards."""
        decisive = [self.work, self.origin, sorted(self.source.items())]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]

    @property
    def command(self) -> str:
        """The command that runs; an empty text if it is not named."""
        return command_of({"kind": self.kind} | ({"target": self.target} if self.target else {}))


# The journal of a run of which nothing is known any more.
DAMAGED = Journal(work="", source={}, outputs=())


def may_continue(ours: Journal, theirs: Journal, store: Store, *, overwrite: bool) -> bool:
    """Whether a run continues one that did not reach its end.

    Raises OutputError or SourceChangedError for a run that cannot be continued, unless it may be overwritten.
    """
    if (theirs.work, theirs.origin, theirs.source) == (ours.work, ours.origin, ours.source):
        return True
    if overwrite:
        return False
    if theirs == DAMAGED:
        raise OutputError(
            f"{store}: {JOURNAL} is damaged, so the interrupted run cannot be continued; pass `overwrite` to "
            "start again"
        )
    raise _difference(ours, theirs, store)


def _difference(ours: Journal, theirs: Journal, store: Store) -> OutputError | SourceChangedError:
    """Say how an interrupted run differs from this one."""
    if theirs.command and theirs.command != ours.command:
        return OutputError(
            f"{store}: holds an interrupted run of {theirs.command}; repeat that command to continue it, or pass "
            "`overwrite` to start again"
        )
    was, origin = theirs.origin, ours.origin
    if was is not None and origin is not None and was != origin:
        again = f"pass `revision` {was.revision} to continue it, or " if was.id == origin.id else ""
        return SourceChangedError(
            f"{origin.id}: expected {was.id}@{was.revision}, which the interrupted run in {store} was reading, "
            f"found commit {origin.revision}: {again}pass `overwrite` to start again"
        )
    for name, state in ours.source.items():
        before = theirs.source.get(name, state)
        if before != state:
            return SourceChangedError(
                f"{name}: the source changed since the interrupted run in {store} (size and time were "
                f"{list(before)}, are {list(state)}); pass `overwrite` to start again"
            )
    return OutputError(
        f"{store}: holds an interrupted run with another recipe, other options or other files to copy, or of a "
        "version that makes other bytes; repeat that command to continue it, or pass `overwrite` to start again"
    )


def read_journal(store: Store) -> Journal | None:
    """Read which run is under way in a store; None if there is none, DAMAGED if it cannot be read."""
    content = store.read(JOURNAL)
    if content is None:
        return None
    try:
        return read_document(content.partition(b"\n")[0], Journal, OutputError)
    except OutputError:
        return DAMAGED


def is_under_way(store: Store) -> bool:
    """Whether a run into a store began and did not reach its end."""
    return store.read(JOURNAL) is not None
