"""GGUF files as others write them: keys that they leave out or that llama.cpp does not read, and other names.

They were found by running llama.cpp's converter on the models of gguf_cases.py.
"""

from __future__ import annotations

import json
import math
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import gguf_cases
import numpy as np
import pytest
import trained_tokenizers as trained
from commands import raises
from export_decoders import values_of
from gguf_files import write_gguf, write_llama
from tiny_gguf import edited

from pqweights.checkpoint.gguf.splits import SAME_PRE
from pqweights.checkpoint.storage import read_file
from pqweights.errors import SourceError
from pqweights.runtime.llama_library import GgufTokenizer
from pqweights.storage.sources import open_source

# What llama.cpp's own converter writes otherwise, without another meaning.
WRITTEN_OTHERWISE = [
    ("deepseek v2 lite", {"expert_weights_norm": None, "expert_gating_func": None}),
    ("deepseek v3 yarn", {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}),
    ("glm dsa", {"attention.indexer.types": [True] * 3, "expert_gating_func": None, "leading_dense_block_count": None}),
    ("deepseek v4", {"attention.compress_ratios": [0, 4, 128, 4, 0], "feed_forward_length": None}),
    ("hy v4", {"attention.indexer.types": [True, False, True, False], "swiglu_clamp_exp": [0.3] * 4}),
    ("mimo v2", {"leading_dense_block_count": None, "block_count": 7, "nextn_predict_layers": 3}),
    ("kimi linear", {"attention.value_length": 8}),
    ("step3p5", {"expert_group_count": 1, "expert_group_used_count": 1, "moe_every_n_layers": 1}),
    ("nemotron h moe", {"attention.layer_norm_rms_epsilon": None, "rope.dimension_count": 16}),
    ("gemma3n", {"activation_sparsity_scale": [1.6448536] * 10 + [-math.inf] * 15}),
    ("phi3", {"rope.scaling.original_context_length": 4096}),
    ("phi3 long", {"rope.scaling.type": None}),
    ("granite hybrid dense", {"expert_count": 0, "expert_used_count": 2, "expert_shared_feed_forward_length": 40}),
]


