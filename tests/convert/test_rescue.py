"""Weights that are hard to encode: rescue by another rotation, --strict, and norms of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import F32_MATRIX, ROUNDED_ONCE_MORE, approx
from commands import answer, done, raises, refused
from converting import command, interrupt
from helpers import as_float32, bf16, f16, f32, folder_bytes, gaussian, read_all, run_command, write_checkpoint

from pqweights.errors import SourceError
from pqweights.formats.lloyd_max import DISTORTION
from pqweights.kernels import SIGNS


def walsh_rows(rows: int, seed: int, signed: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows of the Walsh-Hadamard matrix, or times the signs of the rescue: the worst blocks of that rotation."""
    matrix = np.array([[1.0]])
    while len(matrix) < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    chosen = matrix[np.random.default_rng(seed).integers(128, size=rows)].astype(np.float32)
    return 0.01 * chosen * (SIGNS if signed else 1)


def hostile_checkpoint(folder: Path) -> Path:
    """A weight for which both rotations are bad, between two ordinary ones."""
    hostile = np.concatenate([walsh_rows(32, 1, False), walsh_rows(32, 2, True)])
    return write_checkpoint(
        folder,
        {
            "layers.0.mlp.up_proj.weight": bf16(gaussian(64, 128, seed=1)),
            "layers.1.mlp.up_proj.weight": bf16(hostile),
            "layers.2.mlp.up_proj.weight": bf16(gaussian(64, 128, seed=2)),
        },
        config={"torch_dtype": "bfloat16"},
    )


@pytest.mark.parametrize("bits", [2, 5])
def test_weight_that_exceeds_its_promise_is_named_or_refused(bits: int, tmp_path: Path) -> None:
    source, out, name = hostile_checkpoint(tmp_path / "model"), tmp_path / "out", "layers.1.mlp.up_proj.weight"
    line = refused("quantize", source, out, "--bits", bits, "--strict", "--max-shard-size", 6000)
    assert name in line and not out.exists()
    assert answer("quantize", source, out, "--bits", bits)["exceeding"] == [name]
    manifest = json.loads((out / "pqweights.json").read_bytes())
    assert manifest["exceeding"] == [name]
    entry = next(tensor for tensor in manifest["tensors"] if tensor["name"] == name)
    assert entry["relative_mse"] > 1.25 * DISTORTION[bits]
    for words in (("quantize", source, tmp_path / "text", "--bits", bits, "--quiet"), ("inspect", tmp_path / "text")):
        assert f"WARNING: {name}: " in done(*words).stderr


@pytest.mark.parametrize(("signed", "best"), [(False, "signed-hadamard"), (True, "hadamard")])
def test_better_rotation_is_kept_if_neither_is_good(signed: bool, best: str, tmp_path: Path) -> None:
    """Three quarters of the blocks are worst for one rotation, so the other is taken."""
    hostile = np.concatenate([walsh_rows(48, 1, signed), walsh_rows(16, 2, not signed)])
    source = write_checkpoint(tmp_path / "model", {"layers.1.mlp.up_proj.weight": f32(hostile)})
    (record,) = run_command(command(source), tmp_path / "out").records
    assert record.state == {"rotation": best, "norm_exponent": 0}
    assert record.relative_mse is not None and record.relative_mse > 1.25 * DISTORTION[5]
    assert record.relative_mse == approx(decoded_error(tmp_path / "out", hostile), F32_MATRIX)


def decoded_error(master: Path, exact: np.ndarray[Any, Any]) -> float:
    """The relative error of the one weight of a master, decoded."""
    out = master.with_name("decoded")
    run_command({"export": str(master), "target": "bf16", "dtype": "source"}, out)
    ((_, values),) = [(dtype, as_float32((dtype, data))) for dtype, data in read_all(out).values()]
    assert np.isfinite(values).all()
    right = exact.astype(np.float64)
    return float(((values.astype(np.float64) - right) ** 2).sum() / (right**2).sum())


def test_strict_refuses_finished_and_interrupted_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished, interrupted = tmp_path / "finished", tmp_path / "interrupted"
    work = command(hostile_checkpoint(tmp_path / "model"), max_shard_bytes=5000)
    run_command(work, finished)
    interrupt(monkeypatch, work, interrupted, shards=1)
    for out in (finished, interrupted):
        with raises(SourceError, "strict"):
            run_command(work | {"strict": True}, out)
    assert run_command(work, interrupted).resumed > 0  # the plain run keeps its work
    assert folder_bytes(interrupted) == folder_bytes(finished)


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_constant_weight_is_rescued_at_the_same_size(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "model", {"mlp.up_proj.weight": bf16(np.full((64, 256), 0.0125))})
    work = command(source, recipe={2: "q2", 5: "q5", 8: "q8"}[bits])
    rescued = run_command(work, tmp_path / "rescued")
    assert rescued.records[0].state == {"rotation": "signed-hadamard", "norm_exponent": 0}
    with monkeypatch.context() as patch:
        patch.setattr("pqweights.formats.master.RESCUE_FACTOR", float("inf"))
        plain = run_command(work, tmp_path / "plain")
    assert plain.records[0].state == {"rotation": "hadamard", "norm_exponent": 0}
    assert rescued.plan.output_bytes == plain.plan.output_bytes
    assert rescued.records[0].relative_mse is not None and plain.records[0].relative_mse is not None
    assert rescued.records[0].relative_mse < 1.5 * DISTORTION[bits]  # all blocks are the same
    assert plain.records[0].relative_mse > 5 * rescued.records[0].relative_mse


WIDE = gaussian(64, 128, seed=3) * np.exp2(np.linspace(-60, 60, 64))[:, None].astype(np.float32)


@pytest.mark.parametrize(
    ("values", "make"),
    [
        (gaussian(64, 128, seed=1, scale=1e-9), bf16),
        (gaussian(64, 128, seed=2, scale=1e30), f32),
        (gaussian(64, 128, seed=2, scale=1e37), f32),
        (gaussian(64, 128, seed=2, scale=2e-40), f32),  # subnormal float32
        (np.clip(gaussian(64, 128, seed=2, scale=15000), -65000, 65000), f16),
        (WIDE, f32),
        (WIDE, bf16),
    ],
)
def test_norms_outside_float16_get_an_exponent(values: Any, make: Any, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", {"mlp.up_proj.weight": make(values)})
    (record,) = run_command(command(source), tmp_path / "out").records
    assert record.state is not None and record.state["norm_exponent"] != 0
    norms = read_all(tmp_path / "out")["mlp.up_proj.weight_norms"][1]
    assert np.isfinite(norms).all() and norms.max() >= 2.0**14
    if values is WIDE:  # no norm becomes 0 unless it is negligible beside the largest
        true = np.sqrt((WIDE.astype(np.float64) ** 2).sum(axis=1))
        assert (norms.reshape(-1)[true > true.max() * 2.0**-24] >= 2.0**-10).all()
    error = decoded_error(tmp_path / "out", as_float32(make(values)))
    assert error < 1.25 * DISTORTION[5]
    assert record.relative_mse == approx(error, ROUNDED_ONCE_MORE)
