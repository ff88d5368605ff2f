"""Folding a model on the Hub: the bytes of a local run, also where norms lie far from what reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import hub_cases
import pytest
from folding_models import llama
from helpers import folder_bytes
from hub_cases import SOURCE, files_of
from loopback_hub import LoopbackHub

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        yield hub


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The files of a master, without the manifest, which names the repository."""
    return {name: data for name, data in folder_bytes(folder).items() if name != "pqweights.json"}


def tensors_of(folder: Path) -> object:
    return json.loads((folder / "pqweights.json").read_bytes())["tensors"]


@pytest.mark.parametrize("kind", ["equalize", "rotate"])
@pytest.mark.parametrize("options", [[], ["--low-disk"]], ids=["cache", "low-disk"])
def test_norms_in_other_files_than_their_readers_are_found(
    options: list[str], kind: str, hub: LoopbackHub, tmp_path: Path
) -> None:
    folder = llama(tmp_path / "source", shards=6)
    hub.commit(SOURCE, files_of(folder))
    fold = ["--fold", kind, "--threads", "2"]
    done = hub_cases.run(hub, tmp_path / "home", "quantize", str(folder), str(tmp_path / "expected"), *fold)
    assert done.returncode == 0, done.stderr
    done = hub_cases.run(hub, tmp_path / "home", "quantize", SOURCE, str(tmp_path / "out"), *fold, *options)
    assert done.returncode == 0, done.stderr
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "expected")
    assert tensors_of(tmp_path / "out") == tensors_of(tmp_path / "expected")


def test_folded_master_is_pushed_and_read_again(hub: LoopbackHub, tmp_path: Path) -> None:
    folder = llama(tmp_path / "source")
    home = tmp_path / "home"
    for arguments in (
        ["quantize", str(folder), str(tmp_path / "master"), "--fold", "equalize"],
        ["push", str(tmp_path / "master"), "me/master"],
        ["verify", "me/master"],
        ["export", "me/master", str(tmp_path / "out"), "--target", "vllm-int4", "--source", str(folder)],
    ):
        done = hub_cases.run(hub, home, *arguments)
        assert done.returncode == 0, (arguments, done.stderr)


def test_plan_of_a_repository_lists_what_is_folded_without_reading_weights(hub: LoopbackHub, tmp_path: Path) -> None:
    folder = llama(tmp_path / "source", shards=6)
    hub.commit(SOURCE, files_of(folder))
    done = hub_cases.run(hub, tmp_path / "home", "plan", SOURCE, "--fold", "equalize", "--json")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert len(planned["fold"]["vectors"]) == 13
    assert planned["hub"]["bytes"] < planned["hub"]["source_bytes"] / 2
