"""FP8 with scales of activations: they are no weights, are left out and named, and the master loads without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calls import export, quantize
from commands import answer, done
from helpers import f32, read_all, write_checkpoint
from safetensors.torch import save_file

from pqweights.checkpoint.quantized import NOT_A_WEIGHT
from pqweights.checkpoint.source import open_local
from pqweights.convert.manifest import read_manifest
from pqweights.planning.recipe import load_recipe
from pqweights.results.verify import verify

FLOAT_8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOAT_8, "input_activations": FLOAT_8}},
    "kv_cache_scheme": FLOAT_8,
}
# By layout: the configuration, the scale of a weight, and of activations those of each layer and of attention.
LAYOUTS: dict[str, tuple[dict[str, Any], str, tuple[str, ...], tuple[str, ...]]] = {
    "transformers": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        "_scale_inv",
        ("activation_scale",),
        (),
    ),
    "per tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        "_scale",
        ("input_scale",),
        ("kv_scale", "k_proj.output_scale"),
    ),
    "compressed-tensors": (COMPRESSED, "_scale", ("input_scale",), ("k_scale", "v_scale", "q_scale")),
    "modelopt": (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        "_scale",
        ("input_scale",),
        ("k_proj.k_scale", "v_proj.v_scale"),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "_scale", ("input_scale_ub",), ()),
}


def save(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def static_fp8(folder: Path, layout: str) -> tuple[Path, set[str]]:
    """A Llama in FP8, and the names of its scales of activations."""
    settings, suffix, of_layers, of_attention = LAYOUTS[layout]
    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tensors, names = {}, set()
    for name, value in model.state_dict().items():
        module, attention = name.removesuffix(".weight"), name.partition("self_attn.")
        if "_proj." not in name:
            tensors[name] = value
            continue
        tensors[name] = (value * 400).to(torch.float8_e4m3fn)
        tensors[name + suffix] = torch.tensor(1 / 400)
        names |= {f"{module}.{scale}" for scale in of_layers}
        if attention[1]:
            names |= {f"{attention[0]}self_attn.{scale}" for scale in of_attention}
    tensors |= {name: torch.tensor([0.5]) for name in names}
    stated = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "quantization_config": settings}
    return save(folder, tensors, config.to_dict() | stated), names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_master_and_export_load_without_the_scales_of_activations(layout: str, tmp_path: Path) -> None:
    import pqweights

    source, names = static_fp8(tmp_path / "src", layout)
    quantize(source, tmp_path / "master", load_recipe("q8"), threads=1)
    assert verify(tmp_path / "master", threads=1).ok
    assert read_manifest(tmp_path / "master").left_out == dict.fromkeys(names, NOT_A_WEIGHT)
    model = pqweights.load_model(tmp_path / "master", dtype=torch.bfloat16)
    export(tmp_path / "master", tmp_path / "bf16", "bf16", threads=1)
    plain, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "bf16", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not {kind: found for kind, found in info.items() if found}
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    up = "model.layers.0.mlp.up_proj.weight"
    stored = {tensor.name: tensor for tensor in open_local(source).tensors}[up]
    original = np.empty(stored.shape, dtype=np.float32)
    stored.read(0, original.size, "F32", original.reshape(-1).view(np.uint8))
    assert np.abs(plain.state_dict()[up].float().numpy() - original).max() < 0.02 * np.abs(original).max()


def test_commands_name_the_scales(tmp_path: Path) -> None:
    source, names = static_fp8(tmp_path / "src", "compressed-tensors")
    for command in (["plan", source], ["quantize", source, tmp_path / "out"]):
        assert f"left out: {len(names)} tensors: {NOT_A_WEIGHT}" in " ".join(done(*command).stdout.split())
        assert answer(*command)["left_out_tensors"].keys() == names
    done("card", tmp_path / "out")
    assert f"Left out: {len(names)} tensors of the source" in (tmp_path / "out/README.md").read_text()


def test_fused_experts_have_scales_named_after_the_weight(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    weight = torch.ones(2, 128, 64).to(torch.float8_e4m3fn)
    scales = {f"{experts}_scale_inv": torch.ones(2, 1, 1), f"{experts}_activation_scale": torch.ones(2)}
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    found = open_local(save(tmp_path / "src", {experts: weight, **scales}, config=config))
    assert [tensor.name for tensor in found.tensors] == [experts]
    assert found.left_out_tensors == {f"{experts}_activation_scale": NOT_A_WEIGHT}


def test_tensors_of_these_names_are_kept_in_sources_that_are_not_quantized(tmp_path: Path) -> None:
    names = {"layers.0.attn.k_scale", "layers.0.attn.input_scale"}
    source = write_checkpoint(tmp_path / "src", {name: f32(np.ones(4)) for name in names}, config={})
    quantize(source, tmp_path / "out", load_recipe("q4"), threads=1)
    assert read_all(tmp_path / "out").keys() == names
    assert not read_manifest(tmp_path / "out").left_out


# By the name of a scale in a module: what uses it, and the name of a scale of activations beside it.
SCALE_NAMES = {
    "scale_weight": "scale_input",  # ComfyUI
    "qscale_weight": "qscale_act",  # Mistral AI
    "weights_scaling_factor": "activation_scaling_factor",  # TensorRT-LLM
    "weight_scale": "input_scale",
    "weight_scale_inv": "activation_scale",
}


@pytest.mark.parametrize(("scale", "of_activations"), SCALE_NAMES.items())
@pytest.mark.parametrize("shape", [(), (1,), (64,), (64, 1)], ids=str)
def test_scales_are_found_under_the_names_that_tools_give_them(
    scale: str, of_activations: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    module, weight = "model.layers.0.mlp.up_proj", torch.ones(64, 128).to(torch.float8_e4m3fn)
    tensors = {
        f"{module}.weight": weight,
        f"{module}.{scale}": torch.full(shape, 0.25),
        f"{module}.{of_activations}": torch.tensor(3.0),
        f"{module}.bias": torch.zeros(64),
        "scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn),
    }
    opened = open_local(save(tmp_path / "src", tensors, {"model_type": "llama"}))
    assert {tensor.name for tensor in opened.tensors} == {f"{module}.weight", f"{module}.bias"}
    assert opened.left_out_tensors.keys() == {f"{module}.{of_activations}", "scaled_fp8"}
    read = next(tensor for tensor in opened.tensors if tensor.name.endswith("weight"))
    raw = np.empty(4 * 64 * 128, dtype=np.uint8)
    read.read(0, 64 * 128, "F32", raw)
    assert (raw.view(np.float32) == 0.25).all()


def test_plain_fp8_without_any_scale_is_read_as_it_is(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: torch.ones(64, 128).to(torch.float8_e4m3fn), "model.norm.weight": torch.ones(128)}
    source = save(tmp_path / "src", tensors, {})
    assert {tensor.name for tensor in open_local(source).tensors} == tensors.keys()
    for command in (("plan", source), ("quantize", source, tmp_path / "out")):
        assert name in done(*command).stderr  # that it is read as a plain cast


@pytest.mark.parametrize("method", ["hqq", "quanto", "aqlm", "gptq", "bitsandbytes", "compressed-tensors"])
def test_a_configuration_that_was_left_behind_by_decoding_is_ignored(method: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = COMPRESSED if method == "compressed-tensors" else {"quant_method": method, "bits": 4}
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.ones(64, 128), "model.norm.weight": torch.ones(128)}
    opened = open_local(save(tmp_path / "src", tensors, {"quantization_config": settings}))
    assert {tensor.name: tensor.dtype for tensor in opened.tensors} == dict.fromkeys(tensors, "F32")
