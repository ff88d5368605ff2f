"""Damaged superblocks of hadamard-trellis: decoding them ends, stays inside, and finds the damage or finite values."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trellis_decoder
import trellis_writer
from blocks import examples
from helpers import gaussian
from hypothesis import given
from hypothesis import strategies as st

from pqweights.formats.master import DamagedBlock
from pqweights.formats.trellis import Trellis
from pqweights.formats.weight import encode_weight
from pqweights.kernels.trellis import Superblocks

GUARD = 4096
SIZES = {"BF16": 2, "F16": 2, "F32": 4}
Rows = npt.NDArray[np.uint8]


def guarded(size: int) -> Rows:
    """An array between guards."""
    return np.full(size + 2 * GUARD, 0xAB, dtype=np.uint8)


@functools.cache
def neighbour(blocks: int) -> bytes:
    """A sound superblock."""
    return trellis_writer.superblock(np.random.default_rng(1), blocks, step=0.1, state_bits=3, first=12)


def decode(row: bytes, blocks: int, *, dtype: str = "F32", signed: bool = False) -> bool:
    """Decode a superblock before, between or after two others, by its bytes; return whether it was found damaged.

    Asserts that nothing outside the values is written, that only this superblock is named, that its neighbours are
    decoded all the same, and that all values are finite.
    """
    good = neighbour(blocks)
    size = max(len(row), len(good))
    good = good.ljust(size, b"\0")
    rows = guarded(3 * size)
    place, trio = sum(row) % 3, [good] * 3
    trio[place] = row.ljust(size, b"\0")
    rows[GUARD:-GUARD] = np.frombuffer(b"".join(trio), dtype=np.uint8)
    before, superblock = rows.copy(), blocks * 128 * SIZES[dtype]
    values = guarded(3 * superblock)
    settings: dict[str, Any] = {"rotation": "signed-hadamard", "step_power": 0.5} if signed else {}
    format = Trellis(bits=8.0, cut=Superblocks(3, blocks, size)).with_settings(settings)
    inside = values[GUARD:-GUARD]
    damage = None
    try:
        format.decode([rows[GUARD:-GUARD].reshape(3, size)], inside, dtype=dtype)
    except DamagedBlock as found:
        damage = found
    assert damage is None or damage.block == place
    assert np.array_equal(rows, before)
    assert (values[:GUARD] == 0xAB).all() and (values[-GUARD:] == 0xAB).all()
    others = [inside[i * superblock : (i + 1) * superblock] for i in range(3) if i != place]
    assert np.array_equal(*others) and others[0].any()
    words = inside.view({"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}[dtype])
    infinite = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}[dtype]
    assert ((words & infinite) != infinite).all()
    return damage is not None


def page_refuses(row: bytes, blocks: int) -> bool:
    """Whether a decoder that follows the page refuses a superblock."""
    try:
        trellis_decoder.decode_superblock(row, blocks, signed=False)
    except trellis_decoder.Damaged:
        return True
    return False


@functools.cache
def sound(blocks: int, seed: int, *, rate: float = 3.0) -> bytes:
    """A superblock that the encoder wrote."""
    values = gaussian(blocks, 128, seed=seed) * np.exp2(np.arange(blocks) % 5)[:, None].astype(np.float32)
    raw = values.view(np.uint8).reshape(-1)
    (rows,), _ = encode_weight(raw, dtype="F32", shape=values.shape, format=Trellis.at(rate))
    return rows[0].tobytes()


blocks_of = st.sampled_from([1, 2, 15, 16, 17, 33])
dtypes = st.sampled_from(list(SIZES))


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Headers with extreme fields, before random states and words."""
    step = draw(
        st.one_of(
            st.sampled_from([0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x3F800000]),
            st.integers(0, 2**32 - 1),
        )
    )
    bits = draw(st.one_of(st.integers(2, 8), st.integers(0, 255)))
    first = draw(st.one_of(st.sampled_from([0, 1, 36, 39, 40, 254, 255]), st.integers(0, 255)))
    count = draw(st.one_of(st.sampled_from([0, 1, 2, 39, 254, 255]), st.integers(0, 255)))
    row = step.to_bytes(4, "little") + bytes([bits, first, count])
    if count > 1 and draw(st.booleans()):  # frequencies that add up
        cuts = sorted(draw(st.lists(st.integers(0, 255), min_size=count - 1, max_size=count - 1)))
        row += bytes(min(255, b - a) for a, b in zip([0, *cuts], [*cuts, 256], strict=True))
    return row + draw(st.binary(max_size=600))


