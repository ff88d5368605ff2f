"""The keys and values of a model: those that its cache gets, of all tokens, whatever its layers forget."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import export, quantize
from families import ATTENTION, FAMILIES, TEXT, Family, build

from pqweights.errors import EvaluationError
from pqweights.inference.runtimes.texts import tokenize
from pqweights.planning.recipe import load_recipe
from pqweights.quality.measure.kv_states import FEWEST_TOKENS, ModelStates, read_states
from pqweights.quality.options import StatesOptions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONTEXT = 96
WORDS = " ".join(f"w{number}" for number in np.random.default_rng(8).integers(0, 500, 300))


def llama(folder: Path, **settings: Any) -> Path:
    return build(Family("LlamaForCausalLM", "LlamaConfig", TEXT | settings, ATTENTION), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("states") / "model", max_position_embeddings=CONTEXT)


def read(folder: Path, text: str = WORDS, **options: Any) -> ModelStates:
    return read_states(folder, text, StatesOptions(**options))


def cached(folder: Path, tokens: int) -> Any:
    """The layers of the cache that transformers makes for the first tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(tokenize(folder, WORDS, tokens))[None]
    with torch.inference_mode():
        return model(ids, use_cache=True).past_key_values.layers


def test_states_are_those_of_the_cache(folder: Path) -> None:
    found = read(folder, max_tokens=50)
    expected = cached(folder, 50)
    assert found.tokens == 50 and [each.layer for each in found.layers] == [0, 1] == list(range(len(expected)))
    for each, other in zip(found.layers, expected, strict=True):
        assert each.keys.shape == each.values.shape == (2, 50, 64) and each.keys.dtype == torch.float32
        assert torch.equal(each.keys, other.keys[0]) and torch.equal(each.values, other.values[0])
        assert each.pairs is not None and (each.pairs.size, each.pairs.rotated) == (64, 64)


def test_tokens_are_at_most_those_that_the_model_takes(folder: Path) -> None:
    assert read(folder).tokens == CONTEXT
    assert read(folder, text=WORDS[:200]).tokens < CONTEXT
    with pytest.raises(EvaluationError, match=f"`max_tokens` {CONTEXT + 1}: .* at most {CONTEXT} tokens"):
        read(folder, max_tokens=CONTEXT + 1)
    with pytest.raises(EvaluationError, match=f"at least {FEWEST_TOKENS} tokens, found 15; raise `max_tokens`"):
        read(folder, max_tokens=15)
    with pytest.raises(EvaluationError, match="found 3; give a longer text"):
        read(folder, text="w1 w2 w3")


def test_masters_and_exports_are_read(folder: Path, tmp_path: Path) -> None:
    quantize(folder, tmp_path / "master", load_recipe("q6"))
    export(tmp_path / "master", tmp_path / "bf16", "bf16")
    original, master, exported = (read(each) for each in (folder, tmp_path / "master", tmp_path / "bf16"))
    assert master.runtime == "transformers, weights decoded by pqweights"
    for first, second, third in zip(original.layers, master.layers, exported.layers, strict=True):
        scale = float(first.keys.std())
        assert 0 < float((first.keys - second.keys).std()) < 0.2 * scale
        assert float((second.keys - third.keys).std()) < 0.02 * scale  # BF16 weights


def test_tokenizer_may_be_elsewhere(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    expected = read(folder).layers[0].keys
    assert torch.equal(read(bare, tokenizer=folder).layers[0].keys, expected)


def test_layers_with_a_window_give_all_tokens(tmp_path: Path) -> None:
    """Their cache forgets all but the last 32."""
    found = read(build(FAMILIES["gpt_oss"], tmp_path / "model"), max_tokens=80)
    assert len(found.layers) == 2 and all(each.keys.shape == (2, 80, 64) for each in found.layers)


def test_layers_without_attention_are_left_out(folder: Path, tmp_path: Path) -> None:
    """Every fourth layer of this model has attention; a quarter of its coordinates are rotated by RoPE."""
    hybrid = build(FAMILIES["qwen3_5"], tmp_path / "model")
    (only,) = read(hybrid, max_tokens=40, tokenizer=folder).layers
    assert only.layer == 3 and only.keys.shape == (2, 40, 64)
    assert only.pairs is not None and (only.pairs.size, only.pairs.rotated) == (64, 16)


def test_model_without_rope(tmp_path: Path) -> None:
    found = read(build(FAMILIES["gpt2"], tmp_path / "model"), max_tokens=40)
    assert len(found.layers) == 2 and all(each.pairs is None for each in found.layers)
