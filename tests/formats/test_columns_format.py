"""The codec hadamard-trellis-columns against sections 10 and 12 of docs/format.md, and reads of any elements."""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import column_decoder
import column_writer
import independent_reader
import numpy as np
import numpy.typing as npt
import pytest
import trellis_decoder
from blocks import examples
from commands import raises
from helpers import gaussian
from hypothesis import given
from hypothesis import strategies as st

from pqweights.checkpoint.header import stored_tensors
from pqweights.checkpoint.master import column_specs
from pqweights.checkpoint.readers import ColumnTensor
from pqweights.common.dtypes import item_bytes
from pqweights.errors import MasterError, RecipeError
from pqweights.formats import checked_rate
from pqweights.formats.columns import ColumnCodes, ColumnCut, TrellisColumns, bits_of, decode_codes
from pqweights.formats.master import VALUE_DTYPES, DamagedBlock

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## 10. ") : PAGE.index("## 11. ")]
STACK_EXAMPLE = PAGE[PAGE.index("*Worked example.* A weight `[2, 2, 3]`, transposed") : PAGE.index("## 13. ")]
SHAPES = [(1, 1), (3, 2), (130, 20), (257, 3), (2, 770)]
# Stacks and transposed weights of the version of section 12.
STACKS = [((3, 130, 20), False), ((2, 2, 770), False), ((2, 770, 130), True), ((3, 5, 257), True), ((20, 130), True)]


