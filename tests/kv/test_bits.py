"""Codes in bytes: the layout of runtime/kv/codes.py, written again in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import Array

from pqweights.runtime.kv.codes import pack, packed_bytes, unpack

FIELDS = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}


def reference(codes: Array, bits: int) -> bytes:
    """The bytes of the codes of one vector, one after the other."""
    found, place = bytearray(), 0
    for width in FIELDS[bits]:
        size = len(codes) * width // 8
        for byte in range(size):
            parts = codes[byte::size]
            assert len(parts) == 8 // width
            found.append(sum(((int(code) >> place) % (1 << width)) << (n * width) for n, code in enumerate(parts)))
        place += width
    return bytes(found)


@pytest.mark.parametrize("bits", range(1, 9))
def test_layout_is_the_documented_one(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 2, 64), dtype=np.uint8)
    packed = pack(torch.from_numpy(codes), bits)
    assert packed.shape == (3, 2, 8 * bits) and packed.dtype == torch.uint8
    for place in np.ndindex(3, 2):
        assert packed[place].numpy().tobytes() == reference(codes[place], bits)


@pytest.mark.parametrize("count", [1, 3, 4, 7, 8, 12, 33, 96])
@pytest.mark.parametrize("bits", range(1, 9))
def test_unpacking_undoes_packing(bits, count):
    codes = torch.randint(0, 1 << bits, (2, count), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape[-1] == packed_bytes(count, bits)
    assert torch.equal(unpack(packed, bits, count), codes)
    assert torch.equal(unpack(packed[:, None].expand(-1, 3, -1), bits, count), codes[:, None].expand(-1, 3, -1))
