"""The file of sensitivities: reading it back, damage to it, and files that it may not replace."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pqweights.checkpoint.writer import check_free
from pqweights.errors import OutputError, SourceError
from pqweights.planning.sensitivity_file import Measured, Sensitivity, read_sensitivity, write_sensitivity

FOUND = Sensitivity(
    checkpoint="0" * 64,
    method={"kind": "random tokens", "tokens": 64, "levels": [0.01, 0.02]},
    groups=(
        Measured(
            name="model.layers.0.mlp.gate_up",
            weights=("a.gate_proj.weight", "a.up_proj.weight"),
            alpha=0.5,
            points=((0.01, 0.005), (0.02, 0.01)),
        ),
        Measured(name="lm_head", weights=("lm_head.weight",), alpha=0.0, points=((0.01, 0.0), (0.02, -1e-9))),
    ),
)


def test_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    write_sensitivity(path, FOUND)
    found = read_sensitivity(path)
    assert found == FOUND
    assert found.sha256 is not None
    write_sensitivity(tmp_path / "again.json", found)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"s.json", "again.json"}
    assert set(json.loads(path.read_text())) == {"pqweights_sensitivity", "checkpoint", "method", "groups"}


def test_foreign_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("mine")
    for path, overwrite, expected in (
        (tmp_path / "s.json", False, "the file exists"),
        (tmp_path, False, "found a folder"),
        (tmp_path, True, "found a folder"),
    ):
        with pytest.raises(OutputError, match=expected):
            check_free(path, overwrite, kind="sensitivities", read=read_sensitivity)
    with pytest.raises(OutputError, match="expected a file of sensitivities"):
        check_free(tmp_path / "s.json", True, kind="sensitivities", read=read_sensitivity)
    assert (tmp_path / "s.json").read_text() == "mine"
    check_free(tmp_path / "new.json", False, kind="sensitivities", read=read_sensitivity)


GROUP = FOUND.to_json()["groups"][0]
DAMAGED: list[tuple[str, Any, str]] = [
    ("empty", b"", "expected JSON"),
    ("cut", json.dumps(FOUND.to_json())[:-30].encode(), "expected JSON"),
    ("deep", b"[" * 200_000, "levels of nesting"),
    ("a list", [], "pqweights_sensitivity 1"),
    ("another version", {"pqweights_sensitivity": 2}, "pqweights_sensitivity 1"),
    ("no groups", {"groups": []}, "groups: expected a list of length >= 1, found []"),
    ("a group of another kind", {"groups": [GROUP, 5]}, "groups[1]: expected keys and values, found 5"),
    ("checkpoint a number", {"checkpoint": 5}, "checkpoint: expected a text, found 5"),
    ("method empty", {"method": {}}, "method: missing key kind"),
    (
        "method of an unknown kind",
        {"method": {"kind": "guess", "tokens": 5}},
        "method.kind: invalid enum value 'guess'",
    ),
    ("method without tokens", {"method": {"kind": "text"}}, "method: missing key tokens"),
    ("a group twice", {"groups": [GROUP, {**GROUP, "weights": ["b.weight"]}]}, "is there twice"),
    ("a weight twice", {"groups": [GROUP, {**GROUP, "name": "b"}]}, "is there twice"),
    ("a weight twice in a group", {"groups": [{**GROUP, "weights": ["a", "a"]}]}, "is there twice"),
]
for _key, _value in (
    ("name", 5),
    ("weights", []),
    ("weights", [5]),
    ("alpha", -0.1),
    ("alpha", math.nan),
    ("alpha", math.inf),
    ("alpha", 10**400),
    ("alpha", "much"),
    ("points", 5),
    ("points", [[0.1]]),
    ("points", [["x", 0.1]]),
):
    _expected = "is not a number of JSON" if _value in (math.inf, math.nan) else f"groups[0].{_key}"
    DAMAGED.append((f"{_key} {str(_value)[:12]}", {"groups": [{**GROUP, _key: _value}]}, _expected))
for _key in ("name", "alpha", "weights"):
    _without = {key: value for key, value in GROUP.items() if key != _key}
    DAMAGED.append((f"without {_key}", {"groups": [_without]}, f"groups[0]: missing key {_key}"))


@pytest.mark.parametrize(("content", "expected"), [pytest.param(c, e, id=name) for name, c, e in DAMAGED])
def test_damaged_file_is_one_line(tmp_path: Path, content: Any, expected: str) -> None:
    path = tmp_path / "s.json"
    whole = FOUND.to_json()
    if isinstance(content, dict):
        content = whole | content
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(SourceError) as caught:
        read_sensitivity(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert expected in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(
            SourceError, match=f"{reason}.*expected 'heuristic', or a file that pqweights sensitivity wrote"
        ):
            read_sensitivity(path)
