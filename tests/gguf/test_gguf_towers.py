"""Towers for images: the mmproj file beside that of the text model, as llama.cpp's tools/mtmd/clip.cpp reads it."""

from __future__ import annotations

import ctypes
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from calls import quantize
from closeness import assert_near
from export_decoders import values_of
from external_runtimes import CLIP
from gguf_files import converted, edit_config, without_tokenizer
from helpers import Array, gaussian, run_command
from tiny_gguf import finish
from tower_cases import NORMALIZED, TOWERS, rename_tensors, write_tower

from pqweights.checkpoint.gguf.model import GgufModel
from pqweights.checkpoint.gguf.towers import BESIDE as STATED_BESIDE
from pqweights.planning.recipe import parse_recipe
from pqweights.results.verify import verify
from pqweights.targets.gguf_types import tower_type

# Those with which llama.cpp does otherwise with the vectors, or with long texts.
REMARKED = ("llama4", "kimi_vl", "step3p7", "llava", "minimax_m3_vl")


def weights_of(model: Any) -> dict[str, Array]:
    """Its weights by their names in memory."""
    return {key: value.float().numpy() for key, value in model.state_dict().items()}


def outline(folder: Path) -> GgufModel:
    from pqweights.checkpoint.source import open_local

    return without_tokenizer(open_local(folder))


def tower_of(folder: Path, name: str = "") -> tuple[dict[str, Any], dict[str, Array]]:
    """The metadata and the tensors of a tower. The tokenizer of one of the models is only a stub."""
    model = outline(folder)
    assert len(model.notes) == (name in REMARKED) and all("llama.cpp" in note for note in model.notes)
    return {key: each.value for key, each in model.tower_metadata.items()}, {t.name: values_of(t) for t in model.tower}


# What clip.cpp reads of a layer.
LAYER = {"ln1", "ln2", "attn_out", "ffn_up", "ffn_down"}
SEPARATE = {"attn_q", "attn_k", "attn_v"}
OF_LAYER = {
    "gemma3": LAYER | SEPARATE, "qwen2_vl": LAYER | SEPARATE, "qwen2_5_vl": LAYER | SEPARATE | {"ffn_gate"},
    "qwen3_vl": LAYER | {"attn_qkv"}, "mistral3": LAYER | SEPARATE | {"ffn_gate"},
    "llava pixtral": LAYER | SEPARATE | {"ffn_gate"}, "kimi_k25": LAYER | {"attn_qkv"}, "kimi_vl": LAYER | {"attn_qkv"},
    "gemma4": LAYER | SEPARATE | {"ffn_gate", "attn_q_norm", "attn_k_norm", "attn_post_norm", "ffn_post_norm"} | {
        f"{part}.{side}" for part in {"ffn_gate", "ffn_up", "ffn_down", "attn_out"} | SEPARATE
        for side in ("input_min", "input_max", "output_min", "output_max")
    },
    "internvl": LAYER | SEPARATE | {"ls1", "ls2"}, "step3p7": LAYER | {"attn_qkv", "ls1", "ls2"},
    **dict.fromkeys(("llava", "llama4", "lfm2_vl", "idefics3", "minimax_m3_vl"), LAYER | SEPARATE),
}  # fmt: skip
# And beside the layers.
PLACED = {"v.patch_embd.weight", "v.position_embd.weight"}
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
    "llava pixtral": {"v.patch_embd.weight", "v.pre_ln.weight", "mm.1.weight", "mm.2.weight", "v.token_embd.img_break"},
    "llava": PLACED | {"v.class_embd", "v.pre_ln.weight", "mm.0.weight", "mm.2.weight"},
    "gemma4": PLACED | {"v.std_bias", "v.std_scale", "mm.input_projection.weight"},
    "llama4": PLACED | {"v.class_embd", "v.pre_ln.weight", "v.post_ln.weight", "mm.model.fc.weight",
                        "mm.model.mlp.1.weight", "mm.model.mlp.2.weight"},
    **dict.fromkeys(("kimi_k25", "kimi_vl", "lfm2_vl"), PLACED | {"v.post_ln.weight", "mm.input_norm.weight",
                                                                  "mm.1.weight", "mm.2.weight"}),
    "step3p7": PLACED | {"v.pre_ln.weight", "mm.0.weight", "mm.1.weight", "mm.model.fc.weight"},
    "minimax_m3_vl": {"v.patch_embd.weight", "v.patch_embd.weight.1", "v.pre_ln.weight", "mm.1.weight", "mm.2.weight",
                      "mm.merger.fc1.weight", "mm.merger.fc2.weight"},
    "idefics3": PLACED | {"v.post_ln.weight", "mm.model.fc.weight"},
    "internvl": PLACED | {"v.class_embd", *(f"mm.model.mlp.{number}.weight" for number in (0, 1, 3))},
}  # fmt: skip


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_has_the_tensors_and_settings_that_llama_cpp_reads(name: str, tmp_path: Path) -> None:
    write_tower(name, tmp_path)
    about, tensors = tower_of(tmp_path, name)
    assert {tensor for tensor in tensors if not tensor.startswith("v.blk.") and not tensor.endswith(".bias")} == (
        BESIDE[name]
    )
    layers = about["clip.vision.block_count"]
    weights = {tensor.removesuffix(".weight") for tensor in tensors if tensor.startswith("v.blk.")}
    weights = {tensor for tensor in weights if not tensor.endswith("bias")}
    assert weights == {f"v.blk.{layer}.{part}" for layer in range(layers) for part in OF_LAYER[name]}
    assert about["general.architecture"] == "clip" and about["clip.has_vision_encoder"] is True
    assert about["clip.projector_type"] in {*gguf.VisionProjectorType.__dict__.values(), "mlp", "minimax_m3"}
    assert about["clip.vision.projection_dim"] == 64
    assert about["clip.vision.image_mean"] == NORMALIZED["image_mean"]
    assert about["clip.vision.image_std"] == NORMALIZED["image_std"]


