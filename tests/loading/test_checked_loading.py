"""Masters with one wrong bit or without a file are not loaded; what transformers loads, load_model loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import language_models
import pytest
from commands import done, raises, refused
from damage import flip, stored_in
from helpers import Tensor, bf16, f32, gaussian, read_all, run_command, safetensors_bytes

import pqweights
from pqweights.errors import MasterError, PqweightsWarning

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

import torch  # noqa: E402
import transformers  # noqa: E402

WEIGHT = "model.layers.1.self_attn.k_proj.weight"
HEAD, NORM, MORE = "lm_head.weight", "model.norm.weight", "model.more"
LOADS: dict[str, Callable[[Path], Any]] = {
    "load_model": pqweights.load_model,
    "from_pretrained": transformers.AutoModelForCausalLM.from_pretrained,
    "packed": lambda folder: pqweights.load_model(folder, packed=True),
    "packed from_pretrained": lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder, packed=True),
}


@pytest.fixture
def master(base: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(families.master(base, "llama"), tmp_path / "master"))


# --- damage ---


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("name", [WEIGHT + "_codes", WEIGHT + "_norms", NORM])
def test_no_damaged_tensor_reaches_a_model(name, load, master):
    place = flip(master, name, at=-1 if name == NORM else 0)
    with raises(MasterError, place):
        load(master)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("packed", [False, True])
def test_stacks_of_experts_are_checked_whole(packed, family, base, tmp_path):
    """Transposed ones included."""
    folder = shutil.copytree(families.master(base, family), tmp_path / "master")
    place = flip(
        folder, [name for name in stored_in(folder) if ".experts." in name and name.endswith("_codes")][-1], -1
    )
    with raises(MasterError, place):
        pqweights.load_model(folder, packed=packed)


def test_tensors_that_a_model_does_not_use_are_not_read(master):
    place = flip(master, HEAD + "_codes")
    transformers.LlamaModel.from_pretrained(master)
    with raises(MasterError, place):
        transformers.LlamaForCausalLM.from_pretrained(master)


@pytest.mark.parametrize("command", [("generate", "--prompt", "w1"), ("generate", "--prompt", "w1", "--packed")])
def test_commands_name_the_damaged_tensor(command, base, tmp_path):
    source = language_models.with_tokenizer(families.build(families.FAMILIES["llama"], tmp_path / "source"))
    run_command({"quantize": str(source)}, tmp_path / "master")
    place = flip(tmp_path / "master", WEIGHT + "_codes")
    name, *options = command
    assert place in refused(name, tmp_path / "master", *options, "--max-tokens", 1)


# --- missing files ---


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[-1]


@pytest.mark.parametrize("load", [LOADS["load_model"], LOADS["from_pretrained"]])
@pytest.mark.parametrize("change", [-8, 8])
def test_weight_file_of_another_size_is_refused(change, load, master):
    size = shard(master).stat().st_size
    os.truncate(shard(master), size + change)
    with raises(MasterError, shard(master).name, size, size + change):
        load(master)


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "model.safetensors.index.json"])
def test_missing_files_are_refused(name, master):
    (master / name).unlink()
    with raises(MasterError, name):
        pqweights.load_model(master)


@pytest.mark.parametrize("content", [None, "damaged"])
def test_master_without_a_readable_manifest_is_loaded(content, master):
    (master / "pqweights.json").unlink()
    if content is not None:
        (master / "pqweights.json").write_text(content)
    with pytest.warns(PqweightsWarning, match=r"pqweights\.json"):
        assert pqweights.load_model(master).num_parameters() > 0


def test_small_files_may_be_missing_or_edited(master):
    (master / "generation_config.json").unlink(missing_ok=True)
    config = master / "config.json"
    config.write_text(config.read_text() + "\n")
    assert pqweights.load_model(master).num_parameters() > 0


# --- what transformers loads ---


def changed(base: Path, folder: Path, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> tuple[Path, Path]:
    """A checkpoint with other tensors and settings, and its master."""
    source = Path(shutil.copytree(families.model(base, "llama"), folder / "source"))
    (file,) = source.glob("*.safetensors")
    tensors = read_all(source)
    change(tensors)
    file.write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    settings = json.loads((source / "config.json").read_bytes()) | config
    (source / "config.json").write_text(json.dumps(settings))
    run_command({"quantize": str(source)}, folder / "master")
    return source, folder / "master"


def without_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)
    del tensors[HEAD]


INV_FREQ = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": f32(gaussian(32)) for n in (0, 1)}
MTP = {"mtp.layers.0.self_attn.q_proj.weight": bf16(gaussian(256, 256))}
NOT_THERE, NO_PLACE = "weight of LlamaForCausalLM is not in the folder", "has no place in LlamaForCausalLM"
# What is changed, in tensors and configuration, and what is said of it.
CASES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], dict[str, Any], str | None]] = {
    "as it is": (lambda t: None, {}, None),
    "no head": (lambda t: t.pop(HEAD), {}, f"{NOT_THERE}: '{HEAD}'"),
    "no head, which is tied": (lambda t: t.pop(HEAD), {"tie_word_embeddings": True}, None),
    "a head that is not the tied one": (lambda t: None, {"tie_word_embeddings": True}, None),
    "no norm": (lambda t: t.pop(NORM), {}, f"{NOT_THERE}: '{NORM}'"),
    "no layer": (lambda t: [t.pop(n) for n in list(t) if ".layers.1." in n], {}, r"input_layernorm.weight' and 8 more"),
    "old buffers": (lambda t: t.update(INV_FREQ), {}, None),
    "more": (lambda t: t.update({MORE: f32(gaussian(4))}), {}, f"{NO_PLACE}: '{MORE}'"),
    "a head that predicts more": (lambda t: t.update(MTP), {}, NO_PLACE),
    "a base model": (without_prefix, {}, NOT_THERE),
    "a base model that says so": (without_prefix, {"architectures": ["LlamaModel"]}, None),
    "another head": (lambda t: t.pop(HEAD), {"architectures": ["LlamaForSequenceClassification"]}, "'score.weight'"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_loads_is_loaded_with_its_warning(case, base, tmp_path):
    change, config, expected = CASES[case]
    source, master = changed(base, tmp_path, change, **config)
    own = getattr(transformers, config.get("architectures", ["LlamaForCausalLM"])[0])
    theirs, info = own.from_pretrained(source, output_loading_info=True)
    for folder, options in ((source, {}), (master, {}), (master, {"packed": True})):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", PqweightsWarning)
            ours = pqweights.load_model(folder, **options)
        said = [str(each.message) for each in heard if each.category is PqweightsWarning]
        assert type(ours) is type(theirs) and ours.state_dict().keys() == theirs.state_dict().keys()
        assert bool(said) == bool(info["missing_keys"] or info["unexpected_keys"]) == (expected is not None)
        assert len(said) <= 1 and all(re.search(str(expected), line) and str(folder) in line for line in said)
        _, of_master = own.from_pretrained(folder, output_loading_info=True)
        assert of_master == info
        if folder == source:
            given = theirs.state_dict().keys() - info["missing_keys"]
            assert all(torch.equal(ours.state_dict()[name], theirs.state_dict()[name]) for name in given)


def test_shapes_that_differ_are_the_callers_choice(base, tmp_path):
    _, master = changed(base, tmp_path, lambda t: t.update({HEAD: bf16(gaussian(512, 128))}))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        pqweights.load_model(master)
    with pytest.warns(PqweightsWarning, match=HEAD):
        pqweights.load_model(master, ignore_mismatched_sizes=True)


def test_commands_compute_without_what_has_no_place_and_not_with_random_weights(base, tmp_path):
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 " * 40)
    source, master = changed(base, tmp_path / "more", lambda t: t.update({MORE: f32(gaussian(4))}))
    _, headless = changed(base, tmp_path / "less", lambda t: t.pop(HEAD))
    for folder in (source, master, headless):
        families.save_tokenizer(folder)
    for folder in (source, master):
        said = done("generate", folder, "--prompt", "w1", "--max-tokens", 1).stderr
        assert f"WARNING: {folder}: " in said and MORE in said
    assert HEAD in refused("generate", headless, "--prompt", "w1", "--max-tokens", 1)
