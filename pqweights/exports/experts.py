"""The weights of single experts, out of stacks [experts, out, in] of all experts of a layer.

Runtimes of compressed-tensors look for a matrix of each expert, by the names that checkpoints of single experts have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pqweights.checkpoint.models import text_model
from pqweights.checkpoint.models.conventions import STACKED_EXPERTS
from pqweights.checkpoint.models.traits import Trait
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import MatrixCache, MovedTensor, Segment
from pqweights.exports.bf16 import is_encoded


def with_single_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with a weight for each expert in the place of the stacks that the master encodes.

    Stacks of models of which transformers does not take single experts stay as they are.
    """
    traits = text_model(checkpoint.config).traits
    if Trait.TAKES_SINGLE_EXPERTS not in traits:
        return checkpoint
    turned, cache = Trait.TURNED_EXPERTS in traits, MatrixCache()
    tensors: list[LogicalTensor] = []
    for tensor in checkpoint.tensors:
        match = STACKED_EXPERTS.fullmatch(tensor.name)
        if match is None or len(tensor.shape) != 3 or not is_encoded(tensor):
            tensors.append(tensor)
        else:
            tensors += _singles(tensor, match["layer"], match["matrix"], turned=turned, cache=cache)
    return replace(checkpoint, tensors=tuple(tensors))


def _singles(
    tensor: LogicalTensor, experts: str, matrix: str, *, turned: bool, cache: MatrixCache
) -> Iterator[MovedTensor]:
    """Yield the matrices [out, in] of each expert, gate before up. turned: whether the stack is [experts, in, out]"""
    count, rows, columns = tensor.shape
    outputs, inputs = (columns, rows) if turned else (rows, columns)
    names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
    height = outputs // len(names)
    for expert in range(count):
        for part, name in enumerate(names):
            run = (0, rows) if turned else (part * height, height)
            yield MovedTensor(
                name=f"{experts}.{expert}.{name}.weight",
                shape=(height, inputs),
                dtype=tensor.plain_dtype,
                segments=(Segment(tensor=tensor, first=expert * rows + run[0], step=1, count=run[1]),),
                columns=range(part * height, (part + 1) * height) if turned else range(inputs),
                transposed=turned,
                cache=cache,
            )
