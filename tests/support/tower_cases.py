"""Tiny models of images and text of every type whose tower llama.cpp has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_cases
import torch
import transformers
from gguf_files import edit_config
from helpers import read_all, write_checkpoint

VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT |= {"image_size": 32, "patch_size": 4}
CASES = gguf_cases.CASES
DEEPSEEK = CASES["deepseek v3"].settings | {"model_type": "deepseek_v3"}
LLAMA = {"model_type": "llama"}
FULL = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
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
        QWEN | {"patch_size": 14, "fullatt_block_indexes": [1, 3]}, {},
    ),
    "qwen3_vl": (
        "Qwen3VL", gguf_cases.WIDE_HEADS | {"rope_parameters": ROPE | {"mrope_section": [6, 5, 5]}},
        QWEN | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}, {},
    ),
    "mistral3": (
        "Mistral3", gguf_cases.WIDE_HEADS | {"model_type": "mistral"},
        VIT | {"model_type": "pixtral", "head_dim": 16}, {"spatial_merge_size": 2},
    ),
    "llava pixtral": ("Llava", LLAMA, VIT | {"model_type": "pixtral", "head_dim": 16}, FULL),
    "llava": ("Llava", LLAMA, VIT | {"model_type": "clip_vision_model"}, {"vision_feature_layer": -2}),
    "gemma4": (
        "Gemma4", CASES["gemma4"].settings, VIT | {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2,
        "position_embedding_size": 16, "use_clipped_linears": True, "standardize": True}, {"audio_config": None},
    ),
    "llama4": (
        "Llama4", CASES["llama4"].settings, VIT | {"projector_input_dim": 40, "projector_output_dim": 40,
        "vision_output_dim": 40, "intermediate_size": 128}, {},
    ),
    "kimi_k25": ("Kimi_K25", DEEPSEEK, VIT | {"pos_emb_height": 8, "pos_emb_width": 8}, {"projection_hidden_size": 32}),
    # transformers has no such class, and the tower is that of Kimi K2.5.
    "kimi_vl": ("Kimi_K25", DEEPSEEK, VIT | {"pos_emb_height": 8, "pos_emb_width": 8}, {"projection_hidden_size": 32}),
    "lfm2_vl": (
        "Lfm2Vl", CASES["lfm2"].settings | {"model_type": "lfm2"},
        VIT | {"model_type": "siglip2_vision_model", "num_patches": 64}, {"projector_hidden_size": 48},
    ),
    "idefics3": ("Idefics3", LLAMA, VIT, {"scale_factor": 2, "tie_word_embeddings": False}),
    "step3p7": (
        "Step3p7", CASES["step3p5"].settings | {"rope_parameters": CASES["step3p5"].rope},
        VIT | {"mlp_ratio": 1.5, "max_position_embeddings": 64}, {},
    ),
    "minimax_m3_vl": (
        "MiniMaxM3VL", CASES["minimax m3"].settings | {"rope_parameters": ROPE | CASES["minimax m3"].rope}, VIT,
        {"projector_hidden_size": 48},
    ),
    "internvl": ("InternVL", {"model_type": "qwen2"}, VIT | {"image_size": [32, 32], "patch_size": [4, 4]}, {}),
}  # fmt: skip
# Of these the tower is that of qwen3_vl, beside another text model.
_QWEN35 = QWEN | {"num_position_embeddings": 64, "deepstack_visual_indexes": []}
ALIKE: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl_moe": (
        "Qwen3VLMoe", CASES["qwen3 moe"].settings | {"rope_parameters": ROPE | {"mrope_section": [6, 5, 5]}},
        QWEN | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}, {},
    ),
    "qwen3_5": ("Qwen3_5", CASES["qwen3_5"].settings, _QWEN35, {}),
    "qwen3_5_moe": ("Qwen3_5Moe", CASES["qwen3_5 moe"].settings, _QWEN35, {}),
}  # fmt: skip
# The names of Kimi's published files, which transformers reads and does not write; those of Kimi-VL.
PUBLISHED = {
    "kimi_k25": {"model.blocks": "model.layers", "vision_tower.encoder.patch": "vision_tower.patch", "model.mm_": "mm_"}
}
PUBLISHED["kimi_vl"] = PUBLISHED["kimi_k25"] | {
    "mm_projector": "multi_modal_projector", "proj.0": "linear_1", "proj.2": "linear_2"
}  # fmt: skip
MOONVIT = {key: value for key, value in VIT.items() if key != "image_size"} | {
    "model_type": "moonvit", "init_pos_emb_height": 8, "init_pos_emb_width": 8, "merge_kernel_size": [2, 2],
}  # fmt: skip
NORMALIZED = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.25, 0.5, 0.5]}


def write_tower(name: str, folder: Path) -> Any:
    """Write a tiny model of images and text, with gains and biases that are not those that it starts with."""
    class_name, text, vision, outer = {**TOWERS, **ALIKE}[name]
    torch.manual_seed(2)
    config = getattr(transformers, f"{class_name}Config")(
        text_config=gguf_cases.SETTINGS | text, vision_config=vision, **outer
    )
    sparse = "Sparse" if class_name == "MiniMaxM3VL" else ""
    stem = class_name.removesuffix("VL") if sparse else class_name
    model = getattr(transformers, f"{stem}{sparse}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.std() < 0.2:  # so that attention is to some more than to others
                parameter.mul_(0.2 / parameter.std())
        for buffer_name, buffer in model.named_buffers():  # of Gemma 4
            if buffer_name.endswith(("_min", "_max")):
                buffer.fill_(0.6 if buffer_name.endswith("_max") else -0.5)
            elif ".std_" in buffer_name:
                buffer.normal_()
    model.save_pretrained(folder)
    if name in PUBLISHED:
        rename_tensors(folder, PUBLISHED[name])
        edit_config(folder, {"model_type": name})
    if name == "kimi_vl":
        edit_config(folder, {"architectures": ["KimiVLForConditionalGeneration"], "vision_config": MOONVIT})
    (folder / "preprocessor_config.json").write_text(json.dumps(NORMALIZED))
    if "pixtral" in str(vision.get("model_type")):
        token = {"id": 9, "content": "[IMG_BREAK]"}
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [token]}))
    return model


def rename_tensors(folder: Path, names: dict[str, str]) -> None:
    renamed = {}
    for name, value in read_all(folder).items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = value
    write_checkpoint(folder, renamed)
