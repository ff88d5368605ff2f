"""Generation with a quantized cache: the same texts where it changes nothing, conversations, figures, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from calls import quantize
from closeness import approx
from commands import answer, done, refused
from language_models import TEMPLATE, babbler, continued

import pqweights
from pqweights.errors import OptionError
from pqweights.inference.generator import Generator
from pqweights.inference.options import GenerationOptions
from pqweights.inference.report import Generation
from pqweights.inference.runtimes.cached import CachedRun
from pqweights.inference.runtimes.models import open_model
from pqweights.planning.recipe import load_recipe

# Longer than what the methods keep as it is, so that codes are used.
PROMPT = "The quick brown fox jumps over the lazy dog, again"
TOKENS = 50


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models of random weights: plain, its master q4, one of conversations, and one of calm attention."""
    folder = tmp_path_factory.mktemp("models")
    babbler(folder / "plain")
    babbler(folder / "chat", template=TEMPLATE)
    config = json.loads((folder / "chat" / "config.json").read_text())
    (folder / "chat" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    families.build(families.FAMILIES["llama"], folder / "calm")
    quantize(folder / "plain", folder / "q4", load_recipe("q4"), threads=2)
    return folder


def generator(path: Path, **options: Any) -> Generator:
    return Generator(path, GenerationOptions(**options), tell=lambda line: None)


def reply(path: Path, prompt: str = PROMPT, **options: Any) -> Generation:
    return generator(path, **{"max_tokens": TOKENS, **options}).reply(prompt, lambda piece: None)


@pytest.mark.parametrize("spec", ["none", "hadamard:8"])
def test_a_cache_of_enough_bits_gives_the_same_text(spec: str, work: Path) -> None:
    prompt = " ".join(f"w{number * 37 % 499}" for number in range(len(PROMPT)))
    count = 20
    expected, found = (reply(work / "calm", prompt, max_tokens=count, kv_cache=each) for each in (None, spec))
    assert len(set(expected.token_ids)) > 1
    assert (found.text, found.token_ids, found.stop) == (expected.text, expected.token_ids, expected.stop)
    assert expected.kv_cache is None and found.kv_cache is not None
    # The last token of a reply is not read.
    assert (found.kv_cache.spec, found.kv_cache.tokens) == (spec, len(PROMPT) + count - 1)


@pytest.mark.parametrize("spec", ["none", "hadamard:3", "klt:2", "polar-rope:m4n2,values=2,residual=0"])
def test_a_packed_master_generates_with_a_quantized_cache(spec: str, work: Path) -> None:
    found = reply(work / "q4", packed=True, kv_cache=spec)
    assert found.settings.packed and found.kv_cache is not None and len(found.token_ids) == TOKENS
    if spec == "none":
        assert found.token_ids == reply(work / "q4", packed=True).token_ids


@pytest.mark.parametrize("spec", ["none", "hadamard:8", "polar-rope:m4n4,residual=0", "klt:4"])
def test_a_conversation_keeps_the_cache(spec: str, work: Path) -> None:
    chat = generator(work / "chat", kv_cache=spec, max_tokens=TOKENS)
    plain = generator(work / "chat", max_tokens=TOKENS)
    for turn, prompt in enumerate((PROMPT, "And what then?", "Well")):
        found = chat.reply(prompt, lambda piece: None)
        expected = plain.reply(prompt, lambda piece: None)
        assert found.kv_cache is not None and found.kv_cache.spec == spec
        assert found.kv_cache.tokens == found.prompt_tokens + TOKENS - 1
        if spec == "none":
            assert (found.token_ids, found.read_tokens) == (expected.token_ids, expected.read_tokens)
        assert (found.read_tokens < found.prompt_tokens) == (turn > 0)


@pytest.mark.parametrize("spec", ["none", "hadamard:8"])
def test_a_cache_that_is_cropped_is_that_of_a_shorter_text(spec: str, work: Path) -> None:
    """The second prompt leaves the first in its middle."""
    model = open_model(work / "plain")
    ids = np.frombuffer(PROMPT.encode() * 2, dtype=np.uint8).astype(np.int64)
    other = np.concatenate([ids[:60], ids[5:25]])
    used, fresh = CachedRun(model.net, spec).stepper(), CachedRun(model.net, spec).stepper()
    continued(used, ids, 1)
    assert continued(used, other, 3) == continued(fresh, other, 3)
    assert (used.read_tokens, fresh.read_tokens) == (20, 80)
    assert used.cache.get_seq_length() == len(other) + 2


def test_a_reply_that_is_broken_off_leaves_no_cache(work: Path) -> None:
    chat = generator(work / "chat", kv_cache="hadamard:3", max_tokens=TOKENS)

    def broken(piece: str) -> None:
        raise KeyboardInterrupt

    assert chat.reply(PROMPT, broken).kv_cache is None
    assert chat.reply(PROMPT, lambda piece: None).kv_cache is not None


def test_hybrid_models_generate_through_transformers(tmp_path: Path) -> None:
    model = open_model(families.build(families.FAMILIES["qwen3_5"], tmp_path / "model"))
    prompt = np.resize(np.array(families.IDS[0], dtype=np.int64), 60)
    expected = continued(model.stepper, prompt, 8)
    for spec in ("none", "hadamard:8"):
        run = CachedRun(model.net, spec)
        stepper = run.stepper()
        assert continued(stepper, prompt, 8) == continued(stepper, prompt, 8) == expected
        figures = run.figures(stepper.cache)
        assert (figures.spec, figures.tokens) == (spec, 60 + 8 - 1)
        assert (figures.bits_per_coordinate == 16) == (spec == "none")
    assert model.stepper.cache is None  # type: ignore[attr-defined]


# --- the command and the API ---


def test_json_has_the_figures(work: Path) -> None:
    found = answer("generate", work / "chat", "-p", PROMPT, "--max-tokens", TOKENS, "--kv-cache", "hadamard:4")
    figures = found["kv_cache"]
    assert figures.keys() == {"spec", "tokens", "bits_per_coordinate", "bytes_per_token"}
    assert (figures["spec"], figures["tokens"]) == ("hadamard:4", found["prompt_tokens"] + TOKENS - 1)
    assert 4 < figures["bits_per_coordinate"] < 16
    # Keys and values of one layer with one head of 192 coordinates.
    assert figures["bytes_per_token"] == approx(figures["bits_per_coordinate"] / 8 * 384)
    assert answer("generate", work / "chat", "-p", "A", "--max-tokens", 2)["kv_cache"] is None


def test_the_last_line_names_the_cache(work: Path) -> None:
    result = done("generate", work / "plain", "-p", PROMPT, "--max-tokens", 3, "--kv-cache", "hadamard:4,residual=8")
    assert "float32 on cpu, KV cache hadamard:4,residual=8 at " in result.stderr.splitlines()[-1]


def test_a_bad_spec_is_one_line(work: Path) -> None:
    with pytest.raises(OptionError, match="no method is called"):
        pqweights.generate(work / "nowhere", PROMPT, kv_cache="hadamrd:3")
    told = refused("generate", work / "plain", "-p", "A", "--kv-cache", "hadamard:4,keep=3", code=2)
    assert "hadamard has no option 'keep'" in told
    assert "the nearest is 'klt'" in refused("generate", work / "nowhere", "-p", "A", "--kv-cache", "kl", code=2)