def with_keys(name: str, changed: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """The file of a case, and one with other values of keys."""
    gguf_cases.saved(gguf_cases.CASES[name], folder / "model")
    file = write_gguf(folder / "model")
    (file.parent / "config.json").unlink()
    prefix = gguf.GGUFReader(file).fields["general.architecture"].contents()
    (folder / "other").mkdir()
    return file, edited(file, folder / "other" / "m.gguf", **{f"{prefix}.{key}": of for key, of in changed.items()})


@pytest.mark.parametrize(("name", "changed"), WRITTEN_OTHERWISE, ids=str)
def test_what_other_writers_say_otherwise_is_the_same_model(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    ours, other = (open_source(file) for file in with_keys(name, changed, tmp_path))
    assert other.config == ours.config
    assert {t.name: t.shape for t in other.tensors} == {t.name: t.shape for t in ours.tensors}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("kimi linear", {"expert_gating_func": None}),
        ("mimo v2", {"attention.sliding_window_pattern": None}),
        ("glm dsa", {"attention.indexer.types": [True, False, True]}),
        ("hy v4", {"attention.indexer.types": [True, False, False, False]}),
        ("gemma3n", {"activation_sparsity_scale": [1.6448536] * 25}),
        ("deepseek v4", {"swiglu_clamp_exp": [0.5, 0.5, 0.5, 0.25]}),
        ("mistral4", {"attention.key_length_mla": None}),
    ],
    ids=str,
)
def test_what_says_another_model_is_refused(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    with raises(SourceError, next(iter(changed))):
        open_source(with_keys(name, changed, tmp_path)[1])


def test_a_type_that_computes_what_another_does_is_told_by_its_tokenizer(tmp_path: Path) -> None:
    gguf_cases.saved(gguf_cases.CASES["glm4 moe lite"], tmp_path / "model")
    (tmp_path / "src").mkdir()
    file = edited(write_gguf(tmp_path / "model"), tmp_path / "src" / "m.gguf", tokenizer__ggml__pre="glm4")
    config = open_source(file).config
    assert config is not None and config["architectures"] == ["Glm4MoeLiteForCausalLM"]


def test_what_a_configuration_may_not_say_is_refused_before_its_tensors_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pqweights.checkpoint.gguf.sources.read_settings", None)
    file = with_keys("llama", {"embedding_length": 2**25}, tmp_path)[1]
    with raises(SourceError, "hidden_size"):
        open_source(file)


def test_a_missing_kind_of_router_is_not_guessed(tmp_path: Path) -> None:
    """llama.cpp takes it for a softmax, and the router has the biases of a sigmoid."""
    with raises(SourceError, "m.gguf", "deepseek_v2"):
        open_source(with_keys("deepseek v3", {"expert_gating_func": None}, tmp_path)[1])


def test_dimensions_of_size_1_do_not_count(tmp_path: Path) -> None:
    gguf_cases.saved(gguf_cases.CASES["qwen2 moe"], tmp_path / "model")
    file = write_gguf(tmp_path / "model")
    (file.parent / "config.json").unlink()
    held = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    longer = {name: data[None] if "ffn_gate_inp_shexp" in name else data for name, data in held.items()}
    ours, changed = open_source(file), edited(file, tmp_path / "other" / "m.gguf", tensors=longer)
    other = {tensor.name: tensor for tensor in open_source(changed).tensors}
    for tensor in ours.tensors:
        assert (values_of(other[tensor.name]) == values_of(tensor)).all(), tensor.name


def test_gate_and_up_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    gguf_cases.saved(gguf_cases.CASES["mistral4"], tmp_path / "model")
    file = write_gguf(tmp_path / "model")
    (file.parent / "config.json").unlink()
    held = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    for name in [name for name in held if "ffn_gate_exps" in name]:
        joined = np.concatenate([held.pop(name), held.pop(name.replace("gate", "up"))], axis=1)
        held[name.replace("gate", "gate_up")] = joined
    (tmp_path / "other").mkdir()
    ours = open_source(file)
    other = {t.name: t for t in open_source(edited(file, tmp_path / "other" / "m.gguf", tensors=held)).tensors}
    assert other.keys() == {tensor.name for tensor in ours.tensors}
    for tensor in ours.tensors:
        assert (values_of(other[tensor.name]) == values_of(tensor)).all(), tensor.name


@pytest.mark.parametrize("pre", [pre for pre in SAME_PRE if pre != "glm5"])  # which the pinned llama.cpp lacks
def test_text_is_split_as_llama_cpp_splits_it_by_other_names(pre: str, tmp_path: Path) -> None:
    import transformers

    tokenizer = trained.KINDS[trained.SPLITS[SAME_PRE[pre]]]()
    trained.save(tokenizer, tmp_path / "model")
    file = write_gguf(write_llama(tmp_path / "model", rows=tokenizer.get_vocab_size()))
    (tmp_path / "src").mkdir()
    other = edited(file, tmp_path / "src" / "m.gguf", tokenizer__ggml__pre=pre)
    source = open_source(other)
    for name in source.companions:
        (tmp_path / name).write_bytes(read_file(source.storage, name))
    found, runtime = transformers.AutoTokenizer.from_pretrained(tmp_path), GgufTokenizer(other)
    for text in map(partial(unicodedata.normalize, "NFC"), (*trained.STRINGS, *trained.WITH_SPECIAL)):
        assert found(text)["input_ids"] == runtime(text)["input_ids"], text


@pytest.mark.parametrize(
    ("model", "pre"),
    [("gemma4", None), ("gpt2", "gemma4"), ("gpt2", "sarvam-moe"), ("gpt2", "granite-embed-multi-311m")],
)
def test_merges_of_characters_make_the_tokens_of_llama_cpp(model: str, pre: str | None, tmp_path: Path) -> None:
    """As published files of Gemma 4 have them; a token begins the text whatever they say of it."""
    import transformers

    tokenizer = trained.KINDS["gemma"]()
    trained.save(tokenizer, tmp_path / "model")
    stored = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]
    file = write_gguf(write_llama(tmp_path / "model", rows=tokenizer.get_vocab_size()))
    (tmp_path / "src").mkdir()
    fields = gguf.GGUFReader(file).fields
    texts, written = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
    texts = [text if text == " " else text.replace(" ", "\u2581") for text in texts]
    # llama.cpp splits lines first, as if no token went beyond one.
    merges = [pair for pair in stored["merges"] if {*"".join(pair)} == {"\n"} or "\n" not in "".join(pair)]
    merges = [pair for pair in merges if {*pair, "".join(pair)} <= {*texts}]
    changed = {"model": model, "pre": pre, "tokens": texts, "merges": [" ".join(pair) for pair in merges]}
    changed |= {"scores": None, "add_bos_token": False}
    changed["token_type"] = [gguf.TokenType.NORMAL if "\u2581" in t else k for t, k in zip(texts, written, strict=True)]
    other = edited(file, tmp_path / "src" / "m.gguf", **{f"tokenizer__ggml__{key}": of for key, of in changed.items()})
    source = open_source(other)
    for name in source.companions:
        (tmp_path / name).write_bytes(read_file(source.storage, name))
    found, runtime = transformers.AutoTokenizer.from_pretrained(tmp_path), GgufTokenizer(other)
    for text in (*trained.STRINGS, *trained.WITH_SPECIAL):
        assert found(text)["input_ids"] == runtime(text)["input_ids"], text
