"""pqweights eval --kv-cache: scores as in generation, one row for each cache, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from caches import causal
from calls import evaluate, export, quantize
from closeness import ALIKE, ROUNDED_ONCE_MORE, approx, assert_near, assert_within
from commands import done, invoke, raises, refused
from evaluated import TEXT, model_folder
from families import FAMILIES, build

from pqweights.common.options import EvaluationOptions
from pqweights.errors import EvaluationError, OptionError
from pqweights.planning.recipe import load_recipe
from pqweights.runtime import cached
from pqweights.runtime.cached import CachedRun
from pqweights.runtime.models import open_model
from pqweights.runtime.protocol import TextWindows
from pqweights.runtime.texts import tokenize

SHORT = {"window": 100, "stride": 10, "max_tokens": 130}
COMMAND = ("--window", 100, "--stride", 10, "--max-tokens", 130)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with source, its master q3 with the BF16 export bf16, and text.txt."""
    folder = tmp_path_factory.mktemp("caches")
    model_folder(folder / "source")
    quantize(folder / "source", folder / "q3", load_recipe("q3"), threads=2)
    (folder / "text.txt").write_text(TEXT)
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- scores ---


def test_a_cache_that_keeps_everything_has_the_scores_of_the_model(work):
    (plain,) = evaluate([work / "source"], TEXT, **SHORT).rows
    own, cached = evaluate([work / "source"], TEXT, kv_caches=("none",), **SHORT).rows
    assert own.scores.losses == plain.scores.losses and own.kv_cache is None
    assert_near(cached.scores.perplexity.value, plain.scores.perplexity.value, "torch, perplexity")
    assert cached.scores.divergence is not None
    assert_within(abs(cached.scores.divergence.maximum), "torch, KL")
    assert (cached.kv_cache.spec, cached.kv_cache.bits_per_coordinate) == ("none", 16)


