"""Ranges of remote files: the right bytes for any number of readers, in bounded memory, each requested once."""

from __future__ import annotations

import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pqweights.checkpoint import ahead
from pqweights.checkpoint.ahead import TransferStopped
from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.storage import Remote, Storage, read_bytes
from pqweights.errors import StorageError

BLOCK, SIZE = 4096, 1_003_333
# Two files that are read in blocks, two small ones, and one that is too large to be held.
SIZES = {"a.safetensors": SIZE, "b.safetensors": SIZE, "c.json": 600, "d.json": 600, "e.json": 2 * SIZE}
CONTENTS = {name: np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes() for name, size in SIZES.items()}
going_on = threading.Event()


class Elsewhere(Remote):
    """A folder in object storage, in memory, and what was requested of it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int, int]] = []
        self.failing = 0

    def states(self, only: object = None, *, recursive: bool = True) -> dict[str, FileState]:
        return {name: FileState(size, "1") for name, size in SIZES.items()}

    def read(self, file: str, start: int, end: int, *, expected: FileState | None = None) -> bytes:
        self.requests.append((file, start, end))
        going_on.wait()
        if self.failing:
            self.failing -= 1
            raise StorageError("failing")
        return CONTENTS[file][start:end]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    limits = {"BLOCK_BYTES": BLOCK, "MOST_HELD_BYTES": 10 * BLOCK, "LARGE_READ_BYTES": 100, "SMALL_BYTES": 1000}
    for name, value in limits.items():
        monkeypatch.setattr(ahead, name, value)
    going_on.set()
    return Elsewhere()


def is_right(storage: Storage, file: str, offset: int, count: int) -> bool:
    return read_bytes(storage, file, offset, count) == CONTENTS[file][offset : offset + count]


def test_readers_get_the_right_bytes_in_bounded_memory(elsewhere: Elsewhere) -> None:
    storage, held = Storage(elsewhere), list[int]()

    def reader(seed: int) -> bool:
        chance, right = random.Random(seed), True
        for _ in range(60):
            file = chance.choice([*SIZES])
            offset = chance.randrange(SIZES[file])
            right &= is_right(storage, file, offset, chance.randrange(min(50_000, SIZES[file] - offset) + 1))
            held.append(sum(end - start for _, start, end in [*storage._ranges._held]))
        return right

    with ThreadPoolExecutor(40) as pool:
        assert all(pool.map(reader, range(40)))
    assert 0 < max(held) <= 11 * BLOCK


@pytest.mark.parametrize("threads", [1, 8])
def test_a_file_that_is_read_in_order_is_requested_once(threads: int, elsewhere: Elsewhere) -> None:
    """Also if several do, none of which falls far behind the others."""
    storage, places = Storage(elsewhere), range(0, SIZE, 1000)
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(places), threads):
            reads = places[first : first + threads]
            assert all(pool.map(lambda at: is_right(storage, "a.safetensors", at, min(1000, SIZE - at)), reads))
    assert sorted(start for _, start, _ in elsewhere.requests) == [*range(0, SIZE, BLOCK)]


def test_blocks_are_fetched_ahead_of_a_reader_in_order_and_alone_for_others(elsewhere: Elsewhere) -> None:
    storage = Storage(elsewhere)
    for offset in (500_000, 900_000, 500_200):
        assert is_right(storage, "a.safetensors", offset, 200)
    assert len(elsewhere.requests) == 2
    assert is_right(storage, "b.safetensors", 0, BLOCK) and is_right(storage, "b.safetensors", BLOCK, 200)
    wanted, end = 2 + 2 + ahead.BLOCKS_AHEAD, time.monotonic() + 10
    while len(elsewhere.requests) < wanted and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted(start // BLOCK for _, start, _ in elsewhere.requests[2:]) == [*range(wanted - 2)]


def test_small_files_come_whole_and_once_while_there_is_room(elsewhere: Elsewhere) -> None:
    storage = Storage(elsewhere)
    for name in ("c.json", "c.json", "d.json", "d.json", "c.json"):
        assert is_right(storage, name, 3, 5)
    assert elsewhere.requests == [("c.json", 0, 600), ("d.json", 0, 600)]
    assert is_right(storage, "e.json", 0, SIZES["e.json"]) and is_right(storage, "e.json", 10, 5)
    assert elsewhere.requests[2:] == [("e.json", 0, SIZES["e.json"]), ("e.json", 10, 15)]  # too large to be held
    sent = pickle.dumps(storage)
    assert CONTENTS["c.json"][:100] not in sent and is_right(pickle.loads(sent), "c.json", 0, 600)


def test_a_range_that_failed_is_requested_again_when_it_is_needed_again(elsewhere: Elsewhere) -> None:
    storage, elsewhere.failing = Storage(elsewhere), 1
    with pytest.raises(StorageError):
        is_right(storage, "a.safetensors", 900_000, 200)
    assert is_right(storage, "a.safetensors", 900_000, 200)


def test_waiting_readers_give_up_after_a_stop(elsewhere: Elsewhere) -> None:
    storage = Storage(elsewhere)
    going_on.clear()
    with ThreadPoolExecutor(30) as pool:
        reads = range(0, 900_000, 30_000)  # more than have room
        waiting = [pool.submit(is_right, storage, "a.safetensors", offset, 200) for offset in reads]
        time.sleep(0.1)
        storage._ranges.stopped = True
        for reader in waiting:
            with pytest.raises(TransferStopped):
                reader.result(timeout=20)
        going_on.set()
    storage._ranges.stopped = False
    assert is_right(storage, "a.safetensors", 0, SIZE)
