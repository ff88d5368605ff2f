"""Ranges of remote files: the right bytes for any number of readers, in bounded memory, each requested once."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pqweights.checkpoint import ahead
from pqweights.checkpoint.ahead import RangeCache, TransferStopped
from pqweights.errors import StorageError

SIZE = 1_003_333


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "BLOCK_BYTES": 4096,
        "MOST_HELD_BYTES": 10 * 4096,
        "LARGE_READ_BYTES": 1,
        "SMALL_BYTES": 0,
    }.items():
        monkeypatch.setattr(ahead, name, value)


class Files:
    """Files in memory, and what was requested of them."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.contents = {name: generator.integers(0, 256, SIZE, dtype=np.uint8) for name in "ab"}
        self.requests: list[tuple[str, int]] = []
        self.failing = 0
        self.going_on = threading.Event()
        self.going_on.set()
        self.cache = RangeCache(self.fetch, lambda file: SIZE)

    def fetch(self, file: str, start: int, end: int) -> bytes:
        self.requests.append((file, start))
        self.going_on.wait()
        if self.failing:
            self.failing -= 1
            raise StorageError("failing")
        return self.contents[file][start:end].tobytes()

    def read(self, file: str, offset: int, count: int) -> bool:
        """Whether the bytes are right."""
        buffer = np.empty(count, dtype=np.uint8)
        self.cache.read_into(file, offset, buffer)
        return bool((buffer == self.contents[file][offset : offset + count]).all())


def test_readers_get_the_right_bytes_in_bounded_memory() -> None:
    files, held = Files(), list[int]()

    def reader(seed: int) -> bool:
        chance, right = random.Random(seed), True
        for _ in range(60):
            offset = chance.randrange(SIZE)
            right &= files.read(chance.choice("ab"), offset, chance.randrange(min(50_000, SIZE - offset) + 1))
            held.append(len(files.cache._held))
        return right

    with ThreadPoolExecutor(40) as pool:
        assert all(pool.map(reader, range(40)))
    assert 0 < max(held) <= 11  # the last block of a file is smaller


@pytest.mark.parametrize("threads", [1, 8])
def test_a_file_that_is_read_in_order_is_requested_once(threads: int) -> None:
    """Also if several do, none of which falls far behind the others."""
    files, places = Files(), range(0, SIZE, 1000)
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(places), threads):
            reads = places[first : first + threads]
            assert all(pool.map(lambda at: files.read("a", at, min(1000, SIZE - at)), reads))
    assert sorted(files.requests) == [("a", start) for start in range(0, SIZE, 4096)]


def test_blocks_are_fetched_ahead_of_a_reader_in_order() -> None:
    files = Files()
    files.read("a", 0, 4096)
    files.read("a", 4096, 10)
    wanted = [("a", number * 4096) for number in range(2 + ahead.BLOCKS_AHEAD)]
    end = time.monotonic() + 10
    while len(files.requests) < len(wanted) and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted(files.requests) == wanted


def test_single_reads_fetch_their_block_alone_which_is_held_from_its_request_on() -> None:
    files = Files()
    assert files.read("a", 500_000, 100) and files.read("a", 900_000, 100) and files.read("b", 400_000, 100)
    assert len(files.requests) == 3
    assert files.read("a", 500_200, 100) and len(files.requests) == 3


def test_a_block_that_failed_is_requested_again_when_it_is_needed_again() -> None:
    files = Files()
    files.failing = 1
    with pytest.raises(StorageError, match="failing"):
        files.read("a", 900_000, 10)
    assert files.read("a", 900_000, 10)


def test_waiting_readers_give_up_after_stop() -> None:
    files = Files()
    files.going_on.clear()
    with ThreadPoolExecutor(30) as pool:
        waiting = [pool.submit(files.read, "a", number * 30_000, 10) for number in range(30)]  # more than have room
        time.sleep(0.1)
        files.cache.stopped = True
        for each in waiting:
            with pytest.raises(TransferStopped):
                each.result(timeout=20)
        files.going_on.set()
    files.cache.stopped = False
    assert files.read("a", 0, SIZE)
