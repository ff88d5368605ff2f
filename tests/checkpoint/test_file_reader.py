"""Reads of files: cached or not, large or small, in any order, with and without direct access."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pqweights.checkpoint import file_reader
from pqweights.checkpoint.file_reader import FileReader
from pqweights.errors import SourceError

SIZE = 300_001


@pytest.fixture
def data(tmp_path: Path) -> np.ndarray:
    """A file of many blocks, whose size is not a multiple of anything."""
    found = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    (tmp_path / "file").write_bytes(found.tobytes())
    return found


@pytest.fixture(params=["cached", "not cached", "partly cached", "system cannot say", "refused", "no direct access"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FileReader:
    """A reader on a system of every kind. Whether bytes are cached is not left to the system."""
    monkeypatch.setattr(file_reader, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(file_reader, "LARGE_READ_BYTES", 1000)
    preadv, shuffle = os.preadv, random.Random(1)

    def pretended(descriptor: int, views: list[Any], offset: int, flags: int = 0) -> int:
        (view,) = views
        if flags and request.param != "cached":
            if request.param == "partly cached" and shuffle.random() < 0.5:
                return preadv(descriptor, [memoryview(view)[: max(1, len(view) // 3)]], offset)
            raise OSError(errno.EOPNOTSUPP if request.param == "system cannot say" else errno.EAGAIN, "no")
        if request.param == "refused" and "direct" in modes.get(descriptor, ""):
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, views, offset)

    opened = os.open
    modes: dict[int, str] = {}

    def noted(path: Any, flags: int, *mode: int) -> int:
        descriptor = opened(path, flags, *mode)
        modes[descriptor] = "direct" if flags & getattr(os, "O_DIRECT", 0) else "normal"
        return descriptor

    monkeypatch.setattr(os, "preadv", pretended)
    monkeypatch.setattr(os, "open", noted)
    if request.param == "no direct access":
        monkeypatch.delattr(os, "O_DIRECT")
        monkeypatch.delattr(os, "RWF_NOWAIT")
    return FileReader()


def reads(order: str) -> list[tuple[int, int]]:
    """Where each read begins and ends."""
    if order == "in order":
        cuts = [*range(0, SIZE, 7_000), SIZE]
        return list(itertools.pairwise(cuts))
    shuffle = random.Random(order)
    places = [sorted((shuffle.randrange(SIZE), shuffle.randrange(SIZE))) for _ in range(60)]
    return [(begin, min(end, begin + 20_000)) for begin, end in places] + [(SIZE - 1, SIZE), (0, 1), (5, 5)]


@pytest.mark.parametrize("order", ["in order", "in any order"])
@pytest.mark.parametrize("threads", [1, 4])
def test_bytes_are_those_of_the_file(
    order: str, threads: int, reader: FileReader, data: np.ndarray, tmp_path: Path
) -> None:
    def check(place: tuple[int, int]) -> None:
        begin, end = place
        buffer = np.zeros(end - begin, dtype=np.uint8)
        reader.read_into(tmp_path / "file", "file", begin, buffer)
        assert np.array_equal(buffer, data[begin:end]), place

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(check, reads(order)))


def test_file_that_ends_early_is_reported(reader: FileReader, data: np.ndarray, tmp_path: Path) -> None:
    buffer = np.zeros(20_000, dtype=np.uint8)
    with pytest.raises(SourceError, match=r"a name: expected 20000 bytes at offset 290000, .* after 10001"):
        reader.read_into(tmp_path / "file", "a name", 290_000, buffer)
    with pytest.raises(SourceError, match="after 0"):
        reader.read_into(tmp_path / "file", "a name", SIZE + 5, buffer)


def test_each_block_is_fetched_once_and_ahead(
    data: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reader, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(file_reader, "LARGE_READ_BYTES", 1000)
    monkeypatch.setattr(file_reader._OpenFile, "read_cached", lambda self, offset, view: 0)
    fetched: list[int] = []
    fetch: Callable[..., int] = file_reader._fetch

    def counted(file: Any, offset: int, memory: np.ndarray) -> int:
        fetched.append(offset)
        return fetch(file, offset, memory)

    monkeypatch.setattr(file_reader, "_fetch", counted)
    if file_reader._OpenFile(tmp_path / "file").direct < 0:
        pytest.skip("the file system has no direct access")
    reader, buffer = FileReader(), np.zeros(1_500, dtype=np.uint8)
    reader.read_into(tmp_path / "file", "file", 0, buffer)
    reader.read_into(tmp_path / "file", "file", 1_500, buffer)
    reader._blocks._blocks[next(reversed(reader._blocks._blocks))].fetched.result()
    assert sorted(fetched)[:3] == [0, 4096, 8192]
    for begin in range(3_000, SIZE - 1_500, 1_500):
        reader.read_into(tmp_path / "file", "file", begin, buffer)
    assert len(fetched) == len(set(fetched))


def test_few_files_stay_open_and_a_forgotten_one_is_closed(tmp_path: Path) -> None:
    reader, buffer = FileReader(), np.zeros(3, dtype=np.uint8)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        (tmp_path / str(number)).write_bytes(b"abc")
        reader.read_into(tmp_path / str(number), "file", 0, buffer)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * file_reader.MOST_OPEN_FILES
    for number in range(40):
        reader.forget(tmp_path / str(number))
    assert len(os.listdir("/proc/self/fd")) == before


def test_interrupt_while_a_block_is_fetched_stays_one(
    data: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reader, "LARGE_READ_BYTES", 1000)
    monkeypatch.setattr(file_reader._OpenFile, "read_cached", lambda self, offset, view: 0)

    def interrupted(self: Future[int]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        FileReader()._blocks.read(DirectFile(tmp_path / "file"), 0, np.zeros(2_000, dtype=np.uint8))


class DirectFile(file_reader._OpenFile):
    """A file that counts as one with direct access."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if self.direct < 0:
            self.direct = os.dup(self.descriptor)