@pytest.mark.parametrize("name", TOWERS)
def test_absent_keys_of_a_tower_mean_what_transformers_takes(name: str, tmp_path: Path) -> None:
    """Published files leave out what is the default of the class, such as the activation of Gemma 3."""
    config = write_tower(name, tmp_path).config
    about, stated = tower_of(tmp_path, name)[0], json.loads((tmp_path / "config.json").read_text())
    for of, part in ((config, stated), (config.vision_config, stated["vision_config"])):
        for key, default in type(of)().to_dict().items():
            if (key in STATED_BESIDE or part is not stated) and key != "model_type" and part.get(key, ...) == default:
                del part[key]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert tower_of(tmp_path, name)[0] == about


def test_what_the_image_processor_says_is_in_the_file(tmp_path: Path) -> None:
    write_tower("idefics3", tmp_path / "idefics")
    sized = NORMALIZED | {"size": {"longest_edge": 96}}
    (tmp_path / "idefics" / "preprocessor_config.json").write_text(json.dumps(sized))
    assert tower_of(tmp_path / "idefics")[0]["clip.vision.preproc_image_size"] == 96
    write_tower("kimi_k25", tmp_path / "kimi")  # as its published files have it
    (tmp_path / "kimi" / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": NORMALIZED}))
    assert tower_of(tmp_path / "kimi")[0]["clip.vision.image_mean"] == NORMALIZED["image_mean"]


@pytest.mark.parametrize("name", ["gemma3", "lfm2_vl", "llava"])
def test_towers_have_the_names_of_published_files_too(name: str, tmp_path: Path) -> None:
    """Which earlier versions of transformers wrote."""
    write_tower(name, tmp_path)
    about, tensors = tower_of(tmp_path, name)
    rename_tensors(tmp_path, {"model.vision_tower.": "vision_tower.vision_model.", "model.multi_modal": "multi_modal"})
    published, found = tower_of(tmp_path, name)
    assert published == about and found.keys() == tensors.keys()
    assert all(np.array_equal(found[tensor], tensors[tensor]) for tensor in tensors)


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


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "kimi_k25", "qwen2_5_vl"])
def test_an_export_writes_the_tower_beside_the_text(name: str, tmp_path: Path) -> None:
    """Its matrices in F16, under the name that llama.cpp and Ollama take for a tower."""
    write_tower(name, tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "master", parse_recipe("bits: 6", "recipe"))
    command = {"export": str(tmp_path / "master"), "target": "gguf", "without_tokenizer": True, "name": "model"}
    run_command(command, tmp_path / "out")
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
    assert "image tower" in note and "hidden_act 'gelu_pytorch_tanh'" in note
    edit_config(tmp_path, {"vision_config": vision})
    (tmp_path / "preprocessor_config.json").unlink()
    (note,) = converted(tmp_path).notes
    assert "preprocessor_config.json, which says how images are normalized, is missing" in note


