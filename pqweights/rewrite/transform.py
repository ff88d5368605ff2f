"""What a rewrite does with each tensor: the one interface that quantizing and every export implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pqweights.buffers import BufferPool
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.planning.plan import TensorPlan
from pqweights.rewrite.jobs import Job
from pqweights.rewrite.manifest import TensorRecord


class Transform(Protocol):
    """What a rewrite does with each tensor."""

    @property
    def kind(self) -> str:
        """What the manifest calls the result: master or export."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the manifest says of it: a recipe, or a target and its options.

        Two transforms of the same kind that say the same make the same bytes of the same plan; see identity.py.
        """
        ...

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """One entry per logical tensor, in order."""
        ...

    @property
    def metadata(self) -> dict[str, str]:
        """The __metadata__ of the safetensors files."""
        ...

    @property
    def left_out(self) -> dict[str, str]:
        """Tensors that the result cannot carry, each with the reason."""
        ...

    @property
    def also_reads(self) -> dict[str, Checkpoint]:
        """What it reads besides the checkpoint that is rewritten, by the option that names it."""
        ...

    def job(self, planned: TensorPlan, tensor: LogicalTensor, buffers: BufferPool) -> Job:
        """The first pass over one tensor. buffers: for what its chunks become."""
        ...

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """Raise SourceError where the user asked to refuse a result like this one."""
        ...

    def config(
        self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
    ) -> dict[str, Any] | None:
        """config.json of the result, or None for none."""
        ...
