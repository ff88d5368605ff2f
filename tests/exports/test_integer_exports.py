"""Exports to integers: what their runtimes load is what was rounded; the driver's guarantees; --source; bad input."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from commands import done, refused
from families import ATTENTION, FAMILIES
from helpers import (
    Array,
    Tensor,
    as_float32,
    bf16,
    f32,
    folder_bytes,
    gaussian,
    killed_runs,
    master_weights,
    read_all,
    run_command,
    sylvester,
    write_checkpoint,
)

from pqweights.errors import ExportError, MasterError, OutputError, PqweightsError, SourceChangedError, SourceError
from pqweights.exports import integer_export
from pqweights.exports.vllm_int4 import patterns
from pqweights.kernels.groups import GroupRule, rotate
from pqweights.results.verify import verify
from pqweights.rewrite import jobs
from pqweights.rewrite.manifest import Manifest, read_manifest

LINEAR_FAMILIES = [name for name, family in FAMILIES.items() if family.linear]
ROTATED_FAMILIES = [name for name, family in FAMILIES.items() if family.rotated]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models, masters and exports of the families lie, made once."""
    pytest.importorskip("transformers")
    return tmp_path_factory.getbasetemp()


def quantization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    return found


def integer_names(folder: Path) -> list[str]:
    """The weights that an export holds as integers."""
    return [tensor.name for tensor in read_manifest(folder).tensors if tensor.action == "integer"]


def in_memory(name: str) -> str:
    """A name without what distinguishes a text model's from that of one that sees, too."""
    return name.replace("language_model.", "")


# --- the formats, read here a second time ---


def unpacked(words: Array, bits: int) -> Array:
    """Codes from 32-bit words [N, K * bits / 32], the first code lowest."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(len(words), -1)


def from_compressed_tensors(tensors: Mapping[str, Tensor], name: str, bits: int = 4) -> Array:
    """A weight in float32: (code - 2**(bits - 1)) * scale."""
    codes = unpacked(tensors[f"{name}_packed"][1], bits).astype(np.float32) - 2 ** (bits - 1)
    assert tensors[f"{name}_shape"][1].tolist() == list(codes.shape)
    scales = as_float32(tensors[f"{name}_scale"])
    return codes * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def as_loaded(weights: Array) -> Array:
    """In BF16, to which transformers decodes what it decodes while it loads: experts, or with dequantize=True everything."""
    return as_float32(bf16(weights))


def unrotated(weights: Array) -> Array:
    """Rows of blocks of 128, each times H / sqrt(128), in float64 and rounded once."""
    turned = weights.astype(np.float64).reshape(len(weights), -1, 128) @ (sylvester() / math.sqrt(128))
    return turned.reshape(weights.shape).astype(np.float32)


def untiled(words: Array) -> Array:
    """Codes [8 * m, 128 * n] from PyTorch's tiles [m, n, 32, 4] i32, after matrix_to_m16n8k16_Bint4_layout in int4mm.cu:
    a lane holds, per word, 2 x 4 values of one row, those with even numbers in the low half of the word."""
    rows, columns = words.shape[:2]
    codes = np.full((rows * 8, columns * 128), 255, dtype=np.uint8)
    for lane in range(32):
        for word in range(4):
            for nibble, value in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                column = word * 32 + lane % 4 * 2 + value % 2 + value // 2 % 2 * 8 + value // 4 * 16
                found = (words[:, :, lane, word].view(np.uint32) >> np.uint32(4 * nibble)) & np.uint32(15)
                codes[lane // 4 :: 8, column::128] = found
    return codes


def from_tiles(words: Array, pairs: Array) -> Array:
    """(code - 8) * scale + zero, padding included; pairs [K / g, N, 2] f32."""
    codes = untiled(words).astype(np.float32) - 8
    scales, zeros = (np.repeat(pairs[..., i].T, codes.shape[1] // len(pairs), axis=1) for i in (0, 1))
    return codes * scales + zeros


def from_nibbles(packed: Array, scales: Array, zeros: Array) -> Array:
    """Int4Tensor: signed nibbles [N, K / 2] i8, the even column low; scales, zeros [K / g, N] f32."""
    low, high = packed.view(np.uint8) & 15, packed.view(np.uint8) >> 4
    codes = np.stack([low, high], axis=-1).reshape(len(packed), -1).astype(np.int16)
    codes = np.where(codes > 7, codes - 16, codes).astype(np.float32)
    return codes * np.repeat(scales.T, codes.shape[1] // len(scales), 1) + np.repeat(
        zeros.T, codes.shape[1] // len(zeros), 1
    )


def from_torchao(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], tile: bool) -> Array:
    stem = name.removesuffix("weight") + "_weight"
    qdata = tensors[f"{stem}_qdata"][1]
    if tile:
        return from_tiles(qdata, as_float32(tensors[f"{stem}_scale_and_zero"]))[: shape[0], : shape[1]]
    return from_nibbles(qdata, *(as_float32(tensors[f"{stem}_{part}"]) for part in ("scale", "zero_point")))


# --- families: bf16 ---


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_keeps_what_was_kept_and_loads(name: str, base: Path) -> None:
    family, source = FAMILIES[name], read_all(families.model(base, name))
    exported = families.exported(base, name, "bf16")
    after, manifest = read_all(exported), read_manifest(families.master(base, name))
    assert after.keys() == source.keys()
    for tensor in manifest.tensors:
        dtype, values = after[tensor.name]
        if tensor.action == "quantize":
            assert dtype == "BF16", tensor.name
        else:
            assert dtype == source[tensor.name][0], tensor.name
            assert values.tobytes() == source[tensor.name][1].tobytes(), tensor.name
    in_float32 = {n for n, (dtype, _) in after.items() if dtype == "F32"}
    assert in_float32 == {n for n in after if n.endswith(family.float32 or ("?",))}
    assert bool(in_float32) == bool(family.float32)
    families.load(exported, family, "bfloat16")


# --- families: vllm-int4 ---


def expected_layers(base: Path, name: str, kinds: tuple[str, ...], experts: bool = True) -> set[str]:
    """The linear layers of the text model whose last name is one of these."""
    return {
        tensor
        for tensor, (_, values) in read_all(families.model(base, name)).items()
        if tensor.removesuffix(".weight").rsplit(".", 1)[-1] in kinds
        and tensor.endswith(".weight")
        and values.ndim == 2
        and ".visual." not in tensor
        and (experts or ".experts." not in tensor)
    }


def with_decoded(base: Path, name: str, out: Path, decoded: Mapping[str, Array]) -> Path:
    """The BF16 export with some of its weights replaced, in float32."""
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
    """Its parameters in float32, those included that transformers loads in BF16 whatever it is asked for."""
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def assert_same_logits(found: Array, expected: Array) -> None:
    assert np.abs(expected).max() > 0.01
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def assert_the_rest_is_plain(base: Path, name: str, exported: Path, rounded: set[str]) -> None:
    """What is not made of integers is as in the BF16 export, byte for byte."""
    plain, tensors = read_all(families.exported(base, name, "bf16")), read_all(exported)
    parts = {f"{n}_{part}" for n in rounded for part in ("packed", "scale", "shape")}
    assert tensors.keys() == (plain.keys() - rounded) | parts
    for tensor in plain.keys() - rounded:
        assert tensors[tensor][0] == plain[tensor][0]
        assert tensors[tensor][1].tobytes() == plain[tensor][1].tobytes(), tensor


@pytest.mark.parametrize(
    ("name", "bits"), [*((name, 4) for name in LINEAR_FAMILIES), ("llama", 8), ("mixtral", 8), ("qwen3_5_moe", 8)]
)
def test_vllm_int4_in_transformers(name: str, bits: int, base: Path, tmp_path: Path) -> None:
    """The logits are those of a plain model with the integers' values."""
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
def test_vllm_int4_rotated_in_compressed_tensors(name: str, base: Path, tmp_path: Path) -> None:
    """Weights times H, inputs times H by the library that vLLM takes its layers from: H cancels out."""
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


