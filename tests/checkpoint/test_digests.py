"""The hash of pieces, whatever the order, threads and cuts; reads that are checked, each tensor once and whole."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from commands import raises
from damage import flip, stored_in
from helpers import safetensors_bytes
from hypothesis import given
from hypothesis import strategies as st

from pqweights.checkpoint.digests import (
    PART_BYTES,
    PIECE_BYTES,
    READ_BYTES,
    CheckedReads,
    PieceHasher,
    digests_of_pieces,
    hash_of_pieces,
    parts_of,
)
from pqweights.checkpoint.storage import Storage
from pqweights.errors import MasterError

SIZES = {"large": 5 * PIECE_BYTES + 77, "exact": 2 * PIECE_BYTES, "small": 1000, "empty": 0}


def content(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def by_the_page(data: bytes) -> str:
    """BLAKE3 of the digests of the pieces of 131,072 bytes."""
    return blake3(b"".join(blake3(data[at : at + 131072]).digest() for at in range(0, len(data), 131072))).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {name: ("U8", content(size)) for name, size in SIZES.items()}
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(tensors))
    return tmp_path


def reads_of(folder: Path) -> CheckedReads:
    digests = {name: by_the_page(content(size).tobytes()) for name, size in SIZES.items()}
    return CheckedReads(Storage(folder), stored_in(folder).values(), digests=digests)


def read(reads: CheckedReads, folder: Path, name: str, begin: int, end: int) -> bytes:
    tensor, buffer = stored_in(folder)[name], np.empty(end - begin, dtype=np.uint8)
    reads.read_into(tensor.file, tensor.offset + begin, buffer)
    return buffer.tobytes()


HASHED_SIZES = (0, 1, 1000, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES + 77, READ_BYTES + 3, PART_BYTES + 9)


@pytest.mark.parametrize("size", HASHED_SIZES)
def test_parts_together_are_the_whole(size: int) -> None:
    data = content(size)
    parts = [
        digests_of_pieces(data[at : min(at + READ_BYTES, end)] for at in range(begin, end, READ_BYTES))
        for begin, end in parts_of(size)
    ]
    assert hash_of_pieces(parts) == by_the_page(data.tobytes())


@given(st.integers(0, 2**32))
def test_spans_in_any_order_that_overlap(seed: int) -> None:
    shuffle, size = random.Random(seed), 3 * PIECE_BYTES + 5
    data, hasher = content(size), PieceHasher(size, most_open=shuffle.choice([1, 2, None]))
    for _ in range(shuffle.randrange(12)):
        begin, end = sorted(shuffle.randrange(size + 1) for _ in range(2))
        hasher.add(begin, data[begin:end])
    missing = hasher.missing()
    assert hasher.is_whole == (not missing)
    for begin, end in missing:
        assert begin % PIECE_BYTES == 0 and (end % PIECE_BYTES == 0 or end == size) and begin < end
        hasher.add(begin, data[begin:end])
    assert hasher.is_whole and hasher.hexdigest() == by_the_page(data.tobytes())


@pytest.mark.parametrize("name", ["large", "exact", "small"])
def test_the_last_byte_tells(name: str, folder: Path) -> None:
    place, size = flip(folder, name, at=3), SIZES[name]
    reads = reads_of(folder)
    read(reads, folder, name, 0, size - 1)
    read(reads, folder, name, 0, size - 1)
    with raises(MasterError, place):
        read(reads, folder, name, size - 1, size)
    with raises(MasterError, place):  # it stays so
        reads.finish()