class Memory:
    """A storage of one file in memory, which counts the bytes that are read."""

    def __init__(self, codes: ColumnCodes) -> None:
        self.content = b"".join(np.ascontiguousarray(part).tobytes() for part in codes.parts)
        self.read = 0

    def read_into(self, file: str, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        self.read += len(buffer)
        buffer[:] = np.frombuffer(self.content[offset : offset + len(buffer)], dtype=np.uint8)


def tensor_of(codes: ColumnCodes, dtype: str = "BF16") -> tuple[ColumnTensor, Any]:
    storage: Any = Memory(codes)
    stored = stored_tensors("file", 0, column_specs("w", codes.cut, len(codes.trellis)))
    shape = codes.cut.shape
    bits = bits_of(codes.cut, len(codes.trellis))
    tensor = ColumnTensor(
        storage=storage,
        name="w",
        shape=shape,
        dtype=dtype,
        format=TrellisColumns(bits=bits, transposed=codes.transposed),
        encoded=stored,
    )
    return tensor, storage


def whole(codes: ColumnCodes, dtype: str) -> bytes:
    out = np.empty(len(codes.row_scales) * codes.cut.columns * item_bytes(dtype), dtype=np.uint8)
    decode_codes(codes, codes.cut.blocks, dtype, out)
    return out.tobytes()


def independent(codes: ColumnCodes, dtype: str) -> bytes:
    return independent_reader.to_bytes(column_writer.values_of_codes(codes).reshape(-1), dtype)


@functools.cache
def coded(shape: tuple[int, ...], transposed: bool) -> tuple[ColumnCodes, npt.NDArray[np.float32]]:
    """Codes of a weight, and what they decode to."""
    codes = column_writer.encoded(gaussian(*shape, seed=shape[-1]), 1.5, seed=4, transposed=transposed)
    return codes, column_writer.values_of_codes(codes).reshape(-1)


def read(tensor: ColumnTensor, start: int, stop: int, dtype: str = "F32", more: int = 0) -> bytes:
    """Elements of a weight. more: bytes behind them, which may be used as room"""
    size = (stop - start) * item_bytes(dtype)
    out = np.full(size + more, 0xAB, dtype=np.uint8)
    tensor.read(start, stop - start, dtype, out)
    return out[:size].tobytes()


def with_step(codes: ColumnCodes, step: float) -> ColumnCodes:
    """The codes with another step in their first superblock."""
    trellis = codes.trellis.copy()
    trellis[:4] = np.frombuffer(struct.pack("<f", step), dtype=np.uint8)
    return replace(codes, trellis=trellis)


@pytest.mark.parametrize("shape", SHAPES)
def test_decoded_bits_are_those_of_an_independent_decoder(shape: tuple[int, int]) -> None:
    codes = column_writer.encoded(gaussian(*shape, seed=3), 2.5, seed=shape[0])
    for step in (None, 1e-45, 1e37, 3e38):
        changed = codes if step is None else with_step(codes, step)
        expected = column_writer.values_of_codes(changed).reshape(-1)
        for dtype in VALUE_DTYPES:
            assert whole(changed, dtype) == independent_reader.to_bytes(expected, dtype), (step, dtype)


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_superblocks_are_decoded_alike_whatever_comes_before_and_after(dtype: str) -> None:
    """Superblocks are decoded two by two; here with the next strip's, and with one that has more tiles, or none."""
    codes = column_writer.encoded(gaussian(300, 1537, seed=9), 1.5, seed=2)
    cut, size = codes.cut, item_bytes(dtype)
    together = np.frombuffer(whole(codes, dtype), dtype=np.uint8).reshape(300, 1537, size)
    ends = np.append(0, np.cumsum(codes.lengths))
    for number, length in enumerate(codes.lengths.reshape(-1)):
        strip, columns = number // cut.superblocks, cut.columns_of(number % cut.superblocks)
        alone = ColumnCodes(
            codes.trellis[ends[number] : ends[number + 1]],
            np.array([[length]], dtype=np.int32),
            codes.row_scales[strip * 128 : (strip + 1) * 128],
            codes.column_scales[columns.start : columns.stop],
        )
        out = np.empty(len(alone.row_scales) * len(columns) * size, dtype=np.uint8)
        decode_codes(alone, len(columns), dtype, out)
        own = together[strip * 128 : (strip + 1) * 128, columns.start : columns.stop]
        assert out.tobytes() == own.tobytes(), number


def example_of_the_page() -> tuple[ColumnCodes, str]:
    """The codes of the worked example of section 10, and its text."""
    example = SECTION[SECTION.index("*Worked example.*") : SECTION.index("**What an encoder")]
    trellis = bytes.fromhex("".join(re.findall(r"^    ([0-9A-F ]+)$", example, re.MULTILINE)))
    codes = ColumnCodes(
        np.frombuffer(trellis, dtype=np.uint8),
        np.array([[len(trellis)]], dtype=np.int32),
        np.array([128, 144, 116], dtype=np.uint8),
        np.array([128, 120], dtype=np.uint8),
    )
    return codes, example.replace("\n", " ")


def stated_rows(example: str, before: str) -> npt.NDArray[np.float32]:
    (stated,) = re.findall(before + r" ([^a-zA-Z`]+)\.\s", example)
    return np.array([float(number) for number in re.split(r"[,;]\s", stated)], dtype=np.float32)


def test_worked_example_of_the_page() -> None:
    codes, example = example_of_the_page()
    assert "`X_row_scales` 128, 144, 116" in example and "`X_column_scales` 128, 120" in example
    assert f"`X_lengths` {len(codes.trellis)}" in example
    expected = stated_rows(example, "rows are decoded to")
    assert whole(codes, "F32") == independent(codes, "F32") == expected.tobytes()
    assert f"`bits` is {bits_of(codes.cut, len(codes.trellis))}" in example


def test_worked_example_of_a_stack() -> None:
    codes, example = ColumnCodes.stacked([example_of_the_page()[0].T] * 2), STACK_EXAMPLE.replace("\n", " ")
    for name, part in {
        "lengths": codes.lengths,
        "row_scales": codes.row_scales,
        "column_scales": codes.column_scales,
    }.items():
        assert f"`X_{name}` {', '.join(map(str, part.reshape(-1)))}" in example
    assert codes.cut.shape == (2, 2, 3) and codes.lengths.shape == (2, 1, 1)
    expected = np.tile(stated_rows(example, "to the rows"), 2)
    assert read(tensor_of(codes)[0], 0, 12) == independent(codes, "F32") == expected.tobytes()
    assert f"`bits` is {bits_of(codes.cut, len(codes.trellis))}" in example


@given(rows=st.integers(1, 400), columns=st.integers(1, 2**40))
def test_superblocks_hold_each_column_once_and_are_those_of_the_page(rows: int, columns: int) -> None:
    cut = ColumnCut.of((rows, columns))
    assert (cut.strips, cut.superblocks, cut.blocks) == column_decoder.cut((rows, columns))
    assert 1 <= cut.blocks <= 768
    last = cut.columns_of(cut.superblocks - 1)
    assert cut.columns_of(0).start == 0 and last.stop == columns and 1 <= len(last) <= cut.blocks


@given(data=st.data())
@examples(60)
def test_any_elements_are_those_of_the_whole_weight(data: Any) -> None:
    plain = [((3, 5), False), ((130, 70), False), ((300, 9), False), ((5, 1600), False)]
    shape, transposed = data.draw(st.sampled_from(plain + STACKS))
    codes, expected = coded(shape, transposed)
    tensor, _ = tensor_of(codes)
    count = int(np.prod(shape))
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start, count))
    dtype = data.draw(st.sampled_from(VALUE_DTYPES))
    found = read(tensor, start, stop, dtype, data.draw(st.sampled_from([0, 7, 4096])))
    assert found == independent_reader.to_bytes(expected[start:stop], dtype)


