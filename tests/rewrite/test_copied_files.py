"""Files that a run copies: what loading needs or the user asks for, through masters, exports and resumed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import folder_bytes, run_command
from rewriting import command, interrupt

from pqweights.errors import MasterError, OutputError, SourceError

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
    asked = command(littered, include_files=("*.parquet", "runs/*"))
    report = run_command(asked, tmp_path / "included")
    assert report.plan.left_out.keys() == {"data/x.csv", "README.md"}
    run_command(export(tmp_path / "included"), tmp_path / "export")
    for folder in ("included", "export"):
        found = folder_bytes(tmp_path / folder)
        assert {name: found.get(name) for name in STRAY} == STRAY | {"data/x.csv": None}
    manifest = json.loads((tmp_path / "export/pqweights.json").read_bytes())
    assert {"train.parquet", "runs/log.txt"} <= manifest["files"].keys()


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


def test_interrupted_run_with_other_included_files_is_refused(
    littered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "out", command(littered, include_files=("*.parquet",))
    interrupt(monkeypatch, command(littered), out)
    (out / "train.parquet").write_bytes(b"the user's")
    before = folder_bytes(out)
    with pytest.raises(OutputError, match="other files to copy"):
        run_command(asked, out)
    with pytest.raises(OutputError, match=r"train\.parquet' exists, and pqweights did not write it"):
        run_command(asked | {"overwrite": True}, out)
    assert folder_bytes(out) == before
    (out / "train.parquet").unlink()
    run_command(asked | {"overwrite": True}, out)
    run_command(asked, tmp_path / "fresh")
    assert folder_bytes(out) == folder_bytes(tmp_path / "fresh")


def test_finished_result_with_other_included_files_is_replaced_on_request(littered: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "out", command(littered, include_files=("*.parquet",))
    run_command(command(littered), out)
    with pytest.raises(OutputError, match="`overwrite`"):
        run_command(asked, out)
    run_command(asked | {"overwrite": True}, out)
    assert run_command(asked, out).already_done and "train.parquet" in names(out)


def test_pattern_that_matches_nothing_is_refused_before_anything_is_written(littered: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"`include_files` nothing"):
        run_command(command(littered, include_files=("nothing*",)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["missing", "longer", "shorter"])
def test_export_refuses_a_master_with_wrong_weight_files(damage: str, source: Path, tmp_path: Path) -> None:
    master = tmp_path / "master"
    run_command(command(source), master)
    shard = master / "model-00003-of-00004.safetensors"
    size = shard.stat().st_size
    if damage == "missing":
        shard.unlink()
        found = rf"is missing \(pqweights.json lists it with {size} bytes\)"
    else:
        shard.write_bytes(shard.read_bytes() + b"x" if damage == "longer" else shard.read_bytes()[:-1])
        found = rf"expected {size} bytes, .*found {size + 1 if damage == 'longer' else size - 1}"
    with pytest.raises(MasterError, match=rf"{shard.name}:? {found}; fetch or copy"):
        run_command(export(master), tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_export_refuses_a_master_without_a_listed_file_but_not_an_edited_one(source: Path, tmp_path: Path) -> None:
    master = tmp_path / "master"
    run_command(command(source), master)
    (master / "tokenizer.json").write_text('{"edited": "by the user"}')
    run_command(export(master), tmp_path / "export")
    assert "edited" in (tmp_path / "export/tokenizer.json").read_text()
    (master / "tokenizer.json").unlink()
    with pytest.raises(MasterError, match=r"tokenizer\.json is missing"):
        run_command(export(master), tmp_path / "second")


def test_stray_file_that_was_removed_from_an_old_master_does_not_stop_an_export(littered: Path, tmp_path: Path) -> None:
    """Masters made before stray files were left out hold them; removing one is what a user may well do."""
    master = tmp_path / "master"
    run_command(command(littered) | {"include_files": ["train.parquet"]}, master)
    (master / "train.parquet").unlink()
    report = run_command(export(master), tmp_path / "export")
    assert report.plan.left_out["train.parquet"] == "it was removed from the master"
