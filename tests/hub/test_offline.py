"""Repositories by the addresses that people copy, and from the cache while the Hub is switched off."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import folder_bytes
from hub_cases import SOURCE, TARGET, Client, files_of, write_source
from language_models import babbler
from loopback_hub import LoopbackHub

from pqweights.storage.addresses import repository_named

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

NAMES = {
    "ORG/NAME": ("ORG/NAME", None),
    "ORG/NAME/": ("ORG/NAME", None),
    "hf://ORG/NAME": ("ORG/NAME", None),
    "hf://ORG/NAME/": ("ORG/NAME", None),
    "hf://ORG/NAME@v1": ("ORG/NAME", "v1"),
    "hf://models/ORG/NAME": ("ORG/NAME", None),
    "https://huggingface.co/ORG/NAME": ("ORG/NAME", None),
    "HTTPS://HuggingFace.co/ORG/NAME/?library=x#files": ("ORG/NAME", None),
    "http://www.huggingface.co/ORG/NAME/tree/main": ("ORG/NAME", "main"),
    "https://hf.co/ORG/NAME/tree/refs%2Fpr%2F1/": ("ORG/NAME", "refs/pr/1"),
    "https://hf.co/ORG/NAME/tree/refs/pr/1": ("ORG/NAME", "refs/pr/1"),
    "hf.co/ORG/NAME": ("ORG/NAME", None),
    "https://huggingface.co/ORG/NAME/blob/main/config.json": ("ORG/NAME", "main"),
    "https://huggingface.co/ORG/NAME/resolve/v1/model.gguf?download=true": ("ORG/NAME", "v1"),
    "https://me:secret@huggingface.co:443/ORG/NAME.git": ("ORG/NAME", None),
    "https://huggingface.co/gpt2": ("gpt2", None),
    "https://mirror.example/ORG/NAME": ("ORG/NAME", None),
}


@pytest.mark.parametrize("text", NAMES)
def test_addresses_of_a_repository_name_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert repository_named(text) == (*NAMES[text], "model.gguf" if "model.gguf" in text else "")


@pytest.mark.parametrize(
    "text", ["folder", "./ORG/NAME", "a/b/c", "s3://ORG/NAME", "https://example.com/a/b", "http://[", ""]
)
def test_other_texts_name_none(text: str) -> None:
    assert repository_named(text) is None


@pytest.mark.parametrize("path", ["", "datasets/a/b", "a/b/c", "a/b/tree/main/onnx", "a/b/blob/main/onnx/model.onnx"])
def test_addresses_of_something_else_are_refused(path: str, client: Client) -> None:
    result = client("plan", f"https://huggingface.co/{path}")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1


def test_a_revision_is_named_once(client: Client) -> None:
    result = client("plan", "https://huggingface.co/me/source/tree/v1", "--revision", "v2")
    assert result.exit_code == 2 and "v1" in result.stderr and "v2" in result.stderr


@pytest.fixture
def cached(hub: LoopbackHub, client: Client, tmp_path: Path) -> Iterator[str]:
    """A source and its master on the Hub, fetched into the cache; the Hub is switched off then. Yields the commit."""
    from huggingface_hub import snapshot_download

    write_source(tmp_path / "source")
    hub.commit(SOURCE, files_of(tmp_path / "source"))
    commit = hub.repositories[SOURCE].sha()
    client.well("quantize", SOURCE, tmp_path / "online", "-q")
    client.well("push", tmp_path / "online", TARGET, "-q")
    for name in (SOURCE, TARGET):
        snapshot_download(name)
    client.patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    yield commit
    assert not hub.requests


def test_every_command_works_from_a_complete_cache(
    cached: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only = [path for path in client.home.rglob("*") if not path.is_symlink()]
    for path in read_only:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    try:
        client.well("plan", SOURCE)
        for number, options in enumerate(([], ["--revision", cached], ["--low-disk"])):
            client.well("quantize", SOURCE, tmp_path / f"out{number}", "-q", *options)
            assert folder_bytes(tmp_path / f"out{number}") == folder_bytes(tmp_path / "online")
        for name in (TARGET, f"{TARGET}/", f"hf://{TARGET}/", f"https://huggingface.co/{TARGET}/tree/main"):
            assert client.well("inspect", name).stdout == client.well("inspect", tmp_path / "online").stdout
        assert ": ok: " in client.well("verify", TARGET).stdout
        client.well("export", TARGET, tmp_path / "bf16", "--target", "bf16", "-q")
        client.well("export", SOURCE, tmp_path / "int4", "--target", "vllm", "-q")
    finally:
        for path in read_only:
            path.chmod(0o755)


def test_a_run_that_began_online_goes_on_offline(hub: LoopbackHub, client: Client, cached: str, tmp_path: Path) -> None:
    """The cache knows the hashes of the files, as the Hub lists them."""
    journal = json.loads((tmp_path / "online/pqweights.json").read_text())["source"]
    assert journal["revision"] == cached
    assert client.well("quantize", SOURCE, tmp_path / "online", "--json").exit_code == 0
    assert json.loads(client.well("quantize", SOURCE, tmp_path / "online", "--json").stdout)["already_done"]


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "config.json"])
def test_a_file_that_the_cache_lacks_is_named_before_any_work(
    name: str, cached: str, client: Client, tmp_path: Path
) -> None:
    (snapshot,) = (client.home / "hub/models--me--source/snapshots").iterdir()
    if name != "config.json":  # without a list of files, the index names it
        shutil.rmtree(client.home / "hub/models--me--source/trees")
    (snapshot / name).unlink()
    for command in ("plan", "quantize"):
        line = client.line(command, SOURCE, *([tmp_path / "out"] if command == "quantize" else []))
        assert name in line
    assert not (tmp_path / "out").exists()


def test_what_needs_the_network_says_so_at_once(cached: str, client: Client, tmp_path: Path) -> None:
    for arguments in (
        ("plan", "me/absent"),
        ("plan", SOURCE, "--revision", "v9"),
        ("quantize", "me/absent", tmp_path / "out"),
        ("inspect", "me/absent"),
        ("push", tmp_path / "online", TARGET),
    ):
        line = client.line(*arguments)
        assert "HF_HUB_OFFLINE" in line
    assert not (tmp_path / "out").exists()


def test_a_cache_without_links_serves_too(cached: str, client: Client, tmp_path: Path) -> None:
    shutil.copytree(client.home / "hub", tmp_path / "copied")
    shutil.rmtree(client.home / "hub/models--me--source/blobs")
    shutil.rmtree(client.home / "hub/models--me--source/snapshots")
    shutil.copytree(tmp_path / "copied/models--me--source/snapshots", client.home / "hub/models--me--source/snapshots")
    client.well("quantize", SOURCE, tmp_path / "out", "-q")
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "online")


def test_damage_in_the_cache_is_named_and_not_removed(cached: str, client: Client, tmp_path: Path) -> None:
    (snapshot,) = (client.home / "hub/models--me--source/snapshots").iterdir()
    file = snapshot / "model-00002-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.resolve().write_bytes(bytes(data))
    line = client.line("quantize", SOURCE, tmp_path / "out", "-q")
    assert file.name in line and "damaged" in line and file.exists()


def test_a_model_of_a_complete_cache_is_run_and_calibrated_on(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    babbler(tmp_path / "model")
    hub.commit(SOURCE, files_of(tmp_path / "model"))
    snapshot_download(SOURCE)
    client.patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 400)
    client.well("eval", SOURCE, "--text", tmp_path / "text.txt", "--window", "64", "--max-tokens", "200", "-q")
    client.well("generate", SOURCE, "--prompt", "a b c", "--max-tokens", "3", "-q")
    calibrated = ("--recipe", "t4", "--calibrate", tmp_path / "text.txt", "--calibration-tokens", "2048")
    client.well("quantize", SOURCE, tmp_path / "out", *calibrated, "-q")
    assert client.well("verify", tmp_path / "out").stdout
    assert not hub.requests
