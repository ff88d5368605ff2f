"""The fixed orthogonal matrix that preconditions keys and values (arXiv:2502.02617, Section 2.2).

For sizes that are powers of two it is a randomised Hadamard matrix: random signs, then H / sqrt(size). Sizes for which
no such matrix exists take a random orthogonal matrix, from the QR decomposition of Gaussian numbers.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SEED = 0x51A75

Doubles = npt.NDArray[np.float64]


@functools.cache
def rotation(size: int, device: torch.device) -> Tensor:
    """Return the matrix R by whose transpose vectors of `size` coordinates are multiplied, [size, size] f32."""
    with torch.inference_mode(False):  # later calls may need gradients
        matrix = _hadamard(size) if size & (size - 1) == 0 else _dense(size)
        return torch.from_numpy(matrix.astype(np.float32)).to(device)


def _hadamard(size: int) -> Doubles:
    """Return H diag(signs) / sqrt(size)."""
    index = np.arange(size)
    rows = np.where(np.bitwise_count(index[:, None] & index[None, :]) % 2, -1.0, 1.0)
    scaled: Doubles = rows * _signs(size)[None, :] / np.sqrt(size)
    return scaled


def _signs(size: int) -> Doubles:
    bits = np.random.Generator(np.random.PCG64(SEED)).bytes(size)
    return np.where(np.frombuffer(bits, dtype=np.uint8) & 1, -1.0, 1.0)


def _dense(size: int) -> Doubles:
    """Return a random orthogonal matrix whose distribution has no preferred direction."""
    gaussian = np.random.Generator(np.random.PCG64(SEED)).standard_normal((size, size))
    q, r = np.linalg.qr(gaussian)
    turned: Doubles = q * np.sign(np.diag(r))[None, :]
    return turned
