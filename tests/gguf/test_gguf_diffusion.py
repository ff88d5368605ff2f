"""GGUF files of image and video models: what ComfyUI-GGUF's loader and diffusers' demand of them, read by gguf."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from commands import answer, done, refused
from diffusion_cases import ORIGINAL, original, single_file, tensors_of
from helpers import as_float32, bf16, f32, gaussian, write_checkpoint

from pqweights.checkpoint.gguf.file import open_gguf
from pqweights.common.dtypes import float8_table
from pqweights.convert.manifest import read_manifest
from pqweights.models.diffusion import FAMILIES, TYPES

# What loader.py of ComfyUI-GGUF takes as general.architecture, and the key with the shape of weights in rows of 256.
ACCEPTED = {
    *("flux", "sd1", "sdxl", "sd3", "aura", "hidream", "cosmos", "ltxv", "hyvid", "wan", "lumina2", "qwen_image")
}  # fmt: skip
SHAPE_KEY = "comfy.gguf.orig_shape."
PREFIX = "model.diffusion_model."


def export(source: Path, out: Path, kind: str = "q4_k_m", **options: Any) -> Path:
    """Export to one type; return the file."""
    done("export", source, out, "-t", "gguf", "--type", kind, "--name", "tiny", *map(str, options.values()))
    return out / f"tiny-{kind.upper()}.gguf"


def loaded(path: Path) -> tuple[str, dict[str, np.ndarray], dict[str, str]]:
    """Read a file as ComfyUI-GGUF's loader does: the architecture, values in their shapes, and types."""
    reader = gguf.GGUFReader(path)
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    values, types = {}, {}
    for tensor in reader.tensors:
        field = reader.get_field(SHAPE_KEY + tensor.name)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if field is not None:
            assert field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]
            shape = tuple(int(field.parts[part][0]) for part in field.data)
        values[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        types[tensor.name] = tensor.tensor_type.name
    return architecture, values, types


def test_every_family_has_a_case_and_a_row_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs/diffusion.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| `(\w+)` \|", page, re.MULTILINE))
    assert rows == {name: family.architecture for name, family in FAMILIES.items()}
    assert rows == {name: architecture for name, (architecture, _) in ORIGINAL.items()}


@pytest.mark.parametrize(("family", "dtype"), [(of, ("BF16", "F32")[n % 2]) for n, of in enumerate(ORIGINAL)])
def test_file_of_the_original_layout_is_as_loaders_demand(family, dtype, tmp_path):
    out = export(single_file(tmp_path / "source", family, dtype=dtype), tmp_path / "out")
    architecture, values, types = loaded(out)
    assert architecture == ORIGINAL[family][0]
    assert architecture in ACCEPTED or not FAMILIES[family].comfyui
    source = original(family, dtype=dtype)
    assert values.keys() == source.keys()
    quantized = 0
    for name, tensor in source.items():
        assert values[name].shape == tensor[1].shape, name
        if types[name] in ("F32", "BF16", "F16"):
            # Programs decode no parameters, and diffusers no convolutions.
            is_layer = tensor[1].ndim == 2 and name.endswith(".weight")
            assert types[name] != "BF16" or is_layer, name
            if types[name] != "F16":
                assert np.array_equal(values[name], as_float32(tensor)), name
            else:
                assert np.array_equal(values[name], as_float32(tensor).astype(np.float16)), name
            continue
        quantized += 1
        assert types[name] in TYPES
        error = np.square(values[name] - as_float32(tensor)).sum() / np.square(as_float32(tensor)).sum()
        assert error < 0.01, name
    assert quantized
    assert done("verify", out.parent).stdout.startswith(f"{out.parent}: ok")
    done("inspect", out)


KEPT = {
    "FLUX.1": ("img_in.weight", "final_layer.adaLN_modulation.1.weight"),
    "Stable Diffusion 3, 3.5": ("final_layer.linear.weight",),
    "HunyuanVideo": ("txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight",),
    "Lumina 2": ("cap_embedder.1.weight", "context_refiner.0.attention.qkv.weight"),
    "HiDream": ("double_stream_blocks.0.block.ff_i.gate.weight",),
}


@pytest.mark.parametrize("family", KEPT)
def test_embeddings_outputs_and_refiners_keep_their_precision(family, tmp_path):
    _, _, types = loaded(export(single_file(tmp_path / "source", family), tmp_path / "out", "q2_k"))
    assert {types[name] for name in KEPT[family]} <= {"BF16", "F32"}


@pytest.mark.parametrize("kind", ["q4_k_m", "q3_k_m", "q5_0", "q2_k"])
def test_mix_is_that_of_the_quantizer_for_comfyui(kind, tmp_path):
    """The types that tools/lcpp.patch of ComfyUI-GGUF gives to values, and to the second matrix of the MLP."""
    most, values, down = {
        "q4_k_m": ("Q4_K", "Q6_K", "Q6_K"),
        "q3_k_m": ("Q3_K", "Q5_K", "Q4_K"),
        "q5_0": ("Q5_0", "Q5_0", "Q5_1"),
        "q2_k": ("Q2_K", "Q3_K", "Q2_K"),
    }[kind]
    _, _, types = loaded(export(single_file(tmp_path / "source", "Wan 2.1, 2.2"), tmp_path / "out", kind))
    found = [types[f"blocks.0.{name}.weight"] for name in ("self_attn.q", "self_attn.v", "ffn.2")]
    assert found == [most, values, down]


def test_file_with_all_models_of_a_pipeline_gives_its_transformer(tmp_path):
    others = {"first_stage_model.decoder.conv_in.weight": bf16(gaussian(8, 4)), "text_encoders.t5.x": bf16(gaussian(8))}
    source = write_checkpoint(tmp_path / "source", original("FLUX.1", prefix=PREFIX) | others)
    alone = export(single_file(tmp_path / "alone", "FLUX.1"), tmp_path / "of-alone")
    out = export(source, tmp_path / "out")
    assert out.read_bytes() == alone.read_bytes()
    assert read_manifest(tmp_path / "out").left_out.keys() == others.keys()


def test_weights_of_a_unet_lie_in_rows_of_256_with_their_shape_beside(tmp_path):
    out = export(single_file(tmp_path / "source", "Stable Diffusion XL"), tmp_path / "out", "q4_k_s")
    stored = {tensor.name: tensor.shape for tensor in open_gguf(out).tensors}
    assert stored["input_blocks.1.0.in_layers.2.weight"] == (320 * 320 * 9 // 256, 256)
    assert stored["input_blocks.0.0.weight"] == (320, 4, 3, 3)
    _, _, types = loaded(out)
    assert types["input_blocks.1.0.in_layers.2.weight"] == types["input_blocks.1.1.proj_in.weight"] == "Q4_K"


def test_folder_of_diffusers_keeps_its_names_and_its_configuration(tmp_path):
    shapes = {
        "x_embedder.weight": (256, 64),
        "transformer_blocks.0.attn.to_v.weight": (256, 256),
        "transformer_blocks.0.norm1.linear.bias": (256,),
        "single_transformer_blocks.0.proj_out.weight": (256, 1280),
    }
    tensors = {name: bf16(gaussian(*shape)) for name, shape in shapes.items()}
    config = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.40.0", "axes_dims_rope": [16, 56, 56]}
    source = write_checkpoint(tmp_path / "FLUX.1-tiny/transformer", tensors, config=config)
    (source / "model.safetensors").rename(source / "diffusion_pytorch_model.safetensors")
    done("export", source, tmp_path / "out", "-t", "gguf", "--type", "q8_0,q4_k_m")
    assert json.loads((tmp_path / "out/config.json").read_bytes()) == config
    files = ["FLUX.1-tiny-Q4_K_M.gguf", "FLUX.1-tiny-Q8_0.gguf"]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.gguf")) == files
    architecture, values, types = loaded(tmp_path / "out" / files[0])
    assert architecture == "flux" and {name: of.shape for name, of in values.items()} == shapes
    assert types["transformer_blocks.0.attn.to_v.weight"] == "Q6_K" and types["x_embedder.weight"] == "BF16"


def test_ladder_is_verified_from_its_source_and_rebuilt(tmp_path):
    source = single_file(tmp_path / "source", "Wan 2.1, 2.2")
    done("export", source, tmp_path / "out", "-t", "gguf", "--type", "q8_0,q3_k_m")
    assert done("verify", tmp_path / "out", "--from", source).exit_code == 0
    done("rebuild", tmp_path / "out/pqweights.json", source, tmp_path / "again")
    for path in (tmp_path / "out").glob("*.gguf"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_size_is_met(tmp_path):
    source = single_file(tmp_path / "source", "Stable Diffusion 3, 3.5")
    done("export", source, tmp_path / "out", "-t", "gguf", "--target-size", "0.7MB", "--name", "tiny")
    out = tmp_path / "out/tiny-fit.gguf"
    assert 0.6e6 < out.stat().st_size < 0.7e6
    assert {*loaded(out)[2].values()} <= {*TYPES, "F32", "F16", "BF16"}


@pytest.mark.parametrize("program", ["ComfyUI", "from_single_file"])
def test_card_says_how_to_load_the_file(program, tmp_path):
    export(single_file(tmp_path / "source", "Qwen-Image"), tmp_path / "out")
    done("card", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert program in card and "llama" not in card


def test_plan_says_that_a_model_can_be_exported(tmp_path):
    exports = answer("plan", single_file(tmp_path / "source", "FLUX.1"), "--recipe", "q5", "--json")["exports"]
    assert {"target": "gguf", "possible": True, "reason": None} in exports


TYPES_REFUSED = ("IQ2_S",)
REFUSED = {
    "class": ({"a.weight": (4, 4)}, {"_class_name": "PixArtTransformer2DModel"}, "q8_0", "PixArtTransformer2DModel"),
    "family": ({f"{PREFIX}unheard.of.weight": (4, 4)}, None, "q8_0", PREFIX),
    "type": ({"joint_blocks.0.x_block.attn.qkv.weight": (256, 256)}, None, "iq2_m", "IQ2_S"),
}


@pytest.mark.parametrize(("shapes", "config", "kind", "named"), REFUSED.values(), ids=REFUSED)
def test_what_no_program_loads_is_refused_by_name(shapes, config, kind, named, tmp_path):
    tensors = {name: bf16(gaussian(math.prod(shape)).reshape(shape)) for name, shape in shapes.items()}
    source = write_checkpoint(tmp_path / "source", tensors, config=config)
    code = 2 if named in TYPES_REFUSED else 1
    assert named in refused("export", source, tmp_path / "out", "-t", "gguf", "--type", kind, code=code)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scaled", [False, True])
def test_file_in_fp8_is_a_source(scaled, tmp_path):
    """As ComfyUI's own are: a plain cast, or with a scale for each matrix and a mark that says so."""
    codes = np.random.default_rng(0).integers(0x20, 0x60, 1 << 20).astype(np.uint8)
    tensors, expected, table = dict[str, Any](), {}, float8_table("F8_E4M3")
    for name, shape in tensors_of("FLUX.1").items():
        of_tensor, is_matrix = codes[: math.prod(shape)].reshape(shape), len(shape) == 2
        expected[name] = table[of_tensor] * np.float32(0.5 if scaled and is_matrix else 1)
        tensors[PREFIX + name] = ("F8_E4M3", of_tensor) if is_matrix or not scaled else bf16(expected[name])
        if scaled and is_matrix:
            tensors[f"{PREFIX}{name.removesuffix('.weight')}.scale_weight"] = f32(np.array([0.5]))
    if scaled:
        tensors[f"{PREFIX}scaled_fp8"] = ("F8_E4M3", np.zeros(2, dtype=np.uint8))
    source = write_checkpoint(tmp_path / "source", tensors)
    _, values, types = loaded(export(source, tmp_path / "out", "q8_0"))
    assert values.keys() == expected.keys()
    for name, found in values.items():
        if types[name] == "Q8_0":
            assert np.square(found - expected[name]).sum() < 1e-3 * np.square(expected[name]).sum(), name
        else:
            assert types[name] in ("BF16", "F32") and np.array_equal(found, expected[name]), name
