"""Chunks that are coded without loss: what the independent decoder makes of them, their size, and damage."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from native_decoder import Damaged, decode_chunk

from pqweights.kernels import lossless

Bytes = npt.NDArray[np.uint8]
WIDTHS = lossless.WIDTHS


def items_of(width: int, count: int, seed: int = 0) -> Bytes:
    """Floats of a width, of weights that get fewer towards large ones."""
    values = (np.random.default_rng(seed).standard_normal(count) * 0.02).astype(np.float32)
    if width == 4:
        return values.view(np.uint8)
    if width == 2:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return (values.view(np.uint32) >> 20).astype(np.uint8)


def coded(values: Bytes, width: int) -> tuple[Bytes, npt.NDArray[np.int32]]:
    stream, lengths = lossless.encode(values, width)
    return stream.copy(), lengths


def decoded(stream: Bytes, lengths: npt.NDArray[np.int32], width: int, count: int) -> tuple[Bytes, tuple[int, int]]:
    values = np.full(count * width, 0xA5, dtype=np.uint8)
    return values, lossless.decode(stream, lengths, values, width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000, 65535, 65536, 65537, 3 * 65536 + 77])
def test_every_count_of_items_comes_back(width: int, count: int) -> None:
    values = items_of(width, count, seed=count)
    stream, lengths = coded(values, width)
    again, status = decoded(stream, lengths, width, count)
    assert status == (-1, 0)
    assert np.array_equal(again, values)


@pytest.mark.parametrize("width", WIDTHS)
def test_independent_decoder_reads_each_chunk(width: int) -> None:
    values = items_of(width, 2 * 65536 + 45)
    stream, lengths = coded(values, width)
    at, result = 0, b""
    for number, length in enumerate(lengths.tolist()):
        items = min(65536, len(values) // width - number * 65536)
        result += decode_chunk(stream[at : at + length].tobytes(), items, width)
        at += length
    assert result == values.tobytes()


@pytest.mark.parametrize("kind", ["constant", "two", "uniform", "rare", "alternating"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_distribution_comes_back(kind: str, width: int) -> None:
    rng, count = np.random.default_rng(3), 40_000
    numbers = {
        "constant": np.full(count, 77),
        "two": rng.integers(0, 2, count) * 255,
        "uniform": rng.integers(0, 256, count),
        "rare": np.where(rng.integers(0, 10_000, count) == 0, rng.integers(0, 256, count), 5),
        "alternating": np.arange(count) % 256,
    }[kind]
    values = np.repeat(numbers.astype(np.uint8), width)
    again, status = decoded(*coded(values, width), width, count)
    assert status == (-1, 0)
    assert np.array_equal(again, values)


def entropy(symbols: npt.NDArray[np.int64]) -> float:
    shares = np.array(list(Counter(symbols.tolist()).values())) / len(symbols)
    return float(-(shares * np.log2(shares)).sum())


@pytest.mark.parametrize("width", WIDTHS)
def test_size_is_within_a_hundredth_of_the_entropy(width: int) -> None:
    count = 65536
    values = items_of(width, count)
    whole = values.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[width]).astype(np.int64)
    highest = whole >> (8 * width - 9) & 255 if width > 1 else whole
    _, lengths = coded(values, width)
    least = count * (width - 1) + count * entropy(highest) / 8
    assert least < lengths.sum() < 1.01 * least


@pytest.mark.parametrize("width", WIDTHS)
def test_noise_takes_a_byte_more_for_each_chunk(width: int) -> None:
    count = 2 * 65536
    values = np.random.default_rng(1).integers(0, 256, count * width).astype(np.uint8)
    _, lengths = coded(values, width)
    assert lengths.tolist() == [1 + 65536 * width] * 2


@pytest.mark.parametrize("width", WIDTHS)
def test_both_decoders_agree_on_what_damage_does(width: int) -> None:
    """Whatever a byte is changed to, both decoders agree on whether the chunk is sound, and on its items."""
    count = 700
    values, rng = items_of(width, count), np.random.default_rng(7)
    stream, lengths = coded(values, width)
    for place in [*range(40), *rng.integers(0, len(stream), 60).tolist()]:
        damaged = stream.copy()
        damaged[place] ^= rng.integers(1, 256)
        again, status = decoded(damaged, lengths, width, count)
        try:
            expected = decode_chunk(damaged.tobytes(), count, width)
        except Damaged:
            assert status[0] == 0 and status[1] in (1, 2, 3), place
        else:
            assert status == (-1, 0), place
            assert again.tobytes() == expected, place


def test_a_changed_first_symbol_moves_all_exponents_and_is_not_noticed() -> None:
    """As docs/format.md says: the manifest alone has a hash of it."""
    values = items_of(2, 700)
    stream, lengths = coded(values, 2)
    stream[1] ^= 1
    again, status = decoded(stream, lengths, 2, 700)
    assert status == (-1, 0)
    assert (again.view("<u2") & 0x7F80 != values.view("<u2") & 0x7F80).all()


@pytest.mark.parametrize("cut", [1, 2, 3, 100, 128, 130, 131, 700])
def test_chunks_that_were_cut_off_are_noticed(cut: int) -> None:
    stream, _ = coded(items_of(2, 700), 2)
    short = stream[:cut].copy()
    _, status = decoded(short, np.array([cut], dtype=np.int32), 2, 700)
    assert status[0] == 0
    with pytest.raises(Damaged):
        decode_chunk(short.tobytes(), 700, 2)


@pytest.mark.parametrize(("byte_count", "width"), [(6, 3), (5, 2), (7, 4)])
def test_other_widths_are_refused(byte_count: int, width: int) -> None:
    with pytest.raises(ValueError, match="expected items"):
        lossless.encode(np.zeros(byte_count, dtype=np.uint8), width)
