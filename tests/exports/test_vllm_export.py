"""The vllm-int4 target: transformers and compressed-tensors compute with what was rounded, rotated or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from families import FAMILIES
from helpers import Array, as_float32, bf16, f32, gaussian, read_all, run_command, write_checkpoint
from integer_exports import (
    LAYER,
    LINEAR_FAMILIES,
    ROTATED_FAMILIES,
    as_loaded,
    expected_layers,
    from_compressed_tensors,
    in_memory,
    integer_names,
    quantization,
    unrotated,
)

from pqweights.errors import ExportError
from pqweights.rewrite.manifest import read_manifest


def with_decoded(base: Path, name: str, out: Path, decoded: Mapping[str, Array]) -> Path:
    """Write the BF16 export in float32, with some of its weights replaced."""
    exported = families.exported(base, name, "bf16")
    config = json.loads((exported / "config.json").read_bytes())
    for place in (config, *(value for key, value in config.items() if key.endswith("_config"))):
        place["dtype"] = "float32"
    tensors = {tensor: f32(as_float32(value)) for tensor, value in read_all(exported).items()}
    assert decoded.keys() <= tensors.keys()
    for tensor, values in decoded.items():
        assert values.shape == tensors[tensor][1].shape, tensor
    return write_checkpoint(out, {**tensors, **{n: f32(values) for n, values in decoded.items()}}, config=config)


def all_float32(model: Any) -> Any:
    """Convert all parameters to float32, also those that transformers always loads in BF16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def assert_same_logits(found: Array, expected: Array) -> None:
    assert np.abs(expected).max() > 0.01
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def assert_the_rest_is_plain(base: Path, name: str, exported: Path, rounded: set[str]) -> None:
    """Check that all other tensors are those of the BF16 export, byte for byte."""
    plain, tensors = read_all(families.exported(base, name, "bf16")), read_all(exported)
    parts = {f"{n}_{part}" for n in rounded for part in ("packed", "scale", "shape")}
    assert tensors.keys() == (plain.keys() - rounded) | parts
    for tensor in plain.keys() - rounded:
        assert tensors[tensor][0] == plain[tensor][0]
        assert tensors[tensor][1].tobytes() == plain[tensor][1].tobytes(), tensor


@pytest.mark.parametrize(
    ("name", "bits"), [*((name, 4) for name in LINEAR_FAMILIES), ("llama", 8), ("mixtral", 8), ("qwen3_5_moe", 8)]
)
def test_transformers_computes_with_the_integers_of_vllm_int4(name: str, bits: int, base: Path, tmp_path: Path) -> None:
    """Its logits match those of a plain model with the decoded integers as weights."""
    pytest.importorskip("compressed_tensors")
    family = FAMILIES[name]
    exported = families.exported(base, name, "vllm-int4", bits=bits)
    rounded = expected_layers(base, name, family.linear)
    assert set(integer_names(exported)) == rounded
    assert_the_rest_is_plain(base, name, exported, rounded)
    tensors = read_all(exported)
    decoded = {n: from_compressed_tensors(tensors, n, bits) for n in rounded}
    decoded |= {n: as_loaded(values) for n, values in decoded.items() if ".experts." in n}
    expected = families.logits(families.load(with_decoded(base, name, tmp_path / "plain", decoded), family))
    model = families.load(exported, family)
    families.logits(model)  # decompresses; experts are in BF16 from the start
    assert_same_logits(families.logits(all_float32(model)), expected)


def transformed(model: Any) -> set[str]:
    """The modules whose inputs compressed-tensors transforms."""
    from compressed_tensors.transform import TransformBase

    return {
        name for name, module in model.named_modules() if any(isinstance(c, TransformBase) for c in module.children())
    }


