"""What tests of this folder share: where the masters of tests/support/families.py lie."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()
