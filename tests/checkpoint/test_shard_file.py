"""Shards while they are written: any order, any alignment, several threads, with and without direct access."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pqweights.checkpoint.header import TensorSpec, stored_tensors
from pqweights.checkpoint.shard_file import DIRECT_BYTES, ShardFile

HEADER = b"header"


def written(path: Path, pieces: list[bytes], *, aligned: bool, order: list[int]) -> bytes:
    """What a file holds to which pieces were written, each behind the one before it, by four threads."""
    specs = [TensorSpec(str(number), "U8", (len(piece),)) for number, piece in enumerate(pieces)]
    stored = stored_tensors("shard", len(HEADER), specs)
    file = ShardFile(path, HEADER, stored, len(HEADER) + sum(map(len, pieces)), shown=path)
    file.begin(spec.name for spec in specs)

    def write(number: int) -> None:
        name, piece = str(number), np.frombuffer(pieces[number], np.uint8)
        memory = file.memory("test", name, 0, len(piece)) if aligned else np.empty(len(piece) + 1, np.uint8)[1:]
        memory[:] = piece
        file.write(name, 0, memory)
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