@examples(400)
@given(headers(), blocks_of, dtypes, st.booleans())
def test_property_extreme_headers_are_harmless(row: bytes, blocks: int, dtype: str, signed: bool) -> None:
    decode(row, blocks, dtype=dtype, signed=signed)


@st.composite
def damaged_streams(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """Blocks, a sound superblock, and it with flipped, cut, moved or repeated bytes."""
    blocks = draw(blocks_of)
    row = sound(blocks, draw(st.integers(0, 3)), rate=draw(st.sampled_from([1.5, 3.0, 6.5])))
    wrong = bytearray(row)
    for _ in range(draw(st.integers(1, 3))):
        kind, at, to = draw(st.integers(0, 3)), draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(row)))
        if kind == 0:
            wrong[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            wrong[at:] = bytes(len(wrong) - at)
        elif kind == 2:
            piece = wrong[min(at, to) : max(at, to)]
            wrong[min(at, to) : max(at, to)] = piece[::-1]
        else:
            wrong[at:] = (wrong[:to] + wrong)[: len(wrong) - at]
    return blocks, row, bytes(wrong)


@examples(150)
@given(damaged_streams(), st.booleans())
def test_property_damaged_streams_are_harmless(case: tuple[int, bytes, bytes], signed: bool) -> None:
    blocks, row, wrong = case
    assert not decode(row, blocks, signed=signed)
    decode(wrong, blocks, signed=signed)


@examples(50)
@given(damaged_streams(), headers(), st.booleans())
def test_property_page_and_kernel_refuse_the_same_bytes(
    case: tuple[int, bytes, bytes], header: bytes, stream: bool
) -> None:
    blocks, _, wrong = case
    wrong = wrong if stream else header
    format = Trellis(bits=8.0, step_power=0, cut=Superblocks(1, blocks, len(wrong)))
    values = np.empty(blocks * 128 * 4, dtype=np.uint8)
    try:
        format.decode([np.frombuffer(wrong, dtype=np.uint8)[None]], values, dtype="F32")
    except DamagedBlock:
        assert page_refuses(wrong, blocks)
    else:
        assert np.array_equal(
            values.view(np.uint32),
            trellis_decoder.decode(np.frombuffer(wrong, dtype=np.uint8)[None], blocks, signed=False)
            .reshape(-1)
            .view(np.uint32),
        )


@pytest.mark.parametrize(("unused", "begin", "step"), [(0, 80, 3), (9, -9, 1)])
def test_flipped_bits_of_words_and_unused_bytes_are_noticed(unused: int, begin: int, step: int) -> None:
    """What follows a wrong word is random, and ends in sixteen states of 2**16 by chance hardly ever."""
    made = trellis_writer.superblock(np.random.default_rng(1), 17, step=0.1, state_bits=3, first=4, unused=unused)
    row = made if unused else sound(17, 0)
    for at in range(begin % len(row), len(row), step):
        wrong = bytearray(row)
        wrong[at] ^= 1 << at % 8
        assert decode(bytes(wrong), 17) and (not unused or page_refuses(bytes(wrong), 17)), at


@pytest.mark.parametrize("bit", range(8))
def test_flipped_bit_of_zeros_is_noticed_or_harmless(bit: int) -> None:
    """Nothing is read of zeros but their header, in which the step may be -0."""
    format = Trellis(bits=8.0, step_power=0, cut=Superblocks(1, 3, 100))
    for at in range(100):
        row, values = np.zeros((1, 100), dtype=np.uint8), np.full(3 * 128, 7, dtype=np.float32)
        row[0, at] = 1 << bit
        harmless = at >= 7 or (at, bit) == (3, 7)
        with contextlib.nullcontext() if harmless else pytest.raises(DamagedBlock):
            format.decode([row], values.view(np.uint8), dtype="F32")
        assert not harmless or not values.any()
