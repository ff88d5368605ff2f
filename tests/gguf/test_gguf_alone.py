"""GGUF files with nothing beside them: configuration and tokenizer are those of the model that they were made from."""

from __future__ import annotations

import json
import math
import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gguf_cases
import numpy as np
import pytest
import trained_tokenizers as trained
from closeness import F32_MATRIX, F32_SUM, approx, each_near, rounding
from commands import done, raises, refused
from export_decoders import values_of
from gguf_files import converted, metadata, write_gguf, write_llama
from helpers import Tensor, write_checkpoint
from tiny_gguf import edited

import pqweights
from pqweights.checkpoint.gguf.model import architecture_name
from pqweights.checkpoint.gguf.sources import ALONE
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.checkpoint.storage import read_file
from pqweights.errors import SourceError
from pqweights.models.qwen import TEXT_PARTS
from pqweights.models.table import MODELS
from pqweights.storage.sources import open_source

FAMILIES = (
    *("llama", "llama with biases, tied", "llama linear", "llama llama3", "llama yarn", "llama yarn factor"),
    *("mixtral", "qwen2", "qwen2 moe", "qwen3", "qwen3 moe", "gemma", "gemma2", "gemma3", "gemma3 layers"),
    *("olmo2", "olmo3", "smollm3", "arcee", "seed_oss", "exaone4", "exaone4 windows", "ministral3"),
    *("ministral3 llama3", "phi3", "granite"),
    *("starcoder2", "stablelm", "cohere", "cohere2", "glm4", "ernie4_5", "olmoe", "hunyuan moe", "ernie4_5 moe"),
    *("dots1", "glm4 moe", "exaone moe", "minimax m2", "hy v3", "gpt-oss", "qwen3 next", "qwen3_5", "qwen3_5 moe"),
    *("llama4", "lfm2 moe", "granite moe", "granite moe shared", "granite hybrid", "gemma3n", "gemma4", "gemma4 moe"),
    *("deepseek v2 lite", "deepseek v3", "deepseek v3 yarn", "deepseek v3.2", "deepseek v4", "deepseek v4 yarn"),
    *("glm dsa", "hy v4", "mistral4", "qwen4 exp"),
)
QWEN4 = gguf_cases.CASES["qwen4 exp"]
AS_READ = gguf_cases.CASES | {
    # As it is published, and llama.cpp rounds the bounds of YaRN all the same.
    "gpt-oss": replace(gguf_cases.CASES["gpt-oss"], rope=gguf_cases.YARN | {"truncate": False}),
    # A file does not say in how many shards the table of n-grams was.
    "qwen4 exp": replace(QWEN4, settings=QWEN4.settings | {"split_ngram_parts": 1}),
}
# What transformers computes from the configuration if it is not stored.
COMPUTED = ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")
# What has no meaning for what a model computes, or is in the tokenizer's files, which these models have none of.
APART = (
    *("architectures", "transformers_version", "initializer_range", "_name_or_path", "dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id"),
    *("moe_intermediate_size", "rotary_dim"),  # of types that have these beside what they read
)


def alone(file: Path, folder: Path) -> Path:
    """A folder with a GGUF file and nothing else."""
    folder.mkdir()
    return Path(shutil.copy(file, folder / "m.gguf"))


