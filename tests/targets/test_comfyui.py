"""Files in FP8 for ComfyUI, decoded as comfy/utils.py and comfy/ops.py do it, beside what ComfyUI's own rule makes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import answer, done, refused
from diffusion_cases import ORIGINAL, original, single_file, tensors_of
from helpers import (
    as_float32,
    bf16,
    f32,
    folder_bytes,
    gaussian,
    killed_runs,
    run_command,
    small_chunks,
    write_checkpoint,
)
from safetensors import safe_open

from pqweights.checkpoint import shard_file
from pqweights.common.dtypes import float8_table
from pqweights.convert import jobs, shard
from pqweights.convert.manifest import read_manifest
from pqweights.models.diffusion import FAMILIES, OUTSIDE

LOADED = [name for name in ORIGINAL if FAMILIES[name].in_comfyui]
PREFIX = "model.diffusion_model."
WEIGHTS_ALONE = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}


def export(source: Path, out: Path, *options: object) -> Path:
    done("export", source, out, "-t", "comfyui", "--name", "tiny", *options)
    return out / "tiny_fp8_scaled.safetensors"


def loaded(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a file as ComfyUI computes with them, their codes, and what the file says of layers."""
    with safe_open(path, framework="pt") as opened:
        layers = json.loads(opened.metadata()["_quantization_metadata"])["layers"]
        stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    values, codes = {}, {}
    for name, of in layers.items():
        assert of["format"] == "float8_e4m3fn"
        codes[f"{name}.weight"] = stored[f"{name}.weight"]
        scale = stored.pop(f"{name}.weight_scale")
        assert scale.dtype == torch.float32 and scale.shape == ()
        assert stored[f"{name}.weight"].dtype == torch.float8_e4m3fn
        values[f"{name}.weight"] = stored.pop(f"{name}.weight").float() * scale
    return values | stored, codes, layers


