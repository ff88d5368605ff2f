"""Norms and radii that no encoder writes are found in every codec and type of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import helpers
import numpy as np
import numpy.typing as npt
import pytest
import torch

from pqweights.codecs import CODECS
from pqweights.codecs.lloyd_max import ScalarCoder
from pqweights.codecs.protocol import VALUE_DTYPES, Bytes, Coder, DamagedBlock, State
from pqweights.codecs.scalar import LARGEST_EXPONENT, ScalarState
from pqweights.codecs.weight import encode_weight
from pqweights.common.dtypes import item_bytes

# float16: infinities, NaN of both kinds, negative numbers and zero, and what flash memory holds after it was erased.
NO_NORMS = (0x7C00, 0x7E00, 0x7C01, 0xFC00, 0xFE00, 0xBC00, 0x8001, 0x8000, 0xFFFF)
BLOCKS = 37


def coders() -> Iterator[Any]:
    for name, codec in CODECS.items():
        for bits in sorted({codec.rates[0], codec.rates[len(codec.rates) // 2], codec.rates[-1]}):
            yield pytest.param(codec.coder(bits).sized(BLOCKS * 128), id=f"{name}-{bits}")


each = pytest.mark.parametrize("coder", list(coders()))


def encoded(coder: Coder) -> list[Bytes]:
    values = helpers.gaussian(BLOCKS * 128 // coder.block_size, coder.block_size).view(np.uint8).reshape(-1)
    parts = [np.empty((BLOCKS * 128 // coder.block_size, part.bytes_per_block), dtype=np.uint8) for part in coder.parts]
    coder.encode(values, parts, dtype="F32", state=coder.first_state())
    return parts


def decoded(coder: Coder, parts: Sequence[Bytes], *, dtype: str, state: State) -> Bytes:
    values = np.empty(len(parts[0]) * coder.block_size * item_bytes(dtype), dtype=np.uint8)
    coder.decode(parts, values, dtype=dtype, state=state)
    return values


def damaged(parts: Sequence[Bytes], place: int, *, block: int, pattern: int) -> list[Bytes]:
    """Return copies of the parts, with the first number of a block in a float16 part replaced."""
    copies = [part.copy() for part in parts]
    copies[place].view(np.uint16)[block, 0] = pattern
    return copies


def float16_parts(coder: Coder) -> list[int]:
    return [place for place, part in enumerate(coder.parts) if part.dtype == "F16"]


@each
@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_number_that_no_encoder_writes_is_found(coder: Coder, dtype: str) -> None:
    parts, state = encoded(coder), coder.first_state()
    for place in float16_parts(coder):
        for number, pattern in enumerate(NO_NORMS):
            block = (0, 20, BLOCKS - 1)[number % 3]
            wrong = damaged(parts, place, block=block, pattern=pattern)
            with pytest.raises(DamagedBlock, match="not finite") as found:
                decoded(coder, wrong, dtype=dtype, state=state)
            assert found.value.block == block


@each
def test_number_that_no_encoder_writes_is_found_by_torch(coder: Coder) -> None:
    parts, state = encoded(coder), coder.first_state()
    for place in float16_parts(coder):
        for pattern in NO_NORMS:
            wrong = damaged(parts, place, block=5, pattern=pattern)
            with pytest.raises(DamagedBlock, match="not finite") as found:
                coder.decode_torch([torch.from_numpy(part) for part in wrong], state)
            assert found.value.block == 5


@each
def test_erased_block_is_found_without_decoding_or_by_it(coder: Coder) -> None:
    """Erased flash memory holds ones, in all parts."""
    parts, state = encoded(coder), coder.first_state()
    block = len(parts[0]) - 1
    for part in parts:
        part[block] = 0xFF
    with pytest.raises(DamagedBlock) as found:
        decoded(coder, parts, dtype="BF16", state=state)
    assert found.value.block == block


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if "_norms" in codec.suffixes])
@pytest.mark.parametrize("rotation", [0, -1])
def test_exponent_that_no_norm_of_float32_needs_is_found(name: str, rotation: int) -> None:
    """With it, norms would become infinite in float32, and products with levels of 0 NaN."""
    coder = CODECS[name].coder(4)
    assert isinstance(coder, ScalarCoder)
    parts = encoded(coder)
    state = ScalarState(coder._codec.rotations[rotation], LARGEST_EXPONENT)
    with pytest.raises(DamagedBlock, match="too large"):
        decoded(coder, parts, dtype="BF16", state=state)


def weights_of_all_kinds() -> dict[str, npt.NDArray[np.float32]]:
    """Return weights that are the hardest for norms. One of them ends in the middle of a block."""
    limit = float(np.finfo(np.float32).max)
    zeros = np.zeros(300, dtype=np.float32)
    signs = np.where(np.random.default_rng(1).integers(0, 2, 384) > 0, 1.0, -1.0).astype(np.float32)
    kinds = {f"{scale:g}": helpers.gaussian(3, 100, scale=scale) for scale in (1e-44, 1e-30, 1e-6, 1.0, 1e6, 1e30)}
    return kinds | {
        "largest numbers": signs[:300] * np.float32(limit),
        "equal largest numbers": np.full(300, limit, dtype=np.float32),
        "smallest numbers": signs[:300] * np.float32(2.0**-149),
        "negative zeros": -zeros,
        "zeros of both signs": zeros * signs[:300],
        "one number": np.eye(1, 300, 7, dtype=np.float32) * -3,
        "one huge and one tiny block": np.concatenate([np.full(128, limit / 2), np.full(130, 1e-40)]).astype(
            np.float32
        ),
        **{f"family {name}": blocks for name, blocks in helpers.block_families().items()},
    }


@each
def test_what_encoders_write_is_never_refused(coder: Coder) -> None:
    """Not in the end, nor between two passes, when the exponent does not fit yet."""
    for values in weights_of_all_kinds().values():
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        weight, _ = encode_weight(raw, dtype="F32", shape=values.shape, coder=coder)
        for dtype in VALUE_DTYPES:
            weight.decode_blocks(0, len(weight.parts[0]), dtype)
        for place in (place for place, part in enumerate(weight.coder.parts) if part.dtype == "F16"):
            assert (weight.parts[place].view(np.uint16) < 0x7C00).all()
