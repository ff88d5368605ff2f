"""Rotations: the matrices, the weights, and the runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folding_models import HEAD, LAYERS, WIDE, WIDTH, folded_values, llama, measured, values_of
from helpers import folder_bytes, run_command

from pqweights.checkpoint.source import open_local
from pqweights.folding import turning
from pqweights.folding.fold import ROTATE
from pqweights.results.verify import verify
from pqweights.rewrite.manifest import read_manifest


def sylvester(size: int) -> np.ndarray:
    """The Walsh-Hadamard matrix of a size, by its definition."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def stream_rotation(width: int) -> np.ndarray:
    """The orthogonal matrix by which the residual stream is multiplied."""
    block = width & -width
    blocks = np.kron(np.eye(width // block), sylvester(block) / np.sqrt(block))
    return np.asarray(turning.signs(width)[:, None] * blocks)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 64, 256])
def test_hadamard_is_the_matrix_product(size: int, axis: int) -> None:
    values = np.random.default_rng(size).standard_normal((size, 3) if axis == 0 else (3, size)).astype(np.float32)
    expected = sylvester(size) @ values if axis == 0 else values @ sylvester(size)
    turning.hadamard(values, axis)
    assert np.allclose(values, expected, atol=1e-4)


def test_signs_are_signs_of_both_kinds_and_never_change() -> None:
    found = turning.signs(1000)
    assert set(found) == {-1.0, 1.0}
    assert 400 < (found > 0).sum() < 600
    assert "".join("+-"[int(sign < 0)] for sign in found[:16]) == "+++---+-++--+---"


@pytest.mark.parametrize("most_weights", [turning.MOST_WEIGHTS, 1])
def test_weights_are_those_of_dense_matrices(
    most_weights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if large weights are turned in a file, a few columns at a time."""
    monkeypatch.setattr(turning, "MOST_WEIGHTS", most_weights)
    monkeypatch.setattr(turning, "STRIP_WEIGHTS", 50 * WIDTH)
    source = llama(tmp_path / "source", "F32")
    fold = measured(source, tmp_path / "work", kind=ROTATE)
    before = {t.name: values_of(t).astype(np.float64) for t in open_local(source).tensors}
    found, stream = folded_values(fold), stream_rotation(WIDTH)
    heads = np.kron(np.eye(WIDTH // HEAD), sylvester(HEAD) / np.sqrt(HEAD))
    gain = before["model.layers.1.input_layernorm.weight"]
    of_values = heads[: 2 * HEAD, : 2 * HEAD]
    layer = "model.layers.1.self_attn"
    expected = {
        "model.embed_tokens.weight": before["model.embed_tokens.weight"] @ stream,
        "lm_head.weight": before["lm_head.weight"] * before["model.norm.weight"] @ stream,
        f"{layer}.q_proj.weight": before[f"{layer}.q_proj.weight"] * gain @ stream,
        f"{layer}.v_proj.weight": of_values @ (before[f"{layer}.v_proj.weight"] * gain) @ stream,
        f"{layer}.o_proj.weight": stream.T @ before[f"{layer}.o_proj.weight"] @ heads,
        "model.layers.2.mlp.down_proj.weight": stream.T @ before["model.layers.2.mlp.down_proj.weight"],
    }
    for name, values in expected.items():
        assert np.abs(found[name] - values).max() < 1e-5 * np.abs(values).max(), name
    assert not [path.name for path in (tmp_path / "work").iterdir()]


def test_needs_count_the_files_of_large_turned_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "source", "F32")
    assert measured(source, tmp_path / "work", kind=ROTATE).disk_bytes == 0
    monkeypatch.setattr(turning, "MOST_WEIGHTS", 1)
    assert measured(source, tmp_path / "work", kind=ROTATE).disk_bytes == 2 * 4 * WIDTH * WIDE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, and its rotated master."""
    folder = tmp_path_factory.mktemp("rotated")
    run_command({"quantize": str(llama(folder / "src")), "fold": ROTATE}, folder / "master")
    return folder


def test_bytes_do_not_depend_on_threads_or_on_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turning, "MOST_WEIGHTS", 1)
    run_command({"quantize": str(folder / "src"), "fold": ROTATE}, tmp_path / "out", threads=3)
    assert folder_bytes(tmp_path / "out") == folder_bytes(folder / "master")


def test_manifest_says_what_was_rotated(folder: Path) -> None:
    manifest = read_manifest(folder / "master")
    assert manifest.made_by["fold"] == {"kind": ROTATE, "block": WIDTH}
    reasons = {tensor.name: tensor.reason for tensor in manifest.tensors}
    assert "rotated: outputs" in reasons[f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"]
    assert not verify(folder / "master", threads=1).problems


@pytest.mark.parametrize("options", [{}, {"original": "src"}])
def test_exports_of_a_rotated_master_are_of_the_rotated_weights(
    options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    asked = {key: str(folder / value) for key, value in options.items()}
    command = {"export": str(folder / "master"), "target": "vllm-int4", "group_size": 32, **asked}
    run_command(command, tmp_path / "int4")
    errors = [record.relative_mse for record in read_manifest(tmp_path / "int4").records if record.relative_mse]
    assert len(errors) == 7 * LAYERS
    assert max(errors) < 0.02


def test_export_cannot_rotate_where_the_embedding_stays_plain(folder: Path, tmp_path: Path) -> None:
    run_command({"quantize": str(folder / "src")}, tmp_path / "master")
    command = {"export": str(tmp_path / "master"), "target": "vllm-int4", "group_size": 32, "fold": ROTATE}
    report = run_command(command, tmp_path / "int4")
    assert any("cannot be rotated" in warning for warning in report.warnings)
    assert json.loads((tmp_path / "int4" / "pqweights.json").read_bytes())["fold"] == {
        "kind": ROTATE,
        "block": 0,
        "factors_sha256": hashlib.sha256().hexdigest(),  # no factors
    }