def theirs(weight: torch.Tensor) -> torch.Tensor:
    """A weight as quantize of comfy/quant_ops.py makes it, and decodes it again."""
    scale = weight.abs().amax().float() / 448
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("family", LOADED)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_matrices_of_blocks_err_no_more_than_by_the_rule_of_comfyui(family: str, dtype: str, tmp_path: Path) -> None:
    path = export(single_file(tmp_path / "source", family, dtype=dtype), tmp_path / "out")
    values, codes, layers = loaded(path)
    source = original(family, dtype=dtype)
    assert values.keys() == source.keys() and layers and all(of == WEIGHTS_ALONE for of in layers.values())
    for name, tensor in source.items():
        expected = torch.from_numpy(as_float32(tensor))
        if name in codes:
            errors = [(of - expected).square().sum().item() for of in (values[name], theirs(expected))]
            assert errors[0] < 0.001 * expected.square().sum().item() and errors[0] < 1.0001 * errors[1], name
            assert codes[name].float().abs().max() == 448
        else:
            assert torch.equal(values[name].float(), expected), name
            assert values[name].dtype == {"BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    plain = [tensor.reason for tensor in read_manifest(tmp_path / "out").tensors if tensor.action == "decode"]
    assert set(plain) <= {OUTSIDE}
    assert done("verify", path.parent).stdout.startswith(f"{path.parent}: ok")
    done("inspect", path.parent)


def test_file_with_all_models_of_a_pipeline_gives_its_transformer(tmp_path: Path) -> None:
    other = {"first_stage_model.decoder.conv_in.weight": bf16(gaussian(8, 4))}
    source = write_checkpoint(tmp_path / "source", original("FLUX.1", prefix=PREFIX) | other)
    alone = export(single_file(tmp_path / "alone", "FLUX.1"), tmp_path / "of-alone")
    assert export(source, tmp_path / "out").read_bytes() == alone.read_bytes()
    assert read_manifest(tmp_path / "out").left_out.keys() == other.keys()


def test_rules_keep_layers_and_choose_how_they_are_multiplied(tmp_path: Path) -> None:
    qkv, down = "double_blocks.0.img_attn.qkv", "double_blocks.0.img_mlp.2"
    rules = ("--format", "fp8", "--keep", f"{qkv}.*", "--set", f"{down}.weight=fp8a16")
    _, _, layers = loaded(export(single_file(tmp_path / "source", "FLUX.1"), tmp_path / "out", *rules))
    assert qkv not in layers and layers.pop(down) == WEIGHTS_ALONE
    assert layers and all(of == {"format": "float8_e4m3fn"} for of in layers.values())


@pytest.mark.parametrize("scaled", [False, True])
def test_codes_of_a_source_in_fp8_are_those_of_the_result(scaled: bool, tmp_path: Path) -> None:
    codes, table = np.random.default_rng(0).integers(0x20, 0x60, 1 << 20).astype(np.uint8), float8_table("F8_E4M3")
    tensors, of_blocks, scale = dict[str, Any](), {}, np.float32(0.3 if scaled else 1)
    for name, shape in tensors_of("FLUX.1").items():
        of_tensor = codes[: math.prod(shape)].reshape(shape)
        if "blocks.0" not in name or len(shape) < 2:
            tensors[PREFIX + name] = bf16(table[of_tensor])
            continue
        tensors[PREFIX + name], of_blocks[name] = ("F8_E4M3", of_tensor), of_tensor
        if scaled:
            tensors[f"{PREFIX}{name.removesuffix('.weight')}.scale_weight"] = f32(np.array([scale]))
    kept = "single_blocks.0.linear1.weight"  # plain beside codes
    tensors[PREFIX + kept] = bf16(table[of_blocks.pop(kept)])
    tensors.pop(f"{PREFIX}{kept.removesuffix('.weight')}.scale_weight", None)
    values, found, _ = loaded(export(write_checkpoint(tmp_path / "source", tensors), tmp_path / "out"))
    assert found.keys() == of_blocks.keys()
    for name, of_tensor in of_blocks.items():
        assert np.array_equal(found[name].view(torch.uint8).numpy(), of_tensor), name
        assert np.array_equal(values[name].numpy(), table[of_tensor] * scale), name


@pytest.mark.parametrize("formats", ["fp8a16", "fp8,fp8a16"])
def test_result_is_verified_from_its_source_and_rebuilt(formats: str, tmp_path: Path) -> None:
    source = single_file(tmp_path / "source", "Wan 2.1, 2.2")
    done("export", source, tmp_path / "out", "-t", "comfyui", "--format", formats, "--keep", "*.ffn.*", "--name", "a")
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("a_*.safetensors"))
    assert files == [
        f"{name}/a_fp8_scaled.safetensors" if "," in formats else "a_fp8_scaled.safetensors"
        for name in formats.split(",")
    ]
    assert done("verify", tmp_path / "out", "--from", source).exit_code == 0
    done("rebuild", tmp_path / "out/pqweights.json", source, tmp_path / "again")
    assert all((tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in files)


def test_killed_runs_continue_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((jobs, "CHUNK_WEIGHTS"), (shard_file, "DIRECT_BYTES"), (shard, "PROGRESS_SECONDS")):
        monkeypatch.setattr(module, name, getattr(module, name))
    small_chunks()
    command = {"export": str(single_file(tmp_path / "source", "Qwen-Image")), "target": "comfyui", "name": "tiny"}
    run_command(command, tmp_path / "whole")
    (calls,) = killed_runs(command, [{"out": str(tmp_path / "counted")}])
    numbers = range(1, calls["pwrite"], calls["pwrite"] // 4)
    outs = {tmp_path / f"killed-{number}": number for number in numbers}
    killed_runs(command, [{"out": str(o), "function": "pwrite", "number": n, "when": "half"} for o, n in outs.items()])
    for out in outs:
        assert not (out / "pqweights.json").exists()
        run_command(command, out)
        assert folder_bytes(out) == folder_bytes(tmp_path / "whole")


def test_card_and_plan_say_what_loads_the_file(tmp_path: Path) -> None:
    source = single_file(tmp_path / "source", "FLUX.1")
    entry = {"target": "comfyui", "possible": True, "reason": None}
    assert entry in answer("plan", source, "--recipe", "q5", "--json")["exports"]
    path = export(source, tmp_path / "out")
    card = done("card", path.parent, "--print", "--repo", "someone/out").stdout
    fetch = "hf download someone/out tiny_fp8_scaled.safetensors --local-dir ComfyUI/models/diffusion_models"
    assert fetch in card and "library_name: diffusion-single-file" in card


REFUSED = {
    "text": ({"model.layers.0.mlp.up_proj.weight": (8, 8)}, {"model_type": "llama"}, "ComfyUI"),
    "family": (tensors_of("Sana"), None, "ComfyUI loads no such model"),
    "names of diffusers": (
        {"transformer_blocks.0.attn.to_v.weight": (8, 8)},
        {"_class_name": "FluxTransformer2DModel"},
        "original",
    ),
}


@pytest.mark.parametrize(("shapes", "config", "named"), REFUSED.values(), ids=REFUSED)
def test_what_comfyui_does_not_load_is_refused(
    shapes: dict[str, tuple[int, ...]], config: dict[str, Any] | None, named: str, tmp_path: Path
) -> None:
    tensors = {name: bf16(gaussian(math.prod(shape)).reshape(shape)) for name, shape in shapes.items()}
    source = write_checkpoint(tmp_path / "source", tensors, config=config)
    assert named in refused("export", source, tmp_path / "out", "-t", "comfyui")
    assert not (tmp_path / "out").exists()
