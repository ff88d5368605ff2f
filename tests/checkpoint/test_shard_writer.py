"""Shards while they are written: any order, any thread, twice, continued, and without direct access."""

from __future__ import annotations

import errno
import itertools
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pqweights.checkpoint.shard_writer import Disk, ShardWriter

from pqweights.checkpoint import shard_writer
from pqweights.errors import OutputError

HEADER = b"h" * 24


@pytest.fixture(params=["direct", "no direct access", "refused direct access"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """The thread of the disk, on file systems of every kind; blocks are of one page."""
    monkeypatch.setattr(shard_writer, "BLOCK_BYTES", 4096)
    if request.param == "no direct access":
        monkeypatch.delattr(os, "O_DIRECT")
    if request.param == "refused direct access":
        pwrite, normal = os.pwrite, os.open

        def opened(path: Any, flags: int, *mode: int) -> int:
            descriptor = normal(path, flags, *mode)
            if flags & os.O_DIRECT:
                direct.add(descriptor)
            return descriptor

        def refused(descriptor: int, data: Any, offset: int) -> int:
            if descriptor in direct:
                direct.discard(descriptor)
                raise OSError(errno.EINVAL, "Invalid argument")
            return pwrite(descriptor, data, offset)

        direct: set[int] = set()
        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "pwrite", refused)
    found = Disk()
    yield found
    found.close()


def content(size: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def finished(writer: ShardWriter, disk: Disk) -> bytes:
    disk.do(writer.finish).result()
    assert not writer.partial.exists()
    return writer.path.read_bytes()


@pytest.mark.parametrize("size", [1, 4096 - 24, 4096, 3 * 4096 - 24, 50_001])
def test_bytes_in_any_order_and_from_any_thread(size: int, disk: Disk, tmp_path: Path) -> None:
    data, shuffle = content(size), random.Random(size)
    writer = ShardWriter(tmp_path / "shard", HEADER, size + 24, disk)
    cuts = sorted({0, size, *(shuffle.randrange(size + 1) for _ in range(60))})
    pieces = list(itertools.pairwise(cuts))
    shuffle.shuffle(pieces)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: writer.write(24 + piece[0], data[slice(*piece)]), pieces))
    assert finished(writer, disk) == HEADER + data.tobytes()


def test_the_later_of_two_passes_counts(disk: Disk, tmp_path: Path) -> None:
    """Some blocks were complete when the second pass began, others hold bytes of a neighbour that is still to come."""
    first, second, neighbour = content(20_000, 1), content(20_000, 2), content(9_000, 3)
    writer = ShardWriter(tmp_path / "shard", HEADER, 24 + 29_000, disk)
    for data in (first, second):
        for at in range(0, 20_000, 700):
            writer.write(24 + at, data[at : at + 700])
    writer.write(24 + 20_000, neighbour)
    assert finished(writer, disk) == HEADER + second.tobytes() + neighbour.tobytes()


def test_the_neighbour_comes_while_a_second_pass_is_under_way(disk: Disk, tmp_path: Path) -> None:
    for seed in range(20):
        first, second, neighbour = content(9_000, 1), content(9_000, 2), content(9_000, seed)
        writer = ShardWriter(tmp_path / f"shard-{seed}", HEADER, 24 + 18_000, disk)
        writer.write(24, first)
        with ThreadPoolExecutor(2) as pool:
            later = pool.submit(writer.write, 24 + 9_000, neighbour)
            for at in range(0, 9_000, 450):
                writer.write(24 + at, second[at : at + 450])
            later.result()
        assert finished(writer, disk) == HEADER + second.tobytes() + neighbour.tobytes()


def test_saved_bytes_are_in_the_file_and_are_kept_by_the_next_writer(disk: Disk, tmp_path: Path) -> None:
    data = content(30_000)
    writer = ShardWriter(tmp_path / "shard", HEADER, 24 + 30_000, disk)
    writer.write(24 + 5_000, data[5_000:23_456])
    disk.do(writer.save).result()
    assert writer.partial.read_bytes()[24 + 5_000 : 24 + 23_456] == data[5_000:23_456].tobytes()
    disk.do(writer.close).result()
    other = ShardWriter(tmp_path / "shard", HEADER, 24 + 30_000, disk)
    other.write(24 + 23_456, data[23_456:])
    other.keep(24 + 5_000, 18_456)
    other.write(24, data[:5_000])
    assert finished(other, disk) == HEADER + data.tobytes()


def test_kept_bytes_survive_a_save_of_their_neighbours(disk: Disk, tmp_path: Path) -> None:
    """Bytes of the journal that nobody has claimed yet lie in a block that another tensor fills."""
    data = content(8_000)
    path = tmp_path / "shard"
    writer = ShardWriter(path, HEADER, 24 + 8_000, disk)
    writer.write(24 + 2_000, data[2_000:3_000])
    disk.do(writer.save).result()
    disk.do(writer.close).result()
    other = ShardWriter(path, HEADER, 24 + 8_000, disk)
    other.write(24, data[:2_000])
    disk.do(other.save).result()
    assert other.partial.read_bytes()[: 24 + 3_000] == HEADER + data[:3_000].tobytes()
    other.keep(24 + 2_000, 1_000)
    other.write(24 + 3_000, data[3_000:])
    assert finished(other, disk) == HEADER + data.tobytes()


def test_failure_of_the_disk_is_raised_by_what_follows(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = ShardWriter(tmp_path / "shard", HEADER, 24 + 50_000, disk)
    monkeypatch.setattr(os, "pwrite", full)
    done: list[str] = []
    writer.write(24, content(5_000))
    with pytest.raises(OutputError, match="disk is full"):
        disk.wait()
    assert disk.has_failed
    with pytest.raises(OutputError, match="disk is full"):
        writer.write(24 + 5_000, content(5_000))
    with pytest.raises(OutputError, match="disk is full"):
        disk.do(lambda: done.append("not done"))
    disk.do(lambda: done.append("done all the same"), always=True).result()
    assert done == ["done all the same"]
    writer.close()


def test_blocks_that_were_written_wait_for_nobody(disk: Disk, tmp_path: Path) -> None:
    """Every tensor is encoded twice; its neighbours' bytes come only once, so no block may wait for them."""
    tensors = [content(9_000, seed) for seed in range(40)]
    writer = ShardWriter(tmp_path / "shard", HEADER, 24 + 9_000 * len(tensors), disk)
    for number, data in enumerate(tensors):
        for passed in (content(9_000, 1000 + number), data):
            for at in range(0, 9_000, 1_000):
                writer.write(24 + 9_000 * number + at, passed[at : at + 1_000])
            disk.wait()
        assert len(writer._blocks) <= 3
    assert finished(writer, disk) == HEADER + b"".join(data.tobytes() for data in tensors)


def test_tasks_behind_a_failed_one_fail_alike(disk: Disk) -> None:
    """Also those that were queued before it failed: nobody may take them for done."""

    def fail() -> None:
        time.sleep(0.2)
        raise OutputError("the disk is gone")

    disk.do(fail)
    behind = disk.do(lambda: None)
    with pytest.raises(OutputError, match="gone"):
        behind.result()
    with pytest.raises(OutputError, match="gone"):
        disk.wait()
