"""The journal of a rewrite under way: which run it belongs to, what that run replaces, and the tensors it has finished.

The first line is written before anything in the output folder is changed; each further line records one finished
tensor. A run continues another only if the first line states its own inputs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.checkpoint.digests import HASH_OF_PIECES, SHA256, TensorHash
from pqweights.checkpoint.interrupted import command_of
from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER
from pqweights.checkpoint.storage import Origin, Storage
from pqweights.checkpoint.writer import disk_errors
from pqweights.errors import OutputError, SourceChangedError
from pqweights.rewrite.identity import RunIdentity
from pqweights.rewrite.records import TensorRecord


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run must have in common with the run that it continues, as the journal states it.

    work: the digest of its identity
    former_work: what older versions state in its place
    source: size and stamp of every file that is read, by name
    outputs: every file to which the run gives its final name
    shards: the outputs that hold tensors, with their sizes in bytes
    companions: the outputs that are copied from the source as they are, at the end of the run; another choice of them
        (--include-files) does not keep a run from being continued
    origin: the repository and commit that is read; None for a local folder
    command: for messages: the kind of the result, and the target of an export
    """

    work: str
    former_work: str
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
    ) -> RunInputs:
        """Return the inputs of a run.

        files: what it reads, by the option that names the checkpoint; "" for the source
        outputs, shards, companions: see RunInputs
        """
        source = {}
        for option, (storage, names) in files.items():
            states = storage.files()
            for name in names:
                source[f"{option} {name}".lstrip()] = (states[name].byte_count, states[name].stamp)
        return RunInputs(
            work=identity.digest(),
            former_work=identity.former_digest(),
            source=source,
            outputs=outputs,
            shards=shards,
            companions=companions,
            origin=identity.origin,
            command={"kind": identity.kind} | {k: str(v) for k, v in identity.made_by.items() if k == "target"},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the first line of the journal."""
        source = {name: list(state) for name, state in self.source.items()}
        origin = {} if self.origin is None else {"origin": list(self.origin)}
        return {"work": self.work, **origin, "source": source, "outputs": self.outputs}

    @property
    def key(self) -> str:
        """A short text that runs have in common if they make the same shards, whichever files they copy."""
        stated = self.to_json()
        source = sorted(_without(stated["source"], set(self.companions)).items())
        content = json.dumps([stated["work"], stated.get("origin"), source])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class FinishedTensor(NamedTuple):
    """A tensor that the run to be continued has finished, and which hash its digests are."""

    record: TensorRecord
    tensor_hash: TensorHash


def add_line(journal: int, line: bytes, path: Path) -> None:
    """Add a line to an open journal; one that a kill cuts short is dropped when the journal is read."""
    with disk_errors(path):
        while line:
            line = line[os.write(journal, line) :]


def record_line(record: TensorRecord) -> bytes:
    """Return the line of a finished tensor."""
    fields = vars(record) | {HASH_OF_PIECES.key: record.digests}
    del fields["digests"]
    return (json.dumps(fields) + "\n").encode()


def begin_journal(work: Path, inputs: RunInputs, replaces: list[str], finished: bytes = b"") -> None:
    """Write the first line. It is written before anything is removed, so the list of files survives a kill.

    finished: the further lines of the journal of a run that is continued
    """
    with disk_errors(work):
        new = work / (JOURNAL_FILE + ".new")
        new.write_bytes(first_line(inputs, replaces) + finished)
        os.replace(new, work / JOURNAL_FILE)


def first_line(inputs: RunInputs, replaces: Sequence[str], **more: str) -> bytes:
    """Return the first line. more: what else it states."""
    return (json.dumps(inputs.to_json() | inputs.command | {"replaces": list(replaces)} | more) + "\n").encode()


def change_companions(work: Path, inputs: RunInputs) -> None:
    """Make the journal of a run that is continued state what this run does, and that other companions are replaced."""
    with open(work / JOURNAL_FILE, "rb") as stream:
        first = json.loads(stream.readline())
        finished = stream.read()
    stated = inputs.to_json()
    if any(first.get(key) != stated[key] for key in ("work", "outputs", "source")):
        begin_journal(work, inputs, [*dict.fromkeys((*first["replaces"], *first["outputs"]))], finished)


def read_journal(path: Path, inputs: RunInputs, *, out: object, overwrite: bool) -> dict[str, FinishedTensor] | None:
    """Return the tensors that the run to be continued has finished, by name; None if there is no run to continue.

    Raises OutputError or SourceChangedError for a run that cannot be continued, unless it may be overwritten.
    """
    if not path.exists():
        return None
    if not may_continue(read_first_line(path), inputs, out=out, overwrite=overwrite):
        return None
    return read_records(path, after_first_line=True)


def may_continue(first: dict[str, Any] | None, inputs: RunInputs, *, out: object, overwrite: bool) -> bool:
    """Whether a run continues the one of a journal.

    first: the first line of the journal; None if it cannot be read

    Raises OutputError or SourceChangedError for a run that cannot be continued, unless it may be overwritten.
    """
    if first is not None and _is_same_run(first, inputs):
        return True
    if overwrite:
        return False
    if first is None:
        raise OutputError(
            f"{out}: {WORK_FOLDER}/{JOURNAL_FILE} is damaged, so the interrupted run cannot be continued; pass "
            "--overwrite to start again"
        )
    raise _different_run(first, inputs, out)


def _is_same_run(first: dict[str, Any], inputs: RunInputs) -> bool:
    """Whether a journal with this first line is that of the run, apart from which companions are copied."""
    stated = inputs.to_json()
    ours, theirs = set(inputs.companions), set(first["outputs"]) - (set(inputs.outputs) - set(inputs.companions))
    differ = ours ^ theirs
    return (
        first.get("work") in (inputs.work, inputs.former_work)
        and first.get("origin") == stated.get("origin")
        and _without(first["source"], differ) == _without(stated["source"], differ)
    )


def _without(source: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: state for name, state in source.items() if name not in names}


def read_records(path: Path, *, after_first_line: bool = False) -> dict[str, FinishedTensor]:
    """Read the tensors of a journal, and cut off a line that is not whole with everything behind it."""
    records: dict[str, FinishedTensor] = {}
    data = path.read_bytes()
    valid = data.index(b"\n") + 1 if after_first_line else 0
    for line in data[valid:].splitlines(keepends=True):
        finished = parse_record(line)
        if finished is None:  # cut by a kill or a power failure: the tensors from here on are done again
            os.truncate(path, valid)
            break
        records[finished.record.name] = finished
        valid += len(line)
    return records


def _different_run(first: dict[str, Any], inputs: RunInputs, out: object) -> OutputError | SourceChangedError:
    """Say how the interrupted run differs from the one that is asked for; `first` is the first line of its journal."""
    command = command_of(first)
    if command and command != command_of(inputs.command):
        return OutputError(
            f"{out}: holds an interrupted run of {command}; repeat that command to continue it, or pass --overwrite to "
            "start again"
        )
    if inputs.origin is not None and first.get("origin") not in (None, list(inputs.origin)):
        return _other_commit(out, first["origin"], inputs.origin)
    found = first["source"]
    for name, state in inputs.source.items():
        if name in inputs.companions and name not in found:
            continue
        if found.get(name) != list(state) and (name in found or not name.startswith("--")):
            return SourceChangedError(
                f"{name}: the source changed since the interrupted run in {out} (size and time were {found.get(name)}, "
                f"are {list(state)}); pass --overwrite to start again"
            )
    return OutputError(
        f"{out}: holds an interrupted run with another recipe or other options, or of a version that makes other "
        "bytes; repeat that command to continue it, or pass --overwrite to start again"
    )


def _other_commit(out: object, found: Any, origin: Origin) -> SourceChangedError:
    was = "@".join(str(part) for part in found) if isinstance(found, list) else "another source"
    again = (
        f"pass --revision {found[1]} to continue it, or " if isinstance(found, list) and found[0] == origin.id else ""
    )
    return SourceChangedError(
        f"{origin.id}: expected {was}, which the interrupted run in {out} was reading, found commit {origin.revision}: "
        f"{again}pass --overwrite to start again"
    )


def finished_names(path: Path, inputs: RunInputs) -> frozenset[str]:
    """Return the names of the tensors that a run has finished by its journal; none without one, or with another's."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return frozenset()
    first = parse_first_line(lines[0]) if lines else None
    if first is None or not _is_same_run(first, inputs):
        return frozenset()
    found = itertools.takewhile(lambda each: each is not None, map(parse_record, lines[1:]))
    return frozenset(each.record.name for each in found if each is not None)


def parse_record(line: bytes) -> FinishedTensor | None:
    """Read a journal line; None if it is not whole. Its digests are compared with the bytes on the disk later."""
    try:
        fields = json.loads(line) if line.endswith(b"\n") else {}
        tensor_hash = SHA256 if SHA256.key in fields else HASH_OF_PIECES
        digests, folded = fields.pop(tensor_hash.key), tuple(fields.pop("folded", ()))
        record = TensorRecord(digests=digests, folded=folded, **fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    whole = isinstance(record.name, str) and isinstance(record.digests, dict)
    return FinishedTensor(record, tensor_hash) if whole else None


def read_first_line(journal: Path) -> dict[str, Any] | None:
    """Read which run a journal belongs to; None if that cannot be read."""
    with open(journal, "rb") as stream:
        return parse_first_line(stream.readline())


def parse_first_line(line: bytes) -> dict[str, Any] | None:
    """Return what the first line of a journal states; None if it is not whole."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("source"), dict):
        return None
    lists = (value.get("outputs"), value.get("replaces"))
    names = all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in lists)
    return value if names else None