def image_features(name: str, model: Any, pixels: Array, patch: int) -> Array:
    """What transformers makes of an image, [vectors, width], as llama.cpp puts it into the text.

    pixels: [3, side, side]
    patch: the side of a patch
    """
    image = torch.from_numpy(pixels)[None]
    grid = torch.tensor([[1, *(side // patch for side in image.shape[2:])]])
    # [rows, columns, colors, height, width]
    patches = image[0].unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 0, 3, 4)
    flat = patches.permute(0, 1, 3, 4, 2).flatten(0, 1).flatten(1)[None]
    if name.startswith(("qwen", "minimax")):
        merged = patches.reshape(len(patches) // 2, 2, len(patches) // 2, 2, 3, 1, patch, patch)
        patches = merged.transpose(1, 2).expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(flat.shape[1], -1)
        found = model.model.get_image_features(patches, image_grid_thw=grid)
        levels = [
            level[0] if isinstance(level, list | tuple) else level
            for level in getattr(found, "deepstack_features", None) or []
        ]
        return torch.cat([torch.cat(list(found.pooler_output)), *levels], -1).numpy()
    if name in ("mistral3", "llava pixtral"):
        found = model.model.get_image_features(image, image_sizes=torch.tensor([image.shape[2:]]))
        vectors = torch.cat(list(found.pooler_output))
        vectors = vectors.reshape(math.isqrt(len(vectors)), -1, vectors.shape[-1])
        ends = model.model.language_model.embed_tokens.weight[9].expand(len(vectors), 1, -1)
        return torch.cat([vectors, ends], 1).flatten(0, 1)[:-1].numpy()
    if name == "llama4":
        return model.multi_modal_projector(model.vision_model(image).last_hidden_state)[0].numpy()
    features = model.model.get_image_features
    if name == "gemma4":
        columns, rows = map(torch.arange, (patches.shape[1], patches.shape[0]))
        places = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).reshape(1, -1, 2)
        return features(flat, image_position_ids=places).pooler_output[0].numpy()
    if name.startswith("kimi"):
        return features(patches.flatten(0, 1), image_grid_thw=grid).pooler_output[0].numpy()
    if name == "lfm2_vl":
        mask = torch.ones(flat.shape[:2], dtype=torch.long)
        return features(flat, spatial_shapes=grid[:, 1:], pixel_attention_mask=mask).pooler_output[0].numpy()
    return features(image[None] if name == "idefics3" else image).pooler_output[0].numpy()


def as_llama_cpp_orders(name: str, vectors: Array) -> Array:
    """The vectors of transformers in the order of llama.cpp, where it has another."""
    if name == "llama4":
        side = math.isqrt(len(vectors))
        return vectors.reshape(side, side, -1).swapaxes(0, 1).reshape(vectors.shape)
    return vectors[1:] if name == "llava" else vectors


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("qwen2_5_vl", {"fullatt_block_indexes": []}), ("qwen2_5_vl", {"window_size": 16}),
        ("qwen3_vl", {"deepstack_visual_indexes": [0]}),
        ("gemma4", {"patch_size": 5}), ("gemma4", {"rope_parameters": {"rope_theta": 1e4}}),
        ("gemma4", {"head_dim": 8}),
        ("kimi_k25", {"num_attention_heads": 3}), ("kimi_k25", {"pos_emb_width": 4}), ("lfm2_vl", {"num_patches": -1}),
        ("internvl", {"norm_type": "rms_norm"}), ("llama4", {"pixel_shuffle_ratio": 4}),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_leaves_the_tower_out(
    name: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    write_tower(name, tmp_path)
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    edit_config(tmp_path, {"vision_config": vision | changed})
    (note,) = [note for note in outline(tmp_path).notes if "image tower" in note]
    assert "\n" not in note and not outline(tmp_path).tower


@pytest.mark.parametrize("name", TOWERS)
def test_llama_cpp_makes_of_an_image_what_transformers_does(name: str, tmp_path: Path) -> None:
    """Matrices are in F16."""
    import llama_cpp  # whose libraries clip.cpp computes with

    assert llama_cpp
    model = write_tower(name, tmp_path / "model")
    patch = int(np.max(TOWERS[name][2]["patch_size"]))
    side = 10 * patch if name == "qwen2_5_vl" else 8 * patch  # not a multiple of the windows of 112 pixels
    pixels = gaussian(side, side, 3, seed=4)
    with torch.no_grad():
        expected = image_features(name, model, pixels.transpose(2, 0, 1).copy(), patch)
    path = write_tower_file(tmp_path)
    out = np.zeros(1 << 16, dtype=np.float32)
    arguments = (pixels.ctypes.data_as(ctypes.c_void_p), side, side, out.ctypes.data_as(ctypes.c_void_p), out.size)
    count = ctypes.CDLL(str(CLIP)).encode_image(str(path).encode(), *arguments)
    assert count == expected.size
    expected = as_llama_cpp_orders(name, expected)
    found = out[: expected.size].reshape(expected.shape)
    if "v.token_embd.img_break" in BESIDE[name]:  # clip.cpp adds it to what lay in memory times 0, which may be NaN
        ends = (expected == model.get_input_embeddings().weight[9].detach().numpy()).all(axis=1)
        found[ends] = np.where(np.isnan(found[ends]), expected[ends], found[ends])
    assert_near(found, expected, "clip.cpp, F16")


def write_tower_file(folder: Path) -> Path:
    """Write the file of the tower of a model in a folder beside it."""
    model = outline(folder / "model")
    writer = gguf.GGUFWriter(folder / "mmproj.gguf", "clip")
    for key, each in model.tower_metadata.items():
        if key != gguf.Keys.General.ARCHITECTURE:
            writer.add_key_value(key, each.value, each.type, each.sub_type)
    for tensor in model.tower:
        data = values_of(tensor).reshape(tensor.shape)
        writer.add_tensor(tensor.name, data.astype(np.float16) if tower_type(tensor)[0] == "F16" else data)
    finish(writer)
    return folder / "mmproj.gguf"