def test_a_rotation_helps_where_there_are_outliers(tmp_path: Path) -> None:
    """What is rotated is what is measured: a weight with outlier columns has a smaller error, and that error is true."""
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


def test_no_layer_of_gpt_oss_can_be_rotated(base: Path, tmp_path: Path) -> None:
    """Each has a bias, which vLLM's transforms do not take."""
    master = families.master(base, "gpt_oss")
    with pytest.raises(ExportError, match="--basis rotated: no linear layer"):
        run_command({"export": str(master), "target": "vllm-int4", "basis": "rotated"}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def rotated_layers(tmp_path: Path, layers: Mapping[str, tuple[int, ...]], **options: Any) -> set[str]:
    """Which of the weights of these shapes are rotated."""
    tensors = {n: bf16(gaussian(*shape, seed=i)) for i, (n, shape) in enumerate(layers.items())}
    source = write_checkpoint(tmp_path / "src", tensors, config={"model_type": "llama"})
    rules = {"recipe": options.pop("recipe")} if "recipe" in options else {}
    run_command({"quantize": str(source), **rules}, tmp_path / "master")
    work = {"export": str(tmp_path / "master"), "target": "vllm-int4", "basis": "rotated", **options}
    report = run_command(work, tmp_path / "out")
    return {t.name for t in report.plan.tensors if t.codec is not None and t.codec.endswith("rotated")}


LAYER = "model.layers.0"


@pytest.mark.parametrize("spoiled", ["a bias", "a kept weight", "rows of 192"], ids=lambda what: what.replace(" ", "-"))
def test_fused_siblings_are_rotated_alike(spoiled: str, tmp_path: Path) -> None:
    """One of q, k and v cannot be rotated: none of them is. The others are."""
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


def test_rotated_groups_smaller_than_a_block(tmp_path: Path) -> None:
    shapes = {f"{LAYER}.self_attn.o_proj.weight": (64, 256)}
    assert rotated_layers(tmp_path, shapes, group_size=32) == shapes.keys()
    tensors = read_all(tmp_path / "out")
    (name,) = shapes
    decoded, exact = unrotated(from_compressed_tensors(tensors, name)), as_float32(read_all(tmp_path / "src")[name])
    assert np.sum((decoded - exact) ** 2) < 0.012 * np.sum(exact**2)


# --- the expressions that name layers ---


def matched(expressions: list[str], modules: list[str]) -> list[str]:
    """As compressed-tensors' match_name does."""
    from compressed_tensors.utils.match import match_name

    return [module for module in modules if any(match_name(module, expression) for expression in expressions)]


def weights(*modules: str) -> list[str]:
    return [f"{module}.weight" for module in modules]


def both(*modules: str) -> list[str]:
    """Modules under the names that a text model and one that sees give them, and under none."""
    return [
        prefix + module
        for module in modules
        for prefix in ("model.", "model.language_model.", "language_model.model.", "")
    ]


LAYERS = [
    f"layers.{n}.{layer}" for n in (0, 1, 10) for layer in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
]


def test_patterns_of_all_layers_hold_under_any_prefix() -> None:
    pytest.importorskip("compressed_tensors")
    chosen = [n for n in LAYERS if n.endswith("q_proj")]
    others = [n for n in LAYERS if not n.endswith("q_proj")]
    found = patterns(weights(*(f"model.{n}" for n in chosen)), weights(*(f"model.{n}" for n in others)))
    assert len(found) == 1
    assert matched(found, both(*LAYERS)) == both(*(n for n in LAYERS if n in chosen))


def test_patterns_of_one_layer_only() -> None:
    """Numbers of layers are left open only where that takes in none of the others."""
    pytest.importorskip("compressed_tensors")
    chosen = ["layers.1.self_attn.q_proj"]
    others = [n for n in LAYERS if n not in chosen]
    found = patterns(weights(*(f"model.{n}" for n in chosen)), weights(*(f"model.{n}" for n in others)))
    assert matched(found, both(*LAYERS)) == both(*chosen)
    assert matched(found, ["model.layers.11.self_attn.q_proj", "model.layers.1.self_attn.q_proj_2"]) == []


def test_patterns_beside_a_vision_tower_with_the_same_names() -> None:
    pytest.importorskip("compressed_tensors")
    text = [f"model.language_model.{n}" for n in LAYERS]
    seeing = [f"model.vision_tower.encoder.{n}" for n in LAYERS]
    for chosen, others in ((text, seeing), (seeing, text)):
        found = patterns(weights(*chosen), weights(*others))
        assert matched(found, text + seeing) == chosen
        assert patterns(weights(*chosen), []) != []
    assert matched(patterns(weights(*seeing), weights(*text)), [f"model.{n}" for n in LAYERS]) == []


def test_patterns_of_experts() -> None:
    """Single ones and fused ones; vLLM asks for the module that holds them all."""
    pytest.importorskip("compressed_tensors")
    single = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in (0, 1) for e in (0, 7)]
    others = [f"model.layers.{n}.mlp.shared_expert.up_proj" for n in (0, 1)] + ["model.layers.2.mlp.up_proj"]
    found = patterns(weights(*single), weights(*others))
    assert len(found) == 1
    assert matched(found, single + others) == single
    fused = [f"model.layers.{n}.mlp.experts.gate_up_proj" for n in (0, 1)]
    found = patterns(fused, weights(*others))
    assert matched(found, [f"model.layers.{n}.mlp.experts" for n in (0, 1)]) != []
    assert matched(found, [*others, *single]) == single
    assert matched(found, others) == []