@pytest.mark.parametrize("last", [1, 2, 40, 99, 100])
@pytest.mark.parametrize("spec", ["none", "hadamard:3", "polar-rope:residual=0"])
def test_predictions_are_those_of_a_text_that_is_read_token_by_token(last, spec, work):
    model = open_model(work / "source")
    run, ids = CachedRun(model.net, spec), tokenize(work / "source", TEXT)[:100]
    found = run.logits(ids, last)
    assert found.shape == (last, 512) and found.dtype == np.float32
    if spec == "none":
        assert_near(found, model.logits(ids, last), "torch")
    cache, given, expected = run.new_cache(), torch.from_numpy(ids)[None], []
    with torch.no_grad():
        for part in (given[:, : 101 - last], *(given[:, at : at + 1] for at in range(101 - last, 100))):
            # Products of the same shapes: torch may multiply one row in another order than many.
            made = model.net(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            expected.append(made.logits[0, -1].numpy())
    assert_near(found, expected, "torch")
    assert run.figures().tokens == 100


def test_each_cache_has_a_row(work):
    specs = ("hadamard:8", "hadamard:2", "polar-rope:m4n4,residual=0")
    report = evaluate([work / "q3", work / "source"], TEXT, kv_caches=specs, **SHORT)
    assert report.reference is None
    caches = [None if row.kv_cache is None else row.kv_cache.spec for row in report.rows]
    assert caches == [None, *specs] * 2
    assert [row.model for row in report.rows] == [str(work / "q3")] * 4 + [str(work / "source")] * 4
    for number, row in enumerate(report.rows):
        figures = row.kv_cache
        if figures is None:
            assert row.scores.divergence is None
            continue
        assert row.scores.divergence is not None and row.scores.divergence.mean.value > 0
        assert figures.tokens == 100 and 2 < figures.bits_per_coordinate < 11, number
        # Keys and values of one layer with one head of 64 coordinates.
        assert figures.bytes_per_token == approx(figures.bits_per_coordinate / 8 * 128)
    best, worst = (row.scores.divergence.mean.value for row in report.rows[1:3])  # type: ignore[union-attr]
    assert best < worst / 10


def test_beside_a_reference_caches_are_compared_with_that(work):
    report = evaluate([work / "q3"], TEXT, reference=work / "source", kv_caches=("none", "hadamard:8"), **SHORT)
    assert report.reference is not None and report.reference.kv_cache is None
    (plain,) = evaluate([work / "q3"], TEXT, reference=work / "source", **SHORT).rows
    for row in report.rows:
        assert row.scores.divergence.mean.value == approx(plain.scores.divergence.mean.value, ROUNDED_ONCE_MORE)
    assert len(report.rows) == 2


def test_a_packed_master_may_have_a_quantized_cache(work):
    own, row = evaluate([work / "q3"], TEXT, packed=True, kv_caches=("klt:4",), **SHORT).rows
    assert row.runtime == own.runtime == "transformers, pqweights' packed weights"
    assert 0.8 < row.scores.perplexity.value / own.scores.perplexity.value < 1.2


def test_a_hybrid_model_has_packed_layers(work, tmp_path):
    folder = build(FAMILIES["qwen3_5"], tmp_path / "model")
    options = {"window": 80, "stride": 4, "max_tokens": 80, "tokenizer": work / "source"}
    own, same, row = evaluate([folder], TEXT, kv_caches=("none", "hadamard:8"), **options).rows
    assert_near(same.scores.perplexity.value, own.scores.perplexity.value, "torch, perplexity")
    assert row.scores.perplexity.value == approx(own.scores.perplexity.value, ALIKE)
    assert row.kv_cache is not None and row.kv_cache.tokens == 80


def test_progress_counts_every_cache(work):
    from pqweights.runtime.evaluation import evaluate

    seen: list[tuple[int, int]] = []
    options = EvaluationOptions(**SHORT, kv_caches=("none", "hadamard"))
    evaluate(
        [work / "q3", work / "source"], TEXT, options, progress=lambda done, total, what: seen.append((done, total))
    )
    windows = TextWindows(size=100, stride=10).starts(130)
    assert {total for _, total in seen} == {len(windows) * 4}
    assert [count for count, _ in seen] == sorted(count for count, _ in seen) and seen[-1][0] == len(windows) * 4


# --- refusals ---


def test_a_bad_spec_is_refused_before_anything_is_read(work, monkeypatch):
    from pqweights.runtime import evaluation

    monkeypatch.setattr(evaluation, "read_model", lambda path: pytest.fail("it is read"))
    with raises(OptionError, "hadamar"):
        evaluate([work / "source"], TEXT, kv_caches=("none", "hadamar:3"))
    assert "klt" in refused("eval", work / "source", "--text", work / "text.txt", "--kv-cache", "klt:x", code=2)


def test_runtimes_with_caches_of_their_own_are_refused(work, tmp_path):
    export(work / "q3", tmp_path / "mlx", "mlx", threads=2)
    with raises(EvaluationError, "`kv_cache`", "mlx-lm"):
        evaluate([tmp_path / "mlx"], TEXT, kv_caches=("none",), **SHORT)


# --- the command ---


def test_the_table_shows_caches_and_nothing_is_recorded(work):
    before = files_in(work)
    caches = ("--kv-cache", "hadamard:4", "--kv-cache", "polar")
    result = done("eval", work / "q3", "--text", work / "text.txt", *COMMAND, *caches)
    assert files_in(work) == before and "recorded" not in result.stderr
    table = result.stdout.splitlines()[2:6]
    for title in ("KV cache", "bits/coord.", "bytes/token", "change", "KL mean", "top-1"):
        assert title in table[0]
    assert "hadamard:4" in table[2] and "polar" in table[3]
    assert "the reference is the model with its own cache" in " ".join(result.stdout.split())
    beside = done("eval", work / "q3", "--text", work / "text.txt", *COMMAND, *caches, "--reference", work / "source")
    assert "with its own cache" not in " ".join(beside.stdout.split())
    plain = done("eval", work / "q3", "--text", work / "text.txt", *COMMAND, "--no-record")
    assert "KV cache" not in plain.stdout


def test_json_has_the_figures_of_caches(work):
    result = invoke("eval", work / "q3", "--text", work / "text.txt", *COMMAND, "--kv-cache", "hadamard:4", "--json")
    own, row = json.loads(result.stdout)["models"]
    assert own["kv_cache"] is None and own["kl"] is None
    assert row["kv_cache"].keys() == {"spec", "tokens", "bits_per_coordinate", "bytes_per_token"}
    assert (row["kv_cache"]["spec"], row["kv_cache"]["tokens"]) == ("hadamard:4", 100)
    assert row["kl"]["mean"]["value"] > 0


# --- windows that are read together ---


@pytest.mark.parametrize("spec", ["klt:2", "klt:3", "hadamard:4", "polar-rope:m4n4,residual=0"])
def test_windows_that_have_nothing_in_common_do_not_change_each_other(spec):
    """Their keys and values differ in size and direction, as those of different texts do."""
    random = np.random.default_rng(5)
    windows = [random.integers(0, known, 100) for known in (3, 60, 30, 9)]
    together, alone = CachedRun(causal(), spec), CachedRun(causal(), spec)
    for ours, window in zip(together.logits_of(windows, 30), windows, strict=True):
        theirs = alone.logits(window, 30)
        assert_near(ours, theirs, "torch, cached")


@pytest.mark.parametrize("spec", ["hadamard:4", "polar", "polar-rope:m4n4", "hadamard:3,residual=16", "none"])
def test_windows_that_are_read_together_have_the_figures_of_each(spec, work, monkeypatch):
    net, ids = open_model(work / "source").net, tokenize(work / "source", TEXT)
    windows = [ids[start : start + 100] for start in range(0, 50, 10)]
    together, alone = CachedRun(net, spec), CachedRun(net, spec)
    found = list(together.logits_of(windows, 30))
    expected = [alone.logits(window, 30) for window in windows]
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs, "torch, cached")
    assert together.figures() == alone.figures()
    monkeypatch.setattr(cached, "BATCH_BYTES", 2 * together._window_bytes(100, 30))
    for ours, theirs in zip(together.logits_of(windows, 30), found, strict=True):
        assert_near(ours, theirs, "torch, cached")
