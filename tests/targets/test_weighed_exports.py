"""Exports with errors weighed by the importance of inputs: they err less in that measure, in every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from export_decoders import values_of
from helpers import as_float32, folder_bytes, read_all, run_command
from integer_exports import LAYER, linear_master, work
from random_inputs import RandomInputs, random_inputs

from pqweights.checkpoint.source import open_local
from pqweights.convert import jobs
from pqweights.convert.manifest import read_manifest
from pqweights.results.verify import verify

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

FORMATS = {
    "vllm": ("w4a16", "w3a16", "w8a16", "w4a16-asym", "int8", "fp8", "nvfp4a16", "mxfp4", "mxfp8"),
    "torchao": ("int4", "int8", "fp8"),
}
MLX = ("q4", "q2", "q8", "mxfp4", "nvfp4", "mxfp8")
NAMES = [f"{LAYER}.{name}.weight" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")]


@pytest.fixture(scope="module")
def known(driven: Path) -> RandomInputs:
    return random_inputs(driven / "src")


def weighed_error(folder: Path, name: str, weight: np.ndarray, known: RandomInputs) -> float:
    squares = np.diagonal(known.parts_of(name)).astype(np.float64)
    decoded = next(values_of(tensor) for tensor in open_local(folder).tensors if tensor.name == name)
    return float((squares * np.square(decoded.astype(np.float64) - weight)).sum())


@pytest.mark.parametrize(("target", "format"), [(target, name) for target, names in FORMATS.items() for name in names])
def test_weighed_errors_are_less_than_with_plain_rounding(
    target: str, format: str, driven: Path, known: RandomInputs, tmp_path: Path
) -> None:
    asked = {**work(driven, "original"), "target": target, "format": format}
    asked |= {"packing": "plain"} if format == "int4" else {}
    run_command(asked, tmp_path / "plain")
    report = run_command({**asked, "rounding": "importance", "inputs": known}, tmp_path / "weighed")
    records, source = {record.name: record for record in report.records}, read_all(driven / "src")
    errors = []
    for name in NAMES:
        if (account := records[name].rounding) is None:
            continue
        assert account == {"matrices": 1, "weighed": 1, "rounded_plainly": {}}
        weight = as_float32(source[name]).astype(np.float64)
        errors.append([weighed_error(tmp_path / which, name, weight, known) for which in ("plain", "weighed")])
    assert len(errors) >= 2 and all(after <= before for before, after in errors)
    # Scales of MXFP8 are powers of two, of which none but the largest weight's is good for codes of 8 bits.
    assert format == "mxfp8" or sum(after for _, after in errors) < sum(before for before, _ in errors)
    assert read_manifest(tmp_path / "weighed").made_by["rounding"] == "importance"
    assert verify(tmp_path / "weighed", threads=2).ok


@pytest.mark.parametrize("format", MLX)
def test_weighed_errors_are_less_in_mlx(format: str, base: Path, tmp_path: Path) -> None:
    model = families.model(base, "llama")
    known = random_inputs(model)
    asked: dict[str, Any] = {"export": str(model), "target": "mlx", "format": format}
    run_command(asked, tmp_path / "plain")
    report = run_command({**asked, "rounding": "importance", "inputs": known}, tmp_path / "weighed")
    source = read_all(model)
    accounts = {record.name: record.rounding for record in report.records if record.rounding}
    assert "model.embed_tokens.weight" in accounts
    errors = []
    for name, account in accounts.items():
        assert account["weighed"] == 1
        weight = as_float32(source[name]).astype(np.float64)
        errors.append([weighed_error(tmp_path / which, name, weight, known) for which in ("plain", "weighed")])
    assert len(errors) > 5 and all(after <= before for before, after in errors)
    # Scales of MXFP8 are powers of two, of which none but the largest weight's is good for codes of 8 bits.
    assert format == "mxfp8" or sum(after for _, after in errors) < sum(before for before, _ in errors)


def test_tiles_and_weights_without_inputs_are_rounded_plainly(driven: Path, tmp_path: Path) -> None:
    asked = {**work(driven, "original"), "rounding": "importance"}
    known = random_inputs(driven / "src")
    folder = linear_master(tmp_path / "wide", dict.fromkeys([NAMES[1], NAMES[2]], 256), rows=128).parent / "src"
    wide = {**asked, "export": str(folder), "original": str(folder), "format": "fp8-block"}
    report = run_command({**wide, "inputs": random_inputs(folder)}, tmp_path / "tiles")
    tiles = [record.rounding for record in report.records if record.rounding]
    assert tiles and all(rounding["weighed"] == 0 for rounding in tiles)
    del known.weights[NAMES[0]]
    report = run_command({**asked, "inputs": known}, tmp_path / "some")
    found = {record.name: record.rounding for record in report.records if record.rounding}
    assert found[NAMES[0]]["rounded_plainly"] and found[NAMES[2]]["weighed"] == 1
    run_command(work(driven, "original"), tmp_path / "plain")
    plain, some = (read_all(tmp_path / which) for which in ("plain", "some"))
    assert np.array_equal(plain[f"{NAMES[0]}_packed"][1], some[f"{NAMES[0]}_packed"][1])
    assert not np.array_equal(plain[f"{NAMES[2]}_packed"][1], some[f"{NAMES[2]}_packed"][1])


@pytest.mark.parametrize("format", ["w3a16", "fp8", "nvfp4"])
def test_output_is_identical_across_thread_counts_and_chunk_sizes(
    format: str, driven: Path, known: RandomInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**work(driven, "original"), "format": format, "rounding": "importance", "inputs": known}
    run_command(asked, tmp_path / "first")
    monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", 1000)
    run_command(asked, tmp_path / "second", threads=3)
    assert folder_bytes(tmp_path / "first") == folder_bytes(tmp_path / "second")
