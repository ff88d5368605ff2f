"""Tensors that are put together from rows of others, compared with numpy on tensors in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import helpers
import numpy as np
import numpy.typing as npt
import pytest
from blocks import examples, item_bytes
from hypothesis import given
from hypothesis import strategies as st

from pqweights.checkpoint import views
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.views import MatrixCache, MovedTensor, Segment

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor in memory that records what is read of it."""

    name: str
    values: Floats  # BF16 numbers
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> str:
        return "BF16"

    plain_dtype = dtype

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        byte_count = 2 * self.values.size
        stored = StoredTensor(
            name=self.name, dtype="BF16", shape=self.shape, file="file", offset=0, byte_count=byte_count
        )
        return (stored,)

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        assert start >= 0 and start + count <= self.values.size
        self.reads.append((start, count))
        out[: count * item_bytes(dtype)] = helpers.raw_bytes(self.values.reshape(-1)[start : start + count], dtype)


def held(name: str, *shape: int) -> Held:
    """A tensor in which every element is another BF16 number, and which shares no number with other tensors."""
    first = 1 + sum(name.encode()) * 1000
    words = np.arange(first, first + math.prod(shape), dtype=np.uint32)
    return Held(name, (words << 16).view(np.float32).reshape(shape))


class Case(NamedTuple):
    """A moved tensor, and the values that numpy gives for it."""

    tensor: MovedTensor
    expected: Floats


def case(segments: list[Segment], columns: range, transposed: bool = False, matrices: int = 1) -> Case:
    rows = [
        s.tensor.values.reshape(-1, s.tensor.shape[-1])[[s.first + s.step * i for i in range(s.count)]][
            :, list(columns)
        ]
        for s in segments
        if isinstance(s.tensor, Held)
    ]
    expected = np.concatenate(rows).reshape(matrices, -1, len(columns))
    if transposed:
        expected = expected.transpose(0, 2, 1)
    expected = np.ascontiguousarray(expected if matrices > 1 else expected[0])
    tensor = MovedTensor(
        name="moved",
        shape=expected.shape,
        dtype="BF16",
        segments=tuple(segments),
        columns=columns,
        transposed=transposed,
        cache=MatrixCache(),
    )
    return Case(tensor, expected)


def segment(tensor: LogicalTensor, first: int, step: int, count: int) -> Segment:
    return Segment(tensor=tensor, first=first, step=step, count=count)


def read(tensor: MovedTensor, start: int, count: int, dtype: str) -> npt.NDArray[np.uint8]:
    """Read into a buffer that is longer than the elements, and return their bytes."""
    out = np.full(count * item_bytes(dtype) + 16, 0xA5, np.uint8)
    tensor.read(start, count, dtype, out)
    return out[: count * item_bytes(dtype)]


def assert_reads(of: Case, start: int, count: int, dtype: str) -> None:
    truth = helpers.raw_bytes(of.expected.reshape(-1)[start : start + count], dtype)
    assert read(of.tensor, start, count, dtype).tobytes() == truth.tobytes(), (start, count, dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to three sources of different widths, up to five segments of them, and every kind of range of columns."""
    widths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    sources = []
    for name, width in zip("abc", widths, strict=False):
        leading = draw(st.sampled_from([(), (1,), (7,), (2, 5), (3, 1, 4)]))
        sources.append(held(name, *leading, width))
    most = min(widths)
    columns = range(most)
    if draw(st.booleans()):
        first = draw(st.integers(0, most - 1))
        columns = range(first, draw(st.integers(first + 1, most)), draw(st.integers(1, 5)))
        if draw(st.booleans()):
            columns = columns[::-1]
    segments = []
    for _ in range(draw(st.integers(1, 5))):
        source = draw(st.sampled_from(sources))
        rows = math.prod(source.shape[:-1])
        step, first = draw(st.integers(1, 4)), draw(st.integers(0, rows - 1))
        segments.append(segment(source, first, step, draw(st.integers(1, (rows - 1 - first) // step + 1))))
    total = sum(each.count for each in segments)
    matrices = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    return case(segments, columns, draw(st.booleans()), matrices)


@examples(400)
@given(cases(), st.data(), st.sampled_from(["BF16", "F32"]), st.booleans())
def test_property_any_range_of_any_view_matches_numpy(of: Case, data: st.DataObject, dtype: str, keep: bool) -> None:
    """Ranges begin at any element and have any length, also if matrices are too large to be kept."""
    size = of.expected.size
    start = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, size - start))
    with pytest.MonkeyPatch.context() as patch:
        if not keep:
            patch.setattr(views, "KEPT_BYTES", 0)
        assert_reads(of, start, count, dtype)
        assert_reads(of, 0, size, dtype)


def test_reading_no_elements_and_a_vector() -> None:
    for transposed in (False, True):
        of = case([segment(held("a", 5, 6), 0, 1, 5)], range(6), transposed)
        for start in (0, 3, 30):
            assert_reads(of, start, 0, "BF16")
    norm = held("norm", 10)
    of = case([segment(norm, 0, 1, 1)], range(10))
    of = Case(replace(of.tensor, shape=(10,)), norm.values)
    for start, count in ((0, 10), (3, 4), (9, 1)):
        assert_reads(of, start, count, "F32")
