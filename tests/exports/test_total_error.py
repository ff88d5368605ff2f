"""total_mse of an export: the error of its integers against the original, or nothing where it is not known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import done
from helpers import as_float32, bf16, gaussian, master_weights, read_all, write_checkpoint

from pqweights.rewrite.manifest import read_manifest
from pqweights.runtimes.decoders import export_weight

WEIGHT = "model.layers.0.mlp.up_proj.weight"


def masters(folder: Path, codec: str, bits: int) -> Path:
    """model and master of one weight."""
    tensors = {WEIGHT: bf16(gaussian(256, 1024, seed=3))}
    write_checkpoint(folder / "model", tensors, config={"model_type": "llama", "torch_dtype": "bfloat16"})
    (folder / "recipe.yaml").write_text(f"codec: {codec}\nbits: {bits}\n")
    done("quantize", folder / "model", folder / "master", "--recipe", folder / "recipe.yaml")
    return folder


def errors_of(folder: Path, *options: object) -> tuple[float | None, float]:
    """What the manifest of an export states, and the error of the weights that it decodes to."""
    shown = done("export", folder / "master", folder / "out", "--target", "torchao-int4", "--overwrite", *options)
    ((_, record),) = [pair for pair in read_manifest(folder / "out").pairs if pair[0].name == WEIGHT]
    exact = as_float32(read_all(folder / "model")[WEIGHT]).astype(np.float64)
    decoded = export_weight(folder / "out")(WEIGHT)
    assert ("not known from the master; --source measures it" in shown.stdout) == (record.total_mse is None)
    return record.total_mse, ((decoded - exact) ** 2).sum() / (exact**2).sum()


def test_it_is_not_stated_for_a_codec_whose_decoded_weights_are_too_large(tmp_path: Path) -> None:
    """absmax at 3 bits makes weights larger; adding errors would need the energy that the formula expects, which is less."""
    folder = masters(tmp_path, "absmax", 3)
    exact = as_float32(read_all(folder / "model")[WEIGHT]).astype(np.float64)
    decoded = master_weights(folder / "master")[WEIGHT].astype(np.float64)
    (record,) = read_manifest(folder / "master").records
    assert record.relative_mse == pytest.approx(0.075, rel=0.02)
    assert (decoded**2).sum() / (exact**2).sum() == pytest.approx(1.0785, abs=0.002)  # 1 - 0.075 with orthogonal errors
    stated, _ = errors_of(folder)
    assert stated is None


@pytest.mark.parametrize("codec", ["absmax", "hadamard-absmax", "lloyd-max", "hadamard-lloyd-max-l2"])
def test_with_the_source_it_is_measured(codec: str, tmp_path: Path) -> None:
    folder = masters(tmp_path, codec, 3)
    stated, measured = errors_of(folder, "--source", folder / "model")
    assert stated == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("bits", [3, 5])
def test_from_a_master_with_least_squares_norms_it_is_computed(bits: int, tmp_path: Path) -> None:
    stated, measured = errors_of(masters(tmp_path, "hadamard-lloyd-max", bits))
    assert stated == pytest.approx(measured, rel=0.01)
