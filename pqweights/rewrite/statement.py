"""What a run states about itself in its journal, and whether it continues the run of another journal.

The journal lies in the work folder until the run is finished. It is written before anything else is changed there, so
it tells what a killed run was about to make, and which files it may replace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER
from pqweights.checkpoint.storage import Origin, Storage, command_of
from pqweights.errors import OutputError, SourceChangedError
from pqweights.rewrite.identity import RunIdentity
from pqweights.storage import Store

JOURNAL = f"{WORK_FOLDER}/{JOURNAL_FILE}"


@dataclass(frozen=True, kw_only=True)
class RunStatement:
    """What a run must have in common with the run that it continues.

    work: the digest of its identity
    source: size and stamp of every file that is read, by name
    outputs: every file to which the run gives its final name
    shards: the outputs that hold tensors, with their sizes in bytes
    companions: the outputs that are copied from the source as they are, at the end of the run; another choice of them
        (--include-files) does not keep a run from being continued
    origin: the repository and commit that is read; None for a local folder
    command: for messages: the kind of the result, and the target of an export
    """

    work: str
    source: dict[str, tuple[int, int]]
    outputs: list[str]
    shards: Mapping[str, int]
    companions: Sequence[str]
    origin: Origin | None
    command: dict[str, str]

    @staticmethod
    def of(
        identity: RunIdentity,
        files: Mapping[str, tuple[Storage, Sequence[str]]],
        *,
        outputs: list[str],
        shards: Mapping[str, int],
        companions: Sequence[str],
    ) -> RunStatement:
        """Return the statement of a run.

        files: what it reads, by the option that names the checkpoint; "" for the source
        outputs, shards, companions: see RunStatement
        """
        source = {}
        for option, (storage, names) in files.items():
            states = storage.files()
            for name in names:
                source[f"{option} {name}".lstrip()] = (states[name].byte_count, states[name].stamp)
        return RunStatement(
            work=identity.digest(),
            source=source,
            outputs=outputs,
            shards=shards,
            companions=companions,
            origin=identity.origin,
            command={"kind": identity.kind} | {k: str(v) for k, v in identity.made_by.items() if k == "target"},
        )

    def to_json(self) -> dict[str, Any]:
        """Return what decides whether another run continues this one."""
        source = {name: list(state) for name, state in self.source.items()}
        origin = {} if self.origin is None else {"origin": list(self.origin)}
        return {"work": self.work, **origin, "source": source, "outputs": self.outputs}

    def line(self, replaces: Sequence[str]) -> bytes:
        """Return the content of the journal.

        replaces: the files of earlier runs that the run removes or replaces
        """
        return (json.dumps(self.to_json() | {"replaces": list(replaces)} | self.command) + "\n").encode()

    @property
    def key(self) -> str:
        """A short text that runs have in common if they make the same shards, whichever files they copy."""
        stated = self.to_json()
        source = sorted(_without(stated["source"], set(self.companions)).items())
        content = json.dumps([stated["work"], stated.get("origin"), source])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Journal:
    """The journal of a run that did not reach its end. stated: what it states; None if that cannot be read."""

    stated: dict[str, Any] | None

    @property
    def files(self) -> list[str]:
        """The files that the run was writing or replacing."""
        return [] if self.stated is None else [*self.stated["outputs"], *self.stated["replaces"]]

    def is_continued_by(self, run: RunStatement, store: Store, *, overwrite: bool) -> bool:
        """Whether a run continues this one.

        Raises OutputError or SourceChangedError for a run that cannot be continued, unless it may be overwritten.
        """
        if self.stated is not None and _is_same_run(self.stated, run):
            return True
        if overwrite:
            return False
        if self.stated is None:
            raise OutputError(
                f"{store}: {JOURNAL} is damaged, so the interrupted run cannot be continued; pass `overwrite` to "
                "start again"
            )
        raise _different_run(self.stated, run, store)


def read_journal(store: Store) -> Journal | None:
    """Read which run is under way in a store; None if there is none."""
    content = store.read(JOURNAL)
    return None if content is None else Journal(_parsed(content.partition(b"\n")[0]))


def is_under_way(store: Store) -> bool:
    """Whether a run into a store began and did not reach its end."""
    return store.read(JOURNAL) is not None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("source"), dict):
        return None
    lists = (value.get("outputs"), value.get("replaces"))
    names = all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in lists)
    return value if names else None


def _is_same_run(stated: dict[str, Any], run: RunStatement) -> bool:
    """Whether this was stated by the same run, apart from which companions are copied."""
    own = run.to_json()
    ours, theirs = set(run.companions), set(stated["outputs"]) - (set(run.outputs) - set(run.companions))
    differ = ours ^ theirs
    return (
        stated.get("work") == run.work
        and stated.get("origin") == own.get("origin")
        and _without(stated["source"], differ) == _without(own["source"], differ)
    )


def _without(source: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: state for name, state in source.items() if name not in names}


def _different_run(stated: dict[str, Any], run: RunStatement, store: Store) -> OutputError | SourceChangedError:
    """Say how an interrupted run differs from the one that is asked for."""
    command = command_of(stated)
    if command and command != command_of(run.command):
        return OutputError(
            f"{store}: holds an interrupted run of {command}; repeat that command to continue it, or pass `overwrite` "
            "to start again"
        )
    if run.origin is not None and stated.get("origin") not in (None, list(run.origin)):
        return _other_commit(store, stated["origin"], run.origin)
    source = stated["source"]
    for name, state in run.source.items():
        if name in run.companions and name not in source:
            continue
        if source.get(name) != list(state) and (name in source or not name.startswith("--")):
            return SourceChangedError(
                f"{name}: the source changed since the interrupted run in {store} (size and time were "
                f"{source.get(name)}, are {list(state)}); pass `overwrite` to start again"
            )
    return OutputError(
        f"{store}: holds an interrupted run with another recipe or other options, or of a version that makes other "
        "bytes; repeat that command to continue it, or pass `overwrite` to start again"
    )


def _other_commit(store: Store, stated: Any, origin: Origin) -> SourceChangedError:
    was = "@".join(str(part) for part in stated) if isinstance(stated, list) else "another source"
    again = (
        f"pass `revision` {stated[1]} to continue it, or "
        if isinstance(stated, list) and stated[0] == origin.id
        else ""
    )
    return SourceChangedError(
        f"{origin.id}: expected {was}, which the interrupted run in {store} was reading, found commit "
        f"{origin.revision}: {again}pass `overwrite` to start again"
    )
