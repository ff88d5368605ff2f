"""What a rewrite does with each tensor: the one interface that quantizing and every export implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.threads import Progress
from pqweights.planning.plan import DEFAULT_METADATA, Container, Safetensors, ShardPlan, TensorPlan
from pqweights.rewrite.jobs import Job
from pqweights.rewrite.records import TensorRecord

# What manifests call the two kinds of results.
MASTER, EXPORT = "master", "export"

# Names of files, and functions that return their content once the tensors are written.
SmallFiles = Mapping[str, Callable[[], bytes]]


@dataclass(frozen=True)
class Account:
    """What the manifest says of a transform.

    kind: what it calls the result: "master" or "export"
    made_by: a recipe, or a target with its options. Two transforms of one kind with equal accounts turn the same plan
        into the same bytes; see identity.py
    """

    kind: str
    made_by: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TransformInputs:
    """What a transform reads besides the checkpoint, and holds while it works.

    checkpoints: what it reads, by the option that names it
    memory_bytes: what it holds in memory, whatever the number of threads
    disk_bytes: what waits on the disk beside the result: what comes by columns, of the largest weights
    """

    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)
    memory_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a result has besides its tensors.

    container: the format of the files that hold tensors
    config: returns the config.json of the finished result, from the checkpoint, the plans of its tensors and what was
        measured of them; None for a result without one
    small_files: returns files that are written beside the configuration, for the files of the plan
    left_out: the tensors that the result cannot carry, each with the reason
    """

    config: Callable[[Checkpoint, Sequence[TensorPlan], Sequence[TensorRecord]], dict[str, Any]] | None
    container: Callable[[Sequence[TensorPlan], int], Container] = lambda tensors, most: Safetensors(DEFAULT_METADATA)
    small_files: Callable[[Sequence[ShardPlan]], SmallFiles] = lambda shards: {}
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Notes:
    """What a report says of a transform besides the tensors.

    warnings: what the user should know of the result before using it, a sentence each
    document: what its JSON has besides
    """

    warnings: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)


class Transform(Protocol):
    """Turns the tensors of a checkpoint into the tensors of a result."""

    @property
    def account(self) -> Account:
        """What the manifest says of it."""
        ...

    @property
    def inputs(self) -> TransformInputs:
        """What it reads and holds."""
        ...

    @property
    def output(self) -> Output:
        """What the result has besides its tensors."""
        ...

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """Decide from the headers what becomes of each logical tensor, in the order of the checkpoint."""
        ...

    def prepare(self, progress: Progress) -> None:
        """Read what must be known before the first tensor is rewritten."""
        ...

    def job(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """Return the first pass over one tensor."""
        ...

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """Accept a finished tensor. Raise SourceError if the user asked to refuse such a one."""
        ...

    def notes(self, records: Sequence[TensorRecord]) -> Notes:
        """Return what a report says of it; without records, before anything was measured."""
        ...