def test_patterns_take_dots_for_dots() -> None:
    pytest.importorskip("compressed_tensors")
    found = patterns(weights("h.0.c_fc"), weights("h.0.c_proj"))
    assert matched(found, ["h.0.c_fc", "transformer.h.3.c_fc", "h.0.cxfc", "hx0.c_fc", "h.0xc_fc", "xh.0.c_fc"]) == [
        "h.0.c_fc",
        "transformer.h.3.c_fc",
    ]


@pytest.mark.parametrize("name", LINEAR_FAMILIES)
def test_what_is_ignored_is_what_stays_plain(name: str, base: Path) -> None:
    """Of all linear layers, as vLLM builds them from the names on disk."""
    pytest.importorskip("compressed_tensors")
    exported = families.exported(base, name, "vllm-int4", bits=4)
    rounded = {n.removesuffix(".weight") for n in integer_names(exported)}
    layers = [
        n.removesuffix(".weight")
        for n, (_, values) in read_all(families.model(base, name)).items()
        if n.endswith(".weight") and values.ndim == 2 and "embed" not in n
    ]
    assert rounded <= set(layers)
    assert set(layers) - set(matched(quantization(exported)["ignore"], layers)) == rounded


# --- families: torchao-int4 ---

PACKINGS = {"tile_packed_to_4d": "Int4TilePackedTo4dTensor", "plain": "Int4Tensor"}


