"""Results and interrupted runs of versions whose manifests have SHA-256: they are read, verified and continued."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from golden import make
from helpers import folder_bytes, run_command, small_checkpoint
from rewriting import command, interrupt, journaled, watched

from pqweights.checkpoint.header import parse_header
from pqweights.errors import MasterError
from pqweights.rewrite.manifest import read_manifest
from pqweights.rewrite.results.inspect import inspect
from pqweights.rewrite.results.verify import verify

VERSION_1 = make.HERE / "version-1.json"


@pytest.fixture
def old_master(tmp_path: Path) -> Path:
    """The golden master with the manifest that version 0.1.0 wrote for it."""
    shutil.copytree(make.MASTER, tmp_path / "old")
    shutil.copy(VERSION_1, tmp_path / "old/pqweights.json")
    return tmp_path / "old"


def test_only_hashes_and_the_version_differ() -> None:
    old, new = json.loads(VERSION_1.read_bytes()), json.loads((make.MASTER / "pqweights.json").read_bytes())
    assert (old.pop("manifest_version"), new.pop("manifest_version")) == (1, 2)
    for manifest, key in ((old, "sha256"), (new, "blake3_of_pieces")):
        for tensor in manifest["tensors"]:
            for stored in tensor["stored"]:
                assert len(stored.pop(key)) == 64
    assert old == new


def test_old_master_is_read_and_verified(old_master: Path) -> None:
    manifest = read_manifest(old_master)
    assert b"".join(manifest.to_pieces()) == VERSION_1.read_bytes()
    assert verify(old_master, threads=2).problems == ()
    assert inspect(old_master).manifest.tensors == inspect(make.MASTER).manifest.tensors


def test_damage_to_an_old_master_is_found(old_master: Path) -> None:
    shard = next(old_master.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (problem,) = verify(old_master, threads=2).problems
    assert shard.name in problem and "sha256: expected" in problem


def test_hashes_of_the_other_version_are_refused(old_master: Path) -> None:
    for name, version in (("old", 2), ("new", 1)):
        folder = old_master.with_name(name)
        if name == "new":
            shutil.copytree(make.MASTER, folder)
        manifest = json.loads((folder / "pqweights.json").read_bytes())
        (folder / "pqweights.json").write_text(json.dumps(manifest | {"manifest_version": version}))
        with pytest.raises(MasterError, match="damaged"):
            read_manifest(folder)


def test_old_master_is_not_made_again_and_exports_as_a_new_one(old_master: Path, tmp_path: Path) -> None:
    source = make.write_source(tmp_path / "source")
    made_again = tmp_path / "made"
    make.write_master(source, made_again)
    shutil.copy(VERSION_1, made_again / "pqweights.json")
    before = folder_bytes(made_again)
    make.write_master(source, made_again)
    assert folder_bytes(made_again) == before
    for name, master in (("from old", old_master), ("from new", make.MASTER)):
        run_command({"export": str(master), "target": "bf16"}, tmp_path / name)
    assert folder_bytes(tmp_path / "from old") == folder_bytes(tmp_path / "from new")


def to_version_1(out: Path) -> None:
    """Turn what an interrupted run left into what an older version would have left: SHA-256 in the journal."""
    journal = out / ".pqweights/journal.jsonl"
    first, *lines = journal.read_text().splitlines()
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    hashes: dict[str, str] = {}
    for shard in (out / ".pqweights").glob("*.safetensors*"):
        data = shard.read_bytes()
        if not any(data[:8]):
            continue  # its room is reserved, and nothing of it written
        for tensor in parse_header(shard.name, len(data), lambda at, count, data=data: data[at : at + count])[0]:
            hashes[tensor.name] = hashlib.sha256(data[tensor.offset : tensor.offset + tensor.byte_count]).hexdigest()
    for entry in entries:
        entry["sha256"] = {name: hashes[name] for name in entry.pop("blake3_of_pieces")}
    journal.write_text("\n".join([first, *map(json.dumps, entries)]) + "\n")


@pytest.mark.parametrize("tensors", [2, 5, 8])
def test_run_that_an_older_version_began_is_continued(
    tensors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some shards are complete, one is not; what is finished is not begun again, and the result is that of today."""
    source = small_checkpoint(tmp_path / "source")
    run_command(command(source), tmp_path / "undisturbed")
    out = tmp_path / "out"
    interrupt(monkeypatch, command(source), out, tensors=tensors)
    to_version_1(out)
    finished = journaled(out)
    assert len(finished) == tensors
    report, begun = watched(monkeypatch, command(source), out)
    assert report.resumed == tensors and not begun & finished
    assert folder_bytes(out) == folder_bytes(tmp_path / "undisturbed")


def test_damaged_tensor_of_an_older_run_is_redone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_checkpoint(tmp_path / "source")
    out = tmp_path / "out"
    interrupt(monkeypatch, command(source), out, tensors=8)
    to_version_1(out)
    shard = sorted((out / ".pqweights").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    finished = journaled(out)
    _, begun = watched(monkeypatch, command(source), out)
    assert begun & finished
    run_command(command(source), tmp_path / "undisturbed")
    assert folder_bytes(out) == folder_bytes(tmp_path / "undisturbed")
