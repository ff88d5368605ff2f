"""The INT4 tensors of torchao on the CPU, where they cannot compute: decoded by PyTorch's own kernel for INT4."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.inference.runtimes.packages import package

Codes = npt.NDArray[np.uint8]


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


def unpack_nibbles(packed: Codes) -> Codes:
    """Unpack bytes [rows, columns / 2] to codes [rows, columns]; the even column is the low nibble."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def unpack_tiles(words: npt.NDArray[np.int32]) -> Codes:
    """Unpack words [rows / 8, columns / 128, 32, 4] of PyTorch's tinygemm to codes [rows, columns].

    The layout is matrix_to_m16n8k16_Bint4_layout in aten/src/ATen/native/cuda/int4mm.cu: lane t holds row t / 4, and of
    each 16 columns the pairs that start at 2 (t % 4) and 2 (t % 4) + 8. A word holds two such runs of 16 columns, as
    nibbles 0 2 4 6 1 3 5 7.
    """
    tiles, blocks = words.shape[:2]
    result = np.empty((tiles, 8, blocks, 128), dtype=np.uint8)
    for lane, word, nibble in itertools.product(range(32), range(4), range(8)):
        odd, sixteen, half = nibble >> 2, nibble >> 1 & 1, nibble & 1
        column = word * 32 + sixteen * 16 + half * 8 + lane % 4 * 2 + odd
        result[:, lane // 4, :, column] = words[:, :, lane, word] >> 4 * nibble & 15
    return result.reshape(tiles * 8, blocks * 128)