@pytest.mark.parametrize(("shape", "transposed"), STACKS)
def test_stacks_are_those_of_an_independent_decoder(shape: tuple[int, ...], transposed: bool) -> None:
    codes, expected = coded(shape, transposed)
    assert codes.cut.shape == shape and codes.cut == ColumnCut.of(shape, transposed=transposed)
    tensor, _ = tensor_of(codes)
    assert tensor.format.bits == column_decoder.bits(shape, len(codes.trellis), transposed=transposed)
    for dtype in VALUE_DTYPES:
        assert read(tensor, 0, int(np.prod(shape)), dtype) == independent_reader.to_bytes(expected, dtype)


def test_elements_of_a_stack_take_the_superblocks_that_hold_them() -> None:
    weight = gaussian(3, 300, 1600, seed=5)
    codes = column_writer.encoded(weight, 1.5)
    tensor, storage = tensor_of(codes)
    read(tensor, 0, 1)
    storage.read = 0
    read(tensor, 1600 * (2 * 300 + 140) + 1599, 1600 * (2 * 300 + 141))
    assert storage.read == int(codes.lengths[2, 1, 2]) + len(codes.cut.columns_of(2)) + 140 - 128 + 1
    turned = column_writer.encoded(np.swapaxes(weight, 1, 2), 1.5, transposed=True)
    tensor, storage = tensor_of(turned)
    assert np.array_equal(turned.lengths, codes.lengths.swapaxes(1, 2))
    read(tensor, 0, 1)
    storage.read = 0
    read(tensor, 300 * (2 * 1600 + 1599), 300 * 3 * 1600)
    assert storage.read == int(codes.lengths[2, :, 2].sum()) + len(codes.cut.columns_of(2)) + 300


def test_longest_superblocks_are_accepted_and_all_that_is_longer_is_not() -> None:
    """A superblock whose words are followed by zeros is sound, as in section 8, up to the bytes that it could use."""
    codes = column_writer.encoded(gaussian(2, 3, seed=7), 3.0)
    (most,) = re.findall(r"above `(\d+) \+ (\d+) \* ceil\(m / 16\)`", SECTION)
    longest = int(most[0]) + int(most[1])
    for length in (longest, longest + 1):
        trellis = np.zeros(length, dtype=np.uint8)
        trellis[: len(codes.trellis)] = codes.trellis
        padded = replace(codes, trellis=trellis, lengths=np.array([[length]], dtype=np.int32))
        tensor, _ = tensor_of(padded)
        out = np.empty(24, dtype=np.uint8)
        if length == longest:
            tensor.read(0, 6, "F32", out)
            assert out.tobytes() == whole(codes, "F32")
        else:
            with raises(MasterError, longest, length):
                tensor.read(0, 6, "F32", out)


def test_damaged_superblock_is_named_by_its_number() -> None:
    codes = column_writer.encoded(gaussian(130, 800, seed=8), 1.5)
    trellis = codes.trellis.copy()
    at = int(codes.lengths.reshape(-1)[:3].sum())
    trellis[at + 4] = 9  # a trellis that there is not
    damaged = replace(codes, trellis=trellis)
    with pytest.raises(DamagedBlock) as found:
        whole(damaged, "F32")
    assert found.value.block == 3
    tensor, _ = tensor_of(damaged)
    tensor.read(0, 128 * 800, "BF16", np.empty(128 * 800 * 2, dtype=np.uint8))
    with raises(MasterError, "file: tensor 'w': block 3: "):
        tensor.read(128 * 800, 1600, "BF16", np.empty(3200, dtype=np.uint8))


@given(part=st.integers(0, 3), at=st.integers(0, 10_000), to=st.integers(1, 255), transposed=st.booleans())
@examples(60)
def test_damage_of_a_stack_is_found_or_decodes_as_the_page_says(part: int, at: int, to: int, transposed: bool) -> None:
    shape = (2, 40, 130) if transposed else (2, 130, 40)
    codes, _ = coded(shape, transposed)
    changed = [np.array(own).reshape(-1).view(np.uint8) for own in codes.parts]
    changed[part][at % len(changed[part])] ^= to
    parts = [raw.view(own.dtype).reshape(own.shape) for raw, own in zip(changed, codes.parts, strict=True)]
    damaged = ColumnCodes(*parts, transposed)
    try:
        expected = independent(damaged, "F32")
    except (trellis_decoder.Damaged, ValueError):
        with pytest.raises(MasterError):
            read(tensor_of(damaged)[0], 0, int(np.prod(shape)))
    else:
        assert read(tensor_of(damaged)[0], 0, int(np.prod(shape))) == expected


def test_recipes_cannot_name_the_codec() -> None:
    with raises(RecipeError, "hadamard-trellis-columns", "calibration"):
        checked_rate("hadamard-trellis-columns", 3)
