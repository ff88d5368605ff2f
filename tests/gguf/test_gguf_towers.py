"""Towers for images: the mmproj file beside that of the text model, as llama.cpp's tools/mtmd/clip.cpp reads it."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import gguf_cases
import torch
import transformers
from calls import quantize
from export_decoders import values_of
from external_runtimes import CLIP, need
from gguf_files import converted, edit_config
from helpers import Array, gaussian, run_command
from tiny_gguf import finish

from pqweights.checkpoint.gguf.model import GgufModel
from pqweights.exports.gguf_types import tower_type
from pqweights.planning.recipe import parse_recipe
from pqweights.rewrite.results.verify import verify

VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT |= {"image_size": 32, "patch_size": 4}
QWEN = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# The name of the classes, the text_config beside gguf_cases.SETTINGS, the vision_config, and what else is stated.
TOWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3", gguf_cases.WINDOWED, VIT | {"model_type": "siglip_vision_model"}, {"mm_tokens_per_image": 4},
    ),
    "qwen2_vl": (
        "Qwen2VL", {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
        {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}, {},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL", {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
        QWEN | {"window_size": 16, "fullatt_block_indexes": [1, 3]}, {},
    ),
    "qwen3_vl": (
        "Qwen3VL", gguf_cases.WIDE_HEADS | {"rope_parameters": ROPE | {"mrope_section": [6, 5, 5]}},
        QWEN | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}, {},
    ),
    "mistral3": (
        "Mistral3", gguf_cases.WIDE_HEADS | {"model_type": "mistral"},
        VIT | {"model_type": "pixtral", "head_dim": 16}, {"spatial_merge_size": 2},
    ),
}  # fmt: skip
NORMALIZED = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.25, 0.5, 0.5]}


def write_tower(name: str, folder: Path) -> Any:
    """Write a tiny model of images and text, with gains and biases that are not those that it starts with."""
    class_name, text, vision, outer = TOWERS[name]
    torch.manual_seed(2)
    config = getattr(transformers, f"{class_name}Config")(
        text_config=gguf_cases.SETTINGS | text, vision_config=vision, **outer
    )
    model = getattr(transformers, f"{class_name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(NORMALIZED))
    if name == "mistral3":
        token = {"id": 9, "content": "[IMG_BREAK]"}
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [token]}))
    return model


def weights_of(model: Any) -> dict[str, Array]:
    """Its weights by their names in memory."""
    return {key: value.float().numpy() for key, value in model.state_dict().items()}


def tower_of(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """The metadata and the tensors of a tower. The tokenizer of one of the models is only a stub."""
    from pqweights.checkpoint.gguf.model import outline_model
    from pqweights.checkpoint.source import open_local

    model: GgufModel = outline_model(open_local(folder))
    assert not model.notes
    return {entry.key: entry.value for entry in model.tower_metadata}, {t.name: values_of(t) for t in model.tower}


# What clip.cpp reads of a layer.
LAYER = {"ln1", "ln2", "attn_out", "ffn_up", "ffn_down"}
SEPARATE = {"attn_q", "attn_k", "attn_v"}
OF_LAYER = {
    "gemma3": LAYER | SEPARATE, "qwen2_vl": LAYER | SEPARATE, "qwen2_5_vl": LAYER | SEPARATE | {"ffn_gate"},
    "qwen3_vl": LAYER | {"attn_qkv"}, "mistral3": LAYER | SEPARATE | {"ffn_gate"},
}  # fmt: skip
# And beside the layers.
QWENS = {"v.patch_embd.weight", "v.patch_embd.weight.1", "v.post_ln.weight", "mm.0.weight", "mm.2.weight"}
BESIDE = {
    "gemma3": {"v.patch_embd.weight", "v.position_embd.weight", "v.post_ln.weight", "mm.input_projection.weight",
               "mm.soft_emb_norm.weight"},
    "qwen2_vl": QWENS,
    "qwen2_5_vl": QWENS,
    "qwen3_vl": QWENS | {"v.position_embd.weight"} | {
        f"v.deepstack.{layer}.{part}.weight" for layer in (0, 2) for part in ("norm", "fc1", "fc2")},
    "mistral3": {"v.patch_embd.weight", "v.pre_ln.weight", "mm.input_norm.weight", "mm.patch_merger.weight",
                 "mm.1.weight", "mm.2.weight", "v.token_embd.img_break"},
}  # fmt: skip


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_has_the_tensors_and_settings_that_llama_cpp_reads(name: str, tmp_path: Path) -> None:
    write_tower(name, tmp_path)
    about, tensors = tower_of(tmp_path)
    assert {tensor for tensor in tensors if not tensor.startswith("v.blk.") and not tensor.endswith("bias")} == (
        BESIDE[name]
    )
    layers = about["clip.vision.block_count"]
    weights = {tensor.removesuffix(".weight") for tensor in tensors if tensor.startswith("v.blk.")}
    weights = {tensor for tensor in weights if not tensor.endswith("bias")}
    assert weights == {f"v.blk.{layer}.{part}" for layer in range(layers) for part in OF_LAYER[name]}
    assert about["general.architecture"] == "clip" and about["clip.has_vision_encoder"] is True
    assert about["clip.projector_type"] in gguf.VisionProjectorType.__dict__.values()
    assert about["clip.vision.projection_dim"] == 64
    assert about["clip.vision.image_mean"] == NORMALIZED["image_mean"]
    assert about["clip.vision.image_std"] == NORMALIZED["image_std"]


def halves_in_turns(matrix: Array, heads: int) -> Array:
    return matrix.reshape(heads, 2, -1, matrix.shape[-1]).swapaxes(1, 2).reshape(matrix.shape)


def test_matrices_of_towers_are_cut_and_permuted(tmp_path: Path) -> None:
    source = weights_of(write_tower("qwen2_5_vl", tmp_path / "qwen"))
    _, found = tower_of(tmp_path / "qwen")
    joined = source["model.visual.blocks.1.attn.qkv.weight"]
    bias = source["model.visual.blocks.1.attn.qkv.bias"]
    for place, part in enumerate("qkv"):
        np.testing.assert_array_equal(found[f"v.blk.1.attn_{part}.weight"], joined[32 * place : 32 * (place + 1)])
        np.testing.assert_array_equal(found[f"v.blk.1.attn_{part}.bias"], bias[32 * place : 32 * (place + 1)])
    frames = source["model.visual.patch_embed.proj.weight"]
    np.testing.assert_array_equal(found["v.patch_embd.weight"], frames[:, :, 0])
    np.testing.assert_array_equal(found["v.patch_embd.weight.1"], frames[:, :, 1])
    source = weights_of(write_tower("mistral3", tmp_path / "mistral"))
    _, found = tower_of(tmp_path / "mistral")
    rows = source["model.vision_tower.transformer.layers.0.attention.q_proj.weight"]
    np.testing.assert_array_equal(found["v.blk.0.attn_q.weight"], halves_in_turns(rows, 2))
    embedding = source["model.language_model.embed_tokens.weight"][9]
    np.testing.assert_array_equal(found["v.token_embd.img_break"], embedding)
    source = weights_of(write_tower("gemma3", tmp_path / "gemma"))
    _, found = tower_of(tmp_path / "gemma")
    gain = source["model.multi_modal_projector.mm_soft_emb_norm.weight"]
    np.testing.assert_array_equal(found["mm.soft_emb_norm.weight"], gain + np.float32(1))


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_an_export_writes_the_tower_beside_the_text(name: str, tmp_path: Path) -> None:
    """Its matrices in F16, under the name that llama.cpp and Ollama take for a tower."""
    write_tower(name, tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "master", parse_recipe("bits: 6", "recipe"))
    run_command({"export": str(tmp_path / "master"), "target": "gguf"}, tmp_path / "out")
    assert verify(tmp_path / "out", threads=1).ok
    files = ["mmproj-model-F16.gguf", "model-Q4_K_M.gguf"]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.gguf")) == files
    assert "FROM ./mmproj-model-F16.gguf" in (tmp_path / "out" / "Modelfile").read_text()
    _, expected = tower_of(tmp_path / "model")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / files[0]).tensors}
    assert stored.keys() == expected.keys()
    for tensor, value in expected.items():
        is_plain = value.ndim == 1 or "_embd." in tensor
        assert stored[tensor].tensor_type.name == ("F32" if is_plain else "F16")
        kept = value if is_plain else value.astype(np.float16)
        np.testing.assert_array_equal(stored[tensor].data.reshape(-1), kept.reshape(-1))


def test_a_tower_that_llama_cpp_would_compute_otherwise_is_left_out_and_said(tmp_path: Path) -> None:
    write_tower("gemma3", tmp_path)
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    edit_config(tmp_path, {"vision_config": vision | {"hidden_act": "relu"}})
    (note,) = converted(tmp_path).notes
    assert "the tower for images is left out" in note and "hidden_act 'gelu_pytorch_tanh' only" in note
    edit_config(tmp_path, {"vision_config": vision})
    (tmp_path / "preprocessor_config.json").unlink()
    (note,) = converted(tmp_path).notes
    assert "preprocessor_config.json, which says how images are normalized, is missing" in note


WIDTH, HEIGHT = 32, 32
MERGED = 8  # the side of what becomes one vector, in pixels


def image_features(name: str, model: Any, pixels: Array) -> Array:
    """What transformers makes of an image, [vectors, width], as llama.cpp puts it into the text. pixels: [3, h, w]"""
    image = torch.from_numpy(pixels)[None]
    rows, columns = HEIGHT // MERGED, WIDTH // MERGED
    if name.startswith("qwen"):
        patches = image.repeat(2, 1, 1, 1).reshape(2, 3, rows, 2, MERGED // 2, columns, 2, MERGED // 2)
        patches = patches.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(4 * rows * columns, -1)
        found = model.model.get_image_features(patches, image_grid_thw=torch.tensor([[1, 2 * rows, 2 * columns]]))
        levels = [
            level[0] if isinstance(level, list | tuple) else level
            for level in getattr(found, "deepstack_features", None) or []
        ]
        return torch.cat([torch.cat(list(found.pooler_output)), *levels], -1).numpy()
    if name == "mistral3":
        found = model.model.get_image_features(image, image_sizes=torch.tensor([[HEIGHT, WIDTH]]))
        ends = model.model.language_model.embed_tokens.weight[9].expand(rows, 1, -1)
        vectors = torch.cat(list(found.pooler_output)).reshape(rows, columns, -1)
        return torch.cat([vectors, ends], 1).flatten(0, 1)[:-1].numpy()
    return model.model.get_image_features(image).pooler_output[0].numpy()


@pytest.mark.parametrize("name", TOWERS)
def test_llama_cpp_makes_of_an_image_what_transformers_does(name: str, tmp_path: Path) -> None:
    """The largest difference of all vectors, in units of their standard deviation; matrices are in F16."""
    need("llama.cpp")
    need("clip.cpp")
    import llama_cpp  # whose libraries clip.cpp computes with

    assert llama_cpp
    model = write_tower(name, tmp_path / "model")
    pixels = gaussian(HEIGHT, WIDTH, 3, seed=4)
    with torch.no_grad():
        expected = image_features(name, model, pixels.transpose(2, 0, 1).copy())
    path = write_tower_file(tmp_path)
    out = np.zeros(1 << 16, dtype=np.float32)
    arguments = (pixels.ctypes.data_as(ctypes.c_void_p), WIDTH, HEIGHT, out.ctypes.data_as(ctypes.c_void_p), out.size)
    count = ctypes.CDLL(str(CLIP)).encode_image(str(path).encode(), *arguments)
    assert count == expected.size
    found = out[:count].reshape(expected.shape)
    assert np.abs(found - expected).max() < 0.02 * expected.std()


def write_tower_file(folder: Path) -> Path:
    """Write the file of the tower of a model in a folder beside it."""
    from pqweights.checkpoint.gguf.model import outline_model
    from pqweights.checkpoint.source import open_local

    model = outline_model(open_local(folder / "model"))
    writer = gguf.GGUFWriter(folder / "mmproj.gguf", "clip")
    for key, value, kind, item_kind in model.tower_metadata:
        if key != gguf.Keys.General.ARCHITECTURE:
            items = None if item_kind is None else gguf.GGUFValueType(item_kind)
            writer.add_key_value(key, value, gguf.GGUFValueType(kind), items)
    for tensor in model.tower:
        data = values_of(tensor).reshape(tensor.shape)
        writer.add_tensor(tensor.name, data.astype(np.float16) if tower_type(tensor).type == "F16" else data)
    finish(writer)
    return folder / "mmproj.gguf"
