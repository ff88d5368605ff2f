"""Helpers for scalar codecs: encoded weights and passes as codes, norms, rotation and exponent."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.codecs.lloyd_max import ScalarCoder
from pqweights.codecs.protocol import PassResult
from pqweights.codecs.scalar import ScalarState
from pqweights.codecs.weight import EncodedWeight, encode_weight
from pqweights.kernels.codebook import Codebook

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]  # float16 bit patterns


class ScalarWeight:
    """A weight that a scalar codec encoded."""

    def __init__(self, weight: EncodedWeight) -> None:
        assert isinstance(weight.coder, ScalarCoder) and isinstance(weight.state, ScalarState)
        self.whole = weight
        self.codes: Bytes = weight.parts[0]
        self.norms: Halves = weight.parts[1].reshape(-1).view(np.uint16)
        self.codebook: Codebook = weight.coder.codebook
        self.codec, self.bits = weight.coder.codec, weight.coder.bits
        self.rotation, self.norm_exponent = weight.state.rotation, weight.state.norm_exponent
        self.shape, self.dtype = weight.shape, weight.dtype

    def decode(self) -> Bytes:
        return self.whole.decode()

    def decode_blocks(self, start: int, stop: int, dtype: str) -> Bytes:
        return self.whole.decode_blocks(start, stop, dtype)


def encode_scalar(
    values: Bytes, dtype: str, shape: tuple[int, ...], codec: Any, bits: int
) -> tuple[ScalarWeight, PassResult]:
    """Encode a whole weight, with as many passes as it needs."""
    weight, measured = encode_weight(values, dtype=dtype, shape=shape, coder=codec.coder(bits))
    return ScalarWeight(weight), measured


def norm_ties(book: Codebook) -> npt.NDArray[np.float32]:
    """Numbers from 1.5 on whose one-hot blocks have a norm half-way between two float16, above the even one."""
    level = book.levels[np.searchsorted(book.thresholds, 1, side="right")]  # that of all coordinates
    values = (np.arange(2**20, dtype=np.uint32) + np.float32(1.5).view(np.uint32)).view(np.float32)
    radius = np.sqrt(values * values)
    z = values * (np.float32(1) / radius)
    norms = np.asarray(radius * ((z * level) / (level * level)), np.float32)
    # Normal float16 numbers lack the last 13 bits of float32; the bit before them is 0 in even ones.
    return values[norms.view(np.uint32) & 0x3FFF == 0x1000]
