"""Results and interrupted runs of versions whose manifests have SHA-256: they are read, verified and continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from damage import flip
from golden import make
from helpers import folder_bytes, run_command, small_checkpoint
from rewriting import command, interrupt

from pqweights.errors import MasterError, OutputError
from pqweights.rewrite import identity
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
    assert (old.pop("manifest_version"), new.pop("manifest_version")) == (1, 4)
    assert new.pop("same_bytes_since") == identity.SAME_BYTES_SINCE
    assert new.pop("remarks")
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
    damaged = flip(old_master, "model.embed_tokens.weight_codes", at=-1)
    (problem,) = verify(old_master, threads=2).problems
    assert problem.startswith(f"{damaged}: sha256: expected")


@pytest.mark.parametrize("version", [1, 2])
def test_hashes_of_the_other_version_are_refused(version: int, old_master: Path) -> None:
    path = old_master / "pqweights.json"
    manifest = json.loads((path if version == 2 else make.MASTER / "pqweights.json").read_bytes())
    path.write_text(json.dumps(manifest | {"manifest_version": version}))
    with pytest.raises(MasterError, match="damaged"):
        read_manifest(old_master)


def test_old_master_is_not_made_again_by_a_version_with_the_same_bytes_and_exports_as_a_new_one(
    old_master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, made = make.write_source(tmp_path / "source"), tmp_path / "made"
    make.write_master(source, made)
    shutil.copy(VERSION_1, made / "pqweights.json")
    before = folder_bytes(made)
    with pytest.raises(OutputError, match=r"same bytes since 0\.2\.0, this one"):
        make.write_master(source, made)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "SAME_BYTES_SINCE", "0.2.0")
        make.write_master(source, made)
    assert folder_bytes(made) == before
    for name, master in (("from old", old_master), ("from new", make.MASTER)):
        run_command({"export": str(master), "target": "bf16"}, tmp_path / name)
    assert folder_bytes(tmp_path / "from old") == folder_bytes(tmp_path / "from new")


def test_run_that_an_older_version_left_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its journal has a line for each finished tensor, and its shards lie beside it; none of them is taken over."""
    source, out = small_checkpoint(tmp_path / "source"), tmp_path / "out"
    run_command(command(source), tmp_path / "undisturbed")
    interrupt(monkeypatch, command(source), out, shards=0)
    with open(out / ".pqweights/journal.jsonl", "a") as journal:
        journal.write('{"name": "model.norm.weight", "sha256": {"model.norm.weight": "00"}}\n')
    (out / ".pqweights/model-00001-of-00004.safetensors").write_bytes(b"of an older version")
    assert run_command(command(source), out).resumed == 0
    assert folder_bytes(out) == folder_bytes(tmp_path / "undisturbed")
