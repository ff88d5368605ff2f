"""The bf16 target: an ordinary checkpoint with decoded weights, in BF16 or in the source's dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pqweights.checkpoint.config import edited_config, model_dtype
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.native import NativeTensor
from pqweights.checkpoint.positions import stated_once
from pqweights.checkpoint.readers import LogicalTensor, PlainTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import sources_of
from pqweights.common.options import Options
from pqweights.models.description import ModelDescription
from pqweights.planning.layout import DECODE, KEEP, TensorPlan
from pqweights.planning.roles import role_of
from pqweights.targets.integers import Assignment
from pqweights.targets.loading import LoadableModel, by_transformers
from pqweights.targets.target import TRANSFORMERS, ExportSettings, ExportTarget, one_of

NAME = "bf16"


def _assign(dtype: str, checkpoint: Checkpoint, name: str | None) -> Assignment:
    """Store every tensor plainly.

    dtype: "bf16", or "source" for the dtype that each weight had in the source

    With bf16, every weight and everything else in the model's own dtype becomes BF16. A tensor that the source kept in
    another dtype, such as float32 state-space parameters beside BF16 weights, keeps that dtype.
    """
    stored, model = "BF16" if dtype == "bf16" else None, model_dtype(checkpoint.config, checkpoint.tensors)
    return Assignment(
        tensors=checkpoint.tensors,
        decisions={},
        config=edited_config(
            stated_once(checkpoint.config), stored or model, old_dtype=model, tensors=checkpoint.tensors
        ),
        plain_dtype=stored,
    )


def plain_plan(
    tensor: LogicalTensor,
    known: ModelDescription,
    *,
    weights: frozenset[str],
    model: str,
    dtype: str | None,
    reason: str | None = None,
    forced: str | None = None,
) -> TensorPlan:
    """Plan a tensor that is stored plainly.

    known: what is known of the type of the model
    weights: see Checkpoint
    model: the dtype of the model
    dtype: the dtype that weights and everything else in the model's dtype get; None leaves each tensor its own
    reason: why a weight that might have become integers does not
    forced: the dtype that it gets in any case
    """
    decoded = is_weight(tensor, weights)
    stored = forced or stored_dtype(tensor, weights, model=model, dtype=dtype)
    why = "decoded" if decoded else "as in the source" if stored == tensor.plain_dtype else "model dtype to BF16"
    specs = (TensorSpec(tensor.name, stored, tensor.shape),)
    action = DECODE if decoded else KEEP
    return TensorPlan.of(tensor, specs, role=role_of(tensor, known), action=action, reason=reason or why)


def stored_dtype(tensor: LogicalTensor, weights: frozenset[str], *, model: str, dtype: str | None) -> str:
    """Return the dtype of a tensor that is stored plainly. weights, model, dtype: see plain_plan"""
    is_rounded = is_weight(tensor, weights) and not is_plain_in_source(tensor)
    is_changed = dtype is not None and (tensor.plain_dtype == model or is_rounded)
    return dtype if dtype is not None and is_changed else tensor.plain_dtype


def is_plain_in_source(tensor: LogicalTensor) -> bool:
    """Whether a master holds without loss what a tensor is put together from, which are plain numbers in the source."""
    if sources := sources_of(tensor):
        return all(map(is_plain_in_source, sources))
    return isinstance(tensor, NativeTensor) and isinstance(tensor.source, PlainTensor)


def is_weight(tensor: LogicalTensor, weights: frozenset[str]) -> bool:
    """Whether a tensor, or one of those that it is put together from, is among the weights of a checkpoint."""
    if sources := sources_of(tensor):
        return any(is_weight(source, weights) for source in sources)
    return tensor.name in weights


def read_options(options: Options) -> ExportSettings:
    """Return the target with the dtype. Raises OptionError for one that it does not have."""
    dtype = one_of(NAME, "dtype", options.dtype, allowed=("bf16", "source"))
    return ExportSettings(stated={"target": NAME, "dtype": dtype}, assign=partial(_assign, dtype))


def _load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    return ["An ordinary checkpoint: whatever opens the base model opens it.", *by_transformers(model)]


TARGET = ExportTarget(
    name=NAME,
    runtime=TRANSFORMERS,
    tags=("bf16",),
    options=("dtype",),
    read_options=read_options,
    check=lambda checkpoint: None,
    load_section=_load_section,
    choices={"bf16": (Options(), 16)},
)
