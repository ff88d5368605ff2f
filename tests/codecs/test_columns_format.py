"""The codec hadamard-trellis-columns against section 10 of docs/format.md, and reads of any elements of a weight."""

from __future__ import annotations

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
from blocks import examples
from helpers import gaussian
from hypothesis import given
from hypothesis import strategies as st

from pqweights.checkpoint.header import stored_tensors
from pqweights.checkpoint.master import column_specs
from pqweights.checkpoint.readers import ColumnTensor
from pqweights.codecs import checked_rate
from pqweights.codecs.columns import (
    ColumnCodes,
    ColumnCoding,
    ColumnCut,
    HadamardTrellisColumns,
    Unstated,
    bits_of,
    decode_codes,
    decode_columns,
)
from pqweights.codecs.protocol import VALUE_DTYPES, DamagedBlock
from pqweights.common.dtypes import item_bytes
from pqweights.errors import MasterError, RecipeError

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## 10. ") : PAGE.index("## 11. ")]
SHAPES = [(1, 1), (3, 2), (130, 20), (257, 3), (2, 770)]


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
    shape = (codes.cut.rows, codes.cut.columns)
    coder = ColumnCoding(bits_of(codes.cut, len(codes.trellis)))
    tensor = ColumnTensor(
        storage=storage, name="w", shape=shape, dtype=dtype, coder=coder, state=Unstated(), encoded=stored
    )
    return tensor, storage


def whole(codes: ColumnCodes, dtype: str) -> bytes:
    return decode_columns(codes, range(codes.cut.strips), dtype).tobytes()


def independent(codes: ColumnCodes, dtype: str) -> bytes:
    values = column_decoder.decode(codes.trellis.tobytes(), codes.lengths, codes.row_scales, codes.column_scales)
    return independent_reader.to_bytes(values.reshape(-1), dtype)


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
        for dtype in VALUE_DTYPES:
            assert whole(changed, dtype) == independent(changed, dtype), (step, dtype)


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


def test_worked_example_of_the_page() -> None:
    example = SECTION[SECTION.index("*Worked example.*") : SECTION.index("**What an encoder")]
    trellis = bytes.fromhex("".join(re.findall(r"^    ([0-9A-F ]+)$", example, re.MULTILINE)))
    codes = ColumnCodes(
        np.frombuffer(trellis, dtype=np.uint8),
        np.array([[len(trellis)]], dtype=np.int32),
        np.array([128, 144, 116], dtype=np.uint8),
        np.array([128, 120], dtype=np.uint8),
    )
    assert "`X_row_scales` 128, 144, 116" in example and "`X_column_scales` 128, 120" in example
    assert f"`X_lengths` {len(trellis)}" in example
    (stated,) = re.findall(r"rows are decoded to ([^a-zA-Z]+)\.\s", example)
    expected = np.array([float(number) for number in re.split(r"[,;]\s", stated)], dtype=np.float32)
    assert whole(codes, "F32") == independent(codes, "F32") == expected.tobytes()
    assert f"`bits` is {bits_of(codes.cut, len(trellis))}" in example.replace("\n", " ")


@given(rows=st.integers(1, 400), columns=st.integers(1, 2**40))
def test_superblocks_hold_each_column_once_and_are_those_of_the_page(rows: int, columns: int) -> None:
    cut = ColumnCut.of((rows, columns))
    assert (cut.strips, cut.superblocks, cut.blocks) == column_decoder.cut((rows, columns))
    assert 1 <= cut.blocks <= 768
    last = cut.columns_of(cut.superblocks - 1)
    assert cut.columns_of(0).start == 0 and last.stop == columns and 1 <= len(last) <= cut.blocks


@given(data=st.data())
@examples(40)
def test_any_elements_are_those_of_the_whole_weight(data: Any) -> None:
    shape = data.draw(st.sampled_from([(3, 5), (130, 70), (300, 9), (5, 1600)]))
    codes = column_writer.encoded(gaussian(*shape, seed=shape[1]), 1.5, seed=4)
    tensor, _ = tensor_of(codes)
    count = shape[0] * shape[1]
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start, count))
    dtype = data.draw(st.sampled_from(VALUE_DTYPES))
    size, more = item_bytes(dtype), data.draw(st.sampled_from([0, 7, 4096]))
    out = np.full((stop - start) * size + more, 0xAB, dtype=np.uint8)
    tensor.read(start, stop - start, dtype, out)
    assert out[: (stop - start) * size].tobytes() == whole(codes, dtype)[start * size : stop * size]


def test_elements_of_a_row_take_the_superblocks_that_hold_them() -> None:
    codes = column_writer.encoded(gaussian(300, 1600, seed=5), 1.5)
    tensor, storage = tensor_of(codes)
    tensor.read(0, 1, "F32", np.empty(4, dtype=np.uint8))
    storage.read = 0
    tensor.read(1600 * 140 + 1599, 1, "F32", np.empty(4, dtype=np.uint8))
    assert storage.read == int(codes.lengths[1, 2]) + len(codes.cut.columns_of(2)) + 140 - 128 + 1
    storage.read = 0
    tensor.read(1600 * 140, 1600 * 3, "F32", np.empty(1600 * 12, dtype=np.uint8))
    assert storage.read == int(codes.lengths[1].sum()) + 140 - 128 + 3 + 1600


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lengths: lengths[0].__setitem__(1, 6), "expected 7 to .* bytes, found 6 at \\[0, 1\\]"),
        (lambda lengths: lengths[1].__setitem__(0, -1), "found -1 at \\[1, 0\\]"),
        (lambda lengths: lengths[1].__setitem__(0, 2**31 - 1), "found 2147483647 at \\[1, 0\\]"),
        (lambda lengths: lengths[1].__setitem__(0, lengths[1, 0] + 1), "expected lengths whose sum is .* bytes, found"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(change: Any, problem: str) -> None:
    codes = column_writer.encoded(gaussian(130, 800, seed=6), 1.5)
    lengths = codes.lengths.copy()
    change(lengths)
    tensor, _ = tensor_of(replace(codes, lengths=lengths))
    with pytest.raises(MasterError, match=f"tensor 'w_lengths': .*{problem}.*the master is damaged"):
        tensor.read(0, 1, "F32", np.empty(4, dtype=np.uint8))


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
            with pytest.raises(MasterError, match=f"expected 7 to {longest} bytes, found {length}"):
                tensor.read(0, 6, "F32", out)


def test_damaged_superblock_is_named_by_its_number() -> None:
    codes = column_writer.encoded(gaussian(130, 800, seed=8), 1.5)
    trellis = codes.trellis.copy()
    at = int(codes.lengths.reshape(-1)[:3].sum())
    trellis[at + 4] = 9  # a trellis that there is not
    damaged = replace(codes, trellis=trellis)
    with pytest.raises(DamagedBlock, match="block 3: its header"):
        decode_columns(damaged, range(2), "F32")
    tensor, _ = tensor_of(damaged)
    tensor.read(0, 128 * 800, "BF16", np.empty(128 * 800 * 2, dtype=np.uint8))
    with pytest.raises(MasterError, match="file: tensor 'w': block 3: its header is not one that an encoder writes"):
        tensor.read(128 * 800, 1600, "BF16", np.empty(3200, dtype=np.uint8))


def test_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="expected none for hadamard-trellis-columns"):
        HadamardTrellisColumns().coder_from_tables(3.5, [1.0])


def test_recipes_cannot_name_the_codec() -> None:
    with pytest.raises(RecipeError, match="hadamard-trellis-columns takes a calibration"):
        checked_rate("hadamard-trellis-columns", 3)
