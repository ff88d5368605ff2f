"""Distributions of keys and values: Gaussian vectors pass, structured ones fail before the rotation, exact figures."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from key_value_states import HALVES, HEADS, SIZE, TOKENS, gaussian, layer_of, model_of, structured, with_circle

from pqweights.common.documents import as_json
from pqweights.inference.kv.polar_rope import RopePairs
from pqweights.quality.measure.kv_channels import OUTLIER, measure_channels
from pqweights.quality.measure.kv_distribution import (
    ANGLE_BINS,
    COARSE_BINS,
    KEYS,
    VALUES,
    AngleFit,
    KVDistribution,
    StatesDistribution,
    angle_edges,
    distribution_of,
    random_radius_cv,
)

torch = pytest.importorskip("torch")
special = pytest.importorskip("scipy.special")
stats = pytest.importorskip("scipy.stats")


def measured(keys: object, values: object) -> KVDistribution:
    return distribution_of(model_of(layer_of(keys, values)))


def worst(fits: tuple[AngleFit, ...]) -> float:
    """The largest total variation of a level over what chance explains."""
    return max(fit.total_variation / fit.by_chance for fit in fits)


def assert_random(side: object, count: int) -> None:
    """Check that vectors are as close to random directions as so many can be."""
    assert side.coordinates.ks < 0.0022 + 2 / math.sqrt(count * SIZE)  # type: ignore[attr-defined]
    assert side.coordinates.kurtosis == pytest.approx(3 * SIZE / (SIZE + 2), abs=0.06)  # type: ignore[attr-defined]
    assert worst(side.angles) < 1.6  # type: ignore[attr-defined]
    assert side.radius_cv == pytest.approx(random_radius_cv(SIZE), rel=0.05)  # type: ignore[attr-defined]


def law(level: int, angles: np.ndarray) -> np.ndarray:
    """The probability of angles up to some, by way of the Beta distribution of the squared sine."""
    size = 2 ** (level - 1)
    return angles / (2 * math.pi) if level == 1 else special.betainc(size / 2, size / 2, np.sin(angles) ** 2)


def test_gaussian_vectors_follow_all_laws_before_and_after() -> None:
    found = measured(gaussian(1), gaussian(2))
    for figures in (*found.layers, *found.totals):
        assert figures.vectors == HEADS * TOKENS and figures.sizes == (SIZE,)
        assert figures.norm_cv == pytest.approx(1 / math.sqrt(2 * SIZE), rel=0.1)
        for side in (figures.before, figures.after):
            assert_random(side, HEADS * TOKENS)
    (channels,) = found.channels
    assert channels.outlier_channels == 0 and channels.outliers == () and channels.largest < 1.5


def test_structured_vectors_follow_the_laws_only_after_the_rotation() -> None:
    """All but that of level 1: a Hadamard matrix correlates the coordinates of all its pairs alike."""
    found = measured(structured(1), gaussian(2))
    keys, values = found.layers
    assert worst(keys.before.angles[1:]) > 7 and worst(keys.after.angles[1:]) < 2
    assert all(fit.total_variation > 0.1 for fit in keys.before.angles)
    assert keys.before.coordinates is not None and keys.after.coordinates is not None
    assert keys.before.coordinates.ks > 5 * keys.after.coordinates.ks
    assert keys.before.coordinates.kurtosis > 6 > 3.2 > keys.after.coordinates.kurtosis
    assert keys.before.radius_cv is not None and keys.after.radius_cv is not None
    assert keys.before.radius_cv > 2 * keys.after.radius_cv
    assert_random(values.before, HEADS * TOKENS)


def test_distances_of_angles_are_exact() -> None:
    """Those of vectors whose angles are known, against the law in closed form."""
    vectors = structured(7)
    found = measured(vectors, vectors).layers[0].before.angles
    radii = vectors.numpy().astype(np.float64)
    for level, fit in enumerate(found, 1):
        first, second = radii[..., 0::2], radii[..., 1::2]
        angles = (np.arctan2(second, first) % (2 * math.pi)).flatten()
        radii = np.hypot(first, second)
        assert fit.ks == pytest.approx(stats.kstest(angles, lambda x, at=level: law(at, x)).statistic, abs=6e-4)
        edges = angle_edges(level)[:: ANGLE_BINS // COARSE_BINS]
        difference = np.histogram(angles, edges)[0] / len(angles) - np.diff(law(level, edges))
        assert fit.total_variation == pytest.approx(np.abs(difference).sum() / 2, abs=1e-4)


def test_total_variation_by_chance() -> None:
    fits = [measured(gaussian(seed), gaussian(seed + 50)).layers[0].before.angles for seed in range(12)]
    for level in range(4):
        mean = np.mean([each[level].total_variation for each in fits])
        assert mean == pytest.approx(fits[0][level].by_chance, rel=0.12)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_figures_of_random_directions(size: int) -> None:
    """Those that the command names: a share of the squared norm has a Beta distribution."""
    share = stats.beta(8, size / 2 - 8) if size > 16 else None
    if share is None:
        assert random_radius_cv(size) == 0
    else:
        mean = share.expect(np.sqrt)
        assert random_radius_cv(size) == pytest.approx(math.sqrt(16 / size / mean**2 - 1), rel=1e-6)
    x = np.linspace(0, math.sqrt(size), 20_001)
    below = 0.5 + 0.5 * special.betainc(0.5, (size - 1) / 2, np.minimum(1, x * x / size))
    assert np.abs(below - special.ndtr(x)).max() == pytest.approx(0.138 / size, rel=0.04)


def test_layers_are_added_up() -> None:
    layers = [layer_of(structured(n), gaussian(n + 9), layer=n) for n in (0, 1, 3)]
    found = distribution_of(model_of(*layers))
    assert [(each.kind, each.layer) for each in found.layers] == [
        (kind, n) for n in (0, 1, 3) for kind in (KEYS, VALUES)
    ]
    joined = measured(torch.cat([each.keys for each in layers]), torch.cat([each.values for each in layers]))
    for total, expected in zip(found.totals, joined.layers, strict=True):
        assert as_json(total) == {**as_json(expected), "layer": None} | approximately(total, expected)
    for kind in (KEYS, VALUES):
        for mine, other in zip(found.histograms[kind], joined.histograms[kind], strict=True):
            assert (mine.coordinates == other.coordinates).all() and (mine.angles == other.angles).all()


def approximately(total: StatesDistribution, expected: StatesDistribution) -> dict[str, object]:
    """What sums in another order changes in its last digits."""
    assert total.norm_cv == pytest.approx(expected.norm_cv, rel=1e-12)
    sides = {}
    for name in ("before", "after"):
        mine, other = getattr(total, name), getattr(expected, name)
        assert mine.coordinates.kurtosis == pytest.approx(other.coordinates.kurtosis, rel=1e-9)
        assert mine.radius_cv == pytest.approx(other.radius_cv, rel=1e-9)
        assert (mine.coordinates.ks, mine.angles) == (other.coordinates.ks, other.angles)
        sides[name] = as_json(mine)
    return {"norm_cv": total.norm_cv, **sides}


def test_norms_vary_by_head() -> None:
    """The sizes of whole heads do not count, those of tokens do."""
    keys = torch.nn.functional.normalize(gaussian(1), dim=-1) * torch.tensor([1.0, 100.0])[:, None, None]
    assert measured(keys, keys).totals[0].norm_cv == pytest.approx(0, abs=1e-6)
    keys[:, ::2] *= 3  # half of the tokens are 1, half are 3
    assert measured(keys, keys).totals[0].norm_cv == pytest.approx(0.5, abs=1e-6)


def test_vectors_of_zeros_are_left_out() -> None:
    keys = gaussian(1)
    keys[0, 10:30] = 0
    keys[1] = 0
    found = measured(keys, torch.zeros_like(keys))
    assert found.layers[0].vectors == TOKENS - 20
    assert found.layers[1].vectors == 0 and found.layers[1].before.coordinates is None
    assert found.layers[1].before.angles == () and found.layers[1].norm_cv == 0
    (channels,) = found.channels
    assert (channels.magnitudes[1] == 0).all() and math.isfinite(channels.largest)
    json.dumps(found.to_json(), allow_nan=False)


def test_sizes_that_the_transform_does_not_take_have_no_angles() -> None:
    layer = layer_of(gaussian(1, 40), gaussian(2), pairs=RopePairs(40, 40, interleaved=False))
    keys, values = distribution_of(model_of(layer)).layers
    assert keys.before.angles == () and keys.after.radius_cv is None and keys.after.coordinates is not None
    assert len(values.before.angles) == 4


# --- channels of keys ---


@pytest.mark.parametrize(
    ("pairs", "channels"),
    [
        (HALVES, (5, 37)),
        (RopePairs(SIZE, SIZE, interleaved=True), (10, 11)),
        (RopePairs(SIZE, 32, interleaved=False), (5, 21)),
    ],
)
def test_planted_circle_of_outliers_is_found(pairs: RopePairs, channels: tuple[int, int]) -> None:
    found = measure_channels(layer_of(with_circle(pairs), gaussian(2), layer=4, pairs=pairs))
    pair = found.strongest
    assert pair is not None and found.outliers == (pair,) and found.outlier_channels == pair.outliers == 2
    assert (pair.layer, pair.head, pair.channels) == (4, 1, channels)
    # The mean of |cos| is 2 / pi, as the mean of |x| of normal numbers is sqrt(2 / pi).
    assert pair.magnitudes == pytest.approx([12 * (2 / math.pi) / math.sqrt(2 / math.pi)] * 2, rel=0.05)
    assert pair.radius_cv == pytest.approx(0.02, rel=0.1) and pair.direction < 0.01
    assert pair.coordinate_cvs == pytest.approx([math.sqrt(math.pi**2 / 8 - 1)] * 2, abs=0.01)
    threshold = OUTLIER * math.sqrt(2 / math.pi) / 12
    assert pair.alone == pytest.approx(4 / math.pi * math.asin(threshold), abs=0.02)
    # Of the other pairs, radii have a Rayleigh distribution.
    assert found.radius_cv == pytest.approx(math.sqrt(4 / math.pi - 1), rel=0.03)


def test_outlier_in_one_channel_of_a_pair() -> None:
    keys = gaussian(1)
    keys[0, :, 40] += 9
    found = measure_channels(layer_of(keys, gaussian(2)))
    pair = found.strongest
    assert pair is not None and found.outliers == (pair,)
    assert pair.channels == (8, 40) and pair.outliers == found.outlier_channels == 1
    assert pair.magnitudes[0] < 1.3 < OUTLIER < pair.magnitudes[1] and pair.direction > 0.95
    assert pair.alone is not None and pair.alone > 0.98


def test_keys_with_the_largest_channel_are_kept_for_the_plot() -> None:
    layers = [layer_of(gaussian(1), gaussian(2)), layer_of(with_circle(), gaussian(2), layer=7)]
    layer, head, keys = distribution_of(model_of(*layers)).strongest_keys
    assert (layer, head) == (7, 1) and (keys == with_circle()[1].numpy()).all()


def test_model_without_rope_has_no_pairs() -> None:
    found = measure_channels(layer_of(with_circle(), gaussian(2), pairs=None))
    assert found.strongest is None and found.outliers == () and found.radius_cv is None
    assert found.outlier_channels == 2 and found.largest > OUTLIER


def test_progress_counts_layers() -> None:
    seen: list[tuple[int, int, str]] = []
    layers = [layer_of(gaussian(n), gaussian(n), layer=n) for n in (2, 5)]
    distribution_of(model_of(*layers), progress=lambda *step: seen.append(step))
    assert seen == [(0, 2, "layer 2"), (1, 2, "layer 5"), (2, 2, "")]
