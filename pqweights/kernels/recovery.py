"""Codes, scales and offsets found again in weights that were decoded from them: native/recovery.cpp.

A checkpoint that was decoded from few bits, or trained for them, holds nothing else, but rounded as it is stored: most
often to BF16. What is found decodes to the very numbers of the checkpoint, once it is rounded like them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pqweights.kernels import VALUE_DTYPES, native
from pqweights.kernels.gguf_encoding import BLOCK_TYPES
from pqweights.kernels.groups import KINDS, MOST_WEIGHTS, GroupRule, Groups

Floats = npt.NDArray[np.float32]
Truths = npt.NDArray[np.bool_]

# The types of GGUF whose blocks are found.
RECOVERED_TYPES = (
    "Q4_0", "Q5_0", "Q8_0", "Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0",
)  # fmt: skip


def recover_blocks(type_name: str, values: Floats, dtype: str) -> tuple[npt.NDArray[np.uint8], Truths]:
    """Find the blocks of a type (one of RECOVERED_TYPES) that weights [blocks * block size] were decoded from.

    dtype: as the weights are stored, one of VALUE_DTYPES

    Returns u8 [blocks, block bytes], and of which they were found; not of zeros, which any scale is good for.
    """
    kind = BLOCK_TYPES[type_name]
    blocks = values.size // kind.group_size
    data = np.zeros((blocks, kind.block_bytes), dtype=np.uint8)
    recovered = np.empty(blocks, dtype=np.uint8)
    native.call(
        "recover_blocks",
        kind.number,
        native.array(values, np.float32, blocks * kind.group_size),
        native.array(data, np.uint8, data.size, written=True),
        native.array(recovered, np.uint8, blocks, written=True),
        blocks,
        VALUE_DTYPES[dtype],
    )
    return data, recovered.view(np.bool_)


def recover_groups(rule: GroupRule, values: Floats, dtype: str) -> tuple[Groups, Truths]:
    """Find the integers that weights [groups * group size] were decoded from, in groups of at most MOST_WEIGHTS.

    dtype: as the weights are stored, one of VALUE_DTYPES

    Returns groups without energies and errors, and of which they were found; not of zeros.
    """
    assert rule.group_size <= MOST_WEIGHTS and rule.rows == 1
    groups, size = values.size // rule.group_size, rule.group_size
    codes, (scales, offsets) = np.zeros((groups, size), dtype=np.uint8), np.zeros((2, groups), dtype=np.float32)
    recovered = np.empty(groups, dtype=np.uint8)
    native.call(
        "recover_groups",
        native.array(values, np.float32, groups * size),
        native.array(codes, np.uint8, groups * size, written=True),
        native.array(scales, np.float32, groups, written=True),
        native.array(offsets, np.float32, groups, written=True),
        native.array(recovered, np.uint8, groups, written=True),
        *(groups, size, rule.bits, KINDS[rule.kind], rule.middle),
        *(VALUE_DTYPES[rule.scale_dtype], VALUE_DTYPES[dtype]),
    )
    none = np.zeros(groups)
    return Groups(codes=codes, scales=scales, offsets=offsets, energies=none, errors=none), recovered.view(np.bool_)
