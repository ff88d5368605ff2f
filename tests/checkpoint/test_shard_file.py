"""Shards while they are written: any order, any alignment, several threads, with and without direct access."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pqweights.checkpoint.shard_file import DIRECT_BYTES, ShardFile, memory_for

HEADER = b"header"


def written(path: Path, pieces: list[bytes], *, aligned: bool, order: list[int]) -> bytes:
    """What a file holds to which pieces were written, each behind the one before it, by four threads."""
    ends = np.cumsum([len(HEADER), *map(len, pieces)]).tolist()
    file = ShardFile(path, HEADER, ends[-1], shown=path)

    def write(number: int) -> None:
        offset, piece = ends[number], np.frombuffer(pieces[number], np.uint8)
        memory = memory_for("test", offset, len(piece)) if aligned else np.empty(len(piece) + 1, np.uint8)[1:]
        memory[:] = piece
        file.write(offset, memory)
        memory[:] = 0  # the caller may change it

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, order))
    file.finish()
    return path.read_bytes()


@pytest.mark.parametrize("refuses", ["open", "pwrite"])
def test_file_systems_without_direct_access(refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse to open a file so, some the first write."""
    original, direct = getattr(os, refuses), set()

    def refusing(*given: Any, **options: Any) -> Any:
        if (refuses == "open" and given[1] & os.O_DIRECT) or (refuses == "pwrite" and is_direct(given[0])):
            direct.add(refuses)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(*given, **options)

    def is_direct(descriptor: int) -> bool:
        flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
        return bool(int(flags, 8) & os.O_DIRECT)

    monkeypatch.setattr(os, refuses, refusing)
    pieces = [np.random.default_rng(1).bytes(2 * DIRECT_BYTES) for _ in range(3)]
    assert written(tmp_path / "shard", pieces, aligned=True, order=[2, 0, 1]) == HEADER + b"".join(pieces)
    assert direct
