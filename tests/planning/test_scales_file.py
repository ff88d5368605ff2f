"""The file of scales: what is written is read back, older files are, and damage is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import f16, f32, safetensors_bytes

from pqweights.errors import SourceError
from pqweights.planning.scales_file import open_scales, write_scales

SEARCHED = {"b.weight": {"codec": "hadamard-trellis", "bits": 3.5, "scaled": True, "matrices": []}}
SCALES = {"b.weight": np.full(4, 0.5, np.float32)}
MOMENTS: dict[str, Any] = {
    "holds": ["moments", "scales"],
    "inputs": [{"tokens": 6, "windows": 1}],
    "weights": {"a.weight": {"inputs": [0, None], "transposed": False}, **SEARCHED},
}
DESCRIPTION: dict[str, Any] = {"version": 1, "holds": ["scales"], "checkpoint": "0" * 64, "weights": SEARCHED}
TENSORS = {"b.weight_awq_scale": f16(SCALES["b.weight"])}


def stored(path: Path, description: Any, key: str = "pqweights_statistics", **tensors: Any) -> Path:
    told = description if isinstance(description, str) else json.dumps(description)
    path.write_bytes(safetensors_bytes(tensors or TENSORS, {key: told}))
    return path


def test_file_reads_back_and_so_does_one_that_an_earlier_version_wrote_with_moments(tmp_path: Path) -> None:
    path, older = tmp_path / "s.safetensors", tmp_path / "older.safetensors"
    write_scales(path, checkpoint="0" * 64, about={"tokens": 6}, weights=SEARCHED, scales=SCALES)
    stored(older, DESCRIPTION | MOMENTS, **TENSORS, **{"inputs.0.moments": f32(np.eye(8))})
    for file in (path, stored(tmp_path / "independent.safetensors", DESCRIPTION), older):
        found = open_scales(file)
        assert (found.checkpoint, found.searched) == ("0" * 64, {"b.weight": ("hadamard-trellis", 3.5)})
        assert found.stored.keys() == TENSORS.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "damaged: expected JSON"),
        ({"version": 2}, "version: expected 1, found 2; a newer pqweights may read it"),
        ({"version": "1"}, "version: expected a whole number, found '1'"),
        ({"checkpoint": 3}, "checkpoint: expected a text, found 3"),
        ({"holds": ["moments"]}, "expected scales that pqweights calibrate wrote, found moments of an earlier version"),
        ({"weights": []}, "weights: expected keys and values"),
        ({"weights": {"a": 3}}, "weights['a']: expected keys and values, found 3"),
        ({"weights": {"b.weight": {"scaled": True}}}, "'b.weight': missing key codec"),
        ({"weights": {"b": SEARCHED["b.weight"]}}, "its metadata does not describe its tensors"),
    ],
)
def test_damaged_description_is_one_line(change: Any, message: str, tmp_path: Path) -> None:
    told = change if isinstance(change, str) else DESCRIPTION | change
    with pytest.raises(SourceError) as caught:
        open_scales(stored(tmp_path / "s.safetensors", told))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("b.weight_awq_scale", "expected float16 scales"), ("more", "its metadata does not describe its tensors")],
)
def test_damaged_tensors_are_one_line(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        open_scales(stored(tmp_path / "s.safetensors", DESCRIPTION, **{**TENSORS, name: f32(np.ones(4))}))


def test_file_that_holds_something_else_is_named(tmp_path: Path) -> None:
    foreign = stored(tmp_path / "foreign.safetensors", "{}", "pqweights_moments")
    for path, found in ((tmp_path / "none", "no such file"), (foreign, "found another file, or an earlier version's")):
        with pytest.raises(SourceError, match=f"{found}.*scales that|scales that pqweights calibrate wrote, {found}"):
            open_scales(path)
