"""Files that a run copies: what loading needs or the user asks for, through masters, exports and resumed runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import raises
from converting import command, interrupt
from helpers import folder_bytes, run_command

from pqweights.errors import MasterError, OutputError

STRAY = {"train.parquet": b"rows", "runs/log.txt": b"loss", "data/x.csv": b"1,2"}


@pytest.fixture
def littered(own_source: Path) -> Path:
    """A source with files that no model needs."""
    for name, data in STRAY.items():
        (own_source / name).parent.mkdir(exist_ok=True)
        (own_source / name).write_bytes(data)
    return own_source


def names(folder: Path) -> set[str]:
    return {name for name in folder_bytes(folder) if not name.endswith("/")}


def export(master: Path) -> dict[str, Any]:
    return {"export": str(master), "target": "bf16"}


def test_stray_files_are_left_out_and_included_ones_reach_the_export(littered: Path, tmp_path: Path) -> None:
    report = run_command(command(littered), tmp_path / "master")
    assert not names(tmp_path / "master") & STRAY.keys()
    assert report.plan.left_out.keys() == {*STRAY, "README.md"}
    assert all("--include-files" in report.plan.left_out[name] for name in STRAY)
    report = run_command(command(littered, include_files=("*.parquet", "runs/*")), tmp_path / "included")
    assert report.plan.left_out.keys() == {"data/x.csv", "README.md"}
    run_command(export(tmp_path / "included"), tmp_path / "export")
    for folder in ("included", "export"):
        files = folder_bytes(tmp_path / folder)
        assert {name: files.get(name) for name in STRAY} == STRAY | {"data/x.csv": None}
    listed = json.loads(files["pqweights.json"])["files"]
    assert {"train.parquet", "runs/log.txt"} <= listed.keys()


def test_files_that_were_put_into_a_master_are_not_exported(own_source: Path, tmp_path: Path) -> None:
    master = tmp_path / "master"
    run_command(command(own_source), master)
    expected = names(master) - {"pqweights.json"}
    (master / "vocab.txt").write_text("put there by hand")
    (master / "README.md").write_text("a card")
    (master / "pytorch_model.bin").write_text("weights")
    report = run_command(export(master), tmp_path / "export")
    copied = {name for name in expected if not name.endswith(".safetensors")}
    assert {n for n in names(tmp_path / "export") if not n.endswith(".safetensors")} == copied | {"pqweights.json"}
    assert report.plan.left_out.keys() == {"vocab.txt", "README.md", "pytorch_model.bin", "pqweights.json"}


def test_master_without_manifest_is_exported_with_what_loading_needs(littered: Path, tmp_path: Path) -> None:
    master = tmp_path / "master"
    run_command(command(littered, include_files=("*.parquet",)), master)
    (master / "pqweights.json").unlink()
    run_command(export(master), tmp_path / "export")
    assert "tokenizer.json" in names(tmp_path / "export") and "train.parquet" not in names(tmp_path / "export")


def test_run_with_other_included_files_is_refused(
    littered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted or finished."""
    out, asked = tmp_path / "out", command(littered, include_files=("*.parquet",))
    interrupt(monkeypatch, command(littered), out)
    (out / "train.parquet").write_bytes(b"the user's")
    before = folder_bytes(out)
    with raises(OutputError, "`overwrite`"):
        run_command(asked, out)
    with raises(OutputError, "train.parquet"):
        run_command(asked | {"overwrite": True}, out)
    assert folder_bytes(out) == before
    (out / "train.parquet").unlink()
    run_command(command(littered), out)
    with raises(OutputError, "`overwrite`"):
        run_command(asked, out)
    run_command(asked | {"overwrite": True}, out)
    run_command(asked, tmp_path / "fresh")
    assert folder_bytes(out) == folder_bytes(tmp_path / "fresh")
    assert run_command(asked, out).already_done and "train.parquet" in names(out)


@pytest.mark.parametrize("change", [None, 1, -1])
def test_export_refuses_a_master_with_wrong_weight_files(change: int | None, source: Path, tmp_path: Path) -> None:
    master = tmp_path / "master"
    run_command(command(source), master)
    shard = master / "model-00003-of-00004.safetensors"
    size = shard.stat().st_size
    if change is None:
        shard.unlink()
    else:
        os.truncate(shard, size + change)
    with raises(MasterError, shard.name, size):
        run_command(export(master), tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_files_of_a_master_that_were_edited_or_removed(littered: Path, tmp_path: Path) -> None:
    """Masters made before stray files were left out hold them; removing one is what a user may well do."""
    master = tmp_path / "master"
    run_command(command(littered, include_files=("*.parquet",)), master)
    (master / "tokenizer.json").write_text('{"edited": "by the user"}')
    (master / "train.parquet").unlink()
    report = run_command(export(master), tmp_path / "export")
    assert report.plan.left_out["train.parquet"] == "it was removed from the master"
    assert "edited" in (tmp_path / "export/tokenizer.json").read_text()
    (master / "tokenizer.json").unlink()
    with raises(MasterError, "tokenizer.json"):
        run_command(export(master), tmp_path / "second")


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o027, 0o077])
def test_the_umask_decides_who_may_read_a_result(mask: int, littered: Path, tmp_path: Path) -> None:
    """Shards, what is copied and the folders are as any program makes them."""
    before = os.umask(mask)
    try:
        run_command(command(littered, include_files=("data/x.csv",)), tmp_path / "master")
        run_command(export(tmp_path / "master"), tmp_path / "export")
    finally:
        os.umask(before)
    for path in (*tmp_path.glob("master/**"), *tmp_path.glob("master/**/*"), *tmp_path.glob("export/*")):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path
