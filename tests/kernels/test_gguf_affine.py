"""GGUF's blocks of scales and offsets: the kernels against a numpy reference bit by bit, and against llama.cpp."""

from __future__ import annotations

import functools

import gguf_affine_reference
import numpy as np
import numpy.typing as npt
import pytest
from blocks import examples
from ggml_quantizer import ggml_blocks
from gguf_affine_reference import FORMATS
from hypothesis import given
from hypothesis import strategies as st

from pqweights.kernels.gguf_encoding import EncodedBlocks, encode_blocks, normalized_importance
from pqweights.kernels.gguf_searches import SEARCHES
from pqweights.kernels.gguf_types import BLOCK_TYPES

Floats = npt.NDArray[np.float32]

each_type = pytest.mark.parametrize("kind", FORMATS)
each_importance = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def decoded(kind: str, data: npt.NDArray[np.uint8]) -> Floats:
    """What the gguf package reads, [rows, 256]."""
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    values: Floats = quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return values.reshape(-1, 256)


@functools.cache
def families() -> dict[str, Floats]:
    """Weights [256, 256] of which much is known."""
    rng = np.random.default_rng(1)
    normal = (rng.standard_normal((256, 256)) * 0.02).astype(np.float32)
    outliers = normal.copy()
    outliers[:, 5::64] *= 20
    return {
        "normal": normal,
        "heavy tails": (rng.standard_t(4, (256, 256)) * 0.02).astype(np.float32),
        "outlier columns": outliers,
        "sparse": normal * (rng.random((256, 256)) < 0.1).astype(np.float32),
        "uniform": (rng.random((256, 256)) - 0.5).astype(np.float32),
        "tiny": normal * np.float32(1e-3),
    }


def of_blocks(kind: str, values: Floats) -> Floats:
    """The blocks of rows, [blocks, block size]."""
    return values.reshape(-1, BLOCK_TYPES[kind].block_size)


def same(a: EncodedBlocks, b: EncodedBlocks) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name != "data")
        for name in ("data", "energies", "errors")
    )


@each_type
@each_importance
def test_bytes_are_those_of_the_reference(kind: str, weighted: bool) -> None:
    values = gguf_affine_reference.hard_blocks()
    importance = gguf_affine_reference.some_importance(256) if weighted else None
    found = encode_blocks(kind, values, importance)
    factors = None if importance is None else np.tile(normalized_importance(importance, 256), (len(values), 1))
    expected = gguf_affine_reference.encode(kind, values, SEARCHES[kind], factors)
    np.testing.assert_array_equal(found.data, expected.data)
    np.testing.assert_array_equal(found.energies, expected.energies)
    np.testing.assert_array_equal(found.errors, expected.errors)


@each_type
@each_importance
def test_gguf_reads_values_of_the_reported_error(kind: str, weighted: bool) -> None:
    values = gguf_affine_reference.hard_blocks()
    found = encode_blocks(kind, values, gguf_affine_reference.some_importance(256) if weighted else None)
    read = decoded(kind, found.data)
    assert np.isfinite(read).all()
    wide, read = (of_blocks(kind, x).astype(np.float64) for x in (values, read))
    assert found.data.shape == (len(wide), BLOCK_TYPES[kind].block_bytes)
    np.testing.assert_allclose(found.energies, (wide**2).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.errors, ((wide - read) ** 2).sum(axis=1), rtol=1e-6, atol=1e-80)


