"""What a rewrite does with each tensor: the one interface that quantizing and every export implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.folding.fold import Fold
from pqweights.planning.containers import Safetensors
from pqweights.planning.plan import DEFAULT_METADATA, Container, ShardPlan, TensorPlan
from pqweights.rewrite.jobs import Job
from pqweights.rewrite.records import TensorRecord


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What a transform may use before the first tensor is rewritten.

    folder: the work folder, where it may keep what it found for a run that continues this one, in files of KEPT_FILES
    fetched: where fetched files lie
    threads: how many threads compute
    progress: called with the work done, the work in all, and the name of a tensor
    """

    folder: Path
    fetched: Path
    threads: int
    progress: Callable[[int, int, str], None]


# Names of files, and functions that return their content once the tensors are written.
SmallFiles = Mapping[str, Callable[[], bytes]]


class Transform(Protocol):
    """Turns the tensors of a checkpoint into the tensors of a result.

    Implementations derive from this class and inherit the defaults of what they do not need.
    """

    @property
    def kind(self) -> str:
        """What the manifest calls the result: "master" or "export"."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of this transform: a recipe, or a target with its options.

        Two transforms of one kind with equal accounts turn the same plan into the same bytes; see identity.py.
        """
        ...

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """Decide from the headers what becomes of each logical tensor, in the order of the checkpoint."""
        ...

    def job(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """Return the first pass over one tensor."""
        ...

    def config(
        self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
    ) -> dict[str, Any] | None:
        """Return the config.json of the finished result, or None for a result without one."""
        ...

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of the safetensors files."""
        return DEFAULT_METADATA

    def container(self, tensors: Sequence[TensorPlan], max_shard_bytes: int) -> Container:
        """Return the format of the files that hold the planned tensors; by default safetensors."""
        return Safetensors(self.metadata)

    def small_files(self, shards: Sequence[ShardPlan]) -> SmallFiles:
        """Return files that are written beside those of the plan and the configuration; by default none."""
        return {}

    @property
    def has_config(self) -> bool:
        """Whether the result has a config.json."""
        return True

    @property
    def left_out(self) -> dict[str, str]:
        """The tensors that the result cannot carry, each with the reason; by default there are none."""
        return {}

    @property
    def also_reads(self) -> dict[str, Checkpoint]:
        """What is read besides the checkpoint itself, by the option that names it; by default nothing."""
        return {}

    @property
    def memory_bytes(self) -> int:
        """What it holds in memory beside a fold, whatever the number of threads; by default nothing."""
        return 0

    @property
    def fold(self) -> Fold | None:
        """The fold of the tensors that are read; by default none."""
        return None

    def prepare(self, preparation: Preparation) -> None:
        """Read what must be known before the first tensor is rewritten: what a fold depends on."""
        if self.fold is not None:
            self.fold.measure(
                preparation.folder,
                fetched=preparation.fetched,
                threads=preparation.threads,
                progress=preparation.progress,
            )

    def folded(self, tensor: str) -> tuple[str, ...]:
        """Return the vectors through which a tensor was folded."""
        return () if self.fold is None else self.fold.links_of(tensor)

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """Raise SourceError if the user asked to refuse such a result; by default every result is accepted."""
        return

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of the result before using it, a sentence each; by default nothing."""
        return ()

    def remarks(self, records: Sequence[TensorRecord]) -> tuple[str, ...]:
        """Return what the measured errors say to the user, a sentence each; by default nothing."""
        return ()

    def report_json(self) -> dict[str, Any]:
        """Return what the JSON of a report says of this transform besides the tensors; by default nothing."""
        return {}
