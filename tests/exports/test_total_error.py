"""total_mse of an export: the error of its integers against the original, stated only where it is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import done
from helpers import as_float32, bf16, gaussian, master_weights, read_all, write_checkpoint

from pqweights.rewrite.manifest import read_manifest
from pqweights.runtimes.decoders import export_weight

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

WEIGHT = "model.layers.0.mlp.up_proj.weight"


def masters(folder: Path, codec: str, bits: float) -> Path:
    """Make the folders model and master, with one weight."""
    tensors = {WEIGHT: bf16(gaussian(256, 1024, seed=3))}
    write_checkpoint(folder / "model", tensors, config={"model_type": "llama", "torch_dtype": "bfloat16"})
    (folder / "recipe.yaml").write_text(f"codec: {codec}\nbits: {bits}\n")
    done("quantize", folder / "model", folder / "master", "--recipe", folder / "recipe.yaml")
    return folder


def errors_of(folder: Path, *options: object) -> tuple[float | None, float]:
    """Export, and return the total_mse of the manifest and the error of the decoded weights."""
    shown = done("export", folder / "master", folder / "out", "--target", "torchao-int4", "--overwrite", *options)
    ((_, record),) = [pair for pair in read_manifest(folder / "out").pairs if pair[0].name == WEIGHT]
    exact = as_float32(read_all(folder / "model")[WEIGHT]).astype(np.float64)
    decoded = export_weight(folder / "out")(WEIGHT)
    assert ("unknown; pass --source to measure it" in shown.stdout) == (record.total_mse is None)
    return record.total_mse, ((decoded - exact) ** 2).sum() / (exact**2).sum()


def test_total_error_is_unknown_for_a_codec_with_inflated_weights(tmp_path: Path) -> None:
    """polar keeps the length of weights, which the formula assumes to shrink, so the sum of errors would be wrong."""
    folder = masters(tmp_path, "polar", 3.875)
    exact = as_float32(read_all(folder / "model")[WEIGHT]).astype(np.float64)
    decoded = master_weights(folder / "master")[WEIGHT].astype(np.float64)
    (record,) = read_manifest(folder / "master").records
    assert record.relative_mse == pytest.approx(0.0321, rel=0.02)
    assert (decoded**2).sum() / (exact**2).sum() == pytest.approx(1, abs=0.002)  # not 1 - 0.0321
    stated, _ = errors_of(folder)
    assert stated is None


def test_total_error_is_measured_with_the_source(tmp_path: Path) -> None:
    folder = masters(tmp_path, "polar", 3.875)
    stated, measured = errors_of(folder, "--source", folder / "model")
    assert stated == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("bits", [3, 5])
def test_total_error_is_computed_for_least_squares_norms(bits: int, tmp_path: Path) -> None:
    stated, measured = errors_of(masters(tmp_path, "hadamard-lloyd-max", bits))
    assert stated == pytest.approx(measured, rel=0.01)