@each_type
def test_weights_that_the_format_can_hold_hardly_change(kind: str) -> None:
    """Zeros, and every code with the largest integers."""
    form = FORMATS[kind]
    codes = np.tile(np.arange(form.part_size) % (form.last_code + 1), 256 // form.part_size)
    held = (codes - form.last_code // 2).astype(np.float32) * np.float32(form.last_level * 2.0**-14)
    values = np.stack([np.zeros(256, dtype=np.float32), -np.zeros(256, dtype=np.float32), held])
    found = encode_blocks(kind, values, None)
    assert not found.data[: 2 * 256 // form.block_size].any()
    assert (found.errors <= 1e-7 * found.energies).all()


@each_type
def test_constants_keep_the_accuracy_of_f16(kind: str) -> None:
    values = np.repeat(np.array([[0.5], [-1], [3], [-7e-3], [6e4]], dtype=np.float32), 256, axis=1)
    np.testing.assert_allclose(decoded(kind, encode_blocks(kind, values, None).data), values, rtol=2**-10)


@each_type
def test_weights_beyond_f16_saturate_and_tiny_ones_become_zero(kind: str) -> None:
    values = np.full((3, 256), 3e38, dtype=np.float32)
    values[1] *= -1
    values[2] = np.resize(np.array([1e-30, -1e-30, 1e-45], dtype=np.float32), 256)
    read = decoded(kind, encode_blocks(kind, values, None).data)
    form = FORMATS[kind]
    raised = 65504 if form.parts == 1 else 0  # by an offset that is not negative
    assert (read[0] == np.float32(65504 * form.last_level) * form.last_code + raised).all()
    assert (read[1] == -np.float32(65504 * form.last_level)).all()
    assert not read[2].any()


@each_type
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_energy_of_a_block_tells_whether_weights_are_finite(kind: str, bad: float) -> None:
    values = families()["normal"][:20].copy()
    values[3, 100] = bad
    found, clean = encode_blocks(kind, values, None), encode_blocks(kind, families()["normal"][:20], None)
    place = (3 * 256 + 100) // FORMATS[kind].block_size
    others = np.arange(len(found.data)) != place
    assert not np.isfinite(found.energies[place])
    np.testing.assert_array_equal(found.data[others], clean.data[others])
    np.testing.assert_array_equal(found.errors[others], clean.errors[others])


@each_type
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_blocks_that_are_not_finite_do_not_depend_on_their_neighbours(kind: str, bad: float) -> None:
    values = families()["normal"][:40].copy()
    values[::3, 100] = bad
    whole, part = encode_blocks(kind, values, None), encode_blocks(kind, values[7:], None)
    np.testing.assert_array_equal(part.data, whole.data[-len(part.data) :])


@each_type
@each_importance
@examples(15)
@given(first=st.integers(0, 40), count=st.integers(1, 40))
def test_blocks_do_not_depend_on_their_neighbours(kind: str, weighted: bool, first: int, count: int) -> None:
    values = gguf_affine_reference.hard_blocks()[:120].reshape(40, 768)
    importance = gguf_affine_reference.some_importance(768) if weighted else None
    whole = encode_blocks(kind, values, importance)
    part = encode_blocks(kind, values[first : first + count], importance)
    row_blocks = 768 // FORMATS[kind].block_size
    chosen = slice(row_blocks * first, row_blocks * (first + count))
    expected = EncodedBlocks(data=whole.data[chosen], energies=whole.energies[chosen], errors=whole.errors[chosen])
    assert same(part, expected)


@each_type
def test_no_rows_give_no_blocks(kind: str) -> None:
    assert encode_blocks(kind, np.empty((0, 512), dtype=np.float32), None).data.shape[0] == 0


# --- importance ---


@each_type
def test_importance_moves_error_to_columns_that_count_less(kind: str) -> None:
    values, importance = families()["normal"], np.random.default_rng(3).lognormal(0, 2, 256).astype(np.float32)
    errors = [
        float(((values - decoded(kind, encode_blocks(kind, values, weights).data)) ** 2 @ importance).sum())
        for weights in (None, importance)
    ]
    assert errors[1] < 0.85 * errors[0]


@each_type
def test_importance_counts_at_any_scale(kind: str) -> None:
    values, importance = families()["heavy tails"], gguf_affine_reference.some_importance(256)
    found = encode_blocks(kind, values, importance)
    for power in (-60, 60):
        assert same(found, encode_blocks(kind, values, np.ldexp(importance, power)))


@each_type
def test_importance_of_0_everywhere_is_none(kind: str) -> None:
    values = families()["normal"][:5]
    assert same(encode_blocks(kind, values, np.zeros(256, dtype=np.float32)), encode_blocks(kind, values, None))


def test_what_does_not_fit_is_an_error() -> None:
    values = np.zeros((2, 512), dtype=np.float32)
    with pytest.raises(ValueError, match="320 columns are not a multiple of 256"):
        encode_blocks("Q4_K", np.zeros((2, 320), dtype=np.float32), None)
    with pytest.raises(ValueError, match="80 columns are not a multiple of 32"):
        encode_blocks("Q5_1", np.zeros((2, 80), dtype=np.float32), None)
    with pytest.raises(ValueError, match="expected the importance of 512 columns"):
        encode_blocks("Q4_K", values, np.ones(256, dtype=np.float32))
    for bad in (np.nan, np.inf, -1.0):
        importance = np.ones(512, dtype=np.float32)
        importance[7] = bad
        with pytest.raises(ValueError, match="finite and not negative"):
            encode_blocks("Q4_K", values, importance)
    with pytest.raises(ValueError, match="elements of float32 without gaps"):
        encode_blocks("Q4_K", values.astype(np.float64), None)


# --- quality ---


def plainly_rounded(kind: str, values: Floats) -> Floats:
    """Each part by its smallest and largest weight, then d and dmin by the largest scale and offset."""
    form = FORMATS[kind]
    parts = values.reshape(len(values), -1, form.part_size)
    low, high = parts.min(axis=2), parts.max(axis=2)
    if form.parts == 1:
        d, m = (x.astype(np.float16).astype(np.float32)[:, :, None] for x in ((high - low) / form.last_code, low))
        whole: Floats = np.clip(np.rint((parts - m) / np.maximum(d, 1e-30)), 0, form.last_code) * d + m
        return whole.reshape(values.shape)
    low = np.minimum(low, 0)
    stored = []
    for numbers in ((high - low) / form.last_code, -low):
        unit = (numbers.max(axis=1, keepdims=True) / form.last_level).astype(np.float16).astype(np.float32)
        stored.append(np.clip(np.rint(numbers / np.maximum(unit, 1e-30)), 0, form.last_level) * unit)
    scale, offset = (each[:, :, None] for each in stored)
    codes = np.clip(np.rint((parts + offset) / np.maximum(scale, 1e-30)), 0, form.last_code)
    result: Floats = (codes * scale - offset).reshape(values.shape)
    return result


def relative_error(values: Floats, read: Floats, importance: Floats | None = None) -> float:
    weights = np.ones(256) if importance is None else importance.astype(np.float64)
    wide = values.astype(np.float64)
    return float(((wide - read) ** 2 @ weights).sum() / (wide**2 @ weights).sum())


@each_type
@pytest.mark.parametrize("family", families())
def test_error_is_far_below_that_of_rounding(kind: str, family: str) -> None:
    values = families()[family]
    found = relative_error(values, decoded(kind, encode_blocks(kind, values, None).data))
    assert found < 0.85 * relative_error(values, plainly_rounded(kind, values))


@each_type
@pytest.mark.parametrize("family", families())
@each_importance
def test_error_is_below_that_of_llama_cpp(kind: str, family: str, weighted: bool) -> None:
    """Its quantizer without importance, and the one that it uses with an importance matrix."""
    values = families()[family]
    importance = np.random.default_rng(3).lognormal(0, 1, 256).astype(np.float32) if weighted else None
    theirs = ggml_blocks(kind, values, importance)
    found = relative_error(values, decoded(kind, encode_blocks(kind, values, importance).data), importance)
    most = {"Q5_K": 0.93, "Q4_K": 0.96, "Q2_K": 0.96, "Q5_1": 0.98, "Q4_1": 0.98}[kind]
    assert found < most * relative_error(values, decoded(kind, theirs), importance)
