"""Which files of a folder hold the weights, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers import bf16, gaussian, write_checkpoint

from pqweights.checkpoint.source import open_local
from pqweights.errors import SourceError

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def pickles(tmp_path: Path) -> Path:
    """A folder with one pickle, which has a name of its own."""
    source = tmp_path / "pickles"
    source.mkdir()
    torch.save({UP: torch.zeros(4, 128)}, source / "weights.bin")
    return source


def test_single_safetensors_file_may_have_any_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {UP: bf16(gaussian(4, 128))})
    os.rename(source / "model.safetensors", source / "weights.safetensors")
    checkpoint = open_local(source)
    assert checkpoint.weight_files == ("weights.safetensors",)
    assert [tensor.name for tensor in checkpoint.tensors] == [UP]


def test_single_pickle_may_have_any_name(pickles: Path) -> None:
    assert open_local(pickles, allow_pickle=True).weight_files == ("weights.bin",)


@pytest.mark.parametrize("name", ["", "weights.bin"])
def test_pickles_are_refused_unless_allowed(name: str, pickles: Path) -> None:
    with pytest.raises(SourceError, match=r"weights\.bin: .*`allow_pickle`"):
        open_local(pickles / name)


def test_several_pickles_need_an_index(pickles: Path) -> None:
    os.link(pickles / "weights.bin", pickles / "more.bin")
    with pytest.raises(SourceError, match=r"found (more\.bin, weights|weights\.bin, more)\.bin: give one file"):
        open_local(pickles, allow_pickle=True)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="expected a folder or a file, found neither"):
        open_local(tmp_path / "pipe")
