"""Shards while they are written: any order, any alignment, several threads, with and without direct access."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqweights.checkpoint.shard_file import DIRECT_BYTES, PAGE_BYTES, ShardFile, memory_for
from pqweights.errors import OutputError

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


@given(
    sizes=st.lists(st.sampled_from([0, 1, 100, PAGE_BYTES - 6, DIRECT_BYTES, 3 * DIRECT_BYTES + 77]), max_size=8),
    aligned=st.booleans(),
    data=st.data(),
)
@settings(max_examples=30)
def test_bytes_lie_where_they_were_written(
    sizes: list[int], aligned: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(len(sizes))
    pieces = [rng.bytes(size) for size in sizes]
    order = data.draw(st.permutations(range(len(sizes))))
    found = written(tmp_path_factory.mktemp("file") / "shard", pieces, aligned=aligned, order=list(order))
    assert found == HEADER + b"".join(pieces)


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


def test_a_full_disk_shows_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match=r"^model\.safetensors: the disk is full"):
        ShardFile(tmp_path / "model.safetensors.1234.partial", HEADER, 1000, shown=tmp_path / "model.safetensors")