def loaded_integers(folder: Path, name: str, packing: str) -> dict[str, Array]:
    """The parameters that torchao holds as integers after from_pretrained, decoded from what lies in memory."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchao")
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


@pytest.mark.parametrize("name", LINEAR_FAMILIES)
def test_torchao_int4_in_transformers(name: str, base: Path) -> None:
    """Exactly the planned parameters are integers; both packings hold the same ones."""
    planned = {n for n in expected_layers(base, name, FAMILIES[name].linear) if ".experts." not in n}
    found = {}
    for packing in PACKINGS:
        exported = families.exported(base, name, "torchao-int4", packing=packing)
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
def test_torchao_int4_lists_the_names_that_transformers_may_give(
    stored: str, config: dict[str, Any], also: list[str], tmp_path: Path
) -> None:
    """Older checkpoints have other prefixes, and a text model may be loaded from that of one that sees."""
    config = {"model_type": "llama", "dtype": "bfloat16", **config}
    write_checkpoint(tmp_path / "src", {f"{stored}.weight": bf16(gaussian(64, 256))}, config=config)
    run_command({"quantize": str(tmp_path / "src")}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "torchao-int4"}, tmp_path / "out")
    metadata = read_manifest(tmp_path / "out").identity.metadata
    names = [f"{name}.weight" for name in (stored, *also)]
    assert json.loads(metadata["tensor_names"]) == names
    assert len({metadata[name] for name in names}) == 1


def test_two_ways_to_read_tiles_agree() -> None:
    """The loops of PyTorch's kernel, and its layout as one permutation."""
    codes = np.random.default_rng(1).integers(0, 16, (24, 384)).astype(np.uint8)
    rows, columns = codes.shape
    order = codes.reshape(rows // 8, 8, columns // 128, 4, 2, 2, 4, 2).transpose(0, 2, 1, 6, 3, 7, 4, 5)
    nibbles = order.reshape(rows // 8, columns // 128, 32, 4, 8).astype(np.uint32)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)
    assert np.array_equal(untiled(words), codes)


@pytest.mark.parametrize("packing", PACKINGS)
def test_torchao_int4_values_and_padding(packing: str, base: Path, tmp_path: Path) -> None:
    """132 rows and 1,152 columns fill no tiles; what pads them is 0, and what is loaded is what was rounded."""
    wide = {**families.TEXT, "hidden_size": 1152, "intermediate_size": 132, "num_hidden_layers": 1}
    families.build(families.Family("LlamaForCausalLM", "LlamaConfig", wide, (), ()), tmp_path / "model")
    run_command({"quantize": str(tmp_path / "model")}, tmp_path / "master")
    work = {"export": str(tmp_path / "master"), "target": "torchao-int4", "packing": packing}
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
        groups = GroupRule(bits=4, group_size=128, symmetric=False, middle=True, rule="best").quantize(
            exact[name].reshape(-1)
        )
        expected = (groups.codes.astype(np.float32) - 8) * groups.scales[:, None] + groups.offsets[:, None]
        assert np.array_equal(loaded[name], expected.reshape(rows, columns)), name
        if packing == "tile_packed_to_4d":
            stem = name.removesuffix("weight") + "_weight"
            whole = from_tiles(tensors[f"{stem}_qdata"][1], as_float32(tensors[f"{stem}_scale_and_zero"]))
            assert whole.shape == (-(-rows // 8) * 8, -(-columns // 1024) * 1024)
            assert whole.size > rows * columns
            assert not whole[rows:].any() and not whole[:, columns:].any()


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_shard_of_torchao_int4_has_the_metadata_of_all(packing: str, base: Path, tmp_path: Path) -> None:
    """Because the loader lets the last file win."""
    work = {"export": str(families.master(base, "llama")), "target": "torchao-int4", "packing": packing}
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
    whole = families.exported(base, "llama", "torchao-int4", packing=packing)
    one, several = (loaded_integers(folder, "llama", packing) for folder in (whole, tmp_path / "out"))
    assert one.keys() == several.keys() == planned
    assert all(np.array_equal(one[n], several[n]) for n in planned)


# --- the driver's guarantees ---


def several_layers(folder: Path) -> Path:
    """Two shards, six linear layers of shapes that fill no tiles, and what stays beside them."""
    heavy = np.random.default_rng(9).standard_t(4, (132, 384)).astype(np.float32) * 0.02
    first = {
        "model.embed_tokens.weight": bf16(gaussian(96, 128, seed=1)),
        f"{LAYER}.self_attn.q_proj.weight": bf16(gaussian(60, 256, seed=2)),
        f"{LAYER}.self_attn.k_proj.weight": bf16(gaussian(36, 256, seed=3)),
        f"{LAYER}.self_attn.v_proj.weight": bf16(gaussian(36, 256, seed=4)),
        f"{LAYER}.self_attn.o_proj.weight": f32(gaussian(130, 128, seed=5)),
    }
    second = {
        f"{LAYER}.mlp.down_proj.weight": bf16(heavy),
        f"{LAYER}.mlp.up_proj.weight": bf16(np.full((64, 128), 0.0125, dtype=np.float32)),  # rescued
        f"{LAYER}.mlp.fc1.weight": bf16(gaussian(40, 130, seed=6)),  # no groups
        f"{LAYER}.mamba.A_log": f32(gaussian(33, seed=7)),
        "model.norm.weight": bf16(1 + gaussian(128, seed=8)),
    }
    return write_checkpoint(
        folder, first, second, config={"model_type": "llama", "dtype": "bfloat16"}, companions={"tokenizer.json": b"{}"}
    )


ROUNDED = {f"{LAYER}.{n}.weight" for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
ROUNDED |= {f"{LAYER}.{n}.weight" for n in ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj")}
KINDS = {
    "tile": {"target": "torchao-int4"},
    "nibbles": {"target": "torchao-int4", "packing": "plain", "qparams": "minmax"},
    "vllm": {"target": "vllm-int4", "qparams": "minmax"},
    "rotated": {"target": "vllm-int4", "basis": "rotated", "original": True},
}


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source, its master, and an undisturbed export of each kind."""
    folder = tmp_path_factory.mktemp("driven")
    run_command({"quantize": str(several_layers(folder / "src"))}, folder / "master")
    for kind in KINDS:
        run_command(work(folder, kind), folder / kind)
    return folder


def work(folder: Path, kind: str, **options: Any) -> dict[str, Any]:
    """The export of a kind, with shards of 60 kB."""
    asked: dict[str, Any] = {"export": str(folder / "master"), "max_shard_bytes": 60_000, **KINDS[kind], **options}
    if asked.get("original") is True:
        asked["original"] = str(folder / "src")
    return asked


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("threads", "chunk_weights"), [(1, 1 << 20), (3, 4096), (2, 1000)])
def test_threads_and_chunks_do_not_show(
    threads: int, chunk_weights: int, kind: str, driven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", chunk_weights)
    report = run_command(work(driven, kind), tmp_path / "out", threads=threads)
    assert {t.name for t in report.plan.tensors if t.action == "integer"} == ROUNDED
    assert len(report.plan.shards) > 1
    assert folder_bytes(tmp_path / "out") == folder_bytes(driven / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_shows_in_the_last_digit_of_an_error(
    kind: str, driven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest rounds to seven digits, which would hide sums in another order on most days."""
    monkeypatch.setattr(integer_export, "rounded", lambda value: value)
    found = set()
    for threads, chunk_weights in ((1, 1 << 20), (3, 1000)):
        monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", chunk_weights)
        records = run_command(work(driven, kind), tmp_path / str(threads), threads=threads).records
        found.add(tuple((r.relative_mse, r.energy, r.total_mse, r.master_mse) for r in records))
    assert len(found) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_verify_passes_and_finds_a_flipped_byte(kind: str, driven: Path, tmp_path: Path) -> None:
    assert verify(driven / kind, threads=2).ok
    damaged = shutil.copytree(driven / kind, tmp_path / "damaged")
    for path in sorted(damaged.glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__")
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            at = 8 + length + (begin + end) // 2
            data[at] ^= 1
            path.write_bytes(data)
            (problem,) = verify(damaged, threads=1).problems
            assert name in problem and path.name in problem and "sha256" in problem
            data[at] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("kind", ["tile", "rotated"])
def test_killed_at_any_call_the_same_command_gives_the_same_folder(kind: str, driven: Path, tmp_path: Path) -> None:
    """Killed at renames, journal entries, flushes and writes; nothing unfinished ever has its final name."""
    command, undisturbed = work(driven, kind), folder_bytes(driven / kind)
    (counts,) = killed_runs(command, [{"out": str(tmp_path / "counted")}])
    assert folder_bytes(tmp_path / "counted") == undisturbed
    points = [
        {"out": str(tmp_path / f"{name}-{number}-{when}"), "function": name, "number": number, "when": when}
        for name, step, moments in (
            ("replace", 4, ("before", "after")),
            ("fsync", 5, ("before", "after")),
            ("write", 2, ("half", "after")),
            ("pwrite", counts["pwrite"] // 6, ("half", "after")),
        )
        for number in range(1, counts[name] + 1, step)
        for when in moments
    ]
    assert len({point["function"] for point in points}) == 4
    assert len(points) > 30
    killed_runs(command, points)
    failures = []
    for point in points:
        out = Path(point["out"])
        for name, data in folder_bytes(out).items():
            if not name.startswith(".pqweights/") and not name.endswith("/"):
                assert data == undisturbed[name], (point, name)
        try:
            run_command(command, out)
        except PqweightsError as error:
            failures.append(f"{point['function']} {point['number']} {point['when']}: {error}")
            continue
        assert folder_bytes(out) == undisturbed, point
        shutil.rmtree(out)
    assert not failures, "\n".join(failures)


def test_a_tile_tensor_that_the_disk_lost_is_redone(driven: Path, tmp_path: Path) -> None:
    """Its pieces lie scattered: a run that continues must read them back, not trust the journal."""
    out, command = tmp_path / "out", work(driven, "tile", max_shard_bytes=10**9)
    run_command(command, tmp_path / "undisturbed")
    killed_runs(command, [{"out": str(out), "function": "write", "number": 6, "when": "after"}])
    finished = {json.loads(line)["name"] for line in (out / ".pqweights/journal.jsonl").read_text().splitlines()[1:]}
    assert len(finished & ROUNDED) >= 3
    (partial,) = (out / ".pqweights").glob("*.partial")
    data = partial.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    begin, _ = json.loads(data[8 : 8 + length])[f"{LAYER}.self_attn.q_proj._weight_scale_and_zero"]["data_offsets"]
    at = 8 + length + begin + 5
    partial.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    run_command(command, out)
    assert folder_bytes(out) == folder_bytes(tmp_path / "undisturbed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_export_is_left_alone(kind: str, driven: Path, tmp_path: Path) -> None:
    out = shutil.copytree(driven / kind, tmp_path / "out")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")}
    report = run_command(work(driven, kind), out)
    assert report.already_done
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")} == before
    assert [r.total_mse for r in report.records] == [r.total_mse for r in read_manifest(out).records]


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("tile", {"packing": "plain"}),
    ("tile", {"qparams": "minmax"}),
    ("tile", {"original": True}),
    ("tile", {"target": "vllm-int4"}),
    ("tile", {"max_shard_bytes": 70_000}),
    ("vllm", {"bits": 8}),
    ("rotated", {"original": None}),
    ("rotated", {"basis": "plain"}),
]


@pytest.mark.parametrize(("kind", "other"), OTHERS, ids=str)
def test_another_command_does_not_pass_for_this_one(
    kind: str, other: dict[str, Any], driven: Path, tmp_path: Path
) -> None:
    """Neither in a finished folder nor in an interrupted run."""
    finished = shutil.copytree(driven / kind, tmp_path / "finished")
    command = {key: value for key, value in work(driven, kind, **other).items() if value is not None}
    with pytest.raises(OutputError, match="--overwrite"):
        run_command(command, finished)
    assert folder_bytes(finished) == folder_bytes(driven / kind)
    if other in ({"packing": "plain"}, {"original": True}, {"original": None}):
        out = tmp_path / "out"
        killed_runs(work(driven, kind), [{"out": str(out), "function": "write", "number": 3, "when": "after"}])
        before = folder_bytes(out)
        with pytest.raises((OutputError, SourceChangedError), match=r"--overwrite"):
            run_command(command, out)
        assert folder_bytes(out) == before


@pytest.fixture
def own(driven: Path, tmp_path: Path) -> Path:
    """Source and master that the test may change; times are kept."""
    for name in ("src", "master"):
        shutil.copytree(driven / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("which", ["src", "master"])
def test_an_input_that_changed_in_between_is_refused(which: str, own: Path) -> None:
    """The original is an input like the master."""
    out, command = own / "out", work(own, "rotated")
    killed_runs(command, [{"out": str(out), "function": "write", "number": 4, "when": "after"}])
    path = sorted((own / which).glob("*.safetensors"))[-1]
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    before = folder_bytes(out)
    with pytest.raises(SourceChangedError, match=re.escape(path.name)):
        run_command(command, out)
    assert folder_bytes(out) == before
    assert run_command({**command, "overwrite": True}, out).resumed == 0


def test_an_original_that_is_newer_than_the_result_is_not_called_done(own: Path) -> None:
    command = work(own, "rotated")
    run_command(command, own / "out")
    assert run_command(command, own / "out").already_done
    path = sorted((own / "src").glob("*.safetensors"))[-1]
    path.touch()
    os.utime(path, ns=(0, (own / "out/pqweights.json").stat().st_mtime_ns + 1))
    with pytest.raises(OutputError, match="--overwrite"):
        run_command(command, own / "out")


def test_a_manifest_of_an_export_reads_back(driven: Path) -> None:
    for kind in KINDS:
        manifest: Manifest = read_manifest(driven / kind)
        assert manifest.to_bytes() == (driven / kind / "pqweights.json").read_bytes()
        assert manifest.made_by["target"] == KINDS[kind]["target"]


@pytest.mark.parametrize(
    "damage",
    [
        {"relative_mse": 10**400}, {"total_mse": 10**400}, {"energy": float("inf")}, {"relative_mse": True},
        {"codec": "\ud800"}, {"codec": 4}, {"bits": True}, {"bits": -4}, {"bits": 10**30}, {"bits": 9},
        {"master_mse": "0"},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_that_lies_about_integers_is_refused(damage: dict[str, Any], driven: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(driven / "tile", tmp_path / "tile")
    manifest = json.loads((folder / "pqweights.json").read_bytes())
    next(entry for entry in manifest["tensors"] if entry["action"] == "integer").update(damage)
    (folder / "pqweights.json").write_text(json.dumps(manifest))
    with pytest.raises(MasterError, match=r"pqweights\.json"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "damage", [{"metadata": {"format": 1}}, {"metadata": ["pt"]}, {"left_out": {"\ud800": "?"}}], ids=str
)
def test_a_manifest_whose_texts_are_none_is_refused(damage: dict[str, Any], driven: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(driven / "tile", tmp_path / "tile")
    manifest = json.loads((folder / "pqweights.json").read_bytes()) | damage
    (folder / "pqweights.json").write_text(json.dumps(manifest))
    with pytest.raises(MasterError, match=r"pqweights\.json"):
        read_manifest(folder)


# --- the original ---


def decoded(folder: Path) -> dict[str, Array]:
    """The weights of an export, in the plain basis, in float64."""
    manifest, tensors = read_manifest(folder), read_all(folder)
    result = {}
    for tensor in manifest.tensors:
        if tensor.action != "integer":
            continue
        assert tensor.codec is not None and tensor.bits is not None
        if manifest.made_by["target"] == "torchao-int4":
            tile = manifest.made_by["packing"] != "plain"
            values = from_torchao(tensors, tensor.name, tensor.shape, tile)
        else:
            values = from_compressed_tensors(tensors, tensor.name, tensor.bits)
        if tensor.codec.endswith("-rotated"):
            turned = values.astype(np.float64).reshape(len(values), -1, 128) @ (sylvester() / math.sqrt(128))
            result[tensor.name] = turned.reshape(values.shape)
        else:
            result[tensor.name] = values.astype(np.float64)
    return result


def errors(folder: Path, source: Path) -> dict[str, float]:
    """Relative squared errors of an export against the original, computed here."""
    exact = {name: as_float32(tensor).astype(np.float64) for name, tensor in read_all(source).items()}
    return {
        name: float(((values - exact[name]) ** 2).sum() / (exact[name] ** 2).sum())
        for name, values in decoded(folder).items()
    }


MEASURED = {
    **{name: {k: v for k, v in options.items() if k != "original"} for name, options in KINDS.items()},
    "8 bits": {"target": "vllm-int4", "bits": 8},
}


@pytest.mark.parametrize("kind", MEASURED)
def test_errors_with_and_without_the_original(kind: str, driven: Path, tmp_path: Path) -> None:
    """With it, both ways are measured; without, the error is computed from the master's and comes close."""
    command = {"export": str(driven / "master"), **MEASURED[kind]}
    source = driven / "src"
    without = run_command(command, tmp_path / "without")
    given = run_command({**command, "original": str(source)}, tmp_path / "with")
    from_master, measured = errors(tmp_path / "without", source), errors(tmp_path / "with", source)
    assert measured.keys() == from_master.keys() == ROUNDED
    for record in given.records:
        if record.name not in ROUNDED:
            assert record.total_mse is None
        else:
            # abs: of the constant weight, which is nearly exact in the rotated basis
            assert record.total_mse == record.relative_mse == pytest.approx(measured[record.name], rel=1e-5, abs=1e-9)
            assert record.master_mse == pytest.approx(from_master[record.name], rel=1e-5, abs=1e-9)
    for record in without.records:
        if record.name in ROUNDED - {f"{LAYER}.mlp.up_proj.weight"}:  # one and the same block 64 times: no law holds
            assert record.total_mse == record.master_mse == pytest.approx(from_master[record.name], rel=0.03)
            assert measured[record.name] < from_master[record.name]


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_original_the_error_is_against_the_master(kind: str, driven: Path, tmp_path: Path) -> None:
    """Its float32 weights, whatever a rule rounds them to first."""
    exact = master_weights(driven / "master")
    command = {key: value for key, value in work(driven, kind).items() if key != "original"}
    report = run_command(command, tmp_path / "out")
    found = decoded(tmp_path / "out")
    for record in report.records:
        if record.name in ROUNDED:
            wanted = exact[record.name].astype(np.float64)
            energy = (wanted**2).sum()
            assert record.energy == pytest.approx(energy, rel=1e-5)
            assert record.relative_mse == pytest.approx(((found[record.name] - wanted) ** 2).sum() / energy, rel=1e-5)


def test_rotated_weights_of_a_master_come_from_its_codes(driven: Path, tmp_path: Path) -> None:
    """Not decoded, unrotated and rotated again, but where a rescue flipped signs; either way they are W H."""
    report = run_command({**work(driven, "rotated"), "original": str(driven / "src")}, tmp_path / "with")
    turned = {t.name for t in report.plan.tensors if t.codec == "symmetric-g128-rotated"}
    assert turned == ROUNDED
    rescued = {
        r.name for r in read_manifest(driven / "master").records if (r.state or {}).get("rotation") == "signed-hadamard"
    }
    assert rescued == {f"{LAYER}.mlp.up_proj.weight"}
    exact = read_all(driven / "src")
    for name in sorted(turned):
        values = np.ascontiguousarray(as_float32(exact[name]).reshape(-1)).copy()
        rotate(values)
        groups = GroupRule(bits=4, group_size=128, symmetric=True, middle=True, rule="best").quantize(values)
        codes = unpacked(read_all(tmp_path / "with")[f"{name}_packed"][1], 4)
        assert np.array_equal(codes.reshape(-1, 128), groups.codes), name


def test_what_is_not_rounded_comes_from_where_it_should(driven: Path, tmp_path: Path) -> None:
    """Kept tensors are the master's; weights that stay plain are the original's."""
    source, master = shutil.copytree(driven / "src", tmp_path / "src"), tmp_path / "master"
    shutil.copytree(driven / "master", master)
    (master / "pqweights.json").unlink()  # which has the fingerprint of the source
    path = source / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8 : 8 + length])["model.norm.weight"]["data_offsets"]
    data[8 + length + begin : 8 + length + end] = bytes(end - begin)
    path.write_bytes(data)
    command = {"export": str(master), "target": "torchao-int4", "original": str(source)}
    report = run_command(command, tmp_path / "out")
    found, of_master, of_source = read_all(tmp_path / "out"), read_all(master), read_all(source)
    assert found["model.norm.weight"][1].tobytes() == of_master["model.norm.weight"][1].tobytes()
    assert found["model.norm.weight"][1].any()
    for name in ("model.embed_tokens.weight", f"{LAYER}.mlp.fc1.weight"):
        assert found[name][1].tobytes() == of_source[name][1].tobytes(), name
    assert found[f"{LAYER}.mamba.A_log"][0] == "F32"
    assert all(r.total_mse is not None for r in report.records if r.name in ROUNDED)


def test_without_the_masters_manifest_the_error_is_unknown(driven: Path, tmp_path: Path) -> None:
    master = shutil.copytree(driven / "master", tmp_path / "master")
    (master / "pqweights.json").unlink()
    result = done("export", master, tmp_path / "out", "-t", "torchao-int4")
    assert "relative MSE against the original: not known from the master; --source measures it" in result.stdout
    assert all(r.total_mse is None for r in read_manifest(tmp_path / "out").records)
    given = done("export", master, tmp_path / "given", "-t", "torchao-int4", "--source", driven / "src")
    assert re.search(r"relative MSE against the original: 0\.0\d+; from the master it would be 0\.0\d+", given.stdout)


def test_an_export_made_without_the_masters_manifest_is_another(driven: Path, tmp_path: Path) -> None:
    """Its errors are not what the same command gives when the manifest is back."""
    master = shutil.copytree(driven / "master", tmp_path / "master")
    (master / "pqweights.json").rename(tmp_path / "aside.json")
    command = {"export": str(master), "target": "vllm-int4"}
    run_command(command, tmp_path / "out")
    (tmp_path / "aside.json").rename(master / "pqweights.json")
    with pytest.raises(OutputError):
        run_command(command, tmp_path / "out")
    again = run_command({**command, "overwrite": True}, tmp_path / "out")
    assert not again.already_done
    assert all(r.total_mse is not None for r in again.records if r.relative_mse is not None)


def test_a_damaged_manifest_of_the_master_is_no_missing_one(driven: Path, tmp_path: Path) -> None:
    master = shutil.copytree(driven / "master", tmp_path / "master")
    (master / "pqweights.json").write_text("{")
    with pytest.raises(MasterError):
        run_command({"export": str(master), "target": "vllm-int4"}, tmp_path / "out")


def test_totals_are_weighted_by_the_original(tmp_path: Path) -> None:
    """A master of mixed widths, whose two-bit weights are noticeably shorter than their originals."""
    layers = {f"{LAYER}.self_attn.{q}_proj.weight": bf16(gaussian(64, 256, seed=i)) for i, q in enumerate("qkvo")}
    write_checkpoint(tmp_path / "src", layers, config={"model_type": "llama"})
    rules = [{"name": f"*.{q}_proj.weight", "bits": 2} for q in "qk"]
    (tmp_path / "mixed.yaml").write_text(json.dumps({"bits": 8, "rules": rules}))
    run_command({"quantize": str(tmp_path / "src"), "recipe": str(tmp_path / "mixed.yaml")}, tmp_path / "master")
    command = ("export", tmp_path / "master", tmp_path / "out", "-t", "vllm-int4", "--bits", "8", "--json")
    totals = json.loads(done(*command).stdout)["totals"]
    measured = json.loads(done(*command, "--source", tmp_path / "src", "--overwrite").stdout)["totals"]
    assert totals["total_mse"] == totals["master_mse"]
    assert totals["total_mse"] == pytest.approx(measured["master_mse"], rel=0.01)
    assert measured["total_mse"] < totals["total_mse"]
    assert json.loads((tmp_path / "out/pqweights.json").read_bytes())["total_mse"] == measured["total_mse"]


def wrong_weights(folder: Path) -> Path:
    """The same names and shapes, with one other weight."""
    tensors = read_all(folder / "src")
    name = f"{LAYER}.self_attn.q_proj.weight"
    return write_checkpoint(folder / "wrong", {**tensors, name: bf16(gaussian(60, 256, seed=77))}, config={})


def wrong_shapes(folder: Path) -> Path:
    """The same names; the master lost the manifest that would tell before any shape is compared."""
    (folder / "master/pqweights.json").unlink()
    tensors = read_all(folder / "src")
    name = f"{LAYER}.self_attn.q_proj.weight"
    return write_checkpoint(folder / "wrong", {**tensors, name: bf16(gaussian(62, 256))}, config={})


def missing_tensor(folder: Path) -> Path:
    (folder / "master/pqweights.json").unlink()
    tensors = read_all(folder / "src")
    del tensors[f"{LAYER}.self_attn.q_proj.weight"]
    return write_checkpoint(folder / "wrong", tensors, config={})


WRONG = {
    "other weights": (wrong_weights, "is not the checkpoint that the master was made from"),
    "other shapes": (wrong_shapes, r"q_proj\.weight': expected shape \[60, 256\] as in the master, found \[62, 256\]"),
    "a tensor less": (missing_tensor, r"q_proj\.weight': expected shape \[60, 256\] as in the master, found none"),
    "a master": (lambda folder: folder / "master", "expected the original checkpoint, found a pqweights master"),
    "nothing": (lambda folder: folder / "nowhere", "nowhere"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_original_is_refused(kind: str, own: Path) -> None:
    make, message = WRONG[kind]
    wrong = make(own)
    with pytest.raises(SourceError, match=message):
        run_command({**work(own, "tile"), "original": str(wrong)}, own / "out")
    assert not (own / "out").exists()
    line = refused("export", own / "master", own / "out", "-t", "vllm-int4", "--source", wrong)
    assert "--source" in line or kind == "nothing"


# --- the command line ---


@pytest.mark.parametrize("target", ["torchao-int4", "vllm-int4"])
def test_the_summary_says_what_stays_plain_and_why(target: str, driven: Path, tmp_path: Path) -> None:
    result = done("export", driven / "master", tmp_path / "out", "-t", target)
    lines = result.stdout.splitlines()
    assert lines[0].endswith("tensors in 1 file(s)")
    (plain,) = [line for line in lines if "fc1" in line]
    assert plain.startswith(
        "plain: 1 tensor(s), 5200 weights: groups of 128 do not divide its rows of 130 weights (--group-size that would: none)"
    )
    assert any(line.startswith("plain: 1 tensor(s), 12288 weights: embedding") for line in lines)
    assert any(line.strip().startswith("4 bits, ") and line.endswith(": 6 tensor(s)") for line in lines)
    assert any("computed from the master's own; --source measures it" in line for line in lines)
    reasons = {t.name: t.reason for t in read_manifest(tmp_path / "out").tensors}
    assert reasons[f"{LAYER}.mlp.fc1.weight"].startswith("groups of 128 do not divide its rows of 130")


def test_bits_per_weight_count_scales_and_padding(driven: Path, tmp_path: Path) -> None:
    result = done("export", driven / "master", tmp_path / "out", "-t", "torchao-int4", "--json")
    totals = json.loads(result.stdout)["totals"]
    stored = read_all(tmp_path / "out")
    of_integers = sum(values.nbytes for name, (_, values) in stored.items() if "._weight_" in name)
    shapes = {name: values.shape for name, (_, values) in read_all(driven / "src").items()}
    count = sum(math.prod(shapes[name]) for name in ROUNDED)
    assert totals["bits_per_weight"] == pytest.approx(8 * of_integers / count)
    assert totals["quantized_weights"] == count


def test_a_missing_group_size_names_those_that_would_do(tmp_path: Path) -> None:
    source = write_checkpoint(
        tmp_path / "src",
        {
            f"{LAYER}.mlp.down_proj.weight": bf16(gaussian(64, 192)),
            f"{LAYER}.mlp.up_proj.weight": bf16(gaussian(64, 256)),
        },
        config={"model_type": "llama"},
    )
    run_command({"quantize": str(source)}, tmp_path / "master")
    for target in ("torchao-int4", "vllm-int4"):
        line = refused("export", tmp_path / "master", tmp_path / "out", "-t", target, "--group-size", "128")
        assert "down_proj" in line and "rows of 192" in line and line.endswith("would: 32, 64\n")
        assert not (tmp_path / "out").exists()
        out = tmp_path / target
        done("export", tmp_path / "master", out, "-t", target, "--group-size", "64")
        assert len(integer_names(out)) == 2


@pytest.mark.parametrize("target", ["torchao-int4", "vllm-int4"])
def test_gpt2_is_refused_where_weights_may_not_be_transposed(target: str, base: Path, tmp_path: Path) -> None:
    line = refused("export", families.master(base, "gpt2"), tmp_path / "out", "-t", target)
    assert "gpt2 stores its linear weights transposed" in line and target in line and "mlx-q4" in line
    assert not (tmp_path / "out").exists()
