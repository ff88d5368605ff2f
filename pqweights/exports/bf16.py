"""The plain export: an ordinary checkpoint with decoded weights, in BF16 or in the source's dtypes. Everything loads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pqweights.checkpoint.config import edited_config, model_dtype
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.jobs import CopyJob, Job
from pqweights.manifest import TensorRecord
from pqweights.plan import DECODE, DEFAULT_METADATA, KEEP, TensorPlan
from pqweights.roles import classify


@dataclass(frozen=True)
class Bf16Export:
    """The transform. dtype: "bf16", or "source" for the dtype that each weight had.

    With bf16, every weight and whatever else has the model's own dtype becomes BF16; a tensor that the source kept in
    another dtype (float32 state-space parameters beside BF16 weights, say) keeps it.
    """

    dtype: str = "bf16"
    kind: str = "export"

    def describe(self) -> dict[str, Any]:
        """See transform.Transform."""
        return {"target": "bf16", "dtype": self.dtype}

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """See transform.Transform."""
        model = model_dtype(checkpoint.config, checkpoint.tensors)
        result = []
        for tensor in checkpoint.tensors:
            decoded = isinstance(tensor, EncodedTensor)
            dtype = tensor.plain_dtype
            if self.dtype == "bf16" and (decoded or dtype == model):
                dtype = "BF16"
            role = classify(tensor.name, tensor.dtype, tensor.shape).name
            reason = (
                "decoded" if decoded else "as in the master" if dtype == tensor.plain_dtype else "model dtype to BF16"
            )
            stored = (TensorSpec(tensor.name, dtype, tensor.shape),)
            action = DECODE if decoded else KEEP
            result.append(TensorPlan(tensor.name, tensor.shape, tensor.dtype, role, action, None, None, reason, stored))
        return result

    def metadata(self, tensors: Sequence[TensorPlan]) -> dict[str, str]:
        """See Transform."""
        return DEFAULT_METADATA

    @property
    def left_out(self) -> dict[str, str]:
        """See Transform; nothing."""
        return {}

    @property
    def also_reads(self) -> tuple[Checkpoint, ...]:
        """See Transform; nothing."""
        return ()

    def job(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """See transform.Transform."""
        return CopyJob(planned, tensor)

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """See transform.Transform; a copy is never refused."""

    def config(
        self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
    ) -> dict[str, Any]:
        """See transform.Transform."""
        model = model_dtype(checkpoint.config, checkpoint.tensors)
        return edited_config(checkpoint.config, "BF16" if self.dtype == "bf16" else model, model, None)
