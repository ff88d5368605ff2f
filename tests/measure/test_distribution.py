"""The distribution of a checkpoint's coordinates: exact computations, scipy, and the distribution on the sphere."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import helpers
import numpy as np
import pytest
from commands import invoke

from pqweights.errors import SourceError
from pqweights.quality.measure import distribution
from pqweights.quality.measure.distribution import (
    HISTOGRAM_EDGES,
    Tally,
    measure_distribution,
    normal_edges,
    sampled_blocks,
)

BOUND = 2e-5


def exact_ks(z: np.ndarray) -> float:
    """The Kolmogorov-Smirnov distance to the normal distribution, by sorting."""
    ordered, count = np.sort(z.astype(np.float64)), len(z)
    normal = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in ordered])
    above = np.arange(1, count + 1) / count - normal
    below = normal - np.arange(count) / count
    return float(max(above.max(), below.max()))


def tally_of(z: np.ndarray, pieces: int = 1) -> Tally:
    tally = Tally()
    for part in np.array_split(z.astype(np.float32), pieces):
        tally.add(part.copy())
    return tally


def samples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "normal": rng.standard_normal(30_000),
        "heavy": rng.standard_t(2, 30_000),
        "shifted": rng.standard_normal(30_000) + 0.1,
        "narrow": rng.standard_normal(30_000) * 0.5,
        "constant": np.ones(1280),
        "two values": np.repeat([-1.0, 1.0], 640),
        "few": rng.standard_normal(5),
        "far": np.full(7, 11.3),
        "at the edges": normal_edges().astype(np.float64),
        "zeros among others": np.append(rng.standard_normal(2000), np.zeros(500)),
    }


@pytest.mark.parametrize("name", samples())
def test_distance_matches_the_exact_one(name: str) -> None:
    z = samples()[name].astype(np.float32)
    found = tally_of(z).fit()
    assert found is not None
    exact = exact_ks(z)
    assert exact - BOUND <= found.ks <= exact + 1e-7  # the edges are float32


def test_distance_and_kurtosis_match_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for name in ("normal", "heavy", "shifted", "narrow"):
        z = samples()[name].astype(np.float32)
        found = tally_of(z).fit()
        assert found is not None
        assert found.ks == pytest.approx(stats.kstest(z.astype(np.float64), "norm").statistic, abs=BOUND)
        mirrored = np.concatenate([z, -z])  # scipy's kurtosis is about the mean, which is 0 here
        both = tally_of(mirrored).fit()
        assert both is not None and both.kurtosis == pytest.approx(found.kurtosis)
        assert both.kurtosis == pytest.approx(stats.kurtosis(mirrored.astype(np.float64), fisher=False), rel=1e-9)


def test_merged_tallies_equal_one_tally() -> None:
    z = samples()["heavy"]
    whole, merged = tally_of(z), Tally()
    for part in np.array_split(z, 7):
        merged.merge(tally_of(part))
    first, second = whole.fit(), merged.fit()
    assert first is not None and second is not None
    assert first.ks == second.ks and first.kurtosis == pytest.approx(second.kurtosis)
    assert np.array_equal(whole.histogram, merged.histogram) and whole.count == merged.count == len(z)
    assert Tally().fit() is None


def test_histogram_matches_numpy() -> None:
    z = np.clip(samples()["heavy"], -11.3, 11.3).astype(np.float32)
    expected, _ = np.histogram(z, HISTOGRAM_EDGES.astype(np.float32))
    assert np.array_equal(tally_of(z).histogram, expected)
    assert expected.sum() == len(z)  # nothing is beyond its ends
    assert HISTOGRAM_EDGES[0] < -math.sqrt(128) and HISTOGRAM_EDGES[-1] > math.sqrt(128)


# --- sampled blocks ---


def test_small_tensors_are_read_whole() -> None:
    for weights in (0, 1, 127, 128, 129, 1000, 128 * 2048, 128 * 2049 + 5, distribution.MAX_WEIGHTS):
        blocks = [block for run in sampled_blocks(weights) for block in run]
        assert blocks == list(range(weights // 128))


@pytest.mark.parametrize("blocks", [2**15 + 1, 2**15 + 2, 50_001, 10**6, 10**8])
def test_sampled_blocks_of_large_tensors_are_evenly_spaced(blocks: int) -> None:
    runs = sampled_blocks(blocks * 128 + 77)
    assert sum(len(run) for run in runs) * 128 == distribution.MAX_WEIGHTS == 2**22
    assert runs[0].start == 0 and runs[-1].stop == blocks
    gaps = [second.start - first.stop for first, second in itertools.pairwise(runs)]
    assert min(gaps) >= 0 and max(gaps) - min(gaps) <= 1


# --- checkpoints ---


def expected_of(weights: np.ndarray) -> tuple[float, float, float, float]:
    """KS distance before and after the rotation, kurtosis before and after; blocks of zeros are left out."""
    blocks = weights.reshape(-1)[: weights.size // 128 * 128].reshape(-1, 128).astype(np.float64)
    blocks = blocks[blocks.any(axis=1)]
    unit = blocks / np.sqrt((blocks**2).sum(axis=1, keepdims=True))
    before, after = unit * math.sqrt(128), unit @ helpers.sylvester()
    return (
        exact_ks(before.reshape(-1)),
        exact_ks(after.reshape(-1)),
        float((before**4).mean()),
        float((after**4).mean()),
    )


HEAVY = (np.random.default_rng(2).standard_t(3, (64, 384)) * 0.02).astype(np.float32)


def some_checkpoint(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    weights = {
        "model.embed_tokens.weight": helpers.gaussian(50, 130, seed=1),  # the last block is not whole
        "model.layers.0.mlp.up_proj.weight": HEAVY,
        "model.layers.0.mlp.down_proj.weight": (HEAVY.T * 1e-30).astype(np.float32),
        "model.layers.1.mlp.up_proj.weight": (HEAVY[::-1] * 1e30).astype(np.float32),
        "model.layers.1.mlp.gate_proj.weight": np.where(np.arange(64 * 128).reshape(64, 128) < 4096, HEAVY[:, :128], 0),
    }
    tensors = {name: helpers.f32(values) for name, values in weights.items()}
    tensors["model.layers.1.mlp.down_proj.weight"] = helpers.f32(np.zeros((64, 128)))
    tensors["model.norm.weight"] = helpers.f32(np.ones(128))
    return helpers.write_checkpoint(folder, tensors, config={"model_type": "llama"}), weights


@pytest.mark.parametrize("threads", [1, 3])
def test_figures_of_a_checkpoint_match_an_explicit_computation(threads: int, tmp_path: Path) -> None:
    source, weights = some_checkpoint(tmp_path / "model")
    found = measure_distribution(source, threads=threads)
    by_name = {tensor.name: tensor for tensor in found.tensors}
    assert by_name.keys() == {*weights, "model.layers.1.mlp.down_proj.weight"}  # what the recipe q5 quantizes
    for name, values in weights.items():
        tensor = by_name[name]
        assert tensor.before is not None and tensor.after is not None
        ks_before, ks_after, kurtosis_before, kurtosis_after = expected_of(values)
        assert tensor.before.ks == pytest.approx(ks_before, abs=BOUND)
        assert tensor.after.ks == pytest.approx(ks_after, abs=BOUND)
        assert tensor.before.kurtosis == pytest.approx(kurtosis_before, rel=1e-6)
        assert tensor.after.kurtosis == pytest.approx(kurtosis_after, rel=1e-6)
        assert (tensor.weights, tensor.shape) == (values.size, values.shape)
    assert by_name["model.embed_tokens.weight"].sampled_weights == 50 * 128
    assert by_name["model.layers.1.mlp.gate_proj.weight"].sampled_weights == 4096
    zeros = by_name["model.layers.1.mlp.down_proj.weight"]
    assert (zeros.before, zeros.after, zeros.sampled_weights) == (None, None, 0)
    heavy = by_name["model.layers.0.mlp.up_proj.weight"]
    assert heavy.before is not None and heavy.after is not None
    assert heavy.before.ks > 5 * heavy.after.ks and heavy.before.kurtosis > 6 > 3.2 > heavy.after.kurtosis
    together = np.concatenate([v.reshape(-1)[: v.size // 128 * 128] for v in weights.values()])
    assert found.after is not None and found.before is not None
    assert found.before.ks == pytest.approx(expected_of(together)[0], abs=BOUND)
    assert found.after.ks == pytest.approx(expected_of(together)[1], abs=BOUND)
    assert found.histogram_before.sum() == found.histogram_after.sum() == found.sampled_weights


def test_gaussian_weights_follow_the_distribution_on_the_sphere(tmp_path: Path) -> None:
    """The square of a coordinate on the unit sphere has the distribution Beta(1/2, 127/2), as the command notes."""
    special = pytest.importorskip("scipy.special")
    x = np.linspace(-5, 5, 20_001)
    law = 0.5 + 0.5 * np.sign(x) * special.betainc(0.5, 63.5, x * x / 128)
    distance = np.abs(law - special.ndtr(x)).max()
    assert distance == pytest.approx(0.00108, abs=5e-6)
    weights = {"model.layers.0.mlp.up_proj.weight": helpers.f32(helpers.gaussian(8192, 256))}
    found = measure_distribution(helpers.write_checkpoint(tmp_path / "model", weights))
    for fit in (found.before, found.after):
        assert fit is not None
        assert fit.ks == pytest.approx(distance, abs=0.0012)  # of 2**21 coordinates
        assert fit.kurtosis == pytest.approx(3 * 128 / 130, abs=0.02)


def test_large_tensor_is_measured_on_the_sampled_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of chunks and the limit are lowered."""
    monkeypatch.setattr(distribution, "CHUNK_BLOCKS", 2)
    monkeypatch.setattr(distribution, "MAX_WEIGHTS", distribution.CHUNKS * 2 * 128)
    values = helpers.gaussian(100, 129, seed=8)
    source = helpers.write_checkpoint(tmp_path / "model", {"model.layers.0.mlp.up_proj.weight": helpers.f32(values)})
    (tensor,) = measure_distribution(source).tensors
    assert (tensor.weights, tensor.sampled_weights) == (12_900, 4096)
    blocks = values.reshape(-1)[: 100 * 128].reshape(-1, 128)
    chosen = np.concatenate([blocks[run.start : run.stop] for run in sampled_blocks(12_900)])
    assert tensor.before is not None and tensor.before.ks == pytest.approx(expected_of(chosen)[0], abs=BOUND)


