"""A text model and the tower beside it, two GGUF files, read as the one model that they were made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from closeness import F32_FEW, approx, each_near, rounding
from commands import done, refused
from export_decoders import values_of
from gguf_files import write_both
from test_gguf_alone import APART, assert_same, resolved
from tiny_gguf import edited
from tower_cases import ALIKE, NORMALIZED, TOWERS, write_tower

from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.storage import read_file
from pqweights.models.wholes import WHOLES
from pqweights.storage.sources import open_source

# What the files do not say, and has no meaning for what is computed.
UNSTATED = {
    *("image_token_index", "boi_token_index", "eoi_token_index", "image_token_id", "video_token_id", "model_type"),
    *("vision_start_token_id", "vision_end_token_id", "boi_token_id", "eoi_token_id", "image_seq_length"),
    # Of a part that no model of images has; of a width that is computed.
    *("vision_use_head", "intermediate_size", "block_auto_adjust_ff_dim"),
}
READ = [name for name in (*TOWERS, *ALIKE) if name in {whole.tower for whole in WHOLES}]


@pytest.mark.parametrize("name", READ)
def test_a_tower_and_its_text_model_are_the_original(name: str, tmp_path: Path) -> None:
    write_tower(name, tmp_path / "model")
    source = open_source(write_both(tmp_path / "model", tmp_path / "src"))
    (remark, *others) = source.remarks
    assert "mmproj-F32.gguf is read as" in remark and not others, others
    original = {tensor.name: tensor for tensor in open_local(tmp_path / "model").tensors}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    if config.get("tie_word_embeddings"):
        original.pop("lm_head.weight", None)
    unread = {tensor for tensor in original if ".head." in tensor or (name == "llava" and "post_layernorm" in tensor)}
    assert {tensor.name for tensor in source.tensors} == original.keys() - unread
    for tensor in source.tensors:
        expected = values_of(original[tensor.name])
        if name == "qwen3_vl_moe" and ".experts." in tensor.name:  # as published, which transformers turns back
            expected = expected.swapaxes(1, 2)
        assert tensor.shape == expected.shape
        assert each_near(values_of(tensor), expected, 0, rounding("F32", 8 if "A_log" in tensor.name else 2)), (
            tensor.name
        )
    assert source.config is not None and source.config["architectures"] == config["architectures"]
    made = json.loads(read_file(source.storage, "preprocessor_config.json"))
    assert {key: approx(value, F32_FEW) for key, value in made.items() if key != "size"} == NORMALIZED
    if name == "kimi_vl":  # whose class is not in transformers
        assert config["vision_config"].items() <= source.config["vision_config"].items()
        return
    found, stated = resolved(source.config), resolved(config)
    for key in stated.keys() - UNSTATED:
        if not key.endswith("_config"):
            assert_same(found[key], stated[key], key)
    for part in ("text_config", "vision_config"):
        (one, known), (other, _) = (part_of(of, part) for of in (source.config, config))
        for key in (known & other.keys()) - UNSTATED:
            if key.startswith("swiglu_limits"):  # none is 0 in the file, which is none to transformers, too
                one[key], other[key] = ([limit or 0.0 for limit in of[key]] for of in (one, other))
            if key != "tie_word_embeddings":  # which the whole model says
                assert_same(one.get(key), other[key], f"{part} {key}")


def part_of(config: dict[str, Any], part: str) -> tuple[dict[str, Any], set[str]]:
    """A part of a configuration as transformers has it, and the keys that it knows."""
    import transformers

    whole = getattr(transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config), part)
    return whole.to_dict(), type(whole)().to_dict().keys() - {*APART}


@pytest.mark.parametrize("of_master", [False, True])
def test_both_files_come_out_again(of_master: bool, tmp_path: Path) -> None:
    write_tower("gemma3", tmp_path / "model")
    source = write_both(tmp_path / "model", tmp_path / "src")
    said = json.loads(done("plan", source, "--json").stdout)["warnings"]
    assert any("mmproj-F32.gguf" in line for line in said)
    given = source / "model-F32.gguf"
    if of_master:
        done("quantize", source, tmp_path / "master")
        done("verify", tmp_path / "master")
        given = tmp_path / "master"
    done("export", given, tmp_path / "out", "-t", "gguf", "--type", "f16", "--without-tokenizer", "--name", "m")
    for file, new in (("model-F32", "m-F16"), ("mmproj-F32", "mmproj-m-F16")):
        first, found = (gguf.GGUFReader(path) for path in (source / f"{file}.gguf", tmp_path / "out" / f"{new}.gguf"))
        assert {tensor.name for tensor in first.tensors} == {tensor.name for tensor in found.tensors}
        for key in first.fields.keys() - {"general.name", "general.file_type", "general.size_label"}:
            if not key.startswith("GGUF."):
                assert found.fields[key].contents() == first.fields[key].contents(), key


@pytest.mark.parametrize(
    ("tower", "changed", "named"),
    [
        ("qwen2_vl", {}, "qwen2vl_merger"),
        ("gemma3", {"clip__vision__embedding_length": 48}, "v.patch_embd.weight"),
        ("gemma3", {"clip__vision__projection_dim": 48}, "projection_dim"),
        ("gemma3", {"clip__vision__attention__layer_norm_epsilon": None}, "layer_norm_epsilon"),
        ("gemma3", {"clip__vision__new": 7}, "clip.vision.new"),
        ("gemma3", {"clip__has_audio_encoder": True}, "audio"),
        ("gemma3", {"clip__use_gelu": False}, "gelu"),
        ("gemma3", {"clip__vision__block_count": 2**31 - 1}, "num_hidden_layers"),
        ("gemma3", {"clip__vision__patch_size": 2**31 - 1}, "patch_size"),
    ],
)
def test_a_tower_that_does_not_fit_is_left_out_and_said(
    tower: str, changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_tower("gemma3", tmp_path / "model")
    source = write_both(tmp_path / "model", tmp_path / "src")
    if tower != "gemma3":
        write_tower(tower, tmp_path / "other")
        shutil.copy(write_both(tmp_path / "other", tmp_path / "others") / "mmproj-F32.gguf", source)
    else:
        edited(source / "mmproj-F32.gguf", tmp_path / "edited" / "m.gguf", **changed)
        shutil.copy(tmp_path / "edited" / "m.gguf", source / "mmproj-F32.gguf")
    opened = open_source(source)
    assert opened.config is not None and opened.config["model_type"] == "gemma3_text"
    (remark,) = opened.remarks
    assert "mmproj-F32.gguf" in remark and "left out" in remark and named in remark and "\n" not in remark
    assert "mmproj-F32.gguf" in opened.left_out


def test_the_most_precise_of_several_towers_is_read(tmp_path: Path) -> None:
    write_tower("gemma3", tmp_path / "model")
    source = write_both(tmp_path / "model", tmp_path / "src")
    shutil.copy(write_both(tmp_path / "model", tmp_path / "half", "F16") / "mmproj-F16.gguf", source)
    opened = open_source(source / "model-F32.gguf")
    assert opened.weight_files == ("model-F32.gguf", "mmproj-F32.gguf") and "mmproj-F16.gguf" in opened.left_out


def test_a_tower_alone_is_no_model(tmp_path: Path) -> None:
    write_tower("gemma3", tmp_path / "model")
    source = write_both(tmp_path / "model", tmp_path / "src")
    assert "mmproj-F32.gguf" in refused("plan", source / "mmproj-F32.gguf")
