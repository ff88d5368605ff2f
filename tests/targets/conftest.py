"""Fixtures of the export tests: models of the families, and a small checkpoint with an export of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import run_command
from integer_exports import KINDS, several_layers, work


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which models, masters and exports of the families are made once."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source, its master, and an export of each kind."""
    folder = tmp_path_factory.mktemp("driven")
    run_command({"quantize": str(several_layers(folder / "src"))}, folder / "master")
    for kind in KINDS:
        run_command(work(folder, kind), folder / kind)
    return folder
