"""On which grids the weights of a plain checkpoint lie, by a few numbers of each: what `plan` says of it.

A weight that was decoded from few bits lies on the grid of a format, which then holds its very numbers (carried.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from pqweights.checkpoint.readers import PlainTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.dtypes import item_bytes
from pqweights.formats.gguf_blocks import BlockRule
from pqweights.formats.packing import RoundingRule
from pqweights.kernels import VALUE_DTYPES
from pqweights.kernels.gguf_types import BLOCK_TYPES
from pqweights.kernels.groups import GroupRule
from pqweights.kernels.recovery import RECOVERED_TYPES
from pqweights.models import text_model
from pqweights.planning.roles import classify
from pqweights.targets.carried import recovered_groups

# Of so many weights, spread over the model, so many numbers are read, of one row.
SAMPLED_WEIGHTS, SAMPLED_NUMBERS = 256, 2048
OFF_GRID = "none"


def block_grids() -> dict[str, RoundingRule]:
    """Return the grids of types of GGUF, those of the fewest bits first: many lie on that of a wider type, too."""
    types = sorted(RECOVERED_TYPES, key=lambda name: BLOCK_TYPES[name].bits_per_weight)
    return {name: BlockRule.of(name) for name in types}


def grids_by_name() -> dict[str, RoundingRule]:
    """Return all grids, those of the fewest bits first."""
    blocks = block_grids()
    groups: dict[str, RoundingRule] = {}
    for size, dtype in itertools.product((128, 64), ("BF16", "F16")):
        of_size: dict[str, Any] = {"bits": 4, "group_size": size, "scale_dtype": dtype}
        name = f"INT4 in groups of {size} ({dtype})"
        groups[name] = GroupRule(symmetric=True, middle=True, **of_size)
        groups[f"{name} with zeros"] = GroupRule(symmetric=False, middle=False, zeros=True, **of_size)
        groups[f"{name} with offsets"] = GroupRule(symmetric=False, middle=False, **of_size)
    narrow = [name for name in blocks if BLOCK_TYPES[name].bits < 4]
    return {name: blocks[name] for name in narrow} | groups | blocks


def sampled_grids(checkpoint: Checkpoint) -> dict[str, int]:
    """Return how many weights lie on which grid, and how many on none, by a row of each; nothing if none lie on any.

    Only files on this machine are read, and of a large model only some of the weights.
    """
    if checkpoint.storage.local_folder() is None:
        return {}
    model = text_model(checkpoint.config)
    weights = [
        tensor
        for tensor in checkpoint.tensors
        if isinstance(tensor, PlainTensor)
        and tensor.dtype in VALUE_DTYPES
        and 0 not in tensor.shape
        and classify(tensor.name, tensor.dtype, tensor.shape, model).keep is None
    ]
    grids = grids_by_name()
    chosen = weights if len(weights) <= SAMPLED_WEIGHTS else weights[:: -(-len(weights) // SAMPLED_WEIGHTS)]
    counts = Counter(grid_of(tensor, grids) or OFF_GRID for tensor in chosen)
    return dict(counts.most_common()) if counts.keys() - {OFF_GRID} else {}


def grid_of(tensor: PlainTensor, grids: Mapping[str, RoundingRule]) -> str | None:
    """Return the first grid on which the middle row of a weight lies, by up to SAMPLED_NUMBERS of it."""
    width, rows = tensor.shape[-1], int(np.prod(tensor.shape[:-1]))
    count = min(width, SAMPLED_NUMBERS)
    raw = np.empty(count * item_bytes("F32"), dtype=np.uint8)
    tensor.read(rows // 2 * width, count, "F32", raw)
    values = raw.view(np.float32)
    if not np.isfinite(values).all():
        return None
    for name, rule in grids.items():
        if width % rule.group_size == 0:
            recovered = recovered_groups(rule, values, tensor.dtype)
            if recovered is not None and (recovered[1] | ~values.reshape(-1, rule.group_size).any(axis=1)).all():
                return name
    return None
