"""Links in a folder from elsewhere: what lies outside of the folder is never copied, sent or removed through one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cards import change_manifest
from commands import done, invoke, refused
from helpers import folder_bytes, small_checkpoint

from pqweights.checkpoint.companions import leads_outside
from pqweights.checkpoint.names import is_inside
from pqweights.checkpoint.storage import Storage
from pqweights.storage.store import Store

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----\n"
LEADS = "a link that leads out of the folder"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with a secret and with files that must stay."""
    (tmp_path / "home/.ssh").mkdir(parents=True)
    (tmp_path / "home/.ssh/id_rsa").write_bytes(SECRET)
    (tmp_path / "home/license.txt").write_bytes(SECRET)
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "source")


def holds_secret(folder: Path) -> bool:
    return any(SECRET in data for data in folder_bytes(folder).values())


def link(path: Path, target: Path | str) -> None:
    """Put a link in the place of a file, or where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "name", ["license.txt", "tokenizer.json", "modeling_x.py", "docs/notice", "2_Dense/model.safetensors"]
)
def test_needed_link_out_of_a_source_is_refused(home: Path, source: Path, tmp_path: Path, name: str) -> None:
    link(source / name, os.path.relpath(home / ".ssh/id_rsa", (source / name).parent))
    for command in (("plan", source), ("quantize", source, tmp_path / "out")):
        line = refused(*command)
        assert f"{name}: {LEADS}" in line and "cp -L" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "pqweights.json"])
def test_configuration_index_and_manifest_may_not_lie_elsewhere(home: Path, source: Path, name: str) -> None:
    (home / name).write_text("{}")
    link(source / name, home / name)
    assert f"{name}: {LEADS}" in refused("inspect" if name == "pqweights.json" else "plan", source)


def test_link_that_is_not_needed_is_left_out_and_named(home: Path, source: Path, tmp_path: Path) -> None:
    (source / "data.csv").symlink_to(home / ".ssh/id_rsa")
    (source / "more").symlink_to(home)
    shown = done("quantize", source, tmp_path / "out").stdout
    assert f"left out: data.csv, more: {LEADS}" in shown and "id_rsa" not in shown
    assert not holds_secret(tmp_path / "out")
    assert f"data.csv: {LEADS}" in refused("plan", source, "--include-files", "data.csv")
    assert "more/*" in refused("plan", source, "--include-files", "more/*")
    left_out = json.loads(done("plan", source, "--json").stdout)["left_out_files"]
    assert left_out["data.csv"] == left_out["more"] == LEADS


def test_links_within_the_folder_are_followed_but_not_to_hidden_files(source: Path, tmp_path: Path) -> None:
    (source / "texts").mkdir()
    (source / "texts/license").write_text("mine")
    (source / "LICENSE").symlink_to("texts/license")
    (source / "more").symlink_to("texts")
    (tmp_path / "link").symlink_to(source)  # the folder itself may be one
    done("quantize", tmp_path / "link", tmp_path / "out")
    assert (tmp_path / "out/LICENSE").read_text() == "mine" and not (tmp_path / "out/LICENSE").is_symlink()
    (source / ".git").mkdir()
    (source / ".git/config").write_text("url = https://user:token@127.0.0.1")
    (source / "notice.txt").symlink_to(".git/config")
    assert f"notice.txt: {LEADS}" in refused("plan", source)


def test_weights_may_lie_on_another_disk(source: Path, tmp_path: Path) -> None:
    done("quantize", source, tmp_path / "expected")
    (tmp_path / "disk").mkdir()
    for path in source.glob("*.safetensors"):
        shutil.move(path, tmp_path / "disk" / path.name)
        path.symlink_to(tmp_path / "disk" / path.name)
    done("quantize", source, tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "expected")
    for path in (tmp_path / "out").glob("*.safetensors"):
        shutil.move(path, tmp_path / "disk" / f"master-{path.name}")
        path.symlink_to(tmp_path / "disk" / f"master-{path.name}")
    done("verify", tmp_path / "out")
    done("export", tmp_path / "out", tmp_path / "bf16", "-t", "bf16")


def test_what_is_not_weights_is_refused_where_weights_may_lie_elsewhere(home: Path, source: Path) -> None:
    for path in source.glob("*.safetensors"):
        path.unlink()
        path.symlink_to(home / ".ssh/id_rsa")
    assert "BEGIN" not in refused("plan", source)


def test_cache_of_the_hub_keeps_working(source: Path, home: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--org--name"
    snapshot = repository / "snapshots/0123"
    (repository / "blobs").mkdir(parents=True)
    (snapshot / "sub").mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in source.iterdir() if path.is_file())):
        shutil.move(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (repository / "blobs/card").write_text("mine")
    (snapshot / "sub/notice").symlink_to("../../../blobs/card")
    done("quantize", snapshot, tmp_path / "out")
    assert (tmp_path / "out/sub/notice").read_text() == "mine"
    for target in (home / ".ssh/id_rsa", repository / "blobs/../refs", tmp_path / "hub/models--org--private/blobs/1"):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(SECRET)
        link(snapshot / "license", target)
        assert f"license: {LEADS}" in refused("plan", snapshot)
    shutil.move(repository / "blobs", tmp_path / "elsewhere")
    (repository / "blobs").symlink_to(tmp_path / "elsewhere")  # blobs that are a link could lead anywhere
    assert LEADS in refused("plan", snapshot)


def test_broken_and_circular_links_are_named(source: Path) -> None:
    for target in ("nothing", "license"):
        link(source / "license", target)
        assert "license: a broken link" in refused("plan", source)
    (source / "license").unlink()
    (source / "again").symlink_to(".")
    done("plan", source)


@pytest.fixture
def master(source: Path, tmp_path: Path) -> Path:
    (source / "license").write_bytes(SECRET)
    (source / "sub").mkdir()
    (source / "sub/notice").write_bytes(SECRET)
    done("quantize", source, tmp_path / "master")
    return tmp_path / "master"


def test_linked_files_of_a_result_are_problems(master: Path, home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Even the content that the manifest states: who wrote it may know, or guess, what a secret begins with."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    link(master / "license", home / ".ssh/id_rsa")
    found = invoke("verify", master)
    assert found.exit_code == 1 and found.stdout.count("\n") == 1 and f"license: {LEADS}" in found.stdout
    assert f"license: {LEADS}" in refused("export", master, tmp_path / "out", "-t", "bf16")
    pushed = invoke("push", master, "org/name", "--dry-run")
    assert pushed.exit_code == 1 and "license" in pushed.stderr


def test_card_that_is_a_link_out_is_refused(master: Path, home: Path) -> None:
    (home / "README.md").write_bytes(SECRET)
    (master / "README.md").symlink_to(home / "README.md")
    for command in (("card", master), ("card", master, "--print")):
        assert LEADS in refused(*command)
    assert (home / "README.md").read_bytes() == SECRET


def test_planted_partial_file_is_not_written_through(master: Path, home: Path) -> None:
    victim = home / "bashrc"
    victim.write_text("mine")
    (master / "README.md.partial").symlink_to(victim)
    done("card", master)
    assert victim.read_text() == "mine" and (master / "README.md").is_file()
    assert not (master / "README.md.partial").exists()


# --- output folders ---


def test_overwriting_removes_nothing_behind_a_link(master: Path, home: Path, source: Path) -> None:
    (home / "notice").write_bytes(SECRET)
    shutil.rmtree(master / "sub")
    (master / "sub").symlink_to(home)
    (source / "sub/notice").unlink()
    change_manifest(master, lambda manifest: manifest["files"].update({"sub/license.txt": {"bytes": 1, "sha256": "0"}}))
    before = folder_bytes(home)
    done("quantize", source, master, "--bits", "4", "--overwrite")
    assert folder_bytes(home) == before
    assert (master / "sub").is_symlink()  # it is not ours


def test_overwriting_writes_nothing_through_a_link(master: Path, home: Path, source: Path) -> None:
    shutil.rmtree(master / "sub")
    (master / "sub").symlink_to(home)
    before = folder_bytes(home)
    line = refused("quantize", source, master, "--bits", "4", "--overwrite")
    assert "sub" in line
    assert folder_bytes(home) == before and not (master / ".pqweights").exists()


@pytest.mark.parametrize("planted", ["", "journal.jsonl", "lock", "fetched/x", "config.json.partial"])
def test_links_in_a_work_folder_are_refused(home: Path, source: Path, tmp_path: Path, planted: str) -> None:
    out, target = tmp_path / "out", home if planted == "" else home / "license.txt"
    link = out / ".pqweights" / planted if planted else out / ".pqweights"
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    before = folder_bytes(home)
    for command in (("quantize", source, out), ("quantize", source, out, "--overwrite")):
        assert Path(".pqweights", planted).name in refused(*command)
    assert folder_bytes(home) == before


def test_removal_follows_no_link_that_appears_meanwhile(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the opening of a folder and the removal, its name may come to mean another folder."""
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "sub/license.txt").write_text("ours")
    real = os.unlink

    def unlink(path: Any, **options: Any) -> None:
        if not (out / "sub").is_symlink():
            (out / "sub").rename(out / "old")
            (out / "sub").symlink_to(home)
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    Store(out).remove(["sub/license.txt"])
    assert (home / "license.txt").read_bytes() == SECRET and not (out / "old/license.txt").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("../home/license.txt", "sub/../../home/license.txt", "/etc/x", "C:\\x", "..\\x"),
        *("", "a\0b", "x" * 300, ".", "sub", "file/x"),
    ],
)
def test_removal_ignores_names_that_are_not_files_of_the_folder(name: str, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "sub/kept").mkdir(parents=True)
    (out / "file").write_text("")
    Store(out).remove([name])
    assert (home / "license.txt").exists() and (out / "sub/kept").is_dir() and (out / "file").exists()
    assert not is_inside("a\0b")


def test_removal_removes_files_and_folders_that_it_empties(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("a", "b/c/d", "b/e", "f/g"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("")
    Store(out).remove(["a", "b/c/d", "f/g", "missing/x"])
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*")) == ["b", "b/e"]


def test_files_that_are_not_links_are_inside(tmp_path: Path) -> None:
    (tmp_path / ".hidden/folder").mkdir(parents=True)
    (tmp_path / ".hidden/folder/a").write_text("")
    folder = tmp_path / ".hidden/folder"
    assert not leads_outside(folder, folder / "a") and not leads_outside(folder, folder)
    assert leads_outside(folder, tmp_path) and leads_outside(tmp_path, folder)
    assert Storage(folder).outside_links == ()
