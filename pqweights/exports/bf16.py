"""The plain export: an ordinary checkpoint with decoded weights, in BF16 or in the source's dtypes. Everything loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pqweights.buffers import BufferPool
from pqweights.checkpoint.config import edited_config, model_dtype
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, OriginalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import MovedTensor
from pqweights.errors import OptionError
from pqweights.exports.loading import LoadableModel, by_transformers
from pqweights.exports.options import ExportOptions, one_of
from pqweights.exports.target import TRANSFORMERS, ExportSource, ExportTarget
from pqweights.planning.plan import DECODE, DEFAULT_METADATA, KEEP, TensorPlan
from pqweights.planning.roles import classify
from pqweights.rewrite.jobs import CopyJob, Job
from pqweights.rewrite.manifest import TensorRecord
from pqweights.rewrite.transform import Transform

NAME = "bf16"


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
        return {"target": NAME, "dtype": self.dtype}

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """See transform.Transform."""
        model = model_dtype(checkpoint.config, checkpoint.tensors)
        return [plain_plan(t, model, "BF16" if self.dtype == "bf16" else None) for t in checkpoint.tensors]

    @property
    def metadata(self) -> dict[str, str]:
        """See Transform."""
        return DEFAULT_METADATA

    @property
    def left_out(self) -> dict[str, str]:
        """See Transform; nothing."""
        return {}

    @property
    def also_reads(self) -> dict[str, Checkpoint]:
        """See Transform; nothing."""
        return {}

    def job(self, planned: TensorPlan, tensor: LogicalTensor, buffers: BufferPool) -> Job:
        """See transform.Transform."""
        return CopyJob(planned, tensor, buffers)

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """See transform.Transform; a copy is never refused."""

    def config(
        self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
    ) -> dict[str, Any]:
        """See transform.Transform."""
        model = model_dtype(checkpoint.config, checkpoint.tensors)
        return edited_config(checkpoint.config, "BF16" if self.dtype == "bf16" else model, model, None)


def plain_plan(tensor: LogicalTensor, model: str, dtype: str | None, reason: str | None = None) -> TensorPlan:
    """A tensor stored plainly: weights, and whatever else has the dtype of the model, in `dtype` if one is given.

    reason: why a weight that might have been quantized is not.
    """
    decoded = is_encoded(tensor)
    stored = dtype if dtype is not None and (decoded or tensor.plain_dtype == model) else tensor.plain_dtype
    why = "decoded" if decoded else "as in the master" if stored == tensor.plain_dtype else "model dtype to BF16"
    return TensorPlan(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        role=classify(tensor.name, tensor.dtype, tensor.shape).name,
        action=DECODE if decoded else KEEP,
        codec=None,
        bits=None,
        reason=reason or why,
        stored=(TensorSpec(tensor.name, stored, tensor.shape),),
    )


def is_encoded(tensor: LogicalTensor) -> bool:
    """Whether the master holds a tensor, or some of what it was put together from, as codes."""
    if isinstance(tensor, MovedTensor):
        return any(is_encoded(source) for source in tensor.sources)
    return isinstance(tensor, EncodedTensor | OriginalTensor)


def read_options(options: ExportOptions) -> str:
    """The dtype, as Bf16Export takes it.

    Raises OptionError for what the target does not have.
    """
    options.only(NAME, "dtype")
    return one_of(NAME, "dtype", options.dtype, ("bf16", "source"))


def _prepare(source: ExportSource, dtype: str) -> tuple[Checkpoint, Transform]:
    if source.original is not None:
        raise OptionError("--source: the original is what the bf16 target would give; it is for integer targets")
    return source.checkpoint, Bf16Export(dtype)


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    return ["An ordinary checkpoint: whatever opens the base model opens it.", *by_transformers(model)]


TARGET = ExportTarget(
    name=NAME,
    runtime=TRANSFORMERS,
    tags=("bf16",),
    read_options=read_options,
    prepare=_prepare,
    load_section=_load_section,
)
