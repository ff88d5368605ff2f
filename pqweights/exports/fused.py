"""Which weights runtimes compute with in one layer, and so must hold in one form: all plain, or in one group size.

vLLM (0.32, `packed_modules_mapping` of its models) joins q, k and v, gate and up, the inputs of linear attention and
the down-projections of MLA, and all experts of a layer; it refuses a layer whose parts differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.exports.bf16 import is_encoded
from pqweights.planning.groups import group_of
from pqweights.planning.roles import classify

# Beside the weights that share a bit width in a master: names of modules, and the fused layer that they are part of.
_ALSO_FUSED = (
    (re.compile(r"[gb]_proj"), "qkv"),  # linear attention of OLMo Hybrid and Bailing v3
    (re.compile(r"c_fc_[01]"), "gate_up"),  # EXAONE 3
)


def fused_layers(tensors: Iterable[LogicalTensor]) -> list[list[LogicalTensor]]:
    """Group the matrices of linear layers, and what the master encoded, by the layers that runtimes make of them.

    Weights that no other is fused with form groups of one.
    """
    layers: dict[str, list[LogicalTensor]] = {}
    for tensor in tensors:
        if is_encoded(tensor) or (tensor.name.endswith(".weight") and len(tensor.shape) == 2):
            layers.setdefault(_layer(tensor), []).append(tensor)
    return list(layers.values())


def _layer(tensor: LogicalTensor) -> str:
    """Return the name of the layer that a weight becomes part of."""
    role = classify(tensor.name, tensor.dtype, tensor.shape).name
    if not tensor.name.endswith(".weight") and role != "expert":
        return tensor.name
    path, _, last = tensor.name.removesuffix(".weight").rpartition(".")
    also = next((whole for pattern, whole in _ALSO_FUSED if pattern.fullmatch(last)), None)
    return group_of(tensor.name, role, tied=False) if also is None else f"{path}.{also}"
