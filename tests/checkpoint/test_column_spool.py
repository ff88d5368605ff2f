"""Columns of a tensor that come in any order become its rows, also by way of the disk."""

from __future__ import annotations

import errno
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import raises

from pqweights.checkpoint import column_spool
from pqweights.checkpoint.column_spool import ColumnSpool
from pqweights.errors import OutputError


def rows_of(spool: ColumnSpool) -> bytes:
    found = list(spool.take_rows())
    assert [offset for offset, _ in found] == np.cumsum([0, *(len(rows) for _, rows in found)])[:-1].tolist()
    return b"".join(rows.tobytes() for _, rows in found)


@pytest.mark.parametrize(("spooled", "strip"), [(1 << 20, 1 << 20), (100, 1 << 20), (100, 1), (1 << 20, 200)])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_columns_become_rows(
    rows: int, spooled: int, strip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory or in a file, which is gone when they are taken; many rows at a time, or one."""
    monkeypatch.setattr(column_spool, "SPOOLED_BYTES", spooled)
    monkeypatch.setattr(column_spool, "STRIP_BYTES", strip)
    tensor = np.random.default_rng(rows).integers(0, 256, (rows, 61)).astype(np.uint8)
    ends, spool = [0, 5, 6, 30, 61], ColumnSpool(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        for first, last in list(itertools.pairwise(ends))[::-1]:
            pool.submit(spool.add, first, np.ascontiguousarray(tensor[:, first:last]))
    assert rows_of(spool) == tensor.tobytes()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    monkeypatch.setattr(column_spool, "SPOOLED_BYTES", 10)
    with raises(OutputError, tmp_path.name):
        ColumnSpool(tmp_path).add(0, np.zeros((3, 8), dtype=np.uint8))