def resolved(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as transformers' class of it has it."""
    import transformers

    of_type = transformers.CONFIG_MAPPING[config["model_type"]]
    # JSON has no infinity, which is the default.
    whole = of_type.from_dict({key: value for key, value in config.items() if key != "time_step_limit"}).to_dict()
    known = of_type().to_dict().keys() | {"head_dim"}
    return {key: value for key, value in whole.items() if key in known and key not in APART}


def plain(tensor: Any) -> Tensor:
    """The dtype and the values of a tensor, whole numbers as they are."""
    if tensor.dtype != "I64":
        return "F32", values_of(tensor)
    raw = np.empty(8 * math.prod(tensor.shape), dtype=np.uint8)
    tensor.read(0, math.prod(tensor.shape), "I64", raw)
    return "I64", raw.view(np.int64).reshape(tensor.shape)


def assert_same(found: Any, expected: Any, key: str) -> None:
    """Numbers of a file are in float32."""
    if isinstance(expected, dict):  # keys that the class does not know have no meaning
        assert found.keys() >= expected.keys() and (found.keys() == expected.keys() or "." not in key), key
        for inner in expected:
            assert_same(found[inner], expected[inner], f"{key}.{inner}")
    elif isinstance(expected, float):
        assert found == approx(expected, F32_SUM), key
    else:
        assert found == expected, key


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_of_a_file_alone_is_the_original(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    gguf_cases.saved(AS_READ[name], model)
    config = json.loads((model / "config.json").read_text())
    source = open_source(alone(write_gguf(model, "F32"), tmp_path / "src"))
    assert source.config is not None and source.config["architectures"] == config["architectures"]
    assert_same(resolved(source.config), resolved(config), name)
    original = {of.name: of for of in open_local(model).tensors if not of.name.endswith(COMPUTED)}
    if config.get("tie_word_embeddings"):
        original.pop("lm_head.weight", None)
    assert {tensor.name for tensor in source.tensors} == original.keys()
    for tensor in source.tensors:
        (dtype, found), (_, expected) = plain(tensor), plain(original[tensor.name])
        logarithm = rounding("F32", 1) if tensor.name.endswith("A_log") else 0  # which is rounded at its own size
        assert each_near(found, expected, logarithm, rounding("F32", 2)), tensor.name
        assert (dtype == "I64") == (original[tensor.name].dtype == "I64")


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        # The same model by another type, of which llama.cpp knows nothing.
        ("mistral", {"model_type": "llama"}),
        # A head of its own with the values of the embeddings, and a window that is as long as the context.
        ("qwen2 moe tied", {"tie_word_embeddings": False}),
        ("gemma2 full", {"sliding_window": 512}),
        # Factors and bases as they come out.
        ("phi3 long", {"original_max_position_embeddings": 64}),
        ("phi3 short", {"original_max_position_embeddings": 256}),
        ("llama yarn mscale", {"model_type": "llama"}),
        ("hunyuan", {"rope_theta": 648985.0}),
        # The width that LFM 2 computes, periods of kinds with one layer, a model without experts.
        ("lfm2", {"intermediate_size": 256}),
        ("jamba", {"attn_layer_period": 4, "expert_layer_period": 4}),
        ("granite hybrid dense", {"num_local_experts": 0}),
        # Weights that are multiplied already.
        ("falcon h1", {"key_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0]}),
        ("glm4 moe lite", {"model_type": "deepseek_v3"}),
        ("nemotron h", {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}),
        ("nemotron h moe", {"layers_block_type": ["linear_attention", "full_attention", "moe"]}),
        ("nemotron h latent", {"moe_latent_size": 32}),
        # A type whose class is that of DeepSeek, and text parts.
        ("kimi k2", {"model_type": "deepseek_v3"}),
        ("minimax m3", {"model_type": "minimax_m3_vl_text", "mlp_layer_types": ["dense", "sparse", "sparse"]}),
        ("step3p5", {"model_type": "step3p5", "moe_layers_enum": "1,2,3", "rope_theta": [5e5, 1e4, 1e4, 1e4]}),
        # As published files have them, and transformers writes them otherwise.
        ("kimi linear", {"model_max_length": 512, "num_experts_per_token": 2}),
        ("mimo v2", {"sliding_window": 33, "swa_num_key_value_heads": 4, "attention_value_scale": 0.707}),
        # The text models of models that also see or hear.
        ("qwen2 vl", {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2}),
        ("qwen2_5 vl", {"model_type": "qwen2"}),
        ("qwen3 vl", {"model_type": "qwen3", "head_dim": 32}),
        ("qwen3 vl moe", {"model_type": "qwen3_moe", "norm_topk_prob": True}),
        ("phi4mm", {"model_type": "phi3", "original_max_position_embeddings": 64}),
        ("phi4 multimodal", {"model_type": "phi3"}),
    ],
)
def test_what_a_file_does_not_say_is_computed_alike(name: str, differs: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    model = tmp_path / "model"
    original = gguf_cases.saved(gguf_cases.CASES[name], model)
    source = open_source(alone(write_gguf(model, "F32"), tmp_path / "src"))
    assert source.config is not None and differs.items() <= source.config.items()
    of_model = getattr(original.config, "time_step_min", None)
    config = {**source.config, **({} if of_model is None else {"time_step_min": of_model}), "dtype": "float32"}
    of_class = getattr(transformers, config["architectures"][0], None)
    if of_class is None:  # in transformers, the text model alone has no head
        of_class, config = type(original), original.config.to_dict() | {"text_config": config}
    write_checkpoint(tmp_path / "read", {tensor.name: plain(tensor) for tensor in source.tensors}, config=config)
    again = of_class.from_pretrained(tmp_path / "read", dtype="float32").eval()
    ids = gguf_cases.token_ids(40)
    expected = gguf_cases.logits(original, ids)
    assert each_near(gguf_cases.logits(again, ids), expected, 0, F32_MATRIX * abs(expected).max())


def test_of_a_text_part_it_is_said_what_it_is_read_as(tmp_path: Path) -> None:
    gguf_cases.saved(gguf_cases.CASES["qwen3 vl"], tmp_path / "model")
    file = alone(write_gguf(tmp_path / "model"), tmp_path / "src")
    made = json.loads(done("plan", file, "--json").stdout)
    (remark,) = made["warnings"]
    assert "m.gguf" in remark and "qwen3vl" in remark and "images" in remark
    shutil.copy(tmp_path / "model/config.json", file.parent)  # of the whole model
    source = open_source(file)
    assert source.config is not None and source.config["model_type"] == "qwen3"
    assert any("qwen3_vl" in remark for remark in source.remarks)


def test_numbers_that_a_file_holds_as_tensors_are_settings_of_the_model(tmp_path: Path) -> None:
    gguf_cases.saved(gguf_cases.CASES["muse glimmer"], tmp_path / "model")
    file = alone(write_gguf(tmp_path / "model", "F32"), tmp_path / "src")
    source = open_source(file)
    assert source.config is not None and source.config["model_type"] == "muse_glimmer_text"
    assert source.config["qk_scale_factor"] == 2.5 and source.config["layer_rope_theta"] == [1e4, 0, 1e4, 1e4, 0]
    stored = {of.name.replace("language_model.", ""): of for of in open_local(tmp_path / "model").tensors}
    expected = {name: of for name, of in stored.items() if "vision" not in name}
    assert {tensor.name for tensor in source.tensors} == expected.keys()
    for tensor in source.tensors:
        assert each_near(plain(tensor)[1], plain(expected[tensor.name])[1], 0, rounding("F32", 2)), tensor.name
    beside = {**source.config, "qk_scale_factor": 3.0}
    (file.parent / "config.json").write_text(json.dumps(beside))
    assert any("blk.0.attn_q_norm.weight" in remark for remark in open_source(file).remarks)


@pytest.mark.parametrize("model_type", [name for name, row in MODELS.items() if row.llama_cpp is not None])
def test_every_type_that_can_be_written_can_be_read(model_type: str) -> None:
    row = MODELS[model_type].llama_cpp
    assert row is not None
    written = architecture_name(row)
    rows = (model.llama_cpp for model in ALONE.values())
    assert TEXT_PARTS.get(written, written) in {architecture_name(of) for of in rows}


def tokenizer_of(source: Checkpoint, folder: Path) -> Any:
    """The tokenizer of a source in transformers."""
    import transformers

    folder.mkdir()
    for name in source.companions:
        (folder / name).write_bytes(read_file(source.storage, name))
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", [kind for kind in trained.KINDS if kind not in ("digits", "metaspace")])
def test_the_tokenizer_of_a_file_alone_makes_the_tokens_of_the_original(kind: str, tmp_path: Path) -> None:
    import transformers

    model = tmp_path / "model"
    tokenizer = trained.KINDS[kind]()
    trained.save(tokenizer, model, chat_template="{{ messages }}", pad_token=trained.USER)
    write_llama(model, rows=tokenizer.get_vocab_size() + 3)
    source = open_source(alone(write_gguf(model), tmp_path / "src"))
    found, expected = tokenizer_of(source, tmp_path / "t"), transformers.AutoTokenizer.from_pretrained(model)
    texts = (*trained.STRINGS, *trained.WITH_SPECIAL)
    if kind in ("qwen2", "qwen3.5"):  # published ones normalize text, which llama.cpp does not
        texts = tuple(unicodedata.normalize("NFC", text) for text in texts)
    for text in texts:
        assert found(text)["input_ids"] == expected(text)["input_ids"], text
    assert found.chat_template == "{{ messages }}"
    named = {name: found.special_tokens_map.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    assert named == {"bos_token": trained.BEGIN, "eos_token": trained.END, "pad_token": trained.USER}
    again, first = metadata(converted_of(source)), metadata(converted(model))
    for key in ("tokens", "token_type", "merges", "pre", "model", "add_bos_token", "add_eos_token"):
        assert again.get(f"tokenizer.ggml.{key}") == first.get(f"tokenizer.ggml.{key}"), key


def converted_of(source: Checkpoint) -> Any:
    from pqweights.checkpoint.gguf.model import gguf_model

    return gguf_model(source, name="tiny")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = trained.KINDS["llama3"]()
    trained.save(tokenizer, folder)
    return write_gguf(write_llama(folder, rows=tokenizer.get_vocab_size()))


@pytest.fixture(scope="module")
def lonely(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That file, with nothing beside it."""
    return Path(shutil.copy(llama, tmp_path_factory.mktemp("lonely")))


@pytest.mark.parametrize(
    "changed",
    [
        {"llama__vocab_size": None},
        {"llama__attention__key_length": None, "llama__attention__value_length": None},
        {"llama__rope__dimension_count": None},
        {"llama__rope__freq_base": None},
        {"general__sampling__temp": 0.5},
    ],
    ids=str,
)
def test_what_llama_cpp_assumes_need_not_be_stated(changed: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    source = open_source(edited(llama, tmp_path / "m.gguf", **changed))
    assert source.config is not None and source.config["hidden_size"] == 16
    made = json.loads(read_file(source.storage, "generation_config.json"))
    assert made.get("temperature") == changed.get("general__sampling__temp")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"llama__context_length": None}, "llama.context_length"),
        ({"llama__embedding_length": "wide"}, "llama.embedding_length"),
        ({"llama__embedding_length": 0}, "hidden_size"),
        ({"llama__block_count": 2**31}, "llama.block_count"),
        ({"llama__attention__head_count": [2, 4]}, "num_attention_heads"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale"),
        ({"llama__rope__scaling__type": "new"}, "rope.scaling.type"),
        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.factor"),
        ({"llama__rope__freq_base": -1.0}, "llama.rope.freq_base"),
        ({"general__architecture": "unheard"}, "general.architecture"),
        ({"tokenizer__ggml__pre": "unheard"}, "tokenizer.ggml.pre"),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre"),
        ({"tokenizer__ggml__model": "rwkv"}, "tokenizer.ggml.model"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer__ggml__eos_token_id": "x"}, "tokenizer.ggml.eos_token_id"),
        ({"tokenizer__ggml__token_type": [1]}, "tokenizer.ggml.token_type"),
    ],
    ids=str,
)
def test_what_cannot_be_turned_round_is_refused_by_its_key(
    changed: dict[str, Any], named: str, llama: Path, tmp_path: Path
) -> None:
    if "general__architecture" in changed:
        file = tmp_path / "m.gguf"
        file.write_bytes(llama.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lloma", 1))
    else:
        file = edited(llama, tmp_path / "m.gguf", **changed)
    with raises(SourceError, named):
        open_source(file)


def test_files_beside_a_gguf_count(llama: Path, tmp_path: Path) -> None:
    file = alone(llama, tmp_path / "src")
    config = json.loads((llama.parent / "config.json").read_text()) | {"_name_or_path": "mine"}
    (file.parent / "config.json").write_text(json.dumps(config))
    (file.parent / "tokenizer.json").write_text("{}")
    source = open_source(file)
    assert source.config is not None and source.config["_name_or_path"] == "mine"
    assert read_file(source.storage, "tokenizer.json") == b"{}"
    assert "tokenizer_config.json" not in source.companions


def test_a_configuration_that_names_the_type_alone_does_not_count(llama: Path, tmp_path: Path) -> None:
    """As in repositories of GGUF files: what it does not say would be that of the smallest published model."""
    file = alone(edited(llama, tmp_path / "m.gguf", llama__rope__freq_base=5e5), tmp_path / "src")
    (file.parent / "config.json").write_text('{"model_type": "mistral"}')
    source = open_source(file)
    assert source.config is not None and source.config["rope_theta"] == 5e5 and source.config["hidden_size"] == 16
    assert any("config.json" in remark for remark in source.remarks)
    done("quantize", file, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["rope_theta"] == 5e5


def test_a_configuration_that_contradicts_the_file_is_used_and_said_so(llama: Path, tmp_path: Path) -> None:
    file = alone(edited(llama, tmp_path / "m.gguf", llama__rope__freq_base=5e5), tmp_path / "src")
    shutil.copy(llama.parent / "config.json", file.parent)
    assert any("llama.rope.freq_base" in remark for remark in open_source(file).remarks)
    assert not any("config.json beside" in remark for remark in open_source(llama).remarks)


def test_a_master_of_a_file_alone_is_whole(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("quantize", alone(llama, tmp_path / "src"), out)
    done("verify", out)
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} < names
    done("export", out, tmp_path / "gguf", "--target", "gguf", "--type", "q8_0")
    found = gguf.GGUFReader(next((tmp_path / "gguf").glob("*.gguf"))).fields
    first = gguf.GGUFReader(llama).fields
    for key, field in first.items():
        if not key.startswith(("GGUF.", "general.")):
            assert found[key].contents() == field.contents(), key


@pytest.mark.parametrize("target", ["vllm", "mlx"])
def test_weights_of_a_file_alone_are_rounded_like_those_of_its_checkpoint(target: str, tmp_path: Path) -> None:
    """Weights and roles go by the names of transformers, not by those of llama.cpp."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    tokenizer = trained.KINDS["llama3"]()
    trained.save(tokenizer, checkpoint)
    tokens = tokenizer.get_vocab_size()
    write_llama(checkpoint, rows=tokens, sizes=sizes, config={"vocab_size": tokens})
    file = alone(write_gguf(checkpoint, "Q8_0"), tmp_path / "file")
    (checkpoint / "model-Q8_0.gguf").unlink()
    done("export", checkpoint, tmp_path / "of checkpoint", "--target", target)
    done("export", file, tmp_path / "of file", "--target", target)
    expected, rows = (pqweights.inspect(tmp_path / made).tensors for made in ("of checkpoint", "of file"))
    assert {row.role for row in rows if row.bits} >= {"attention", "mlp"}
    assert {(row.name, row.role, row.action, row.bits) for row in rows} == {
        (row.name, row.role, row.action, row.bits) for row in expected
    }


def test_all_parts_of_a_split_model_are_one_source(llama: Path, lonely: Path, tmp_path: Path) -> None:
    edited(llama, tmp_path / "m.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 2 and all(re.fullmatch(r"m-0000\d-of-0000\d\.gguf", part.name) for part in parts)
    whole = open_source(lonely)
    for given in (tmp_path, parts[0], parts[-1]):
        source = open_source(given)
        assert source.config == whole.config and len(source.weight_files) == len(parts)
        found = {tensor.name: values_of(tensor) for tensor in source.tensors}
        assert found.keys() == {tensor.name for tensor in whole.tensors}
        assert all((found[tensor.name] == values_of(tensor)).all() for tensor in whole.tensors)


def test_a_model_without_a_tokenizer_is_exported_only_if_that_is_asked_for(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    done("quantize", tmp_path / "model", tmp_path / "master")
    command = ("export", tmp_path / "master", tmp_path / "out", "--target", "gguf", "--type", "q8_0")
    assert "tokenizer" in refused(*command) and not (tmp_path / "out").exists()
    done(*command, "--without-tokenizer")
    assert "tokenizer.ggml.tokens" not in gguf.GGUFReader(next((tmp_path / "out").glob("*.gguf"))).fields


def test_a_tower_beside_a_file_is_no_model(llama: Path, tmp_path: Path) -> None:
    file = alone(llama, tmp_path / "src")
    (file.parent / "mmproj-m-F16.gguf").write_bytes(b"another model")
    assert open_source(file.parent).weight_files == ("m.gguf",)
