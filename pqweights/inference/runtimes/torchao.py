"""The INT4 tensors of torchao on the CPU, where they cannot compute: decoded by PyTorch's own kernel for INT4."""

from __future__ import annotations

from typing import Any

import numpy as np

from pqweights.exports.formats import unpack_nibbles, unpack_tiles
from pqweights.inference.runtimes.packages import package


def decode_on_cpu(weight: Any) -> Any:
    """Decode a weight with aten's CPU kernel for (code - 8) * scale + zero: [N, K] f32.

    The kernel multiplies the identity by the weight. It is slow in float32 (0.6 G multiply-adds a second), so it runs
    once for each weight; in BF16 it would round.
    """
    torch = package("torch", "torchao")
    rows, columns = weight.shape
    group_size = weight.block_size[-1]
    if type(weight).__name__ == "Int4Tensor":
        codes = unpack_nibbles(weight.qdata.numpy().view(np.uint8) ^ np.uint8(0x88))
        scales = torch.stack([weight.scale, weight.zero_point], dim=-1)
    else:
        codes = unpack_tiles(weight.qdata.numpy())
        scales = weight.scale_and_zero
    padded = -(-rows // 16) * 16  # the kernel takes a multiple of 16 rows
    whole = np.zeros((padded, columns), dtype=np.int32)
    whole[:rows] = codes[:rows, :columns]
    pairs = torch.zeros(columns // group_size, padded, 2)
    pairs[:, :rows] = scales[: columns // group_size, :rows].float()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(whole), 1)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(columns), packed, group_size, pairs)
    return product.T[:rows].contiguous()
