"""The bytes of masters and exports are those of tests/golden/frozen.json, which golden/frozen.py wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden import frozen
from shared import run_folder

STATES = json.loads(frozen.FILE.read_text())
NAMES = [result.name for result in frozen.results(Path())]


def test_every_result_is_frozen() -> None:
    assert sorted(NAMES) == sorted(STATES)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_that_were_frozen(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (result,) = (r for r in frozen.results(run_folder(tmp_path_factory.getbasetemp())) if r.name == name)
    assert frozen.state(result, tmp_path / "out") == STATES[name]
