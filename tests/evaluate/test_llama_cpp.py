"""GGUF files as models of eval: llama.cpp's logits and tokens beside those of transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from closeness import assert_near, assert_within
from commands import answer, done, raises, refused
from helpers import f32, gaussian, write_checkpoint
from language_models import END, llama_config, tokenizer_files
from tiny_gguf import llama_gguf

from pqweights.errors import SourceError
from pqweights.runtime import llama_cpp
from pqweights.runtime.folders import LLAMA_CPP, size
from pqweights.runtime.models import Model, open_model
from pqweights.runtime.texts import load_tokenizer, tokenize

IDS = np.random.default_rng(0).integers(0, 256, 100)
HARD = "Zé€😀\t1 <s>hello  world\n\n </s> 漢字 1234 \x00é"
WORDS = " ".join(f"word{number}" for number in range(60))


def llama(folder: Path, *, layers: int = 2) -> Path:
    """A Llama with random weights whose logits are of the size of those of a trained model."""
    hidden, half, inner, vocabulary = 128, 64, 256, 384
    tensors = {
        "model.embed_tokens.weight": gaussian(vocabulary, hidden, seed=1, scale=1),
        "lm_head.weight": gaussian(vocabulary, hidden, seed=2, scale=0.3),
        "model.norm.weight": 1 + gaussian(hidden, seed=3, scale=0.1),
    }
    shapes = {"q": (hidden, hidden), "k": (half, hidden), "v": (half, hidden), "o": (hidden, hidden)}
    for layer in range(layers):
        start = f"model.layers.{layer}."
        for number, name in enumerate(("input_layernorm", "post_attention_layernorm")):
            tensors[f"{start}{name}.weight"] = 1 + gaussian(hidden, seed=layer * 20 + number, scale=0.1)
        for number, (name, shape) in enumerate(shapes.items()):
            tensors[f"{start}self_attn.{name}_proj.weight"] = gaussian(*shape, seed=layer * 20 + 5 + number, scale=0.1)
        for number, name in enumerate(("gate", "up", "down")):
            shape = (hidden, inner) if name == "down" else (inner, hidden)
            tensors[f"{start}mlp.{name}_proj.weight"] = gaussian(*shape, seed=layer * 20 + 10 + number, scale=0.1)
    config = llama_config(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers)
    return write_checkpoint(
        folder, {name: f32(values) for name, values in tensors.items()}, config=config, companions=tokenizer_files()
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of llama.cpp wait for each other in loops, which takes long where workers share the cores.

    Processes that a test starts have the same core.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint source, the same as source.gguf and as split files, and text.txt."""
    folder = tmp_path_factory.mktemp("llama")
    source = llama(folder / "source")
    llama_gguf(source, folder / "source.gguf")
    (folder / "split").mkdir()
    llama_gguf(source, folder / "split" / "m.gguf", split_max_tensors=8)
    (folder / "text.txt").write_text(WORDS)
    return folder


@pytest.fixture(scope="module")
def models(work: Path) -> tuple[Model, Model]:
    return open_model(work / "source"), open_model(work / "source.gguf")


def test_logits_are_those_of_transformers(models):
    expected, found = (model.logits(IDS, 64) for model in models)
    assert found.shape == (64, 384) and found.dtype == np.float32
    assert np.abs(expected).max() > 5
    assert_near(found, expected, "llama.cpp")
    assert models[1].runtime == LLAMA_CPP and models[1].net is None


@pytest.mark.parametrize("last", [1, 30, 100])
def test_logits_do_not_depend_on_batches_nor_on_calls_before(models, last, monkeypatch, work):
    expected = models[1].logits(IDS, 100)[-last:]
    monkeypatch.setattr(llama_cpp, "BATCH_TOKENS", 24)
    assert_near(open_model(work / "source.gguf").logits(IDS, last), expected, "llama.cpp")


def test_split_files_are_one_model(work, models):
    second = next(work.glob("split/*-00002-of-*.gguf"))
    for path in (work / "split", second):
        np.testing.assert_array_equal(open_model(path).logits(IDS, 5), models[1].logits(IDS, 5))
    assert size(work / "split").parameters == size(work / "source.gguf").parameters


# Tokens.


def test_tokens_are_those_of_transformers(work):
    ours, theirs = (load_tokenizer(work / name) for name in ("source.gguf", "source"))
    for special in (False, True):
        assert ours(HARD, add_special_tokens=special) == {
            "input_ids": theirs(HARD, add_special_tokens=special)["input_ids"]
        }
    assert ours.eos_token_id == END


