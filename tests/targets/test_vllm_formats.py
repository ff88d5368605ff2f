"""The formats of the target vllm: their numbers by the specifications, and as compressed-tensors decodes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import families
import numpy as np
import pytest
from closeness import ALIKE, SMALL_SAMPLE, approx, each_near, rounding
from commands import done, raises, refused
from export_decoders import from_vllm_format, values_of
from families import FAMILIES, IDS
from helpers import as_float32, read_all, run_command, write_checkpoint
from integer_exports import as_loaded, integer_names

from pqweights.checkpoint.source import open_local
from pqweights.convert.manifest import read_manifest
from pqweights.errors import RecipeError
from pqweights.results.verify import verify
from pqweights.targets.vllm import FORMATS

# Their largest relative squared errors: half a step of the codes, about the square of 2**-4 over 3 for E4M3.
ERRORS = {
    "int8": 1e-3,
    **dict.fromkeys(("fp8", "fp8-block", "fp8-deepseek", "mxfp8", "mxfp8a16"), 1.3e-3),
    **dict.fromkeys(("mxfp4", "mxfp4a16", "mxfp4-gpt-oss"), 0.02),
    **dict.fromkeys(("nvfp4", "nvfp4a16", "nvfp4-modelopt"), 0.01),
    **dict.fromkeys(("w4a16-asym", "awq"), 0.012),
    "gptq": 0.014,
    "gptq-8": 1e-4,
    "w3a16": 0.06,
    "w2a16": 0.25,
}
BITS = {"w8a16": 8, "nvfp4a16": 4}
# What compressed-tensors calls them, if not by the same name.
PRESETS = {"fp8": "FP8_DYNAMIC", "int8": "INT8", "fp8-block": "FP8_BLOCK", "w4a16-asym": "W4A16_ASYM"}


def family(name: str) -> str:
    return "gpt_oss" if name == "mxfp4-gpt-oss" else "llama"


def exported(base: Path, name: str, **options: object) -> Path:
    return families.exported(base, family(name), "vllm", format=name, **options)


@pytest.mark.parametrize("name", ERRORS)
def test_numbers_are_those_of_the_specification(name: str, base: Path) -> None:
    folder = exported(base, name)
    tensors, plain = read_all(folder), read_all(families.exported(base, family(name), "bf16"))
    layers = integer_names(folder)
    assert len(layers) == (4 if family(name) == "gpt_oss" else 14)
    records = {record.name: record for record in read_manifest(folder).records}
    for layer in layers:
        weight = as_float32(plain[layer])
        error = ((from_vllm_format(tensors, layer, FORMATS[name].rule.bits) - weight).astype(np.float64) ** 2).sum() / (
            weight**2
        ).sum()
        assert error < ERRORS[name]
        assert records[layer].relative_mse == approx(error, SMALL_SAMPLE)  # of weights that are no BF16
    assert verify(folder, threads=2).ok


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_is_a_source_of_the_same_numbers(name: str, base: Path) -> None:
    folder = exported(base, name)
    found, tensors = {tensor.name: tensor for tensor in open_local(folder).tensors}, read_all(folder)
    assert found.keys() == read_all(families.exported(base, family(name), "bf16")).keys()
    for layer in integer_names(folder):
        assert np.array_equal(values_of(found[layer]), from_vllm_format(tensors, layer, FORMATS[name].rule.bits))


# transformers has no reader of Model-Optimizer's checkpoints, and needs GPTQModel for those of AutoAWQ and AutoGPTQ.
@pytest.mark.parametrize("name", [name for name in ERRORS if name not in ("nvfp4-modelopt", "awq", "gptq", "gptq-8")])
def test_transformers_loads_the_same_numbers(name: str, base: Path) -> None:
    """With compressed-tensors, which decodes all weights at the first call; it decodes its own FP8 if asked to."""
    import torch
    from transformers import CompressedTensorsConfig, FineGrainedFP8Config

    folder = exported(base, name)
    decoded = {"fp8-deepseek": FineGrainedFP8Config, "w4a16-asym": CompressedTensorsConfig}.get(name)
    decoding = {} if decoded is None else {"quantization_config": decoded(dequantize=True)}
    model, tensors = families.load(folder, FAMILIES[family(name)], dtype="bfloat16", **decoding), read_all(folder)
    with torch.inference_mode():
        assert model(torch.tensor(IDS)).logits.isfinite().all()
    weights = dict(model.named_parameters())
    for layer in integer_names(folder):
        found = weights[layer].detach().float().numpy()
        # BF16 at each step: numbers, scales and products
        expected = as_loaded(from_vllm_format(tensors, layer, FORMATS[name].rule.bits))
        assert each_near(found, expected, rounding("BF16", 2))


def test_every_format_is_tested() -> None:
    assert {*ERRORS, "w4a16", "w8a16"} == FORMATS.keys()


@pytest.mark.parametrize("name", [name for name, scheme in FORMATS.items() if name in ERRORS and scheme.called])
def test_configuration_names_a_format_that_compressed_tensors_knows(name: str, base: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    settings = json.loads((exported(base, name) / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(settings)
    (group,) = parsed.config_groups.values()
    preset = preset_name_to_scheme(PRESETS.get(name, name.upper()), ["Linear"])
    assert group.weights == preset.weights or group.weights.model_dump(exclude={"zp_dtype", "observer"}) == (
        preset.weights.model_dump(exclude={"zp_dtype", "observer"})
    )
    assert (group.input_activations is None) == (preset.input_activations is None)
    assert parsed.format == FORMATS[name].called


def test_bits_choose_a_format_of_integers(base: Path) -> None:
    by_bits = families.exported(base, "llama", "vllm", bits=8)
    assert read_all(by_bits).keys() == read_all(exported(base, "w8a16")).keys()
    assert read_manifest(by_bits).made_by == read_manifest(exported(base, "w8a16")).made_by


def test_weights_that_are_fused_share_the_unit_of_their_scales(base: Path) -> None:
    """And scales use the range of E4M3: the largest weight of the layer gets the largest, 448."""
    tensors = read_all(exported(base, "nvfp4"))
    units = {
        name.removesuffix(".weight_global_scale"): as_float32(t)
        for name, t in tensors.items()
        if "weight_global" in name
    }
    assert len(units) == 14
    for layer in ("model.layers.0", "model.layers.1"):
        q, k, v, o = (units[f"{layer}.self_attn.{part}_proj"] for part in "qkvo")
        assert q == k == v != o
        assert units[f"{layer}.mlp.gate_proj"] == units[f"{layer}.mlp.up_proj"] != units[f"{layer}.mlp.down_proj"]
    plain = read_all(families.exported(base, "llama", "bf16"))
    for name, inverse in units.items():
        joined = [n for n in units if units[n] == inverse]
        largest = max(np.abs(as_float32(plain[f"{n}.weight"])).max() for n in joined)
        assert inverse[0] == approx(448 * 6 / largest, ALIKE)
        assert as_float32(tensors[f"{name}.input_global_scale"]).tolist() == [1]


def test_rules_give_layers_different_formats(base: Path) -> None:
    """A rule that matches a weight decides about all that are fused with it."""
    import torch

    rules = ("*.down_proj.weight=fp8-block", "*.0.self_attn.k_proj.weight=nvfp4")
    folder = families.exported(base, "llama", "vllm", format="fp8", set_format=rules, keep=("*.1.self_attn.*",))
    found = {tensor.name: tensor.codec for tensor in read_manifest(folder).tensors}
    assert {found[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"} == {"nvfp4-g16"}
    assert {found[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkvo"} == {None}
    assert found["model.layers.1.mlp.down_proj.weight"] == "fp8-128x128"
    assert found["model.layers.1.mlp.up_proj.weight"] == "fp8-channel"
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "mixed-precision" and len(settings["config_groups"]) == 3
    model, tensors = families.load(folder, FAMILIES["llama"], dtype="bfloat16"), read_all(folder)
    with torch.inference_mode():
        assert model(torch.tensor(IDS)).logits.isfinite().all()
    weights = dict(model.named_parameters())
    for layer in integer_names(folder):
        expected = as_loaded(from_vllm_format(tensors, layer))
        assert each_near(weights[layer], expected, rounding("BF16", 2))


def test_formats_are_chosen_for_a_size(base: Path) -> None:
    whole = {name: weights_bytes(exported(base, name)) for name in ("w4a16", "w8a16")}
    size = (whole["w4a16"] + whole["w8a16"]) // 2
    folder = families.exported(base, "llama", "vllm", target_size=size)
    assert 0.95 * size < weights_bytes(folder) <= size
    assert {4, 8} <= {tensor.bits for tensor in read_manifest(folder).tensors}
    with raises(RecipeError, "1000 bytes"):
        families.exported(base, "llama", "vllm", target_size=1000)


@pytest.mark.parametrize("name", ["w8a16", "nvfp4a16"])
def test_stacks_of_experts_become_weights_of_single_ones(name: str, base: Path, tmp_path: Path) -> None:
    """Llama 4 has [experts, in, out]; transformers takes them apart as well before it loads packed ones."""
    folder = families.exported(base, "llama4", "vllm", format=name)
    model, tensors = families.load(folder, FAMILIES["llama4"], dtype="bfloat16"), read_all(folder)
    families.logits(model)  # decodes what is packed
    weights, plain = dict(model.named_parameters()), read_all(families.exported(base, "llama4", "bf16"))
    for layer in range(2):
        experts = f"model.layers.{layer}.feed_forward.experts"
        parts = {
            part: np.stack(
                [from_vllm_format(tensors, f"{experts}.{e}.{part}_proj.weight", BITS[name]) for e in range(4)]
            )
            for part in ("gate", "up", "down")
        }
        for part, values in parts.items():
            found = [weights[f"{experts}.{e}.{part}_proj.weight"].detach().float().numpy() for e in range(4)]
            assert each_near(found, as_loaded(values), rounding("BF16", 2))
        stacks = {"gate_up_proj": np.concatenate([parts["gate"], parts["up"]], 1), "down_proj": parts["down"]}
        for stack, values in stacks.items():
            exact = as_float32(plain[f"{experts}.{stack}"])
            assert ((np.swapaxes(values, 1, 2) - exact) ** 2).sum() < 0.01 * (exact**2).sum()
    assert verify(folder, threads=2).ok
    done("export", families.model(base, "llama4"), tmp_path / "out", "-t", "vllm", "--format", name)
    assert integer_names(tmp_path / "out") == integer_names(folder)


def test_stacks_that_are_not_turned_give_the_same_file_as_single_experts(base: Path, tmp_path: Path) -> None:
    """Qwen3.5 MoE is published with stacks [experts, out, in], and transformers saves single experts."""
    tensors = read_all(families.model(base, "qwen3_5_moe"))
    single = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    layers = {match[1] for name in tensors if (match := single.fullmatch(name))}
    for experts in layers:
        gate, up, down = (
            np.stack([tensors.pop(f"{experts}.{e}.{part}_proj.weight")[1] for e in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{experts}.gate_up_proj"] = ("BF16", np.concatenate([gate, up], 1))
        tensors[f"{experts}.down_proj"] = ("BF16", down)
    config = json.loads((families.model(base, "qwen3_5_moe") / "config.json").read_text())
    source = write_checkpoint(tmp_path / "source", tensors, config=config)
    run_command({"quantize": str(source), "recipe": "q6"}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "vllm"}, tmp_path / "out")
    expected, found = read_all(families.exported(base, "qwen3_5_moe", "vllm")), read_all(tmp_path / "out")
    assert layers and found.keys() == expected.keys()
    assert all(np.array_equal(values, expected[name][1]) for name, (_, values) in found.items())


@pytest.mark.parametrize("square", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("turned", [True, False])
def test_stacks_of_qwen3_vl_moe_give_the_file_of_the_text_model_alone(
    turned: bool, square: str, base: Path, tmp_path: Path
) -> None:
    """They are published as [experts, in, out], and transformers saves [experts, out, in]."""
    tensors = read_all(families.model(base, "qwen3_moe"))
    inner = json.loads((families.model(base, "qwen3_moe") / "config.json").read_text())
    if square == "down_proj":  # experts of twice the width
        inner["moe_intermediate_size"] *= 2
        for name in (name for name in tensors if ".experts." in name):
            dtype, matrix = tensors[name]
            tensors[name] = dtype, np.concatenate([matrix, matrix], axis=1 if "down_proj" in name else 0)
    single = write_checkpoint(tmp_path / "single", tensors, config=inner)
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for experts in (f"model.layers.{layer}.mlp.experts" for layer in range(2)):
        for stack, names in parts.items():
            of = [[tensors.pop(f"{experts}.{e}.{name}.weight")[1] for name in names] for e in range(4)]
            values = np.stack([np.concatenate(matrices) for matrices in of])
            tensors[f"{experts}.{stack}"] = ("BF16", np.ascontiguousarray(values.swapaxes(1, 2)) if turned else values)
    config = {"model_type": "qwen3_vl_moe", "dtype": "bfloat16", "tie_word_embeddings": False}
    config |= {"text_config": inner | {"model_type": "qwen3_vl_moe_text"}}
    renamed = {re.sub("^model[.]", "model.language_model.", name): tensor for name, tensor in tensors.items()}
    source = write_checkpoint(tmp_path / "source", renamed, config=config)
    expected, plain = (tmp_path / name for name in ("expected", "plain"))
    run_command({"export": str(single), "target": "vllm"}, plain)
    shown = done("export", source, expected, "-t", "vllm")
    assert "vLLM alone loads this export" in " ".join(shown.stderr.split())
    found = {name.replace("language_model.", ""): tensor for name, tensor in read_all(expected).items()}
    assert found.keys() == (wanted := read_all(plain)).keys()
    assert all(np.array_equal(values, found[name][1]) for name, (_, values) in wanted.items())
    ignored = [
        json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
        for folder in (plain, expected)
    ]
    assert ignored[0] == ignored[1]


@pytest.mark.parametrize(
    ("of", "options", "named"),
    [
        ("qwen3_moe", (), "gpt_oss"),
        ("gpt_oss", ("--keep", "*.1.mlp.experts.*"), "experts"),
    ],
)
def test_stacks_that_no_runtime_would_read_are_refused(
    of: str, options: tuple[str, ...], named: str, base: Path, tmp_path: Path
) -> None:
    asked = ("-t", "vllm", "--format", "mxfp4-gpt-oss", *options)
    assert named in refused("export", families.master(base, of), tmp_path / "out", *asked)
    assert not (tmp_path / "out").exists()


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(("target", "other", "stored"), [("vllm", "w4a16", "_packed"), ("torchao", "int8", "_qdata")])
def test_a_format_without_a_choice_of_scales_leaves_it_to_the_others(
    target: str, other: str, stored: str, base: Path
) -> None:
    """Layers that a rule gives another format are rounded as in an export of that format, by default and by minmax."""
    found = []
    for qparams in ({}, {"qparams": "minmax"}):
        options: dict[str, object] = {"target": target, **qparams}
        mixed = families.exported(base, "llama", **options, format="fp8", set_format=(f"*.mlp.*={other}",))
        whole = families.exported(base, "llama", **options, format=other)
        mine, theirs = (read_all(folder) for folder in (mixed, whole))
        names = [name for name in mine if ".mlp." in name and name.endswith(stored)]
        assert names and all(np.array_equal(mine[name][1], theirs[name][1]) for name in names)
        found.append(mine[names[0]][1])
        assert read_manifest(mixed).made_by.get("qparams") == qparams.get("qparams")
    assert not np.array_equal(*found)
