"""Experts as runtimes of the vllm target look for them, out of the stacks of all experts of a layer.

Those of compressed-tensors take a matrix of each expert, by the names that checkpoints of single experts have; those of
MXFP4 in the layout of gpt-oss take stacks [experts, out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import MovedTensor, transposed_matrices
from pqweights.errors import ExportError
from pqweights.models import text_config, text_model
from pqweights.models.conventions import STACKED_EXPERTS
from pqweights.models.traits import Trait
from pqweights.targets.bf16 import is_weight

OF_STACKS = "gpt_oss"


def with_single_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with a weight for each expert in the place of the stacks that are rounded.

    Stacks of models of which neither transformers nor vLLM takes single experts stay as they are.
    """
    traits = text_model(checkpoint.config).traits
    if not traits & {Trait.TAKES_SINGLE_EXPERTS, Trait.VLLM_TAKES_SINGLE_EXPERTS}:
        return checkpoint
    inputs_first = _is_transposed(checkpoint, traits)
    tensors: list[LogicalTensor] = []
    for tensor in checkpoint.tensors:
        match = STACKED_EXPERTS.fullmatch(tensor.name)
        if match is None or not is_stack(tensor, checkpoint.weights):
            tensors.append(tensor)
        else:
            tensors += _singles(tensor, match["layer"], match["matrix"], inputs_first=inputs_first)
    return replace(checkpoint, tensors=tuple(tensors))


def _is_transposed(checkpoint: Checkpoint, traits: frozenset[Trait]) -> bool:
    """Whether stacks are [experts, in, out].

    Where they may be either, those show it whose matrices are not square: if all of one kind are, none of the other is.
    """
    if Trait.EXPERTS_EITHER_WAY not in traits:
        return Trait.TRANSPOSED_EXPERTS in traits
    width = text_config(checkpoint.config).get("hidden_size")
    stacks = (tensor for tensor in checkpoint.tensors if is_stack(tensor, checkpoint.weights))
    return any(
        (columns == width) == ("down_proj" in tensor.name)
        for tensor in stacks
        for _, rows, columns in (tensor.shape,)
        if rows != columns
    )


def with_upright_stacks(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose encoded stacks [experts, in, out] are transposed to [experts, out, in].

    Raises ExportError for a model that runtimes do not read so: they know the layout by the type of the model.
    """
    model_type = (checkpoint.config or {}).get("model_type")
    if model_type != OF_STACKS:
        raise ExportError(f"config.json: stacks of MXFP4 are for models of type {OF_STACKS}, found {model_type}")
    tensors = tuple(
        transposed_matrices(t.name, t) if is_stack(t, checkpoint.weights) else t for t in checkpoint.tensors
    )
    return replace(checkpoint, tensors=tensors)


def is_stack(tensor: LogicalTensor, weights: frozenset[str]) -> bool:
    """Whether a tensor holds a matrix of all experts of a layer, and is one of the weights of a checkpoint."""
    return len(tensor.shape) == 3 and STACKED_EXPERTS.fullmatch(tensor.name) is not None and is_weight(tensor, weights)


def _singles(tensor: LogicalTensor, experts: str, matrix: str, *, inputs_first: bool) -> Iterator[MovedTensor]:
    """Yield the matrices [out, in] of each expert, gate before up. inputs_first: whether it is [experts, in, out]"""
    count, rows, columns = tensor.shape
    outputs, inputs = (columns, rows) if inputs_first else (rows, columns)
    names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
    height = outputs // len(names)
    for expert in range(count):
        for part, name in enumerate(names):
            first, held = (0, rows) if inputs_first else (part * height, height)
            yield MovedTensor.of(
                f"{experts}.{expert}.{name}.weight",
                (height, inputs),
                [(tensor, range(expert * rows + first, expert * rows + first + held))],
                columns=range(part * height, (part + 1) * height) if inputs_first else range(inputs),
                transposed=inputs_first,
            )
