"""What makes two runs the same: the stated fields that decide, together with the source, every byte of a result.

Three places ask whether two runs are the same, and all of them ask here:

- an interrupted run is continued only by a run of the same identity, whose digest is in its journal (`Journal`);
- a finished result is left alone if its manifest states the identity of the run that is asked for (driver.py);
- the manifest states the identity, so that a result tells what made it (manifest.py).

The content of the source is compared beside it: by the size and time of its files while a run is under way, and by its
fingerprint when the run is finished. Whatever changes no byte is not part of the identity: threads, progress,
strictness, where files lie, and every text that is written for people: why a tensor is treated as it is, what a recipe
is for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER
from pqweights.checkpoint.storage import Origin
from pqweights.checkpoint.unfinished import command_of
from pqweights.common.documents import Document, as_json, read_document
from pqweights.errors import OutputError, SourceChangedError
from pqweights.planning.plan import DEFAULT_METADATA, TensorPlan
from pqweights.storage import Store

# The first version that makes the same bytes as this one: a run is continued, and a finished result left alone, only by
# a version that agrees. To be raised with every change of what a codec, a recipe or an export writes.
SAME_BYTES_SINCE = "0.3.0"
# It is written before anything else is changed in the work folder, so it tells what a killed run was about to make.
JOURNAL = f"{WORK_FOLDER}/{JOURNAL_FILE}"


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What makes two runs over the same source the same run, and the prose that goes with it into the manifest.

    kind: "master" or "export"
    made_by: the transform's account of itself (Transform.account): a recipe, or a target with its options
    source_bytes: size of the weight files that are read
    max_shard_bytes: data bytes after which a new output file begins
    tensors: what becomes of each tensor
    origin: the Hub repository that is read, with its commit; None for a local folder
    metadata: the `__metadata__` of the safetensors files
    container: what there is to say of another format of the files (Container.to_json)
    left_out: tensors that are not carried over, each with the reason
    remarks: where the files and config.json of the source do not say the same (Checkpoint.remarks)
    model: what is known of the original model (checkpoint.config.model_facts)
    master: for an export, what the master's manifest states about the master
    same_bytes_since: the first version that makes the same bytes
    """

    kind: str
    made_by: dict[str, Any]
    source_bytes: int
    max_shard_bytes: int
    tensors: tuple[TensorPlan, ...]
    origin: Origin | None = None
    metadata: dict[str, str] = field(default_factory=lambda: DEFAULT_METADATA)
    container: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    master: dict[str, Any] = field(default_factory=dict)
    same_bytes_since: str = field(default_factory=lambda: SAME_BYTES_SINCE)

    @property
    def decisive(self) -> RunIdentity:
        """The same without prose: two runs are the same if this is equal."""
        return replace(
            self,
            tensors=tuple([tensor._replace(reason="") for tensor in self.tensors]),
            left_out=dict.fromkeys(self.left_out, ""),
            remarks=(),
            made_by=_without_prose(self.made_by),
            master=_without_prose(self.master),
        )

    def digest(self) -> str:
        """Return the sha256 over all that is decisive."""
        # In JSON, tensors and origin are the lists of their fields.
        stated = dict(vars(self.decisive))
        stated["version"] = stated.pop("same_bytes_since")
        del stated["remarks"]
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def _without_prose(account: dict[str, Any]) -> dict[str, Any]:
    """Return an account of a transform, or of a master, without what a recipe says for people."""
    recipe = account.get("recipe")
    if not isinstance(recipe, dict):
        return account
    stated = {key: value for key, value in recipe.items() if key != "description"}
    if isinstance(rules := recipe.get("rules"), list):
        stated["rules"] = [_without_reason(rule) for rule in rules]
    return account | {"recipe": stated}


def _without_reason(rule: Any) -> Any:
    return {key: value for key, value in rule.items() if key != "reason"} if isinstance(rule, dict) else rule


class Journal(Document, frozen=True, kw_only=True, omit_defaults=True):
    """What a run states in its work folder until it is finished.

    work: the digest of its identity
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
    replaces: tuple[str, ...]
    kind: str = ""
    target: str = ""

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(as_json(self)).encode() + b"\n"

    @property
    def command(self) -> str:
        """The command that runs; an empty text if it is not named."""
        return command_of({"kind": self.kind} | ({"target": self.target} if self.target else {}))


# The journal of a run of which nothing is known any more.
DAMAGED = Journal(work="", source={}, outputs=(), replaces=())


@dataclass(frozen=True, kw_only=True)
class RunStatement:
    """What a run is about to do.

    journal: what it states of itself, but for the files that it replaces
    shards: the outputs that hold tensors, with their sizes in bytes
    key: a short text that runs have in common if they make the same shards
    """

    journal: Journal
    shards: Mapping[str, int]
    key: str

    def continues(self, journal: Journal | None, store: Store, *, overwrite: bool) -> bool:
        """Whether this run continues one that did not reach its end.

        journal: of that run, if there is one

        Raises OutputError or SourceChangedError for a run that cannot be continued, unless it may be overwritten.
        """
        if journal is None:
            return False
        ours = self.journal
        if (journal.work, journal.origin, journal.source) == (ours.work, ours.origin, ours.source):
            return True
        if overwrite:
            return False
        if journal == DAMAGED:
            raise OutputError(
                f"{store}: {JOURNAL} is damaged, so the interrupted run cannot be continued; pass `overwrite` to "
                "start again"
            )
        raise self._difference(journal, store)

    def _difference(self, journal: Journal, store: Store) -> OutputError | SourceChangedError:
        """Say how an interrupted run differs from this one."""
        if journal.command and journal.command != self.journal.command:
            return OutputError(
                f"{store}: holds an interrupted run of {journal.command}; repeat that command to continue it, or pass "
                "`overwrite` to start again"
            )
        was, origin = journal.origin, self.journal.origin
        if was is not None and origin is not None and was != origin:
            again = f"pass `revision` {was.revision} to continue it, or " if was.id == origin.id else ""
            return SourceChangedError(
                f"{origin.id}: expected {was.id}@{was.revision}, which the interrupted run in {store} was reading, "
                f"found commit {origin.revision}: {again}pass `overwrite` to start again"
            )
        for name, state in self.journal.source.items():
            before = journal.source.get(name, state)
            if before != state:
                return SourceChangedError(
                    f"{name}: the source changed since the interrupted run in {store} (size and time were "
                    f"{list(before)}, are {list(state)}); pass `overwrite` to start again"
                )
        return OutputError(
            f"{store}: holds an interrupted run with another recipe, other options or other files to copy, or of a "
            "version that makes other bytes; repeat that command to continue it, or pass `overwrite` to start again"
        )


def key_of(work: str, origin: Origin | None, source: Mapping[str, tuple[int, str]]) -> str:
    """Return the key of a RunStatement.

    work, origin: see Journal
    source: size and stamp of the files that are read to make shards, by name
    """
    return hashlib.sha256(json.dumps([work, origin, sorted(source.items())]).encode()).hexdigest()[:16]


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
