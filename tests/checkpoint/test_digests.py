"""The hash of pieces: what docs/format.md says, whatever the order, the threads and the cuts."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from blake3 import blake3

from pqweights.checkpoint.digests import (
    HASH_OF_PIECES,
    PART_BYTES,
    PIECE_BYTES,
    READ_BYTES,
    SHA256,
    PieceHasher,
)

SIZES = (
    0,
    1,
    1000,
    PIECE_BYTES - 1,
    PIECE_BYTES,
    PIECE_BYTES + 1,
    5 * PIECE_BYTES + 77,
    READ_BYTES + 3,
    PART_BYTES + 9,
)


def content(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def by_the_page(data: bytes) -> str:
    """BLAKE3 of the digests of the pieces of 131,072 bytes."""
    return blake3(b"".join(blake3(data[at : at + 131072]).digest() for at in range(0, len(data), 131072))).hexdigest()


def test_the_hash_of_a_known_text() -> None:
    """The digest is BLAKE3's own for "abc" (its specification), hashed once more."""
    once = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert blake3(b"abc").hexdigest() == once
    hasher = PieceHasher(3)
    hasher.add(0, np.frombuffer(b"abc", dtype=np.uint8))
    assert hasher.hexdigest() == blake3(bytes.fromhex(once)).hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_bytes_in_any_order_and_from_any_thread(size: int) -> None:
    data, hasher, shuffle = content(size), PieceHasher(size), random.Random(size)
    cuts = sorted({0, size, *(shuffle.randrange(size + 1) for _ in range(40))})
    pieces = list(itertools.pairwise(cuts))
    shuffle.shuffle(pieces)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: hasher.add(piece[0], data[slice(*piece)]), pieces))
    assert hasher.hexdigest() == by_the_page(data.tobytes())


def test_many_threads_fill_one_piece() -> None:
    data, hasher, ready = content(PIECE_BYTES), PieceHasher(PIECE_BYTES), threading.Barrier(8)

    def fill(thread: int) -> None:
        ready.wait()
        for at in range(thread * 64, PIECE_BYTES, 8 * 64):
            hasher.add(at, data[at : at + 64])

    threads = [threading.Thread(target=fill, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hasher.hexdigest() == by_the_page(data.tobytes())


def test_missing_bytes_have_no_hash() -> None:
    hasher = PieceHasher(PIECE_BYTES + 10)
    hasher.add(0, content(PIECE_BYTES))
    with pytest.raises(AssertionError, match="missing"):
        hasher.hexdigest()
    hasher.add(PIECE_BYTES + 4, content(6))
    with pytest.raises(AssertionError, match="missing"):
        hasher.hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_parts_together_are_the_whole(size: int) -> None:
    data = content(size)
    for tensor_hash, expected in (
        (HASH_OF_PIECES, by_the_page(data.tobytes())),
        (SHA256, hashlib.sha256(data).hexdigest()),
    ):
        parts = [
            tensor_hash.of_part(data[at : min(at + READ_BYTES, end)] for at in range(begin, end, READ_BYTES))
            for begin, end in tensor_hash.parts(size)
        ]
        assert tensor_hash.combined(parts) == expected