@pytest.mark.parametrize("name", ROTATED_FAMILIES)
def test_rotations_of_vllm_int4_cancel_out_in_compressed_tensors(name: str, base: Path, tmp_path: Path) -> None:
    """The export rotates weights, and compressed-tensors, whose layers vLLM uses, rotates their inputs."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.transform import TransformConfig, apply_transform_config
    from transformers import CompressedTensorsConfig

    family = FAMILIES[name]
    exported = families.exported(base, name, "vllm-int4", basis="rotated")
    rounded, turned = (
        expected_layers(base, name, family.linear),
        expected_layers(base, name, family.rotated, experts=False),
    )
    assert set(integer_names(exported)) == rounded
    codecs = {t.name: t.codec for t in read_manifest(exported).tensors if t.action == "integer"}
    assert {n for n, codec in codecs.items() if codec == "symmetric-g128-rotated"} == turned
    assert {codec for n, codec in codecs.items() if n not in turned} <= {"symmetric-g128"}
    tensors = read_all(exported)
    decoded = {n: as_loaded(from_compressed_tensors(tensors, n)) for n in rounded}
    decoded |= {n: unrotated(decoded[n]) for n in turned}
    model = families.load(exported, family, quantization_config=CompressedTensorsConfig(dequantize=True))
    apply_transform_config(model, TransformConfig(**quantization(exported)["transform_config"]))
    assert {in_memory(n) for n in transformed(model)} == {in_memory(n.removesuffix(".weight")) for n in turned}
    expected = families.logits(families.load(with_decoded(base, name, tmp_path / "plain", decoded), family))
    assert_same_logits(families.logits(all_float32(model)), expected)


def test_rotation_lowers_the_error_of_weights_with_outliers(tmp_path: Path) -> None:
    """The stated error is that of the rotated weights."""
    values = gaussian(128, 256, seed=1)
    values[:, ::37] *= 30
    source = write_checkpoint(
        tmp_path / "src", {"model.layers.0.self_attn.o_proj.weight": bf16(values)}, config={"model_type": "llama"}
    )
    run_command({"quantize": str(source), "recipe": "q8"}, tmp_path / "master")
    errors = {}
    for basis in ("plain", "rotated"):
        out = tmp_path / basis
        run_command({"export": str(tmp_path / "master"), "target": "vllm-int4", "basis": basis}, out)
        (record,) = read_manifest(out).records
        decoded = from_compressed_tensors(read_all(out), record.name)
        exact = as_float32(read_all(source)[record.name]).astype(np.float64)
        errors[basis] = float((((unrotated(decoded) if basis == "rotated" else decoded) - exact) ** 2).sum())
        assert record.total_mse == pytest.approx(errors[basis] / (exact**2).sum(), rel=0.03)
    assert errors["rotated"] < 0.6 * errors["plain"]


def test_rotated_basis_is_refused_for_gpt_oss(base: Path, tmp_path: Path) -> None:
    """Every linear layer of gpt-oss has a bias, which vLLM's transforms do not support."""
    master = families.master(base, "gpt_oss")
    with pytest.raises(ExportError, match="--basis rotated: no linear layer"):
        run_command({"export": str(master), "target": "vllm-int4", "basis": "rotated"}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def rotated_layers(tmp_path: Path, layers: Mapping[str, tuple[int, ...]], **options: Any) -> set[str]:
    """Export weights of these shapes, and return the names of those that are rotated."""
    tensors = {n: bf16(gaussian(*shape, seed=i)) for i, (n, shape) in enumerate(layers.items())}
    source = write_checkpoint(tmp_path / "src", tensors, config={"model_type": "llama"})
    rules = {"recipe": options.pop("recipe")} if "recipe" in options else {}
    run_command({"quantize": str(source), **rules}, tmp_path / "master")
    work = {"export": str(tmp_path / "master"), "target": "vllm-int4", "basis": "rotated", **options}
    report = run_command(work, tmp_path / "out")
    return {t.name for t in report.plan.tensors if t.codec is not None and t.codec.endswith("rotated")}


@pytest.mark.parametrize("spoiled", ["a bias", "a kept weight", "rows of 192"], ids=lambda what: what.replace(" ", "-"))
def test_layers_that_the_runtime_fuses_are_rotated_together(spoiled: str, tmp_path: Path) -> None:
    """If one of q, k and v cannot be rotated, none of them is."""
    shapes: dict[str, tuple[int, ...]] = {f"{LAYER}.self_attn.{n}_proj.weight": (64, 128) for n in "qkvo"}
    shapes |= {f"{LAYER}.mlp.{n}_proj.weight": (64, 128) for n in ("gate", "up", "down")}
    k = f"{LAYER}.self_attn.k_proj"
    options: dict[str, Any] = {}
    if spoiled == "a bias":
        shapes[f"{k}.bias"] = (64,)
    elif spoiled == "a kept weight":
        (tmp_path / "recipe.yaml").write_text(f"bits: 5\nrules: [{{name: {k}.weight, keep: true}}]\n")
        options["recipe"] = str(tmp_path / "recipe.yaml")
    else:
        shapes[f"{k}.weight"] = (64, 192)
        options["group_size"] = 64
    expected = {f"{LAYER}.{n}.weight" for n in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
    assert rotated_layers(tmp_path, shapes, **options) == expected


def test_rotated_groups_may_be_smaller_than_a_block(tmp_path: Path) -> None:
    shapes = {f"{LAYER}.self_attn.o_proj.weight": (64, 256)}
    assert rotated_layers(tmp_path, shapes, group_size=32) == shapes.keys()
    tensors = read_all(tmp_path / "out")
    (name,) = shapes
    decoded, exact = unrotated(from_compressed_tensors(tensors, name)), as_float32(read_all(tmp_path / "src")[name])
    assert np.sum((decoded - exact) ** 2) < 0.012 * np.sum(exact**2)
