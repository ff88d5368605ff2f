"""What the mlx and torchao targets write, as sources: the weights of the export, and its bytes when exported again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from commands import done, refused
from export_decoders import export_weight, values_of
from helpers import read_all, write_checkpoint

from pqweights.checkpoint.source import open_local
from pqweights.formats.packed import QuantizedTensor

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

EXPORTS: list[tuple[str, dict[str, Any]]] = [
    ("mlx", {"format": "q4"}),
    ("mlx", {"format": "q8", "group_size": 32}),
    ("mlx", {"format": "mxfp4"}),
    ("mlx", {"format": "mxfp8"}),
    ("mlx", {"format": "nvfp4"}),
    ("torchao", {"format": "int8"}),
    ("torchao", {"format": "fp8"}),
    ("torchao", {"packing": "plain"}),
]


@pytest.mark.parametrize(
    ("target", "options"),
    EXPORTS,
    ids=lambda of: "-".join(of.values()) if isinstance(of, dict) and "group_size" not in of else None,
)
def test_an_export_is_a_source_that_exports_to_its_very_bytes(
    target: str, options: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    source = families.exported(base, "llama", target, **options)
    weight, tensors = export_weight(source), open_local(source).tensors
    packed = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    assert packed
    if "fp" not in options.get("format", "") or target == "torchao":  # of these there is an independent decoder
        assert all(np.array_equal(values_of(tensor), weight(tensor.name)) for tensor in packed)
    done("quantize", source, tmp_path / "master", "--lossless")
    asked = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value)]
    shown = done("export", tmp_path / "master", tmp_path / "out", "--target", target, *asked).stdout
    assert f"{len(packed)} of " in " ".join(shown.split())
    expected, found = read_all(source), read_all(tmp_path / "out")
    assert found.keys() == expected.keys()
    for stored, (dtype, array) in expected.items():
        assert (found[stored][0], found[stored][1].tobytes()) == (dtype, array.tobytes()), stored


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_stacks_of_experts_are_the_experts_of_the_model(name: str, base: Path, tmp_path: Path) -> None:
    """Also where one module has other settings; a master without loss exports to the very bytes of the stacks."""
    source, wide = tmp_path / "source", ("--target", "mlx", "--set", "*.layers.0.*.switch_mlp.down_proj*=q8")
    done("export", families.master(base, name), source, *wide)
    checkpoint, weight = open_local(source), export_weight(source)
    original = read_all(families.model(base, name))
    assert {tensor.name: tensor.shape for tensor in checkpoint.tensors} == {
        tensor: array.shape for tensor, (_, array) in original.items()
    }
    experts = [tensor for tensor in checkpoint.tensors if ".experts." in tensor.name]
    assert {tensor.dtype for tensor in experts} == {"MLX4", "MLX8"}
    for tensor in experts:
        path, expert, matrix = tensor.name.removesuffix(".weight").rsplit(".", 2)
        stack = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(matrix, matrix)
        expected = weight(f"{path.removesuffix('experts')}switch_mlp.{stack}.weight")
        np.testing.assert_array_equal(values_of(tensor), expected[int(expert)])
    done("quantize", source, tmp_path / "master", "--lossless")
    done("export", tmp_path / "master", tmp_path / "out", *wide)
    exported = read_all(tmp_path / "out")
    assert {key: array.tobytes() for key, (_, array) in exported.items()} == {
        key: array.tobytes() for key, (_, array) in read_all(source).items()
    }


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_codes_of_mlx_without_scales_are_refused(name: str, base: Path, tmp_path: Path) -> None:
    """They would be kept as they are, of no use to anybody."""
    tensors = read_all(families.exported(base, name, "mlx", format="q4"))
    lost = next(key for key in tensors if key.endswith("down_proj.scales"))
    config = json.loads((families.exported(base, name, "mlx", format="q4") / "config.json").read_text())
    write_checkpoint(tmp_path, {key: value for key, value in tensors.items() if key != lost}, config=config)
    assert f"{lost.split('.mlp')[0].split('.block')[0]}." in refused("plan", tmp_path)
