"""The file of statistics: what is written is read back, and damage is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import f16, f32, gaussian, safetensors_bytes

from pqweights.errors import SourceError
from pqweights.planning.statistics_file import (
    InputVector,
    MomentsToWrite,
    ScalesToWrite,
    WeightInputs,
    open_statistics,
    write_statistics,
)

ROWS = gaussian(6, 8, seed=1, scale=1)
SQUARES = (ROWS.T @ ROWS / 6).astype(np.float32)
VECTOR = InputVector(size=8, tokens=6, held_back=2, windows=1)
READS = {"a.weight": WeightInputs(vectors=(0, None), transposed=False)}
SEARCHED = {"b.weight": {"codec": "hadamard-trellis", "bits": 3.5, "scaled": True, "matrices": []}}
SCALES = {"b.weight": np.full(4, 0.5, np.float32)}
DESCRIPTION: dict[str, Any] = {
    "version": 1,
    "holds": ["moments", "scales"],
    "checkpoint": "0" * 64,
    "inputs": [{"tokens": 6, "windows": 1}],
    "weights": {"a.weight": {"inputs": [0, None], "transposed": False}, **SEARCHED},
}
TENSORS = {
    "inputs.0.moments": f32(SQUARES),
    "inputs.0.held_back": f32(ROWS[:2]),
    "b.weight_awq_scale": f16(SCALES["b.weight"]),
}


def stored(path: Path, description: Any, key: str = "pqweights_statistics", **tensors: Any) -> Path:
    path = path.with_suffix(".safetensors")
    told = description if isinstance(description, str) else json.dumps(description)
    path.write_bytes(safetensors_bytes(tensors or TENSORS, {key: told}))
    return path


def test_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    moments = MomentsToWrite(vectors=[VECTOR], weights=READS, data=[SQUARES.tobytes(), ROWS[:2].tobytes()])
    scales = ScalesToWrite(weights=SEARCHED, scales=SCALES)
    write_statistics(path, checkpoint="0" * 64, about={"tokens": 6}, moments=moments, scales=scales)
    for file in (path, stored(tmp_path / "independent.safetensors", DESCRIPTION)):
        found = open_statistics(file)
        assert (found.holds, found.checkpoint) == (("moments", "scales"), "0" * 64)
        assert (found.vectors, found.weights) == ((VECTOR,), READS)
        assert found.searched == {"b.weight": ("hadamard-trellis", 3.5)}
        assert np.array_equal(np.concatenate([strip for _, strip in found.strips(0)]), SQUARES)
        assert np.array_equal(found.mean_squares(0), np.diagonal(SQUARES))
        assert np.array_equal(found.held_back(0), ROWS[:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "damaged: expected JSON"),
        ({"version": 2}, "version: expected 1, found 2; a newer pqweights may read it"),
        ({"version": "1"}, "version: expected a whole number, found '1'"),
        ({"checkpoint": 3}, "checkpoint: expected a text, found 3"),
        ({"holds": ["keys"]}, "holds[0]: invalid enum value 'keys'"),
        ({"inputs": []}, "'a.weight': expected numbers of its inputs"),
        ({"inputs": [{"tokens": -1, "windows": 1}]}, "inputs[0].tokens: expected a whole number >= 0, found -1"),
        ({"inputs": DESCRIPTION["inputs"] * 2}, "expected inputs.1 as two float32 matrices"),
        ({"weights": []}, "weights: expected keys and values"),
        ({"weights": {"a": 3}}, "weights['a']: expected keys and values, found 3"),
        (
            {"weights": {"a": {"inputs": ["0"], "transposed": False}}},
            "'a': inputs[0]: expected a whole number, found '0'",
        ),
        ({"weights": {"a": {"inputs": [0]}}}, "'a': missing key transposed"),
        ({"weights": {"b.weight": {"scaled": True}}}, "'b.weight': missing key codec"),
        ({"weights": {"b": SEARCHED["b.weight"]}}, "its metadata does not describe its tensors"),
    ],
)
def test_damaged_description_is_one_line(change: Any, message: str, tmp_path: Path) -> None:
    told = change if isinstance(change, str) else DESCRIPTION | change
    with pytest.raises(SourceError) as caught:
        open_statistics(stored(tmp_path / "s.safetensors", told))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("inputs.0.moments", f16(SQUARES), "expected inputs.0 as two float32 matrices"),
        ("inputs.0.moments", f32(SQUARES[:4]), "inputs.0: expected moments [K, K] and rows [n, K]"),
        ("inputs.0.held_back", f32(ROWS[:2, :4]), "inputs.0: expected moments [K, K] and rows [n, K]"),
        ("b.weight_awq_scale", f32(SCALES["b.weight"]), "expected float16 scales"),
        ("more", f32(SQUARES), "its metadata does not describe its tensors"),
    ],
)
def test_damaged_tensors_are_one_line(name: str, values: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        open_statistics(stored(tmp_path / "s.safetensors", DESCRIPTION, **{**TENSORS, name: values}))
    assert message in str(caught.value)


@pytest.mark.parametrize(("value", "message"), [(np.nan, "expected finite numbers"), (-1.0, "found a negative one")])
def test_moments_that_no_inputs_have_are_found_when_they_are_read(value: float, message: str, tmp_path: Path) -> None:
    wrong = SQUARES.copy()
    wrong[3, 3] = value
    found = open_statistics(stored(tmp_path / "s", DESCRIPTION, **{**TENSORS, "inputs.0.moments": f32(wrong)}))
    with pytest.raises(SourceError, match=message):
        list(found.strips(0))
    with pytest.raises(SourceError, match=message):
        found.mean_squares(0)


@pytest.mark.parametrize("kind", ["moments", "scales"])
def test_file_that_does_not_hold_what_is_needed_is_named(kind: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "none", stored(tmp_path / "foreign", "{}", "pqweights_moments")):
        with pytest.raises(SourceError, match=f"expected {kind} that pqweights calibrate"):
            open_statistics(path, kind)
    with pytest.raises(
        SourceError,
        match="expected statistics that pqweights calibrate wrote, found another file, or an earlier version's",
    ):
        open_statistics(tmp_path / "foreign.safetensors")
