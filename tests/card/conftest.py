"""Fixtures of the card tests: a master to write cards for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers import run_command, small_checkpoint


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A master with a rescued tensor and tensors of many kinds, made without transformers."""
    folder = tmp_path_factory.mktemp("card")
    run_command({"quantize": str(small_checkpoint(folder / "source")), "recipe": "q5"}, folder / "master")
    return folder / "master"


@pytest.fixture
def master(made: Path, tmp_path: Path) -> Path:
    """A copy of the master that the test may change."""
    return Path(shutil.copytree(made, tmp_path / "master"))


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()
