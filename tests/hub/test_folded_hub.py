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
