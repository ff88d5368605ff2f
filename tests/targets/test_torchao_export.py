"""The torchao target: transformers loads what was rounded, in both packings and under every name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from export_decoders import from_nibbles, from_tiles, from_torchao
from families import ATTENTION, FAMILIES
from helpers import Array, as_float32, bf16, gaussian, master_weights, read_all, run_command, write_checkpoint
from integer_exports import LAYER, expected_layers, in_memory, integer_names

from pqweights.convert.manifest import read_manifest
from pqweights.kernels.groups import GroupRule

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

PACKINGS = {"tile_packed_to_4d": "Int4TilePackedTo4dTensor", "plain": "Int4Tensor"}


def loaded_integers(folder: Path, name: str, packing: str) -> dict[str, Array]:
    """The parameters that torchao holds as integers after from_pretrained, decoded from memory."""
    import torch

    result = {}
    for parameter_name, parameter in families.load(folder, FAMILIES[name], "bfloat16").named_parameters():
        kind = type(parameter.data).__name__
        if kind != PACKINGS[packing]:
            assert kind == "Tensor", (parameter_name, kind)
            continue
        numbers = {part: getattr(parameter, part) for part in parameter.tensor_data_names}
        assert all(n.dtype == torch.bfloat16 for part, n in numbers.items() if part != "qdata")
        floats = [n.float().numpy() for part, n in numbers.items() if part != "qdata"]
        decode = from_tiles if packing == "tile_packed_to_4d" else from_nibbles
        rows, columns = parameter.shape
        result[in_memory(parameter_name)] = decode(numbers["qdata"].numpy(), *floats)[:rows, :columns]
    return result


# Of each kind of layers one; test_architectures.py loads others.
@pytest.mark.parametrize("name", ["llama-tied", "llama-uneven", "llama-biased", "gpt_oss", "qwen3_5_moe", "qwen3_vl"])
def test_transformers_loads_torchao_int4_with_the_stored_integers(name: str, base: Path) -> None:
    """Exactly the planned parameters are integers, and both packings hold the same values."""
    planned = {n for n in expected_layers(base, name, FAMILIES[name].linear) if ".experts." not in n}
    found = {}
    for packing in PACKINGS:
        exported = families.exported(base, name, "torchao", packing=packing)
        assert set(integer_names(exported)) == planned
        found[packing] = loaded_integers(exported, name, packing)
        assert found[packing].keys() == {in_memory(n) for n in planned}
        tensors = read_all(exported)
        for n in planned:
            of_file = from_torchao(tensors, n, found[packing][in_memory(n)].shape, packing != "plain")
            assert np.array_equal(found[packing][in_memory(n)], of_file), n
    for n, values in found["plain"].items():
        assert np.array_equal(values, found["tile_packed_to_4d"][n]), n


@pytest.mark.parametrize(
    ("stored", "config", "also"),
    [
        ("model.layers.0.mlp.up_proj", {}, []),
        ("model.layers.0.mlp.up_proj", {"vision_config": {}}, ["model.language_model.layers.0.mlp.up_proj"]),
        ("model.language_model.layers.0.mlp.up_proj", {"vision_config": {}}, ["model.layers.0.mlp.up_proj"]),
        ("backbone.layers.0.mlp.up_proj", {}, ["model.layers.0.mlp.up_proj"]),
    ],
)
def test_torchao_int4_metadata_lists_every_name_that_transformers_uses(
    stored: str, config: dict[str, Any], also: list[str], tmp_path: Path
) -> None:
    """Older checkpoints have other prefixes, and a text model may be loaded from an image-text checkpoint."""
    config = {"model_type": "llama", "dtype": "bfloat16", **config}
    write_checkpoint(tmp_path / "src", {f"{stored}.weight": bf16(gaussian(64, 256))}, config=config)
    run_command({"quantize": str(tmp_path / "src")}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "torchao"}, tmp_path / "out")
    metadata = read_manifest(tmp_path / "out").metadata
    names = [f"{name}.weight" for name in (stored, *also)]
    assert json.loads(metadata["tensor_names"]) == names
    assert len({metadata[name] for name in names}) == 1


def rounded_by_torchao(weights: Array) -> Array:
    """Weights in groups of 128, rounded and decoded by torchao's own functions; it takes BF16."""
    import torch
    import torchao.quantization.quant_primitives as primitives

    values, block, how = torch.from_numpy(weights).bfloat16(), (1, 128), (torch.int32, 0, 15)
    of_numbers = dict.fromkeys(("scale_dtype", "zero_point_dtype"), torch.bfloat16)
    asymmetric = primitives.MappingType.ASYMMETRIC
    numbers = primitives._choose_qparams_affine_tinygemm(values, asymmetric, block, *how, **of_numbers)
    codes = primitives._quantize_affine_tinygemm(values, block, *numbers, *how)
    exact = [each.float() for each in numbers]
    decoded = primitives._dequantize_affine_tinygemm(codes, block, *exact, *how, output_dtype=torch.float32)
    return np.asarray(decoded.numpy())


def rounded_best(weights: Array) -> Array:
    rule = GroupRule(bits=4, group_size=128, symmetric=False, middle=True, rule="best")
    groups = rule.quantize(weights.reshape(-1))
    decoded = (groups.codes.astype(np.float32) - 8) * groups.scales[:, None] + groups.offsets[:, None]
    return decoded.reshape(weights.shape)


