"""Stacks of experts in MLX checkpoints (`switch_mlp`), as the single experts that the published model has.

mlx-lm stacks them when it converts a model (its models/*.py, `sanitize`). The bytes of one expert lie together, so that
each part of it is a stored tensor of its own. Only of some types is that all that it changes, see
Trait.STACKED_BY_MLX.
"""

from __future__ import annotations

import re

from pqweights.checkpoint.header import StoredTensor

STACK = re.compile(r"(.*)\.(?:switch_mlp|experts)\.((?:gate|up|down)_proj)\.(weight|scales|biases)")
SINGLE = re.compile(r"(.*)\.experts\.\d+\.(\w+)")
# What published models call the matrices of experts below block_sparse_moe.
NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
MOST_EXPERTS = 1 << 14  # of a layer
BESIDE_NUMBERED = "block_sparse_moe"


def with_single_experts(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the stored tensors with the parts of single experts in the place of those of stacks."""
    result = {}
    for name, tensor in stored.items():
        match = STACK.fullmatch(name)
        if match is None or len(tensor.shape) != 3 or not tensor.byte_count or tensor.shape[0] > MOST_EXPERTS:
            result[name] = tensor
            continue
        path, matrix, part = match.groups()
        matrix = NUMBERED[matrix] if path.endswith(BESIDE_NUMBERED) else matrix
        size = tensor.byte_count // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            single = f"{path}.experts.{expert}.{matrix}.{part}"
            offset = tensor.offset + expert * size
            result[single] = StoredTensor(single, tensor.dtype, tensor.shape[1:], tensor.file, offset, size)
    return result


def stacks_of(module: str) -> tuple[str, ...]:
    """Return what a stack may be called that an expert's matrix was a part of."""
    match = SINGLE.fullmatch(module)
    if match is None:
        return ()
    matrix = next((name for name, number in NUMBERED.items() if number == match[2]), match[2])
    return tuple(f"{match[1]}.{stack}.{matrix}" for stack in ("switch_mlp", "experts"))
