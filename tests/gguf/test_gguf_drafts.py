"""Layers that predict further tokens: they are in the file, and llama.cpp computes the same with them as without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf_cases
import numpy as np
import pytest
from closeness import assert_near, each_near, rounding
from export_decoders import values_of
from gguf_files import all_values, converted, metadata, write_gguf
from helpers import Tensor, as_float32, f32, gaussian, read_all, write_checkpoint

from pqweights.checkpoint.gguf.model import gguf_model
from pqweights.checkpoint.source import open_local
from pqweights.models.conventions import DRAFTS
from pqweights.runtime.models import open_model
from pqweights.storage.sources import open_source

# What a layer has beside one of the model, as DeepSeek and GLM publish it behind the last one, and Qwen below `mtp`.
BEHIND = {
    "eh_proj": "layers.{}.eh_proj", "enorm": "layers.{}.enorm", "hnorm": "layers.{}.hnorm",
    "shared_head_norm": "layers.{}.shared_head.norm", "shared_head_head": "layers.{}.shared_head.head",
    "embed_tokens": "layers.{}.embed_tokens",
}  # fmt: skip
BELOW = {
    "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head_norm": "mtp.norm",
}  # fmt: skip
# Of Nemotron-H, where attention and experts are layers of their own.
FOLDED = {
    "eh_proj": "mtp.layers.0.eh_proj", "enorm": "mtp.layers.0.enorm", "hnorm": "mtp.layers.0.hnorm",
    "shared_head_norm": "mtp.layers.1.final_layernorm",
}  # fmt: skip
# As llama.cpp's conversion/hunyuan.py expects those of HY V3.
NORM_BEHIND = {part: BEHIND[part] for part in ("eh_proj", "enorm", "hnorm")}
NORM_BEHIND["shared_head_norm"] = "layers.{}.final_layernorm"
# And conversion/step3.py those of Step 3.5.
IN_TRANSFORMER = {part: name.replace("shared_head", "transformer.shared_head") for part, name in BEHIND.items()}
IN_TRANSFORMER["shared_head_head"] = "layers.{}.transformer.shared_head.output"
PUBLISHED = {
    "glm4 moe": BEHIND, "glm4 moe lite": BEHIND, "glm dsa": BEHIND, "deepseek v3": BEHIND, "deepseek v3.2": BEHIND,
    "qwen3 next": BELOW, "qwen3_5": BELOW, "qwen3_5 moe": BELOW, "exaone moe": BELOW, "hy v3": NORM_BEHIND,
    "step3p5": IN_TRANSFORMER, "nemotron h moe": FOLDED, "nemotron h latent": FOLDED,
}  # fmt: skip


DENSE = ("exaone moe",)  # the layer has no experts, and is like the first one


def add_draft_layer(folder: Path, parts: dict[str, str], *, like: int) -> dict[str, Tensor]:
    """Add a layer that predicts further tokens, with the weights of another; return what it has beside those."""
    tensors = read_all(folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    hidden, rows = text["hidden_size"], text["vocab_size"]
    layers = text.get("num_hidden_layers") or len(text["layers_block_type"])
    text["mtp_layer_types"] = ["sliding_attention"]
    shapes = {"eh_proj": (hidden, 2 * hidden), "embed_tokens": (rows, hidden), "shared_head_head": (rows, hidden)}
    own = {part: f32(gaussian(*shapes.get(part, (hidden,)), seed=9)) for part in parts}
    path = "" if parts in (BELOW, FOLDED) else "model."
    added = {f"{path}{parts[part].format(layers)}.weight": value for part, value in own.items()}
    copies = {f"model.layers.{like}.": "mtp.layers.0." if parts is BELOW else f"model.layers.{layers}."}
    if parts is FOLDED:
        copies = {f"backbone.layers.{like - 1 + half}.": f"mtp.layers.{half}." for half in range(2)}
    for other, copied in copies.items():
        added |= {name.replace(other, copied): value for name, value in tensors.items() if name.startswith(other)}
    shutil.rmtree(folder)
    write_checkpoint(folder, tensors | added, config=config)
    return own


@pytest.mark.parametrize("name", PUBLISHED)
def test_draft_layers_are_blocks_behind_the_last_one(name: str, tmp_path: Path) -> None:
    """Beside which the model's own tensors, and what llama.cpp computes with them, stay as they were."""
    import llama_cpp

    case = gguf_cases.CASES[name]
    expected = gguf_cases.logits(gguf_cases.saved(case, tmp_path), ids := gguf_cases.token_ids(40))
    without = converted(tmp_path)
    layers = metadata(without)[f"{without.architecture}.block_count"]
    like = 0 if name in DENSE else layers - 1
    own = add_draft_layer(tmp_path, PUBLISHED[name], like=like)
    model = converted(tmp_path)
    assert metadata(model)[f"{model.architecture}.block_count"] == layers + 1
    assert metadata(model)[f"{model.architecture}.nextn_predict_layers"] == 1 and model.left_out == without.left_out
    found, offset = all_values(model), np.float32(name.startswith(("qwen", "step")))  # of its norms
    for part, value in own.items():
        stored = as_float32(value) + (offset if part.endswith("norm") else 0)
        np.testing.assert_array_equal(found.pop(f"blk.{layers}.nextn.{part}.weight"), stored)
    for tensor, value in all_values(without).items():
        np.testing.assert_array_equal(found[tensor], value)
        of_layer = like - 1 if PUBLISHED[name] is FOLDED and tensor.startswith(f"blk.{like - 1}.") else like
        if tensor.startswith(f"blk.{of_layer}."):
            same = tensor.replace(f".{of_layer}.", f".{layers}.", 1)
            same = (
                same.replace("attn_norm", "post_attention_norm")
                if (of_layer, PUBLISHED[name]) == (like, FOLDED)
                else same
            )
            np.testing.assert_array_equal(found[same], value)
    path = write_gguf(tmp_path)
    logits = open_model(path).logits(np.array(ids), len(ids))
    assert_near(logits, expected, "llama.cpp, states")
    parameters = llama_cpp.llama_model_default_params()
    parameters.load_mtp = True
    loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    assert loaded  # with shapes that it has been told of
    llama_cpp.llama_model_free(loaded)


