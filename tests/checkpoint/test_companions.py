"""Which files of a checkpoint are copied along with its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import raises
from helpers import bf16, gaussian, write_checkpoint

from pqweights.checkpoint.companions import companions
from pqweights.checkpoint.names import CONFIG_FILE, INDEX_FILE
from pqweights.checkpoint.source import files_at, needed_files, open_local, others_of_model
from pqweights.checkpoint.storage import Storage
from pqweights.errors import SourceError

# What the tokenizers, processors and configurations of transformers 5 read, by a search through their code.
READ_BY_TRANSFORMERS = """
    added_tokens.json additional_chat_templates/rag.jinja audio_tokenizer_config.json bpe.codes byte_maps.json
    chat_template.jinja chat_template.json config.json custom_generate/generate.py custom_generate/requirements.txt
    dict.txt emoji.json entity_vocab.json generation_config.json merges.txt normalizer.json preprocessor_config.json
    processor_config.json prophetnet.tokenizer sentencepiece.bpe.model sentencepiece.model source.spm
    speaker_embeddings_path.json special_tokens_map.json spiece.model spm.model spm_char.model target.spm
    target_vocab.json tekken.json tiktoken.model tokenizer.json tokenizer.model tokenizer_config.json
    video_preprocessor_config.json vocab-src.json vocab-tgt.json vocab.json vocab.txt word_pronunciation.json
    word_shape.json
"""
READ_BY_OTHERS = """
    1_Pooling/config.json 2_Dense/config.json 2_Dense/model.safetensors config_sentence_transformers.json modules.json
    sentence_bert_config.json open_clip_config.json params.json qwen.tiktoken tokenizer.model.v3 configuration.json
    configuration_mine.py modeling_mine.py package/__init__.py package/deep/layer.py kernels/fused.cu
    tokenizer/tokenizer.json chat_templates/tools.jinja
"""
LICENCES = """
    LICENSE LICENSE.txt LICENSE.md licence.txt MODEL_LICENSE LICENSE-MODEL.pdf USE_POLICY.md
    ACCEPTABLE_USE_POLICY.txt NOTICE Notice.txt COPYING README_zh.md CITATION.cff AUTHORS
"""
STRAY = """
    train.parquet data/train.json runs/log.txt runs/events.out.tfevents.1 results.csv loss.png notes.txt
    trainer_state.json all_results.json training_args.bin optimizer.pt checkpoint-500/tokenizer.json
    checkpoint-500/model.safetensors original/params.json original/tokenizer.model onnx/config.json
    onnx/tokenizer.json pytorch_model.bin model.gguf adapter_config.json adapter_model.safetensors
    hf_quant_config.json wandb/run/config.json assets/figure.png video.mp4 pytorch_model.bin.index.json
"""


@pytest.mark.parametrize("name", [*READ_BY_TRANSFORMERS.split(), *READ_BY_OTHERS.split(), *LICENCES.split()])
def test_files_that_loading_needs_are_copied(name: str) -> None:
    assert companions([name], ()) == (() if name == CONFIG_FILE else (name,), {})


@pytest.mark.parametrize("name", STRAY.split())
def test_stray_files_are_left_out_by_name(name: str) -> None:
    copied, left_out = companions([name], ())
    assert not copied and left_out.keys() == {name}


@pytest.mark.parametrize("name", ["README.md", "pqweights.json", "pqweights-eval.json"])
def test_files_about_the_source_are_left_out(name: str) -> None:
    assert companions([name], ())[1].keys() == {name}


def test_files_of_the_result_itself_are_neither_copied_nor_named() -> None:
    assert companions([CONFIG_FILE, INDEX_FILE, "weights.safetensors"], ["weights.safetensors"]) == ((), {})


@pytest.mark.parametrize(
    ("pattern", "copied"),
    [
        ("data/train.parquet", {"data/train.parquet"}),
        ("*.parquet", {"data/train.parquet", "all.parquet"}),
        ("data/*", {"data/train.parquet", "data/deep/x.csv", "data/weights.bin"}),
        ("x.csv", {"data/deep/x.csv"}),
        ("*", {"data/train.parquet", "data/deep/x.csv", "data/weights.bin", "all.parquet"}),
    ],
)
def test_included_files_are_copied(pattern: str, copied: set[str]) -> None:
    files = ["README.md", "all.parquet", "data/deep/x.csv", "data/train.parquet", "data/weights.bin", "other.bin"]
    found, left_out = companions(files, (), [pattern])
    assert set(found) == copied
    assert left_out.keys() == set(files) - copied


@pytest.mark.parametrize("pattern", ["nothing*", "pytorch_model.bin", "README.md", "config.json", "*.safetensors"])
def test_pattern_that_can_match_nothing_is_refused(pattern: str) -> None:
    files = ["README.md", "config.json", "model.safetensors", "other.safetensors", "pytorch_model.bin", "x.csv"]
    with raises(SourceError, "`include_files`"):
        companions(files, ["model.safetensors"], ["x.csv", pattern])


def test_files_beside_a_single_file_are_named(tmp_path: Path) -> None:
    tensors = {"mlp.up_proj.weight": bf16(gaussian(64, 128))}
    folder = write_checkpoint(tmp_path / "alone", tensors, companions={"notes.txt": b"x", "other.bin": b"x"})
    assert others_of_model(*files_at(folder / "model.safetensors")) == ()
    small = {"tokenizer.json": b"{}", "notes.txt": b"x", "other.safetensors": b"x", "code/modeling.py": b""}
    folder = write_checkpoint(tmp_path / "model", tensors, config={"model_type": "llama"}, companions=small)
    found = others_of_model(*files_at(folder / "model.safetensors"))
    assert found == ("config.json", "tokenizer.json")
    assert open_local(folder / "model.safetensors").left_out.keys() == {*found}


def test_other_shards_beside_a_shard_are_named(tmp_path: Path) -> None:
    shards = [{f"layers.{n}.mlp.up_proj.weight": bf16(gaussian(64, 128, seed=n))} for n in range(2)]
    folder = write_checkpoint(tmp_path / "model", *shards)
    assert others_of_model(*files_at(folder / "model-00001-of-00002.safetensors")) == (
        "model-00002-of-00002.safetensors",
        INDEX_FILE,
    )
    (folder / INDEX_FILE).write_text("damaged")
    assert others_of_model(*files_at(folder / "model-00001-of-00002.safetensors")) == ()


def test_fetched_files_of_a_result_are_those_of_its_manifest(tmp_path: Path) -> None:
    tensors = {"mlp.up_proj.weight": bf16(gaussian(64, 128))}
    small = {"tokenizer.json": b"{}", "data.csv": b"x", "stray.csv": b"x"}
    folder = write_checkpoint(tmp_path / "model", tensors, config={}, companions=small)
    storage = Storage(folder)
    assert set(needed_files(storage)) == {"config.json", "model.safetensors", "tokenizer.json"}
    listed = {"files": {"data.csv": {}, "config.json": {}, "gone.txt": {}}}
    (folder / "pqweights.json").write_text(json.dumps(listed))
    assert set(needed_files(Storage(folder))) == {"config.json", "model.safetensors", "data.csv", "pqweights.json"}
    (folder / "pqweights.json").write_text("damaged")
    assert "tokenizer.json" in needed_files(Storage(folder))
