"""The codec hadamard-trellis against section 8 of docs/format.md: tables, cuts, the worked example, decoded bits."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trellis_decoder
import trellis_writer
from blocks import examples
from closeness import approx, decimals
from hypothesis import given
from hypothesis import strategies as st

from pqweights.formats import trellis_tables
from pqweights.formats.master import DamagedBlock
from pqweights.formats.trellis import STEP_POWERS, Trellis, superblocks
from pqweights.formats.trellis_tables import decode_tables
from pqweights.kernels import Measures
from pqweights.kernels.trellis import Superblocks

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## 8. ") : PAGE.index("## 10. ")]
SETTINGS = [
    {"rotation": rotation, "step_power": power} for power in STEP_POWERS for rotation in ("hadamard", "signed-hadamard")
]
PLAIN = SETTINGS[0]
Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.uint8]


def encoded(values: Floats, rate: float, states: int, settings: dict[str, Any]) -> tuple[Trellis, Rows, Measures]:
    """The superblocks of a weight of whole blocks, and what was measured."""
    format = Trellis.at(rate, states).with_settings(settings).sized(values.size)
    superblock, stride = format.block_size, format.parts[0].bytes_per_block
    count = -(-values.size // superblock)
    padded = np.zeros(count * superblock, dtype=np.float32)
    padded[: values.size] = values.reshape(-1)
    rows = np.full((count, stride), 0xAB, dtype=np.uint8)
    return format, rows, format.encode(padded.view(np.uint8), [rows], dtype="F32")


def decoded(format: Trellis, rows: Rows) -> Floats:
    """What the kernel decodes, [superblocks, weights]."""
    values = np.empty(len(rows) * format.block_size, dtype=np.float32)
    format.decode([rows], values.view(np.uint8), dtype="F32")
    return values.reshape(len(rows), -1)


def format_of_row(row: bytes, blocks: int) -> Trellis:
    """A format of superblocks of any size, with one step."""
    return Trellis(bits=8.0, step_power=0, cut=Superblocks(1, blocks, len(row)))


def kernel_bits(rows: Rows, format: Trellis) -> npt.NDArray[np.uint32]:
    return decoded(format, rows).view(np.uint32)


def page_bits(rows: Rows, blocks: int, settings: dict[str, Any]) -> npt.NDArray[np.uint32]:
    signed = settings["rotation"] == "signed-hadamard"
    return trellis_decoder.decode(rows, blocks, signed=signed, step_power=settings["step_power"]).view(np.uint32)


# --- tables ---


@pytest.mark.parametrize("exponent", trellis_tables.EXPONENTS)
@pytest.mark.parametrize("parity", [0, 1])
def test_integer_tables_are_those_of_the_normal_distribution(exponent: int, parity: int) -> None:
    """Derived with 50 digits, the buckets and frequencies are the same."""
    exact, ours = trellis_decoder.table_of(exponent, parity), trellis_tables.buckets(exponent, parity)
    assert tuple(exact.frequencies) == trellis_tables.frequencies(exponent, parity)
    assert sum(exact.frequencies) == 4096 and min(exact.frequencies) >= 1
    assert [bucket.first for bucket in exact.buckets] == [edge << ours.core_bits for edge in ours.edges[:-1]]
    assert [bucket.low_bits for bucket in exact.buckets] == [ours.bits_of(i) for i in range(len(exact.buckets))]
    assert max(bucket.low_bits for bucket in exact.buckets) <= 4  # so that a state stays positive


@pytest.mark.parametrize("step_power", STEP_POWERS)
def test_classes_and_their_factors_are_those_of_the_page(step_power: float) -> None:
    tables = decode_tables(step_power)
    for number in range(256):
        kind = trellis_decoder.kind_of(number, step_power)
        assert tables.gains[number] == kind.gain
        assert tables.tables[number] == (0 if kind.exponent is None else kind.exponent + 7)


def test_trellises_are_those_of_the_page() -> None:
    stated = re.findall(r"^\| (\d) \| (\d+) \| (\d+) \| (\d+) \|$", SECTION, re.MULTILINE)
    assert {int(bits): (int(a), int(b)) for bits, _, a, b in stated} == trellis_decoder.TRELLISES
    assert all(2 ** int(bits) == int(states) for bits, states, _, _ in stated)
    for bits in trellis_decoder.TRELLISES:
        row = trellis_writer.superblock(np.random.default_rng(bits), 3, step=0.5, state_bits=bits)
        rows = np.frombuffer(row, dtype=np.uint8)[None].copy()
        assert np.array_equal(kernel_bits(rows, format_of_row(row, 3)), page_bits(rows, 3, PLAIN))
    for bits in set(range(256)) - set(trellis_decoder.TRELLISES):
        rows[0, 4] = bits
        with pytest.raises(DamagedBlock):
            decoded(format_of_row(row, 3), rows)


@examples(300)
@given(st.one_of(st.integers(0, 10**6), st.integers(0, 10**30)), st.floats(1.5, 8))
def test_property_weights_are_cut_as_the_page_says(weights: int, rate: float) -> None:
    assert tuple(superblocks(weights, rate)) == tuple(trellis_decoder.cut(weights, rate))


def test_page_states_the_promise() -> None:
    (stated,) = re.findall(r"`4\*\*\(([\d.]+) - R\)`", SECTION)
    assert Trellis.at(4).distortion == 4.0 ** (float(stated) - 4)
    least = 4.0 ** (float(stated) - 2)
    assert Trellis.at(2).distortion == least / (1 - least)


# --- what is decoded ---


@pytest.mark.parametrize("rate", [1.5, 4.38, 8.0])
@pytest.mark.parametrize("kind", trellis_writer.KINDS)
def test_page_and_kernel_decode_the_same_bits(kind: str, rate: float) -> None:
    states = (8, 64, 256)[(trellis_writer.KINDS.index(kind) + int(rate)) % 3]
    for blocks, settings in zip((1, 3, 15, 17), (PLAIN, SETTINGS[3], SETTINGS[2], SETTINGS[1]), strict=True):
        if blocks > 3 and states > 8:
            continue  # the states matter to the encoder
        values = trellis_writer.hostile(kind, blocks, seed=blocks)
        format, rows, _ = encoded(values, rate, states, settings)
        found = kernel_bits(rows, format)
        assert np.array_equal(found, page_bits(rows, blocks, settings)), (blocks, settings)
        assert np.isfinite(found.view(np.float32)).all()


@st.composite
def written(draw: st.DrawFn) -> tuple[int, bytes]:
    """A superblock of any trellis and any classes, with its number of blocks."""
    blocks, first = draw(st.integers(1, 20)), draw(st.integers(0, 255))
    count = min(draw(st.integers(1, 40)), 256 - first)
    cuts = sorted(draw(st.lists(st.integers(0, 256), min_size=count - 1, max_size=count - 1)))
    frequencies = [high - low for low, high in zip([0, *cuts], [*cuts, 256], strict=True)]
    if count > 1 and max(frequencies) == 256:
        frequencies[frequencies.index(256)] -= 1
        frequencies[frequencies.index(0)] += 1
    step = draw(st.floats(0, float(np.finfo(np.float32).max), width=32))
    row = trellis_writer.superblock(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        blocks,
        step=step,
        state_bits=draw(st.integers(2, 8)),
        first=first,
        frequencies=frequencies,
        unused=draw(st.integers(0, 50)),
    )
    return blocks, row


@examples(25)
@given(written(), st.sampled_from(SETTINGS))
def test_property_page_and_kernel_decode_every_trellis_and_class(
    case: tuple[int, bytes], settings: dict[str, Any]
) -> None:
    blocks, row = case
    rows = np.frombuffer(row, dtype=np.uint8)[None]
    found = kernel_bits(rows, format_of_row(row, blocks).with_settings(settings))
    assert np.isfinite(found.view(np.float32)).all()
    assert np.array_equal(found, page_bits(rows, blocks, settings))


# --- the worked example ---


def test_worked_example_of_the_page() -> None:
    example = SECTION[SECTION.index("*Worked example.*") : SECTION.index("## 9. ")]
    (stated,) = re.findall(r"^    ([0-9A-F ]{60,})$", example, re.MULTILINE)
    row = bytes.fromhex(stated)
    assert trellis_decoder.cut(128, 1.5) == (1, 1, len(row)) == (1, 1, 34)
    j = np.arange(128)
    weights = ((37 * j * j + 11 * j) % 101 - 50) / 1000
    values = trellis_decoder.decode_superblock(row, 1, signed=False)[0]
    assert ((values - weights) ** 2).sum() < 0.17 * (weights**2).sum()
    bits = kernel_bits(np.frombuffer(row, dtype=np.uint8)[None], format_of_row(row, 1))
    assert np.array_equal(bits[0], values.view(np.uint32))
    numbers = re.findall(r"-?0\.\d{9}(?!\d)", example[example.index("first weights") :])
    assert [float(number) for number in numbers] == approx(values[:4].tolist(), 0, decimals(9))


def test_steps_of_the_worked_example() -> None:
    example = SECTION[SECTION.index("*Worked example.*") : SECTION.index("## 9. ")]
    row = bytes.fromhex(re.findall(r"^    ([0-9A-F ]{60,})$", example, re.MULTILINE)[0])
    found = trellis_decoder.read_header(row, 1)
    assert found is not None
    header, stream = found
    assert trellis_decoder.read_class(header, 0) == 8 and trellis_decoder.kind_of(8).exponent == 1
    assert (len(stream.words), repr(float(header.step))[:11], header.flips) == (11, "0.020895667", (5, 2))
    path, lines = 0, re.findall(r"^\| (\d) \| (\d+) \| (\d+) \| (\d+) \| (-?\d+) \| (-?\d+) \| (\d+) ", example, re.M)
    assert len(lines) == 5
    for line in lines:
        _, p, x, s, k, n, after = (int(number) for number in line)
        assert (path, header.states[0], header.states[0] & 4095) == (p, x, s)
        assert trellis_decoder.read_number(header, 0, 1, path & 1) == n == 2 * k + (p & 1)
        assert header.states[0] == after
        path = path >> 1 ^ (5 if n & 1 else 0) ^ (2 if k & 1 else 0)
        trellis_decoder.refill(header, stream, range(1))
    for parity in range(2):
        listed = ", ".join(str(frequency) for frequency in trellis_decoder.table_of(1, parity).frequencies)
        assert listed in " ".join(example.split())


# --- what is refused ---


def changed(row: bytes, place: int, form: str, value: float) -> bytes:
    """A row with a field replaced; without a form, what precedes it."""
    field = struct.pack(form, value) if form else b""
    return row[:place] + field + (row[place + len(field) :] if form else b"")


@pytest.mark.parametrize(
    ("place", "form", "value"),
    [
        *((0, "<f", step) for step in (np.nan, np.inf, -np.inf, -1.0, -1e-45)),
        *((4, "<B", bits) for bits in (0, 1, 9, 15, 16, 255)),
        *((5, "<B", first) for first in (254, 255)),
        *((6, "<B", count) for count in (0, 1, 2, 4, 255)),
        *((7, "<B", share) for share in (0, 99, 101, 255)),
        *((10, "<I", state) for state in (0, 1, 65535)),
        *((length, "", 0) for length in (1, 6, 7, 10, 21, 40)),  # it ends there
    ],
)
def test_headers_that_no_encoder_writes_are_refused(place: int, form: str, value: float) -> None:
    row = trellis_writer.superblock(
        np.random.default_rng(1), 3, step=0.1, state_bits=3, first=4, frequencies=(100, 100, 56), unused=300
    )
    decoded(format_of_row(row, 3), np.frombuffer(row, dtype=np.uint8)[None])
    wrong = changed(row, place, form, value)
    if len(wrong) >= 7:
        with pytest.raises(trellis_decoder.Damaged):
            trellis_decoder.decode_superblock(wrong, 3, signed=False)
    with pytest.raises(DamagedBlock) as found:
        decoded(format_of_row(wrong, 3), np.frombuffer(wrong, dtype=np.uint8)[None])
    assert found.value.block == 0