def test_text_is_cut_as_for_transformers(work):
    for most in (None, 7):
        assert tokenize(work / "source.gguf", WORDS, most).tolist() == tokenize(work / "source", WORDS, most).tolist()


def test_file_without_a_tokenizer_is_refused(work, tmp_path):
    path = llama_gguf(work / "source", tmp_path / "a.gguf", tokenizer=False)
    with raises(SourceError, "a.gguf", "--tokenizer"):
        load_tokenizer(path)
    assert open_model(path).logits(IDS, 1).shape == (1, 384)


# eval


def test_eval_of_the_same_weights_finds_no_difference(work):
    found = answer("eval", "--quiet", work / "source.gguf", "--reference", work / "source", "--text", work / "text.txt",
                   "--window", 64)  # fmt: skip
    (row,) = found["models"]
    assert row["runtime"] == "llama.cpp" and row["dtype"] == "mixed precision"
    assert row["bytes"] == (work / "source.gguf").stat().st_size
    assert row["parameters"] == found["reference"]["parameters"]
    assert_within(abs(row["perplexity_change"]["value"]) / row["perplexity"]["value"], "llama.cpp, perplexity")
    assert row["kl"]["mean"]["value"] >= 0 and row["top1_agreement"]["value"] == 1
    assert_within(row["kl"]["mean"]["value"], "llama.cpp, KL")


def test_eval_needs_no_reference_and_takes_several_files(work, tmp_path):
    quantized = llama_gguf(work / "source", tmp_path / "q8.gguf", kind="Q8_0")
    result = done("eval", quantized, work / "split", "--text", work / "text.txt", "--window", 64)
    assert "computed by llama.cpp" in result.stdout and "q8.gguf" in result.stdout
    found = answer("eval", "--quiet", quantized, "--reference", work / "source.gguf", "--text", work / "text.txt")
    assert found["settings"]["window"] == 128
    assert 0 < found["models"][0]["kl"]["mean"]["value"] < 0.01


def test_eval_refuses_what_llama_cpp_does_not_have(work):
    file = work / "source.gguf"
    for options, *named in (
        (["--dtype", "bfloat16"], "--dtype bfloat16", "llama.cpp"),
        (["--packed"], "--packed", "master"),
        (["--kv-cache", "klt:3"], "--kv-cache", "llama.cpp"),
        (["--device", "cuda"], "--device cuda", "llama.cpp"),
        (["--window", "129"], "source.gguf", "128"),
    ):
        line = refused("eval", file, "--text", work / "text.txt", *options)
        assert all(name in line for name in named)
    done("eval", file, "--text", work / "text.txt", "--device", "auto", "--max-tokens", 128)


def test_eval_refuses_models_with_other_vocabularies(work, tmp_path):
    shutil.copytree(work / "source", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"vocab_size": 380}))
    text = ("--text", work / "text.txt")
    line = refused("eval", work / "source.gguf", "--reference", tmp_path / "other", *text)
    assert "source.gguf: " in line and "384" in line and "380" in line


# What llama.cpp refuses.


def test_files_that_llama_cpp_refuses_give_one_line(work, tmp_path):
    data = (work / "source.gguf").read_bytes()
    broken = tmp_path / "a.gguf"
    broken.write_bytes(data.replace(b"llama.embedding_length", b"llama.embedding_lengtx"))
    line = refused("eval", broken, "--text", work / "text.txt", "--tokenizer", work / "source")
    assert "a.gguf: " in line and "llama.embedding_length" in line
    broken.write_bytes(data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    assert "blk.0.attn_q.weight" in refused("eval", broken, "--text", work / "text.txt")
    broken.write_bytes(data[:-1000])
    assert "a.gguf" in refused("eval", broken, "--text", work / "text.txt")


def test_nothing_but_errors_is_printed(work, capfd):
    open_model(work / "source.gguf").logits(IDS, 1)
    assert capfd.readouterr() == ("", "")


def test_neither_torch_nor_transformers_is_needed(work):
    code = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'gguf'))); "
    code += "from pqweights_cli.main import app; app()"
    command = ("eval", "source.gguf", "--text", "text.txt")
    finished = subprocess.run([sys.executable, "-c", code, *command], cwd=work, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
