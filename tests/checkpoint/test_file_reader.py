"""Reads of files: large or small, in any order, by several threads, and few files open at a time."""

from __future__ import annotations

import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pqweights.checkpoint.file_reader import LARGE_READ_BYTES, MOST_OPEN_FILES, FileReader, FileState
from pqweights.errors import SourceError

SIZE = 3 * LARGE_READ_BYTES + 1


@pytest.fixture
def data(tmp_path: Path) -> np.ndarray:
    content = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    return content


def reads(order: str) -> list[tuple[int, int]]:
    """Where each read begins and ends."""
    if order == "in order":
        return list(itertools.pairwise([*range(0, SIZE, 70_000), SIZE]))
    shuffle = random.Random(order)
    places = [sorted((shuffle.randrange(SIZE), shuffle.randrange(SIZE))) for _ in range(60)]
    return [(begin, end) for begin, end in places] + [(SIZE - 1, SIZE), (0, 1), (5, 5)]


@pytest.mark.parametrize("order", ["in order", "in any order"])
@pytest.mark.parametrize("advice", [True, False])
def test_bytes_are_those_of_the_file(
    order: str, advice: bool, data: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not advice:  # as on macOS
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    reader, state = FileReader(), FileState.of((tmp_path / "file").stat())

    def check(place: tuple[int, int]) -> None:
        begin, end = place
        buffer = np.zeros(end - begin, dtype=np.uint8)
        reader.read_into(tmp_path / "file", "file", begin, buffer, expected=state)
        assert np.array_equal(buffer, data[begin:end]), place

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, reads(order)))


def test_file_that_ends_early_is_reported(data: np.ndarray, tmp_path: Path) -> None:
    buffer, state = np.zeros(20_000, dtype=np.uint8), FileState.of((tmp_path / "file").stat())
    with pytest.raises(SourceError, match=r"a name: expected 20000 bytes at offset 780000, .* after 6433"):
        FileReader().read_into(tmp_path / "file", "a name", 780_000, buffer, expected=state)
    with pytest.raises(SourceError, match="after 0"):
        FileReader().read_into(tmp_path / "file", "a name", SIZE + 5, buffer, expected=state)


def test_few_files_stay_open_and_a_forgotten_one_is_closed(tmp_path: Path) -> None:
    reader, buffer = FileReader(), np.zeros(3, dtype=np.uint8)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        path = tmp_path / str(number)
        path.write_bytes(b"abc")
        reader.read_into(path, "file", 0, buffer, expected=FileState.of(path.stat()))
    assert len(os.listdir("/proc/self/fd")) <= before + MOST_OPEN_FILES
    for number in range(40):
        reader.forget(tmp_path / str(number))
    assert len(os.listdir("/proc/self/fd")) == before
