"""Fixtures of the driver's tests: the small checkpoint, and what an undisturbed run writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from converting import command
from helpers import SMALL_CHUNK, folder_bytes, run_command, small_checkpoint
from memory_storage import Place, put

from pqweights.checkpoint import shard_file
from pqweights.convert import jobs, shard


@pytest.fixture(scope="module", autouse=True)
def _several_chunks() -> Iterator[None]:
    """Give tiny tensors several chunks, written directly, as in the killed runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "CHUNK_WEIGHTS", SMALL_CHUNK)
        patch.setattr(shard_file, "DIRECT_BYTES", shard_file.PAGE_BYTES)
        patch.setattr(shard, "PROGRESS_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    run_command(command(source), out)
    return folder_bytes(out)


@pytest.fixture
def final(undisturbed: dict[str, bytes]) -> dict[str, bytes]:
    """The objects of an undisturbed run."""
    return {name: data for name, data in undisturbed.items() if not name.endswith("/")}


@pytest.fixture
def own_source(tmp_path: Path) -> Path:
    """A source that the test may change."""
    return small_checkpoint(tmp_path / "model")


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A place where nothing is yet."""
    if request.param == "folder":
        return Place(tmp_path / "out")
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(tmp_path / "scratch"))
    put("memory://results/place", {})
    return Place("memory://results/place")