def test_half_precision_sources_are_measured(tmp_path: Path) -> None:
    for make in (helpers.bf16, helpers.f16):
        stored = make(HEAVY)
        source = helpers.write_checkpoint(tmp_path / stored[0], {"model.layers.0.mlp.up_proj.weight": stored})
        (tensor,) = measure_distribution(source).tensors
        assert tensor.after is not None
        assert tensor.after.ks == pytest.approx(expected_of(helpers.as_float32(stored))[1], abs=BOUND)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_weight_is_named(bad: float, tmp_path: Path) -> None:
    values = HEAVY.copy()
    values[3, 5] = bad
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": helpers.f32(values if i == 4 else HEAVY) for i in range(9)}
    source = helpers.write_checkpoint(tmp_path / "model", tensors)
    with pytest.raises(SourceError, match=r"layers\.4\.mlp\.up_proj.*\[3, 5\]"):
        measure_distribution(source, threads=2)


# --- command ---


def test_command_prints_table_and_json(tmp_path: Path) -> None:
    source, weights = some_checkpoint(tmp_path / "model")
    shown = invoke("inspect", source, "--distribution")
    assert shown.exit_code == 0 and shown.stderr == ""
    assert all(name in shown.stdout for name in weights) and "at most 4194304 weights" in shown.stdout
    answered = invoke("inspect", source, "--distribution", "--json", "--threads", 2)
    assert answered.exit_code == 0 and answered.stderr == ""
    found = json.loads(answered.stdout)
    assert found == measure_distribution(source).to_json()
    assert found["recipe"] == "q5" and found["max_weights_per_tensor"] == 2**22
    assert {"name", "role", "weights", "sampled_weights", "before", "after"} <= found["tensors"][0].keys()
    assert set(found["after"]) == {"ks", "kurtosis"}


def test_master_is_refused(tmp_path: Path) -> None:
    source, _ = some_checkpoint(tmp_path / "model")
    assert invoke("quantize", source, tmp_path / "out").exit_code == 0
    for options in ([], ["--plot", tmp_path / "plot.svg"]):
        refused = invoke("inspect", tmp_path / "out", "--distribution", *options)
        assert refused.exit_code == 1 and refused.stdout == ""
        assert len(refused.stderr.splitlines()) == 1 and "master" in refused.stderr
    assert not (tmp_path / "plot.svg").exists()


def test_checkpoint_without_weights_to_quantize_has_no_figures(tmp_path: Path) -> None:
    source = helpers.write_checkpoint(tmp_path / "model", {"model.norm.weight": helpers.f32(np.ones(128))})
    found = measure_distribution(source)
    assert (found.tensors, found.before, found.after, found.sampled_weights) == ((), None, None, 0)
    assert invoke("inspect", source, "--distribution").exit_code == 0