def test_parts_of_a_draft_layer_are_left_out(tmp_path: Path) -> None:
    gguf_cases.saved(gguf_cases.CASES["glm4 moe"], tmp_path)
    expected = converted(tmp_path)
    add_draft_layer(tmp_path, {part: name for part, name in BEHIND.items() if part != "hnorm"}, like=2)
    model = converted(tmp_path)
    assert model.metadata == expected.metadata
    assert model.left_out and all("further tokens" in reason for reason in model.left_out.values())


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in ("glm dsa", "deepseek v3.2", "step3p5")])
def test_draft_layers_of_a_file_alone_have_the_names_of_the_original(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    gguf_cases.saved(gguf_cases.CASES[name], model)
    layers = metadata(without := converted(model))[f"{without.architecture}.block_count"]
    add_draft_layer(model, PUBLISHED[name], like=0 if name in DENSE else layers - 1)
    file = tmp_path / "alone" / "m.gguf"
    file.parent.mkdir()
    write_gguf(model).rename(file)
    source, original = open_source(file), {tensor.name: tensor for tensor in open_local(model).tensors}
    assert {tensor.name for tensor in source.tensors} == original.keys()
    for tensor in source.tensors:
        assert each_near(values_of(tensor), values_of(original[tensor.name]), 0, rounding("F32", 2)), tensor.name
    assert source.config is not None
    assert [source.config[key] for key in DRAFTS if key in source.config] == [1]
    again, first = gguf_model(source, name="tiny"), converted(model)
    assert again.metadata.keys() == first.metadata.keys()
    assert {tensor.name for tensor in again.tensors} == {tensor.name for tensor in first.tensors}
