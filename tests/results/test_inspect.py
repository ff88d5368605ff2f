"""Inspect: the figures of the manifest agree with decoded weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from calls import make_card
from closeness import ALIKE, F32_MATRIX, approx
from commands import answer, done, refused
from helpers import (
    Tensor,
    as_float32,
    bf16,
    f16,
    f32,
    gaussian,
    read_all,
    run_command,
    small_checkpoint,
    write_checkpoint,
)

from pqweights.convert.records import TensorRecord, mean_error
from pqweights.results.inspect import inspect
from pqweights.runtime.folders import size

HEAVY = (np.random.default_rng(9).standard_t(3, size=(96, 128)) * 0.02).astype(np.float32)
WEIGHTS = {
    "model.embed_tokens.weight": gaussian(96, 130, seed=1),
    "model.layers.0.mlp.up_proj.weight": HEAVY,
    "model.layers.0.mlp.down_proj.weight": gaussian(64, 256, seed=2, scale=1e-9),
    "model.layers.0.mlp.gate_proj.weight": np.full((64, 128), 0.0125, dtype=np.float32),
    "lm_head.weight": gaussian(64, 128, seed=3),
}
KEPT = {"model.norm.weight": gaussian(128, seed=4), "model.layers.0.mamba.A_log": gaussian(32, seed=5)}


@pytest.mark.parametrize(
    ("recipe", "make", "bound"),
    [
        ("q2", f32, 2 * F32_MATRIX),
        ("q5", f32, 2 * F32_MATRIX),
        ("q8", f32, 2 * F32_MATRIX),
        ("q5", bf16, ALIKE),
        ("q5", f16, ALIKE),
    ],
)
def test_errors_and_totals_match_the_decoded_weights(
    recipe: str, make: Callable[[np.ndarray], Tensor], bound: float, tmp_path: Path
) -> None:
    """Float32 weights are decoded to float32; others are rounded once more, which is a small part of the error."""
    weights = {name: values for name, values in WEIGHTS.items() if make is not f16 or "down_proj" not in name}
    tensors = {name: make(values) for name, values in (weights | KEPT).items()}
    source, out = write_checkpoint(tmp_path / "model", tensors), tmp_path / "out"
    report = run_command({"quantize": str(source), "recipe": recipe, "max_shard_bytes": 15_000}, out)
    run_command({"export": str(out), "target": "bf16", "dtype": "source"}, tmp_path / "decoded")
    decoded, inspection = read_all(tmp_path / "decoded"), inspect(out)
    assert [tensor.name for tensor in inspection.tensors] == list(tensors)
    assert {name: values[0] for name, values in decoded.items()} == {name: v[0] for name, v in tensors.items()}
    exact = {name: as_float32(tensors[name]).astype(np.float64) for name in weights}
    errors = {name: ((as_float32(decoded[name]) - values) ** 2).sum() for name, values in exact.items()}
    energies = {name: (values**2).sum() for name, values in exact.items()}
    measured = {tensor.name: tensor.relative_mse for tensor in inspection.tensors if tensor.name not in KEPT}
    assert measured == approx({name: errors[name] / energies[name] for name in exact}, bound)
    assert all(tensor.relative_mse is None for tensor in inspection.tensors if tensor.name in KEPT)
    assert inspection.relative_mse == mean_error(report.records, "relative_mse")
    assert inspection.relative_mse == approx(sum(errors.values()) / sum(energies.values()), bound)
    totals = inspection.totals
    assert totals.output_bytes == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert totals.weights == sum(values.size for values in (weights | KEPT).values())
    assert totals.quantized_weights == sum(values.size for values in weights.values())
    assert sum(tensor.rescued for tensor in inspection.tensors) == 1
    # All of its blocks are the same, so their errors do not average out.
    assert inspection.exceeding == (["model.layers.0.mlp.gate_proj.weight"] if recipe == "q8" else [])
    stored = [v.nbytes for name, (_, v) in read_all(out).items() if name.endswith(("_codes", "_norms"))]
    assert totals.bits_per_weight == 8 * sum(stored) / totals.quantized_weights


def test_total_error_without_energy_or_weights_and_its_last_digit() -> None:
    assert mean_error([TensorRecord(name="zeros", relative_mse=0.0, energy=0.0)], "relative_mse") == 0.0
    assert mean_error([TensorRecord(name="kept")], "relative_mse") is None
    # The first value is just below the middle of two seven-digit numbers: plain additions lose the 4096 small terms,
    # and the exact sum, whatever the version of Python, carries the total over the middle.
    records = [TensorRecord(name="x", relative_mse=math.nextafter(1.0000005, 0.0), energy=1.0)]
    records += [TensorRecord(name="x", relative_mse=2.0**10, energy=2.0**-64)] * 4096
    exact = math.fsum(record.relative_mse * record.energy for record in records)  # type: ignore[operator]
    assert mean_error(records, "relative_mse") == float(f"{exact / math.fsum(r.energy or 0.0 for r in records):.6e}")


def test_bits_per_parameter_are_those_of_plan_quantize_eval_and_card(tmp_path: Path) -> None:
    """All bytes of the files over all parameters, in every place that states them."""
    kept_embeddings = ("--keep", "model.embed_tokens.weight")
    weights = {name: bf16(values) for name, values in (WEIGHTS | KEPT).items()}
    source = write_checkpoint(tmp_path / "model", weights | {"ids": ("I64", np.arange(9, dtype=np.int64))})
    planned = answer("plan", source, *kept_embeddings)["totals"]
    written = answer("quantize", source, tmp_path / "out", *kept_embeddings)["totals"]
    found = inspect(tmp_path / "out").totals
    files_bytes = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    bits = found.bits_per_parameter
    assert bits == 8 * files_bytes / sum(values.size for values in (WEIGHTS | KEPT).values())
    assert (
        planned["bits_per_parameter"]
        == written["bits_per_parameter"]
        == bits
        == size(tmp_path / "out").bits_per_parameter
    )
    assert found.bits_per_weight < 5.3 < 7.5 < bits
    stated = f"bits, all overhead counted: {found.bits_per_weight:.4f} per quantized weight, {bits:.4f} per parameter"
    assert stated in done("plan", source, *kept_embeddings).stdout
    assert stated in done("quantize", source, tmp_path / "again", *kept_embeddings).stdout
    assert stated in done("inspect", tmp_path / "out").stdout
    assert f"{bits:.4f} over all of them" in make_card(tmp_path / "out").text


def test_ordinary_checkpoint_is_named(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "model")
    line = refused("inspect", folder)
    assert f"pqweights plan {folder} " in line


@pytest.mark.parametrize("command", ["inspect", "card"])
def test_missing_and_truncated_files_are_warned_of(command: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_command({"quantize": str(small_checkpoint(tmp_path / "model"))}, out)
    assert "WARNING" not in done(command, out).stderr
    shard = out / "model-00001-of-00001.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    truncated = f"{shard.name}: expected {size} bytes, as pqweights.json says, found {size - 1} (1 problem)"
    missing = f"{shard.name} is missing (pqweights.json lists it with {size} bytes) (2 problems)"
    for problem in (truncated, missing):
        warning = f"WARNING: {out}: {problem}; pqweights verify lists them all\n"
        assert done(command, out, "--quiet").stderr == warning
        (out / "tokenizer.json").unlink(missing_ok=True)
        shard.unlink(missing_ok=True)
