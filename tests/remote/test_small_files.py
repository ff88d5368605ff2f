"""Small files of a folder elsewhere are requested once and kept, in bounded memory; so are pickled storages."""

from __future__ import annotations

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from pqweights.checkpoint import ahead
from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.storage import Remote, Storage, read_bytes, read_file

CONTENTS = {"a.json": b"a" * 600, "b.json": b"b" * 600, "large.json": b"c" * 5000, "x.safetensors": b"d" * 900}


class Elsewhere(Remote):
    """A folder in object storage, in memory."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int, int]] = []

    def states(self, only: object = None, *, recursive: bool = True) -> dict[str, FileState]:
        return {name: FileState(len(data), "1") for name, data in CONTENTS.items()}

    def read(self, file: str, start: int, end: int, *, expected: FileState | None = None) -> bytes:
        self.requests.append((file, start, end))
        return CONTENTS[file][start:end]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    monkeypatch.setattr(ahead, "SMALL_BYTES", 1000)
    monkeypatch.setattr(ahead, "MOST_HELD_BYTES", 1000)
    return Elsewhere()


def test_small_files_are_requested_whole_and_once_while_there_is_room(elsewhere: Elsewhere) -> None:
    storage = Storage(elsewhere)
    for name in ("a.json", "a.json", "b.json", "b.json", "a.json"):
        assert read_bytes(storage, name, 3, 5) == CONTENTS[name][3:8]
    assert elsewhere.requests == [("a.json", 0, 600), ("b.json", 0, 600), ("a.json", 0, 600)]


def test_large_files_and_weights_are_not_kept(elsewhere: Elsewhere) -> None:
    storage = Storage(elsewhere)
    for _ in range(2):
        assert read_file(storage, "large.json") == CONTENTS["large.json"]
        assert read_bytes(storage, "large.json", 10, 5) == b"ccccc"
        assert read_bytes(storage, "x.safetensors", 0, 8) == b"dddddddd"
    assert elsewhere.requests == [("large.json", 0, 5000), ("large.json", 10, 15), ("x.safetensors", 0, 8)] * 2


def test_a_pickled_storage_holds_nothing_that_was_read(elsewhere: Elsewhere) -> None:
    storage = Storage(elsewhere)
    read_file(storage, "a.json")
    sent = pickle.dumps(storage)
    assert b"a" * 100 not in sent
    assert read_file(pickle.loads(sent), "a.json") == CONTENTS["a.json"]


def test_threads_share_small_files_that_are_dropped_for_others(elsewhere: Elsewhere) -> None:
    storage = Storage(elsewhere)

    def read(number: int) -> bool:
        name = ("a.json", "b.json")[number % 2]
        return read_bytes(storage, name, 1, 50) == CONTENTS[name][1:51]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(20000)))
    finally:
        sys.setswitchinterval(before)