@pytest.mark.parametrize("qparams", ["best", "minmax"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_torchao_int4_values_are_the_rounded_weights_and_padding_is_zero(
    packing: str, qparams: str, base: Path, tmp_path: Path
) -> None:
    """132 rows and 1152 columns do not fill whole tiles."""
    wide = {"hidden_size": 1152, "intermediate_size": 132, "num_hidden_layers": 1}
    families.build(families.causal("Llama", **wide), tmp_path / "model")
    run_command({"quantize": str(tmp_path / "model")}, tmp_path / "master")
    work = {"export": str(tmp_path / "master"), "target": "torchao", "packing": packing, "qparams": qparams}
    run_command(work, tmp_path / "out")
    names = integer_names(tmp_path / "out")
    layers = (*(f"self_attn.{n}" for n in ATTENTION), "mlp.gate_proj", "mlp.up_proj")
    assert sorted(names) == sorted(f"{LAYER}.{n}.weight" for n in layers)
    exact = master_weights(tmp_path / "master")
    loaded = loaded_integers(tmp_path / "out", "llama", packing)
    assert loaded.keys() == set(names)
    tensors = read_all(tmp_path / "out")
    for name in names:
        rows, columns = exact[name].shape
        expected = rounded_best(exact[name]) if qparams == "best" else rounded_by_torchao(exact[name])
        assert np.array_equal(loaded[name], expected), name
        if packing == "tile_packed_to_4d":
            stem = name.removesuffix("weight") + "_weight"
            whole = from_tiles(tensors[f"{stem}_qdata"][1], as_float32(tensors[f"{stem}_scale_and_zero"]))
            assert whole.shape == (-(-rows // 8) * 8, -(-columns // 1024) * 1024)
            assert whole.size > rows * columns
            assert not whole[rows:].any() and not whole[:, columns:].any()


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_shard_of_torchao_int4_has_the_metadata_of_all_tensors(packing: str, base: Path, tmp_path: Path) -> None:
    """The loader keeps only the metadata of the last file that it reads."""
    work = {"export": str(families.master(base, "llama")), "target": "torchao", "packing": packing}
    run_command({**work, "max_shard_bytes": 300_000}, tmp_path / "out")
    planned = set(integer_names(tmp_path / "out"))
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 4
    for path in shards:
        (length,) = struct.unpack("<Q", path.read_bytes()[:8])
        metadata = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
        assert set(json.loads(metadata["tensor_names"])) == planned
        assert metadata.keys() == {"format", "tensor_names"} | planned
        assert {json.loads(metadata[n])["_type"] for n in planned} == {PACKINGS[packing]}
    whole = families.exported(base, "llama", "torchao", packing=packing)
    one, several = (loaded_integers(folder, "llama", packing) for folder in (whole, tmp_path / "out"))
    assert one.keys() == several.keys() == planned
    assert all(np.array_equal(one[n], several[n]) for n in planned)


# torchao's classes and their largest relative squared errors.
OF_ROWS = {"int8": ("Int8Tensor", 1e-3), "int8-dynamic": ("Int8Tensor", 1e-3), "fp8": ("Float8Tensor", 1.3e-3)}


@pytest.mark.parametrize("name", OF_ROWS)
def test_eight_bits_load_and_compute_on_a_cpu(name: str, base: Path) -> None:
    """The tensors are those that torchao's own configuration makes, and decode to the rounded weights."""
    import torch
    import torchao.quantization as quantization

    exported = families.exported(base, "llama", "torchao", format=name)
    loaded, decoded = families.load(exported, FAMILIES["llama"], "bfloat16"), 0
    plain = master_weights(families.master(base, "llama"))
    integers = set(integer_names(exported))
    for parameter_name, parameter in loaded.named_parameters():
        assert (type(parameter.data).__name__ == OF_ROWS[name][0]) == (parameter_name in integers)
        if parameter_name in integers:
            decoded += 1
            numbers = parameter.qdata.float() * parameter.scale
            assert torch.equal(numbers.bfloat16(), parameter.dequantize())
            exact = plain[parameter_name]
            assert ((numbers.numpy() - exact) ** 2).sum() < OF_ROWS[name][1] * (exact**2).sum()
    assert decoded == len(integers) == 14
    assert np.isfinite(families.logits(loaded)).all()
    config = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "fp8": quantization.Float8WeightOnlyConfig,
    }[name]()
    layer = torch.nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    quantization.quantize_(layer, config)
    found = dict(loaded.named_modules())["model.layers.0.self_attn.k_proj"].weight
    for attribute in (*found.tensor_attribute_names, *found.optional_tensor_attribute_names):
        assert str(getattr(found, attribute)) == str(getattr(layer.weight, attribute)), attribute
    from torchao.core.config import config_to_dict

    stated = json.loads((exported / "config.json").read_text())["quantization_config"]["quant_type"]["default"]
    assert stated == json.loads(json.dumps(config_to_dict(config)))


def test_torchao_formats_mix(base: Path) -> None:
    folder = families.exported(
        base, "llama", "torchao", format="int8", set_format=("*.mlp.*=fp8",), keep=("*.o_proj.*",)
    )
    found = {tensor.name: tensor.codec for tensor in read_manifest(folder).tensors}
    assert found["model.layers.0.mlp.up_proj.weight"] == "fp8-channel"
    assert found["model.layers.0.self_attn.q_proj.weight"] == "symmetric-channel"
    assert found["model.layers.0.self_attn.o_proj.weight"] is None
    assert np.isfinite(families.logits(families.load(folder, FAMILIES["llama"], "bfloat16"))).all()
