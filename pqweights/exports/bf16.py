"""The bf16 target: an ordinary checkpoint with decoded weights, in BF16 or in the source's dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pqweights.checkpoint.config import edited_config, model_dtype
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.models import text_model
from pqweights.checkpoint.models.description import ModelDescription
from pqweights.checkpoint.models.names import role_name
from pqweights.checkpoint.native import NativeTensor
from pqweights.checkpoint.positions import stated_once
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, OriginalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import sources_of
from pqweights.common.threads import Progress
from pqweights.errors import OptionError
from pqweights.exports.loading import LoadableModel, by_transformers
from pqweights.exports.target import TRANSFORMERS, ExportSource, ExportTarget, FormatChoice, one_of
from pqweights.planning.options import ExportOptions
from pqweights.planning.plan import DECODE, KEEP, TensorPlan, stored_bytes
from pqweights.rewrite.jobs import CopyJob, Job
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.transform import EXPORT, Account, Notes, Output, Transform, TransformInputs

NAME = "bf16"


@dataclass(frozen=True)
class Bf16Export:
    """The transform from a master to an ordinary checkpoint.

    dtype: "bf16", or "source" for the dtype that each weight had in the source

    With bf16, every weight and everything else in the model's own dtype becomes BF16. A tensor that the source kept in
    another dtype, such as float32 state-space parameters beside BF16 weights, keeps that dtype.
    """

    dtype: str = "bf16"

    @property
    def account(self) -> Account:
        """The target and the dtype."""
        return Account(EXPORT, {"target": NAME, "dtype": self.dtype})

    @property
    def inputs(self) -> TransformInputs:
        """Nothing besides the master."""
        return TransformInputs()

    @property
    def output(self) -> Output:
        """Safetensors files, and the source's config.json with its dtype, without a quantization_config."""
        return Output(config=self._config)

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """Plan each tensor as it is, in the dtype that it gets."""
        model, known = model_dtype(checkpoint.config, checkpoint.tensors), text_model(checkpoint.config)
        dtype = "BF16" if self.dtype == "bf16" else None
        return [plain_plan(tensor, known, model=model, dtype=dtype) for tensor in checkpoint.tensors]

    def prepare(self, progress: Progress) -> None:
        """Do nothing: a copy depends on its tensor alone."""

    def job(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """Return the job that copies a tensor; reading a weight decodes it."""
        return CopyJob(planned, tensor)

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """Accept every tensor."""

    def notes(self, records: Sequence[TensorRecord]) -> Notes:
        """Return nothing: there is no error, and no option to speak of."""
        return Notes()

    def _config(
        self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
    ) -> dict[str, Any]:
        model = model_dtype(checkpoint.config, checkpoint.tensors)
        dtype = "BF16" if self.dtype == "bf16" else model
        return edited_config(stated_once(checkpoint.config), dtype, old_dtype=model, tensors=checkpoint.tensors)


def role_of(tensor: LogicalTensor, model: ModelDescription) -> str:
    """Return the role of a tensor of a model; one that is put together from others has that of the first of them."""
    return role_name((*sources_of(tensor), tensor)[0].name, tensor.dtype, tensor.shape, model)


def plain_plan(
    tensor: LogicalTensor,
    known: ModelDescription,
    *,
    model: str,
    dtype: str | None,
    reason: str | None = None,
    forced: str | None = None,
) -> TensorPlan:
    """Plan a tensor that is stored plainly.

    known: what is known of the type of the model
    model: the dtype of the model
    dtype: the dtype that weights and everything else in the model's dtype get; None leaves each tensor its own
    reason: why a weight that might have become integers does not
    forced: the dtype that it gets in any case
    """
    decoded = is_encoded(tensor)
    stored = forced or stored_dtype(tensor, model=model, dtype=dtype)
    why = "decoded" if decoded else "as in the master" if stored == tensor.plain_dtype else "model dtype to BF16"
    specs = (TensorSpec(tensor.name, stored, tensor.shape),)
    return TensorPlan(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        role=role_of(tensor, known),
        action=DECODE if decoded else KEEP,
        codec=None,
        bits=None,
        reason=reason or why,
        bytes=stored_bytes(specs),
        stored=specs,
    )


def stored_dtype(tensor: LogicalTensor, *, model: str, dtype: str | None) -> str:
    """Return the dtype of a tensor that is stored plainly. model, dtype: see plain_plan"""
    is_changed = dtype is not None and (tensor.plain_dtype == model or (is_encoded(tensor) and not is_native(tensor)))
    return dtype if dtype is not None and is_changed else tensor.plain_dtype


def is_native(tensor: LogicalTensor) -> bool:
    """Whether the master holds all that a tensor is put together from without loss."""
    if sources := sources_of(tensor):
        return all(map(is_native, sources))
    return isinstance(tensor, NativeTensor)


def is_encoded(tensor: LogicalTensor) -> bool:
    """Whether the master holds codes for a tensor, or for some of the tensors that it is put together from."""
    if sources := sources_of(tensor):
        return any(map(is_encoded, sources))
    return isinstance(tensor, EncodedTensor | OriginalTensor)


def read_options(options: ExportOptions) -> str:
    """Return the dtype, as Bf16Export takes it.

    Raises OptionError for an option that the target does not have.
    """
    return one_of(NAME, "dtype", options.dtype, allowed=("bf16", "source"))


def _prepare(source: ExportSource, dtype: str) -> tuple[Checkpoint, Transform]:
    if source.original is not None:
        raise OptionError("`source`: the bf16 target would only copy the original; the option is for integer targets")
    return source.checkpoint, Bf16Export(dtype)


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    return ["An ordinary checkpoint: whatever opens the base model opens it.", *by_transformers(model)]


TARGET = ExportTarget(
    name=NAME,
    runtime=TRANSFORMERS,
    tags=("bf16",),
    options=("dtype",),
    read_options=read_options,
    prepare=_prepare,
    check=lambda master, dtype: None,
    load_section=_load_section,
    choices=(FormatChoice("bf16", ExportOptions(), 16),),
    takes_original=False,
)
